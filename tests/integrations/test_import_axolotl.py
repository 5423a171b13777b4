from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from import_fixtures import leaves, save_tokenizer, write_alpaca, write_messages

from chatmill.errors import DataError
from chatmill.format import TemplateOptions, open_renderer
from chatmill.integrations.configs import import_axolotl, write_import
from chatmill.prepare import LocalEngine, load_recipe, prepare_dataset
from chatmill.records import read_records

CONFIG = """
base_model: NousResearch/Llama-3.2-1B
datasets:
  - path: mlabonne/FineTome-100k
    type: chat_template
    split: train[:500]
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
    roles: {assistant: [gpt, model]}
val_set_size: 0.02
sequence_len: 2048
sample_packing: true
train_on_inputs: false
dataset_exact_deduplication: True
adapter: qlora
load_in_4bit: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_linear: true
peft_use_rslora: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
learning_rate: 2e-4
weight_decay: 0
warmup_ratio: 0.1
bf16: auto
tf32: no
gradient_checkpointing: offload
flash_attention: true
neftune_noise_alpha: 5
logging_steps: 1
save_steps: 100
eval_steps: 50
save_total_limit: 3
early_stopping_patience: 3
special_tokens: {pad_token: <|end|>}
wandb_project:
output_dir: ./outputs/lora-out
sequense_len: 9
"""
RECIPE = """\
# Converted from the Axolotl config config.yml by `chatmill import`.
# See keys.txt for a report on each key.
tokenizer: "models/Llama-3.2-1B"  # base_model: NousResearch/Llama-3.2-1B
max_tokens: 2048  # sequence_len: 2048
fit: "drop"  # sequence_len: 2048
dedupe: true  # dataset_exact_deduplication: true
val_split: 0.02  # val_set_size: 0.02
sources:
  - name: "FineTome-100k"  # datasets[0].path: mlabonne/FineTome-100k
    inputs: ["hf://datasets/mlabonne/FineTome-100k@refs/convert/parquet/default/train/*.parquet"]  # datasets[0].path: mlabonne/FineTome-100k
    max_samples: 500  # datasets[0].split: train[:500]
    shape: "messages"  # datasets[0].type: chat_template
    columns: {"messages": "conversations", "role": "from", "content": "value", "assistant": ["gpt", "model"]}
"""  # noqa: E501
TRAIN = {
    "dataset_dir": "out/data",
    "init_from_model": "models/Llama-3.2-1B",
    "block_size": 2048,
    "packing": "bins",
    "use_loss_mask": True,
    "batch_size": 16,
    "gradient_accumulation_steps": 4,
    "optimizer": "adamw8bit",
    "learning_rate": 0.0002,
    "weight_decay": 0,
    "beta1": 0.9,
    "beta2": 0.999,
    "adam_eps": 1e-08,
    "grad_clip": 1.0,
    "lr_schedule": "cosine",
    "min_lr_ratio": 0.1,
    "warmup_pct": 0.1,
    "epochs": 3,
    "seed": 42,
    "epoch_seed": 42,
    "quantize": "nf4",
    # Rank-stabilized: 128 / 16 = 32 / sqrt(16).
    "lora": {"r": 16, "alpha": 128.0, "dropout": 0.05, "targets": "all-linear"},
    "dtype": "auto",
    "activation_offload": True,
    "log_interval": 1,
    "save_interval": 100,
    "keep_checkpoints": 3,
    "eval_interval": 50,
    "early_stop_patience": 3,
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def imported(text: str, **options):
    Path("config.yml").write_text(text)
    return import_axolotl("config.yml", **options)


def minimal(**keys) -> str:
    config = {"base_model": "m", "learning_rate": 1e-4, "datasets": [{"path": "chat.jsonl", "type": "chat_template"}]}
    return json.dumps(config | keys)


def test_a_config_gives_this_recipe_and_this_train_config():
    result = imported(CONFIG, ranks=2)
    write_import(result, "out")
    assert Path("out/recipe.yaml").read_text() == RECIPE
    assert json.loads(Path("out/train.json").read_text()) == TRAIN
    assert sorted(path.name for path in Path("out").iterdir()) == ["keys.txt", "recipe.yaml", "train.json"]


def test_every_key_of_a_config_is_reported_once_and_with_what_follows():
    result = imported(CONFIG, ranks=2)
    lines = {each.key: str(each) for each in result.results}
    assert len(lines) == len(result.results)
    assert sorted(lines) == sorted(leaves(yaml.safe_load(CONFIG)))
    assert [each.key for each in result.with_status("unknown")] == ["sequense_len"]
    assert [each.key for each in result.with_status("none")] == [
        "flash_attention",
        "neftune_noise_alpha",
        "special_tokens.pad_token",
    ]
    assert lines["flash_attention"].endswith("; chatmill chooses the attention implementation; the result is the same")
    assert (
        lines["neftune_noise_alpha"]
        == "neftune_noise_alpha: 5; chatmill does not add noise to embeddings; the loss will differ"
    )
    assert lines["micro_batch_size"] == "micro_batch_size: 2 -> batch_size 16; 2 rows × 4 accumulation steps × 2 GPUs"
    assert lines["tf32"] == "tf32: false; this feature is also off in chatmill"


def test_the_next_commands_are_those_of_the_model_the_recipe_and_the_run():
    assert imported(CONFIG).commands(Path("out")) == [
        "hf download NousResearch/Llama-3.2-1B --local-dir models/Llama-3.2-1B",
        "chatmill prepare out/recipe.yaml -o out/data",
        "chatmill train --config_file out/train.json --model_name lora-out",
    ]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"rl": "dpo"}, "rl: dpo: refused, chatmill supports only SFT"),
        ({"rl": "grpo"}, "rl: grpo: refused, chatmill supports only SFT"),
        ({"pretraining_dataset": [{"path": "c4"}]}, "chatmill supports only SFT, not pretraining"),
        ({"processor_type": "AutoProcessor"}, "chatmill trains only on text, not on images or audio"),
        ({"reward_model": True}, "not reward models"),
        ({"adapter": "llama-adapter"}, "chatmill trains all weights, LoRA adapters or QLoRA adapters"),
        ({"datasets": [{"path": "a.jsonl", "type": "input_output"}]}, "chatmill does not support labeled segments"),
        ({"datasets": [{"path": "a.jsonl"}]}, "chatmill does not read pretokenized data"),
        ({"datasets": [{"path": "a.csv", "type": "alpaca"}]}, "convert the file to JSONL"),
        ({"learning_rate": "fast"}, "learning_rate is fast; expected a number"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0; expected a number of at least 1"),
        ({"micro_batch_size": 1.5}, "micro_batch_size is 1.5; expected an integer"),
        ({"sample_packing": "maybe"}, "sample_packing is maybe; expected true or false"),
        ({"datasets": "a.jsonl"}, "datasets is a.jsonl; expected a list of tables"),
        ({"bf16": 3}, "bf16 is 3; expected true, false or auto"),
    ],
)
def test_what_is_no_sft_on_text_or_of_a_wrong_type_is_refused_in_one_line(keys, reason):
    with pytest.raises(DataError) as error:
        imported(minimal(**keys))
    assert str(error.value).startswith("config.yml: ")
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_all_faults_are_in_one_line():
    with pytest.raises(DataError) as error:
        imported(json.dumps({"rl": "kto", "micro_batch_size": "two"}))
    for part in ("rl: kto", "no base_model", "micro_batch_size is two", "learning_rate is missing"):
        assert part in str(error.value)


def test_texts_and_conversations_in_one_config_are_refused_because_a_recipe_has_one_format():
    datasets = [{"path": "a.jsonl", "type": "completion"}, {"path": "b.jsonl", "type": "chat_template"}]
    with pytest.raises(DataError, match="import the datasets separately"):
        imported(minimal(datasets=datasets))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"lr_scheduler": "linear"}, {"lr_schedule": "linear", "min_lr_ratio": 0.0}),
        ({"lr_scheduler": "constant", "warmup_ratio": 0.1}, {"lr_schedule": "constant", "warmup_iters": 0}),
        ({"lr_scheduler": "rex"}, {"lr_schedule": "cosine", "min_lr_ratio": 0.0}),
        ({"warmup_steps": 10, "warmup_ratio": 0.1}, {"warmup_iters": 10}),
        ({"warmup_steps": 0.1}, {"warmup_pct": 0.1}),
        ({"max_steps": 30, "num_epochs": 2}, {"max_iters": 30}),
        ({"num_epochs": "2.5"}, {"epochs": 2.5}),
        ({"optimizer": "lion_8bit"}, {"optimizer": "adamw"}),
        ({"optimizer": "muon", "fsdp_config": {"version": 2}}, {"optimizer": "muon"}),
        ({"deepspeed": "deepspeed_configs/zero3_bf16.json"}, {"parallel": "fsdp"}),
        ({"batch_size": 8, "micro_batch_size": 2}, {"batch_size": 8, "gradient_accumulation_steps": 4}),
        ({"train_on_inputs": True}, {"use_loss_mask": True}),
        ({"train_on_inputs": True, "datasets": [{"path": "a.jsonl", "type": "alpaca"}]}, {"use_loss_mask": False}),
        ({}, {"warmup_pct": 0.03, "epochs": 1.0, "weight_decay": 0.0, "beta2": 0.999, "batch_size": 1}),
        ({"save_strategy": "no"}, {"save_interval": 1_000_000_000}),
        ({"use_tensorboard": True, "wandb_project": "p"}, {"report_to": ["tensorboard", "wandb"]}),
        ({"bf16": False, "fp16": False}, {"dtype": "float32"}),
        ({"adapter": "lora", "lora_target_modules": ["q_proj", "lm_head"]}, {}),
    ],
)
def test_keys_of_a_run_become_these(keys, expected):
    config = minimal(**keys)
    train = imported(config).train
    assert {name: train.get(name) for name in expected} == expected
    for one, other in (("max_iters", "epochs"), ("warmup_iters", "warmup_pct")):
        assert one not in train or other not in train
    if keys.get("optimizer") == "muon":
        assert "parallel" not in train
    if "adapter" in keys:
        assert train["lora"]["targets"] == ["q_proj"]


def test_without_validation_nothing_is_evaluated():
    train = imported(minimal(eval_steps=5, early_stopping_patience=2)).train
    assert (train["eval_interval"], "early_stop_patience" in train) == (0, False)


def test_keys_of_services_and_passwords_in_urls_are_not_printed():
    result = imported(minimal(comet_api_key="s3cret", mlflow_tracking_uri="https://me:s3cret@host/x", use_comet=True))
    write_import(result, "out")
    shown = "".join(path.read_text() for path in Path("out").iterdir()) + json.dumps(result.to_json(Path("out")))
    assert "s3cret" not in shown
    assert "comet_api_key: (hidden)" in shown


# Behavior that is defined only in Axolotl's code.


def build(**keys):
    save_tokenizer(Path("m"))
    write_import(imported(minimal(**keys)), "out", overwrite=True)
    return prepare_dataset(load_recipe("out/recipe.yaml"), "out/data", engine=LocalEngine(1), overwrite=True)


def test_rows_over_sequence_len_are_dropped_as_axolotl_drops_them_by_default():
    write_messages(Path("chat.jsonl"), 10)
    with Path("chat.jsonl").open("a") as file:
        turns = [{"role": "user", "content": "long " * 200}, {"role": "assistant", "content": "yes"}]
        file.write(json.dumps({"messages": turns}) + "\n")
    metadata = build(sequence_len=128)
    assert metadata.splits["train"].num_episodes == 10
    assert metadata.ledger.to_json()["dropped"]["too_long"]["rows"] == 1
    with pytest.raises(DataError, match=r"chat\.jsonl:11"):
        build(sequence_len=128, excess_length_strategy="raise")


def test_alpaca_rows_have_the_prompt_that_axolotl_writes_and_train_the_answer_and_its_end():
    write_alpaca(Path("chat.jsonl"), 1)
    metadata = build(datasets=[{"path": "chat.jsonl", "type": "alpaca"}])
    options = TemplateOptions(chat_template="out/chat_template.jinja")
    renderer = open_renderer("template", "m", template=options)
    rows = renderer.render(list(read_records(["chat.jsonl"])))
    assert metadata.splits["train"].num_tokens == len(rows.ids)
    assert renderer.tokenizer.decode(rows.ids) == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nWhat is 0 plus 3?\n\n### Response:\nIt is 3.<|im_end|>"
    )
    assert renderer.tokenizer.decode(rows.ids[rows.mask()]) == "It is 3.<|im_end|>"


def test_train_on_inputs_trains_the_texts_and_ends_of_all_turns_as_axolotl_does_with_chat_templates():
    write_messages(Path("chat.jsonl"), 1)
    metadata = build(train_on_inputs=True)
    rows = open_renderer("template", "m").render(list(read_records(["chat.jsonl"])), train_on="all")
    assert metadata.splits["train"].num_trained_tokens == int(rows.mask().sum())
    assert int(rows.mask().sum()) > int(rows.reweigh("assistant").mask().sum())


def test_long_completions_become_several_rows_as_in_axolotl():
    Path("chat.jsonl").write_text(json.dumps({"chapter": "one two three " * 50}) + "\n")
    metadata = build(datasets=[{"path": "chat.jsonl", "type": "completion", "field": "chapter"}], sequence_len=64)
    assert metadata.splits["train"].num_episodes > 1
    assert "truncated" not in metadata.ledger.to_json()
