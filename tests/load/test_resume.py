from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_processes import end_children, start_child
from load_fixtures import same, talks, together, write_rows, write_source

import chatmill.load.plan
from chatmill.errors import UsageError
from chatmill.load.batch import Batch
from chatmill.load.loader import EpisodeLoader

WORLDS = (1, 2, 3, 4)
BASE: dict[str, Any] = {"batch_size": 12, "block_size": 16, "epoch_seed": 7, "use_loss_mask": True}
CASES: dict[str, dict[str, Any]] = {
    "epoch": {},
    "kept_last": {"epoch_drop_last": False},
    "in_order": {"epoch_shuffle": False},
    "random": {"batch_sampling_mode": "random"},
    "feistel": {"batch_sampling_mode": "feistel"},
    "mixed": {"mix_sft": {"a": 0.5, "b": 0.2, "c": 0.3}},
    "mixed_by_tokens": {"mix_sft": {"a": 0.5, "b": 0.5}, "mix_by": "trained_tokens"},
    "packed": {"packing": "bins", "block_size": 40},
    "packed_kept_last": {"packing": "bins", "block_size": 40, "epoch_drop_last": False},
    "packed_mixed": {"packing": "bins", "block_size": 40, "mix_sft": {"a": 1, "c": 2}},
}
STEPS = 13
"""A little more than three epochs of 53 episodes in batches of 12."""


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[bool, Path]:
    folder = tmp_path_factory.mktemp("resume")
    write_rows(folder / "one", {"train": talks(1, 53), "val": talks(2, 20)})
    write_source(folder / "root", "a", {"train": talks(3, 31), "val": talks(4, 5)})
    write_source(folder / "root", "b", {"train": talks(5, 7), "val": talks(6, 5)})
    write_rows(folder / "root" / "c", {"train": talks(7, 11), "val": talks(8, 5)})
    return {False: folder / "one", True: folder / "root"}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """Use small packing windows, so that batches cross window boundaries."""
    monkeypatch.setattr("chatmill.load.plan.WINDOW", 20)
    monkeypatch.setattr("chatmill.load.plan.BLOCK", 7)
    monkeypatch.setattr("chatmill.load.batch_builder.LOOKUP_BATCHES", 2)


class Ranks:
    def __init__(self, places: dict[bool, Path], changes: dict[str, Any], world_size: int, **options: Any) -> None:
        self.loaders = [
            EpisodeLoader(
                places["mix_sft" in changes],
                {**BASE, **changes},
                rank=rank,
                world_size=world_size,
                tensors=False,
                **{"ahead": 0, **options},
            )
            for rank in range(world_size)
        ]

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield together([loader.get_batch() for loader in self.loaders])

    def state(self) -> Any:
        first, *others = (loader.state_dict() for loader in self.loaders)
        assert all(other == first for other in others)
        # A checkpoint stores the state as JSON.
        return json.loads(json.dumps(first))

    def load(self, state: Any) -> Ranks:
        for loader in self.loaders:
            loader.load_state_dict(state)
        return self


@pytest.mark.parametrize("case", CASES)
def test_resuming_at_every_step_with_any_number_of_ranks_gives_equal_batches(places, case):
    undisturbed = list(islice(Ranks(places, CASES[case], 1), STEPS))
    states = {}
    for world_size in WORLDS:
        ranks = Ranks(places, CASES[case], world_size)
        states[world_size, 0] = ranks.state()
        for step, batch in enumerate(islice(ranks, STEPS), 1):
            assert same(batch, undisturbed[step - 1]), step
            states[world_size, step] = ranks.state()
    for step in range(STEPS):
        before, after = WORLDS[step % 4], WORLDS[(step + 1 + step // 4) % 4]
        rest = list(islice(Ranks(places, CASES[case], after).load(states[before, step]), STEPS - step))
        assert all(map(same, rest, undisturbed[step:])), step


@pytest.mark.parametrize("case", CASES)
def test_changing_the_number_of_ranks_at_every_resume_does_not_change_batches(places, case):
    undisturbed = list(islice(Ranks(places, CASES[case], 1), STEPS))
    state, found = None, []
    for step in range(STEPS):
        ranks = Ranks(places, CASES[case], WORLDS[step % 4], ahead=step % 2)
        found += islice(ranks if state is None else ranks.load(state), 1)
        state = ranks.state()
    assert all(map(same, found, undisturbed))


@pytest.mark.parametrize("case", [name for name in CASES if "kept_last" in name])
def test_each_episode_occurs_exactly_once_per_epoch(places, case):
    loader = EpisodeLoader(places[False], {**BASE, **CASES[case]}, epochs=3, tensors=False)
    seen: dict[int, list[int]] = {}
    epoch = loader.cursor().epoch
    for batch in loader:
        seen.setdefault(epoch, []).extend(batch.episode_ids[batch.episode_ids >= 0].tolist())
        epoch = loader.cursor().epoch
    all_ = list(range(53))
    assert {epoch: sorted(episodes) for epoch, episodes in seen.items()} == {0: all_, 1: all_, 2: all_}
    assert seen[0] != seen[1] != seen[2]


def test_a_loader_in_use_can_load_an_earlier_state(places):
    loader = EpisodeLoader(places[False], BASE, tensors=False)
    list(islice(loader, 3))
    state = loader.state_dict()
    after = list(islice(loader, 6))
    loader.load_state_dict(state)
    assert all(map(same, islice(loader, 6), after))


def test_the_state_does_not_include_prefetched_batches(places):
    loader = EpisodeLoader(places[False], BASE, tensors=False, ahead=3)
    list(islice(loader, 2))
    assert loader.state_dict()["cursors"] == {"train": {"step": 2, "epoch": 0, "window": 1, "row": 4}}


def test_evaluation_has_its_own_cursor_and_does_not_move_the_training_cursor(places):
    plain = EpisodeLoader(places[False], BASE, tensors=False)
    undisturbed = list(islice(plain, 6))
    loader = EpisodeLoader(places[False], BASE, tensors=False)
    val = []
    found = []
    for _ in range(6):
        found.append(loader.get_batch())
        val.append(loader.get_batch("val"))
        assert len(list(loader.one_pass("val"))) == 2
    assert all(map(same, found, undisturbed))
    assert loader.state_dict()["cursors"] == {
        "train": {"step": 6, "epoch": 1, "window": 1, "row": 4},
        "val": {"step": 6, "epoch": 6, "window": 0, "row": 0},
    }
    again = EpisodeLoader(places[False], BASE, tensors=False, split="val")
    assert all(map(same, islice(again, 6), val))


def test_one_pass_has_every_episode_once_in_stored_order_and_pads_the_last_batch(places):
    parts = [
        list(EpisodeLoader(places[False], BASE, tensors=False, rank=rank, world_size=2).one_pass("val"))
        for rank in range(2)
    ]
    batches = [together(pair) for pair in zip(*parts, strict=True)]
    assert [batch.episode_ids[:, 0].tolist() for batch in batches] == [
        list(range(12)),
        [*range(12, 20), -1, -1, -1, -1],
    ]
    assert not batches[1].loss_mask[8:].any()
    assert np.all(batches[1].x[8:] == 3)


def test_real_processes_with_changing_world_size_give_equal_batches(places, tmp_path):
    place, config = places[False], {**BASE, **CASES["packed"]}

    def write_batches(folder: Path, state: Any, rank: int, world_size: int) -> None:
        chatmill.load.plan.WINDOW = 20
        loader = EpisodeLoader(place, config, rank=rank, world_size=world_size, tensors=False)
        if state:
            loader.load_state_dict(state)
        for number in range(3):
            np.savez(folder / f"{number}.npz", **loader.get_batch()._asdict())
        print(json.dumps(loader.state_dict()))

    undisturbed = list(islice(Ranks(places, CASES["packed"], 1), 9))
    state, found = None, []
    for world_size in (2, 3, 4):
        folders = [tmp_path / f"rank {rank} of {world_size}" for rank in range(world_size)]
        running = []
        for rank, folder in enumerate(folders):
            folder.mkdir()
            running.append(start_child(partial(write_batches, folder, state, rank, world_size), output=folder))
        assert end_children(running) == [0] * world_size
        told = [(folder / "out").read_text() for folder in folders]
        assert len(set(told)) == 1
        state = json.loads(told[0])
        for number in range(3):
            found.append(together([Batch(**np.load(folder / f"{number}.npz")) for folder in folders]))
    assert len(found) == len(undisturbed) and all(map(same, found, undisturbed))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"epoch_seed": 8}, "epoch_seed was 7, but is now 8"),
        ({"batch_size": 24, "epoch_shuffle": False}, "batch_size was 12, but is now 24; epoch_shuffle was true, but"),
        ({"batch_sampling_mode": "feistel"}, 'batch_sampling_mode was "epoch", but is now "feistel"'),
        ({"packing": "bins"}, 'block_size was null, but is now 16; packing was "none", but is now "bins"'),
    ],
)
def test_a_state_of_another_order_is_refused_with_the_differences(places, changes, what):
    state = Ranks(places, {}, 1).state()
    with pytest.raises(UsageError, match="the loader state does not match this loader: ") as caught:
        Ranks(places, changes, 1).load(state)
    assert what in str(caught.value)
    assert str(caught.value).endswith(
        "; use the old values, or start a new run (with chatmill train, another --model_name)"
    )


def test_a_state_is_accepted_if_only_the_batch_layout_changed(places):
    state = Ranks(places, {}, 1).state()
    Ranks(places, {"use_loss_mask": False, "block_size": 20, "pad_token_id": 5}, 1).load(state)


def test_a_state_of_another_dataset_is_refused(places, tmp_path):
    other = write_rows(tmp_path / "other", {"train": talks(9, 53)})
    with pytest.raises(UsageError, match=r"the dataset hash was [0-9a-f]{12}…, but is now [0-9a-f]{12}…"):
        EpisodeLoader(other, BASE).load_state_dict(Ranks(places, {}, 1).state())


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda state: state.update(version=2), "version 2; expected 1"),
        (lambda state: state["config"].update(epoch_seed=8), "the config does not match its hash"),
        (lambda state: state.update(cursors=[]), "cannot read its cursors"),
        (lambda state: state["cursors"]["train"].pop("row"), "cannot read its cursors"),
        (lambda state: state["cursors"]["train"].update(row=-1), "-1 is not an integer"),
        (lambda state: state["cursors"]["train"].update(row=True), "true is not an integer"),
        (lambda state: state["cursors"]["train"].update(row=20), "window 0 of epoch 0 has no row 20"),
        (lambda state: state["cursors"]["train"].update(window=3), "no batch starts at epoch 0, window 3"),
        (lambda state: state.update(worker={"number": 0, "workers": 2, "skip": 1}), "a loader without workers"),
    ],
)
def test_a_damaged_state_is_refused(places, damage, what):
    loader = EpisodeLoader(places[False], BASE, tensors=False)
    loader.get_batch()
    state = json.loads(json.dumps(loader.state_dict()))
    damage(state)
    with pytest.raises(UsageError, match=what):
        loader.load_state_dict(state)
    assert loader.cursor().step == 1
