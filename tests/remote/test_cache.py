from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from chatmill.errors import DataError, UsageError
from chatmill.plain_file import JSON_LIMIT
from chatmill.remote import cache, download, objects
from chatmill.remote.cache_settings import parse_size
from chatmill.remote.named_files import TOKENIZER_LIMIT, local_file
from chatmill.remote.objects import MissingObjectError, RemoteError
from chatmill.remote.prefetch import Prefetch, RemoteObject
from chatmill.remote.urls import Url

MB = 1_000_000
RANGE = objects.RANGE_BYTES


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CHATMILL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(objects, "FIRST_DELAY", 0.001)
    return tmp_path / "cache"


@pytest.fixture
def reads(monkeypatch):
    names = []
    read = download.read

    def counted(url, *range_of_bytes):
        names.append(url.name)
        return read(url, *range_of_bytes)

    monkeypatch.setattr(download, "read", counted)
    return names


def stored(name: str, size: int, *, seed: int = 0) -> RemoteObject:
    data = np.random.default_rng([seed, size]).bytes(size)
    url = Url(f"memory://cache-tests/{name}")
    objects.write(url, data)
    return RemoteObject(url, size, hashlib.sha256(data).hexdigest())


def fetched(each: RemoteObject) -> Path:
    return cache.fetch(each.url, size=each.size, sha256=each.sha256)


def in_cache(folder: Path) -> set[str]:
    return {path.name for path in (folder / "objects").iterdir()}


@pytest.mark.parametrize("size", [0, 1, 4096, RANGE, RANGE + 1, 5 * RANGE + 7])
def test_a_fetched_file_has_the_bytes_of_its_object_and_is_read_once(size, reads):
    each = stored("one", size)
    path = fetched(each)
    assert path.read_bytes() == objects.read(each.url)
    count = len(reads)
    assert fetched(each) == path
    assert len(reads) == count == -(-size // RANGE)


def test_ranges_of_a_large_object_are_written_in_order_whatever_order_they_arrive_in(monkeypatch):
    monkeypatch.setattr(download, "RANGE_BYTES", 1000)
    each, read = stored("ordered", 10_500), download.read

    def later_first(url, start, stop):
        time.sleep(0.002 * (4 - start // 1000 % 4))
        return read(url, start, stop)

    monkeypatch.setattr(download, "read", later_first)
    assert fetched(each).read_bytes() == read(each.url)


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "empty"])
def test_a_cached_file_that_was_changed_is_downloaded_again(damage):
    each = stored("changed", 5000)
    path = fetched(each)
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[1234] ^= 1
    else:
        data = {"cut": data[:-1], "longer": data + b"x", "empty": b""}[damage]
    path.write_bytes(data)
    assert fetched(each).read_bytes() == objects.read(each.url)


def test_a_file_with_only_a_new_modification_time_is_hashed_and_kept(reads):
    each = stored("touched", 5000)
    os.utime(fetched(each))
    reads.clear()
    assert fetched(each).read_bytes() == objects.read(each.url)
    assert reads == []


@pytest.mark.parametrize("size", [5000, 3 * objects.RANGE_BYTES])
def test_an_object_with_a_wrong_hash_is_one_error_line_and_leaves_nothing(size, folder):
    each = stored("wrong", size)
    other = stored("wrong", size, seed=1)
    with pytest.raises(RemoteError) as error:
        fetched(each)
    assert str(error.value) == (
        f"memory://cache-tests/wrong: the sha256 is {other.sha256[:12]}…, but the dataset records {each.sha256[:12]}…, "
        "so the object was changed or damaged; upload the dataset again"
    )
    assert [list((folder / name).iterdir()) for name in ("objects", "partial", "locks")] == [[], [], []]


def test_a_truncated_object_is_one_error_line():
    each = stored("cut", 5000)
    objects.write(each.url, objects.read(each.url)[:-1])
    with pytest.raises(RemoteError, match=r"cut: is 4,999 bytes, but the dataset records 5,000; upload"):
        fetched(each)


def test_an_object_that_vanished_is_one_error_line():
    each = stored("gone", 5000)
    objects.remove([each.url])
    with pytest.raises(MissingObjectError, match=r"^memory://cache-tests/gone: no such object"):
        fetched(each)


def test_the_least_recently_used_objects_are_evicted(folder, monkeypatch):
    monkeypatch.setenv("CHATMILL_CACHE_SIZE", "3.5MB")
    a, b, c, d = (stored(name, MB, seed=number) for number, name in enumerate("abcd"))
    for each in (a, b, c):
        fetched(each)
    for each, used_at in ((a, 30), (b, 10), (c, 20)):
        path = folder / "objects" / each.sha256
        os.utime(path, (used_at, path.stat().st_mtime))
    fetched(d)
    assert in_cache(folder) == {a.sha256, c.sha256, d.sha256}


def test_an_object_larger_than_the_limit_is_fetched_and_all_others_are_evicted(folder, monkeypatch):
    monkeypatch.setenv("CHATMILL_CACHE_SIZE", "1MB")
    small, large = stored("small", 1000), stored("large", 2 * MB)
    fetched(small)
    assert fetched(large).stat().st_size == 2 * MB
    assert in_cache(folder) == {large.sha256}


def test_files_of_a_killed_download_are_never_used_and_are_evicted(folder, monkeypatch):
    each, other = stored("each", MB), stored("other", MB, seed=1)
    cache.cache_folder()
    (folder / "partial" / each.sha256).write_bytes(b"x" * MB)
    (folder / "locks" / each.sha256).touch()
    monkeypatch.setenv("CHATMILL_CACHE_SIZE", "1.5MB")
    fetched(other)
    assert not (folder / "partial" / each.sha256).exists()
    assert fetched(each).read_bytes() == objects.read(each.url)


def test_a_full_disk_causes_eviction_and_then_one_error_line(folder, monkeypatch):
    old, new = stored("old", 1000), stored("new", 1000, seed=1)
    fetched(old)
    write = cache._write
    failures = [1]

    def full(*arguments):
        if failures:
            failures.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(cache, "_write", full)
    fetched(new)
    assert in_cache(folder) == {new.sha256}
    failures[:] = [1, 1]
    with pytest.raises(DataError, match=r"the disk is full, but memory://cache-tests/old needs 1,000 bytes; free some"):
        fetched(old)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("20GB", 20 * 10**9), ("1.5 tb", 1_500 * 10**9), ("64GiB", 64 << 30), ("5k", 5000), ("7b", 7)],
)
def test_sizes_are_read_with_their_units(text, size):
    assert parse_size(text, "cache_size") == size


@pytest.mark.parametrize("text", ["0", "-5", "twenty", "20 G B", "1e9", "i", "5ib"])
def test_invalid_sizes_are_refused(text):
    with pytest.raises(UsageError, match=r"^cache_size is '.*'; expected a number of bytes above 0, such as 20GB$"):
        parse_size(text, "cache_size")


def test_a_cache_writable_by_other_users_is_refused(folder, tmp_path, monkeypatch):
    cache.cache_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(UsageError, match=r"cache: other users can write to the cache; run chmod go-w"):
        cache.cache_folder()
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setenv("CHATMILL_CACHE_DIR", str(tmp_path / "link"))
    with pytest.raises(UsageError, match=r"link: the cache must not be a symbolic link"):
        cache.cache_folder()
    (tmp_path / "file").touch()
    monkeypatch.setenv("CHATMILL_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"file: the cache must be a folder"):
        cache.cache_folder()
    monkeypatch.setenv("CHATMILL_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(UsageError, match=r"below: cannot be used as the cache .*; set CHATMILL_CACHE_DIR"):
        cache.cache_folder()


def test_replaced_cache_folders_are_refused(folder, tmp_path):
    cache.cache_folder()
    (folder / "objects").rmdir()
    (tmp_path / "theirs").mkdir()
    (folder / "objects").symlink_to(tmp_path / "theirs")
    with pytest.raises(UsageError, match=r"objects: the cache must not be a symbolic link"):
        cache.cache_folder()
    (folder / "objects").unlink()
    (folder / "objects").mkdir()
    (folder / "objects").chmod(0o777)
    with pytest.raises(UsageError, match=r"objects: other users can write to the cache"):
        cache.cache_folder()


def test_the_default_folder_is_private_to_the_user(tmp_path, monkeypatch):
    monkeypatch.delenv("CHATMILL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (tmp_path / "xdg" / "chatmill" / "view").mkdir(parents=True)
    (tmp_path / "xdg" / "chatmill").chmod(0o775)
    assert cache.cache_folder() == tmp_path / "xdg" / "chatmill"
    assert (tmp_path / "xdg" / "chatmill").stat().st_mode & 0o777 == 0o755


def test_many_threads_download_an_object_once(reads):
    each = stored("shared", 5000)
    threads = [threading.Thread(target=fetched, args=(each,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reads == ["shared"]


def test_a_lock_is_released_when_its_holder_is_killed(folder):
    each = stored("held", 5000)
    program = (
        "import sys, time; from pathlib import Path; from chatmill.remote import cache\n"
        f"with cache._locked(cache.cache_folder(), {each.sha256!r}):\n    print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    waiting = threading.Thread(target=fetched, args=(each,))
    waiting.start()
    assert in_cache(folder) == set()
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    waiting.join()
    assert in_cache(folder) == {each.sha256}


def test_prefetching_fetches_everything_in_order_and_stops(folder, reads, monkeypatch):
    monkeypatch.setattr("chatmill.remote.prefetch.THREADS", 1)
    all_objects = [stored(f"{number}", 1000, seed=number) for number in range(6)]
    prefetch = Prefetch(all_objects, MB)
    prefetch.join(60)
    assert reads == [each.url.name for each in all_objects]
    assert in_cache(folder) == {each.sha256 for each in all_objects}
    assert prefetch.progress == (6, 6, 6000, 6000)


def test_prefetching_stays_within_its_limit_until_objects_are_used(folder):
    all_objects = [stored(f"{number}", 1000, seed=number) for number in range(6)]
    cache.cache_folder()
    prefetch = Prefetch(all_objects, 2500)
    while len(in_cache(folder)) < 2:
        time.sleep(0.001)
    assert prefetch._next == 2
    for each in all_objects:
        fetched(each)
        prefetch.used(each.sha256)
    prefetch.join(60)
    assert prefetch.progress.objects == 6


def test_prefetching_skips_objects_that_cannot_be_fetched_and_can_be_stopped(folder):
    all_objects = [stored(f"{number}", 1000, seed=number) for number in range(6)]
    objects.remove([all_objects[0].url])
    failing = Prefetch(all_objects, MB)
    failing.join(60)
    assert in_cache(folder) == {each.sha256 for each in all_objects[1:]}
    stopped = Prefetch(all_objects[1:], 1)
    stopped.stop()
    stopped.join(60)
    assert not any(thread.is_alive() for thread in failing._threads + stopped._threads)


FORKING = """
import hashlib, multiprocessing, os
from chatmill.remote import cache, objects
from chatmill.remote.prefetch import Prefetch, RemoteObject
from chatmill.remote.urls import Url

large = []
for number in range(3):
    # Objects at memory:// are in the memory of a forked process, too.
    data, url = os.urandom(3 * objects.RANGE_BYTES), Url(f"memory://forking/{number}")
    objects.write(url, data)
    large.append(RemoteObject(url, len(data), hashlib.sha256(data).hexdigest()))
prefetch = Prefetch(large, 1 << 40)
last = large[-1]
child = multiprocessing.get_context("fork").Process(
    target=cache.fetch, args=(last.url,), kwargs={"size": last.size, "sha256": last.sha256}
)
child.start()
child.join()
prefetch.join(60)
assert child.exitcode == 0
assert {path.name for path in (cache.cache_folder() / "objects").iterdir()} == {each.sha256 for each in large}
"""


def test_a_forked_process_downloads_while_threads_of_its_parent_download():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKING], check=True, timeout=100)


def test_a_local_copy_of_a_file_or_folder_is_updated():
    url = Url("memory://copies/tokenizer")
    objects.write(url / "tokenizer.json", b"{}")
    objects.write(url / "below/more.json", b"[1]")
    copy = cache.local_copy(url)
    assert copy.name == "tokenizer"
    assert {path.relative_to(copy).as_posix(): path.read_bytes() for path in copy.rglob("*.json")} == {
        "tokenizer.json": b"{}",
        "below/more.json": b"[1]",
    }
    assert cache.local_copy(url / "tokenizer.json").read_bytes() == b"{}"
    objects.write(url / "tokenizer.json", b"{ }")
    assert (cache.local_copy(url) / "tokenizer.json").read_bytes() == b"{ }"
    assert cache.local_copy(url / "tokenizer.json").name == "tokenizer.json"
    with pytest.raises(MissingObjectError, match=r"memory://copies/nothing: no such object"):
        cache.local_copy(Url("memory://copies/nothing"))


def test_a_file_that_is_too_large_is_refused_before_it_is_downloaded(folder, reads):
    url = Url("memory://copies/large")
    objects.write(url / "recipe.toml", bytes(JSON_LIMIT + 1))
    reads.clear()
    for named in (url, url / "recipe.toml"):
        with pytest.raises(
            DataError, match=r"^memory://copies/large/recipe\.toml: is 67,108,865 bytes; expected at most 67,108,864$"
        ):
            local_file(str(named))
    assert reads == []
    assert local_file(str(url / "recipe.toml"), limit=TOKENIZER_LIMIT).stat().st_size == JSON_LIMIT + 1


def test_names_that_point_outside_the_folder_are_not_copied(tmp_path, monkeypatch):
    url = Url("memory://copies/evil")
    monkeypatch.setattr(cache, "names_below", lambda _: [Url("memory://copies/evil/../../outside")])
    with pytest.raises(DataError, match=r"outside: is not a valid file name below memory://copies/evil"):
        cache.local_copy(url)
