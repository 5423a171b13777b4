"""Certificates of chat templates, with one line for each property that training relies on.

Each property is checked on one conversation per record shape and on the user's records, if any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from chatmill.format.template.certify import template_lines, trained_lines
from chatmill.format.template.certify.finding import Finding, Level, line_of
from chatmill.format.template.certify.observe import InOrder, Observations, Peer
from chatmill.format.template.probes import PLAIN
from chatmill.format.template.renderer import TemplateRenderer
from chatmill.records import Record

LINES = (
    *(trained_lines.ids, trained_lines.answers, trained_lines.terminator, trained_lines.bos, trained_lines.prompt),
    *(trained_lines.borders, trained_lines.text_tokens, template_lines.space, template_lines.history),
    *(template_lines.system, template_lines.tools, template_lines.reasoning, template_lines.null_content),
)


def certify(
    renderer: TemplateRenderer,
    records: Iterable[Record] = (),
    *,
    peer: Peer | None = None,
    peer_name: str = "",
    in_order: InOrder = map,
) -> list[Finding]:
    """Return the lines of the certificate, in order. The lines refer to the peer library as `peer_name`.

    `in_order` applies a function to chunks of records: `map`, or an equivalent that uses several processes.
    """
    seen = Observations(renderer, peer, peer_name)
    seen.read(records, in_order)
    return list(_findings(seen))


def _findings(seen: Observations) -> Iterator[Finding]:
    if seen.good:
        for line in LINES:
            yield line(seen)
        yield from template_lines.shapes(seen)
    else:
        yield _all_refused(seen)
    yield trained_lines.sandbox(seen)
    if seen.own.count:
        yield trained_lines.own_records(seen)


def _all_refused(seen: Observations) -> Finding:
    """Return the line that a certificate contains if the template rejects every conversation."""
    record = PLAIN[0]
    fault = seen.faults[record.id]
    details = {"kind": fault.kind, "what": fault.what, "right": fault.right}
    what = f"every conversation is rejected: {trained_lines.reason(seen, record, fault)}"
    return Finding(line_of(fault), Level.FAIL, what, details)
