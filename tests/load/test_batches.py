from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from load_fixtures import expected, listed, talks, together, write_rows
from plain_rows import build, rows_

from chatmill.errors import DataError, UsageError
from chatmill.load.batch import segments_from_end
from chatmill.load.loader import EpisodeLoader
from chatmill.rows import OWN_ID, Part, Rows, Rule


def order(seed: int, epoch: int, eligible: list[int]) -> list[int]:
    return [eligible[at] for at in np.random.RandomState(seed + epoch).permutation(len(eligible))]


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[tuple[int, list[int]]] = []
    for item in sorted(range(len(lengths)), key=lambda at: (-lengths[at], at)):
        fits = [number for number, (used, _) in enumerate(bins) if used + lengths[item] <= capacity]
        if fits:
            best = max(fits, key=lambda number: (bins[number][0], -number))
            bins[best] = (bins[best][0] + lengths[item], [*bins[best][1], item])
        else:
            bins.append((lengths[item], [item]))
    return [sorted(items) for _, items in bins]


def test_batches_larger_than_memory_are_refused(tmp_path):
    write_rows(tmp_path / "d", {"train": talks(1, 8)})
    said = r"^4 rows of 2000000000 tokens need 224 GiB, but the machine has \d+ GiB; lower batch_size or block_size$"
    with pytest.raises(UsageError, match=said):
        EpisodeLoader(tmp_path / "d", {"batch_size": 4, "block_size": 2_000_000_000})


def test_segments_are_numbered_from_the_end_of_their_episode():
    found = segments_from_end(np.array([[7, 7, 7, 4, 9, 9, -1], [2, 3, 2, -1, -1, -1, -1]]))
    assert found.tolist() == [[-3, -2, -1, -1, -2, -1, -1], [-1, -1, -1, -4, -3, -2, -1]]


def rows_of_epoch(rows: Rows, config: dict, epoch: int) -> list[list[int]]:
    lengths = rows.lengths.tolist()
    eligible = [at for at, length in enumerate(lengths) if length >= config["episode_min_tokens"]]
    episodes = order(config["epoch_seed"], epoch, eligible)
    if config["packing"] == "none":
        return [[episode] for episode in episodes]
    capacity = config["block_size"] + 1
    bins = best_fit([min(lengths[episode], capacity) for episode in episodes], capacity)
    raw = np.random.PCG64((config["epoch_seed"], epoch, 0)).random_raw(len(bins))
    places = np.argsort(raw, kind="stable").tolist()
    placed: list[list[int]] = [[] for _ in bins]
    for place, items in zip(places, bins, strict=True):
        placed[place] = [episodes[item] for item in items]
    return placed


@settings(max_examples=100)
@given(
    plain=rows_,
    more=rows_,
    shard_tokens=st.sampled_from([1, 12, 1000]),
    world_size=st.sampled_from([1, 2]),
    has_targets=st.booleans(),
    config=st.fixed_dictionaries(
        {
            "batch_size": st.sampled_from([2, 4]),
            "block_size": st.integers(1, 12),
            "packing": st.sampled_from(["none", "bins"]),
            "use_loss_mask": st.booleans(),
            "epoch_drop_last": st.booleans(),
            "episode_min_tokens": st.integers(1, 3),
            "epoch_seed": st.integers(0, 5),
        }
    ),
)
def test_every_batch_of_two_epochs_equals_the_oracle(plain, more, shard_tokens, world_size, has_targets, config):
    rows = build(plain + more)
    if not has_targets:
        # The C extension builds only batches without targets.
        rows.spans["target"] = OWN_ID
    with tempfile.TemporaryDirectory() as folder:
        target = write_rows(Path(folder) / "d", {"train": rows}, vocab_size=2**32, shard_tokens=shard_tokens)
        if not any(length >= config["episode_min_tokens"] for length in rows.lengths):
            with pytest.raises(DataError):
                EpisodeLoader(target, config)
            return
        ranks = [
            EpisodeLoader(target, config, rank=rank, world_size=world_size, epochs=2, tensors=False, ahead=rank)
            for rank in range(world_size)
        ]
        wanted = []
        for epoch in range(2):
            of_epoch = rows_of_epoch(rows, config, epoch)
            size = config["batch_size"]
            batches = [of_epoch[at : at + size] for at in range(0, len(of_epoch), size)]
            if config["epoch_drop_last"]:
                batches = [batch for batch in batches if len(batch) == size]
            wanted += [batch + [[]] * (size - len(batch)) for batch in batches]
        if not wanted:
            with pytest.raises(UsageError, match="lower batch_size"):
                next(iter(ranks[0]))
            return
        found = [listed(together(parts)) for parts in zip(*ranks, strict=True)]
        arrays = {"block_size": config["block_size"], "use_loss_mask": config["use_loss_mask"]}
        assert found == [expected(rows, batch, **arrays) for batch in wanted]


def test_no_loss_crosses_a_border_next_to_empty_rows(tmp_path):
    rows = build([[((None, 1), [([5, 6], 1, 0, 1.0, 0, -1)])], [((None, 2), [([7, 8, 9], 1, 0, 1.0, 0, -1)])]])
    target = write_rows(tmp_path / "d", {"train": rows})
    config = {"batch_size": 4, "block_size": 6, "packing": "bins", "epoch_drop_last": False, "use_loss_mask": True}
    found = listed(EpisodeLoader(target, config, tensors=False).get_batch())
    held = rows_of_epoch(rows, {**config, "epoch_seed": 1337, "episode_min_tokens": 2}, 0)
    assert len(held) == 1
    assert found == expected(rows, [*held, [], [], []], block_size=6)


def test_stored_padding_is_never_trained_with_or_without_the_mask(tmp_path):
    plain = build([[((None, 1), [([5, 6, 7], 1, 0, 1.0, 0, -1)]), ((None, 0), [([3, 3], 1, 0, 0.0, 0, -1)])]])
    plain.spans["part"][1], plain.spans["rule"][1] = Part.PAD, Rule.PAD
    target = write_rows(tmp_path / "d", {"train": plain})
    for use_loss_mask in (True, False):
        config = {"batch_size": 1, "block_size": 5, "use_loss_mask": use_loss_mask}
        batch = EpisodeLoader(target, config, tensors=False).get_batch()
        assert batch.y.tolist() == [[6, 7, -100, -100, -100]]
        assert batch.segments.tolist() == [[0, 0, 0, 1, 1]]


def test_a_shard_with_as_many_segments_as_episodes_may_have_an_episode_of_two(tmp_path):
    """The shard has as many segments as episodes, but segment i does not belong to episode i."""
    span = ([5, 6], 1, 0, 1.0, 0, -1)
    rows = build([[], [((None, 1), [span]), ((None, 2), [span])], [((None, 3), [span])]])
    target = write_rows(tmp_path / "d", {"train": rows}, shard_tokens=1000)
    config = {"batch_size": 3, "block_size": 5, "episode_min_tokens": 0, "epoch_shuffle": False, "use_loss_mask": True}
    found = listed(EpisodeLoader(target, config, tensors=False).get_batch())
    assert found == expected(rows, [[0], [1], [2]], block_size=5)


def test_a_segment_without_tokens_is_ignored(tmp_path):
    span = ([5, 6], 1, 0, 1.0, 0, -1)
    rows = build([[((None, 1), []), ((None, 2), [span]), ((None, 3), []), ((None, 4), [span]), ((None, 5), [])]])
    target = write_rows(tmp_path / "d", {"train": rows})
    found = listed(EpisodeLoader(target, {"batch_size": 1, "block_size": 5}, tensors=False).get_batch())
    assert found == expected(rows, [[0]], block_size=5)
    assert found["segments"] == [[0, 0, 1, 1, 2]]


@pytest.mark.parametrize("window", [1, 5, 8, 100])
def test_an_epoch_ends_after_its_last_complete_batch_for_any_window_size(tmp_path, monkeypatch, window):
    monkeypatch.setattr("chatmill.load.plan.WINDOW", window)
    target = write_rows(tmp_path / "d", {"train": talks(1, 20)})
    for size in range(1, 21):
        for drop in (True, False):
            config = {"batch_size": size, "block_size": 8, "epoch_drop_last": drop, "epoch_shuffle": False}
            steps = list(EpisodeLoader(target, config, tensors=False).plan("train").one_epoch())
            held = [step.episodes.tolist() for step in steps]
            whole = 20 - 20 % size if drop else 20
            assert held == [list(range(at, min(at + size, 20))) for at in range(0, whole, size)]
            assert [step.dropped.tolist() for step in steps] == [*[[]] * (len(steps) - 1), list(range(whole, 20))]
            assert [step.ends_epoch for step in steps] == [*[False] * (len(steps) - 1), True]
            assert steps[-1].after == (len(steps), 1, 0, 0)
