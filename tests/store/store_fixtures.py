from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from chatmill.ledger import Ledger
from chatmill.rows import NO_FILE, ORIGIN, OWN_ID, SPAN, File, Part, Role, Rows, Rule, concat, offsets
from chatmill.store.metadata import Metadata, SplitInfo, write_metadata
from chatmill.store.publish import publish, staging_for
from chatmill.store.write import SplitWriter

FIELDS = ("ids", "spans", "first_span", "origins", "first_segment")


def equal(one: Rows, other: Rows) -> bool:
    """Whether two Rows are equal. File numbers may differ if they refer to the same files."""
    one, other = concat([one, Rows(*_none(), files=other.files)]), concat([Rows(*_none(), files=one.files), other])
    return all(np.array_equal(getattr(one, field), getattr(other, field)) for field in FIELDS)


def _none() -> tuple:
    empty = concat([])
    return tuple(getattr(empty, field) for field in FIELDS)


def some_rows(seed: int, *, count: int = 40, vocab_size: int = 1000, targets: bool = True) -> Rows:
    rng = np.random.default_rng(seed)
    segments = rng.integers(0, 4, count)
    spans = rng.integers(0, 5, segments.sum())
    table = np.zeros(spans.sum(), dtype=SPAN)
    table["length"] = rng.integers(1, 9, len(table))
    table["message"] = rng.integers(0, 4, len(table))
    table["weight"] = rng.choice([0, 0.5, 1], len(table))
    table["target"] = rng.choice([OWN_ID, OWN_ID, 7], len(table)) if targets else OWN_ID
    table["role"] = rng.choice([Role.USER, Role.ASSISTANT, Role.NONE], len(table))
    table["part"] = rng.choice([Part.CONTENT, Part.CLOSE], len(table))
    table["rule"] = rng.choice([Rule.ROLE, Rule.FLAG], len(table))
    origins = np.zeros(segments.sum(), dtype=ORIGIN)
    origins["file"] = rng.choice([0, 1, 2, NO_FILE], len(origins))
    origins["line"] = rng.integers(1, 2**40, len(origins))
    origins["key"] = rng.integers(0, 2**63, (len(origins), 2))
    return Rows(
        rng.integers(0, vocab_size, table["length"].sum()).astype(np.uint32),
        table,
        offsets(spans),
        origins,
        offsets(segments),
        tuple(File("source", f"{name}.jsonl") for name in "abc"),
    )


def write_split(folder: Path, parts: Sequence[Rows], *, vocab_size: int, shard_tokens: int) -> SplitInfo:
    with SplitWriter(folder, vocab_size=vocab_size, shard_tokens=shard_tokens) as writer:
        for rows in parts:
            writer.append(rows)
        return writer.close()


def finish(staging: Path, splits: dict[str, SplitInfo], *, vocab_size: int) -> Metadata:
    ledger = Ledger()
    for info in splits.values():
        counts = {"rows": info.num_episodes, "tokens": info.num_tokens}
        ledger.add("read", rows=info.num_episodes)
        ledger.add("rendered", **counts)
        ledger.add("stored", **counts, trained=info.num_trained_tokens)
    return write_metadata(
        staging,
        Metadata(
            vocab_size=vocab_size,
            format={"name": "plain é"},
            tokenizer={"name": "bytes", "sha256": "0" * 64},
            special_token_ids={"eos": 3},
            pad_token_id=0,
            splits=splits,
            ledger=ledger,
            config={"fit": "turns", "share": 1e-05},
        ),
        tokenizer_state={"kind": "bytes"},
    )


def write_dataset(
    target: Path, splits: dict[str, Rows], *, vocab_size: int = 1000, shard_tokens: int = 200, overwrite: bool = False
) -> Metadata:
    staging = staging_for(target)
    infos = {
        name: write_split(staging / name, [rows], vocab_size=vocab_size, shard_tokens=shard_tokens)
        for name, rows in splits.items()
    }
    metadata = finish(staging, infos, vocab_size=vocab_size)
    publish(staging, target, overwrite=overwrite)
    return metadata


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
