from __future__ import annotations

import os
import shutil
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
from store_fixtures import equal, some_rows, write_dataset

from chatmill.errors import DataError
from chatmill.rows import concat
from chatmill.store import mapped
from chatmill.store.files import disk
from chatmill.store.folder import OpenFolder
from chatmill.store.mapped import MappedFile, mapped_file, reading
from chatmill.store.read import open_dataset
from chatmill.store.verify import verify_dataset

SHARD = "train/shard_00000"


@pytest.fixture
def two(tmp_path):
    rows = [some_rows(seed, count=12) for seed in (1, 2)]
    folders = [tmp_path / "x", tmp_path / "y"]
    hashes = [write_dataset(*both).sha256 for both in zip(folders, ({"train": each} for each in rows), strict=True)]
    return dict(zip(hashes, rows, strict=True)), *folders


def refusal(work) -> str:
    try:
        work()
    except DataError as error:
        return str(error)
    return ""


def test_a_dataset_exchanged_while_it_is_opened_is_the_old_or_the_new_one(two, monkeypatch):
    rows_of, x, y = two
    waiting = 0

    def exchanging(method):
        def called(self, path):
            nonlocal waiting
            waiting -= 1
            if waiting == 0:
                disk.exchange(x, y)
            return method(self, path)

        return called

    for name in ("status", "open", "names"):
        monkeypatch.setattr(OpenFolder, name, exchanging(getattr(OpenFolder, name)))
    outcomes = set()
    for moment in range(1, 200):
        waiting = moment
        dataset = open_dataset(x)
        while_opening = waiting <= 0
        line = refusal(lambda: dataset["train"].rows(range(12)))  # noqa: B023
        assert line in ("", f"{x}: was replaced while it was being read; open it again")
        outcomes.add("refused" if line else "read")
        if not line:
            assert equal(dataset["train"].rows(range(12)), rows_of[dataset.sha256])
        if waiting > 0:
            break
        outcomes.add("while opening" if while_opening else "while reading")
    assert waiting > 0 and outcomes == {"read", "refused", "while opening", "while reading"}


def test_the_inode_of_an_open_dataset_is_not_reused(two, tmp_path):
    _, x, _ = two
    dataset = open_dataset(x)
    inode = (x / "dataset_metadata.json").stat().st_ino
    shutil.rmtree(x)
    (tmp_path / "many").mkdir()
    for number in range(300):
        (tmp_path / f"many/{number}").touch()
        assert (tmp_path / f"many/{number}").stat().st_ino != inode
    with pytest.raises(DataError, match="x: was replaced while it was being read; open it again"):
        dataset["train"].rows([0])


def test_mapped_files_stay_readable_after_the_dataset_is_removed(two):
    rows_of, x, _ = two
    dataset = open_dataset(x)
    dataset["train"].rows(range(12))
    shutil.rmtree(x)
    assert equal(dataset["train"].rows(range(12)), rows_of[dataset.sha256])


def test_a_file_changed_between_opening_and_reading_is_named(two):
    _, x, _ = two
    dataset = open_dataset(x)
    path = x / SHARD / "tokens.bin"
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=r"tokens.bin: was changed after the dataset was opened"):
        dataset["train"].rows([0])


def test_open_datasets_do_not_depend_on_the_working_directory(two, tmp_path, monkeypatch):
    rows_of, _, _ = two
    monkeypatch.chdir(tmp_path)
    dataset = open_dataset("x")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert equal(dataset["train"].rows(range(12)), rows_of[dataset.sha256])


def test_an_incomplete_copy_is_not_taken_for_a_dataset_of_another_program(tmp_path):
    whole = tmp_path / "whole"
    write_dataset(whole, {"train": some_rows(1), "val": some_rows(2)})
    part = tmp_path / "part"
    traces = ("tokenizer_state.json", "spans.bin", "origins.bin", "targets.bin")
    for count in range(1, len(traces) + 1):
        for kept in combinations(traces, count):
            shutil.copytree(whole, part)
            (part / "dataset_metadata.json").unlink()
            for path in list(part.rglob("*")):
                if path.name in traces and path.name not in kept:
                    path.unlink()
            with pytest.raises(DataError, match=r"no such file, but .* exists; the build or the copy is incomplete"):
                open_dataset(part)
            assert len(verify_dataset(part, full=False).faults) == 1
            shutil.rmtree(part)


PARTS = {
    "no index in the last shard": (
        lambda t: (t / "shard_00001/episodes.idx").unlink(),
        "every shard must have this file",
    ),
    "an empty shard": (lambda t: (t / "shard_00002").mkdir(), "every shard must have this file"),
    "a mask in one shard": (lambda t: (t / "shard_00001/mask.bin").unlink(), "mask.bin: missing, but"),
    "a partly copied file": (lambda t: (t / "shard_00001/.tokens.bin.Xy3").touch(), "is an incomplete copy"),
    "fewer episodes than counted": (
        lambda t: (t.parent / "dataset_metadata.json").write_text('{"num_train_episodes": 9}'),
        "train: has 8 episodes, but .* records 9; copy the dataset again",
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_an_incomplete_dataset_of_another_program_is_refused(tmp_path, part):
    for number in range(2):
        shard = tmp_path / f"train/shard_0000{number}"
        shard.mkdir(parents=True)
        np.arange(8, dtype="<u2").tofile(shard / "tokens.bin")
        np.ones(8, dtype="u1").tofile(shard / "mask.bin")
        np.array([[0, 2], [2, 2], [4, 2], [6, 2]], "<u8").tofile(shard / "episodes.idx")
    assert len(open_dataset(tmp_path)["train"]) == 8
    change, line = PARTS[part]
    change(tmp_path / "train")
    with pytest.raises(DataError, match=line):
        open_dataset(tmp_path)


def test_rows_of_a_truncated_file_are_correct_or_an_error(tmp_path):
    rows = concat([some_rows(seed, count=400) for seed in range(4)])
    write_dataset(tmp_path / "x", {"train": rows}, shard_tokens=1 << 20)
    for name in sorted(path.name for path in (tmp_path / "x" / SHARD).iterdir()):
        path = tmp_path / "x" / SHARD / name
        data = path.read_bytes()
        for size in (0, 1, len(data) // 2, len(data) // 4096 * 4096, len(data) - 8, len(data) - 1):
            episodes = open_dataset(tmp_path / "x")["train"]
            episodes.rows(range(len(rows)))
            os.truncate(path, size)
            for numbers in (range(3), range(len(rows)), range(3)):
                line = refusal(lambda: episodes.rows(numbers))  # noqa: B023
                if line:
                    assert line.startswith(
                        f"{path}: was truncated from {len(data)} to {size} bytes while it was being read"
                    )
                else:
                    # There is no error for the mask, which is not read, or if only zeros were cut off, because missing
                    # bytes are read as zeros.
                    assert name == "mask.bin" or not any(data[size:])
                    assert equal(episodes.rows(numbers), rows.take(numbers))
            path.write_bytes(data)


def test_overwritten_bytes_are_detected(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "STATS_PER_SECOND", -1.0)
    write_dataset(tmp_path / "x", {"train": some_rows(1)}, shard_tokens=1 << 20)
    episodes = open_dataset(tmp_path / "x")["train"]
    episodes.rows([0])
    path = tmp_path / "x" / SHARD / "tokens.bin"
    with path.open("r+b") as file:
        file.write(b"\7\7")
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=r"tokens.bin: was overwritten, or its disk failed, while it was being read"):
        episodes.rows([0])


def test_accessing_a_truncated_mapping_directly_exits_with_one_error_line(tmp_path):
    write_dataset(tmp_path / "x", {"train": some_rows(1)})
    code = f"""
import os
from chatmill.store.read import open_dataset
tokens = open_dataset({str(tmp_path / "x")!r})["train"].tokens(3)
os.truncate({str(tmp_path / "x" / SHARD / "tokens.bin")!r}, 0)
print(tokens.sum())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1 and "tokens.bin: was truncated from" in done.stderr


def test_truncation_is_reported_instead_of_errors_caused_by_it(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"\1" * 10_000)
    with path.open("rb") as file:
        array = np.asarray(MappedFile(file.fileno(), path, path))
    os.truncate(path, 0)
    with pytest.raises(DataError, match="f: was truncated from 10000 to 0 bytes"), reading():
        assert array.min() == 1
    with pytest.raises(DataError, match="f: was truncated"):
        mapped_file(array).check()
