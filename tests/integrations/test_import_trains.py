from __future__ import annotations

import json
from pathlib import Path

import pytest
from import_fixtures import save_tiny_model, write_alpaca, write_messages

from chatmill.integrations.configs import import_axolotl, import_llamafactory, import_trl, write_import
from chatmill.prepare import LocalEngine, load_recipe, prepare_dataset
from chatmill.train import TrainConfig, train_model

AXOLOTL = {
    "base_model": "m",
    "datasets": [{"path": "chat.jsonl", "type": "chat_template"}],
    "val_set_size": 0.2,
    "sequence_len": 96,
    "sample_packing": True,
    "adapter": "lora",
    "lora_r": 2,
    "lora_alpha": 4,
    "lora_target_linear": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "learning_rate": 1e-3,
    "bf16": False,
    "output_dir": "out/first",
}
LLAMAFACTORY = {
    "model_name_or_path": "m",
    "stage": "sft",
    "finetuning_type": "full",
    "dataset": "asked",
    "dataset_dir": ".",
    "template": "default",
    "cutoff_len": 96,
    "per_device_train_batch_size": 4,
    "max_steps": 2,
    "learning_rate": 1e-3,
}
TRL = {
    "model_name_or_path": "m",
    "dataset_name": "chat.jsonl",
    "max_length": 96,
    "assistant_only_loss": True,
    "per_device_train_batch_size": 4,
    "max_steps": 2,
    "learning_rate": 1e-3,
    "gradient_checkpointing": False,
}
INFO = {"asked": {"file_name": "alpaca.jsonl"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model") / "m")


@pytest.mark.parametrize(
    ("read", "config", "trained"),
    [(import_axolotl, AXOLOTL, "lora"), (import_llamafactory, LLAMAFACTORY, "full"), (import_trl, TRL, "full")],
    ids=["axolotl", "llamafactory", "trl"],
)
def test_an_imported_config_prepares_and_trains(read, config, trained, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("m").symlink_to(model)
    write_messages(Path("chat.jsonl"))
    write_alpaca(Path("alpaca.jsonl"))
    Path("dataset_info.json").write_text(json.dumps(INFO))
    Path("config.yaml").write_text(json.dumps(config))
    write_import(read("config.yaml"), "run")
    metadata = prepare_dataset(load_recipe("run/recipe.yaml"), "run/data", engine=LocalEngine(1))
    assert sum(split.num_episodes for split in metadata.splits.values()) == 40
    settings = TrainConfig.from_file("run/train.json", device="cpu", compile=False, eval_samples=0)
    assert settings.use_loss_mask
    result = train_model(settings, model_name="tiny", quiet=True)
    assert result.step == 2
    saved = Path(str(result.checkpoint)) / "model"
    assert (saved / "adapter_config.json").exists() == (trained == "lora")
