from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from published_conversations import CONVERSATIONS, MAIN, TOOL, Messages, conversation, with_tools
from published_oracle import Verdict, common, judge, plain_header
from published_reference import DATE, Reference, pieces, read_piece, write_folder

from chatmill.errors import ChatmillError, RecordError
from chatmill.format import TemplateOptions, TemplateRenderer, open_renderer
from chatmill.records import Record

WITHOUT_CONFIG = "-no-config"
"""Suffix of conversation names for folders without generation_config.json."""
NAMES = (*CONVERSATIONS, *(name + WITHOUT_CONFIG for name in MAIN))
EXCUSED = ("unrenderable", "no_end")
"""Problems for which a refusal is expected: transformers drops a part, or an answer has no end."""


class Outcome(NamedTuple):
    verdict: str
    """`exact`; `wrong`: the trained text differs from the oracle, or the conversation should have been rejected; `ids`:
    the mask is right, but the ids differ from transformers; `refused`: rejected although the oracle reports no problem;
    any other value: rejected for a problem that the oracle reports too.
    """
    reason: str = ""
    """The kind of rejection."""
    detail: str = ""


class TokenBytes:
    def __init__(self, folder: Path) -> None:
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        alphabet = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
        content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        self._bytes = {id: bytes(map(alphabet.get, token)) for token, id in content["model"]["vocab"].items()}
        self._bytes |= {entry["id"]: entry["content"].encode() for entry in content["added_tokens"]}

    def __getitem__(self, id: int) -> bytes:
        return self._bytes[id]

    def stretches(self, ids: list[int], mask: list[bool]) -> list[str]:
        out: list[bytes] = []
        last = False
        for id, trained in zip(ids, mask, strict=True):
            if trained and not last:
                out.append(b"")
            if trained:
                out[-1] += self[id]
            last = trained
        return [text.decode("utf-8", "replace") for text in out]


def as_record(messages: Messages) -> Record:
    """Return the conversation as a `Record`, in which the arguments of tool calls are JSON strings."""
    written = []
    for message in messages:
        message = dict(message)
        if "tool_calls" in message:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
        written.append(message)
    return Record(written, tools=(json.dumps(TOOL),) if with_tools(messages) else ())


def compare(
    reference: Reference, tokens: TokenBytes, renderer: TemplateRenderer, messages: Messages, verdict: Verdict
) -> Outcome:
    try:
        rows = renderer.render([as_record(messages)])
    except RecordError as fault:
        problem = verdict.problem or ("unrenderable" if verdict.left_out else "inner_end" if verdict.inner else "")
        return Outcome(problem or "refused", fault.kind, f"{fault.what}; {fault.right}")
    rows.check()
    ids, mask = rows.ids.tolist(), rows.mask().tolist()
    trained = tokens.stretches(ids, mask)
    if verdict.problem:
        return Outcome("wrong", verdict.problem, f"{verdict.detail}; trained: {trained}")
    text = b"".join(tokens[id] for id in ids).decode("utf-8", "replace")
    if text != verdict.text:
        at = max(0, common(text, verdict.text) - 30)
        return Outcome("wrong", "text", f"{text[at : at + 80]!r}, expected {verdict.text[at : at + 80]!r}")
    masks = [expected_mask(tokens, ids, verdict.text, spans) for spans in verdict.ways()]
    if mask not in masks:
        return Outcome("wrong", "mask", f"trained: {trained}, expected: {tokens.stretches(ids, masks[0])}")
    if not holds_control_text(reference, messages):
        theirs = list(reference.apply(messages, tokenize=True))
        if theirs != ids:
            at = max(0, next((n for n, pair in enumerate(zip(ids, theirs, strict=False)) if len({*pair}) > 1), 0) - 1)
            shown = [[tokens[id].decode("utf-8", "replace") for id in row[at : at + 5]] for row in (ids, theirs)]
            return Outcome("ids", "", f"{shown[0]}, expected {shown[1]}")
    return Outcome("exact")


def expected_mask(tokens: TokenBytes, ids: list[int], text: str, spans: list[tuple[int, int]]) -> list[bool]:
    """Return the loss mask for the given character ranges. A token that is only partly in a range is not trained."""
    in_bytes = [(len(text[:start].encode()), len(text[:stop].encode())) for start, stop in spans]
    out, at = [], 0
    for id in ids:
        stop = at + len(tokens[id])
        out.append(any(start <= at and stop <= end for start, end in in_bytes))
        at = stop
    return out


def holds_control_text(reference: Reference, messages: Messages) -> bool:
    texts = "\n".join(read_piece(messages, piece) for piece in pieces(messages))
    given = reference.tokens
    header = plain_header(reference).tail
    own = [*given["control"], given["bos"], given["eos"], *(token for token in given["soft"] if token in header)]
    return any(token and token in texts for token in own)


def try_template(
    source: str, tokens: Mapping[str, Any], folder: Path, names: Collection[str] = NAMES
) -> Iterator[tuple[str, Outcome]]:
    """Yield the name of each conversation in `names`, and its outcome.

    The suffix of a name determines whether the tokenizer folder has a generation_config.json.
    """
    verdicts: dict[str, Verdict] = {}
    for config in (True, False):
        chosen = [name for name in names if name.endswith(WITHOUT_CONFIG) != config]
        if not chosen:
            continue
        path = folder / ("with" if config else "without")
        write_folder(path, source, tokens, generation_config=config)
        reference = Reference(path, source, tokens)
        token_bytes = TokenBytes(path)
        conversations = {name: conversation(name.removesuffix(WITHOUT_CONFIG), tokens) for name in chosen}
        for name, messages in conversations.items():
            plain = name.removesuffix(WITHOUT_CONFIG)
            verdicts[name] = verdicts[plain] if plain in verdicts else judge(reference, messages)
        try:
            renderer = open_renderer("template", str(path), template=TemplateOptions(date=DATE))
        except ChatmillError as fault:
            yield from ((name, Outcome(verdicts[name].problem or "refused", "open", str(fault))) for name in chosen)
            continue
        assert isinstance(renderer, TemplateRenderer)
        with patch("chatmill.format.template.trace_cache.MAX_TRACES", 0):
            outcomes = {
                name: compare(reference, token_bytes, renderer, messages, verdicts[name])
                for name, messages in conversations.items()
            }
        for name, messages in conversations.items():
            cached = compare(reference, token_bytes, renderer, messages, verdicts[name])
            if cached != outcomes[name]:
                outcomes[name] = Outcome(
                    "wrong", "cache", f"{outcomes[name]} without cached traces, {cached} with them"
                )
        yield from outcomes.items()


Results = dict[str, dict[str, Outcome]]
"""Outcomes by template and conversation."""


def counts(results: Results) -> Counter[str]:
    return Counter(outcome.verdict for outcomes in results.values() for outcome in outcomes.values())


def share_exact(results: Results) -> float:
    """Return the fraction of outcomes that are exact, excluding the verdicts in `EXCUSED`."""
    count = counts(results)
    whole = sum(number for verdict, number in count.items() if verdict not in EXCUSED)
    return count["exact"] / whole if whole else 1.0


def refusals(results: Results) -> list[str]:
    """Return a line for each template and kind of failure: `template verdict kind: conversations`."""
    lines = []
    for template, outcomes in sorted(results.items()):
        reasons: dict[tuple[str, str], list[str]] = {}
        for name, outcome in outcomes.items():
            if outcome.verdict != "exact":
                reasons.setdefault(outcome[:2], []).append(name)
        lines += [
            f"{template} {verdict} {kind}: {' '.join(names)}" for (verdict, kind), names in sorted(reasons.items())
        ]
    return lines
