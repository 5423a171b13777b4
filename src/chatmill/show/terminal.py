"""A row in the terminal: one line a span, trained ones marked, text made harmless."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from chatmill.errors import one_line
from chatmill.rows import NO_FILE, NO_MESSAGE, OWN_ID, Part, Role, Rows, Rule
from chatmill.tokenizer import Tokenizer

COLOURS = {Role.SYSTEM: "magenta", Role.USER: "cyan", Role.ASSISTANT: "green", Role.TOOL: "yellow"}
# Of a rollout: what the model wrote, what of that is corrected, and what it missed.
PART_COLOURS = {Part.PREFIX: "blue", Part.SLOT: "yellow", Part.VALUE: "bright_green", Part.COORD: "magenta"}


def row_title(rows: Rows, row: int) -> str:
    """Where the row came from, how long it is and how much of it is trained."""
    one = rows[row : row + 1]
    origin = one.origins[0]
    place = "-" if origin["file"] == NO_FILE else f"{one_line(one.files[origin['file']].path)}:{origin['line']}"
    trained = int(one.spans["length"][one.spans["weight"] > 0].sum())
    return f"{place}  {len(one.ids)} tokens, {trained} trained"


def span_lines(rows: Rows, row: int, tokenizer: Tokenizer, *, width: int = 100) -> Iterator[Text]:
    """One line for each span: a star if it is trained, who speaks, which part, why, and its text.

    * 1 assistant content  role     Paris.
    """
    one = rows[row : row + 1]
    for span, start, stop in zip(one.spans, one.span_start[:-1], one.span_start[1:], strict=True):
        role, weight = Role(span["role"]), float(span["weight"])
        mark = " " if weight == 0 else "*" if weight == 1 else f"{weight:g}"
        number = "-" if span["message"] == NO_MESSAGE else str(span["message"])
        what = f"{role.name:<9} {Part(span['part']).name:<9} {Rule(span['rule']).name:<10}".lower()
        text = one_line(tokenizer.decode(one.ids[start:stop].tolist()), width)
        if span["target"] != OWN_ID:
            text += f" → {one_line(tokenizer.decode([int(span['target'])]))}"
        colour = PART_COLOURS.get(Part(span["part"]), COLOURS.get(role, "") if weight > 0 else "")
        style = f"{'bold' if weight > 0 else 'dim'} {colour}".strip()
        yield Text(f"  {mark:>4} {number:>2} {what} ").append(text, style=style)
