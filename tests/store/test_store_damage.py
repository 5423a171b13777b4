from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from forged_metadata import FORGED, rewrite, shard_of
from store_fixtures import contents, some_rows, write_dataset

import chatmill.store.verify as store_verify
from chatmill.errors import DataError
from chatmill.rows import NO_FILE, concat
from chatmill.store.layout import SEGMENT, STORED_SPAN
from chatmill.store.read import open_dataset
from chatmill.store.verify import SplitCounts, verify_dataset


@pytest.fixture
def dataset(tmp_path) -> Path:
    write_dataset(tmp_path / "x", {"train": some_rows(1), "val": some_rows(2, count=9)})
    return tmp_path / "x"


def faults(folder: Path, *, full: bool = True) -> tuple[str, ...]:
    return verify_dataset(folder, full=full).faults


def test_an_intact_dataset_has_no_faults_and_is_counted(dataset):
    for full in (False, True):
        found = verify_dataset(dataset, full=full)
        assert found.faults == ()
        assert found.sha256 == open_dataset(dataset).sha256
        for name, rows in {"train": some_rows(1), "val": some_rows(2, count=9)}.items():
            shards = len(list((dataset / name).iterdir()))
            assert found.splits[name] == SplitCounts(len(rows), len(rows.ids), int(rows.mask().sum()), shards)


def test_every_flipped_bit_of_the_metadata_is_detected(dataset):
    """`1E-05` and `1e-05` are the same value, so hashing the parsed values would miss a flipped bit."""
    path = dataset / "dataset_metadata.json"
    whole = path.read_bytes()
    place = whole.index(b"1e-05") + 1
    for at in (*range(min(400, len(whole))), place):
        for bit in range(8) if at == place else range(at % 3, 8, 3):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            with pytest.raises(DataError):
                open_dataset(dataset)


def test_all_truncated_files_are_reported_together(dataset):
    for name in ("mask.bin", "tokens.bin"):
        (dataset / "train/shard_00000" / name).write_bytes(b"")
    (dataset / "val/shard_00000/spans.bin").unlink()
    said = faults(dataset)
    assert len(said) == 3
    assert [line for line in said if "spans.bin: missing; rebuild the dataset or copy it again" in line]


def test_a_folder_in_place_of_a_file_is_reported(dataset):
    """On some file systems, a folder can have the same size as the file that it replaces."""
    for name in ("train/shard_00000/mask.bin", "dataset_metadata.json"):
        (dataset / name).rename(dataset / "aside")
        (dataset / name).mkdir()
        with pytest.raises(DataError, match=f"{name}: (is not a file|cannot be read .Is a directory.); rebuild"):
            open_dataset(dataset)
        (dataset / name).rmdir()
        (dataset / "aside").rename(dataset / name)
    assert faults(dataset) == ()


def test_unlisted_shards_and_files_are_reported(dataset):
    (dataset / "train/shard_00099").mkdir()
    (dataset / "train/shard_00000/notes.txt").write_text("mine")
    assert faults(dataset, full=False) == (
        f"{dataset}/train/shard_00000/notes.txt: is not listed in the metadata; remove it or rebuild the dataset",
        f"{dataset}/train/shard_00099: is not listed in the metadata; remove it or rebuild the dataset",
    )


@pytest.mark.parametrize("lie", FORGED)
def test_inconsistent_metadata_is_one_error_line(dataset, lie):
    change, said = FORGED[lie]
    rewrite(dataset, change)
    with pytest.raises(DataError) as error:
        open_dataset(dataset)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert faults(dataset) == (str(error.value),)


def tamper(folder: Path, name: str, dtype, change) -> str:
    path = folder / "train/shard_00000" / name
    table = np.fromfile(path, dtype)
    change(table)
    path.write_bytes(table.tobytes())
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    rewrite(folder, lambda data: shard_of(data)["files"][name].update(sha256=sha256))
    (line,) = faults(folder)
    assert line.startswith(f"{folder}/train/shard_00000/")
    return line.removeprefix(f"{folder}/train/shard_00000/")


def put(name, at, value):
    def change(table):
        table[name][at] = value

    return change


PAIR = [("start", "<u8"), ("length", "<u8")]
TARGET = [("span", "<u8"), ("target", "<u4")]
BROKEN = [
    ("episodes.idx", PAIR, put("start", 2, 2**63), "episodes.idx: episode 2 starts at 9223372036854775808; expected"),
    ("episodes.idx", PAIR, put("length", 0, 2**64 - 1), "episodes.idx: episode 0 has 18446744073709551615 tokens,"),
    ("spans.bin", STORED_SPAN, put("length", 0, 400), "spans.bin: the spans of episode"),
    ("spans.bin", STORED_SPAN, put("length", 0, 0), "spans.bin: one of episodes 0 to"),
    ("spans.bin", STORED_SPAN, put("weight", 0, np.nan), "spans.bin: one of episodes 0 to"),
    ("spans.bin", STORED_SPAN, put("weight", slice(None), 1.0), "mask.bin: the mask of token "),
    ("spans.bin", STORED_SPAN, put("rule", 0, 99), "spans.bin: one of episodes 0 to"),
    ("origins.bin", SEGMENT, put("row", 0, 2**63), "origins.bin: segments 0 to"),
    ("origins.bin", SEGMENT, put("row", 3, 0), "origins.bin: segments 0 to"),
    ("origins.bin", SEGMENT, put("first_span", 1, 2**40), "origins.bin: the spans of segments 0 to"),
    ("origins.bin", SEGMENT, put("file", 1, 77), "origins.bin: one of segments 0 to"),
    ("tokens.bin", [("id", "<u2")], put("id", 3, 1000), "tokens.bin: the id of token 3 is 1000; expected an id below"),
    ("mask.bin", [("is", "u1")], put("is", 3, 2), "mask.bin: the mask of token 3 is 2; expected"),
    ("targets.bin", TARGET, put("target", 0, 1000), "targets.bin: target 1000; expected an id below 1000"),
    (
        "targets.bin",
        TARGET,
        put("span", 0, 2**40),
        "targets.bin: the span indexes are not ascending, or one is past the last span",
    ),
]


@pytest.mark.parametrize(("name", "dtype", "change", "said"), BROKEN)
def test_inconsistent_tables_with_valid_hashes_are_reported(dataset, name, dtype, change, said):
    assert tamper(dataset, name, dtype, change).startswith(said)


def test_reading_rows_of_a_broken_table_is_an_error(dataset):
    tamper(dataset, "episodes.idx", PAIR, put("length", 1, 2**40))
    episodes = open_dataset(dataset)["train"]
    for reading in (lambda: episodes.rows([1]), lambda: episodes.tokens(1), lambda: episodes.mask(1)):
        with pytest.raises(
            DataError, match="an entry points past the last token; the file was changed; run chatmill verify"
        ):
            reading()


@pytest.mark.parametrize(
    ("name", "dtype", "change", "said"),
    [
        ("spans.bin", STORED_SPAN, put("length", 0, 400), "spans do not exactly cover the tokens of their rows"),
        ("spans.bin", STORED_SPAN, put("role", 0, 254), "a span has an undefined role"),
        ("spans.bin", STORED_SPAN, put("part", 0, 255), "a span has an undefined part"),
        ("spans.bin", STORED_SPAN, put("rule", 0, 255), "a span has an undefined rule"),
        ("origins.bin", SEGMENT, put("row", 1, 2**63), "a segment is out of order"),
        ("origins.bin", SEGMENT, put("first_span", 0, 2**63), "an entry points past the last span"),
        ("origins.bin", SEGMENT, put("first_span", 1, 2**55), "the spans of a segment are out of order"),
        (
            "origins.bin",
            SEGMENT,
            put("file", 1, 2**24),
            "a segment has an invalid file index; expected an index below 3",
        ),
    ],
)
def test_reading_a_damaged_table_names_its_file(dataset, name, dtype, change, said):
    path = dataset / "train" / "shard_00000" / name
    table = np.fromfile(path, dtype=dtype)
    change(table)
    table.tofile(path)
    with pytest.raises(DataError) as raised:
        list(open_dataset(dataset)["train"].sweep())
    assert str(raised.value) == f"{path}: {said}; the file was changed; run chatmill verify {dataset} --full"


def test_a_file_index_in_a_dataset_without_input_files_is_reported(tmp_path):
    rows = some_rows(1)
    origins = rows.origins.copy()
    origins["file"] = NO_FILE
    write_dataset(tmp_path / "x", {"train": replace(rows, origins=origins, files=())})
    path = tmp_path / "x" / "train" / "shard_00000" / "origins.bin"
    table = np.fromfile(path, dtype=SEGMENT)
    table["file"][0] = 0
    table.tofile(path)
    with pytest.raises(
        DataError, match="invalid file index; expected none, because the dataset names no input files; "
    ):
        list(open_dataset(tmp_path / "x")["train"].sweep())


def test_a_ledger_that_disagrees_with_the_shards_is_named(dataset):
    rewrite(dataset, lambda data: data["ledger"]["stored"][""].update(tokens=9, trained=9))
    stored = sum(split.num_tokens for split in open_dataset(dataset).metadata.splits.values())
    said = f"{dataset}: the ledger counts 9 stored tokens, but the shards contain {stored}"
    assert said in faults(dataset, full=False)


def test_verify_changes_nothing(dataset):
    before = contents(dataset)
    verify_dataset(dataset, full=True)
    assert contents(dataset) == before


def test_a_path_without_a_dataset_is_one_error_line(tmp_path):
    assert faults(tmp_path / "none") == (f"{tmp_path}/none: no such folder; expected a dataset",)
    assert faults(tmp_path) == (
        f"{tmp_path}: not a dataset; expected train/episodes.idx or train/shard_00000/episodes.idx",
    )


def resident(path: Path) -> int:
    held, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split(maxsplit=5)
        if not name.endswith(":"):
            # The first line of a mapping ends with the path of its file, or with a number if it maps no file.
            here = rest[-1] == str(path)
        elif name == "Rss:" and here:
            held += 1024 * int(rest[0])
    return held


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="memory usage is read from /proc")
def test_verify_keeps_only_part_of_a_file_in_memory(tmp_path, monkeypatch):
    target = tmp_path / "d"
    # The largest page size of mapped files is two megabytes.
    write_dataset(target, {"train": concat([some_rows(5, count=60_000)] * 8)}, shard_tokens=10**9)
    tokens = target / "train" / "shard_00000" / "tokens.bin"
    held = []

    def looking(check):
        held.append(resident(tokens))

    monkeypatch.setattr(store_verify, "TOKENS_AT_ONCE", 1 << 14)
    monkeypatch.setattr(store_verify._ShardCheck, "_check_totals", looking)
    verify_dataset(target, full=True)
    assert len(held) == 1
    assert held[0] < tokens.stat().st_size / 2
