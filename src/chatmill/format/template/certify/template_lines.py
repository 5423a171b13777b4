"""The certificate lines about rendering: roles, tools, reasoning, and the record shapes that a template rejects."""

from __future__ import annotations

from collections.abc import Iterator

from chatmill.errors import RecordError
from chatmill.format.template.certify.finding import EXAMPLES, Finding, Level, refused, shown, some
from chatmill.format.template.certify.observe import Observations, Rendered
from chatmill.format.template.certify.plain_check import CheckedAnswer
from chatmill.format.template.probes import (
    PLAIN,
    REASONING,
    SPACES,
    SYSTEM,
    TOOL,
    TOOL_REASONING,
    TOOL_SHAPES,
    TURNS,
    probe_record,
)


def space(seen: Observations) -> Finding:
    probe = seen.good.get(SPACES.id)
    if probe is None:
        return Finding("space", Level.SKIP, f"probe {SPACES.id} is rejected")
    changed = {message.role for message in probe.record.messages if message.content not in probe.text}
    stripped = [role for role in ("user", "assistant") if role in changed]
    if not stripped:
        return Finding("space", Level.PASS, "whitespace around messages is kept", {"stripped": []})
    text = f"whitespace around {' and '.join(stripped)} messages is stripped, as during inference"
    return Finding("space", Level.PASS, text, {"stripped": stripped})


def history(seen: Observations) -> Finding:
    places = [
        f"message {answer.message} of {probe.place}"
        for record in (TURNS, REASONING, TOOL, TOOL_REASONING)
        if (probe := seen.good.get(record.id)) is not None
        for answer in probe.answers
        if _is_rewritten(seen, probe, answer)
    ]
    details = {"rewritten": len(places), "examples": places[:EXAMPLES]}
    if not places:
        return Finding("history", Level.PASS, "answers stay the same when more messages follow", details)
    what = f"answers change when more messages follow: {some(places)}"
    return Finding("history", Level.WARN, f"{what}; use --unroll to render each answer as the last one", details)


def _is_rewritten(seen: Observations, probe: Rendered, answer: CheckedAnswer) -> bool:
    """Whether an answer, except its last token, changes if the messages after it are removed."""
    if answer.message + 1 == len(probe.record.messages):
        return False
    record = probe.record
    alone = probe_record(str(record.id), *record.messages[: answer.message + 1], tools=record.tools)
    try:
        last = seen.rendered(seen.renderer.lay_out(alone)).answers[-1]
    except RecordError:
        return True
    return last.ids[:-1] != answer.ids[:-1]


def system(seen: Observations) -> Finding:
    if (fault := seen.faults.get(SYSTEM.id)) is not None:
        return Finding("system", Level.WARN, refused("records with a system message", fault), {"kind": fault.kind})
    return Finding("system", Level.PASS, "system messages are rendered")


def tools(seen: Observations) -> Finding:
    if (fault := seen.faults.get(TOOL.id)) is not None:
        if fault.kind == "not_written":
            what = f"the template does not support tools: records with tool calls will be rejected ({fault.what})"
            return Finding("tools", Level.SKIP, what, {"kind": fault.kind})
        return Finding("tools", Level.WARN, refused("records with tool calls", fault), {"kind": fault.kind})
    probe = seen.good[TOOL.id]
    calls = [call.arguments_text for message in probe.record.messages for call in message.tool_calls]
    if seen.renderer.templates[True].style.arguments_as_text and not all(text in probe.text for text in calls):
        return Finding("tools", Level.FAIL, f"the arguments {calls[0]} of a tool call are rewritten")
    if "tools_left_out" in probe.notes:
        return Finding("tools", Level.WARN, "tool calls are rendered, but tool definitions are dropped")
    return Finding("tools", Level.PASS, "tool definitions, calls and results are rendered")


def reasoning(seen: Observations) -> Finding:
    if (fault := seen.faults.get(REASONING.id)) is not None:
        return Finding("reasoning", Level.WARN, refused("records with reasoning", fault), {"kind": fault.kind})
    probe = seen.good[REASONING.id]
    is_trained = [probe.record.messages[answer.message].reasoning in answer.text for answer in probe.answers]
    if not any(is_trained):
        return Finding("reasoning", Level.WARN, "reasoning is dropped, because the template does not render it")
    if not all(is_trained):
        what = "the loss mask includes reasoning only in the last answer; use --unroll to include all reasoning"
        return Finding("reasoning", Level.WARN, what)
    return Finding("reasoning", Level.PASS, "the loss mask includes reasoning in every answer")


def null_content(seen: Observations) -> Finding:
    if seen.peer is None:
        return Finding(
            "null",
            Level.SKIP,
            "transformers is not installed or cannot open the tokenizer, so null content was not compared",
        )
    probe = seen.good.get(TOOL.id)
    if probe is None:
        return Finding(
            "null",
            Level.SKIP,
            "content is null only next to tool calls, and conversations with tool calls are rejected",
        )
    theirs = list(seen.peer(probe.record, null_content=True))
    if theirs == probe.rows.ids.tolist():
        return Finding("null", Level.PASS, 'null content next to tool calls is rendered as ""')
    if not theirs:
        what = f'null content next to tool calls is rendered as ""; {seen.peer_name} rejects it'
        return Finding("null", Level.WARN, what)
    ours, other = probe.text, seen.renderer.encoder.tokenizer.decode(theirs)
    at = next((n for n, (a, b) in enumerate(zip(ours, other, strict=False)) if a != b), 0)
    what = f'null content next to tool calls is rendered as ""; {seen.peer_name} renders it as {shown(other[at:])}'
    return Finding("null", Level.WARN, what)


def shapes(seen: Observations) -> Iterator[Finding]:
    """Group the rejected record shapes by reason, and yield a certificate line for each reason.

    Shapes that other certificate lines report are omitted.
    """
    hidden = {SYSTEM.id, REASONING.id, *(record.id for record in PLAIN)}
    if TOOL.id in seen.faults:
        hidden |= {record.id for record in TOOL_SHAPES}
    reasons: dict[str, list[tuple[str, RecordError]]] = {}
    for id, fault in seen.faults.items():
        if id not in hidden:
            reasons.setdefault(fault.kind, []).append((str(id), fault))
    for kind, faults in reasons.items():
        names = [id for id, _ in faults]
        text = f"{', '.join(names)}: records of this shape will be rejected: {faults[0][1].what}"
        yield Finding("shapes", Level.WARN, text, {"kind": kind, "refused": names})
    if not reasons:
        yield Finding("shapes", Level.PASS, f"all {len(seen.probes)} conversation shapes are rendered")
