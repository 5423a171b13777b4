from __future__ import annotations

import contextlib
import json
import os
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from train_fixtures import config, prepare, trained, weights

from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.store import files
from chatmill.train import loop
from chatmill.train.best import BestEval, link_best
from chatmill.train.checkpoint import set_aside_later
from chatmill.train.checkpoint_files import list_checkpoints, model_folder, self_sha256
from chatmill.train.command import run, summary
from chatmill.train.evaluate import Evaluation
from chatmill.train.loop import train_model
from chatmill.train.result import StepRecord
from chatmill.train.run_dir import read_metrics

LOSSES = {3: 2.0, 6: 1.5, 9: 1.0, 12: 1.2, 15: 1.1, 18: 0.9, 21: 1.0, 24: 1.0, 27: 1.0, 30: 1.0, 33: 1.0}
"""Val losses by step."""
PLAIN = {"max_iters": 33, "eval_interval": 3, "save_interval": 5, "eval_samples": 0, "lr_schedule": "constant"}
EARLY = {**PLAIN, "early_stop_patience": 2}


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    monkeypatch.setattr(
        loop, "evaluate", lambda model, loader, world, *, batches: Evaluation(LOSSES[loader.cursor().step], 10)
    )


@pytest.fixture
def stopped(sums_data, tmp_path):
    return trained(sums_data, tmp_path, name="stopped", **EARLY)


losses = st.lists(st.one_of(st.floats(0, 3, width=16), st.sampled_from([float("nan"), float("inf")])), max_size=20)


@settings(max_examples=40)
@given(losses=losses, patience=st.integers(1, 4), delta=st.sampled_from([0.0, 0.25]))
def test_early_stopping_counts_evaluations_without_an_improvement(losses, patience, delta):
    keys = config(early_stop_patience=patience, early_stop_min_delta=delta, eval_interval=1)
    best, reference, waited = BestEval(), None, 0
    for step, loss in enumerate(losses, 1):
        before = [each for each in losses[: step - 1] if np.isfinite(each)]
        assert best.add(loss, step, min_delta=delta) == (bool(np.isfinite(loss)) and loss < min(before, default=np.inf))
        improves = np.isfinite(loss) and (reference is None or loss < reference - delta)
        reference, waited = (loss, 0) if improves else (reference, waited + 1)
        assert best.stops(keys) == (waited >= patience)
    finite = [each for each in losses if np.isfinite(each)]
    assert best.loss == (min(finite) if finite else None)
    assert not finite or losses[best.step - 1] == min(finite)
    again = BestEval(**json.loads(json.dumps(vars(best))))
    assert again == best


def test_a_run_that_does_not_improve_stops_and_keeps_its_best_checkpoint(stopped):
    assert [line["step"] for line in read_metrics(stopped.folder) if "val_loss" in line] == [3, 6, 9, 12, 15]
    assert (stopped.step, stopped.total, stopped.val_loss) == (15, 33, 1.1)
    best = stopped.folder / "step_00000009"
    assert (stopped.best_step, stopped.best_val_loss, stopped.best_checkpoint) == (9, 1.0, best)
    assert str((stopped.folder / "best").readlink()) == best.name
    # The run evaluates every 3 steps and saves every 5. The best checkpoint, at step 9, is also saved.
    assert [path.name[-2:] for path in list_checkpoints(stopped.folder)] == ["09", "10", "15"]
    reason = "val loss has not fallen below 1.0000 for 2 evaluations (early_stop_patience 2)"
    said = json.loads(json.dumps(stopped.to_json()))
    assert (said["finished"], said["stopped_by"], said["stopped_early"]) == (True, None, reason)
    lines = summary(stopped).splitlines()
    assert lines[0] == f"stopped early at step 15 of 33: {reason}"
    assert f"best val loss 1.0000 at step 9: {stopped.folder / 'best'} -> {best.name}" in lines


def test_a_run_killed_after_every_step_stops_early_at_the_same_step(sums_data, stopped, tmp_path):
    class KilledError(Exception):
        pass

    def kill(step: StepRecord, *, after: int) -> None:
        if step.step == after:
            raise KilledError

    keys, place = config(**{**EARLY, "save_interval": 1}), {"dataset_dir": sums_data, "out_dir": tmp_path}
    for after in range(2, 17):
        with contextlib.suppress(KilledError):
            watch = partial(kill, after=after)
            again = train_model(keys, model_name="run", resume="auto", watch=watch, quiet=True, **place)
    assert (again.step, again.best_step, again.stopped_early) == (15, 9, stopped.stopped_early)
    np.testing.assert_equal(weights(again.folder / "best"), weights(stopped.folder / "best"))


def test_a_run_that_stopped_early_continues_with_more_patience(sums_data, stopped, tmp_path, capsys):
    place = {"model_name": "stopped", "dataset_dir": sums_data, "out_dir": tmp_path}
    again = train_model(config(**EARLY), resume="auto", **place)
    assert (again.step, again.stopped_early, again.best_step) == (15, stopped.stopped_early, 9)
    right = "to continue, raise early_stop_patience or set it to null"
    said = capsys.readouterr().err
    assert f"the run is already finished: it stopped early because {stopped.stopped_early}; {right}\n" in said
    longer = trained(sums_data, tmp_path, name="stopped", resume="auto", **{**EARLY, "early_stop_patience": 3})
    assert (longer.step, longer.best_step) == (27, 18)
    assert [path.name[-2:] for path in list_checkpoints(longer.folder)] == ["18", "25", "27"]
    best = trained(sums_data, tmp_path, name="stopped", resume=str(longer.folder / "best"), **EARLY)
    assert (best.step, best.best_step) == (24, 18)
    assert (longer.folder / "step_00000027.left").is_dir()
    set_aside_later(best.folder, 4)
    assert not os.path.lexists(best.folder / "best")
    with pytest.raises(UsageError, match=r"best: no such checkpoint; expected auto; .* has no checkpoint yet"):
        trained(sums_data, tmp_path, name="stopped", resume=str(best.folder / "best"), **EARLY)


def test_turning_early_stopping_off_keeps_the_best_checkpoint(sums_data, stopped, tmp_path, monkeypatch):
    for step in (17, 18, 19):
        monkeypatch.setitem(LOSSES, step, 1.5)
    place = {"model_name": "stopped", "out_dir": str(tmp_path), "resume": "auto", "dataset_dir": str(sums_data)}
    on = run({**place, "early_stop_patience": "null", "max_iters": "17", "keep_checkpoints": "1"})
    assert (on.step, on.best_step, on.best_checkpoint) == (17, 9, stopped.best_checkpoint)
    assert [path.name[-2:] for path in list_checkpoints(on.folder)] == ["09", "17"]
    # With keep_best null and no early stopping, no new best checkpoint is chosen, but the old one is kept.
    config = json.loads((on.folder / "config.json").read_text()) | {"keep_best": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    alone = run({**place, "config_file": str(tmp_path / "config.json"), "max_iters": "18", "keep_checkpoints": "1"})
    assert [path.name[-2:] for path in list_checkpoints(alone.folder)] == ["09", "18"]
    assert (alone.folder / "best").resolve() == stopped.best_checkpoint.resolve()
    off = run({**place, "max_iters": "19", "keep_best": "false"})
    assert off.best_checkpoint is None and not os.path.lexists(off.folder / "best")


def test_best_can_be_used_wherever_a_model_is_expected(sums_data, stopped, tmp_path):
    best = stopped.folder / "best"
    assert model_folder(best) == stopped.best_checkpoint / "model"
    assert model_folder(stopped.folder) == stopped.checkpoint / "model"
    second = trained(sums_data, tmp_path, init_from_model=str(best), max_iters=1, learning_rate=0.0)
    np.testing.assert_equal(weights(second.checkpoint), weights(stopped.best_checkpoint))


def test_keep_best_keeps_the_best_checkpoint_without_early_stopping(sums_data, tmp_path):
    plain = trained(sums_data, tmp_path, name="plain", **PLAIN)
    assert not (plain.folder / "best").is_symlink() and plain.best_checkpoint is None
    line = (
        "best val loss 0.9000 at step 18, but its checkpoint was not kept; use --keep_best to keep the best checkpoint"
    )
    assert (plain.step, plain.stopped_early) == (33, None) and line in summary(plain).splitlines()
    kept = trained(sums_data, tmp_path, name="kept", keep_best=True, keep_checkpoints=1, **{**PLAIN, "max_iters": 24})
    assert [path.name[-2:] for path in list_checkpoints(kept.folder)] == ["18", "24"]
    off = trained(sums_data, tmp_path, name="kept", keep_best=False, resume="auto", **PLAIN)
    assert off.best_checkpoint is None and not os.path.lexists(off.folder / "best")


def test_the_best_link_points_to_a_complete_checkpoint_after_any_crash(sums_data, tmp_path, monkeypatch):
    run, seen = tmp_path / "run", set()

    class Looking(files.Disk):
        pass

    def looked(name: str):
        def operation(self, *args):
            if (run / "best").is_symlink():
                assert (run / "best" / "checkpoint.json").is_file()
                seen.add(str((run / "best").readlink()))
            return getattr(files.Disk, name)(self, *args)

        return operation

    for name in ("make_folder", "create", "rename", "rename_new", "symlink", "remove", "exchange", "sync"):
        setattr(Looking, name, looked(name))
    monkeypatch.setattr(files, "disk", Looking())
    result = trained(sums_data, tmp_path, **{**EARLY, "keep_checkpoints": 1, "save_interval": 3})
    assert len(seen) > 2 and result.best_checkpoint.name in seen


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"early_stop_patience": 2, "eval_interval": 0},
            "early_stop_patience is 2 and eval_interval is 0; set eval_interval",
        ),
        (
            {"keep_best": True, "eval_interval": 0},
            "keep_best is true and eval_interval is 0; set eval_interval to at least 1",
        ),
        (
            {"keep_best": True, "save_interval": 0},
            "keep_best is true and save_interval is 0, which disables checkpoints",
        ),
        ({"early_stop_min_delta": 0.1}, "early_stop_min_delta is 0.1 and early_stop_patience is null; set early"),
        ({"early_stop_patience": 0}, "early_stop_patience is 0; expected an integer of at least 1, or null"),
    ],
)
def test_keys_without_an_effect_are_refused(changes, said):
    with pytest.raises(UsageError) as error:
        config(**{"eval_interval": 4, **changes})
    assert said in str(error.value)


def test_data_without_a_val_loss_is_refused(sums_data, tmp_path):
    train_only = prepare(tmp_path, "train_only", count=8)
    for changes, why in (
        ({"early_stop_patience": 1}, "early_stop_patience is set"),
        ({"keep_best": True}, "keep_best is true"),
    ):
        with pytest.raises(
            UsageError, match=f"^{why}, but the val split of .*train_only is empty; prepare the dataset with --val"
        ):
            trained(train_only, tmp_path, eval_interval=4, **changes)
    assert not (tmp_path / "run").exists()


def test_a_folder_named_best_is_not_replaced(sums_data, tmp_path):
    (tmp_path / "run" / "best").mkdir(parents=True)
    with pytest.raises(
        ChatmillError, match=r"best: is not a link to the best checkpoint; rename this file or folder, or set keep_"
    ):
        trained(sums_data, tmp_path, keep_best=True, **PLAIN)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["best"]
    assert trained(sums_data, tmp_path, max_iters=1).step == 1
    with pytest.raises(DataError):
        link_best(tmp_path / "run", None)


def test_impossible_values_in_a_checkpoint_are_refused(sums_data, stopped, tmp_path):
    marker = stopped.checkpoint / "checkpoint.json"
    state = json.loads(marker.read_text())
    del state["sha256"]
    nan = float("nan")
    for change in ({"loss": "1"}, {"loss": nan}, {"step": 10**9}, {"waited": -1}, {"reference": []}, {"more": 1}):
        changed = {**state, "best": {**state["best"], **change}}
        marker.write_text(json.dumps({**changed, "sha256": self_sha256(changed)}))
        with pytest.raises(DataError, match=r"checkpoint.json: best(\.\w+)? is .*; to use the previous checkpoint"):
            trained(sums_data, tmp_path, name="stopped", resume="auto", **EARLY)
