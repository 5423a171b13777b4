from __future__ import annotations

import json
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load_fixtures import same, talks, write_rows
from torch.utils.data import DataLoader

from chatmill.errors import DataError, UsageError
from chatmill.load.loader import EpisodeLoader
from chatmill.load.plan import Cursor
from chatmill.load.remote import needed_objects, shards_in_order
from chatmill.remote import cache, objects
from chatmill.remote.urls import Url
from chatmill.store.hashed import FileInfo
from chatmill.store.metadata import listed_files, read_metadata
from chatmill.store.read import open_dataset

ROOT = Url("memory://load-tests")
BASE: dict[str, Any] = {"batch_size": 12, "block_size": 16, "epoch_seed": 7, "use_loss_mask": True}
CASES: dict[str, dict[str, Any]] = {
    "epoch": {},
    "in_order": {"epoch_shuffle": False},
    "random": {"batch_sampling_mode": "random"},
    "feistel": {"batch_sampling_mode": "feistel"},
    "packed": {"packing": "bins", "block_size": 40},
    "mixed": {"mix_sft": {"one": 0.5, "two": 0.5}},
    "packed_mixed": {"packing": "bins", "block_size": 40, "mix_sft": {"one": 1, "two": 2}, "mix_by": "trained_tokens"},
}
STEPS = 9


def copied(folder: Path, url: Url, *, by_hash: bool = True) -> Url:
    for name, info in listed_files(read_metadata(folder)):
        objects.write(url / f"objects/{info.sha256}" if by_hash else url / name, (folder / name).read_bytes())
    objects.write(url / "dataset_metadata.json", (folder / "dataset_metadata.json").read_bytes())
    return url


def train_files(folder: Path) -> set[FileInfo]:
    """Return the files that are read for train batches: all but the mask, which is derived from the spans."""
    files = listed_files(read_metadata(folder))
    return {info for name, info in files if name.startswith("train/") and not name.endswith("mask.bin")}


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    for number, name in enumerate(("one", "two")):
        write_rows(folder / name, {"train": talks(number, 53 - number), "val": talks(9 + number, 20)})
        copied(folder / name, ROOT / name)
    return folder


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("CHATMILL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(objects, "FIRST_DELAY", 0.001)
    monkeypatch.setattr("os.fsync", lambda fd: None)
    monkeypatch.setattr("chatmill.load.plan.WINDOW", 20)
    monkeypatch.setattr("chatmill.load.plan.BLOCK", 7)
    monkeypatch.setattr("chatmill.load.batch_builder.LOOKUP_BATCHES", 2)


def both(local: Path, case: dict[str, Any]) -> tuple[str, str]:
    name = "" if "mix_sft" in case else "/one"
    return f"{local}{name}", f"{ROOT}{name}"


def batches(place: str, config: dict[str, Any], *, steps: int = STEPS, state: Any = None, **options: Any) -> list[Any]:
    loader = EpisodeLoader(place, config, tensors=False, **options)
    if state is not None:
        loader.load_state_dict(state)
    taken = [loader.get_batch() for _ in range(steps)]
    loader.close()
    return taken


def state_after(place: str, config: dict[str, Any], steps: int) -> Any:
    loader = EpisodeLoader(place, config, tensors=False)
    for _ in range(steps):
        loader.get_batch()
    loader.close()
    return json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize("name", CASES)
def test_batches_from_a_url_equal_those_of_the_local_dataset(local, name):
    config = {**BASE, **CASES[name]}
    folder, url = both(local, config)
    for rank, world_size in ((0, 1), (1, 3)):
        options = {"rank": rank, "world_size": world_size}
        for mine, theirs in zip(batches(folder, config, **options), batches(url, config, **options), strict=True):
            same(mine, theirs)


@pytest.mark.parametrize("name", ["epoch", "packed", "mixed"])
def test_a_run_continues_from_the_url_where_it_stopped_locally_and_back(local, name):
    config = {**BASE, **CASES[name]}
    folder, url = both(local, config)
    whole = batches(folder, config)
    for step in (1, 6):
        for first, second in ((folder, url), (url, folder)):
            state = state_after(first, config, step)
            for mine, theirs in zip(
                whole[step:], batches(second, config, steps=STEPS - step, state=state), strict=True
            ):
                same(mine, theirs)


def test_a_dataset_of_plain_files_at_a_url_is_read(local):
    url = copied(local / "one", ROOT / "plain", by_hash=False)
    for mine, theirs in zip(batches(f"{local}/one", BASE), batches(str(url), BASE), strict=True):
        same(mine, theirs)


def test_one_pass_over_val_equals_that_of_the_local_dataset(local):
    folder, url = both(local, {})
    passes = [list(EpisodeLoader(place, BASE, tensors=False).one_pass("val")) for place in (folder, url)]
    for mine, theirs in zip(*passes, strict=True):
        same(mine, theirs)


def test_only_files_that_batches_need_are_downloaded(local, tmp_path):
    batches(str(ROOT / "one"), BASE)
    hashes = {path.name for path in (tmp_path / "cache" / "objects").iterdir()}
    assert hashes == {info.sha256 for info in train_files(local / "one")}


def test_a_cache_smaller_than_the_dataset_gives_equal_batches_and_one_warning(local, monkeypatch, tmp_path):
    folder, url = both(local, {})
    expected = batches(folder, BASE)
    monkeypatch.setenv("CHATMILL_CACHE_SIZE", "2000")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = EpisodeLoader(url, BASE, tensors=False)
        for mine in expected:
            same(mine, loader.get_batch())
        loader.close()
    dataset = open_dataset(Url(url))
    needed = sum(info.size for info in train_files(local / "one"))
    assert dataset.sha256 == open_dataset(folder).sha256
    assert [str(each.message) for each in caught if each.category is UserWarning] == [
        f"the cache size is 2,000 bytes, but the next batches need {needed:,} bytes of {url}, so files will be "
        f"downloaded repeatedly; set CHATMILL_CACHE_SIZE or cache_size to {needed} or more"
    ]
    kept = sum(path.stat().st_size for path in (tmp_path / "cache" / "objects").iterdir())
    largest = max(info.size for _, info in listed_files(read_metadata(local / "one")))
    assert kept <= 2000 + largest
    # A memory map would keep an evicted file on disk.
    episodes = loader.plan("train").reader.shards[0][0]
    episodes.drop_evicted()
    assert not any(file.is_removed() for files in episodes._mapped.values() for file in files)


def test_workers_of_a_torch_data_loader_read_through_the_cache(local):
    folder, url = both(local, {})
    expected = batches(folder, BASE, steps=6)
    # Objects at memory:// exist only in this process and its forked children.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = DataLoader(EpisodeLoader(url, BASE), batch_size=None, num_workers=2, multiprocessing_context="fork")
        taken = list(islice(loader, 6))
    for mine, theirs in zip(expected, taken, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(one, np.asarray(other))


def test_shards_are_fetched_in_the_order_of_their_first_use(local):
    loader = EpisodeLoader(ROOT / "one", {**BASE, "batch_size": 3}, tensors=False)
    plan = loader.plan("train")
    for at in (Cursor(), Cursor(step=4, epoch=0, window=0, row=12)):
        order: dict[int, None] = {}
        for step in islice(plan.steps(at), 4):
            order.update(dict.fromkeys(plan.reader.shard_of(step.episodes).tolist()))
        assert shards_in_order(plan, at, 4) == list(order)
    needed = [each.sha256 for each in needed_objects(plan, Cursor(), None)]
    assert len(needed) == len(set(needed))
    assert set(needed) == {info.sha256 for info in train_files(local / "one")}


def test_unshuffled_shards_are_fetched_as_they_are_stored(local, monkeypatch):
    monkeypatch.setattr("chatmill.load.remote.MOST_POSITIONS", 10)
    plan = EpisodeLoader(ROOT / "one", {**BASE, "epoch_shuffle": False}, tensors=False).plan("train")
    assert shards_in_order(plan, Cursor(), None) == list(range(len(plan.reader.shards)))


@pytest.mark.parametrize("fault", ["vanished", "flipped"])
def test_a_missing_or_changed_object_is_one_error_line_and_the_run_can_resume(local, fault):
    url = copied(local / "one", ROOT / fault)
    _, info = next(each for each in listed_files(read_metadata(local / "one")) if each[0].endswith("tokens.bin"))
    place = url / f"objects/{info.sha256}"
    if fault == "vanished":
        objects.remove([place])
    else:
        data = bytearray(objects.read(place))
        data[3] ^= 4
        objects.write(place, bytes(data))
    loader = EpisodeLoader(url, BASE, tensors=False)
    with pytest.raises(DataError) as error:
        loader.get_batch()
    assert str(error.value).startswith(f"{place}: ")
    assert ("no such object" if fault == "vanished" else f"the dataset records {info.sha256[:12]}…") in str(error.value)
    copied(local / "one", url)
    for mine in batches(f"{local}/one", BASE):
        same(mine, loader.get_batch())
    loader.close()


def test_a_url_without_a_dataset_is_one_error_line(local):
    with pytest.raises(DataError, match=r"^memory://load-tests/nothing/dataset_metadata.json: no dataset found"):
        EpisodeLoader(ROOT / "nothing", BASE)
    with pytest.raises(DataError, match=r"^memory://load-tests/three/dataset_metadata.json: no dataset found"):
        EpisodeLoader(ROOT, {**BASE, "mix_sft": {"one": 1, "three": 1}})
    with pytest.raises(UsageError, match=r"memory://load-tests/one: is a dataset of one source, but mix_sft has two"):
        EpisodeLoader(ROOT / "one", {**BASE, "mix_sft": {"two": 1}})


def test_a_closed_loader_stops_downloading(local):
    loader = EpisodeLoader(ROOT / "one", BASE, tensors=False)
    assert loader.prefetch(steps=1) is None
    prefetch = loader._prefetches["train"]
    loader.close()
    prefetch.join(60)
    assert not any(thread.is_alive() for thread in prefetch._threads)
    assert cache.cache_folder().is_dir()
