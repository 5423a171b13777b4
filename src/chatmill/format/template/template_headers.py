"""Encode the turn headers of a chat template, to check that encoded rows contain them in the right places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from chatmill.format.template.answers.derived import DerivedAnswers
from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.row_check import ExpectedAnswers, RowCheck, expected_answers, header_ids
from chatmill.format.template.turn_marks import TurnMarks
from chatmill.tokenizer.control_encoder import ControlEncoder

TemplateTextIds = tuple[list[int], list[bool], str]
"""The token ids of a template text, whether each is a control token, and the text after the last control token."""


def template_text_ids(
    text: str, encoder: ControlEncoder, control_tokens: ControlTokens, text_tokens: ControlTokens
) -> TemplateTextIds:
    """Encode text that the template itself writes, such as a header, exactly as it is encoded in a row."""
    parts: list[tuple[str, bool]] = []
    start = 0
    for match in control_tokens.find(text):
        parts += [(text[start : match.start()], False), (match[0], True)]
        start = match.end()
    parts = [part for part in (*parts, (text[start:], False)) if part[0]]
    tail = parts[-1][0] if parts and not parts[-1][1] else ""
    tail = encoder.strip(tail, parts[-2][0] if len(parts) > 1 else None, None)[0]
    if not encoder.by_sections:
        names = [name for name, _ in parts]
        aliased = [control and name not in text_tokens.ids for name, control in parts]
        whole = encoder.encode_whole(names, aliased)[0].tolist()
        known = {*encoder.ids.values()}
        return whole, [id in known for id in whole], tail
    ids: list[int] = []
    is_control: list[bool] = []
    for at, (part, control) in enumerate(parts):
        before = parts[at - 1][0] if at else None
        after = parts[at + 1][0] if at + 1 < len(parts) else None
        stripped = part if control else encoder.strip(part, before, after)[0]
        encoded = [encoder.ids[part]] if control else encoder.tokenizer.encode(stripped)
        ids += encoded
        is_control += [control] * len(encoded)
    return ids, is_control, tail


@dataclass
class TemplateHeaders:
    """Encodes the turn headers of chat templates, and creates a check of encoded rows."""

    encoder: ControlEncoder
    control_tokens: ControlTokens
    text_tokens: ControlTokens
    allow_no_end: bool
    _check: tuple[tuple[int, ...], RowCheck] | None = field(default=None, init=False)

    def expected(self, derived: DerivedAnswers) -> ExpectedAnswers | None:
        """Return the encoded headers that must precede the answers of a row, or None if generation tags mark the
        answers.
        """
        if not derived.contexts:
            return None
        rewrites = not self.encoder.by_sections or self.encoder.normalizes
        return expected_answers(derived.contexts, self._ids, rewrites=rewrites, strips=bool(self.encoder.lstrip))

    def row_check(self, turn_marks: Mapping[int, TurnMarks]) -> RowCheck:
        """Return a check of encoded rows against the headers and end tokens in `turn_marks`."""
        used = tuple(sorted(turn_marks))
        if self._check is None or self._check[0] != used:
            marks = [turn_marks[number] for number in used]
            check = RowCheck(
                header_ids([header for one in marks for header in one.headers], self._ids),
                {self.encoder.ids[token] for one in marks for token in one.ends},
                vocab_size=self.encoder.tokenizer.vocab_size,
                byte_lengths=self.encoder.tokenizer.byte_lengths,
                allow_no_end=self.allow_no_end,
            )
            self._check = used, check
        return self._check[1]

    def _ids(self, text: str) -> TemplateTextIds:
        return template_text_ids(text, self.encoder, self.control_tokens, self.text_tokens)
