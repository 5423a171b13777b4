from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prepare_fixtures import digests

from chatmill.errors import DataError
from chatmill.ledger import Ledger
from chatmill.prepare import shard_plan
from chatmill.prepare.assemble import assemble, split_names, write_shard
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.select import StagedFile, choose
from chatmill.prepare.shard_plan import plan_shards
from chatmill.prepare.staging import StagedHead, save
from chatmill.rows import NO_MESSAGE, ORIGIN, OWN_ID, SPAN, File, Rows, offsets
from chatmill.store import files
from chatmill.store.metadata import SplitInfo

VOCAB = 1000
LONGEST = 6
NAMES = [File(source, path) for source in ("s", "t") for path in ("a.jsonl", "b.jsonl", "c.jsonl")]


@pytest.fixture(scope="module")
def small():
    """Use small windows in the shard plan, and skip fsync, which is slow for many small files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.Disk, "sync", lambda self, path: None)
        patch.setattr(shard_plan, "WINDOW", 16)
        yield


def random_rows(rng: np.random.Generator, count: int) -> Rows:
    spans_of = rng.integers(1, 4, count)
    spans = np.zeros(int(spans_of.sum()), dtype=SPAN)
    spans["length"] = rng.integers(1, LONGEST // 3 + 1, len(spans))
    spans["weight"] = rng.choice([0, 1, 0.5], len(spans))
    spans["message"], spans["target"] = NO_MESSAGE, OWN_ID
    origins = np.zeros(count, dtype=ORIGIN)
    named = [NAMES[number] for number in rng.permutation(len(NAMES))[: rng.integers(1, 4)]]
    origins["file"], origins["line"] = rng.integers(0, len(named), count), np.arange(1, count + 1)
    origins["key"] = rng.integers(0, 2**64, (8, 2), dtype=np.uint64)[rng.integers(0, 8, count)]
    ids = rng.integers(0, VOCAB, int(spans["length"].sum()), dtype=np.uint32)
    return Rows(ids, spans, offsets(spans_of), origins, np.arange(count + 1), tuple(named))


def stage(folder: Path, rng: np.random.Generator, sizes: list[int]) -> tuple[list[StagedFile], list[StagedFile]]:
    whole, heads = [], []
    for number, size in enumerate(sizes):
        path, head = folder / f"{number}.rows", folder / f"{number}.head"
        # Some records have several rows, and some have no rows.
        record = np.sort(rng.integers(0, size + 2, size))
        exact = rng.integers(0, 2**64, (8, 2), dtype=np.uint64)[rng.integers(0, 8, size + 2)]
        columns, extra = {"exact": exact}, {"records": size + 2}
        save(path, random_rows(rng, size), record, tokens=np.dtype("<u2"), extra=extra, columns=columns)
        head.write_bytes(path.read_bytes()[: StagedHead(path).head_size])
        whole.append(StagedFile(path, number % 3 == 1, number, source=number // 2 % 2))
        heads.append(StagedFile(folder / "nowhere", whole[-1].only_val, number, head_copy=head, source=number // 2 % 2))
    return whole, heads


@pytest.mark.usefixtures("small")
@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.lists(st.integers(1, 14), min_size=2, max_size=5),
    st.sampled_from([3, 6, 20, 100_000]),
    st.sampled_from([None, LONGEST, 20]),
    st.booleans(),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from(["hash", "shuffle"]),
    st.booleans(),
)
def test_shards_written_independently_equal_those_of_one_process(
    seed, sizes, shard_tokens, pack, dedupe, val_split, split, named
):
    rng = np.random.default_rng(seed)
    keys = {"shard_tokens": shard_tokens, "pack": pack, "dedupe": dedupe, "val_split": val_split, "split": split}
    first, second = ("x", "y") if named else (None, None)
    job = Job((InputSource(("x",), name=first), InputSource(("y",), name=second, only_val=not val_split)), **keys)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, heads = stage(folder, rng, sizes)
        ledger, planned = Ledger(), Ledger()
        chosen = choose(heads, job, planned).chosen
        own = choose(whole, job, ledger).chosen
        options = {"vocab_size": VOCAB, "staging": folder / "one", "ledger": ledger}
        if not all(chosen[split_name] for split_name in split_names(job)):
            with pytest.raises(DataError, match="would be empty"):
                assemble(whole, own, job, **options)
            return
        splits = assemble(whole, own, job, **options)
        of_head = dict(zip(heads, whole, strict=True))
        for split_name in split_names(job):
            plans = list(plan_shards(split_name, chosen[split_name], job))
            infos, numbers = {}, {}
            for at in rng.permutation(len(plans)).tolist():
                plan = plans[at]
                assert (plan.split, plan.number) == (split_name, at)
                assert {job.source_name(file.source) for file in plan.staged} == {plan.source}
                local = [of_head[file] for file in plan.staged]
                infos[at] = write_shard(
                    replace(plan, staged=tuple(local)), folder / "two" / split_name, vocab_size=VOCAB
                )
                numbers |= plan.files
            shards = tuple(infos[at] for at in range(len(plans)))
            table = tuple(sorted(numbers, key=numbers.__getitem__))
            assert sorted(numbers.values()) == list(range(len(numbers)))
            assert SplitInfo(shards, table) == splits[split_name]
            for shard in shards:
                counts = {"tokens": shard.num_tokens, "trained": shard.num_trained_tokens}
                planned.add("stored", rows=shard.num_segments, **counts)
        assert digests(folder / "two") == digests(folder / "one")
        assert planned.to_json() == ledger.to_json()
        kept = ledger.total("stored", "dropped")
        rows = [file.open().rows() for file in whole]
        assert (kept.rows, kept.tokens) == (sum(map(len, rows)), sum(len(each.ids) for each in rows))
        assert kept.trained == sum(int(each.mask().sum()) for each in rows)
