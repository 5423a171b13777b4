"""Export a dataset as Parquet files for other trainers, with a dataset card.

    OUT/data/train-00000-of-00002.parquet    one file per shard
    OUT/README.md                            the card; its header declares the splits for Hugging Face `datasets`
    OUT/chatmill_export.json                 written last: counts, size and sha256 of every file and of itself

    input_ids     a b c d e      one row with two packed conversations
    labels        - b c - e      - is -100: not trained, or the first token of a conversation
    position_ids  0 1 2 0 1
    seq_lengths   3 2

Labels are not shifted, because models shift them when they compute the loss.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError, one_line
from chatmill.plain_file import local_path
from chatmill.remote.urls import Place
from chatmill.rows import Rows, offsets
from chatmill.store import files
from chatmill.store.diff import is_padding
from chatmill.store.episodes import Episodes
from chatmill.store.hashed import hashed_text, parse_hashed, read_hashed
from chatmill.store.metadata import Metadata
from chatmill.store.publish import FolderKind, building
from chatmill.store.read import Dataset, open_dataset

MANIFEST = "chatmill_export.json"
SCHEMA, SCHEMA_VERSION = "chatmill-export", 1
CARD = "README.md"
DATA = "data"
IGNORED = -100
"""The label of positions that are excluded from the loss."""
TOKENS = 1 << 20
"""Number of tokens per row group."""
MOST_INT32 = 2**31
SPLIT_NAMES = {"val": "validation"}
"""The `datasets` library's names for splits that have another name in chatmill."""
COLUMNS = f"""\
- `input_ids`: the tokens of a row, which is one conversation or several packed ones.
- `labels`: the ids of trained tokens, and {IGNORED} for all other tokens and for the first token of every
  conversation. Labels are not shifted, because models shift them when they compute the loss.
- `position_ids`: positions, which start at 0 in every conversation.
- `seq_lengths`: the number of tokens of each conversation in the row."""
PACKED_ROWS = """\
Conversations in a packed row must not attend to each other, so a trainer has to use `position_ids` or
`seq_lengths`. TRL ignores these two columns unless `SFTConfig(padding_free=True, max_length=None)` is set."""


@dataclass
class Exported:
    rows: int = 0
    conversations: int = 0
    """Number of conversations; a packed row contains several conversations."""
    tokens: int = 0
    trained: int = 0
    """Number of labels that are not -100."""
    weighted: int = 0
    """Number of trained tokens with a weight other than 1, which labels cannot express."""
    files: int = 0


def export_parquet(
    source: str | Place,
    target: str | Path,
    *,
    splits: Sequence[str] = (),
    overwrite: bool = False,
    token_dtype: str | None = None,
) -> dict[str, Exported]:
    """Export all splits of a dataset, or only `splits`, as Parquet files; the output folder is published atomically."""
    _pyarrow()
    dataset, target = open_dataset(source, token_dtype=token_dtype), local_path(target)
    chosen = {name: dataset[name] for name in splits or dataset.splits}
    with building(target, "exporting", overwrite=overwrite, kind=EXPORT, source=dataset.path) as staging:
        files.make_folder(staging / DATA)
        done = {name: _export(episodes, staging / DATA, name, _wide(dataset)) for name, episodes in chosen.items()}
        with files.create(staging / CARD) as card:
            card.write(_card(target.name, dataset, done).encode())
        written = [staging / CARD, *sorted((staging / DATA).iterdir())]
        about = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "dataset_sha256": dataset.sha256}
        counts = {name: asdict(split) for name, split in done.items()}
        hashes = {path.relative_to(staging).as_posix(): _file_json(path) for path in written}
        with files.create(staging / MANIFEST) as manifest:
            manifest.write(hashed_text({**about, "splits": counts, "files": hashes}))
    return done


def _file_json(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _listed(folder: Path) -> Iterator[str]:
    """Yield the names of the files that an export wrote, except a dataset card that was edited since."""
    path = folder / MANIFEST
    raw = read_hashed(path, "export", Path.read_bytes)
    data = parse_hashed(raw, place=str(path), schema=SCHEMA, version=SCHEMA_VERSION)
    data.pop("sha256", None)
    listed = data.get("files")
    if hashed_text(data) != raw or not isinstance(listed, dict):
        raise DataError(f"{path}: does not match its own sha256; the file was changed or damaged")
    card = folder / CARD
    yield f"{DATA}/"
    yield from (name for name in listed if name != CARD or not card.is_file() or listed[CARD] == _file_json(card))


EXPORT = FolderKind(
    "export",
    MANIFEST,
    re.compile(rf"{re.escape(MANIFEST)}|{re.escape(CARD)}|{DATA}/([a-z]+-\d{{5,}}-of-\d{{5,}}\.parquet)?"),
    _listed,
)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError("Parquet export requires pyarrow; pip install 'chatmill[parquet]'") from None
    return pyarrow, parquet


def _wide(dataset: Dataset) -> bool:
    """Return whether some token ids could be too large for int32."""
    if dataset.metadata is not None:
        return dataset.metadata.vocab_size > MOST_INT32
    return any(shard.dtype.itemsize > 2 for name in dataset.splits for shard in dataset[name].shards)


def _export(episodes: Episodes, folder: Path, split: str, wide: bool) -> Exported:
    pyarrow, parquet = _pyarrow()
    ids, small = (pyarrow.list_(pyarrow.int64() if of_ids and wide else pyarrow.int32()) for of_ids in (True, False))
    schema = pyarrow.schema([("input_ids", ids), ("labels", ids), ("position_ids", small), ("seq_lengths", small)])
    done = Exported(files=len(episodes.shards))
    for number, shard in enumerate(episodes.shards):
        one = Episodes(episodes.stored, [shard], episodes.files)
        path = folder / f"{split}-{number:05d}-of-{len(episodes.shards):05d}.parquet"
        with files.create(path) as file, parquet.ParquetWriter(file, schema, compression="zstd") as writer:
            for rows in one.sweep(tokens=TOKENS):
                columns = _columns(rows)
                lists = [
                    pyarrow.ListArray.from_arrays(
                        pyarrow.array(start.astype(np.int32)), pyarrow.array(values).cast(field.type.value_type)
                    )
                    for (start, values), field in zip(columns.values(), schema, strict=True)
                ]
                writer.write_batch(pyarrow.record_batch(lists, schema=schema))
                _count(done, rows, columns["labels"][1])
    return done


def _columns(rows: Rows) -> dict[str, tuple[NDArray[np.int64], NDArray[Any]]]:
    """Return the offsets and the values of each list column, as in a pyarrow `ListArray`."""
    position = rows.positions()
    labels = np.where(rows.mask() & (position > 0), rows.targets(), IGNORED)
    lengths = np.diff(rows.segment_start)
    filled = lengths > 0
    return {
        "input_ids": (rows.row_start, rows.ids),
        "labels": (rows.row_start, labels),
        "position_ids": (rows.row_start, position),
        "seq_lengths": (offsets(filled)[rows.first_segment], lengths[filled]),
    }


def _count(done: Exported, rows: Rows, labels: NDArray[np.int64]) -> None:
    trained = labels != IGNORED
    weights = rows.weights()
    done.rows += len(rows)
    done.conversations += int(np.count_nonzero(~is_padding(rows)))
    done.tokens += len(rows.ids)
    done.trained += int(np.count_nonzero(trained))
    done.weighted += int(np.count_nonzero(trained & (weights != 1)))


# The card.


def _card(target: str, dataset: Dataset, done: dict[str, Exported]) -> str:
    data = [f"  - split: {SPLIT_NAMES.get(name, name)}\n    path: {DATA}/{name}-*.parquet" for name in done]
    splits = ["| split | rows | conversations | tokens | trained | share |", "|---|---:|---:|---:|---:|---:|"]
    for name, split in done.items():
        share = split.trained / split.tokens if split.tokens else 0
        counts = (split.rows, split.conversations, split.tokens, split.trained)
        splits.append(f"| {name} | {' | '.join(f'{count:,}' for count in counts)} | {share:.1%} |")
    paragraphs = [
        "\n".join(
            ["---", "configs:", "- config_name: default", "  data_files:", *data, "---", f"# {one_line(target)}"]
        ),
        "Token rows for supervised fine-tuning, exported by chatmill.",
        "\n".join(splits),
        COLUMNS,
        PACKED_ROWS,
    ]
    if weighted := sum(split.weighted for split in done.values()):
        paragraphs.append(
            f"{weighted:,} trained tokens had a weight other than 1 in the dataset; labels cannot express weights."
        )
    return "\n\n".join([*paragraphs, "## How it was made", *_made(dataset.metadata)]) + "\n"


def _made(metadata: Metadata | None) -> Iterator[str]:
    if metadata is None:
        yield "Another program wrote this dataset and did not record its settings."
        return
    format = metadata.format.get("name") if isinstance(metadata.format, dict) else metadata.format
    yield (
        f"- Dataset: sha256 `{metadata.sha256}`\n"
        f"- Tokenizer: `{one_line(metadata.tokenizer['name'])}`, {metadata.vocab_size:,} ids,\n"
        f"  sha256 `{metadata.tokenizer['sha256']}`\n"
        f"- Format: `{one_line(str(format))}`"
    )
    yield f"```json\n{json.dumps(metadata.config, indent=1, sort_keys=True)}\n```"
    yield "## Stored, truncated and dropped conversations"
    yield "In this table, a row is one conversation, even if several conversations are packed together."
    entries = [
        f"| {bucket} | {one_line(reason)} | {entry.rows:,} | {entry.tokens:,} | {entry.trained:,} |"
        for bucket, reason, entry in metadata.ledger
    ]
    yield "\n".join(["| | reason | rows | tokens | trained |", "|---|---|---:|---:|---:|", *entries])
