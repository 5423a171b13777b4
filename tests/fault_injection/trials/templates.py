"""Hostile chat templates: they loop, grow, pry and break down. One line each, in time, and nothing gets out."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from hostile_templates import CONTROL, ENDLESS, FAILING, GOOD, PROMPT, PRYING
from record_mutations import broken_bytes

from chatmill.errors import ChatmillError
from chatmill.format import open_renderer
from chatmill.records import Message, Record
from chatmill.tokenizer import train_bpe
from fault_injection.processes import apart, limited
from fault_injection.trial import Tally, Trial

TALK = Record([Message("user", "Hi"), Message("assistant", "Hello.")], file="chat.jsonl", line=7)
TEXT = "<|user|>Hi<|end|><|assistant|>Hello.<|end|>"
CPU_SECONDS, MEMORY = 60.0, 1 << 30
SECRET = re.compile(r"<class|<function|<bound method|<built-in|<module|object at 0x|<slot wrapper|uid=\d")
"""What no template can write from a conversation alone."""


def source(number: int, rng: random.Random) -> tuple[str, bool]:
    """A template, and whether it must be refused; the others are good ones whose bytes were broken."""
    bad = [*PRYING, *FAILING, *ENDLESS]
    if number < len(bad):
        # What a template may not see is refused, or nothing at all to it.
        return f"{GOOD}{PROMPT}\n{bad[number]}", number >= len(PRYING)
    if number % 2:
        one, other = rng.choice(PRYING), rng.choice(FAILING)
        return f"{GOOD}{PROMPT}\n{{% if messages | length > {rng.randrange(2)} %}}{one}{other}{{% endif %}}", True
    return broken_bytes((GOOD + PROMPT).encode(), rng).decode(errors="replace"), False


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    rng = random.Random(seed)
    folder = folder / "own"
    folder.mkdir()
    texts = ["The quick brown fox. " * 9]
    # Training starts threads, and this process forks.
    made = apart(lambda: (folder / "tokenizer.json").write_bytes(train_bpe(texts, vocab_size=300, control=CONTROL)))
    assert made.value, made
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    order = list(range(len([*PRYING, *FAILING, *ENDLESS])))
    # A small run takes some of each kind.
    chosen = [*order, *range(len(order), size)] if size > len(order) else order[:: max(1, len(order) // size)][:size]
    for number in chosen:
        written, is_bad = source(number, rng)
        (folder / "chat_template.jinja").write_text(written)

        def use() -> Any:
            format = open_renderer("template", str(folder))
            rows = format.render([TALK])
            rows.check()
            if (text := format.tokenizer.decode(rows.ids.tolist())) != format.text(TALK):
                raise AssertionError(f"the ids say {text!r}, the template {format.text(TALK)!r}")
            return text

        ended, what = (
            apart(limited(use, MEMORY), cpu_seconds=CPU_SECONDS),
            repr(written.removeprefix(GOOD + PROMPT))[:200],
        )
        said = ended.value or ended.refused
        if SECRET.search(said or ""):
            tally.is_wrong(f"{what}: it got out: {said[:200]}")
        elif is_bad and ended.value is not None:
            tally.is_wrong(f"{what}: it was let through: {ended.value[:200]}")
        elif ended.value is not None and "Hello." not in ended.value:
            tally.is_wrong(f"{what}: the answer is not in what is trained on: {ended.value[:200]}")
        else:
            lost = f"{what}: {ended.broke or 'killed'}"
            tally.judge(survived=ended.value is not None, found=bool(ended.refused), lost=lost)
    (folder / "chat_template.jinja").write_text(GOOD + PROMPT)
    if (text := open_renderer("template", str(folder)).text(TALK)) != TEXT:
        raise ChatmillError(f"the good template writes {text!r}")


TRIAL = Trial(
    "hostile chat templates",
    "templates that loop, grow, pry out of the sandbox, break down, or have broken bytes, with 60 s of processor time "
    "and 1 GiB each: refused in one line, and never let through or out",
    work,
    full=500,
    short=16,
    in_memory=True,
)
