"""`chatmill certify`: check a chat template against what training relies on, one finding per line."""

from __future__ import annotations

from typing import Annotated

import typer

from chatmill.cli.options import AsJson, argument, echo_json, progress
from chatmill.cli.record_options import ReadOptions, TemplateFlags, print_rejects
from chatmill.cli.transformers_peer import TransformersPeer
from chatmill.errors import ChatmillError
from chatmill.format import TEMPLATE, TemplateRenderer, open_renderer
from chatmill.format.template.certify import certify
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
    """Certify a chat template: what it keeps of what training relies on, PASS or FAIL in one line each.

    It is held against small conversations made for the purpose and, if given, against your own: the ids against those
    of transformers, the mask by two derivations, the end of each answer against what the model stops at. Exit code 1
    if a line says FAIL. Faulty records may be skipped; one that the template refuses is a FAIL.

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
            print_rejects(records)
        else:
            findings = certify(renderer, (), peer=ids_of, peer_name=peer_name)
    passed = all(finding.passed for finding in findings)
    name = renderer.folder.template.name
    if as_json:
        lines = [finding._asdict() for finding in findings]
        echo_json({"template": name, "passed": passed, "findings": lines, "protections": renderer.process.protections})
    else:
        for finding in findings:
            typer.echo(f"{'PASS' if finding.passed else 'FAIL'}  {finding.name:<10}  {finding.text}")
    if not passed:
        failed = [finding.name for finding in findings if not finding.passed]
        raise ChatmillError(f"{name}: not certified: {', '.join(failed)}")
