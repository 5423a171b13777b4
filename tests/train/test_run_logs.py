from __future__ import annotations

import json
import time

import numpy as np
import pytest
from train_fixtures import config, curve, ranks, trained

from chatmill.audit import verify_log
from chatmill.errors import DataError, UsageError
from chatmill.load.loader import EpisodeLoader
from chatmill.train.loop import train_model
from chatmill.train.run_dir import read_metrics, read_rows
from chatmill.train.step import Stepper


def test_progress_is_printed_as_lines_without_a_terminal(sums_data, tmp_path, capsys):
    settings = config(log_interval=3, eval_interval=8)
    train_model(settings, model_name="run", dataset_dir=sums_data, out_dir=tmp_path)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert [line.split("  ")[0] for line in lines[:3]] == ["step 3/8", "step 6/8", "step 8/8"]
    assert [word.split()[-1] for word in lines[0].split("  ")[3:]] == ["tokens/s", "trained/s", "left"]
    assert lines[3].startswith("step 8: val loss ")
    assert len(lines) == 4


def test_the_losses_of_conversations_are_logged_by_step(sums_data, tmp_path):
    def run(rank: int) -> None:
        trained(sums_data, tmp_path, name="two", log_rows=True, max_iters=3)

    one = trained(sums_data, tmp_path, log_rows=True, max_iters=3)
    ranks(2, run)
    plan = EpisodeLoader(sums_data, config()).plan("train")
    for number, step in zip(range(3), plan.one_epoch(), strict=False):
        rows = read_rows(one.folder, number + 1)
        assert [row.episode for row in rows] == step.episodes.tolist()
        mean = sum(row.loss * row.weight for row in rows) / sum(row.weight for row in rows)
        assert abs(mean - curve(one.folder)[number][1]) < 1e-6
        both = read_rows(tmp_path / "two", number + 1)
        assert [row.episode for row in both] == step.episodes.tolist()
        np.testing.assert_allclose([row.loss for row in both], [row.loss for row in rows], rtol=0, atol=1e-5)
    with pytest.raises(DataError, match="has no losses for step 4"):
        read_rows(one.folder, 4)
    with pytest.raises(DataError, match="train with --log_rows"):
        read_rows(tmp_path, 1)


@pytest.mark.parametrize("damage", ["{}", "[]", "3", "{", '{"step": "1"}', "[" * 100_000])
def test_a_damaged_line_of_metrics_is_reported(sums_data, tmp_path, damage):
    metrics = trained(sums_data, tmp_path, max_iters=2).folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + damage + "\n")
    with pytest.raises(DataError) as error:
        trained(sums_data, tmp_path, resume="auto", max_iters=4)
    assert str(error.value) == f"{metrics}:3: is damaged; expected a JSON object with a step; remove the line"


@pytest.mark.parametrize(
    "damage",
    [
        '{"step": 9, "x": 1}',
        '{"step": 9, "data": 1, "episodes": [], "segments": [], "losses": [], "weights": []}',
        '{"step": 9, "data": {}, "episodes": [], "segments": [], "losses": [], "weights": []}',
        '{"step": 9, "data": {"dataset_dir": "d", "dataset_sha256": "", "mix_sft": null}, '
        '"episodes": [1], "segments": [], "losses": [1], "weights": [1]}',
        '{"step": 9, "data": {"dataset_dir": "d", "dataset_sha256": "", "mix_sft": null}, '
        '"episodes": ["a"], "segments": [-1], "losses": [1], "weights": [1]}',
        '{"step": 9, "data": {"dataset_dir": 5, "dataset_sha256": "", "mix_sft": null}, '
        '"episodes": [1], "segments": [-1], "losses": [1], "weights": [1]}',
    ],
)
def test_a_damaged_line_of_losses_is_reported(tmp_path, damage):
    path = tmp_path / "rows" / "rank_00000.jsonl"
    path.parent.mkdir()
    path.write_text("anything\n" + damage + "\n")
    with pytest.raises(DataError) as error:
        read_rows(tmp_path, 9)
    right = "a step with its data and the columns episodes, segments, losses, weights"
    assert str(error.value) == f"{path}:2: is damaged; expected {right}; remove the line"


def test_a_resumed_run_continues_its_audit_log_which_verifies(sums_data, tmp_path):
    audit = str(tmp_path / "logs")
    trained(sums_data, tmp_path, audit_dir=audit, max_iters=4, lr_schedule="constant")
    again = trained(sums_data, tmp_path, audit_dir=audit, resume="auto", lr_schedule="constant")
    (log,) = (tmp_path / "logs").glob("audit_*.log")
    said = json.loads((again.checkpoint / "checkpoint.json").read_text())["audit"]
    checked = verify_log(log, sums_data, heads={"the checkpoint": said["head"]})
    assert checked.fault is None
    actions = [part.split("action=")[1].split(" ")[0] for part in log.read_text().splitlines()]
    first, second = ["dataset_load", "epoch_start", "steps"], ["resume", "dataset_load", "steps"]
    assert actions == [*first, "checkpoint", *second, "checkpoint"]


def test_a_run_that_started_without_an_audit_log_cannot_resume_with_one(sums_data, tmp_path):
    trained(sums_data, tmp_path, max_iters=4)
    with pytest.raises(UsageError, match="started without an audit log; set audit_dir to null"):
        trained(sums_data, tmp_path, audit_dir=str(tmp_path / "logs"), resume="auto")


def test_ranks_share_one_audit_log(sums_data, tmp_path):
    def run(rank: int) -> None:
        trained(sums_data, tmp_path, audit_dir=str(tmp_path / "logs"), max_iters=4)

    ranks(2, run)
    (log,) = (tmp_path / "logs").glob("audit_*.log")
    assert verify_log(log, sums_data).fault is None
    assert "ranks=all" in log.read_text()


def test_the_duration_of_every_step_includes_data_wait_and_computation(sums_data, tmp_path, monkeypatch):
    computed = []
    step = Stepper.step

    def timed(self, *args, **more):
        began = time.perf_counter()
        pending = step(self, *args, **more)
        computed.append(time.perf_counter() - began)
        return pending

    monkeypatch.setattr(Stepper, "step", timed)
    trained(sums_data, tmp_path, max_iters=4)
    lines = [line for line in read_metrics(tmp_path / "run") if "seconds" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line, seconds in zip(lines, computed, strict=True):
        assert line["seconds"] >= line["data_wait"] + seconds
