"""`chatmill certify`: check that a chat template is safe to train with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated

import typer

from chatmill.cli.options import AsJson, Workers, argument, counting_after_fork, echo_json, echo_line, print_losses
from chatmill.cli.record_options import ReadOptions, TemplateFlags, print_rejects
from chatmill.errors import ChatmillError
from chatmill.format import TEMPLATE, TemplateRenderer, open_renderer
from chatmill.format.template.certify.certificate import certify
from chatmill.format.template.certify.observe import OwnRecords
from chatmill.integrations.transformers_peer import TransformersPeer
from chatmill.prepare.engine import LocalEngine
from chatmill.prepare.job import existing
from chatmill.records import Record

IF_KILLED = "run again with fewer --workers"


def certify_command(
    *,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", help="Hugging Face model folder, or any tokenizer with --chat-template.")
    ],
    inputs: Annotated[list[str] | None, argument("INPUT...", "Additional conversations to check.")] = None,
    template: TemplateFlags,
    read: ReadOptions,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Check that a chat template is safe to train with. Prints PASS, WARN, FAIL or SKIP for each check.

    Renders small test conversations (with a system message, tools, reasoning, ...) and, if given, your own records.
    Checks that the token ids equal those of transformers. Checks that each trained answer starts where its generation
    prompt ends, and ends with a token at which the model stops.

    FAIL: some token ids or loss masks are wrong, or some records cannot be used for training; the exit code is 1. WARN:
    training works, but with a limitation; for example, some kinds of records are rejected. SKIP: the check did not run,
    for the reason shown. Use --on-error skip to skip records that cannot be read; a record that the template rejects
    results in FAIL.

    \b
    Examples:
      chatmill certify --tokenizer Qwen3-4B
      chatmill certify --tokenizer Qwen3-4B chat.jsonl --template-arg enable_thinking=false
      chatmill certify --tokenizer tokenizer.json --chat-template chatml.jinja --json
    """
    renderer = open_renderer(TEMPLATE, tokenizer, template=template.options())
    assert isinstance(renderer, TemplateRenderer)
    with TransformersPeer(renderer) as peer:
        ids_of, peer_name = (peer, f"transformers {peer.version}") if peer.version else (None, "")
        if inputs:
            reads = existing(tokenizer, template.chat_template)
            with read.records(inputs, reads=reads) as records, counting_after_fork("records") as count:
                in_order = partial(_observed, LocalEngine(workers, if_killed=IF_KILLED), count)
                findings = certify(renderer, records, peer=ids_of, peer_name=peer_name, in_order=in_order)
            print_losses(records.ledger, err=True)
            print_rejects(records)
        else:
            findings = certify(renderer, (), peer=ids_of, peer_name=peer_name)
    failed = [finding.name for finding in findings if not finding.passed]
    name = renderer.folder.template.name
    if as_json:
        lines = [finding._asdict() for finding in findings]
        protections = renderer.process.protections
        echo_json({"template": name, "passed": not failed, "findings": lines, "protections": protections})
    else:
        for finding in findings:
            echo_line(f"{finding.level}  {finding.name:<11}  {finding.text}")
    if failed:
        raise ChatmillError(f"{name}: not certified: {', '.join(failed)}")


def _observed(
    engine: LocalEngine,
    count: Callable[[int], None],
    observe: Callable[[list[Record]], OwnRecords],
    chunks: Iterable[list[Record]],
) -> Iterator[OwnRecords]:
    """Yield `observe(chunk)` for each chunk in order, computed in worker processes if possible."""
    in_processes = partial(engine.in_order, processes=engine.workers, most=2 * engine.workers)
    # Do not fork if this process runs other threads, such as those for network requests: the workers could deadlock.
    is_serial = engine.workers == 1 or threading.active_count() > 1
    for own in (map if is_serial else in_processes)(observe, chunks):
        count(own.count)
        yield own
