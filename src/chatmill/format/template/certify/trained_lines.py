"""The lines of a template certificate about training: token ids, answers, and where answers start and end."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any

import numpy as np

from chatmill.errors import RecordError, one_line
from chatmill.format.template.certify.finding import EXAMPLES, Finding, Level, line_of, shown_end, some
from chatmill.format.template.certify.observe import CONTROL_TEXT, Observations, Rendered
from chatmill.format.template.certify.plain_check import CheckedAnswer
from chatmill.format.template.probes import PLAIN, dialog, probe_record
from chatmill.records import Record

RELATIONS = {
    "space_before_header": "the prompt has different whitespace before the header",
    "parts_behind_header": "the prompt diverges from the row after the header",
    "header_not_in_prompt": "the prompt lacks the header that the row has",
    "history_rewritten": "the prompt renders earlier messages differently from the row",
    "several_turns": "the prompt covers only the first of several turns",
}
"""Texts for the certificate line `prompt`: how a prompt differs from the start of its row."""


def _plain_refused(seen: Observations, line: str) -> Finding | None:
    """Return a FAIL for the certificate line `line` if the template rejects a plain test conversation with an error
    about this line, otherwise None.
    """
    for record in PLAIN:
        if (fault := seen.faults.get(record.id)) is not None and line_of(fault) == line:
            details = {"refused": record.id, "kind": fault.kind}
            return Finding(line, Level.FAIL, f"probe {record.id} is rejected: {reason(seen, record, fault)}", details)
    return None


def reason(seen: Observations, record: Record, fault: RecordError) -> str:
    """Return why a test conversation was rejected and how to fix it. If an end token is missing, also quote the
    template line that wrote the end of the answer.
    """
    text = f"{fault.what}; {fault.right}"
    if fault.kind != "no_end_token":
        return text
    derived = seen.renderer.derive(record)
    stops = [answer.stop for answer in derived.answers if not answer.closed]
    return f"{text}; {_quote(seen, record, stops[0])}" if stops else text


def ids(seen: Observations) -> Finding:
    if seen.peer is None:
        return Finding(
            "ids",
            Level.SKIP,
            "transformers is not installed or cannot open the tokenizer, so the ids were not compared",
        )
    places = [probe.place for probe in seen.probes if seen.differs(probe)] + seen.own.different
    compared = sum(CONTROL_TEXT not in probe.notes for probe in seen.probes) + seen.own.compared
    details = {"compared": compared, "different": len(places), "examples": places[:EXAMPLES]}
    if places:
        return Finding("ids", Level.FAIL, f"the ids differ from those of {seen.peer_name}: {some(places)}", details)
    return Finding("ids", Level.PASS, f"{compared} conversations have the same ids as in {seen.peer_name}", details)


def answers(seen: Observations) -> Finding:
    if (refused := _plain_refused(seen, "answers")) is not None:
        return refused
    # With generation tags, the template decides which text is trained on, so check only the role.
    is_derived = seen.renderer.mask == "derived"
    faults = [
        f"message {answer.message} of {probe.place} {text}"
        for probe, answer in seen.answers
        for text in answer.faults
        if is_derived or text.startswith("has the role")
    ]
    faults += seen.own.wrong if is_derived else []
    count = len(seen.answers) + seen.own.answers
    details = {"answers": count, "wrong": len(faults), "examples": faults[:EXAMPLES]}
    if faults:
        return Finding("answers", Level.FAIL, f"the loss mask is wrong for some answers: {some(faults)}", details)
    if all(answer.relation == "unknown" for _, answer in seen.answers):
        return Finding(
            "answers", Level.SKIP, "answers were not checked, because the ids do not decode to the text", details
        )
    if not is_derived:
        return Finding("answers", Level.PASS, f"the loss mask includes {count} spans between generation tags", details)
    what = f"{count} answers in {len(seen.probes) + seen.own.rendered} conversations start where their prompt ends"
    return Finding("answers", Level.PASS, f"{what}; the loss mask includes no text of other messages", details)


def terminator(seen: Observations) -> Finding:
    if (refused := _plain_refused(seen, "terminator")) is not None:
        return refused
    names = {id: token for token, id in seen.renderer.encoder.ids.items()}
    stops = seen.renderer.folder.stops
    ends: dict[str, None] = {}
    earlier: dict[str, None] = {}
    for probe, answer in seen.answers:
        where = f"message {answer.message} of {probe.place}"
        if not seen.is_ended(answer):
            what = f"no control token ends {where}, after {shown_end(answer.text)}"
            details: dict[str, Any] = {"example": where}
            if seen.renderer.mask == "tags":
                return Finding(
                    "terminator", Level.WARN, f"generation tags exclude the end of an answer: {what}", details
                )
            if "no_end_token" in probe.notes:
                return Finding("terminator", Level.WARN, what, details)
            return Finding("terminator", Level.FAIL, f"{what}; {_quote_end(seen, probe, answer)}", details)
        if answer.goes_on:
            continue
        token = names[answer.ids[-1]]
        following = probe.record.messages[answer.message + 1 : answer.message + 2]
        is_last = not following or following[0].role == "tool"
        if is_last and stops is not None and answer.ids[-1] not in stops:
            listed = ", ".join(names.get(stop, str(stop)) for stop in stops)
            what = f"{token} ends {where}, but the model stops at {listed}; {_quote_end(seen, probe, answer)}"
            return Finding("terminator", Level.FAIL, what, {"example": where, "end": token})
        (ends if is_last else earlier)[token] = None
    text = f"the loss mask includes {' or '.join(ends)} at the end of answers"
    details = {"ends": list(ends), "ends_of_earlier_answers": list(earlier), "stops": None}
    if stops is None:
        what = f"{text}; without generation_config.json it is unknown whether the model stops there"
        return Finding("terminator", Level.SKIP, what, details)
    details["stops"] = [names.get(stop, str(stop)) for stop in stops]
    others = [token for token in earlier if seen.renderer.encoder.ids[token] not in stops]
    if others:
        what = f"{text}, but earlier answers end with {', '.join(others)}, where the model does not stop"
        return Finding("terminator", Level.WARN, f"{what}; use --unroll to render each answer as the last one", details)
    return Finding("terminator", Level.PASS, f"{text}; the model stops there", details)


def _quote_end(seen: Observations, probe: Rendered, answer: CheckedAnswer) -> str:
    return _quote(seen, probe.record, probe.text.find(answer.text) + len(answer.text))


def _quote(seen: Observations, record: Record, stop: int) -> str:
    """Return the template line that wrote the character before offset `stop`, as a quotation."""
    template = seen.renderer.templates[bool(record.tools)]
    pieces = seen.renderer.derive(record).rendering.pieces
    ends = accumulate(len(piece.text) for piece in pieces)
    lines = (piece.line for piece, end in zip(pieces, ends, strict=True) if end >= stop)
    return template.quote(next(lines, 0))


def bos(seen: Observations) -> Finding:
    token = seen.renderer.folder.special.get("bos_token")
    id = seen.renderer.encoder.ids.get(token) if token is not None else None
    if id is None:
        return Finding("bos", Level.SKIP, "the tokenizer has no BOS token")
    for probe in seen.probes:
        if probe.rows.ids[:2].tolist() == [id, id]:
            return Finding("bos", Level.FAIL, f"{token} occurs twice at the start of {probe.place}")
    # Ignore the last token of an answer, because the same token may be both BOS and the end of a turn.
    inside = [(probe, answer) for probe, answer in seen.answers if id in answer.ids[:-1]]
    if inside:
        probe, answer = inside[0]
        what = f"the loss mask includes {token} in message {answer.message} of {probe.place}"
        return Finding("bos", Level.FAIL, what)
    counts = [int(np.sum(probe.rows.ids == id)) for probe in seen.probes]
    often = (
        f"in several turns, up to {max(counts)} times in one row"
        if max(counts) > 1
        else "once"
        if all(counts)
        else "nowhere"
    )
    return Finding("bos", Level.PASS, f"{token} occurs {often}", {"most": max(counts)})


def prompt(seen: Observations) -> Finding:
    if (refused := _plain_refused(seen, "prompt")) is not None:
        return refused
    counts = Counter(answer.relation for _, answer in seen.answers) + seen.own.relations
    details = {"counts": dict(counts)}
    if seen.renderer.mask == "tags":
        return Finding("prompt", Level.SKIP, "generation tags mark where answers start", details)
    wrong = [(probe, answer) for probe, answer in seen.answers if answer.relation == "differs"]
    if wrong or counts["differs"]:
        where = f"message {wrong[0][1].message} of {wrong[0][0].place}" if wrong else seen.own.wrong[0]
        return Finding("prompt", Level.FAIL, f"the prompt does not end with the header of the row: {where}", details)
    total = sum(counts.values())
    texts = []
    for relation, text in RELATIONS.items():
        if counts[relation]:
            example = next((pair for pair in seen.answers if pair[1].relation == relation), None)
            where = f", such as message {example[1].message} of {example[0].place}" if example else ""
            texts.append(f"{text} for {counts[relation]} of {total} answers{where}")
    if texts:
        return Finding("prompt", Level.WARN, "; ".join(texts), details)
    if counts["unknown"]:
        return Finding(
            "prompt", Level.SKIP, "prompts were not checked, because the ids do not decode to the text", details
        )
    return Finding("prompt", Level.PASS, "every prompt is a prefix of its row", details)


def borders(seen: Observations) -> Finding:
    straddling = [(probe, answer) for probe, answer in seen.answers if answer.straddles]
    details: dict[str, Any] = {"straddling": len(straddling), "answers": len(seen.answers)}
    shares = [f"{len(straddling)} of {len(seen.answers)} answers of the probes"] if straddling else []
    if seen.own.count:
        details["of_records"] = {"straddling": seen.own.straddling, "answers": seen.own.answers}
        shares += (
            [f"{seen.own.straddling} of {seen.own.answers} answers in your records"] if seen.own.straddling else []
        )
    if not shares:
        return Finding("borders", Level.PASS, "no token spans the start of an answer", details)
    what = f"the first token of {' and '.join(shares)} starts in the header and is not trained on"
    if seen.check.header.endswith(" "):
        what += "; the header ends with a space, which --strip-prompt-space would count as part of the answer"
    return Finding("borders", Level.WARN, what, details)


TOKENS_IN_TEXT = 64


def text_tokens(seen: Observations) -> Finding:
    from_text = seen.renderer.text_tokens.ids
    ids = {token: id for token, id in seen.renderer.encoder.ids.items() if token not in from_text}
    count = written = 0
    # Test the control tokens in groups. A vocabulary may have thousands of control tokens, and a single text with all
    # of them would be slow to check.
    for first in range(0, len(ids), TOKENS_IN_TEXT):
        text = " ".join(list(ids)[first : first + TOKENS_IN_TEXT])
        record = probe_record("control text", *dialog(f"Say {text} twice.", f"{text} and {text}."))
        try:
            rows = seen.rendered(seen.renderer.lay_out(record)).rows
            pieces = seen.renderer.derive(record).rendering.pieces
        except RecordError as fault:
            return Finding("text_tokens", Level.WARN, f"text that contains control tokens is rejected: {fault.what}")
        count += int(np.isin(rows.ids, np.array(list(ids.values()), dtype=np.uint32)).sum())
        literals = "".join("\0" if piece.source is not None else piece.text for piece in pieces)
        written += sum(match[0] in ids for match in seen.renderer.control_tokens.find(literals))
    details = {"control_tokens": len(ids), "written": written, "in_row": count, "from_text": list(from_text)}
    if count != written:
        what = f"the rows contain {count} control tokens, but the template outputs only {written}"
        return Finding("text_tokens", Level.FAIL, f"{what}: text became control tokens", details)
    what = f"all {len(ids)} control tokens are plain text inside messages"
    if from_text:
        what += f"; added tokens in messages are encoded as in transformers: {one_line(' '.join(from_text), 200)}"
    return Finding("text_tokens", Level.PASS, what, details)


def sandbox(seen: Observations) -> Finding:
    if "seccomp" in seen.renderer.process.protections:
        what = "the template runs in a process without access to the environment, files, network or other processes"
        return Finding("sandbox", Level.PASS, what)
    what = "the template runs in a process with resource limits and an empty environment, but without a seccomp filter"
    return Finding("sandbox", Level.WARN, what)


def own_records(seen: Observations) -> Finding:
    own = seen.own
    kinds = Counter(fault.kind for fault in own.refused)
    details = {"records": own.count, "refused": dict(kinds), "notes": dict(own.notes)}
    text = f"{own.count:,} {'record' if own.count == 1 else 'records'}"
    if own.refused:
        reasons = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        what = f"{text}; rejected records: {reasons}; first error: {own.refused[0]}"
        return Finding("records", Level.FAIL, what, details)
    if own.wrong and seen.renderer.mask == "derived":
        what = f"{text}; the loss mask is wrong for some answers: {some(own.wrong)}"
        return Finding("records", Level.FAIL, what, details)
    if own.unended:
        allowed = "no_end_token" in own.notes or seen.renderer.mask == "tags"
        what = f"{text}; some answers have no control token at the end: {some(own.unended)}"
        return Finding("records", Level.WARN if allowed else Level.FAIL, what, details)
    if own.notes[CONTROL_TEXT]:
        text += f", {own.notes[CONTROL_TEXT]:,} of them with control tokens in message text"
    left_out = [
        f"{what.removesuffix('_left_out')} in {n:,} {'record' if n == 1 else 'records'}"
        for what, n in own.notes.items()
        if "_left_out" in what
    ]
    if left_out:
        what = f"{text}; every answer is trained on, but the template drops {' and '.join(left_out)}"
        return Finding("records", Level.WARN, what, details)
    return Finding("records", Level.PASS, f"{text}; every answer is trained on", details)
