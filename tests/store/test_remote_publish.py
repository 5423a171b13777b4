from __future__ import annotations

import json
import pickle
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

import chatmill
from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.prepare.engine import LocalEngine
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.remote import objects
from chatmill.remote.urls import Url
from chatmill.store import remote_publish, verify_dataset
from chatmill.store.clean import clean_dataset
from chatmill.store.diff import diff_datasets
from chatmill.store.layout import METADATA
from chatmill.store.metadata import listed_files, read_metadata
from chatmill.store.read import open_dataset
from chatmill.store.remote_files import object_url
from chatmill.store.reweigh import reweigh_dataset

SHARD_TOKENS = 300


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("CHATMILL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(objects, "FIRST_DELAY", 0.001)
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def memory():
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return Url("memory://bucket")


def job(count: int = 12, *, name: str = "chat.jsonl", **options) -> chatmill.Job:
    lines = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"it is {n}" * 3}]}
        for n in range(count)
    ]
    Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return chatmill.Job((chatmill.InputSource((name,)),), shard_tokens=SHARD_TOKENS, val_split=0.3, **options)


def built(url: Url | str, *, of: chatmill.Job | None = None, **options):
    return prepare_dataset(of or job(), url, engine=LocalEngine(1), **options)


def names(url: Url) -> list[str]:
    return sorted(str(each).removeprefix(f"{url}/") for each in objects.names_below(url))


def equal(one, other) -> bool:
    fields = ("ids", "spans", "first_span", "origins", "first_segment")
    assert one.splits == other.splits
    return all(
        np.array_equal(getattr(a, field), getattr(b, field))
        for split in one.splits
        for a, b in [(each[split].rows(np.arange(len(each[split]))) for each in (one, other))]
        for field in fields
    )


def test_the_bytes_in_the_bucket_equal_the_local_dataset(s3):
    url = s3.bucket() / "sets/v1"
    metadata = built(url)
    assert built("local") == metadata
    assert objects.read(url / METADATA) == Path("local", METADATA).read_bytes()
    files = dict(listed_files(metadata))
    assert len(files) > 10
    assert names(url) == sorted({METADATA, *(f"objects/{info.sha256}" for info in files.values())})
    for name, info in files.items():
        assert objects.read(object_url(url, info.sha256)) == Path("local", name).read_bytes()
    remote, local = open_dataset(str(url)), open_dataset("local")
    assert equal(remote, local)
    assert equal(pickle.loads(pickle.dumps(remote)), local)  # noqa: S301 (as worker processes get it)
    assert remote.sha256 == local.sha256
    assert remote.tokenizer_state() == local.tokenizer_state()
    assert verify_dataset(url, full=False) == verify_dataset("local", full=False)
    assert verify_dataset(url, full=True) == verify_dataset("local", full=True)
    assert diff_datasets(url, "local").identical
    assert list(Path("scratch").rglob("*.rows")) == list(Path("scratch").rglob("shard_*")) == []


def test_plain_files_copied_to_a_bucket_also_open(memory):
    url = memory / "copied"
    metadata = built("local")
    for name in (*dict(listed_files(metadata)), METADATA):
        objects.upload(url / name, Path("local", name))
    assert equal(open_dataset(url), open_dataset("local"))
    assert verify_dataset(url, full=True) == verify_dataset("local", full=True)


def test_a_dataset_on_a_web_server_and_on_the_hub_opens(web, hf):
    built("local")
    for folder, url in (
        (web.folder / "sets/v1", f"{web.endpoint}/ranges/sets/v1"),
        (hf.folder / "org/sets/v1", "hf://datasets/org/sets/v1/"),
    ):
        shutil.copytree("local", folder)
        assert equal(open_dataset(url), open_dataset("local"))
        assert verify_dataset(url, full=True) == verify_dataset("local", full=True)
        with pytest.raises(DataError, match=r"dataset_metadata\.json: no dataset found; an unfinished build has no m"):
            open_dataset(f"{url.rstrip('/')}-2")


def test_an_existing_dataset_is_refused_before_any_work_and_replaced_with_overwrite(memory):
    url = memory / "v1"
    built(url)
    old = open_dataset(url)
    with pytest.raises(DataError, match=f"^{url}: already exists; use another name or pass --overwrite$"):
        prepare_dataset(chatmill.Job((chatmill.InputSource(("missing.jsonl",)),)), url)
    built(url, of=job(5), overwrite=True)
    built("second", of=job(5))
    assert equal(open_dataset(url), open_dataset("second"))
    # A dataset that is already open still reads the old data.
    built("first")
    assert equal(old, open_dataset("first"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_concurrent_builds_one_is_published_and_the_other_fails(s3, overwrite, monkeypatch):
    url = s3.bucket() / "v1"
    if overwrite:
        built(url)
    publish = remote_publish.publish_metadata

    def late(target, text):
        monkeypatch.setattr(remote_publish, "publish_metadata", publish)
        monkeypatch.setenv("TMPDIR", str(Path("elsewhere").absolute()))
        monkeypatch.setattr("tempfile.tempdir", None)
        Path("elsewhere").mkdir()
        built(url, of=job(5, name="other.jsonl"), overwrite=overwrite)
        publish(target, text)

    monkeypatch.setattr(remote_publish, "publish_metadata", late)
    what = f"{'was replaced' if overwrite else 'appeared'} while the dataset was being built; nothing was published"
    with pytest.raises(DataError, match=f"^{url}: {what}; [^\n]*$"):
        built(url, of=job(7), overwrite=overwrite)
    built("other", of=job(5, name="other.jsonl"))
    assert equal(open_dataset(url), open_dataset("other"))
    assert verify_dataset(url, full=True).faults == ()


def test_objects_that_chatmill_did_not_write_are_not_replaced(memory):
    url = memory / "v1"
    for text in (b"{}", b"not json", b'{"schema": "another"}'):
        objects.write(url / METADATA, text)
        with pytest.raises(
            DataError, match=r"is not replaced, because chatmill did not write its dataset_metadata\.json"
        ):
            built(url, overwrite=True)
        with pytest.raises(DataError, match=r"^memory://bucket/v1/dataset_metadata\.json: "):
            open_dataset(url)
        assert objects.read(url / METADATA) == text
    assert names(url) == [METADATA]


def test_urls_that_can_only_be_read_are_refused_before_any_work():
    for url in ("https://example.org/v1", "hf://datasets/org/name"):
        with pytest.raises(UsageError, match="can only be read"):
            prepare_dataset(chatmill.Job((chatmill.InputSource(("missing.jsonl",)),)), url)


@pytest.mark.parametrize("store", ["memory", "s3"])
def test_a_target_with_objects_of_others_is_refused_before_any_work(store, request, monkeypatch):
    opened = request.getfixturevalue(store)
    bucket = opened if isinstance(opened, Url) else opened.bucket()
    nothing = chatmill.Job((chatmill.InputSource(("missing.jsonl",)),))
    for name in ("in/sub/a.jsonl", "in/b.jsonl", "in/train/c.jsonl", "in-2/b.jsonl", "file"):
        objects.write(bucket / name, b"mine")
    for overwrite in (False, True):
        for root in (bucket, Url(f"{bucket}//")):
            with pytest.raises(UsageError, match=rf"{bucket}/*: has no name; use {bucket.scheme}://BUCKET/"):
                prepare_dataset(nothing, root, overwrite=overwrite)
        with pytest.raises(
            DataError, match=rf"^{bucket}/in: contains b\.jsonl, sub, which chatmill did not write; use an"
        ):
            prepare_dataset(nothing, bucket / "in", overwrite=overwrite)
        with pytest.raises(
            DataError, match=rf"^{bucket}/file: is an object, but a dataset needs a folder; use another"
        ):
            prepare_dataset(nothing, bucket / "file", overwrite=overwrite)
    # Leftovers of a killed build do not block a new build, and neither does a folder whose name has the same prefix.
    for name in (f"i/objects/{'0' * 64}", f"i/staging/{'1' * 64}/unit_00000.rows"):
        objects.write(bucket / name, b"left")
    built(bucket / "i")
    # A build does not need permission to list objects.
    monkeypatch.setattr(objects, "first_below", lambda url: (_ for _ in ()).throw(objects.RemoteError("not allowed")))
    built(bucket / "in")


def test_a_dataset_of_copied_plain_files_is_replaced_with_overwrite(memory):
    url = memory / "copied"
    for name in (*dict(listed_files(built("local"))), METADATA):
        objects.upload(url / name, Path("local", name))
    objects.write(url / "README.md", b"mine")
    built(url, of=job(5), overwrite=True)
    built("second", of=job(5))
    assert equal(open_dataset(url), open_dataset("second"))
    assert objects.read(url / "README.md") == b"mine"


class Stop(BaseException):
    pass


def test_a_build_stopped_at_any_write_leaves_the_old_dataset_and_can_be_resumed(memory, monkeypatch):
    url, of = memory / "v1", job(7)
    upload, write = objects.upload, objects.write
    lock, done, limit = threading.Lock(), 0, 0

    def counted(call):
        def limited(*args, **options):
            nonlocal done
            with lock:
                if done == limit:
                    raise Stop
                call(*args, **options)
                done += 1

        return limited

    monkeypatch.setattr(objects, "upload", counted(upload))
    monkeypatch.setattr(objects, "write", counted(write))
    stops = 0
    while True:
        done, limit = 0, stops
        try:
            metadata = built(url, of=of)
            break
        except Stop:
            stops += 1
        with pytest.raises(DataError, match="no dataset found; an unfinished build has no metadata"):
            open_dataset(url)
        done, limit, rendered = 0, 10**6, []
        if stops % 7 == 0:
            built(url, of=of, resume=True, on_progress=lambda now, rendered=rendered: rendered.append(now.step))
            assert rendered[0] == "check"
            objects.remove([url / METADATA])
        objects.remove(objects.names_below(url))
    assert stops == len({info.sha256 for _, info in listed_files(metadata)}) + 1
    assert verify_dataset(url, full=True).faults == ()


def test_no_listing_is_needed_to_build_open_and_resume(memory, monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr(MemoryFileSystem, "find", lambda *args, **options: {})
    monkeypatch.setattr(MemoryFileSystem, "glob", lambda *args, **options: {})
    monkeypatch.setattr(MemoryFileSystem, "ls", lambda *args, **options: [])
    write = objects.write
    monkeypatch.setattr(objects, "write", lambda *args, **options: (_ for _ in ()).throw(Stop))
    url = memory / "v1"
    with pytest.raises(Stop):
        built(url)
    monkeypatch.setattr(objects, "write", write)
    built(url, resume=True)
    built("local")
    assert names(url) == []
    assert equal(open_dataset(url), open_dataset("local"))
    assert verify_dataset(url, full=True).faults == ()


def test_an_existing_object_is_not_uploaded_again_unless_it_is_old(memory, monkeypatch):
    uploads, upload = [], objects.upload
    monkeypatch.setattr(objects, "upload", lambda url, path: (uploads.append(url.name), upload(url, path)))
    url = memory / "v1"
    metadata = built(url)
    hashes = {info.sha256 for _, info in listed_files(metadata)}
    assert sorted(uploads) == sorted(hashes)
    uploads.clear()
    built(url, overwrite=True)
    assert uploads == []
    objects.remove([url / METADATA])
    built(url)
    assert uploads == []
    # Old objects that no metadata lists may be cleaned up at any time, so they are uploaded again.
    monkeypatch.setattr(remote_publish, "FRESH", 0.0)
    built(url, overwrite=True)
    assert uploads == []
    objects.remove([url / METADATA])
    built(url)
    assert sorted(uploads) == sorted(hashes)


def test_missing_truncated_and_changed_objects_are_reported_and_never_read(s3):
    url = s3.bucket() / "v1"
    metadata = built(url)
    files = dict(listed_files(metadata))
    place = object_url(url, files["train/shard_00000/tokens.bin"].sha256)
    named = rf"^{place} \(train/shard_00000/tokens.bin\): "
    data = bytearray(objects.read(place))
    data[3] ^= 1
    objects.write(place, bytes(data))
    dataset = open_dataset(url)
    with pytest.raises(DataError, match=rf"^{place}: the sha256 is [0-9a-f]{{12}}…, but the dataset records "):
        dataset["train"].rows([0])
    [fault] = verify_dataset(url, full=True).faults
    assert_matches(named + "sha256 is .*, but the metadata records .*; the object was changed$", fault)
    assert verify_dataset(url, full=False).faults == ()
    objects.write(place, bytes(data[:-1]))
    for full in (False, True):
        [fault] = verify_dataset(url, full=full).faults
        assert_matches(named + rf"is {len(data) - 1} bytes, but the metadata records {len(data)}; build", fault)
    objects.remove([place])
    for full in (False, True):
        [fault] = verify_dataset(url, full=full).faults
        assert_matches(named + "missing; build the dataset or copy it again$", fault)
    with pytest.raises(DataError, match=f"^{place}: "):
        dataset["train"].rows([0])


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text), text


def test_verify_reads_the_store_instead_of_the_cache(memory):
    url = memory / "v1"
    metadata = built(url)
    dataset = open_dataset(url)
    for split in dataset.splits:
        dataset[split].rows(np.arange(len(dataset[split])))
    place = object_url(url, dict(listed_files(metadata))["val/shard_00000/tokens.bin"].sha256)
    data = bytearray(objects.read(place))
    data[0] ^= 1
    objects.write(place, bytes(data))
    assert len(verify_dataset(url, full=True).faults) == 1


def test_reweighing_from_and_to_a_url_gives_the_bytes_of_local_reweighing(memory):
    url = memory
    built(url / "v1")
    built("v1")
    reweigh_dataset("v1", "all", train_on="all")
    for source, target in ((url / "v1", url / "all"), ("v1", url / "other"), (url / "v1", "here")):
        reweigh_dataset(source, target, train_on="all")
        assert equal(open_dataset(target), open_dataset("all"))
        assert verify_dataset(target, full=True).faults == ()
    assert objects.read(url / "all" / METADATA) == Path("all", METADATA).read_bytes()
    with pytest.raises(DataError, match="already exists"):
        reweigh_dataset("v1", url / "all", train_on="all")
    assert list(Path("scratch").rglob("*.bin")) == []


# Cleaning.


def test_clean_removes_exactly_the_objects_that_the_metadata_does_not_list(s3):
    url = s3.bucket() / "v1"
    built(url)
    built(url, of=job(5), overwrite=True)
    used = {f"objects/{info.sha256}" for _, info in listed_files(read_metadata_at(url))}
    left = set(names(url)) - used - {METADATA}
    assert left
    strange = ["notes.txt", "objects/readme", f"objects/{'A' * 64}", "staging/x", f"other/{'0' * 64}"]
    for name in strange:
        objects.write(url / name, b"mine")
    staged = [f"staging/{'1' * 64}/unit_00000.rows", f"staging/{'1' * 64}/deep/unit"]
    for name in staged:
        objects.write(url / name, b"rows")
    before = names(url)
    assert clean_dataset(url).young.objects == len(left) + 2
    dry = clean_dataset(url, older_than=-60, dry_run=True)
    assert names(url) == before
    done = clean_dataset(url, older_than=-60)
    assert done == dry
    assert (done.used.objects, done.removed.objects, done.others.objects) == (len(used), len(left) + 2, len(strange))
    assert names(url) == sorted({METADATA, *used, *strange})
    assert verify_dataset(url, full=True).faults == ()


def read_metadata_at(url: Url):
    return read_metadata(Path("x"), lambda path: objects.read(url / METADATA))


def test_clean_keeps_undated_objects_and_refuses_urls_without_a_dataset(memory, monkeypatch):
    url = memory / "v1"
    with pytest.raises(DataError, match="is empty; expected a dataset"):
        clean_dataset(url)
    objects.write(url / "objects" / ("0" * 64), b"left")
    assert clean_dataset(url, older_than=-60, dry_run=True).removed.objects == 1
    objects.write(url / "mine.txt", b"mine")
    with pytest.raises(DataError, match=r"contains mine\.txt but no dataset_metadata\.json"):
        clean_dataset(url, older_than=-60)
    objects.write(url / METADATA, b'{"schema": "another"}')
    with pytest.raises(DataError, match="the file is damaged, or chatmill did not write it"):
        clean_dataset(url, older_than=-60)
    objects.remove([url / METADATA])
    objects.remove([url / "mine.txt"])
    monkeypatch.setattr(objects, "TIMES", ())
    done = clean_dataset(url, older_than=-60)
    assert (done.undated.objects, done.removed.objects) == (1, 0)
    monkeypatch.undo()
    assert clean_dataset(url, older_than=-60).removed.objects == 1
    assert names(url) == []


def test_clean_keeps_the_objects_of_a_dataset_published_meanwhile(memory, monkeypatch):
    url = memory / "v1"
    built(url)
    objects.write(url / "kept", objects.read(url / METADATA))
    objects.remove([url / METADATA])
    listed = objects.infos_below

    def then_published(place):
        infos = listed(place)
        objects.write(url / METADATA, objects.read(url / "kept"))
        objects.remove([url / "kept"])
        return {each: info for each, info in infos.items() if each.name != "kept"}

    monkeypatch.setattr(objects, "infos_below", then_published)
    done = clean_dataset(url, older_than=-60)
    assert done.removed.objects == 0
    assert verify_dataset(url, full=True).faults == ()


def test_errors_of_a_dataset_at_a_url_are_one_error_line(memory):
    for call in (
        lambda: open_dataset("memory://bucket/none"),
        lambda: verify_or_raise(memory / "none"),
        lambda: reweigh_dataset(memory / "none", "out", train_on="all"),
    ):
        with pytest.raises(ChatmillError) as error:
            call()
        assert "\n" not in str(error.value)
        assert "memory://bucket/none/dataset_metadata.json: no dataset found" in str(error.value)


def verify_or_raise(url: Url) -> None:
    for fault in verify_dataset(url, full=True).faults:
        raise DataError(fault)
