from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import urllib.request

import pytest

from chatmill.errors import UsageError
from chatmill.remote import multipart, objects
from chatmill.remote.objects import (
    ExistingObjectError,
    MissingObjectError,
    RemoteError,
    find,
    matches,
    names_below,
    read,
    remove,
    upload,
    write,
)
from chatmill.remote.urls import Url

STORES = ["s3", "rclone", "gs", "az", "memory"]
NAMES = ["plain", "a b", "ü/ß 漢字", "a#b", "a?b", "a%20b", "a+b", "a::b", "a&b=c", "a'b", "a@b:c", "~x", "a[1]*"]
numbers = itertools.count()
DATA = bytes(range(256)) * 4


@pytest.fixture(params=STORES, scope="module")
def store(request):
    if request.param == "memory":
        yield None
        return
    with request.getfixturevalue(f"{request.param}_server").in_environment() as server:
        yield server


@pytest.fixture
def bucket(store):
    return Url(f"memory://bucket-{next(numbers)}") if store is None else store.bucket()


def test_an_object_reads_back_as_written(bucket):
    url = bucket / "a/b.bin"
    assert find(url) is None
    for data in (DATA, b"", b"x"):
        write(url, data)
        assert read(url) == data
        assert find(url).size == len(data)
    assert names_below(bucket) == [url]
    remove([url, url, bucket / "never"])
    assert find(url) is None
    assert names_below(bucket) == []
    with pytest.raises(MissingObjectError, match=f"^{bucket}/a/b.bin: no such object; check the name$"):
        read(url)
    with pytest.raises(MissingObjectError):
        read(url, 3, 5)


def test_every_range_reads_the_right_bytes(bucket, monkeypatch):
    monkeypatch.setattr(objects, "RANGE_BYTES", 300)
    write(bucket / "x", DATA)
    size = len(DATA)
    for start, stop in [
        (0, 1),
        (0, size),
        (10, 10),
        (20, 10),
        (size - 1, size),
        (size - 1, size + 9),
        (1, 901),
        (600, 900),
    ]:
        assert read(bucket / "x", start, stop) == DATA[start:stop]
    for start, stop in [(size, size + 1), (size, 10 * size), (10 * size, 10 * size + 5)]:
        assert read(bucket / "x", start, stop) == b""
    assert read(bucket / "x") == DATA
    write(bucket / "empty", b"")
    assert read(bucket / "empty", 0, 10) == b""


def test_names_are_used_literally(bucket):
    # Write below `folder`, because a store that keeps objects as files cannot use one name for an object and a folder.
    urls = [bucket / f"folder/{name}" for name in NAMES if bucket.scheme != "memory" or "::" not in name]
    for url in urls:
        write(url, str(url).encode())
    for url in urls:
        assert read(url) == str(url).encode()
        assert find(url).size == len(str(url).encode())
    assert sorted(map(str, names_below(bucket / "folder"))) == sorted(map(str, urls))
    remove(urls[1:])
    assert names_below(bucket) == urls[:1]


def test_folders_and_globs_match_exactly_the_objects_below_them(bucket):
    for name in ("v1/a.jsonl", "v1/b/c.jsonl", "v1/b/d.txt", "v10/e.jsonl", "v1.jsonl"):
        write(bucket / name, b"1")
    assert names_below(bucket / "v1") == [bucket / "v1/a.jsonl", bucket / "v1/b/c.jsonl", bucket / "v1/b/d.txt"]
    assert names_below(Url(f"{bucket}/v1/")) == names_below(bucket / "v1")
    assert find(bucket / "v1") is None
    assert find(bucket / "v1/b") is None
    assert names_below(bucket / "v") == []
    assert matches(bucket / "v1/*.jsonl") == [bucket / "v1/a.jsonl"]
    assert matches(bucket / "v1/**/*.jsonl") == [bucket / "v1/a.jsonl", bucket / "v1/b/c.jsonl"]
    assert matches(bucket / "*/[ae].jsonl") == [bucket / "v1/a.jsonl", bucket / "v10/e.jsonl"]
    assert matches(bucket / "v2/*") == []


def test_a_conditional_write_fails_if_the_object_changed(bucket):
    url = bucket / "metadata.json"
    with pytest.raises(ExistingObjectError, match=r"the object already exists, or was replaced in the meantime$"):
        write(url, b"1", replaces="some version")
    write(url, b"1", new=True)
    first = find(url).version
    with pytest.raises(ExistingObjectError):
        write(url, b"2", new=True)
    write(url, b"22", replaces=first)
    with pytest.raises(ExistingObjectError):
        write(url, b"333", replaces=first)
    assert read(url) == b"22"
    assert find(url).version != first


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # raised by the azure library
def test_an_uploaded_file_reads_back_unchanged(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(multipart, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    for size in (0, 1000, (11 << 20) + 7):
        data = os.urandom(size)
        (tmp_path / "shard.bin").write_bytes(data)
        upload(bucket / "shard.bin", tmp_path / "shard.bin")
        assert find(bucket / "shard.bin").size == size
        assert read(bucket / "shard.bin") == data
    assert names_below(bucket) == [bucket / "shard.bin"]


def test_one_of_two_writers_wins_if_the_store_has_conditional_writes(store, bucket, monkeypatch):
    if store is None or store.folder is not None:
        pytest.skip("this store does not support conditional writes")
    # Simulate two writers that both check for the object before either of them writes.
    monkeypatch.setattr(objects, "find", lambda url: None)
    write(bucket / "x", b"1", new=True)
    with pytest.raises(ExistingObjectError):
        write(bucket / "x", b"2", new=True)
    monkeypatch.undo()
    info = find(bucket / "x")
    write(bucket / "x", b"22", replaces=info.version)
    monkeypatch.setattr(objects, "find", lambda url: info)
    with pytest.raises(ExistingObjectError):
        write(bucket / "x", b"333", replaces=info.version)
    monkeypatch.undo()
    assert read(bucket / "x") == b"22"


def test_writes_of_another_program_are_visible_immediately(s3):
    """By default, s3fs caches directory listings, which would hide objects that another program writes."""
    bucket = s3.bucket()
    write(bucket / "a/1", b"1")
    assert names_below(bucket) == [bucket / "a/1"]
    assert find(bucket / "a/2") is None
    for name, data in (("a/2", b"22"), ("a/1", b"111")):
        address = f"{s3.endpoint}/{str(bucket).removeprefix('s3://')}/{name}"
        headers = {"Authorization": "AWS testing:", "Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(address, data, headers, method="PUT")).close()
    assert find(bucket / "a/2").size == 2
    assert find(bucket / "a/1").size == 3
    assert names_below(bucket) == matches(bucket / "a/*") == [bucket / "a/1", bucket / "a/2"]


def test_listings_longer_than_one_page_are_complete(rclone):
    bucket = rclone.bucket()
    folder = rclone.folder / str(bucket).removeprefix("s3://") / "many"
    folder.mkdir()
    for number in range(1003):
        (folder / f"{number:04}").touch()
    urls = [bucket / f"many/{number:04}" for number in range(1003)]
    assert names_below(bucket) == urls
    assert matches(bucket / "many/*[13579]") == urls[1::2]


def test_objects_are_read_in_many_threads_at_once(s3):
    bucket = s3.bucket()
    pieces = {bucket / str(number): os.urandom(1000) for number in range(16)}
    failed = []

    def work(url: Url, data: bytes) -> None:
        try:
            write(url, data)
            assert find(url).size == 1000
            assert url in names_below(bucket)
            assert read(url, 10, 900) == data[10:900]
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=item) for item in pieces.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


FORKS = """
import os, sys
from chatmill.remote.objects import find, read
from chatmill.remote.urls import Url
url = Url(sys.argv[1])
assert read(url) == b"before"
for _ in range(2):
    if (child := os.fork()) == 0:
        ok = read(url) == b"before" and find(url).size == 6
        os._exit(0 if ok else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read(url) == b"before"
"""


@pytest.mark.parametrize("kind", ["s3", "web"])
def test_objects_are_read_before_and_after_a_fork(kind, request):
    server = request.getfixturevalue(kind)
    if kind == "web":
        url = Url(f"{server.endpoint}/ranges/forks")
        (server.folder / "forks").write_bytes(b"before")
    else:
        url = server.bucket() / "x"
        write(url, b"before")
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS, str(url)], check=True, timeout=60)


def test_the_hub_is_read(hf):
    dataset = hf.folder / "org/name"
    (dataset / "data").mkdir(parents=True)
    for name in ("data/a b.jsonl", "data/ü#1.jsonl", "readme"):
        (dataset / name).write_bytes(DATA + name.encode())
    root = Url("hf://datasets/org/name")
    assert names_below(root / "data") == [root / "data/a b.jsonl", root / "data/ü#1.jsonl"]
    assert names_below(root) == [root / "data/a b.jsonl", root / "data/ü#1.jsonl", root / "readme"]
    assert matches(root / "**/*.jsonl") == names_below(root / "data")
    for url in names_below(root):
        data = DATA + str(url).removeprefix(f"{root}/").encode()
        assert read(url) == data
        assert find(url).size == len(data)
        assert read(url, 5, 30) == data[5:30]
        assert read(url, len(data) - 2, len(data) + 5) == data[-2:]
        assert read(url, len(data), len(data) + 5) == b""
    first = find(root / "readme")
    (dataset / "readme").write_bytes(b"another")
    assert find(root / "readme") != first
    assert find(root / "nothing") is None
    assert names_below(root / "nothing") == []
    with pytest.raises(RemoteError, match=r"^hf://datasets/org/unknown/x: the repository does not exist; create it "):
        find(Url("hf://datasets/org/unknown/x"))
    with pytest.raises(UsageError, match=r"hf:// can only be read; write to s3://, gs://, az:// or a local path"):
        write(root / "x", b"")


def test_web_servers_are_read_with_and_without_ranges(web):
    for name in ("plain", "a b", "ü"):
        (web.folder / name).write_bytes(DATA)
        for kind in ("ranges", "whole"):
            url = Url(f"{web.endpoint}/{kind}/{name}")
            assert read(url) == DATA
            assert find(url).size == len(DATA)
            for start, stop in [(0, 10), (500, 600), (1000, 2000), (1023, 1024), (1024, 1030), (3000, 3010), (9, 9)]:
                assert read(url, start, stop) == DATA[start:stop]
            assert find(Url(f"{url}-not")) is None
            with pytest.raises(MissingObjectError):
                read(Url(f"{url}-not"))
    with pytest.raises(UsageError, match=r"http:// can only be read"):
        write(Url(f"{web.endpoint}/ranges/x"), b"")
    with pytest.raises(UsageError, match="files on web servers cannot be listed; pass the URL of each file"):
        names_below(Url(f"{web.endpoint}/ranges/"))


def test_a_large_file_on_a_web_server_without_ranges_is_only_read_whole(web, monkeypatch):
    monkeypatch.setattr("chatmill.remote.web.WHOLE_BYTES", 500)
    (web.folder / "large").write_bytes(DATA)
    url = Url(f"{web.endpoint}/whole/large")
    assert read(url) == DATA
    assert read(url, 0, 100) == DATA[:100]
    right = "the server does not support range requests, and the file is too large to read repeatedly"
    with pytest.raises(RemoteError, match=rf"/whole/large: cannot be read \({right}\); download the file"):
        read(url, 100, 200)


def test_files_of_a_web_server_that_sends_no_size_are_read_whole(web):
    (web.folder / "stream").write_bytes(DATA)
    url = Url(f"{web.endpoint}/stream/stream")
    assert read(url) == DATA
    with pytest.raises(
        RemoteError, match=r"the server does not report the size; download the file, and use the local copy$"
    ):
        find(url)
