"""`build_cache`: build the primer cache of one source from a file of conversations.

The build renders all records to rows, shuffles the rows and splits them into train and val, truncates each row to its
last `t_max` tokens, and writes one example per row. All rows of a source must fit in memory, because they are shuffled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from chatmill.config import BELOW_ONE, LONGEST, Config, ValueCheck, integer, key, keys_of, named, required
from chatmill.errors import DataError, RecordError
from chatmill.fit import truncate
from chatmill.format import TurnRenderer, load_format
from chatmill.ledger import Ledger
from chatmill.plain_file import local_path
from chatmill.prepare.job import Job, existing
from chatmill.prepare.rejects import CountedRecords
from chatmill.prepare.unit import trained_tokens
from chatmill.records import Record, shuffle_split
from chatmill.records.files import local_files, shown
from chatmill.remote.urls import place
from chatmill.rows import Rows, concat
from chatmill.store.primer_cache import CACHES, CacheMeta, check_place, write_cache
from chatmill.store.publish import refuse_inside
from chatmill.tokenizer import open_tokenizer

SHAPES = {"primer": "primer", "oasst1": "oasst1", "dolly15k": "dolly"}
"""Maps each source that a cache can be built from to the shape of its records."""
LEAST_TOKENS = 2
CHUNK = 4096


@dataclass(frozen=True, kw_only=True)
class CacheConfig(Config):
    """Settings of `build_cache`."""

    path: str = required("File to read.", named("file"))
    out_dir: str = key(CACHES, "Folder of the caches, one subfolder per source.", named("folder"))
    seed: int = key(
        42,
        "Seed of the shuffle that splits and orders the examples.",
        ValueCheck("an integer of at least 0", lambda value: type(value) is int and value >= 0),
    )
    val_frac: float = key(0.1, "Fraction of examples for validation; 0 disables validation.", BELOW_ONE)
    t_max: int = key(1024, "Maximum tokens per row; longer rows keep their last tokens.", integer(2, LONGEST))
    tokenizer: str = key("bytes", keys_of(Job)["tokenizer"].help, named("tokenizer"))
    add_tokens: bool = key(False, keys_of(Job)["add_tokens"].help)


def build_cache(
    source: str,
    config: CacheConfig,
    records: CountedRecords,
    *,
    overwrite: bool = False,
    progress: Callable[[Iterable[Record]], Iterable[Record]] = iter,
) -> CacheMeta:
    """Render, split, truncate and write the records of one source.

    `progress` wraps the iterator of records, for example to show a progress bar.
    """
    out, ledger = local_path(config.out_dir), records.ledger
    target = check_place(out, source, overwrite=overwrite)
    refuse_inside(target, [*local_files([config.path]), *existing(config.tokenizer)])
    format = load_format("primer")
    renderer = TurnRenderer(
        format, open_tokenizer(config.tokenizer, control=format.tokens, add_tokens=config.add_tokens)
    )
    with records:
        rows = concat(list(renderer.render_chunks(_answered(progress(records), records.reject))))
    if not len(rows):
        rejects = records.rejects
        why = f"all records were rejected (see {rejects.path})" if rejects and rejects.counts else "no records"
        raise DataError(f"{shown(place(config.path))}: {why}; expected at least one valid record")
    ledger.add("rendered", rows=len(rows), tokens=len(rows.ids), trained=trained_tokens(rows))
    split = shuffle_split(len(rows), config.val_frac, seed=config.seed)
    return write_cache(
        out,
        CacheMeta(
            source=source,
            format=format.name,
            tokenizer_sha256=renderer.tokenizer.sha256,
            vocab_size=renderer.tokenizer.vocab_size,
            special_token_ids=renderer.tokenizer.special_token_ids(),
            val_frac=float(config.val_frac),
            seed=config.seed,
            T_max=config.t_max,
            ledger=ledger,
        ),
        {name: _fitted(rows, numbers, config.t_max, ledger) for name, numbers in split._asdict().items()},
        overwrite=overwrite,
    )


def _answered(records: Iterable[Record], reject: Callable[[RecordError], None]) -> Iterator[Record]:
    """Yield the records that have an assistant message; pass an error for each other record to `reject`."""
    for record in records:
        if any(message.role == "assistant" for message in record.messages):
            yield record
            continue
        right = "expected at least one assistant message to train on"
        fault = RecordError("no message has role assistant", right, kind="no_assistant")
        reject(fault.at(record.file, record.line, record.id))


def _fitted(rows: Rows, numbers: list[int], t_max: int, ledger: Ledger) -> Iterator[Rows]:
    """Yield the rows with the indices `numbers` in chunks, each row truncated to its last `t_max` tokens."""
    for at in range(0, len(numbers), CHUNK):
        chosen = rows.take(numbers[at : at + CHUNK])
        chosen = truncate(chosen, t_max, "tail", ledger=ledger, drop_untrained=False, min_tokens=LEAST_TOKENS)
        count_stored(chosen, ledger)
        yield chosen


def count_stored(rows: Rows, ledger: Ledger) -> None:
    """Add all rows to the ledger entry `stored`, and the rows without trained tokens also to `no_trained_tokens`."""
    row = np.repeat(np.arange(len(rows)), np.diff(rows.first_span[rows.first_segment]))
    untrained = np.bincount(row[rows.spans["weight"] > 0], minlength=len(rows)) == 0
    if untrained.any():
        ledger.add("noted", "no_trained_tokens", rows=int(untrained.sum()), tokens=int(rows.lengths[untrained].sum()))
    ledger.add("stored", rows=len(rows), tokens=len(rows.ids), trained=trained_tokens(rows))
