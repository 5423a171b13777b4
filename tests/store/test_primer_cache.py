from __future__ import annotations

import json
import pickle
import random
import shutil
import struct
from itertools import pairwise

import numpy as np
import pytest
from fault_injection.crash_disk import Model, Recorder, outcomes
from hypothesis import given, settings
from hypothesis import strategies as st
from store_fixtures import contents, some_rows

from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.ledger import Ledger
from chatmill.rows import SPAN, Rows, concat, rows_from_mask
from chatmill.store import files, is_cache, open_cache, verify_cache, write_cache
from chatmill.store.hashed import json_text, self_hash
from chatmill.store.primer_cache import CacheMeta, cache_folder
from chatmill.store.publish import set_aside, staging_for

ROWS = some_rows(1, count=30, targets=False)


def ledger_of(*parts: Rows) -> Ledger:
    ledger = Ledger()
    for rows in parts:
        ledger.add("read", rows=len(rows))
        ledger.add("rendered", rows=len(rows), tokens=len(rows.ids))
        ledger.add("stored", rows=len(rows), tokens=len(rows.ids), trained=int(rows.mask().sum()))
    return ledger


def write(out, splits: dict[str, list[Rows]], *, vocab_size=1000, shard_tokens=100, ledger=None, overwrite=False):
    return write_cache(
        out,
        CacheMeta(
            source="primer",
            format="primer",
            tokenizer_sha256="0" * 64,
            vocab_size=vocab_size,
            special_token_ids={"sys": 0, "usr": 1, "asst": 2, "eot": 3},
            val_frac=0.1,
            seed=42,
            T_max=1024,
            ledger=ledger or ledger_of(*(rows for parts in splits.values() for rows in parts)),
        ),
        splits,
        shard_tokens=shard_tokens,
        overwrite=overwrite,
    )


def rows_of(*pairs: tuple[list[int], list[int]]) -> Rows:
    return concat(
        [
            rows_from_mask(np.array(ids, dtype=np.uint32), np.array(mask, dtype=np.uint8), np.array([len(ids)]))
            for ids, mask in pairs
        ]
    )


def assert_reads_as(episodes, rows: Rows):
    start, mask = rows.row_start, rows.mask()
    assert len(episodes) == len(rows)
    assert episodes.lengths.tolist() == rows.lengths.tolist()
    for number in range(len(rows)):
        here = slice(start[number], start[number + 1])
        assert episodes.tokens(number).tolist() == rows.ids[here].tolist()
        assert episodes.mask(number).tolist() == mask[here].tolist()
    chosen = np.random.default_rng(0).integers(0, max(1, len(rows)), 2 * len(rows))
    read, right = episodes.rows(chosen), rows.take(chosen)
    read.check()
    assert read.row_start.tolist() == right.row_start.tolist()
    assert read.ids.tolist() == right.ids.tolist()
    assert read.mask().tolist() == right.mask().tolist()


@settings(max_examples=40)
@given(
    st.integers(0, 10**6), st.integers(0, 40), st.integers(0, 12), st.sampled_from([9, 1000, 2**16, 2**16 + 1, 2**32])
)
def test_a_cache_reads_back_as_written(tmp_path_factory, seed, train, val, vocab_size):
    out = tmp_path_factory.mktemp("caches")
    splits = {
        "train": some_rows(seed, count=train, vocab_size=vocab_size, targets=False),
        "val": some_rows(seed + 1, count=val, vocab_size=vocab_size, targets=False),
    }
    meta = write(out, {name: [rows] for name, rows in splits.items()}, vocab_size=vocab_size)
    cache = open_cache(out / "primer")
    assert cache.sha256 == meta.sha256
    assert cache.splits == ("train", "val")
    for name, rows in splits.items():
        assert_reads_as(cache[name], rows)
        assert cache.meta.splits[name].num_label_tokens == rows.mask().sum()
    assert verify_cache(out / "primer", full=True).faults == ()
    shutil.rmtree(out)


def test_a_shard_has_the_documented_bytes(tmp_path):
    rows = rows_of(([7, 8, 9], [0, 1, 1]), ([5, 6], [0, 1]))
    write(tmp_path, {"train": [rows], "val": []})
    assert (tmp_path / "primer/train/shard_00000.bin").read_bytes() == (
        struct.pack("<8sIIQQQ", b"cm-cache", 1, 2, 2, 5, 3)
        + struct.pack("<4Q", 0, 3, 3, 2)
        + struct.pack("<5H", 7, 8, 9, 5, 6)
        + bytes([0, 1, 1, 0, 1])
    )
    write(tmp_path, {"train": [rows], "val": []}, vocab_size=2**16 + 1, overwrite=True)
    wide = (tmp_path / "primer/train/shard_00000.bin").read_bytes()
    assert wide[12:16] + wide[72:92] == struct.pack("<6I", 4, 7, 8, 9, 5, 6)


def test_a_split_without_rows_is_an_empty_folder(tmp_path):
    write(tmp_path, {"train": [ROWS], "val": []})
    assert list((tmp_path / "primer/val").iterdir()) == []
    val = open_cache(tmp_path / "primer")["val"]
    assert (len(val), val.lengths.tolist(), len(val.rows([]))) == (0, [], 0)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 30), max_size=4), st.integers(1, 120))
def test_bytes_do_not_depend_on_how_rows_are_chunked(tmp_path_factory, cuts, shard_tokens):
    out = tmp_path_factory.mktemp("caches")
    edges = [0, *sorted(cuts), len(ROWS)]
    parts = [ROWS[start:stop] for start, stop in pairwise(edges)]
    write(out / "whole", {"train": [ROWS]}, shard_tokens=shard_tokens)
    write(out / "parts", {"train": parts}, shard_tokens=shard_tokens)
    assert contents(out / "whole") == contents(out / "parts")
    for shard in open_cache(out / "whole/primer").meta.splits["train"].shards:
        assert shard.num_tokens <= shard_tokens or shard.num_examples == 1
    shutil.rmtree(out)


@pytest.mark.parametrize(("shard_tokens", "examples"), [(5, [2, 1]), (4, [1, 2]), (9, [3]), (1, [1, 1, 1])])
def test_a_shard_ends_before_the_example_that_would_overfill_it(tmp_path, shard_tokens, examples):
    rows = rows_of(([1, 2, 3], [0, 1, 1]), ([4, 5], [0, 1]), ([6, 7], [0, 1]))
    meta = write(tmp_path, {"train": [rows]}, shard_tokens=shard_tokens)
    assert [shard.num_examples for shard in meta.splits["train"].shards] == examples


def test_metadata_contains_only_counts_sizes_and_the_ledger(tmp_path):
    rows = rows_of(([7, 8, 9], [0, 1, 1]), ([5, 6], [0, 1]))
    written = write(tmp_path, {"train": [rows], "val": []}, shard_tokens=4)
    data = json.loads((tmp_path / "primer/meta.json").read_bytes())
    shards = data["splits"]["train"].pop("shards")
    assert [(shard["name"], shard["size"], shard["num_examples"]) for shard in shards] == [
        ("shard_00000.bin", 40 + 16 + 3 * 2 + 3, 1),
        ("shard_00001.bin", 40 + 16 + 2 * 2 + 2, 1),
    ]
    assert data == {
        "schema": "chatmill-cache",
        "schema_version": 1,
        "dtype": "uint16",
        "source": "primer",
        "format": "primer",
        "tokenizer_sha256": "0" * 64,
        "vocab_size": 1000,
        "special_token_ids": {"sys": 0, "usr": 1, "asst": 2, "eot": 3},
        "val_frac": 0.1,
        "seed": 42,
        "T_max": 1024,
        "splits": {
            "train": {"num_examples": 2, "num_tokens": 5, "num_label_tokens": 3, "num_shards": 2, "shard_size": 4},
            "val": {
                "num_examples": 0,
                "num_tokens": 0,
                "num_label_tokens": 0,
                "num_shards": 0,
                "shard_size": 4,
                "shards": [],
            },
        },
        "ledger": ledger_of(rows).to_json(),
        "sha256": written.sha256,
    }


# Damage.


@pytest.fixture
def built(tmp_path):
    write(tmp_path, {"train": [ROWS], "val": [ROWS[:3]]})
    return tmp_path / "primer"


def test_every_flipped_bit_is_detected(built):
    rng = random.Random(5)
    whole = contents(built)
    for name, data in whole.items():
        for bit in rng.sample(range(8 * len(data)), 60):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            (built / name).write_bytes(flipped)
            assert verify_cache(built, full=True).faults, f"bit {bit} of {name}"
        (built / name).write_bytes(data)
    assert verify_cache(built, full=True).faults == ()


def test_every_truncated_file_is_refused_when_opened(built):
    for name, data in contents(built).items():
        for size in {0, 1, len(data) // 2, len(data) - 1}:
            (built / name).write_bytes(data[:size])
            with pytest.raises(DataError, match=name.split("/")[-1]):
                open_cache(built)
        (built / name).write_bytes(data)
    open_cache(built)


@pytest.mark.parametrize(
    ("at", "bytes_there", "fault"),
    [
        (40, struct.pack("<Q", 1), "are not contiguous"),
        (48, struct.pack("<Q", 2**63), "are not contiguous"),
        (64, struct.pack("<Q", 1), "cover 4 of 5 tokens"),
        (72, struct.pack("<H", 1000), "token id 1000; expected an id below 1000"),
        (82, b"\x02", "the mask is wrong; expected 3 ones"),
        (82, b"\x01", "the mask is wrong; expected 3 ones"),
        (0, b"CM-CACHE", "its header does not match meta.json"),
    ],
)
def test_verify_without_full_finds_faults_that_affect_reading(tmp_path, at, bytes_there, fault):
    write(tmp_path, {"train": [rows_of(([7, 8, 9], [0, 1, 1]), ([5, 6], [0, 1]))]})
    shard = tmp_path / "primer/train/shard_00000.bin"
    data = shard.read_bytes()
    shard.write_bytes(data[:at] + bytes_there + data[at + len(bytes_there) :])
    (found,) = verify_cache(tmp_path / "primer", full=False).faults
    assert fault in found


def test_missing_and_unlisted_shards_are_named(built):
    (built / "train/shard_00099.bin").write_bytes(b"x")
    (built / "val/shard_00000.bin").unlink()
    assert verify_cache(built, full=True).faults == (
        f"{built}/val/shard_00000.bin: missing; rebuild the cache or copy it again",
        f"{built}/train/shard_00099.bin: is not listed in meta.json; remove it or rebuild the cache",
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"schema": "other"}, "schema"),
        ({"schema_version": 2}, "version 2"),
        ({"seed": 43}, "changed"),
        ({"splits": {}}, "changed"),
        ({"splits": 5}, "changed"),
        ({"ledger": {"lost": {}}}, "changed"),
        ({"special_token_ids": {"eot": "3"}}, "changed"),
        ({"special_token_ids": {"eot": 1000}}, "changed"),
        ({"vocab_size": 0}, "changed"),
    ],
)
@pytest.mark.parametrize("hashed", [False, True])
def test_changed_metadata_is_refused(built, change, word, hashed):
    data = json.loads((built / "meta.json").read_bytes())
    if hashed and change != {"seed": 43}:
        data.pop("sha256")
        change = change | {"sha256": self_hash(data | change)}
    (built / "meta.json").write_bytes(json_text(data | change))
    with pytest.raises(DataError, match=word):
        open_cache(built)
    (built / "meta.json").write_bytes(b"[" * 100_000)
    with pytest.raises(DataError, match="not JSON"):
        open_cache(built)


def test_a_folder_without_a_cache_is_one_error_line(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        open_cache(tmp_path / "none")
    with pytest.raises(DataError, match=r"meta\.json: no such file"):
        open_cache(tmp_path)
    assert not is_cache(tmp_path)


def test_rows_that_a_cache_cannot_store_are_refused_and_leave_nothing(tmp_path):
    spans = np.zeros(1, dtype=SPAN)
    spans["length"], spans["target"] = 2, 7
    one = rows_of(([1, 2], [1, 1]))
    other = Rows(one.ids, spans, one.first_span, one.origins, one.first_segment)
    for rows, vocab_size, word in (
        (ROWS, 500, "expected an id below 500"),
        (other, 500, "a target other than its own id"),
    ):
        with pytest.raises(DataError, match=word):
            write(tmp_path, {"train": [rows]}, vocab_size=vocab_size)
    unbalanced = ledger_of(ROWS)
    unbalanced.add("read", rows=1)
    with pytest.raises(ChatmillError, match="does not balance"):
        write(tmp_path, {"train": [ROWS]}, ledger=unbalanced)
    with pytest.raises(ChatmillError, match="the ledger counts"):
        write(tmp_path, {"train": [ROWS]}, ledger=ledger_of(ROWS[:5]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "/etc", "a\\b", "../x", "a\0b"])
def test_a_source_name_must_not_be_a_path(tmp_path, name):
    with pytest.raises(UsageError, match="is not a source name"):
        cache_folder(tmp_path, name)


# Published whole.


def test_an_existing_cache_is_replaced_only_on_request(built):
    out, before = built.parent, contents(built)
    with pytest.raises(DataError, match="--overwrite"):
        write(out, {"train": [ROWS[:5]]})
    assert contents(built) == before
    write(out, {"train": [ROWS[:5]]}, overwrite=True)
    assert len(open_cache(built)["train"]) == 5
    assert [path.name for path in out.iterdir()] == ["primer"]


def test_an_interrupted_replacement_is_undone_before_any_work(built):
    before = contents(built)
    built.rename(set_aside(built))

    def rows():
        raise AssertionError("the cache must be refused before any work is done")
        yield

    with pytest.raises(DataError, match="--overwrite"):
        write_cache(
            built.parent,
            CacheMeta(
                source="primer",
                format="primer",
                tokenizer_sha256="",
                vocab_size=9,
                special_token_ids={},
                val_frac=0,
                seed=0,
                T_max=2,
                ledger=Ledger(),
            ),
            {"train": rows()},
        )
    assert contents(built) == before


def test_a_second_process_building_the_same_cache_is_refused_and_harms_nothing(tmp_path):
    rows = ROWS[:9]
    seen = []

    def slowly():
        yield rows
        with pytest.raises(DataError, match=r"\.primer\.building: another process is building there; wait for it"):
            write(tmp_path, {"train": [ROWS[:5]]}, overwrite=True)
        seen.append(True)

    write(tmp_path, {"train": slowly()}, ledger=ledger_of(rows))
    assert seen == [True]
    assert verify_cache(tmp_path / "primer", full=True).faults == ()
    assert_reads_as(open_cache(tmp_path / "primer")["train"], rows)


def test_a_folder_without_a_cache_is_never_replaced(tmp_path):
    (tmp_path / "primer").mkdir()
    (tmp_path / "primer/thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match=r"has no meta\.json"):
        write(tmp_path, {"train": [ROWS]}, overwrite=True)
    assert contents(tmp_path) == {"primer/thesis.tex": b"years of work"}


def test_an_open_cache_can_be_pickled_and_detects_its_replacement(built):
    train = pickle.loads(pickle.dumps(open_cache(built)["train"]))  # noqa: S301 - our own bytes
    assert train.tokens(1).tolist() == ROWS[1:2].ids.tolist()
    stale = open_cache(built)["train"]
    write(built.parent, {"train": [ROWS]}, overwrite=True)
    with pytest.raises(DataError, match="replaced"):
        stale.tokens(1)
    assert train.tokens(1).tolist() == ROWS[1:2].ids.tolist()


@pytest.mark.parametrize(("old", "can_exchange"), [(False, True), (True, True), (True, False)])
def test_a_crash_at_any_step_leaves_a_complete_cache_or_none(tmp_path, monkeypatch, old, can_exchange):
    out, at = tmp_path / "out", tmp_path / "crashed"
    out.mkdir()
    if old:
        write(out, {"train": [ROWS[:4]]})
    model, recorder = Model(out), Recorder(out, can_exchange=can_exchange)
    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", recorder)
        new = write(out, {"train": [ROWS[:9]], "val": [ROWS[:2]]}, overwrite=old)
    for number in range(len(recorder.steps) + 1):
        if number:
            recorder.steps[number - 1](model)
        for keep in outcomes(number).values():
            model.crash(at, keep)
            if (at / "primer").exists():
                found = verify_cache(at / "primer", full=True)
                assert found.faults == ()
                assert old or found.sha256 == new.sha256
            elif old:
                assert set_aside(at / "primer").is_dir()
            write(at, {"train": [ROWS[:9]], "val": [ROWS[:2]]}, overwrite=True)
            assert open_cache(at / "primer").sha256 == new.sha256
            assert not staging_for(at / "primer").exists()
            shutil.rmtree(at)
