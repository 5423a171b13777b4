from __future__ import annotations

import json

import numpy as np
import pytest
from show_fixtures import line, make

from chatmill.errors import DataError
from chatmill.load.config import LoadConfig
from chatmill.load.plan import datasets_hash
from chatmill.load.source import open_sources
from chatmill.prepare.engine import LocalEngine
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.show.dataset import open_view
from chatmill.show.losses import run_losses
from chatmill.show.viewer import Viewer


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    return make(tmp_path_factory.mktemp("losses"), [line(f"q{n}", "a" * (n + 1)) for n in range(6)])


def log(folder, rank: int, *steps: tuple, sha256: str, mix=None, tail: str = "") -> None:
    """Write a loss log in the format of a training run; each step is a tuple (step, episodes, losses, weights)."""
    data = {"dataset_dir": "elsewhere", "dataset_sha256": sha256, "mix_sft": mix}
    lines = [
        {
            "step": step,
            "data": data,
            "episodes": episodes,
            "segments": [-1] * len(episodes),
            "losses": losses,
            "weights": weights,
        }
        for step, episodes, losses, weights in steps
    ]
    (folder / "rows").mkdir(exist_ok=True)
    text = "".join(json.dumps(each) + "\n" for each in lines) + tail
    (folder / "rows" / f"rank_{rank:05d}.jsonl").write_text(text)


def test_the_last_loss_of_each_episode_counts_and_its_conversations_are_averaged(shown, tmp_path):
    sha256 = shown.dataset.sha256
    log(tmp_path, 0, (1, [0, 1], [5.0, 4.0], [1, 1]), (7, [3], [0.5], [2]), sha256=sha256, tail='{"step": 9, "da')
    log(tmp_path, 1, (1, [3, 4], [9.0, 2.0], [1, 1]), (5, [0, 0], [1.0, 3.0], [3, 1]), sha256=sha256)
    losses = run_losses(tmp_path, shown)
    np.testing.assert_array_equal(losses, np.array([1.5, 4.0, np.nan, 0.5, 2.0, np.nan], dtype=np.float32))
    viewer = Viewer(shown, cache=tmp_path / "index", losses=losses)
    viewer.builder.start()
    viewer.builder.wait()
    page = viewer.episodes("train", sort="highest_loss")
    assert [(each["episode"], each["loss"]) for each in page["episodes"]] == [
        (1, 4.0),
        (4, 2.0),
        (0, 1.5),
        (3, 0.5),
        (2, None),
        (5, None),
    ]
    assert viewer.episode("train", 0, 0, "")["loss"] == 1.5
    assert "highest_loss" in viewer.about()["splits"]["train"]["sorts"]


def test_episodes_of_a_mix_are_numbered_as_in_the_dataset(tmp_path):
    for name, count in (("b", 3), ("a", 2)):
        (tmp_path / f"{name}.jsonl").write_text("".join(line(f"{name}{n}", "x") for n in range(count)))
    sources = tuple(InputSource((str(tmp_path / f"{name}.jsonl"),), name=name, weight=1.0) for name in ("b", "a"))
    prepare_dataset(Job(sources, format="primer"), tmp_path / "v", engine=LocalEngine(workers=1))
    view = open_view(tmp_path / "v")
    mix = {"a": 1.0, "b": 1.0}
    opened, _ = open_sources(tmp_path / "v", LoadConfig(pad_token_id=0, mix_sft=mix))
    # The run numbers the episodes of source a before those of source b, but the dataset starts with source b.
    log(tmp_path, 0, (1, [0, 1, 2], [10.0, 11.0, 20.0], [1, 1, 1]), sha256=datasets_hash(opened), mix=mix)
    np.testing.assert_array_equal(run_losses(tmp_path, view), np.float32([20, np.nan, np.nan, 10, 11]))


def test_a_run_without_losses_or_on_other_data_and_a_damaged_line_are_refused(shown, tmp_path):
    with pytest.raises(DataError, match="has no per-conversation losses"):
        run_losses(tmp_path, shown)
    log(tmp_path, 0, (1, [0], [1.0], [1]), sha256="0" * 64)
    with pytest.raises(DataError, match="the run did not train on"):
        run_losses(tmp_path, shown)
    log(tmp_path, 0, (1, [6], [1.0], [1]), sha256=shown.dataset.sha256)
    with pytest.raises(DataError, match="step 1 has episodes that are not in the dataset"):
        run_losses(tmp_path, shown)
    for damage in (
        "{}",
        "[]",
        "3",
        "{",
        '{"step": 1, "data": {}, "episodes": [[0]], "losses": [[1]], "weights": [[1]]}',
    ):
        (tmp_path / "rows" / "rank_00000.jsonl").write_text(damage + "\n")
        with pytest.raises(
            DataError, match=r"rank_00000\.jsonl:1: is damaged; expected a line with the losses of a step"
        ):
            run_losses(tmp_path, shown)
