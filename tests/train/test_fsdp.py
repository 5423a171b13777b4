from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from model_fixtures import VOCAB, save_qwen, small_gpt
from safetensors.torch import load_file, save_file
from test_hf import APART, ARCHITECTURES, fresh
from train_fixtures import config, ranks

from chatmill.errors import ChatmillError, DataError
from chatmill.train import memory, sharded_save
from chatmill.train.distributed import World, local, whole
from chatmill.train.load_model import open_model
from chatmill.train.model import CausalModel
from chatmill.train.preflight import make_model
from chatmill.train.sharded_load import open_for_shards
from chatmill.train.sharded_save import save_in_shards

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM

CPU = torch.device("cpu")
JSON = ("config.json", "generation_config.json")


def opened(world: World, settings: dict[str, Any], compute: torch.dtype | None = None) -> CausalModel:
    """Load the model of a config in shards. Before the weights are loaded, only LoRA adapters have storage."""
    made = open_for_shards(config(parallel="fsdp", **settings), VOCAB, compute=compute, world=world)
    assert made.note is None, made.note
    assert all(each.is_meta or "lora_" in name for name, each in made.model.named_parameters())
    world.distribute(made.model, sharded=True, compute=compute, values=made.values)
    return made.model


def whole_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = {**model.state_dict(), **dict(model.named_buffers())}
    return {name: whole(tensor.detach()) for name, tensor in state.items()}


def same(mine: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == right.keys()
    for name, tensor in right.items():
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name], tensor), name


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}


@pytest.fixture(scope="module")
def architectures(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("architectures")
    for name in ARCHITECTURES:
        fresh(name).to(torch.bfloat16 if name == "llama" else None).save_pretrained(
            folder / name, max_shard_size="20KB"
        )
        assert (folder / name / "model.safetensors.index.json").is_file()
    return folder


def test_every_architecture_loads_and_saves_in_shards_like_one_process(architectures, tmp_path):
    """Weights and buffers are bitwise equal to those of `from_pretrained`, and the saved files are equal to those of an
    unsharded model.
    """

    def work(rank: int) -> None:
        sharded_save.SHARD_BYTES = 20_000
        world = World(rank, 2, CPU)
        for name in ARCHITECTURES:
            model = opened(world, {"init_from_model": str(architectures / name)})
            state = whole_state(model)
            folder = tmp_path / name
            if world.is_first:
                folder.mkdir()
            world.together(lambda: None)
            assert save_in_shards(folder, model, world, save_dtype="auto")
            if world.is_first:
                lm = AutoModelForCausalLM.from_pretrained(architectures / name, dtype=torch.float32)
                same({each.removeprefix("lm."): tensor for each, tensor in state.items()}, whole_state(lm))
                assert model.separates == (name not in APART), name
                plain = tmp_path / f"{name}-plain"
                plain.mkdir()
                open_model(architectures / name).save(plain)
                same(read_folder(folder), read_folder(plain))
                listed = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
                assert listed.keys() == load_file(plain / "model.safetensors").keys()
                assert len(set(listed.values())) > 1
                assert [(folder / each).read_bytes() for each in JSON] == [(plain / each).read_bytes() for each in JSON]
                again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
                same(whole_state(again), whole_state(lm))
            world.together(lambda: None)

    ranks(2, work)


def test_new_models_saved_models_and_adapters_load_like_in_one_process(tmp_path):
    (tmp_path / "gpt").mkdir()
    small_gpt().save(tmp_path / "gpt")
    qwen, half = save_qwen(tmp_path / "qwen"), tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.bfloat16).save_pretrained(half)
    adapters = save_adapters(qwen, tmp_path / "adapters")
    cases: list[dict[str, Any]] = [
        {"seed": 3},
        {"optimizer": "adamw_bf16", "tie_weights": False, "qk_norm": True},
        {"init_from_model": str(tmp_path / "gpt")},
        {"init_from_model": str(tmp_path / "gpt"), "optimizer": "adamw8bit"},
        {"init_from_model": str(qwen), "lora": {"r": 4}},
        {"init_from_model": str(half), "lora": {"r": 4}},
        {"init_from_model": str(adapters)},
    ]

    def work(rank: int) -> list[list[str]]:
        world = World(rank, 3, CPU)
        dtypes = []
        for case in cases:
            state = whole_state(model := opened(world, case))
            right = make_model(config(**case), VOCAB, compute=None)
            same(state, whole_state(right))
            pairs = zip(model.parameters(), right.parameters(), strict=True)
            assert all(mine.requires_grad == theirs.requires_grad for mine, theirs in pairs)
            assert sum(local(each).numel() for each in model.parameters()) < 0.4 * right.num_parameters
            dtypes.append(sorted({str(tensor.dtype) for tensor in state.values()}))
        return dtypes

    f32, b16 = "torch.float32", "torch.bfloat16"
    assert ranks(3, work) == [[[f32], [b16], [f32], [b16], [f32], [b16, f32], [f32]]] * 3


def save_adapters(base: Path, folder: Path) -> Path:
    model = make_model(config(init_from_model=str(base), lora={"r": 4}), VOCAB, compute=None)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    folder.mkdir()
    model.save(folder)
    return folder


def test_models_that_cannot_be_loaded_in_shards_are_loaded_whole_or_refused(tmp_path):
    base = save_qwen(tmp_path / "base")

    def changed(name: str, change: Any) -> str:
        shutil.copytree(base, tmp_path / name)
        tensors = load_file(tmp_path / name / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
        return str(tmp_path / name)

    embedding = "model.embed_tokens.weight"
    untied = changed("untied", lambda tensors: tensors.update({"lm_head.weight": tensors[embedding] + 1}))
    equal = changed("equal", lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
    missing = changed("missing", lambda tensors: tensors.pop("model.norm.weight"))
    shape = changed("shape", lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    broken = changed("nan", lambda tensors: tensors["model.norm.weight"].fill_(torch.nan))
    size = sum(tensor.nbytes for tensor in load_file(base / "model.safetensors").values())

    def work(rank: int) -> list[str]:
        world, said = World(rank, 2, CPU), []
        for folder in (untied, equal):
            made = open_for_shards(config(init_from_model=folder), VOCAB, compute=None, world=world)
            said.append(str(made.note))
            world.distribute(made.model, sharded=True, compute=None, values=made.values)
            lm = AutoModelForCausalLM.from_pretrained(folder)
            same({name.removeprefix("lm."): each for name, each in whole_state(made.model).items()}, whole_state(lm))
        for folder in (missing, shape, broken):
            with pytest.raises(ChatmillError) as caught:
                open_for_shards(config(init_from_model=folder), VOCAB, compute=None, world=world)
            said.append(str(caught.value))
            with pytest.raises(DataError) as alone:
                open_model(Path(folder))
            assert str(caught.value) == str(alone.value) or "shape" in folder
        # Each of two ranks needs twice the size of the model: half of the weights, half of the gradients, and half of
        # each of the two moments.
        memory.available_memory = lambda: 2.1 * size
        assert open_for_shards(config(init_from_model=str(base)), VOCAB, compute=None, world=world).note is None
        memory.available_memory = lambda: 1.9 * size
        with pytest.raises(ChatmillError) as caught:
            open_for_shards(config(init_from_model=str(base)), VOCAB, compute=None, world=world)
        return [*said, str(caught.value)]

    first, other = ranks(2, work)
    assert first == other
    assert first[0].startswith(f"{untied}: cannot be loaded in shards (") and "are tied" in first[0]
    assert first[0].endswith("), so every rank loads the whole model first")
    assert first[1] == "None"
    assert f"{missing}: the weight files have no model.norm.weight, " in first[2]
    assert first[3] == f"{shape}: model.norm.weight has the shape (31,), but config.json implies (32,)"
    assert "the logits are NaN" in first[4]
    assert "one shard of the model with gradients and optimizer state takes" in first[5]
