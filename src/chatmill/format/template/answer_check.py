"""Check the start, content and end of each trained answer in the rendered text, before it is encoded.

A trained answer starts where its prompt ends, contains no header and no text of another message, and ends with a token
that ends a turn. `row_check` performs the same check on finished rows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

from chatmill.errors import RecordError
from chatmill.format.template.answers.by_origin import AnswerSpan, shown, shown_end
from chatmill.format.template.answers.derived import DerivedAnswers, Note
from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.tracing.trace import OUTSIDE
from chatmill.format.template.turn_marks import TurnMarks

NO_END: Final = "no_end_token"


def check_answers(
    derived: DerivedAnswers, tokens: ControlTokens, turns: TurnMarks, *, allow_no_end: bool
) -> tuple[Note, ...]:
    """Raise a `RecordError` if the start, content or end of a trained answer is wrong; otherwise return notes for the
    ledger.

    Answers between generation tags are not checked, because the template itself marks the trained text.
    """
    if not derived.contexts:
        return ()
    text, unended = derived.rendering.text, False
    begins = [*accumulate((len(piece.text) for piece in derived.rendering.pieces), initial=0)]
    following = (*derived.answers[1:], None)
    for answer, context, after in zip(derived.answers, derived.contexts, following, strict=True):
        if not text.endswith(context.text, 0, answer.start) or (not context.text and answer.start):
            what = f"message {answer.message} starts after {shown_end(text[: answer.start])}, but its prompt ends with"
            raise _broken(f"{what} {shown_end(context.text + context.prompt_only)}", "prompt_mismatch")
        # If an answer spans several turns, only its last turn must end with a token at which the server stops.
        ended = _check_text(derived, begins, answer, tokens, turns) or (
            after is not None and after.message == answer.message
        )
        if not ended and not allow_no_end:
            what = f"no token ends the answer of message {answer.message}, after {shown_end(text[: answer.stop])}"
            right = "use a template with an end token, or pass --allow-no-end-token to train without one"
            raise RecordError(what, right, kind=NO_END)
        unended |= not ended
    return (NO_END,) if unended else ()


def without_prompt_space(derived: DerivedAnswers) -> DerivedAnswers:
    """Move the spaces at the end of each assistant header to the start of the answer, for --strip-prompt-space."""
    answers, contexts = [], []
    for answer, context in zip(derived.answers, derived.contexts, strict=False):
        text = context.text if context.prompt_only else context.text.rstrip(" ")
        answers.append(answer._replace(start=answer.start - len(context.text) + len(text)))
        contexts.append(context._replace(text=text))
    return replace(derived, answers=tuple(answers), contexts=tuple(contexts)) if derived.contexts else derived


def _check_text(
    derived: DerivedAnswers, begins: Sequence[int], answer: AnswerSpan, tokens: ControlTokens, turns: TurnMarks
) -> bool:
    """Raise `RecordError` if an answer contains the header or the text of another message.

    Return whether the answer ends with a token that ends a turn. `begins` contains the offset of each piece of the
    rendering.
    """
    literals = []
    first, stop = bisect_right(begins, answer.start) - 1, bisect_left(begins, answer.stop)
    for piece, begin in zip(derived.rendering.pieces[first:stop], begins[first:stop], strict=False):
        if piece.source is not None and piece.source.message not in (answer.message, OUTSIDE):
            what = f"the answer of message {answer.message} contains text of message {piece.source.message}"
            raise _broken(f"{what}: {shown(piece.text)}", "foreign_text")
        part = piece.text[max(answer.start - begin, 0) : answer.stop - begin]
        literals.append(part if piece.source is None else "\0" * len(part))
    text = "".join(literals)
    last = tokens.find(text)[-1:]
    ended = bool(last) and last[0].end() == len(text) and last[0][0] in turns.ends
    # Exclude the end token from `body`, because the token that ends this turn may also open the next turn.
    body = text[: last[0].start()] if ended else text
    for match in tokens.find(body):
        if match[0] in turns.ends:
            what = f"the answer of message {answer.message} continues after {match[0]}, which ends a turn"
            raise _broken(f"{what}: {shown(body[match.end() :])}", "foreign_text")
    for header in turns.headers:
        if header in body:
            what = f"the answer of message {answer.message} contains the header of another turn, {shown(header)}"
            raise _broken(what, "foreign_text")
    return ended


def _broken(what: str, kind: str) -> RecordError:
    return RecordError(what, "use a template whose rows match its prompts, or remove the record", kind=kind)
