"""`chatmill recipe check`: preview the sources of a recipe before building it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import typer

from chatmill.cli.check import message_lines, shape_lines
from chatmill.cli.options import AsJson, argument, counted, echo_json, echo_line, share
from chatmill.cli.record_options import AllowCode
from chatmill.errors import one_line
from chatmill.prepare.recipe import load_recipe
from chatmill.prepare.recipe_check import EXAMPLES, RECORDS, RemovedExample, SourceSample, check_recipe
from chatmill.records.files import label
from chatmill.remote.urls import place


def check_command(
    recipe: Annotated[str, argument("RECIPE", "Recipe: a .toml, .yaml or .yml file, local or at a URL.")],
    records: Annotated[
        int, typer.Option("--records", "-n", min=1, help="Number of records to read from each source.")
    ] = RECORDS,
    allow_code: AllowCode = None,
    as_json: AsJson = False,
) -> None:
    """Preview a recipe: read the first records of each source, and show which would be kept or removed.

    Renders, filters and deduplicates the records in the same way as a build. Does not write a dataset.

    \b
    Examples:
      chatmill recipe check recipe.yaml
      chatmill recipe check s3://team/recipe.toml --records 100 --json
    """
    job = load_recipe(recipe)
    samples = check_recipe(job, records=records, allow_code=tuple(allow_code or ()))
    if as_json:
        echo_json({"recipe": str(place(recipe)), "sources": [_json(sample) for sample in samples]})
        return
    for sample in samples:
        for line in _lines(sample, stops=job.on_error == "stop"):
            echo_line(line)


def _lines(sample: SourceSample, *, stops: bool) -> Iterator[str]:
    files, size = len(sample.files), sum(size for _, size in sample.files)
    yield f"{sample.name}: {counted(files, 'file')}, {size:,} bytes"
    yield from (f"  {line}" for line in shape_lines([part for part, _ in sample.files]))
    read = "the whole source" if sample.read_whole else "only the first records; see --records"
    yield f"  read:     {counted(sample.records, 'record')}, {read}"
    if sample.first is not None:
        yield f"  first:    {sample.first.file}:{sample.first.line}"
        yield from (f"    {line}" for line in message_lines(sample.first, sample.trained))
    if sample.faults:
        yield f"  faulty:   {counted(len(sample.faults), 'record')}" + (
            "; a build would stop at the first faulty record" if stops else ", skipped"
        )
        yield from (f"    {fault}" for fault in sample.faults[:EXAMPLES])
    for reason, count in sample.removed.items():
        yield f"  removed:  {counted(count, 'record')}, {reason}"
        yield from (f"    {_example(example)}" for example in sample.examples[reason])
    for bucket, reason, entry in sample.ledger:
        if bucket in ("repeated", "truncated", "dropped", "noted") and reason not in sample.removed:
            rows = f"{counted(entry.rows, 'row')}, " if entry.rows else ""
            yield f"  {bucket + ':':<9} {rows}{entry.tokens:,} tokens, {reason}"
    trained = share(sample.trained_tokens, sample.tokens)
    yield f"  kept:     {counted(sample.rows, 'row')}, {sample.tokens:,} tokens, {trained} trained"


def _example(example: RemovedExample) -> str:
    twin = f" (as {example.twin['file']}:{example.twin['line']})" if example.twin is not None else ""
    return f'{example.file}:{example.line} "{one_line(_text(example))}"{twin}'


def _text(example: RemovedExample) -> str:
    """Return the text of the first non-system message of a removed record."""
    messages = example.record.messages if example.record is not None else ()
    texts = [message.content for message in messages if message.content and message.role != "system"]
    return texts[0] if texts else ""


def _json(sample: SourceSample) -> dict[str, Any]:
    first: Any = None
    if sample.first is not None:
        first = msgspec.to_builtins(sample.first)
        for message, trained in zip(first["messages"], sample.trained, strict=False):
            message["trained"] = trained
    return {
        "name": sample.name,
        "files": [
            {"file": label(part.path), "bytes": size, "shape": part.shape, "why": part.why}
            for part, size in sample.files
        ],
        "records": sample.records,
        "read_whole": sample.read_whole,
        "first": first,
        "faulty": {"records": len(sample.faults), "examples": [str(fault) for fault in sample.faults[:EXAMPLES]]},
        "removed": {
            reason: {
                "records": count,
                "examples": [
                    {"file": each.file, "line": each.line, "text": _text(each)}
                    | ({} if each.twin is None else {"twin": each.twin})
                    for each in sample.examples[reason]
                ],
            }
            for reason, count in sample.removed.items()
        },
        "rows": sample.rows,
        "tokens": sample.tokens,
        "trained_tokens": sample.trained_tokens,
        "ledger": sample.ledger.to_json(),
    }
