from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rollout_folders import run_settings, write_model, write_truth
from train_fixtures import ranks

from chatmill.records import Message, Record
from chatmill.rollout import open_task
from chatmill.rollout.config import RolloutConfig
from chatmill.rollout.loop import train_rollouts
from chatmill.train.chat_model import open_chat_model
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.load_model import open_model
from chatmill.train.saved_template import read_templates


def test_rollout_training_of_a_hugging_face_model_replays_bitwise(tmp_path):
    folder = write_model(tmp_path / "model")
    write_truth(tmp_path / "truth.jsonl")
    settings = run_settings(tmp_path, folder)
    for lora in (None, {"r": 2, "alpha": 4}):
        runs = [tmp_path / f"{name} {lora is None}" for name in ("run", "replayed", "resumed")]
        config = {**settings, "lora": lora}
        result = train_rollouts(RolloutConfig.from_mapping(config), runs[0], quiet=True)
        assert result.step == 4 and result.health.rollouts == 12
        replay = {**config, "replay": str(runs[0] / "rollouts.jsonl")}
        train_rollouts(RolloutConfig.from_mapping(replay), runs[1], quiet=True)
        kept = RolloutConfig.from_mapping({**config, "keep_checkpoints": 9})
        train_rollouts(kept, runs[2], quiet=True)
        train_rollouts(kept, runs[2], resume=str(runs[2] / "step_00000002"), quiet=True)
        first, *others = (weights(run) for run in runs)
        assert first != weights_of_folder(folder)
        assert all(other == first for other in others)
        chat = open_chat_model(runs[0], device="cpu")
        question = [Message("user", "what is here?")]
        assert chat.prompt(question) == open_task(str(folder), None).renderer.prompt_ids(Record(question))


def test_a_model_trained_on_rollouts_in_another_format_is_saved_without_its_template(tmp_path, capsys):
    folder = write_model(tmp_path / "model")
    write_truth(tmp_path / "truth.jsonl")
    for format, kept in (("template", True), ("chatml", False)):
        settings = {**run_settings(tmp_path, folder), "format": format, "max_iters": 2}
        result = train_rollouts(RolloutConfig.from_mapping(settings), tmp_path / format)
        assert bool(read_templates(result.checkpoint / "model")) == kept
        training = json.loads((result.checkpoint / "model" / "training.json").read_text())
        assert ("chat_template" in training) != kept
        err = capsys.readouterr().err
        assert ("saved models get no chat template" in err) != kept
    assert "truth.jsonl was rendered with the format chatml, but " in err
    assert "; to keep the template, set format to template" in err


def test_two_ranks_give_the_same_rollouts_and_losses_as_one(tmp_path):
    folder = write_model(tmp_path / "model")
    write_truth(tmp_path / "truth.jsonl")
    # With three rows per step in batches of two, ranks have different numbers of rows, and a rank may have none.
    settings = {**run_settings(tmp_path, folder), "generate_batch_size": 2, "gradient_accumulation_steps": 2}

    def work(folder: str, size: int) -> dict:
        train_rollouts(RolloutConfig.from_mapping({**settings, "batch_size": size}), Path(folder), quiet=True)
        return {}

    for size in (3, 1):
        work(str(tmp_path / f"one {size}"), size)
        ranks(2, lambda rank, size=size: work(str(tmp_path / f"two {size}"), size))
        one, two = (tmp_path / f"{name} {size}" for name in ("one", "two"))
        assert (two / "rollouts.jsonl").read_bytes() == (one / "rollouts.jsonl").read_bytes()
        keys = ("loss", "grad_norm", "tokens", "trained", "text", "soft", "wasserstein", "outside")
        for mine, theirs in zip(*(metrics(run) for run in (two, one)), strict=True):
            assert [mine[key] for key in keys] == pytest.approx([theirs[key] for key in keys], rel=1e-4, abs=1e-5)
        for name, tensor in weights(one).items():
            assert np.allclose(tensor, weights(two)[name], atol=1e-4), name


def metrics(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def weights(run: Path) -> dict[str, list]:
    return weights_of_folder(model_folder(run))


def weights_of_folder(folder: Path) -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in open_model(folder).state_dict().items()}
