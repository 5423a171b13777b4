"""A whole episode in the terminal: turns one below the other, what is trained in colour, or in brackets if plain.

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

from chatmill.rows import NO_MESSAGE, OWN_ID, Part, Role, Rows, Rule
from chatmill.show.explain import origin_of
from chatmill.show.terminal import COLOURS, PART_COLOURS
from chatmill.show.text import TokenText, visible
from chatmill.show.turns import MessageTurn, is_padding, turns

INDENT = "  "


def title(row: Rows, split: str, episode: int) -> Text:
    """Which episode this is, where it came from, its length and how much of it is trained."""
    trained = int(row.spans["length"][row.spans["weight"] > 0].sum())
    share = f" ({trained / len(row.ids):.0%})" if len(row.ids) else ""
    count = len(row.origins)
    place = place_name(row, 0) if count == 1 else f"{count} segments"
    return Text(f"{split} {episode}  {place}  {len(row.ids):,} tokens, {trained:,} trained{share}", style="bold")


def place_name(row: Rows, segment: int) -> str:
    file, line, _ = origin_of(row, segment)
    return "-" if file is None else f"{visible(file, limit=200)}:{line}"


def conversation_lines(row: Rows, text: TokenText, *, plain: bool) -> Iterator[Text]:
    """Every segment and turn of an episode. `plain` puts trained text in brackets, and a backslash before its own."""
    count = len(row.origins)
    for segment in range(count):
        start, stop = int(row.segment_start[segment]), int(row.segment_start[segment + 1])
        if is_padding(row, segment):
            yield Text(f"── padding: {stop - start:,} tokens", style="dim")
            continue
        if count > 1:
            yield Text(
                f"── segment {segment} of {count}: {place_name(row, segment)}, {stop - start:,} tokens", style="dim"
            )
        for turn in turns(row, segment):
            if turn.missing is not None:
                yield Text(f"… {_messages(*turn.missing)} not in this row", style="dim italic")
            yield _heading(turn)
            yield from _indented(_body(row, turn, text, plain=plain))


def _messages(first: int, last: int) -> str:
    return f"message {first} is" if first == last else f"messages {first} to {last} are"


def _heading(turn: MessageTurn) -> Text:
    heading = Text(turn.name, style=f"bold {COLOURS.get(turn.role, '')}".strip())
    heading.append("" if turn.message is None else f" {turn.message}")
    for note in turn.notes:
        heading.append(f"  {note}", style="dim italic")
    return heading


def _body(row: Rows, turn: MessageTurn, text: TokenText, *, plain: bool) -> Text:
    """The text of a turn. Neighbours of one weight share a bracket; another weight than 1 stands behind it."""
    body = Text()
    open_weight = 0.0

    def change(weight: float) -> None:
        nonlocal open_weight
        if plain and weight != open_weight:
            if open_weight:
                body.append("]" if open_weight == 1 else f"]×{open_weight:g}")
            if weight:
                body.append("[")
        open_weight = weight

    for span in range(turn.first_span, turn.last_span):
        entry = row.spans[span]
        said = text.text(row.ids[row.span_start[span] : row.span_start[span + 1]].tolist(), keep="\n\t")
        if entry["target"] != OWN_ID:
            said += f"→{text.token(int(entry['target']))}"
        if plain:
            said = said.replace("[", r"\[").replace("]", r"\]")
        change(float(entry["weight"]))
        body.append(said, style=_style(turn.role, Part(entry["part"]), trained=entry["weight"] > 0))
    change(0.0)
    return body


def _style(role: Role, part: Part, *, trained: bool) -> str:
    colour = PART_COLOURS.get(part, COLOURS.get(role, "") if trained else "")
    return f"{'bold' if trained else 'dim'} {'italic ' if part == Part.INJECTED else ''}{colour}".strip()


def _indented(body: Text) -> Iterator[Text]:
    # The line end that closes a turn in many formats would only leave an empty line.
    body.rstrip()
    for line in body.split("\n", allow_blank=True):
        yield Text(INDENT).append_text(line)


def token_lines(row: Rows, text: TokenText) -> Iterator[Text]:
    """One line for each token: a star if it is trained, its number, id, speaker, part, rule, and its text."""
    for span in range(len(row.spans)):
        entry = row.spans[span]
        role, part, weight = Role(entry["role"]), Part(entry["part"]), float(entry["weight"])
        mark = " " if weight == 0 else "*" if weight == 1 else f"{weight:g}"
        message = "-" if entry["message"] == NO_MESSAGE else str(entry["message"])
        what = f"{message:>3} {role.name:<9} {part.name:<9} {Rule(entry['rule']).name:<10}".lower()
        target = "" if entry["target"] == OWN_ID else f" → {entry['target']} {text.token(int(entry['target']))}"
        style = _style(role, part, trained=weight > 0)
        start, stop = int(row.span_start[span]), int(row.span_start[span + 1])
        for token, id in enumerate(row.ids[start:stop].tolist(), start):
            yield Text(f"{mark:>4} {token:>6} {id:>7} {what} ").append(text.token(id) + target, style=style)
