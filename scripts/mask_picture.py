"""Draw docs/mask.svg, which shows the tokens of a two-turn chat and highlights the trained tokens.

python scripts/mask_picture.py --write    write docs/mask.svg
python scripts/mask_picture.py --check    exit 1 if docs/mask.svg is out of date
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from html import escape
from pathlib import Path

import numpy as np

from chatmill import Message, Record, load_format, open_renderer, read_records
from chatmill.format import record_texts
from chatmill.show import TokenText
from chatmill.tokenizer import train_bpe

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "mask.svg"
CHAT = [
    Message("user", "What is the chemical symbol for gold?"),
    Message("assistant", "The symbol for gold is Au."),
    Message("user", "What is 22 + 3?"),
    Message("assistant", "22 + 3 = 25."),
]
WIDTH, LINE, LEFT, TOP, CHARACTER, GAP = 860, 44, 118, 66, 8.45, 5
STYLE = """\
  .card { fill: #ffffff; stroke: #d0d7de } .role { fill: #57606a } .text { fill: #57606a }
  .context { fill: none; stroke: #d0d7de } .trained { fill: #b7e4c7; stroke: #2d6a4f } .answer { fill: #081c15 }
  text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace }
  @media (prefers-color-scheme: dark) {
    .card { fill: #161b22; stroke: #30363d } .role { fill: #9198a1 } .text { fill: #9198a1 }
    .context { stroke: #3d444d } .trained { fill: #1b4332; stroke: #52b788 } .answer { fill: #d8f3dc }
  }"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write docs/mask.svg")
    action.add_argument("--check", action="store_true", help="exit 1 if docs/mask.svg is out of date")
    args = parser.parse_args()
    drawn = picture(*rendered_messages())
    if args.write:
        PICTURE.write_text(drawn, "utf-8")
    elif PICTURE.read_text("utf-8") != drawn:
        print("docs/mask.svg: out of date; run scripts/mask_picture.py --write", file=sys.stderr)
        return 1
    return 0


def rendered_messages() -> tuple[list[list[tuple[str, bool]]], int, int]:
    """Return the tokens of each message as (text, is_trained), the number of tokens, and how many are trained."""
    texts = [text for record in read_records(ROOT / "data/conversations.jsonl") for text in record_texts(record)]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder, "tokenizer.json")
        tokenizer.write_bytes(train_bpe(texts, vocab_size=1000, control=load_format("chatml").tokens.values()))
        renderer = open_renderer("chatml", str(tokenizer))
        rows = renderer.render([Record(CHAT)])
        tokens = TokenText(renderer.tokenizer).tokens(rows.ids.tolist())
    mask, message = rows.mask(), rows.per_token(rows.spans["message"])
    messages = [
        [(tokens[token], bool(mask[token])) for token in np.flatnonzero(message == number)]
        for number in range(len(CHAT))
    ]
    return messages, len(tokens), int(mask.sum())


def picture(messages: list[list[tuple[str, bool]]], tokens: int, trained: int) -> str:
    height = TOP + LINE * len(messages) + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title">',
        f'<title id="title">A chat of two turns: {trained} of {tokens} tokens are trained.</title>',
        f"<style>\n{STYLE}\n</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        *legend(tokens, trained),
    ]
    for number, pieces in enumerate(messages):
        y = TOP + LINE * number
        lines.append(f'<text class="role" x="{LEFT - 14}" y="{y + 20}" text-anchor="end">{CHAT[number].role}</text>')
        x = float(LEFT)
        for text, is_trained in pieces:
            width = CHARACTER * len(text) + 8
            lines += token_box(x, y, width, text, is_trained)
            x += width + GAP
    return "\n".join([*lines, "</svg>", ""])


def legend(tokens: int, trained: int) -> list[str]:
    return [
        *token_box(LEFT, 16, CHARACTER * 7 + 8, "trained", True),
        f'<text class="text" x="{LEFT + 78}" y="36">loss is computed: {trained} of {tokens} tokens</text>',
        *token_box(LEFT + 400, 16, CHARACTER * 7 + 8, "context", False),
        f'<text class="text" x="{LEFT + 478}" y="36">label is -100</text>',
    ]


def token_box(x: float, y: float, width: float, text: str, is_trained: bool) -> list[str]:
    box, label = ("trained", "answer") if is_trained else ("context", "text")
    place = f'x="{x + 4:.1f}" y="{y + 20}" textLength="{width - 8:.1f}" xml:space="preserve"'
    return [
        f'<rect class="{box}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="30" rx="4"/>',
        f'<text class="{label}" {place}>{escape(text)}</text>',
    ]


if __name__ == "__main__":
    sys.exit(main())
