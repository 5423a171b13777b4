from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from train_fixtures import SMALL, write_files

from chatmill.cli.guard import guarded
from chatmill.errors import ChatmillError
from chatmill.store import files
from chatmill.train.command import main
from chatmill.train.config import TrainConfig
from chatmill.train.distributed import World
from chatmill.train.loop import train_model
from chatmill.train.run_dir import RunDir
from chatmill.train.step import Pending, Stepper


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, sums_data):
    folder = tmp_path_factory.mktemp("inputs")
    shutil.copytree(sums_data, folder / "sums")
    shutil.copytree(sums_data, folder / "damaged")
    (folder / "damaged/train/shard_00000/tokens.bin").write_bytes(b"")
    shutil.copytree(sums_data, folder / "changed")
    with (folder / "changed/train/shard_00000/tokens.bin").open("r+b") as tokens:
        tokens.write(b"\0")
    write_files(folder / "foreign", [[1, 2, 3]] * 8, [[0, 1, 1]] * 8)
    shutil.copytree(folder / "foreign", folder / "maskless")
    (folder / "maskless/train/shard_00000/mask.bin").unlink()
    (folder / "empty").mkdir()
    shutil.copytree(sums_data, folder / "caches/primer")
    (folder / "file").write_text("")
    (folder / "small.json").write_text(json.dumps({**SMALL, "audit_dir": "logs/audit"}))
    (folder / "unknown.json").write_text('{"batch_sise": 3}')
    (folder / "circle.json").write_text('{"inherits": "circle.json"}')
    (folder / "text.json").write_text("no json")
    small = TrainConfig.from_mapping({**SMALL, "max_iters": 1})
    train_model(small, model_name="there", dataset_dir=folder / "sums", out_dir=folder / "runs", quiet=True)
    shutil.copytree(folder / "runs/there/step_00000001/model", folder / "other_model")
    training = folder / "other_model/training.json"
    training.write_text(json.dumps({**json.loads(training.read_text()), "tokenizer_sha256": "0" * 64}))
    write_files(folder / "more", [[1, 2, 9999]] * 8, [[0, 1, 1]] * 8)
    (folder / "settings").mkdir()
    (folder / "settings/chatmill.toml").write_text("training.sed = 1\n")
    return folder


def everything(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


REFUSALS = {
    "no name": ["--config_file", "small.json"],
    "a bad name": ["--model_name", "a/b"],
    "an unknown flag": ["--bogus", "1"],
    "a wrong value": ["--grad_clip", "-1"],
    "a missing config": ["--config_file", "none.json"],
    "a config with an unknown key": ["--config_file", "unknown.json"],
    "a config that inherits from itself": ["--config_file", "circle.json"],
    "a config that is not JSON": ["--config_file", "text.json"],
    "keys that conflict": ["--warmup_pct", "0.1", "--warmup_iters", "3"],
    "an invalid shape": ["--n_embd", "15"],
    "no such dataset": ["--dataset_dir", "none"],
    "a folder without a dataset": ["--dataset_dir", "empty"],
    "caches that are not built": ["--dataset_dir", "caches"],
    "a damaged dataset": ["--dataset_dir", "damaged"],
    "a changed dataset": ["--dataset_dir", "changed", "--verify"],
    "a dataset without a mask": ["--dataset_dir", "maskless"],
    "no end token": ["--dataset_dir", "foreign"],
    "a padding id outside the vocabulary": ["--pad_token_id", "100000"],
    "one dataset and a mix": ["--mix_sft", '{"a": 1}'],
    "rows longer than the model": ["--block_size", "65"],
    "an order without epochs": ["--batch_sampling_mode", "random", "--max_iters", "null"],
    "a pass that fills no batch": ["--batch_size", "64", "--max_iters", "null"],
    "a missing model": ["--init_from_model", "none"],
    "a folder without a model": ["--init_from_model", "empty"],
    "data with more ids than the model": [
        "--init_from_model",
        "runs/there",
        "--dataset_dir",
        "more",
        "--pad_token_id",
        "0",
    ],
    "a tokenizer that differs from the model's": ["--init_from_model", "other_model"],
    "adapters without a model": ["--lora", "{}"],
    "a model that is too large": ["--n_embd", "1000000000", "--n_head", "1000"],
    "no GPU": ["--device", "cuda"],
    "a missing checkpoint": ["--resume", "none"],
    "an existing run": ["--model_name", "there", "--out_dir", "runs"],
    "an audit folder that is a file": ["--audit_dir", "file"],
    "an audit folder in a file": ["--audit_dir", "file/logs"],
    "an output folder that is a file": ["--out_dir", "file"],
    "an output folder in a file": ["--out_dir", "file/runs"],
    "a tracker that is not installed": ["--report_to", "tensorboard"],
    "no such tracker": ["--report_to", "paper"],
    "a settings file with an unknown key": ["--config_file", "../small.json", "--dataset_dir", "../sums"],
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refused_run_changes_nothing(inputs, monkeypatch, capsys, refusal):
    monkeypatch.chdir(inputs / "settings" if refusal.startswith("a settings file") else inputs)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("chatmill.train.preflight.available_memory", lambda: 1e9)
    args = list(REFUSALS[refusal])
    for name, value in {"--model_name": "mine", "--config_file": "small.json", "--dataset_dir": "sums"}.items():
        if name not in args and (name, refusal) != ("--model_name", "no name"):
            args += [name, value]
    before = everything(inputs)
    with pytest.raises(SystemExit) as ended:
        guarded(lambda: main(args))
    err = capsys.readouterr().err
    assert ended.value.code in (1, 2), err
    assert (err.count("\n"), err[:10]) == (1, "chatmill: ")
    assert everything(inputs) == before


# The following errors occur after the settings are accepted, but before the first step ends.


def full(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory.")


def broken(*_, **__):
    raise OSError(28, "No space left on device")


LATE = {
    "the first step does not fit": (Stepper, "step", full),
    "the result of the first step cannot be read": (Pending, "read", full),
    "the first batch cannot be read": (World, "alone", broken),
    "the config cannot be written": (files, "write_file", broken),
    "the progress cannot be shown": (RunDir, "print", broken),
}


@pytest.mark.parametrize("fault", LATE)
@pytest.mark.parametrize("kept", [[], ["out"], ["out", "out/mine", "logs"]])
def test_a_run_that_finishes_no_step_leaves_no_files(sums_data, tmp_path, monkeypatch, fault, kept):
    for name in kept:
        (tmp_path / name).mkdir()
    if kept:
        (tmp_path / kept[-1] / "notes.txt").write_text("mine")
    before = everything(tmp_path)
    changes = {"audit_dir": str(tmp_path / "logs/audit"), "log_rows": True, "use_loss_mask": False}
    config = TrainConfig.from_mapping({**SMALL, **changes})
    monkeypatch.setattr(*LATE[fault])
    with pytest.raises((ChatmillError, OSError)):
        train_model(config, model_name="mine", dataset_dir=sums_data, out_dir=tmp_path / "out")
    assert everything(tmp_path) == before


def test_a_run_that_fails_after_its_first_step_keeps_its_audit_log_and_folder(sums_data, tmp_path):
    def fail_after_two(record):
        if record.step == 2:
            raise ChatmillError("enough")

    config = TrainConfig.from_mapping({**SMALL, "audit_dir": str(tmp_path / "logs")})
    with pytest.raises(ChatmillError, match="enough"):
        train_model(
            config, model_name="mine", dataset_dir=sums_data, out_dir=tmp_path, watch=fail_after_two, quiet=True
        )
    assert len((tmp_path / "mine/metrics.jsonl").read_text().splitlines()) == 2
    assert len(list((tmp_path / "logs").glob("audit_*.log"))) == 1


def test_a_refused_resume_keeps_the_run(sums_data, tmp_path, monkeypatch):
    config = TrainConfig.from_mapping({**SMALL, "max_iters": 4, "audit_dir": str(tmp_path / "logs")})
    train_model(config, model_name="mine", dataset_dir=sums_data, out_dir=tmp_path, quiet=True)
    longer = TrainConfig.from_mapping({**SMALL, "max_iters": 8, "audit_dir": str(tmp_path / "logs")})
    before = everything(tmp_path)
    monkeypatch.setattr(Stepper, "step", full)
    with pytest.raises(ChatmillError):
        train_model(longer, model_name="mine", dataset_dir=sums_data, out_dir=tmp_path, resume="auto", quiet=True)
    after = everything(tmp_path)
    (log,) = (tmp_path / "logs").glob("audit_*.log")
    assert after[str(log)].startswith(before[str(log)])
    assert {name for name in before if before[name] != after[name]} == {str(log), str(tmp_path / "mine/config.json")}
    monkeypatch.undo()
    again = train_model(longer, model_name="mine", dataset_dir=sums_data, out_dir=tmp_path, resume="auto", quiet=True)
    assert np.isfinite(again.loss)
