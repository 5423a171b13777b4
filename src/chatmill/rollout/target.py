"""Build targets: the model's own answers, completed with the true objects that they missed.

    rollout  {"object_1": {…cat…}, "object_2": {…dog…}, "object_3": {"desc": "b
    target   {"object_1": {…cat…}, "object_2": {…dog…} , "object_3": {…bird…} } EOS
             kept: context, except matched coordinates  appended: trained

The kept prefix consists of tokens of the rollout. If the prefix ends inside a token, that token is replaced by shorter
tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from chatmill.errors import UsageError
from chatmill.rollout.append import DETECTION, SPACE, Appended, encode_answer, encode_append
from chatmill.rollout.match import Matching
from chatmill.rollout.scan import JSON, STOP_TEXTS, ParsedEntry, Scan, parse_json, scan_rollout
from chatmill.rollout.schema import Detection, Object, Schema, UnfitError, read_body
from chatmill.rollout.trained_parts import EVEN, PartWeights, target_row
from chatmill.rollout.vocabulary import Vocabulary, id_array, vocabulary_of
from chatmill.rows import Index, Part, Rows
from chatmill.tokenizer import Tokenizer

ANY_NUMBER = json.JSONDecoder(parse_constant=JSON.parse_constant, parse_int=str)
"""A decoder that keeps integers as text, because Python limits the digits of an int."""
NO_SLOTS = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Target:
    """An answer to train on, and details about how it was built."""

    ids: list[int]
    """Ids of the kept prefix, the appended tokens and EOS."""
    prefix_ids: list[int]
    """Ids of the kept prefix, with shorter tokens instead of a split token."""
    prefix_text: str
    """Text of the kept prefix; with the border `canonical` or `joined`, it may extend beyond `prefix_ids`."""
    appended_text: str
    start_index: int
    """The number n of the first appended key object_{n}."""
    valid_objects: list[Object]
    """Valid objects of the rollout, in order."""
    dropped: dict[str, int]
    """Number of rollout entries that are not valid objects, by reason."""
    matched: tuple[tuple[int, int], ...]
    """Index pairs (valid object, true object)."""
    missed: tuple[int, ...]
    """Indices of the true objects that the rollout missed."""
    truncated: bool
    """Whether the rollout ended before the answer was complete."""
    fallback: str | None
    """The reason why nothing of the rollout was kept: empty, no_brace, array_root, text_before or no_cut; else None."""
    target_is_json: bool
    kept: int
    """Number of rollout tokens that were kept unchanged."""
    slots: int
    """Number of rollout coordinates whose target is the true value."""
    gated: int
    """Number of object pairs whose overlap is too small for a match."""
    rows: Rows = field(repr=False)
    """The target as one row, without a prompt."""

    @property
    def false_positives(self) -> tuple[int, ...]:
        """Indices of valid objects that match no true object."""
        matched = {number for number, _ in self.matched}
        return tuple(number for number in range(len(self.valid_objects)) if number not in matched)


def build_target(
    rollout_ids: Sequence[int],
    objects: Sequence[Mapping[str, Any]],
    *,
    tokenizer: Tokenizer,
    schema: Schema = DETECTION,
    eos_id: int | None = None,
    stop_ids: Collection[int] | None = None,
    stop_texts: Sequence[str] = STOP_TEXTS,
    train_values: bool = True,
    train_cut: bool = False,
    border: Border = "shorter",
    weights: PartWeights = EVEN,
) -> Target:
    """Build the target for one rollout; `objects` are the true objects.

    `eos_id` defaults to the end-of-turn token of the tokenizer's chat format, and `stop_ids` to `eos_id`. If
    `train_values` is true, the loss includes the values of appended entries. If `train_cut` is true, the loss also
    includes the tokens that replace a split token or an unusable rollout. `border` sets how the end of the prefix is
    tokenized. `weights` sets the loss weight of each kind of token.

    >>> from chatmill import build_target, open_tokenizer
    >>> from chatmill.rollout import COORDINATES
    >>> tokenizer = open_tokenizer("bytes", control={"eot": "<|eot|>"}, besides=COORDINATES, add_tokens=True)
    >>> rollout = tokenizer.encode('{"object_1": {"desc": "ca')
    >>> target = build_target(rollout, [{"desc": "cat", "bbox_2d": [1, 2, 30, 40]}], tokenizer=tokenizer)
    >>> target.prefix_text, target.missed
    ('{', (0,))
    >>> target.appended_text[:29]
    '"object_1": {"desc": "cat", "'
    """
    vocabulary = vocabulary_of(tokenizer)
    truth = [schema.check(thing) for thing in objects]
    eos = end_of_turn(tokenizer) if eos_id is None else eos_id
    ids = id_array(rollout_ids)
    scan = scan_rollout(ids, vocabulary, stop_ids={eos} if stop_ids is None else stop_ids, stop_texts=stop_texts)
    cut = _cut(ids, scan, vocabulary)
    entries, valid, dropped = _read(scan, schema, cut)
    matching = schema.match(valid, truth)

    prefix_text = cut.text.decode("utf-8", "replace")
    start_index = 1 + max([0, *[entry.largest for entry in cut.entries]])
    missed = [truth[number] for number in matching.missed]
    encode = partial(encode_append, missed, start_index, prefix_text, schema, vocabulary)
    prefix_ids, kept, appended = _joined(ids, scan, cut, border, encode, vocabulary)
    slots = NO_SLOTS
    if schema.uses_coordinates:
        slots = _slots(scan, ids, kept, matching, entries, valid, truth, vocabulary)
    closing = _closing(scan, cut, matching, entries, vocabulary) if weights.surplus else None
    if closing is not None and closing[0] >= kept:
        closing = None
    all_ids = np.concatenate([prefix_ids.astype(np.uint32), appended.ids, [np.uint32(eos)]])
    id_list: list[int] = all_ids.tolist()
    anew = Part.STRUCTURE if train_cut else Part.PREFIX
    parts = bytes([Part.PREFIX]) * kept + bytes([anew]) * (len(prefix_ids) - kept) + appended.parts
    return Target(
        ids=id_list,
        prefix_ids=id_list[: len(prefix_ids)],
        prefix_text=prefix_text,
        appended_text=appended.text,
        start_index=start_index,
        valid_objects=valid,
        dropped=dropped,
        matched=matching.pairs,
        missed=matching.missed,
        truncated=scan.ended == "open",
        fallback=cut.fallback,
        # If all entries are valid, the text is JSON and need not be parsed.
        target_is_json=len(valid) == len(cut.entries) or _is_json(cut.text + appended.text.encode()),
        kept=kept,
        slots=len(slots[0]),
        gated=matching.gated,
        rows=target_row(all_ids, parts + bytes([Part.EOS]), slots, closing, train_values=train_values, weights=weights),
    )


def build_answer(
    objects: Sequence[Mapping[str, Any]],
    *,
    tokenizer: Tokenizer,
    schema: Schema = DETECTION,
    eos_id: int | None = None,
    train_values: bool = True,
) -> Rows:
    """Build a row with the true answer, for SFT before rollout training."""
    vocabulary = vocabulary_of(tokenizer)
    truth = [schema.check(thing) for thing in objects]
    answer = encode_answer(truth, schema, vocabulary)
    eos = end_of_turn(tokenizer) if eos_id is None else eos_id
    parts = answer.parts + bytes([Part.EOS])
    ids = np.append(answer.ids, np.uint32(eos))
    return target_row(ids, parts, NO_SLOTS, None, train_values=train_values, weights=EVEN)


def end_of_turn(tokenizer: Tokenizer) -> int:
    """Return the id of the token that ends an answer: the control token `eot`."""
    ids = tokenizer.special_token_ids()
    if "eot" not in ids:
        raise UsageError(f"{tokenizer.name}: was opened without an end-of-turn token (eot); pass eos_id")
    return int(ids["eot"])


# Select the prefix of the rollout to keep, and parse its objects.

Border = Literal["shorter", "canonical", "joined", "masked"]
"""How to tokenize the end of the kept prefix, where a tokenizer may merge kept and appended text.

- `shorter`: Encode the appended text separately. If the prefix ends inside a token, shorter tokens replace this token.
- `masked`: Like `shorter`, but exclude the first appended token from the loss.
- `joined`: Encode the appended text together with the last token of the prefix.
- `canonical`: Encode the whole text again, and keep rollout tokens up to the last token boundary in the prefix that is
  the same in both encodings.
"""


class _KeptPrefix(NamedTuple):
    ids: Index
    """Token ids of the prefix."""
    text: bytes
    kept: int
    """Number of prefix tokens that are unchanged rollout tokens."""
    entries: tuple[ParsedEntry, ...]
    """Entries of the rollout that are in the prefix."""
    fallback: str | None


def _cut(ids: Index, scan: Scan, vocabulary: Vocabulary) -> _KeptPrefix:
    """Return the rollout up to the last complete object or, without one, up to the opening brace; without a brace,
    return `{`.
    """
    if scan.root < 0:
        return _nothing_kept(vocabulary, _why_no_root(scan.data))
    count = next((number for number in range(len(scan.entries), 0, -1) if _is_object(scan.entries[number - 1])), 0)
    end = scan.entries[count - 1].stop if count else scan.root + 1
    stop = int(np.searchsorted(scan.token_start, end, side="left"))
    prefix = ids[:stop]
    if scan.token_start[stop] > end:
        # The prefix ends inside a token, so replace only this token.
        stop -= 1
        shorter = vocabulary.cut(scan.data[scan.token_start[stop] : end])
        if shorter is None:
            return _nothing_kept(vocabulary, "no_cut")
        prefix = np.append(ids[:stop], shorter)
    return _KeptPrefix(prefix, scan.data[:end], stop, scan.entries[:count], None)


def _is_object(entry: ParsedEntry) -> bool:
    return entry.complete and entry.is_object and entry.number is not None


def _nothing_kept(vocabulary: Vocabulary, why: str) -> _KeptPrefix:
    return _KeptPrefix(np.array(vocabulary.exact(["{"])[0]), b"{", 0, (), why)


def _joined(
    ids: Index,
    scan: Scan,
    cut: _KeptPrefix,
    border: Border,
    encode: Callable[..., Appended],
    vocabulary: Vocabulary,
) -> tuple[Index, int, Appended]:
    """Return the prefix tokens, the number of rollout tokens among them, and the appended tokens."""
    if border in ("shorter", "masked") or cut.fallback is not None:
        appended = encode()
        if border == "masked":
            appended = appended._replace(parts=bytes([Part.PREFIX]) + appended.parts[1:])
        return cut.ids, cut.kept, appended
    end, starts = len(cut.text), scan.token_start
    # A tokenizer never merges control tokens with text, so start after the last control token.
    last = int(np.searchsorted(starts, end, side="left"))
    control = (at + 1 for at in range(last - 1, -1, -1) if vocabulary.is_control(int(ids[at])))
    first = max(next(control, 0), last - 1 if border == "joined" else 0)
    try:
        appended = encode(before=cut.text[starts[first] :].decode())
    except UnicodeDecodeError:
        return cut.ids, cut.kept, encode()
    theirs = vocabulary.starts(appended.ids.tolist())
    common = np.intersect1d(starts[first : last + 1] - starts[first], theirs)
    at = 0 if border == "joined" else common[common <= end - starts[first]][-1]
    kept = int(np.searchsorted(starts, starts[first] + at))
    skipped = int(np.searchsorted(theirs, at))
    return ids[:kept], kept, Appended(appended.text, appended.ids[skipped:], appended.parts[skipped:])


def _why_no_root(data: bytes) -> str:
    text = data.strip(SPACE.encode())
    if not text:
        return "empty"
    if text.startswith(b"["):
        return "array_root"
    return "text_before" if b"{" in text else "no_brace"


def _read(scan: Scan, schema: Schema, cut: _KeptPrefix) -> tuple[list[ParsedEntry], list[Object], dict[str, int]]:
    """Return the valid entries, their objects, and the number of invalid entries by reason."""
    entries: list[ParsedEntry] = []
    valid: list[Object] = []
    dropped: Counter[str] = Counter()
    of_boxes = schema if isinstance(schema, Detection) and cut.fallback is None else None
    for entry in scan.entries:
        try:
            if of_boxes is not None and entry.box is not None:
                desc, places, _ = entry.box
                valid.append(of_boxes.read_box(desc, places))
            else:
                valid.append(_object(entry, scan.data, schema, cut))
            entries.append(entry)
        except UnfitError as error:
            dropped[error.reason] += 1
    return entries, valid, dict(dropped)


def _object(entry: ParsedEntry, data: bytes, schema: Schema, cut: _KeptPrefix) -> Object:
    for reason, holds in (
        ("incomplete", not entry.complete),
        ("fallback", cut.fallback is not None),
        ("key", entry.number is None),
        ("not_object", not entry.is_object),
    ):
        if holds:
            raise UnfitError(reason)
    return read_body(data[entry.value_start : entry.stop], schema)


def _is_json(text: bytes) -> bool:
    try:
        parse_json(text, ANY_NUMBER)
    except ValueError:
        return False
    return True


# Find rollout coordinates whose true value is known.


def _slots(
    scan: Scan,
    ids: Index,
    kept: int,
    matching: Matching,
    entries: Sequence[ParsedEntry],
    valid: Sequence[Object],
    truth: Sequence[Object],
    vocabulary: Vocabulary,
) -> tuple[Index, Index]:
    """Return the positions of slots in the kept tokens, and the target id of each slot.

    A slot is a coordinate of a matched object; its target is the true coordinate.
    """
    starts: list[int] = []
    predicted: list[int] = []
    wanted: list[int] = []
    for number, true in matching.pairs:
        aligned = _aligned(valid[number], truth[true])
        if aligned is not None:
            coordinates, of_entry = scan.coordinates(entries[number])
            if len(coordinates) == len(aligned):
                starts += of_entry
                predicted += coordinates
                wanted += aligned
    if not starts:
        return NO_SLOTS
    start, coordinate = np.array(starts), vocabulary.coordinate_array
    tokens = np.searchsorted(scan.token_start, start)
    is_own = (scan.token_start[tokens] == start) & (ids.take(tokens, mode="clip") == coordinate[predicted])
    is_slot = is_own & (tokens < kept)
    return tokens[is_slot], coordinate[wanted][is_slot]


def _aligned(thing: Object, true: Object) -> list[int] | None:
    """Return the true coordinates in the order of the predicted ones; None if the objects differ in type or number of
    points.

    The predicted polygon can start at any corner and run in either direction.
    """
    if "bbox_2d" in thing and "bbox_2d" in true:
        box: list[int] = true["bbox_2d"]
        return box
    if "poly" not in thing or "poly" not in true or len(thing["poly"]) != len(true["poly"]):
        return None
    corners, wanted = np.array(thing["poly"]).reshape(-1, 2), np.array(true["poly"]).reshape(-1, 2)
    turns = np.add.outer(np.arange(len(wanted)), np.arange(len(wanted))) % len(wanted)
    orders = np.concatenate([turns, turns[:, ::-1]])
    far = np.abs(wanted[orders] - corners).sum(axis=(1, 2))
    nearest: list[int] = wanted[orders[int(far.argmin())]].ravel().tolist()
    return nearest


def _closing(
    scan: Scan, cut: _KeptPrefix, matching: Matching, entries: Sequence[ParsedEntry], vocabulary: Vocabulary
) -> tuple[int, int] | None:
    """Return the index of the token after the last matched object, and the id of a token that closes the answer.

    Return None if an object was missed, or if nothing follows the last matched object.
    """
    if cut.fallback is not None or matching.missed:
        return None
    end = max((entries[number].stop for number, _ in matching.pairs), default=scan.root + 1)
    if end >= len(cut.text):
        return None
    token = int(np.searchsorted(scan.token_start, end, side="right")) - 1
    closed = vocabulary.cut(scan.data[scan.token_start[token] : end] + b"}")
    return (token, closed[0]) if closed is not None and len(closed) == 1 else None
