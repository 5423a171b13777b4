from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from train_fixtures import config, prepare, trained

from chatmill.cli.main import main as chatmill
from chatmill.errors import UsageError
from chatmill.train import merge_adapters
from chatmill.train.chat_model import open_chat_model
from chatmill.train.loop import train_model
from chatmill.train.saved_template import read_templates, write_templates

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoTokenizer

OTHER = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + ': ' + message.content + '<|im_end|>' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant: ' -}}{%- endif -%}"
)
ROOT = Path(__file__).resolve().parents[2]
LORA = {"lora": {"r": 2}, "max_iters": 1, "block_size": 64, "batch_size": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "my-model"
    command = [sys.executable, str(ROOT / "scripts/make_tiny_model.py"), str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return folder


@pytest.fixture
def other_template(tmp_path):
    path = tmp_path / "other.jinja"
    path.write_text(OTHER)
    return path


def model_of(result) -> Path:
    return result.checkpoint / "model"


def notes(capsys) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "chat template" in line]


def run(data: Path, out_dir: Path, base: Path, **changes):
    settings = config(**{**LORA, "init_from_model": str(base), **changes})
    return train_model(settings, model_name="run", dataset_dir=data, out_dir=out_dir)


@pytest.mark.parametrize("lora", [{"r": 2}, None], ids=["adapters", "all weights"])
def test_a_model_trained_on_a_preset_is_saved_without_the_template_of_its_base_model(base, tmp_path, capsys, lora):
    data = prepare(tmp_path, "data", "--tokenizer", str(base), "--format", "chatml")
    saved = model_of(run(data, tmp_path, base, lora=lora))
    [note] = notes(capsys)
    assert note.startswith(f"warning: {data} was rendered with the format chatml, but {base} has the chat template ")
    assert note.endswith("to keep the template, prepare the data again with --format template")
    assert read_templates(saved) == {}
    tokenizer = AutoTokenizer.from_pretrained(saved)
    with pytest.raises(ValueError, match="chat_template is not set"):
        tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}])
    training = json.loads((saved / "training.json").read_text())
    assert training["format"]["name"] == "chatml"
    assert training["chat_template"] == {"saved_sha256": {}, "base_sha256": {"default": training_hash(base)}}
    assert open_chat_model(saved, device="cpu").renderer.to_json()["name"] == "chatml"
    with pytest.raises(UsageError, match=r"has no chat template; omit --format to use the format that .*model records"):
        open_chat_model(saved, format="template", device="cpu")


def training_hash(folder: Path) -> str:
    return hashlib.sha256((folder / "chat_template.jinja").read_bytes()).hexdigest()


def test_a_model_trained_on_another_template_is_saved_with_that_template(base, other_template, tmp_path, capsys):
    flags = ("--tokenizer", str(base), "--chat-template", str(other_template))
    data = prepare(tmp_path, "data", *flags)
    saved = model_of(run(data, tmp_path, base))
    [note] = notes(capsys)
    assert note.startswith(f"note: {data} was rendered with the chat template ")
    assert note.endswith("saved models get the chat template of the data")
    assert (saved / "chat_template.jinja").read_text() == OTHER
    messages = [{"role": "user", "content": "1+1"}]
    tokenizer = AutoTokenizer.from_pretrained(saved)
    theirs = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert theirs == "<|im_start|>user: 1+1<|im_end|><|im_start|>assistant: "
    merged = tmp_path / "merged"
    merge_adapters(saved, merged)
    assert (merged / "chat_template.jinja").read_text() == OTHER


def test_a_model_trained_on_its_own_template_keeps_its_template_files(base, tmp_path, capsys):
    data = prepare(tmp_path, "data", "--tokenizer", str(base))
    saved = model_of(run(data, tmp_path, base))
    assert notes(capsys) == []
    for name in ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json"):
        assert (saved / name).read_bytes() == (base / name).read_bytes()
    assert "chat_template" not in json.loads((saved / "training.json").read_text())


def test_merging_does_not_bring_back_the_template_that_the_model_was_not_trained_on(
    base, tmp_path, monkeypatch, capsys
):
    data = prepare(tmp_path, "data", "--tokenizer", str(base), "--format", "chatml")
    result = trained(data, tmp_path, init_from_model=str(base), **LORA)
    monkeypatch.setattr(sys, "argv", ["chatmill", "merge", str(result.folder), "-o", str(tmp_path / "merged")])
    with pytest.raises(SystemExit):
        chatmill()
    assert "saved models get no chat template" in capsys.readouterr().err
    assert read_templates(tmp_path / "merged") == {}
    assert open_chat_model(tmp_path / "merged", device="cpu").renderer.to_json()["name"] == "chatml"


def test_a_template_in_tokenizer_config_json_is_left_out_and_other_keys_stay(base, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": OTHER}))
    write_templates(folder, {"name": "chatml"})
    assert not (folder / "chat_template.jinja").exists()
    assert json.loads((folder / "tokenizer_config.json").read_text()) == config


def test_templates_for_conversations_with_tools_are_saved_where_transformers_reads_them(base, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    write_templates(folder, {"name": "template", "template": OTHER, "tool_use": "tools"})
    assert AutoTokenizer.from_pretrained(folder).chat_template == {"default": OTHER, "tool_use": "tools"}
    assert read_templates(folder) == {"default": OTHER, "tool_use": "tools"}


@pytest.mark.parametrize("format", [None, {}, "text", {"name": "text"}, "template"])
def test_data_without_a_known_chat_format_keeps_the_template(base, tmp_path, format):
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    write_templates(folder, format)
    assert read_templates(folder) == read_templates(base) != {}
