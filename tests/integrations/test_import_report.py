from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from import_fixtures import unreported

from chatmill.cli.main import main
from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.integrations.configs import (
    axolotl_notes,
    import_axolotl,
    import_llamafactory,
    import_trl,
    llamafactory_notes,
    trl,
    write_import,
)
from chatmill.integrations.configs.report import Translation
from chatmill.prepare import load_recipe

AXOLOTL = {"base_model": "m", "learning_rate": 1e-4, "datasets": [{"path": "a.jsonl", "type": "chat_template"}]}
LLAMAFACTORY = {"model_name_or_path": "m", "dataset": "a"}
TRL = {"model_name_or_path": "m", "dataset_name": "a.jsonl"}
READ = {"axolotl": import_axolotl, "llamafactory": import_llamafactory, "trl": import_trl}
BASES = {"axolotl": AXOLOTL, "llamafactory": LLAMAFACTORY, "trl": TRL}
SHARED = (
    "learning_rate weight_decay adam_beta2 max_grad_norm gradient_accumulation_steps max_steps warmup_steps "
    "warmup_ratio seed data_seed bf16 fp16 save_steps save_strategy save_total_limit eval_steps eval_strategy "
    "logging_steps output_dir fsdp deepspeed gradient_checkpointing load_best_model_at_end metric_for_best_model "
    "lr_scheduler_kwargs lora_alpha lora_dropout report_to"
)
OWN = {
    "axolotl": "base_model datasets test_datasets sequence_len sample_packing val_set_size micro_batch_size batch_size "
    "optimizer lr_scheduler num_epochs adapter lora_r lora_target_modules lora_target_linear load_in_4bit load_in_8bit "
    "chat_template chat_template_jinja chat_template_kwargs special_tokens train_on_inputs excess_length_strategy rl "
    "saves_per_epoch evals_per_epoch wandb_project use_wandb early_stopping_patience cosine_min_lr_ratio torch_compile",
    "llamafactory": "dataset eval_dataset template cutoff_len packing neat_packing stage finetuning_type lora_rank "
    "lora_target max_samples quantization_bit val_size mix_strategy interleave_probs per_device_train_batch_size optim "
    "num_train_epochs use_muon train_on_prompt mask_history enable_thinking early_stopping_steps disable_shuffling "
    "pure_bf16 model_revision",
    "trl": "dataset_name dataset_mixture datasets dataset_config dataset_train_split dataset_test_split max_length "
    "max_seq_length packing packing_strategy use_peft lora_r lora_target_modules load_in_4bit assistant_only_loss beta "
    "completion_only_loss chat_template chat_template_path loss_type optim num_train_epochs env "
    "per_device_train_batch_size",
}
NOTES = {"axolotl": axolotl_notes.NOTES, "llamafactory": llamafactory_notes.NOTES, "trl": trl.NOTES}
NAMES = {trainer: [*NOTES[trainer], *OWN[trainer].split(), *SHARED.split()] for trainer in READ}
TEXTS = st.sampled_from(["no", "2e-4", "auto", "x y", "lora", "steps"])
PLAIN = st.none() | st.booleans() | st.integers(-2, 9) | st.floats(0, 2) | TEXTS
VALUES = (
    PLAIN
    | st.lists(PLAIN, max_size=2)
    | st.dictionaries(st.sampled_from(["a", "min_lr_rate", "pad_token", "0"]), PLAIN, max_size=2)
    | st.lists(st.dictionaries(st.sampled_from(["path", "type", "split", "id", "roles", "odd"]), PLAIN), max_size=2)
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text('{"a": {"file_name": "a.jsonl"}}')
    return tmp_path


@pytest.mark.parametrize("trainer", READ)
@settings(max_examples=120)
@given(data=st.data())
def test_every_key_of_a_config_is_reported_exactly_once(trainer, data):
    names = st.sampled_from(NAMES[trainer]) | st.text("abcxyz_", min_size=1, max_size=8)
    config = BASES[trainer] | data.draw(st.dictionaries(names, VALUES, max_size=8))
    Path("config.yaml").write_text(json.dumps(config))
    seen: list[Translation] = []
    with pytest.MonkeyPatch.context() as patch:
        # `check` would raise an error before the report of an invalid config can be inspected.
        patch.setattr(Translation, "check", lambda translation: seen.append(translation))
        READ[trainer]("config.yaml")
    keys = [each.key for each in seen[0].results]
    assert unreported(config, keys) == []
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("trainer", READ)
@settings(max_examples=50)
@given(data=st.data())
def test_what_is_imported_can_be_written_or_is_one_clear_line(trainer, data):
    names = st.sampled_from(NAMES[trainer])
    config = BASES[trainer] | data.draw(st.dictionaries(names, VALUES, max_size=6))
    Path("config.yaml").write_text(json.dumps(config))
    fault = ""
    try:
        write_import(READ[trainer]("config.yaml"), "out", overwrite=True)
    except ChatmillError as error:
        fault = str(error)
    assert fault == "" or (fault.startswith("config.yaml: ") and "\n" not in fault)


HOSTILE = {
    "a tag": "base_model: !!python/object/apply:os.system ['touch owned']",
    "another tag": "base_model: !env HOME",
    "a merge key": "a: &a {x: 1}\nb:\n  <<: *a",
    "a repeated key": "base_model: a\nbase_model: b",
    "infinite nesting": "a: &a [*a]",
    "aliases of aliases": "a: &a [1, 1, 1]\n"
    + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in pairwise("abcdefgh")),
    "deep": "a: " + "[" * 1000,
    "no table": "- a\n- b",
    "a text": "hello",
    "nothing": "",
    "no YAML": "{a: b",
    "bytes": b"\xff\xfe\x00\x01\x02",
    "an infinite number": "learning_rate: 1e999",
    "half a character": 'base_model: "\\ud800"',
    "a list as a key": "? [1, 2]\n: 3",
    "a number as a key": "1: 2",
    "many digits": "learning_rate: " + "9" * 5000,
    "large": "# " + "x" * (1 << 20),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_config_is_one_clear_line_and_runs_nothing(name):
    text = HOSTILE[name]
    Path("config.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError) as error:
        import_axolotl("config.yaml")
    assert str(error.value).startswith("config.yaml: ")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000
    assert not Path("owned").exists()


@pytest.mark.parametrize("text", ["[", '{"a": 1, "a": 2}', "[1]", '{"a": 3}', '{"a": {"file_name": 3}}'])
def test_a_wrong_dataset_info_is_one_clear_line(text):
    Path("data/dataset_info.json").write_text(text)
    with pytest.raises(DataError) as error:
        import_llamafactory("data/dataset_info.json")
    assert str(error.value).startswith("data/dataset_info.json: ")
    assert "\n" not in str(error.value)


def test_a_fifo_or_a_missing_file_is_one_line_at_once():
    os.mkfifo("fifo.yaml")
    for name in ("fifo.yaml", "missing.yaml"):
        with pytest.raises(DataError, match=f"{name}: cannot be read"):
            import_axolotl(name)


@pytest.mark.parametrize(
    ("text", "value"),
    [("2e-4", 2e-4), ("2.0e-4", 2e-4), ("'2e-4'", 2e-4), ("0.0002", 2e-4), ("1_0", 10), ("5.e-5", 5e-5), (".5", 0.5)],
)
def test_numbers_are_read_however_yaml_spells_them(text, value):
    config = f"base_model: m\nlearning_rate: {text}\ndatasets: [{{path: a.jsonl, type: chat_template}}]\n"
    Path("config.yaml").write_text(config)
    assert import_axolotl("config.yaml").train["learning_rate"] == value


@pytest.mark.parametrize("text", ["yes", "Yes", "on", "True", "TRUE", "true", "'true'"])
def test_switches_are_read_as_pyyaml_reads_them(text):
    config = (
        f"base_model: m\nlearning_rate: 1\ndatasets: [{{path: a.jsonl, type: chat_template}}]\nsample_packing: {text}\n"
    )
    Path("config.yaml").write_text(config)
    assert import_axolotl("config.yaml").train["packing"] == "bins"


def test_pyyaml_is_named_where_it_is_missing(monkeypatch):
    Path("config.yaml").write_text("a: 1")
    monkeypatch.setitem(sys.modules, "yaml", None)
    monkeypatch.delitem(sys.modules, "chatmill.prepare.yaml_loader", raising=False)
    with pytest.raises(DataError, match=r"config\.yaml: YAML needs PyYAML; run pip install 'chatmill\[recipe\]'"):
        import_axolotl("config.yaml")


# Writing.


def write_config(**keys) -> None:
    Path("config.yaml").write_text(json.dumps(AXOLOTL | keys))


def test_files_are_replaced_only_if_that_is_asked_for():
    write_config()
    write_import(import_axolotl("config.yaml"), "out")
    Path("out/recipe.yaml").write_text("mine")
    Path("out/other").write_text("stays")
    with pytest.raises(UsageError, match=r"out/recipe\.yaml: already exists; add --overwrite"):
        write_import(import_axolotl("config.yaml"), "out")
    assert Path("out/recipe.yaml").read_text() == "mine"
    write_import(import_axolotl("config.yaml"), "out", overwrite=True)
    assert Path("out/recipe.yaml").read_text().startswith("# Converted from the Axolotl config")
    assert Path("out/other").read_text() == "stays"


def test_nothing_is_written_if_the_values_give_no_train_config():
    write_config(sequence_len=64, gradient_accumulation_steps=3)
    result = import_axolotl("config.yaml")
    result.train["batch_size"] = 4
    with pytest.raises(DataError, match=r"config\.yaml: cannot be converted to a train config: .*batch_size 4"):
        write_import(result, "new/out")
    assert not Path("new").exists()


def test_text_of_any_script_and_line_breaks_survive_in_the_recipe():
    odd = "sücht\u2028ig\u0085 \U0001f600 \"'#.jsonl"
    path = r"s\u00fccht\u2028ig\u0085 \U0001f600 \"'#.jsonl"
    config = f'{{base_model: m, learning_rate: 1, datasets: [{{type: chat_template, path: "{path}"}}]}}'
    Path("config.yaml").write_text(config)
    write_import(import_axolotl("config.yaml"), "out")
    assert load_recipe("out/recipe.yaml").sources[0].inputs == (odd,)


# The command.


def run(monkeypatch, capsys, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["chatmill", "import", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_command_prints_each_key_and_the_next_commands(monkeypatch, capsys):
    write_config(neftune_noise_alpha=5, odd=1)
    code, out, err = run(monkeypatch, capsys, "axolotl", "config.yaml", "-o", "out", "--ranks", "8")
    assert (code, err) == (0, "")
    assert Path("out/keys.txt").read_text() == out[: out.index("\nwrote ")]
    assert "unknown and not used (1):\n  odd: 1\n" in out
    assert out.endswith(
        "next:\n"
        "  hf download m --local-dir models/m\n"
        "  chatmill prepare out/recipe.yaml -o out/data\n"
        "  chatmill train --config_file out/train.json --model_name imported\n"
    )


def test_json_has_the_same_as_data(monkeypatch, capsys):
    write_config(neftune_noise_alpha=5)
    code, out, err = run(monkeypatch, capsys, "axolotl", "config.yaml", "-o", "out", "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert [key["key"] for key in data["keys"]] == [
        "base_model",
        "learning_rate",
        "datasets[0].path",
        "datasets[0].type",
        "neftune_noise_alpha",
    ]
    assert data["keys"][-1] == {
        "key": "neftune_noise_alpha",
        "value": 5,
        "status": "none",
        "ours": {},
        "note": "chatmill does not add noise to embeddings; the loss will differ",
    }
    assert data["commands"][-1] == "chatmill train --config_file out/train.json --model_name imported"


def test_a_refused_config_ends_the_command_with_one_line(monkeypatch, capsys):
    write_config(rl="dpo")
    code, out, err = run(monkeypatch, capsys, "axolotl", "config.yaml", "-o", "out")
    assert (code, out) == (1, "")
    assert err == "chatmill: config.yaml: rl: dpo: refused, chatmill supports only SFT, not reinforcement learning\n"
    assert not Path("out").exists()
