"""Build datasets of rollout targets or true answers from rollout files and ground-truth records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from chatmill.errors import DataError, RecordError
from chatmill.ledger import UNREAD_KEY, Ledger
from chatmill.records.files import label, local_files, shown
from chatmill.remote.urls import place
from chatmill.rollout.files import GroundTruth, Rollout, read_rollouts, read_truth
from chatmill.rollout.task import Health, Task, answer_rows, target_rows
from chatmill.rows import Rows
from chatmill.store.metadata import Metadata, write_metadata
from chatmill.store.publish import building, check_target
from chatmill.store.write import SplitWriter

CHUNK = 256
"""Number of rows to build at a time."""
Progress = Callable[[int], None]
T = TypeVar("T")


def build_target_dataset(
    rollouts: str | Path,
    truth: str | Path,
    output: Path,
    task: Task,
    *,
    config: Mapping[str, Any],
    overwrite: bool = False,
    progress: Progress = lambda count: None,
) -> tuple[Metadata, Health]:
    """Build a dataset of rollout targets from stored rollouts; return its metadata and counts of problems in the
    rollouts.

    `config` must contain shard_tokens, train_values, train_cut and border, and is stored in the dataset.
    """
    check_target(output, overwrite=overwrite)
    truths = {each.record.id or "": each for each in read_truth(truth)}
    health, ledger = Health(), Ledger()
    for each in truths.values():
        _note_keys(each, ledger)
    options = {name: config[name] for name in ("train_values", "train_cut", "border")}

    def rows() -> Iterator[Rows]:
        for chunk in _chunks(_pairs(rollouts, truths), progress):
            yield target_rows(chunk, task, health, **options)
        if not health.rollouts:
            raise DataError(f"{shown(place(rollouts))}: contains no rollouts; expected at least one")
        for reason, count in {"truncated": health.truncated, "broken": health.broken, **health.fallback}.items():
            if count:
                ledger.add("noted", reason, rows=count)

    return _write(
        output, rows(), task, ledger, config=config, reads=local_files([rollouts, truth]), overwrite=overwrite
    ), health


def build_answer_dataset(
    truth: str | Path,
    output: Path,
    task: Task,
    *,
    config: Mapping[str, Any],
    overwrite: bool = False,
    progress: Progress = lambda count: None,
) -> Metadata:
    """Build a dataset of prompts with their true answers. `config` must contain shard_tokens, and is stored in the
    dataset.
    """
    ledger = Ledger()

    def rows() -> Iterator[Rows]:
        chunk = None
        for chunk in _chunks(read_truth(truth), progress):
            for each in chunk:
                _note_keys(each, ledger)
            yield answer_rows(chunk, task)
        if chunk is None:
            raise DataError(f"{shown(place(truth))}: contains no records; expected at least one")

    return _write(output, rows(), task, ledger, config=config, reads=local_files([truth]), overwrite=overwrite)


def _note_keys(truth: GroundTruth, ledger: Ledger) -> None:
    for name in truth.record.unread_keys:
        ledger.add("noted", UNREAD_KEY + name, rows=1)


def _chunks(items: Iterable[T], progress: Progress) -> Iterator[list[T]]:
    stream = iter(items)
    while chunk := list(islice(stream, CHUNK)):
        yield chunk
        progress(len(chunk))


def _pairs(path: str | Path, truths: Mapping[str, GroundTruth]) -> Iterator[tuple[GroundTruth, Rollout]]:
    for line, rollout in read_rollouts(path):
        if rollout.id not in truths:
            right = "expected the id of a ground-truth record"
            raise RecordError("the rollout has an unknown id", right, kind="id").at(
                label(place(path)), line, rollout.id
            )
        yield truths[rollout.id], rollout


def _write(
    output: Path,
    parts: Iterable[Rows],
    task: Task,
    ledger: Ledger,
    *,
    config: Mapping[str, Any],
    reads: Sequence[Path],
    overwrite: bool,
) -> Metadata:
    tokenizer, special = task.tokenizer, task.tokenizer.special_token_ids()
    with building(output, "rollout", overwrite=overwrite, reads=reads) as staging:
        shard_tokens = config["shard_tokens"]
        with SplitWriter(staging / "train", vocab_size=tokenizer.vocab_size, shard_tokens=shard_tokens) as writer:
            for rows in parts:
                writer.append(rows)
                counts = {"rows": len(rows), "tokens": len(rows.ids), "trained": int(rows.mask().sum())}
                ledger.add("read", rows=len(rows))
                ledger.add("rendered", "", **counts)
                ledger.add("stored", "", **counts)
            split = writer.close()
        return write_metadata(
            staging,
            Metadata(
                vocab_size=tokenizer.vocab_size,
                format=task.renderer.to_json(),
                tokenizer={"name": tokenizer.name, "sha256": tokenizer.sha256},
                special_token_ids=special,
                pad_token_id=task.eos_id,
                splits={"train": split},
                ledger=ledger,
                config=config,
            ),
            tokenizer_state=tokenizer.state(added_tokens=task.add_tokens),
        )
