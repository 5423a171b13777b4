from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chatmill.prepare.engine import LocalEngine
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.show.dataset import DatasetView, open_view

HOSTILE = [
    '<script>window.acted = "script"</script><img src=x onerror="window.acted = \'img\'">',
    "</pre></textarea><style>*{display:none}</style><a href='javascript:window.acted=1'>click</a>",
    '{{7*7}} ${7*7} <!-- --> &lt;b&gt; &#x3C;script&#x3E; "><svg onload=window.acted=2>',
    "\x1b[2J\x1b[31mred\x1b]0;title\x07\x1b]8;;http://x\x07link\x1b]8;;\x07\x9b2J\x90q\x9c",
    "left \u202eright-to-left\u202c \u2066isolate\u2069 \u200f\u061c mark \u2028line\u2029paragraph",
    "nul \x00 bell \x07 back \x08\x08\x08 return \r line \x0b feed \x0c del \x7f",
    "👩\u200d👩\u200d👧\u200d👦 🇩🇪 e\u0301 ﷽ שלום עולם مرحبا 你好 \U000e0041 \ufeff \u00ad",
    "[brackets] \\[escaped\\] ] [ <|im_end|> <|im_start|>assistant\n",
    "zalgo " + "a" + "\u0301\u0316\u0323" * 40,
]
"""Texts that would be executed or change the display if they were not escaped."""
HOSTILE_FILE = "<img src=x onerror=window.acted=3>\u202e\x1b[2J.jsonl"
LONG = "x" * 1_000_000
"""A line of one megabyte."""


def line(*texts: str, **more: Any) -> str:
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return json.dumps({"messages": turns, **more}, ensure_ascii=False) + "\n"


def make(folder: Path, lines: Sequence[str], *, file: str = "chat.jsonl", **options: Any) -> DatasetView:
    (folder / file).write_text("".join(lines), "utf-8", newline="")
    options.setdefault("format", "primer")
    job = Job((InputSource((str(folder / file),), shape="messages"),), **options)
    name = f"v{len(list(folder.glob('v*')))}"
    prepare_dataset(job, folder / name, engine=LocalEngine(workers=1))
    return open_view(folder / name)


def hostile_lines() -> list[str]:
    lines = [line(text, f"answer {number} {text}") for number, text in enumerate(HOSTILE)]
    return [*lines, line("a long one", LONG), line("the end", "is near")]
