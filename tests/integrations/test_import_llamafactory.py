from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from import_fixtures import leaves

from chatmill.errors import DataError, UsageError
from chatmill.integrations.configs import import_llamafactory, write_import

INFO = {
    "identity": {"file_name": "identity.json"},
    "tools": {"hf_hub_url": "org/tools", "formatting": "sharegpt", "columns": {"messages": "conversations"}},
    "chat": {
        "file_name": "chat.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "system": "sys"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "bot"},
        "num_samples": 50,
    },
    "pairs": {"file_name": "pairs.json", "ranking": True, "columns": {"chosen": "chosen"}},
    "pictures": {"file_name": "pictures.json", "formatting": "sharegpt", "columns": {"images": "images"}},
}
RUN = """
model_name_or_path: Qwen/Qwen3-4B
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
dataset: identity,chat
template: qwen3
cutoff_len: 2048
max_samples: 1000
mask_history: true
preprocessing_num_workers: 16
output_dir: saves/qwen3/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: True
neat_packing: true
use_badam: true
val_size: 0.1
eval_strategy: steps
eval_steps: 200
"""
RECIPE = """\
# Converted from the LLaMA-Factory config run.yaml by `chatmill import`.
# See keys.txt for a report on each key.
tokenizer: "models/Qwen3-4B"  # model_name_or_path: Qwen/Qwen3-4B
max_tokens: 2048  # cutoff_len: 2048
fit: "exchanges"  # cutoff_len: 2048
train_on: "last"  # mask_history: true
val_split: 0.1  # val_size: 0.1
sources:
  - name: "identity"  # dataset_info.json: identity
    inputs: ["data/identity.json"]  # identity.file_name: identity.json
    shape: "alpaca"
    max_samples: 1000
  - name: "chat"  # dataset_info.json: chat
    inputs: ["data/chat.jsonl"]  # chat.file_name: chat.jsonl
    shape: "messages"
    columns: {"assistant": "bot", "system": "sys"}
    max_samples: 50  # chat.num_samples: 50
"""
TRAIN = {
    "dataset_dir": "out/data",
    "init_from_model": "models/Qwen3-4B",
    "lora": {"r": 8, "alpha": 16.0, "dropout": 0.0, "targets": ["q_proj", "v_proj"]},
    "batch_size": 8,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1e-4,
    "weight_decay": 0.0,
    "beta1": 0.9,
    "beta2": 0.999,
    "adam_eps": 1e-8,
    "grad_clip": 1.0,
    "lr_schedule": "cosine",
    "min_lr_ratio": 0.0,
    "warmup_pct": 0.1,
    "epochs": 3,
    "seed": 42,
    "epoch_seed": 42,
    "dtype": "bfloat16",
    "activation_checkpointing": True,
    "epoch_drop_last": False,
    "log_interval": 10,
    "report_to": [],
    "save_interval": 500,
    "eval_interval": 200,
    "packing": "bins",
    "block_size": 2048,
    "use_loss_mask": True,
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps(INFO))
    Path("run.yaml").write_text(RUN)
    return tmp_path


def test_the_config_of_a_run_finds_its_data_sets_and_gives_these_files():
    result = import_llamafactory("run.yaml")
    write_import(result, "out")
    assert Path("out/recipe.yaml").read_text() == RECIPE
    assert json.loads(Path("out/train.json").read_text()) == TRAIN


def test_both_files_in_either_order_give_the_same():
    alone = import_llamafactory("run.yaml")
    assert import_llamafactory("data/dataset_info.json", "run.yaml") == alone
    assert import_llamafactory("run.yaml", "data/dataset_info.json") == alone
    with pytest.raises(UsageError, match=r"expected a dataset_info\.json, the \.yaml file of a run, or one of each"):
        import_llamafactory("run.yaml", "run.yaml")


def test_the_data_folder_of_a_config_in_a_folder_below_is_found():
    Path("examples/train").mkdir(parents=True)
    Path("run.yaml").rename("examples/train/run.yaml")
    result = import_llamafactory("examples/train/run.yaml")
    assert [source["name"] for source in result.recipe["sources"]] == ["identity", "chat"]


def test_every_key_of_the_run_and_of_its_data_sets_is_reported_once():
    result = import_llamafactory("run.yaml")
    used = {name: INFO[name] for name in ("identity", "chat")}
    expected = leaves(yaml.safe_load(RUN)) + leaves(used)
    assert sorted(each.key for each in result.results) == sorted(expected)
    notes = {each.key: each for each in result.results}
    assert (notes["use_badam"].status, notes["use_badam"].note) == ("none", "chatmill uses adamw; the loss will differ")
    assert notes["template"].status == "none"
    others = "unused datasets in data/dataset_info.json: 3"
    assert others in [str(each) for each in result.assumptions]


def test_dataset_info_alone_takes_what_is_for_sft_and_lists_the_others():
    result = import_llamafactory("data/dataset_info.json", model="m")
    assert [source["name"] for source in result.recipe["sources"]] == ["identity", "tools", "chat"]
    assert {each.key: each.note for each in result.with_status("none")} == {
        "pairs": "not imported: the dataset has preference pairs, but chatmill supports only SFT",
        "pictures": "not imported: the dataset has images, videos or audio, but chatmill trains only on text",
    }
    assert result.recipe["tokenizer"] == result.train["init_from_model"] == "m"
    assert result.recipe["sources"][1] == {
        "name": "tools",
        "inputs": ["hf://datasets/org/tools@refs/convert/parquet/default/train/*.parquet"],
        "shape": "sharegpt",
    }


def test_a_data_set_that_is_named_must_be_for_sft():
    one = import_llamafactory("data/dataset_info.json", datasets=["chat"])
    assert [source["name"] for source in one.recipe["sources"]] == ["chat"]
    with pytest.raises(DataError, match=r"pairs: .* refused, the dataset has preference pairs"):
        import_llamafactory("data/dataset_info.json", datasets=["pairs"])
    with pytest.raises(DataError, match='does not contain the dataset "chats"'):
        import_llamafactory("data/dataset_info.json", datasets=["chats"])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("stage: dpo", "stage: dpo: refused, chatmill supports only SFT"),
        ("stage: pt", "not pretraining"),
        ("finetuning_type: freeze", "chatmill trains all weights or LoRA adapters"),
        ("image_max_pixels: 262144", "not on images or audio"),
        ("dataset: chats", '"chats" is not in data/dataset_info.json'),
        ("use_kt: true", "does not support this engine"),
        ("dataset_dir: elsewhere", "elsewhere/dataset_info.json is not in the current folder or in a parent folder"),
        ("dataset_dir: REMOTE:org/data", "download the data"),
    ],
)
def test_what_is_no_sft_on_text_is_refused(line, reason):
    config = yaml.safe_load(RUN) | yaml.safe_load(line)
    Path("run.yaml").write_text(json.dumps(config))
    with pytest.raises(DataError) as error:
        import_llamafactory("run.yaml")
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_interleaved_data_sets_have_these_weights():
    mixing = {"mix_strategy": "interleave_over", "interleave_probs": "0.75,0.25"}
    Path("run.yaml").write_text(json.dumps(yaml.safe_load(RUN) | mixing))
    assert [source["weight"] for source in import_llamafactory("run.yaml").recipe["sources"]] == [0.75, 0.25]
