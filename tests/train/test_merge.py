from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_weight_precision import folder_of

from chatmill.cli.main import main
from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.store import files
from chatmill.train import merge_adapters, open_model
from chatmill.train.config import LoraSizes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM

IDS = torch.tensor([[1, 5, 9, 3, 7, 2, 4]])
PLACES = torch.arange(7)[None], torch.zeros(1, 7, dtype=torch.int32)
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
TRAINING = {"tokenizer_sha256": None, "step": 7, "format": {"name": "template", "template": TEMPLATE}}


def adapters_on(name: str, dtype: torch.dtype, folder: Path, **sizes) -> Path:
    base = folder_of(name, dtype, folder / "base")
    (base / "chat_template.jinja").write_text(TEMPLATE)
    (base / "tokenizer.json").write_text("{}")
    (base / "generation_config.json").write_text('{"eos_token_id": [2, 3], "temperature": 0.6}')
    model = open_model(base, weights="stored").with_lora(LoraSizes(r=4, **sizes), base)
    torch.manual_seed(2)
    with torch.no_grad():
        for tensor in model.trained_state().values():
            tensor.normal_(std=0.2)
    (folder / "adapters").mkdir()
    model.save(folder / "adapters")
    (folder / "adapters" / "training.json").write_text(json.dumps(TRAINING))
    return folder / "adapters"


def their_logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(input_ids=IDS).logits


def our_logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return open_model(folder).eval().logits(IDS, *PLACES)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("gemma3_text", torch.bfloat16),
        ("gpt2", torch.float16),
        ("phi3", torch.float32),
        ("mixtral", torch.bfloat16),
    ],
)
def test_transformers_loads_a_merged_model_with_the_logits_of_the_adapters(name, dtype, tmp_path):
    adapters = adapters_on(name, dtype, tmp_path)
    merged = merge_adapters(adapters, tmp_path / "merged")
    wanted, before = our_logits(adapters), their_logits(tmp_path / "base")
    error = {torch.float32: 1e-5, torch.float16: 0.05, torch.bfloat16: 0.25}[dtype] * wanted.abs().max()
    logits = their_logits(tmp_path / "merged")
    assert (logits - wanted).abs().max() <= error < (before - wanted).abs().max()
    assert merged.dtype == str(dtype).removeprefix("torch.") and merged.layers > 0
    stored = load_file(tmp_path / "base" / "model.safetensors")
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    assert {name: (each.dtype, each.shape) for name, each in weights.items()} == {
        name: (each.dtype, each.shape) for name, each in stored.items()
    }
    if name == "llama":
        # In float32, no value is rounded.
        merge_adapters(adapters, tmp_path / "exact", save_dtype="float32")
        assert torch.allclose(their_logits(tmp_path / "exact"), wanted, atol=1e-4 * float(wanted.abs().max()))


def test_weights_are_merged_in_float32_and_rounded_once(tmp_path):
    adapters = adapters_on("llama", torch.bfloat16, tmp_path, alpha=8.0)
    merge_adapters(adapters, tmp_path / "merged")
    stored, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    pairs = load_file(adapters / "adapter_model.safetensors")
    changed = 0
    for name, weight in stored.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in pairs:
            delta = 2.0 * (pairs[f"{key}.lora_B.weight"] @ pairs[f"{key}.lora_A.weight"])
            weight = (weight.float() + delta).bfloat16()
            changed += 1
        assert torch.equal(merged[name], weight), name
    assert changed == len(pairs) // 2 == 14


def test_a_merged_folder_has_tokenizer_chat_template_and_training_metadata(tmp_path):
    adapters = adapters_on("llama", torch.bfloat16, tmp_path)
    merge_adapters(adapters, tmp_path / "merged")
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == TEMPLATE
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {"tokenizer.json", "config.json", "model.safetensors"} <= names
    generation = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [2, 3], "temperature": 0.6}
    assert not any("adapter" in name for name in names)
    training = json.loads((tmp_path / "merged" / "training.json").read_text())
    about = {"adapters": str(adapters), "base": str(tmp_path / "base")}
    assert training == {**TRAINING, "merged": about}
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


def test_overwrite_replaces_only_folders_that_merge_wrote(tmp_path):
    adapters, target = adapters_on("llama", torch.bfloat16, tmp_path), tmp_path / "merged"
    merge_adapters(adapters, target)
    with pytest.raises(DataError, match="already exists; use another name or pass --overwrite"):
        merge_adapters(adapters, target)
    merge_adapters(adapters, target, save_dtype="float16", overwrite=True)
    assert json.loads((target / "config.json").read_text())["dtype"] == "float16"
    (target / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"chatmill_merge\.json does not list notes\.txt"):
        merge_adapters(adapters, target, overwrite=True)
    for other in (adapters, tmp_path / "base"):
        with pytest.raises(DataError, match="which the command reads; use another folder"):
            merge_adapters(adapters, other, overwrite=True)
    assert not list(tmp_path.glob(".*"))


def test_a_failed_merge_leaves_no_files(tmp_path, monkeypatch):
    adapters, target = adapters_on("llama", torch.bfloat16, tmp_path), tmp_path / "merged"
    tensors = load_file(adapters / "adapter_model.safetensors")
    first = sorted(tensors)[0]
    save_file({**tensors, first: tensors[first] * float("inf")}, adapters / "adapter_model.safetensors")
    with pytest.raises(DataError, match="these adapters cannot be merged") as caught:
        merge_adapters(adapters, target)
    assert "\n" not in str(caught.value)
    save_file(tensors, adapters / "adapter_model.safetensors")
    with monkeypatch.context() as full:
        full.setattr(shutil, "copy", lambda *given: (_ for _ in ()).throw(OSError(28, "No space left", given[0])))
        with pytest.raises(ChatmillError, match=r"\.merging: the model cannot be written \(No space left\)"):
            merge_adapters(adapters, target)
    monkeypatch.setattr(files, "sync_tree", lambda folder: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        merge_adapters(adapters, target)
    assert {path.name for path in tmp_path.iterdir()} == {"adapters", "base"}
    with pytest.raises(UsageError, match="base: is not an adapter folder; expected a folder with LoRA adapters"):
        merge_adapters(tmp_path / "base", target)


def test_the_merge_command_accepts_a_base_model_that_has_moved(tmp_path, monkeypatch, capsys):
    adapters = adapters_on("llama", torch.bfloat16, tmp_path)
    shutil.move(tmp_path / "base", tmp_path / "moved")
    target = tmp_path / "merged"

    def run(*more: str) -> str:
        names = [str(adapters), "-o", str(target), "--base-model", str(tmp_path / "moved")]
        monkeypatch.setattr(sys, "argv", ["chatmill", "merge", *names, *more])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return capsys.readouterr().out

    assert json.loads(run("--json")) == {
        "path": str(target),
        "adapters": str(adapters),
        "base": str(tmp_path / "moved"),
        "layers": 14,
        "dtype": "bfloat16",
        "size": (target / "model.safetensors").stat().st_size,
        "difference": None,
    }
    size = (target / "model.safetensors").stat().st_size
    assert run("--overwrite") == f"{target}: 14 layers merged, {size / 2**10:.1f} KiB, bfloat16\n"
    assert len({path.stat().st_mode for path in target.iterdir()}) == 1
