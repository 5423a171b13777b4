from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from plain_rows import unbuild

from chatmill.ledger import Ledger
from chatmill.load.batch import Batch
from chatmill.rows import NO_FILE, ORIGIN, OWN_ID, SPAN, Part, Role, Rows, Rule, offsets
from chatmill.store import CacheMeta, write_cache
from chatmill.store.layout import INDEX, MASK, TOKENS, shard_name
from chatmill.store.metadata import Metadata, write_metadata
from chatmill.store.publish import publish, staging_for
from chatmill.store.write import SplitWriter

PAD = 3
SMALL = {"batch_size": 4, "block_size": 16, "use_loss_mask": True, "epoch_seed": 3}


def write_rows(target: Path, splits: Mapping[str, Rows], *, vocab_size: int = 1000, shard_tokens: int = 120) -> Path:
    staging, ledger, infos = staging_for(target), Ledger(), {}
    for name, rows in splits.items():
        with SplitWriter(staging / name, vocab_size=vocab_size, shard_tokens=shard_tokens) as writer:
            writer.append(rows)
            infos[name] = writer.close()
        ledger.add("read", rows=len(rows))
        ledger.add("rendered", rows=len(rows), tokens=len(rows.ids))
        ledger.add("stored", rows=len(rows), tokens=len(rows.ids), trained=infos[name].num_trained_tokens)
    write_metadata(
        staging,
        Metadata(
            vocab_size=vocab_size,
            format={"name": "plain"},
            tokenizer={"name": "bytes", "sha256": "0" * 64},
            special_token_ids={"eot": PAD},
            pad_token_id=PAD,
            splits=infos,
            ledger=ledger,
            config={},
        ),
        tokenizer_state={"kind": "bytes"},
    )
    publish(staging, target, overwrite=False)
    return target


def write_source(root: Path, name: str, splits: Mapping[str, Rows], *, vocab_size: int = 1000) -> Path:
    ledger = Ledger()
    for rows in splits.values():
        trained = int(np.count_nonzero(rows.mask()))
        ledger.add("read", rows=len(rows))
        ledger.add("rendered", rows=len(rows), tokens=len(rows.ids))
        ledger.add("stored", rows=len(rows), tokens=len(rows.ids), trained=trained)
    write_cache(
        root,
        CacheMeta(
            source=name,
            format="primer",
            tokenizer_sha256="0" * 64,
            vocab_size=vocab_size,
            special_token_ids={"eot": PAD},
            val_frac=0.1,
            seed=1,
            T_max=1024,
            ledger=ledger,
        ),
        {split: [rows] for split, rows in splits.items()},
        shard_tokens=200,
    )
    return root / name


def write_plain_files(target: Path, episodes: Sequence[Sequence[int]], masks: Sequence[Sequence[int]] | None) -> Path:
    """Write only the files that the dataset format requires, as another program might."""
    shard = target / "train" / shard_name(0)
    shard.mkdir(parents=True)
    np.array([id for ids in episodes for id in ids], dtype="<u2").tofile(shard / TOKENS)
    lengths = np.array([len(ids) for ids in episodes], dtype="<u8")
    np.stack([offsets(lengths)[:-1].astype("<u8"), lengths], axis=1).tofile(shard / INDEX)
    if masks is not None:
        np.array([bit for mask in masks for bit in mask], dtype="u1").tofile(shard / MASK)
    return target


def talks(seed: int, count: int, *, longest: int = 30, vocab_size: int = 1000) -> Rows:
    """Return `count` rows with one segment and 2 to `longest` tokens each; the second span of each row is trained."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest + 1, count)
    table = np.zeros(2 * count, dtype=SPAN)
    table["length"][0::2] = rng.integers(1, lengths)
    table["length"][1::2] = lengths - table["length"][0::2]
    table["weight"][1::2] = 1
    table["target"], table["role"], table["part"] = OWN_ID, Role.USER, Part.CONTENT
    table["rule"] = Rule.ROLE
    origins = np.zeros(count, dtype=ORIGIN)
    origins["file"] = NO_FILE
    ids = rng.integers(10, vocab_size, lengths.sum()).astype(np.uint32)
    return Rows(ids, table, np.arange(0, 2 * count + 1, 2), origins, np.arange(count + 1, dtype=np.int64))


def expected(
    rows: Rows, batch: Sequence[Sequence[int]], *, block_size: int, use_loss_mask: bool = True, pad: int = PAD
) -> dict[str, list[list[Any]]]:
    """Compute the arrays of a batch in plain Python; `batch` lists the episodes of each row."""
    plain = unbuild(rows)
    out: dict[str, list[list[Any]]] = {name: [] for name in Batch._fields}
    for episodes in batch:
        tokens: list[tuple[int, float, int, int]] = []  # Each token has an id, weight, target and segment.
        owners: list[int] = []
        for episode in episodes:
            said = [
                (id, weight, target, number)
                for number, (_, spans) in enumerate(plain[episode])
                for ids, _, _, weight, _, target in spans
                for id in ids
            ][-(block_size + 1) :]
            numbers = sorted({number for *_, number in said})
            for id, weight, target, number in said:
                segment = len(owners) + numbers.index(number)
                tokens.append((id, weight if use_loss_mask else 1.0, id if target < 0 else target, segment))
            owners += [episode] * len(numbers)
        tokens += [(pad, 0.0, pad, len(owners))] * (block_size + 1 - len(tokens))
        trained = [
            (after[1], after[2]) if after[1] > 0 and after[3] == before[3] else (0.0, -100)
            for before, after in pairwise(tokens)
        ]
        segments = [segment for *_, segment in tokens[:-1]]
        out["x"].append([id for id, *_ in tokens[:-1]])
        out["y"].append([target for _, target in trained])
        out["loss_mask"].append([weight > 0 for weight, _ in trained])
        out["weights"].append([weight for weight, _ in trained])
        out["positions"].append([at - segments.index(segment) for at, segment in enumerate(segments)])
        out["segments"].append(segments)
        out["episode_ids"].append(owners)
    most = max(1, *(len(owners) for owners in out["episode_ids"]))
    out["episode_ids"] = [owners + [-1] * (most - len(owners)) for owners in out["episode_ids"]]
    return out


def listed(batch: Batch) -> dict[str, list[list[Any]]]:
    return {name: array.tolist() for name, array in batch._asdict().items()}


def together(parts: Sequence[Batch]) -> Batch:
    most = max(part.episode_ids.shape[1] for part in parts)
    ids = [
        np.pad(part.episode_ids, ((0, 0), (0, most - part.episode_ids.shape[1])), constant_values=-1) for part in parts
    ]
    return Batch(*(np.concatenate(arrays) for arrays in list(zip(*parts, strict=True))[:-1]), np.concatenate(ids))


def same(one: Batch, other: Batch) -> bool:
    return all(
        mine.dtype == yours.dtype and np.array_equal(mine, yours) for mine, yours in zip(one, other, strict=True)
    )
