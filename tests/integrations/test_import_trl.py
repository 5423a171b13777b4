from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from import_fixtures import leaves

from chatmill.errors import DataError
from chatmill.integrations.configs import import_trl, write_import

HANDBOOK = """
model_name_or_path: mistralai/Mistral-7B-v0.1
model_revision: v1
torch_dtype: bfloat16
use_peft: true
load_in_4bit: true
lora_r: 16
lora_alpha: 16
chat_template: "{% for message in messages %}{{ message.content }}{% endfor %}"
dataset_mixture:
  datasets:
    - {id: org/chat, config: default, split: train_sft, columns: [messages], weight: 1.0}
    - {id: org/chat, config: small, split: test_sft, columns: [messages], weight: 0.5}
  test_split_size: 1000
  seed: 0
assistant_only_loss: true
packing: true
packing_strategy: ffd
max_seq_length: 2048
bf16: true
do_eval: true
eval_strategy: no
gradient_accumulation_steps: 2
hub_token: hf_secret
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
max_steps: -1
num_train_epochs: 1
output_dir: data/zephyr
per_device_train_batch_size: 4
report_to: [tensorboard, trackio]
save_strategy: "no"
warmup_ratio: 0.1
label_smoothing_factor: 0.1
"""
RECIPE = """\
# Converted from the TRL config args.yaml by `chatmill import`.
# See keys.txt for a report on each key.
tokenizer: "models/Mistral-7B-v0.1"  # model_name_or_path: mistralai/Mistral-7B-v0.1
val_split: 0.01  # dataset_mixture.test_split_size: 1000
max_tokens: 2048  # max_seq_length: 2048
fit: "exchanges"  # max_seq_length: 2048
format: "template"  # chat_template: {% for message in messages %}{{ message.content }}{% endfor …
chat_template: "out/chat_template.jinja"  # chat_template: {% for message in messages %}{{ message.content }}{% endfor …
sources:
  - name: "chat"  # dataset_mixture.datasets[0].id: org/chat
    inputs: ["hf://datasets/org/chat@refs/convert/parquet/default/train_sft/*.parquet"]  # dataset_mixture.datasets[0].id: org/chat
    shape: "messages"  # dataset_mixture.datasets[0].columns: ["messages"]
  - name: "chat-2"  # dataset_mixture.datasets[1].id: org/chat
    inputs: ["hf://datasets/org/chat@refs/convert/parquet/small/test_sft/*.parquet"]  # dataset_mixture.datasets[1].id: org/chat
    epochs: 0.5  # dataset_mixture.datasets[1].weight: 0.5
    shape: "messages"  # dataset_mixture.datasets[1].columns: ["messages"]
"""  # noqa: E501
TRAIN = {
    "dataset_dir": "out/data",
    "init_from_model": "models/Mistral-7B-v0.1",
    "lora": {"r": 16, "alpha": 16.0, "dropout": 0.05, "targets": ["q_proj", "v_proj"]},
    "quantize": "nf4",
    "batch_size": 64,
    "gradient_accumulation_steps": 2,
    "learning_rate": 2e-5,
    "weight_decay": 0.0,
    "beta1": 0.9,
    "beta2": 0.999,
    "adam_eps": 1e-8,
    "grad_clip": 1.0,
    "lr_schedule": "cosine",
    "min_lr_ratio": 0.1,
    "warmup_pct": 0.1,
    "epochs": 1,
    "seed": 42,
    "epoch_seed": 42,
    "dtype": "bfloat16",
    "activation_checkpointing": True,
    "epoch_drop_last": False,
    "report_to": ["tensorboard"],
    "save_interval": 1_000_000_000,
    "eval_interval": 0,
    "packing": "bins",
    "block_size": 2048,
    "use_loss_mask": True,
}


PAIRS = [{"path": "a.jsonl", "columns": ["prompt", "completion"]}]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def imported(config: str | dict, **options):
    Path("args.yaml").write_text(config if isinstance(config, str) else json.dumps(config))
    return import_trl("args.yaml", **options)


def test_a_recipe_of_the_handbook_gives_these_files():
    result = imported(HANDBOOK, ranks=8)
    write_import(result, "out")
    assert Path("out/recipe.yaml").read_text() == RECIPE
    assert json.loads(Path("out/train.json").read_text()) == TRAIN
    template = "{% for message in messages %}{{ message.content }}{% endfor %}\n"
    assert Path("out/chat_template.jinja").read_text() == template
    assert result.commands(Path("out"))[0] == (
        "hf download mistralai/Mistral-7B-v0.1 --revision v1 --local-dir models/Mistral-7B-v0.1"
    )


def test_every_key_is_reported_once_and_a_token_is_hidden():
    result = imported(HANDBOOK)
    assert sorted(each.key for each in result.results) == sorted(leaves(yaml.safe_load(HANDBOOK)))
    values = {each.key: each.value for each in result.results}
    assert values["hub_token"] == "(hidden)"
    notes = {each.key: each.note for each in result.with_status("none")}
    assert notes["label_smoothing_factor"] == "chatmill does not smooth labels; the loss will differ"
    assert notes["packing_strategy"] == "chatmill packs whole conversations by best fit, and does not split them"


@pytest.mark.parametrize(
    ("keys", "masks"),
    [
        ({}, False),
        ({"assistant_only_loss": True}, True),
        ({"datasets": PAIRS}, True),
        ({"datasets": PAIRS, "completion_only_loss": False}, False),
        ({"datasets": [{"path": "a.jsonl", "columns": ["messages"]}]}, False),
    ],
)
def test_what_trl_trains_by_default_is_every_token_but_of_completions(keys, masks):
    config = {"model_name_or_path": "./m", "dataset_name": "a.jsonl"} | keys
    assert imported(config).train["use_loss_mask"] is masks


def test_a_run_that_evaluates_reads_the_test_split_for_validation():
    config = {"model_name_or_path": "./m", "dataset_name": "org/set", "dataset_config": "en", "eval_strategy": "steps"}
    sources = imported(config).recipe["sources"]
    url = "hf://datasets/org/set@refs/convert/parquet/en"
    assert sources == [
        {"name": "set", "inputs": [f"{url}/train/*.parquet"]},
        {"name": "set-test", "inputs": [f"{url}/test/*.parquet"], "only_val": True},
    ]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"beta": 0.1}, "beta: 0.1: refused, chatmill supports only SFT, not preference or reward training"),
        ({"loss_type": "sigmoid"}, "loss_type: sigmoid: refused"),
        ({"num_generations": 8}, "num_generations: 8: refused"),
        ({"max_length": None}, "max_length is null; expected the maximum length of a row"),
        ({"datasets": [{"path": "a.jsonl", "fraction": 0}]}, "a fraction of 0 selects no rows; remove the dataset"),
    ],
)
def test_what_is_no_sft_is_refused(keys, reason):
    with pytest.raises(DataError) as error:
        imported({"model_name_or_path": "m", "dataset_name": "a.jsonl"} | keys)
    assert reason in str(error.value)


def test_a_config_of_accelerate_is_told_apart():
    with pytest.raises(DataError, match="is an Accelerate config"):
        imported({"compute_environment": "LOCAL_MACHINE", "num_processes": 8})


def test_environment_variables_are_named_but_not_set_and_not_shown(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    config = {"model_name_or_path": "m", "dataset_name": "a.jsonl", "env": {"WANDB_API_KEY": "s3cret"}}
    result = imported(config)
    assert "s3cret" not in "\n".join(result.lines())
    assert [str(each) for each in result.results if each.key == "env"] == [
        'env: ["WANDB_API_KEY"]; chatmill does not set environment variables; export them yourself'
    ]
