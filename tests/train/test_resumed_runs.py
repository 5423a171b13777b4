from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch
from model_fixtures import small_gpt
from train_fixtures import config, curve, prepare, ranks, trained, weights

from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.train.checkpoint import save
from chatmill.train.checkpoint_files import list_checkpoints, model_folder
from chatmill.train.config import OptimizerConfig
from chatmill.train.distributed import World
from chatmill.train.load_model import open_ready
from chatmill.train.loop import train_model
from chatmill.train.step import make_optimizer

OFTEN = {"save_interval": 1, "keep_checkpoints": 8}


@pytest.fixture(scope="module")
def undisturbed(sums_data, tmp_path_factory):
    return trained(sums_data, tmp_path_factory.mktemp("out"), **OFTEN)


def files(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("step", [1, 2, 5, 7])
def test_resuming_from_any_step_is_bitwise_exact(undisturbed, sums_data, tmp_path, step):
    shutil.copytree(undisturbed.folder, tmp_path / "run")
    for path in list_checkpoints(tmp_path / "run")[step:]:
        shutil.rmtree(path)
    again = trained(sums_data, tmp_path, resume="auto", **OFTEN)
    assert files(again.checkpoint) == files(undisturbed.checkpoint)
    assert curve(again.folder) == curve(undisturbed.folder)


def test_a_finished_run_continues_with_more_steps(sums_data, tmp_path):
    one = trained(sums_data, tmp_path, max_iters=4, lr_schedule="constant")
    two = trained(sums_data, tmp_path, resume="auto", lr_schedule="constant")
    whole = trained(sums_data, tmp_path, name="whole", lr_schedule="constant")
    assert (one.step, two.step) == (4, 8)
    assert files(two.checkpoint / "model") == files(whole.checkpoint / "model")


def test_a_finished_run_does_nothing(undisturbed, sums_data, tmp_path):
    shutil.copytree(undisturbed.folder, tmp_path / "run")
    before = files(tmp_path / "run" / "step_00000008")
    result = trained(sums_data, tmp_path, resume="auto")
    assert (result.step, result.total, result.loss) == (8, 8, None)
    assert files(tmp_path / "run" / "step_00000008") == before


def test_resume_auto_starts_a_new_run_without_a_checkpoint(sums_data, tmp_path):
    assert trained(sums_data, tmp_path, resume="auto", max_iters=1).step == 1


def test_a_run_is_not_overwritten(undisturbed, sums_data):
    with pytest.raises(UsageError, match="run: already contains a run; continue it with --resume auto"):
        trained(sums_data, undisturbed.folder.parent)


def test_only_the_last_checkpoints_are_kept(sums_data, tmp_path):
    result = trained(sums_data, tmp_path, save_interval=2, keep_checkpoints=2)
    assert [path.name for path in list_checkpoints(result.folder)] == ["step_00000006", "step_00000008"]
    assert sorted(path.name for path in result.folder.iterdir() if path.name.startswith(".")) == []


def test_unfinished_checkpoints_of_a_killed_run_are_removed(sums_data, tmp_path):
    left = tmp_path / "run" / ".step_00000004.saving"
    left.mkdir(parents=True)
    (left / "state-00000-of-00001.safetensors").write_bytes(b"half")
    result = trained(sums_data, tmp_path, max_iters=4)
    assert [path.name for path in result.folder.glob("*step_*")] == ["step_00000004"]
    assert not left.exists()


@pytest.mark.parametrize("name", ["checkpoint.json", "state-00000-of-00001.safetensors", "model/model.safetensors"])
def test_a_damaged_checkpoint_is_refused_and_the_previous_one_is_suggested(undisturbed, sums_data, tmp_path, name):
    run = tmp_path / "run"
    shutil.copytree(undisturbed.folder, run)
    data = bytearray((run / "step_00000008" / name).read_bytes())
    data[len(data) // 2] ^= 4
    (run / "step_00000008" / name).write_bytes(data)
    with pytest.raises(DataError, match=rf"{name}: .*previous checkpoint instead, pass --resume .*step_00000007$"):
        trained(sums_data, tmp_path, resume="auto")
    again = trained(sums_data, tmp_path, resume=str(run / "step_00000007"), **OFTEN)
    assert files(again.checkpoint) == files(undisturbed.checkpoint)
    assert (run / "step_00000008.left" / name).read_bytes() == bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_the_model_of_a_checkpoint_with_a_flipped_bit_is_refused(undisturbed, sums_data, tmp_path, name):
    run = tmp_path / "run"
    shutil.copytree(undisturbed.folder, run)
    model = run / "step_00000008" / "model"
    (tmp_path / "link").symlink_to(model)
    for place in (run, model.parent, model, tmp_path / "link"):
        assert open_ready(place, "cpu").num_parameters
    data = bytearray((model / name).read_bytes())
    data[-3] ^= 1
    (model / name).write_bytes(data)
    for place, folder in [(run, model), (model.parent, model), (model, model), (tmp_path / "link", tmp_path / "link")]:
        for use in (
            lambda place: open_ready(place, "cpu"),
            lambda place: trained(sums_data, tmp_path, name="next", init_from_model=str(place)),
        ):
            with pytest.raises(DataError) as error:
                use(place)
            assert str(error.value) == (
                f"{folder / name}: is damaged; its hash differs from the recorded one; "
                "the model of another checkpoint can be used instead"
            )


def test_missing_and_truncated_files_are_detected(undisturbed, sums_data, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(undisturbed.folder, run)
    state = run / "step_00000008" / "state-00000-of-00001.safetensors"
    state.write_bytes(state.read_bytes()[:-8])
    with pytest.raises(DataError, match="bytes; expected"):
        trained(sums_data, tmp_path, resume="auto")
    state.unlink()
    with pytest.raises(DataError, match="is missing"):
        trained(sums_data, tmp_path, resume="auto")


def test_a_different_model_or_order_is_refused_with_the_changed_keys(undisturbed, sums_data, tmp_path):
    shutil.copytree(undisturbed.folder, tmp_path / "run")
    with pytest.raises(UsageError, match=r"n_embd was 16, but is now 32; n_head was 2, but is now 4"):
        trained(sums_data, tmp_path, resume="auto", n_embd=32, n_head=4)
    with pytest.raises(UsageError, match="batch_size was 4, but is now 2"):
        trained(sums_data, tmp_path, resume="auto", batch_size=2)


def test_a_rollout_checkpoint_is_refused_and_its_model_is_suggested(sums_data, tmp_path):
    model = small_gpt()
    optimizer = make_optimizer(model, OptimizerConfig(learning_rate=0.01, beta1=0.9, beta2=0.9, weight_decay=0.0))
    world, said = World(0, 1, torch.device("cpu")), {"step": 2, "config": {"rollout_every": 2}}
    path = save(tmp_path / "stage2", said, model, optimizer, world, sharded=False, keep=2, about={})
    with pytest.raises(UsageError) as error:
        trained(sums_data, tmp_path, resume=str(path))
    assert str(error.value) == (
        f"{path}: was written by chatmill rollout train; resume with that command, "
        f"or start from this model with --init_from_model {path}"
    )


def test_metrics_of_repeated_steps_are_removed(undisturbed, sums_data, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(undisturbed.folder, run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "los')
    again = trained(sums_data, tmp_path, resume=str(run / "step_00000003"))
    assert curve(again.folder) == curve(undisturbed.folder)


def test_a_run_continues_on_other_data_with_a_new_warmup(sums_data, tmp_path):
    other = prepare(tmp_path, "other", seed=5)
    first = trained(sums_data, tmp_path, max_iters=6, warmup_iters=None, warmup_pct=0.5)
    second = trained(other, tmp_path, resume="auto", max_iters=4, warmup_iters=None, warmup_pct=0.5)
    lines = [json.loads(line) for line in (second.folder / "metrics.jsonl").read_text().splitlines()]
    rates = [round(line["lr"] / 0.01, 3) for line in lines]
    assert (first.step, second.step) == (6, 10)
    # Warmup covers half of the first six steps and half of the next four.
    assert rates[:3] == [0.333, 0.667, 1.0]
    assert rates[6:8] == [0.5, 1.0]
    assert rates[5] < rates[4] < 1
    last = files(second.checkpoint)
    shutil.rmtree(second.checkpoint)
    third = trained(other, tmp_path, resume="auto", max_iters=4, warmup_iters=None, warmup_pct=0.5)
    assert files(third.checkpoint) == last


@pytest.mark.parametrize(
    "way",
    [
        {"parallel": "ddp"},
        {"parallel": "ddp", "checkpoint": "sharded"},
        {"parallel": "fsdp"},
        {"parallel": "fsdp", "checkpoint": "sharded"},
    ],
    ids=str,
)
def test_runs_resume_from_one_rank_to_two_and_from_two_to_one(undisturbed, sums_data, tmp_path, way):
    def go_on(_: int) -> float:
        return trained(sums_data, tmp_path, resume="auto", **way, **OFTEN).loss

    shutil.copytree(undisturbed.folder, tmp_path / "run")
    for path in list_checkpoints(tmp_path / "run")[3:]:
        shutil.rmtree(path)
    losses = ranks(2, go_on)
    assert losses[0] == losses[1]
    # A finished run has a model folder, whether its checkpoints are full or sharded.
    assert weights(list_checkpoints(tmp_path / "run")[-1]).keys() == weights(undisturbed.checkpoint).keys()
    states = sorted(path.name for path in list_checkpoints(tmp_path / "run")[-1].glob("state-*"))
    assert len(states) == (2 if "checkpoint" in way else 1)
    for path in list_checkpoints(tmp_path / "run")[6:]:
        shutil.rmtree(path)
    result = trained(sums_data, tmp_path, resume="auto")
    mine, theirs = weights(model_folder(result.folder).parent), weights(undisturbed.checkpoint)
    for name, tensor in theirs.items():
        np.testing.assert_allclose(mine[name], tensor, rtol=0, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(curve(result.folder), curve(undisturbed.folder), rtol=0, atol=1e-5)


def test_damage_found_by_one_rank_stops_all_ranks(undisturbed, sums_data, tmp_path):
    shutil.copytree(undisturbed.folder, tmp_path / "run")
    # Ranks share the work of checking files, so only one rank reads this file.
    damaged = tmp_path / "run" / "step_00000008" / "model" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[::-1])

    def run(rank: int) -> str:
        try:
            trained(sums_data, tmp_path, resume="auto")
        except ChatmillError as error:
            return str(error)
        return "trained"

    said = ranks(2, run)
    assert said[0] == said[1]
    assert "model.safetensors: is damaged" in said[0]


def resumed_notes(dataset, out_dir, capsys, **changes) -> list[str]:
    """Resume a run with other settings; return the notes that it prints before its first step."""
    settings = config(**{"save_interval": 0, **changes})
    train_model(settings, model_name="run", dataset_dir=dataset, out_dir=out_dir, resume="auto")
    return capsys.readouterr().err.splitlines()


def test_a_resumed_run_prints_the_settings_that_changed(sums_data, tmp_path, capsys):
    trained(sums_data, tmp_path, max_iters=2, save_interval=2)
    notes = resumed_notes(sums_data, tmp_path, capsys, max_iters=3, learning_rate=5e-3)
    first = next(number for number, note in enumerate(notes) if note.startswith("resuming from "))
    assert notes[first + 1 : first + 4] == [
        "max_iters was 2, but is now 3",
        "learning_rate was 0.01, but is now 0.005",
        "save_interval was 2, but is now 0",
    ]
    assert not any(", but is now" in note for note in notes[first + 4 :])


def test_a_resumed_run_names_the_old_and_the_new_data_and_warns_about_another_format(sums_data, tmp_path, capsys):
    trained(sums_data, tmp_path, max_iters=2)
    same = prepare(tmp_path, "same", seed=5)
    notes = resumed_notes(same, tmp_path, capsys, max_iters=1)
    [change] = [note for note in notes if note.startswith("the data changed")]
    assert re.match(
        rf"the data changed from {sums_data} \(\w{{12}}…\) to {same} \(\w{{12}}…\): the data order starts", change
    )
    assert not any(note.startswith("warning: the earlier steps") for note in notes)
    # A byte-level tokenizer numbers the control tokens of all presets alike, so only the format differs.
    other = prepare(tmp_path, "other", "--format", "primer", seed=5)
    notes = resumed_notes(other, tmp_path, capsys, max_iters=1, check_tokenizer=False)
    [warning] = [note for note in notes if note.startswith("warning: the earlier steps")]
    assert warning.startswith(
        f"warning: the earlier steps trained on data with the format chatml, but {other} has the format primer; "
    )


def test_a_resume_with_another_batch_size_says_how_to_continue(sums_data, tmp_path):
    trained(sums_data, tmp_path, max_iters=2)
    with pytest.raises(UsageError, match=r"batch_size was 4, but is now 2; use the old values, or start a new run \("):
        trained(sums_data, tmp_path, resume="auto", batch_size=2)
