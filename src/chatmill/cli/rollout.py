"""`chatmill rollout`: targets from the model's own answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from chatmill.cli.options import AddTokens, AsJson, FormatName, TokenizerName, echo_json, progress
from chatmill.errors import DataError, RecordError, one_line
from chatmill.format import ChatFormat, load_format
from chatmill.ledger import Ledger
from chatmill.prepare.job import SHARD_TOKENS
from chatmill.records import record_key
from chatmill.rollout.files import Rollout, Truth, read_rollouts, read_truth
from chatmill.rollout.health import Health
from chatmill.rollout.match import GATE
from chatmill.rollout.prompt import check_prompts, join_prompts, prompt_rows
from chatmill.rollout.schema import Detection, Fields, Schema
from chatmill.rollout.target import Target, build_target
from chatmill.rollout.vocabulary import COORDINATES
from chatmill.rows import Rows
from chatmill.store.layout import METADATA
from chatmill.store.metadata import Metadata, write_metadata
from chatmill.store.publish import building
from chatmill.store.write import SplitWriter
from chatmill.tokenizer import Tokenizer, open_tokenizer

app = typer.Typer(help="Train on the model's own answers.", no_args_is_help=True, rich_markup_mode=None)
CHUNK = 256


@app.callback()
def root() -> None:
    """Train on the model's own answers: keep what they found, append what they missed."""


@app.command("build")
def build(
    rollouts: Annotated[
        Path,
        typer.Argument(
            metavar="ROLLOUTS",
            help="A .jsonl of answers: id, response_token_ids, prompt_token_ids.",
            show_default=False,
        ),
    ],
    truth: Annotated[
        Path, typer.Argument(metavar="TRUTH", help="A .jsonl of records: id, messages, objects.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the dataset.")],
    tokenizer: TokenizerName = "bytes",
    format: FormatName = "chatml",
    add_tokens: AddTokens = False,
    fields: Annotated[
        str | None,
        typer.Option(
            help="Entries have these fields, with commas between, matched if equal. Left out: desc and boxes."
        ),
    ] = None,
    gate: Annotated[float, typer.Option(help="Boxes that overlap less are not matched.")] = GATE,
    train_values: Annotated[
        bool, typer.Option(help="Whether the texts of appended entries are trained; all else that is appended is.")
    ] = True,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a shard.")] = SHARD_TOKENS,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the dataset if it is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a dataset of targets from stored rollouts: each answer's prefix is kept, what it missed is appended.

    Matched coordinates are trained toward the true ones, what is appended is trained, all else is context.

    \b
    Examples:
      chatmill rollout build rollouts.jsonl truth.jsonl -o data/stage2 --add-tokens
      chatmill rollout build rollouts.jsonl truth.jsonl -o data/people --fields name,born
    """
    schema: Schema = Detection(gate) if fields is None else Fields(tuple(name.strip() for name in fields.split(",")))
    chosen = load_format(format)
    besides = COORDINATES if schema.uses_coordinates else ()
    opened = open_tokenizer(tokenizer, control=chosen.tokens, besides=besides, add_tokens=add_tokens)
    known = {found.record.id or "": found for found in read_truth(truth)}
    health, ledger = Health(), Ledger()
    with building(output, "rollout", overwrite=overwrite, marker=METADATA, source=truth) as staging:
        with SplitWriter(staging / "train", vocab_size=opened.vocab_size, shard_tokens=shard_tokens) as writer:
            pairs = progress(_pairs(rollouts, known), "rollouts")
            for rows in target_rows(pairs, chosen, opened, schema, health, train_values=train_values):
                writer.append(rows)
                trained = int(rows.mask().sum())
                ledger.add("read", rows=len(rows))
                ledger.add("rendered", rows=len(rows), tokens=len(rows.ids), trained=trained)
                ledger.add("stored", rows=len(rows), tokens=len(rows.ids), trained=trained)
            split = writer.close()
        if not split.num_episodes:
            raise DataError(f"{rollouts}: holds no rollout; expected at least one")
        for reason, count in (("truncated", health.truncated), ("broken", health.broken)):
            if count:
                ledger.add("noted", reason, rows=count)
        for reason, count in sorted(health.fallback.items()):
            ledger.add("noted", f"fallback_{reason}", rows=count)
        special = opened.special_token_ids()
        metadata = write_metadata(
            staging,
            vocab_size=opened.vocab_size,
            format=chosen.to_json(),
            tokenizer={"name": opened.name, "sha256": opened.sha256},
            tokenizer_state=opened.state(added_tokens=add_tokens),
            special_token_ids=special,
            pad_token_id=special[chosen.eot],
            splits={"train": split},
            ledger=ledger,
            config={
                "made_by": "rollout build",
                "fields": None if fields is None else list(fields.split(",")),
                "gate": gate,
                "train_values": train_values,
                "shard_tokens": shard_tokens,
                "health": health.to_json(),
            },
        )
    _tell(output, metadata, health, as_json=as_json)


def target_rows(
    pairs: Iterable[tuple[Truth, Rollout]],
    format: ChatFormat,
    tokenizer: Tokenizer,
    schema: Schema,
    health: Health,
    *,
    train_values: bool,
) -> Iterator[Rows]:
    """Prompts with their targets, some at a time; every rollout is counted."""
    stream = iter(pairs)
    eos = tokenizer.special_token_ids()[format.eot]
    while chunk := list(islice(stream, CHUNK)):
        prompts = prompt_rows([truth.record for truth, _ in chunk], format, tokenizer)
        keys = b"".join(record_key(truth.record) for truth, _ in chunk)
        prompts.origins["key"] = np.frombuffer(keys, dtype="<u8").reshape(-1, 2)
        targets = [_target(truth, rollout, tokenizer, schema, eos, train_values) for truth, rollout in chunk]
        for target, (_, rollout) in zip(targets, chunk, strict=True):
            health.add(target, len(rollout.response_token_ids))
        rows = join_prompts(prompts, [target.rows for target in targets])
        own = [prompts.ids[start:stop].tolist() for start, stop in pairwise(prompts.row_start.tolist())]
        said = [rollout.prompt_token_ids or own[row] for row, (_, rollout) in enumerate(chunk)]
        check_prompts(rows, said, lambda row: _place(chunk[row][0]))
        yield rows


def _target(
    truth: Truth, rollout: Rollout, tokenizer: Tokenizer, schema: Schema, eos: int, train_values: bool
) -> Target:
    try:
        return build_target(
            rollout.response_token_ids,
            truth.objects,
            tokenizer=tokenizer,
            schema=schema,
            eos_id=eos,
            train_values=train_values,
        )
    except DataError as error:
        raise DataError(f"{_place(truth)}: {error}") from None


def _place(truth: Truth) -> str:
    record = truth.record
    return f"{record.file}:{record.line} (id={one_line(record.id or '')})"


def _pairs(path: Path, known: dict[str, Truth]) -> Iterator[tuple[Truth, Rollout]]:
    for line, rollout in read_rollouts(path):
        if rollout.id not in known:
            right = "expected the id of a record of the truth"
            raise RecordError("the rollout is of an unknown record", right, kind="id").at(str(path), line, rollout.id)
        yield known[rollout.id], rollout


def _tell(output: Path, metadata: Metadata, health: Health, *, as_json: bool) -> None:
    split = metadata.splits["train"]
    if as_json:
        counts: dict[str, Any] = {
            "episodes": split.num_episodes,
            "tokens": split.num_tokens,
            "trained_tokens": split.num_trained_tokens,
        }
        echo_json({"path": str(output), "sha256": metadata.sha256, "train": counts, "health": health.to_json()})
        return
    typer.echo(
        f"{output}/train: {split.num_episodes:,} episodes, {split.num_tokens:,} tokens, "
        f"{split.num_trained_tokens / split.num_tokens:.1%} trained"
    )
    for line in health_lines(health):
        typer.echo(line)


def health_lines(health: Health) -> Iterator[str]:
    """What a person wants to know of rollouts."""
    true = health.matched + health.missed
    share = f" ({health.matched / true:.1%})" if true else ""
    yield (
        f"  true objects {true:,}: {health.matched:,} found{share}, {health.missed:,} appended; "
        f"{health.false_positives:,} found that are none"
    )
    yield (
        f"  tokens of rollouts {health.rollout_tokens:,}: {health.kept_tokens:,} kept, "
        f"{health.slots:,} of them trained as coordinates"
    )
    for name, counts in (("entries dropped", health.dropped), ("nothing kept", health.fallback)):
        if counts:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))
            yield f"  {name}: {reasons}"
    if health.truncated:
        yield f"  {health.truncated:,} rollouts end before their answer does"
    if health.broken:
        yield f"  {health.broken:,} targets hold a body that is no JSON"
    if health.gated:
        yield f"  {health.gated:,} pairs overlap too little to be matched"
