"""Print rows in the terminal by span, turn or token. Trained text is colored or in brackets.

user 0
  <|im_start|>user
  What is the chemical symbol for gold?<|im_end|>
assistant 1
  <|im_start|>assistant
  [The symbol for gold is Au.<|im_end|>]
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from chatmill.errors import one_line
from chatmill.rows import Part, Role, Rows
from chatmill.show.row_view import (
    MessageTurn,
    SpanView,
    is_padding,
    place_name,
    span_views,
    trained_tokens,
    turn_name,
    turns,
)
from chatmill.show.text import TokenText
from chatmill.tokenizer import Tokenizer

COLOURS = {Role.SYSTEM: "magenta", Role.USER: "cyan", Role.ASSISTANT: "green", Role.TOOL: "yellow"}
PART_COLOURS = {Part.PREFIX: "blue", Part.SLOT: "yellow", Part.VALUE: "bright_green", Part.COORD: "magenta"}
"""Colors for parts of a rollout target: generated text, corrected coordinates, and appended entries."""
INDENT = "  "


def _style(span: SpanView) -> str:
    colour = PART_COLOURS.get(span.part, COLOURS.get(span.role, "") if span.weight > 0 else "")
    italic = "italic " if span.part == Part.INJECTED else ""
    return f"{'bold' if span.weight > 0 else 'dim'} {italic}{colour}".strip()


def span_lines(rows: Rows, row: int, tokenizer: Tokenizer, *, width: int = 100) -> Iterator[Text]:
    """Yield one line for each span: a star if it is trained, its message, role, part, rule and text.

    * 1 assistant content  role     Paris.
    """
    one = rows[row : row + 1]
    for span in span_views(one):
        text = one_line(tokenizer.decode(one.ids[span.start : span.stop].tolist()), width)
        if span.target is not None:
            text += f" → {one_line(tokenizer.decode([span.target]))}"
        yield Text(f"  {span.mark:>4} {_names(span, 2)} ").append(text, style=_style(span))


def token_lines(row: Rows, text: TokenText) -> Iterator[Text]:
    """Yield one line for each token: a star if it is trained, its index, id, message, role, part, rule and text."""
    for span in span_views(row):
        target = "" if span.target is None else f" → {span.target} {text.token(span.target)}"
        for token, id in enumerate(row.ids[span.start : span.stop].tolist(), span.start):
            line = Text(f"{span.mark:>4} {token:>6} {id:>7} {_names(span, 3)} ")
            yield line.append(text.token(id) + target, style=_style(span))


def _names(span: SpanView, width: int) -> str:
    message = "-" if span.message is None else str(span.message)
    return f"{message:>{width}} {span.role.name:<9} {span.part.name:<9} {span.rule.name:<10}".lower()


def conversation_title(row: Rows, split: str, episode: int, *, unrolled: bool = False) -> Text:
    trained = trained_tokens(row)
    share = f" ({trained / len(row.ids):.0%})" if len(row.ids) else ""
    place = place_name(row, unrolled=unrolled)
    return Text(f"{split} {episode}  {place}  {len(row.ids):,} tokens, {trained:,} trained{share}", style="bold")


def conversation_lines(row: Rows, text: TokenText, *, plain: bool, unrolled: bool = False) -> Iterator[Text]:
    """Yield the lines that show an episode turn by turn.

    If `plain` is true, trained text is in brackets, and brackets in the text are escaped.
    """
    count = len(row.origins)
    for segment in range(count):
        tokens = int(row.segment_start[segment + 1] - row.segment_start[segment])
        if is_padding(row, segment):
            yield Text(f"── padding: {tokens:,} tokens", style="dim")
            continue
        if count > 1:
            place = place_name(row, segment, unrolled=unrolled)
            yield Text(f"── segment {segment} of {count}: {place}, {tokens:,} tokens", style="dim")
        for turn in turns(row, segment):
            if turn.missing is not None:
                first, last = turn.missing
                several = f"… messages {first} to {last} are not in this row"
                note = f"… message {first} is not in this row" if first == last else several
                yield Text(note, style="dim italic")
            yield _heading(turn, turn_name(row, turn, text))
            body = _body(row, turn, text, plain=plain)
            # Strip the newline that ends a turn in many formats, because it would be shown as an empty line.
            body.rstrip()
            for line in body.split("\n", allow_blank=True):
                yield Text(INDENT).append_text(line)


def _heading(turn: MessageTurn, name: str) -> Text:
    heading = Text(name, style=f"bold {COLOURS.get(turn.role, '')}".strip())
    for note in turn.notes:
        heading.append(f"  {note}", style="dim italic")
    return heading


def _body(row: Rows, turn: MessageTurn, text: TokenText, *, plain: bool) -> Text:
    """Return the text of a turn.

    Adjacent spans with the same weight are in one pair of brackets; a weight other than 1 is shown after the brackets.
    """
    body, weight = Text(), 0.0

    def close_bracket() -> None:
        if plain and weight:
            body.append("]" if weight == 1 else f"]×{weight:g}")

    for span in span_views(row, turn.first_span, turn.last_span):
        content = text.text(row.ids[span.start : span.stop].tolist(), keep="\n\t")
        if span.target is not None:
            content += f"→{text.token(span.target)}"
        if plain:
            content = content.replace("[", r"\[").replace("]", r"\]")
        if span.weight != weight:
            close_bracket()
            weight = span.weight
            body.append("[" if plain and weight else "")
        body.append(content, style=_style(span))
    close_bracket()
    return body
