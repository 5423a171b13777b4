"""`chatmill rollout`: train on targets made from the model's own answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from chatmill.cli.options import AsJson, argument, command_group, counted, counting, echo_json, echo_line, unread_key
from chatmill.cli.record_options import AddTokens, TokenizerName
from chatmill.errors import UsageError
from chatmill.ledger import UNREAD_KEY
from chatmill.prepare.job import SHARD_TOKENS
from chatmill.rollout.dataset import build_answer_dataset, build_target_dataset
from chatmill.rollout.match import GATE
from chatmill.rollout.target import Border
from chatmill.rollout.task import Health, open_task
from chatmill.store.metadata import Metadata
from chatmill.tokenizer import MissingTokensError

app = command_group("Train on the model's own answers.")

TruthFile = Annotated[
    str, argument("TRUTH", ".jsonl file of ground-truth records with the keys id, messages and objects.")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder of the dataset to write.")]
FieldNames = Annotated[
    str | None,
    typer.Option(
        "--fields",
        help="Comma-separated fields of an entry. Entries match if all fields are equal. Default: desc and boxes.",
    ),
]
FormatName = Annotated[
    str | None,
    typer.Option(
        help="Chat format: a preset (see `chatmill formats`), a .toml file, or template. Default: the chat template of "
        "the tokenizer's folder if it has one, else chatml."
    ),
]
ShardTokens = Annotated[int, typer.Option(min=1, help="Tokens per shard.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing dataset.")]


@app.command("build")
def build(
    rollouts: Annotated[
        str,
        argument("ROLLOUTS", ".jsonl file of answers with the keys id, response_token_ids and prompt_token_ids."),
    ],
    truth: TruthFile,
    output: Output,
    tokenizer: TokenizerName = "bytes",
    format: FormatName = None,
    add_tokens: AddTokens = False,
    fields: FieldNames = None,
    gate: Annotated[float, typer.Option(help="Minimum overlap (IoU) of matched boxes.")] = GATE,
    train_values: Annotated[bool, typer.Option(help="Also train on the texts of appended entries.")] = True,
    train_cut: Annotated[
        bool,
        typer.Option(
            help="If the kept prefix ends inside a token, train on the shorter tokens that replace this token."
        ),
    ] = False,
    border: Annotated[
        Border,
        typer.Option(
            help="How to tokenize the start of the appended text: on its own (shorter), on its own with "
            "the first token masked (masked), together with the last token of the answer (joined), or as part "
            "of the whole text (canonical)."
        ),
    ] = "shorter",
    shard_tokens: ShardTokens = SHARD_TOKENS,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Build a dataset from stored rollouts: keep a prefix of each answer and append the objects that the answer missed.

    The model is trained on the ground truth of matched coordinates and on the appended objects. All other tokens are
    context. Writes the dataset to OUTPUT.

    \b
    Examples:
      chatmill rollout build rollouts.jsonl truth.jsonl -o data/stage2 --add-tokens
      chatmill rollout build rollouts.jsonl truth.jsonl -o data/people --fields name,born
    """
    task = open_task(tokenizer, format, fields=_names(fields), gate=gate, add_tokens=add_tokens)
    options = {
        "gate": gate,
        "train_values": train_values,
        "train_cut": train_cut,
        "border": border,
        "shard_tokens": shard_tokens,
    }
    config = {"made_by": "rollout build", "fields": fields, **options}
    with counting("rollouts") as advance:
        metadata, health = build_target_dataset(
            rollouts, truth, output, task, config=config, overwrite=overwrite, progress=advance
        )
    _tell(output, metadata, health, as_json=as_json)


@app.command("answers")
def answers(
    truth: TruthFile,
    output: Output,
    tokenizer: TokenizerName = "bytes",
    format: FormatName = None,
    add_tokens: AddTokens = False,
    fields: FieldNames = None,
    shard_tokens: ShardTokens = SHARD_TOKENS,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Build a dataset of ground-truth answers, for fine-tuning before rollouts.

    Each answer lists all objects of its record in order, with coordinate tokens. The model is trained on the whole
    answer.

    \b
    Example:
      chatmill rollout answers truth.jsonl -o data/stage1 --add-tokens
    """
    task = open_task(tokenizer, format, fields=_names(fields), add_tokens=add_tokens)
    config = {"made_by": "rollout answers", "fields": fields, "shard_tokens": shard_tokens}
    with counting("records") as advance:
        metadata = build_answer_dataset(truth, output, task, config=config, overwrite=overwrite, progress=advance)
    _tell(output, metadata, None, as_json=as_json)


@app.command("train")
def train(
    config: Annotated[Path, argument("CONFIG", "JSON file of settings.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the run to.")],
    resume: Annotated[
        str | None,
        typer.Option(help="Checkpoint folder to continue from. auto selects the newest checkpoint, if any."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Generate answers with a model, turn them into targets, and train the model on the targets.

    CONFIG sets the ground truth, the model and its tokenizer; `chatmill rollout keys` lists all settings. Writes
    metrics.jsonl, rollouts.jsonl and checkpoints to OUTPUT.

    \b
    Examples:
      chatmill rollout train stage2.json -o runs/stage2
      chatmill rollout train stage2.json -o runs/stage2 --resume auto
      torchrun --nproc-per-node 8 -m chatmill rollout train stage2.json -o runs/stage2
    """
    from chatmill.rollout.config import RolloutConfig
    from chatmill.rollout.loop import train_rollouts
    from chatmill.train.command import errors_of_first_rank, is_first_rank

    with errors_of_first_rank():
        try:
            result = train_rollouts(RolloutConfig.from_file(config), output, resume=resume, quiet=as_json)
        except MissingTokensError as error:
            # `rollout train` has a config key instead of the --add-tokens flag.
            raise UsageError(str(error).replace("--add-tokens", '"add_tokens": true in the config')) from None
    if not is_first_rank():
        return
    if as_json:
        echo_json(result.to_json())
        return
    loss = "" if result.loss is None else f", loss {result.loss:.4f}"
    echo_line(f"{output}: step {result.step:,} of {result.total:,}{loss}")
    for line in health_lines(result.health) if result.health.rollouts or result.health.too_long else ():
        typer.echo(line)
    if result.checkpoint is not None:
        echo_line(f"model: {result.checkpoint / 'model'}")
    if result.stopped_by is not None:
        typer.echo(f"stopped by {result.stopped_by}; continue with --resume auto")


@app.command("keys")
def keys(as_json: AsJson = False) -> None:
    """List the settings of `chatmill rollout train` with their defaults and meanings.

    \b
    Example:
      chatmill rollout keys
    """
    from chatmill.config import keys_of
    from chatmill.rollout.config import RolloutConfig

    known = [(each.name, each.default, each.help) for each in keys_of(RolloutConfig).values()]
    if as_json:
        echo_json({name: {"default": default, "meaning": doc} for name, default, doc in known})
        return
    for name, default, doc in known:
        typer.echo(f"{name:<28} {json.dumps(default):<10} {doc}")


def _names(fields: str | None) -> tuple[str, ...] | None:
    return None if fields is None else tuple(name.strip() for name in fields.split(","))


def _tell(output: Path, metadata: Metadata, health: Health | None, *, as_json: bool) -> None:
    split = metadata.splits["train"]
    if as_json:
        counts = {
            "episodes": split.num_episodes,
            "tokens": split.num_tokens,
            "trained_tokens": split.num_trained_tokens,
        }
        of_rollouts = {} if health is None else {"health": health.to_json()}
        echo_json({"path": str(output), "sha256": metadata.sha256, "train": counts, **of_rollouts})
        return
    echo_line(
        f"{output}/train: {counted(split.num_episodes, 'episode')}, {split.num_tokens:,} tokens, "
        f"{split.num_trained_tokens / split.num_tokens:.1%} trained"
    )
    for line in () if health is None else health_lines(health):
        typer.echo(line)
    for _, reason, entry in metadata.ledger:
        if reason.startswith(UNREAD_KEY):
            typer.echo(f"note: {unread_key(reason, entry.rows)}")


def health_lines(health: Health) -> Iterator[str]:
    true = health.matched + health.missed
    share = f" ({health.matched / true:.1%})" if true else ""
    yield (
        f"  true objects {true:,}: {health.matched:,} found{share}, {health.missed:,} appended; "
        f"{health.false_positives:,} false positives"
    )
    yield (
        f"  rollout tokens {health.rollout_tokens:,}: {health.kept_tokens:,} kept, "
        f"{health.slots:,} of them trained as coordinates"
    )
    for name, counts in (("entries dropped", health.dropped), ("nothing kept", health.fallback)):
        if counts:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))
            yield f"  {name}: {reasons}"
    if health.truncated:
        yield f"  rollouts with an incomplete answer: {health.truncated:,}"
    if health.broken:
        yield f"  targets whose body is not valid JSON: {health.broken:,}"
    if health.gated:
        yield f"  pairs that overlap too little to be matched: {health.gated:,}"
    if health.as_text:
        yield (
            f"  {health.as_text:,} answers were returned as text; for {health.retokenized:,} of them, the number of "
            "tokens differs from the server's count"
        )
    if health.too_long:
        yield f"  {health.too_long:,} prompts and targets exceed the model's maximum sequence length and were left out"
