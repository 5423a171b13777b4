from __future__ import annotations

import hashlib
import json
import math
import random
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from load_fixtures import same, together

from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.load.config import LoadConfig, order_sha256
from chatmill.load.loader import EpisodeLoader
from chatmill.load.mix import LongMixSchedule, MixSchedule, epoch_rows
from chatmill.load.order import IdentityOrder
from chatmill.load.plan import Cursor
from chatmill.load.source import open_sources
from chatmill.prepare.engine import LocalEngine
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.remote.urls import Url
from chatmill.store import files
from chatmill.store.hashed import hashed_text
from chatmill.store.metadata import Metadata, read_metadata
from chatmill.store.read import open_dataset
from chatmill.store.reweigh import reweigh_dataset
from chatmill.store.verify import verify_dataset

ROWS = {"b": 40, "a": 25, "c": 9}
"""Number of records of each source, in the order of the recipe."""
WEIGHTS = {"a": 0.5, "b": 0.2, "c": 0.3}
CONFIG: dict[str, Any] = {"batch_size": 6, "block_size": 64, "use_loss_mask": True}
JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {"pack": 300, "max_tokens": 300},
    "blocks": {"format": "post-training", "fit": "blocks", "max_tokens": 65},
}
STEPS = 25


def lines(records: list[list[str]]) -> bytes:
    roles = ("user", "assistant")
    made = ([{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)] for texts in records)
    return b"".join(json.dumps({"messages": messages}).encode() + b"\n" for messages in made)


def conversations(count: int, seed: int) -> list[list[str]]:
    rng = random.Random(seed)
    return [
        ["word " * rng.randint(1, 8) + str(rng.random()) for _ in range(2 * rng.randint(1, 3))] for _ in range(count)
    ]


def build(job: Job, target: Path | Url, *, workers: int = 1, **options: Any) -> Metadata:
    return prepare_dataset(job, target, engine=LocalEngine(workers), **options)


def digests(folder: Path) -> dict[str, str]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.fixture(scope="module", autouse=True)
def small():
    """Use small windows of 50 episodes, and skip fsync, which is slow for many small files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.Disk, "sync", lambda self, path: None)
        patch.setattr("chatmill.load.plan.WINDOW", 50)
        patch.setattr("chatmill.load.plan.BLOCK", 16)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    for seed, (name, count) in enumerate({**ROWS, "held": 5}.items()):
        (folder / f"{name}.jsonl").write_bytes(lines(conversations(count, seed)))
    for name, keys in JOBS.items():
        job = job_of(folder, **keys)
        build(job, folder / name)
        for source in job.sources:
            build(replace(job, sources=(source,)), folder / f"{name}_apart" / str(source.name))
    return folder


def job_of(folder: Path, sources: dict[str, dict[str, Any]] | None = None, **keys: Any) -> Job:
    given = sources or {name: {} for name in ROWS}
    inputs = tuple(InputSource((str(folder / f"{name}.jsonl"),), name=name, **own) for name, own in given.items())
    return Job(inputs, **{"shard_tokens": 2_000, **keys})


def loader(path: Path | Url, *, rank: int = 0, world_size: int = 1, **changes: Any) -> EpisodeLoader:
    return EpisodeLoader(path, {**CONFIG, **changes}, rank=rank, world_size=world_size, tensors=False, ahead=0)


def texts(path: Path, name: str) -> Counter[bytes]:
    episodes = open_dataset(path).of_source(name)["train"]
    return Counter(episodes.tokens(number).tobytes() for number in range(len(episodes)))


# The dataset.


@pytest.mark.parametrize("name", JOBS)
def test_each_source_of_a_dataset_has_the_rows_of_a_separate_dataset(folder, name):
    whole = open_dataset(folder / name)
    assert whole.sources == tuple(ROWS)
    assert verify_dataset(folder / name, full=True).faults == ()
    for source in whole.sources:
        part, alone = whole.of_source(source), open_dataset(folder / f"{name}_apart" / source)
        assert len(part["train"]) == len(alone["train"]) > 0
        numbers = np.arange(len(part["train"]))
        mine, theirs = part["train"].rows(numbers), alone["train"].rows(numbers)
        assert mine.ids.tolist() == theirs.ids.tolist() and mine.lengths.tolist() == theirs.lengths.tolist()
        assert mine.spans.tobytes() == theirs.spans.tobytes()
        assert {mine.files[number].source for number in mine.origins["file"] if number < len(mine.files)} == {source}
        assert part.metadata.splits["train"].num_tokens == part["train"].num_tokens == len(mine.ids)
        assert (part.path, part.sha256, part.splits) == (whole.path, whole.sha256, whole.splits)
    assert sum(len(whole.of_source(source)["train"]) for source in whole.sources) == len(whole["train"])


@pytest.mark.parametrize("name", JOBS)
def test_the_number_of_processes_and_unit_sizes_do_not_change_the_bytes(folder, tmp_path, name):
    for workers, unit_bytes in ((1, 900), (2, 3_000)):
        build(job_of(folder, **JOBS[name]), tmp_path / f"{workers}", workers=workers, unit_bytes=unit_bytes)
        assert digests(tmp_path / f"{workers}") == digests(folder / name)


def test_shard_sizes_change_neither_rows_nor_batches(folder, tmp_path):
    for size in (1, 500, 10**6):
        build(job_of(folder, shard_tokens=size), tmp_path / f"{size}")
        sources = [shard.source for shard in open_dataset(tmp_path / f"{size}").metadata.splits["train"].shards]
        assert list(dict.fromkeys(sources)) == list(ROWS) and (len(sources) == 3) == (size == 10**6)
        one, other = (loader(path, mix_sft=WEIGHTS) for path in (tmp_path / f"{size}", folder / "plain"))
        assert all(map(same, islice(one, STEPS), other))


def test_a_dataset_of_unnamed_sources_does_not_record_them(folder, tmp_path):
    job = job_of(folder)
    unnamed = replace(job, sources=tuple(replace(source, name=None) for source in job.sources))
    metadata = build(unnamed, tmp_path / "v1")
    assert open_dataset(tmp_path / "v1").sources == ()
    assert b'"source":' not in (tmp_path / "v1" / "dataset_metadata.json").read_bytes().split(b'"splits"')[1]
    assert len(metadata.splits["train"].shards) < len(open_dataset(folder / "plain")["train"].shards)


def test_metadata_that_lists_only_some_sources_is_refused(folder, tmp_path):
    raw = (folder / "plain" / "dataset_metadata.json").read_bytes()
    for source in (None, "", 3):
        data = json.loads(raw)
        data.pop("sha256")
        shard = data["splits"]["train"]["shards"][1]
        shard["source"] = source
        if source is None:
            del shard["source"]
        (tmp_path / "dataset_metadata.json").write_bytes(hashed_text(data))
        with pytest.raises(
            DataError, match=r"splits.train.shards.* expected (a source for every|a non-empty source name)"
        ):
            read_metadata(tmp_path)


def test_each_source_has_its_own_validation_share(folder, tmp_path):
    for split in ("hash", "shuffle"):
        keys = {"a": {"val_split": 0.5}, "b": {}, "c": {"val_split": 0.0}, "held": {"only_val": True}}
        job = job_of(folder, keys, val_split=0.0, split=split)
        build(job, tmp_path / split)
        whole = open_dataset(tmp_path / split)
        counts = {name: (len(whole.of_source(name)["train"]), len(whole.of_source(name)["val"])) for name in keys}
        assert counts["b"] == (40, 0) and counts["c"] == (9, 0) and counts["held"] == (0, 5)
        assert sum(counts["a"]) == 25 and (counts["a"][1] == 12 if split == "shuffle" else 3 < counts["a"][1] < 22)
        build(replace(job, sources=job.sources[:1]), tmp_path / f"{split}_a")
        alone, part = open_dataset(tmp_path / f"{split}_a"), whole.of_source("a")
        for name in ("train", "val"):
            assert (
                part[name].rows(range(len(part[name]))).ids.tolist()
                == alone[name].rows(range(len(alone[name]))).ids.tolist()
            )


def test_reweighing_keeps_the_sources_and_the_mix(folder, tmp_path):
    build(job_of(folder, {name: {"weight": weight} for name, weight in WEIGHTS.items()}), tmp_path / "v1")
    reweigh_dataset(tmp_path / "v1", tmp_path / "v2", train_on="last")
    assert open_dataset(tmp_path / "v2").sources == tuple(WEIGHTS)
    assert loader(tmp_path / "v2").config.mix_sft == WEIGHTS


# Batches.


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(
    "changes",
    [
        {"mix_sft": WEIGHTS},
        {"mix_sft": {"c": 1, "a": 3}, "packing": "bins", "block_size": 400},
        {"mix_sft": WEIGHTS, "mix_by": "trained_tokens", "episode_min_tokens": 40},
        {"mix_epochs": {"a": 2, "b": 0.5, "c": 3}},
        {"mix_epochs": {"b": 1, "c": 2.5}, "packing": "bins", "block_size": 400},
    ],
)
def test_batches_equal_those_of_separate_datasets(folder, name, changes):
    mixed, apart = loader(folder / name, **changes), loader(folder / f"{name}_apart", **changes)
    assert all(map(same, islice(mixed, STEPS), apart))
    assert mixed.state_dict()["config_sha256"] == apart.state_dict()["config_sha256"]


@pytest.mark.parametrize("keys", ["weight", "epochs"])
def test_the_mix_of_the_recipe_is_the_default(folder, tmp_path, keys):
    own = {"b": {keys: 2.0}, "a": {keys: 0.5}, "c": {keys: 1.0}, "held": {"only_val": True}}
    build(job_of(folder, own), tmp_path / "v1")
    key, mix = {"weight": "mix_sft", "epochs": "mix_epochs"}[keys], {"a": 0.5, "b": 2.0, "c": 1.0}
    default = loader(tmp_path / "v1")
    assert default.config.order_part()[key] == mix and [source.name for source in default.sources] == ["a", "b", "c"]
    assert all(map(same, islice(default, STEPS), loader(folder / "plain", **{key: mix})))
    assert [source.name for source in default.sources_of("val")] == ["held"]
    assert loader(tmp_path / "v1", mix_epochs={"c": 1}).config.mix == {"c": 1}
    assert all(
        map(same, islice(loader(tmp_path / "v1", mix_sft=WEIGHTS), STEPS), loader(folder / "plain", mix_sft=WEIGHTS))
    )


def test_without_a_mix_all_rows_are_in_one_order(folder):
    sources, config = open_sources(folder / "plain", LoadConfig())
    assert [source.name for source in sources] == [""] and config.mix is None
    assert len(sources[0].episodes("train")) == sum(ROWS.values())


def test_epochs_are_exact_after_one_pass(folder):
    epochs = {"a": 3, "b": 1, "c": 2}
    mixed = loader(folder / "plain", mix_epochs=epochs, batch_size=1)
    plan = mixed.plan("train")
    assert plan.pass_episodes == 3 * 25 + 40 + 2 * 9
    rows = {source.name: source.episodes("train") for source in mixed.sources}
    seen: dict[str, Counter[bytes]] = {name: Counter() for name in epochs}
    for step in islice(plan.steps(Cursor()), plan.pass_episodes):
        number = int(np.searchsorted(plan.first_of_source, step.episodes[0], side="right")) - 1
        name = plan.sources[number].name
        seen[name][rows[name].tokens(int(step.episodes[0] - plan.first_of_source[number])).tobytes()] += 1
    for name, times in epochs.items():
        assert seen[name] == Counter({row: times * count for row, count in texts(folder / "plain", name).items()})
    assert plan.passes(list(islice(plan.steps(Cursor()), plan.pass_episodes))[-1].after) == 1


@pytest.mark.parametrize("changes", [{"mix_sft": WEIGHTS}, {"mix_epochs": WEIGHTS, "packing": "bins"}])
def test_a_mix_resumes_with_another_number_of_ranks(folder, changes):
    undisturbed = list(islice(loader(folder / "plain", **changes), STEPS))
    for step, (before, after) in enumerate([(1, 2), (2, 3), (3, 1)], 5):
        ranks = [loader(folder / "plain", rank=rank, world_size=before, **changes) for rank in range(before)]
        for _ in range(step):
            together([each.get_batch() for each in ranks])
        state = json.loads(json.dumps(ranks[0].state_dict()))
        ranks = [loader(folder / "plain", rank=rank, world_size=after, **changes) for rank in range(after)]
        for each in ranks:
            each.load_state_dict(state)
        for expected in undisturbed[step:]:
            assert same(together([each.get_batch() for each in ranks]), expected)


def test_a_state_of_another_mix_is_refused(folder):
    state = loader(folder / "plain", mix_epochs={"a": 1, "b": 1}).state_dict()
    with pytest.raises(UsageError, match=r'mix_epochs was {"a": 1, "b": 1}, but is now {"a": 1, "b": 2}'):
        loader(folder / "plain", mix_epochs={"a": 1, "b": 2}).load_state_dict(state)
    with pytest.raises(UsageError, match=r"mix_epochs was .* but is now null; mix_sft was null"):
        loader(folder / "plain", mix_sft={"a": 1, "b": 1}).load_state_dict(state)


def test_a_dataset_at_a_url_is_mixed_like_the_local_one(folder):
    target = Url("memory://recipe-mix/v1")
    build(job_of(folder, shard_tokens=10**6), target)
    for changes in ({"mix_sft": WEIGHTS}, {"mix_epochs": {"a": 2, "c": 1}}):
        remote = loader(target, **changes)
        assert all(map(same, islice(remote, STEPS), loader(folder / "plain", **changes)))
        remote.close()


# Refused mixes.


@pytest.mark.parametrize(
    ("path", "changes", "line"),
    [
        ("plain", {"mix_sft": {"a": 1, "x": 1}}, "mix_sft has unknown sources: x; expected b, a, c"),
        ("plain", {"mix_epochs": {"x": 1, "y": 1}}, "mix_epochs has unknown sources: x, y; expected b, a, c"),
        ("held", {"mix_sft": {"a": 1, "held": 1}}, "mix_sft has sources without rows in train: held; expected a"),
        ("plain_apart/a", {"mix_sft": {"a": 1}}, "is a dataset of one source, but mix_sft has a; expected the folder"),
        (
            "plain_apart/a",
            {"mix_epochs": {"a": 1}},
            "is a dataset of one source, but mix_epochs has a; expected the folder",
        ),
        ("plain_apart", {"mix_epochs": {"a": 1, "x": 1}}, "mix_epochs has x, which is not built"),
    ],
)
def test_unknown_sources_are_one_error_line(folder, path, changes, line):
    if path == "held" and not (folder / "held").exists():
        build(job_of(folder, {"a": {}, "held": {"only_val": True}}), folder / "held")
    with pytest.raises(ChatmillError, match=line) as error:
        loader(folder / path, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"mix_sft": {"a": 1}, "mix_epochs": {"a": 1}}, "mix_sft and mix_epochs are both set"),
        ({"mix_epochs": {"a": 1}, "mix_by": "tokens"}, "mix_by is tokens, but mix_epochs counts rows"),
        ({"mix_epochs": {}}, "mix_epochs is empty; expected at least one source with its epochs"),
        (
            {"mix_epochs": {"a": 0, "b": -1}},
            "mix_epochs: the number of epochs of a is 0; .*: the number of epochs of b is -1; expected a number",
        ),
        ({"mix_epochs": {"a": "2"}}, "mix_epochs: the number of epochs of a is 2; expected a finite number above 0"),
    ],
)
def test_invalid_mix_epochs_are_refused(changes, line):
    with pytest.raises(UsageError, match=line):
        LoadConfig.from_mapping(changes)


def test_a_mix_with_a_source_without_rows_is_refused_by_the_build(folder, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines([["a long question", "an answer"]]))
    sources = (
        InputSource((str(tmp_path / "a.jsonl"),), name="a", weight=1.0, val_split=0.999),
        InputSource((str(folder / "b.jsonl"),), name="b", weight=1.0),
    )
    with pytest.raises(DataError, match="no records of a are left to train on, but the recipe mixes a, b"):
        build(Job(sources), tmp_path / "v1")


def test_the_order_hash_of_a_config_without_mix_epochs_is_unchanged():
    order = LoadConfig(mix_sft={"a": 1, "b": 2}).order_part()
    assert "mix_epochs" not in order
    assert order_sha256(order) == "768ec1ddf0e0271c5f01689bbad374266d9bcc1ea173b3535e30e5f9d2ffd1fe"


# Schedules.


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 40_000), min_size=1, max_size=5),
    st.lists(st.integers(0, 10**12), min_size=1, max_size=20),
)
def test_a_long_schedule_is_exact_and_can_be_inverted(weights, positions):
    schedule = LongMixSchedule(weights)
    source, ordinal = schedule.at(positions)
    for position, number, before in zip(positions, source.tolist(), ordinal.tolist(), strict=True):
        assert schedule.find(number, before) == position
        counts = schedule.counts(position)
        assert counts.sum() == position and counts[number] == before
        shares = position * schedule.weights / schedule.period
        assert (np.abs(counts - shares) < 2 + 1e-3).all()
    assert schedule.counts(3 * schedule.period).tolist() == [3 * weight for weight in weights]


def test_a_long_schedule_has_every_row_of_a_period_once():
    weights = [30_001, 17, 25_000]
    source, ordinal = LongMixSchedule(weights).at(np.arange(sum(weights)))
    for number, weight in enumerate(weights):
        assert ordinal[source == number].tolist() == list(range(weight))


@given(st.dictionaries(st.sampled_from("abc"), st.tuples(st.integers(1, 10**6), st.floats(0.001, 50)), min_size=1))
def test_rows_of_an_epoch_are_rounded_to_the_nearest_integer(given_sources):
    rows = epoch_rows(
        {name: epochs for name, (_, epochs) in given_sources.items()},
        {name: count for name, (count, _) in given_sources.items()},
    )
    for name, (count, epochs) in given_sources.items():
        assert rows[name] >= 1 and (abs(rows[name] - count * epochs) < 0.501 or math.isclose(rows[name], 1))


def test_each_epoch_of_a_mix_with_many_rows_is_exact():
    from chatmill.load.mix import MixedOrder

    rows = {"a": 70_001, "b": 33_333}
    order = MixedOrder({name: IdentityOrder(count) for name, count in rows.items()}, epoch_rows({"a": 1, "b": 2}, rows))
    assert order.name.startswith("mix-long/1(a=70001*identity/1, b=66666*")
    episodes = order.at(0, np.arange(70_001 + 2 * 33_333))
    assert np.bincount(episodes).tolist() == [1] * 70_001 + [2] * 33_333
    assert isinstance(MixedOrder({"a": IdentityOrder(9)}, {"a": 9}).schedule, MixSchedule)
