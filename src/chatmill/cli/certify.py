"""`chatmill certify`: check a chat template against what training relies on, one finding per line."""

from __future__ import annotations

from typing import Annotated

import typer

from chatmill.cli.options import AsJson, argument, echo_json, echo_line, print_losses, progress
from chatmill.cli.record_options import ReadOptions, TemplateFlags, print_rejects
from chatmill.errors import ChatmillError
from chatmill.format import TEMPLATE, TemplateRenderer, open_renderer
from chatmill.format.template.certify.certificate import certify
from chatmill.integrations.transformers_peer import TransformersPeer
from chatmill.prepare.job import existing


def certify_command(
    *,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", help="A Hugging Face folder, or any tokenizer with --chat-template.")
    ],
    inputs: Annotated[list[str] | None, argument("INPUT...", "Conversations of your own.")] = None,
    template: TemplateFlags,
    read: ReadOptions,
    as_json: AsJson = False,
) -> None:
    """Certify a chat template: what training relies on, one line each: PASS, WARN, FAIL or SKIP.

    Renders a small conversation of each shape that records come in and, if given, your own records. Compares the ids
    with those of transformers, each trained answer with its prompt, and its end with the tokens at which the model
    stops.

    FAIL: something would be trained wrongly, or cannot be trained; the exit code is 1. WARN: it works, but you should
    know, as that records of some shape will be refused. SKIP: it was not checked, and why. Faulty records may be
    skipped with --on-error; one of yours that the template refuses is a FAIL.

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
            with read.records(inputs, reads=existing(tokenizer, template.chat_template)) as records:
                findings = certify(renderer, progress(records, "records"), peer=ids_of, peer_name=peer_name)
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
