from __future__ import annotations

import json
import shutil
import socket
import warnings
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from model_fixtures import save_qwen, small_gpt
from safetensors.torch import load_file, save_file
from train_fixtures import curve, prepare, ranks, run_chatmill, sums, trained

from chatmill.errors import DataError, UsageError
from chatmill.train.chat_model import open_chat_model
from chatmill.train.checkpoint import list_checkpoints, save
from chatmill.train.distributed import World
from chatmill.train.load_model import open_model, open_ready
from chatmill.train.lora import LoraModel
from chatmill.train.preflight import base_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft  # noqa: F401
    from transformers import AutoModelForCausalLM

ADAPTERS = {"lora": {"r": 4, "dropout": 0.2}}
WAYS = pytest.mark.parametrize("way", [{}, ADAPTERS], ids=["all weights", "adapters"])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "model"
    return save_qwen(folder, vocab_size=300, max_position_embeddings=64, attention_dropout=0.1)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors"}


@WAYS
def test_a_resumed_run_is_bitwise_equal_including_dropout(base, sums_data, tmp_path, way):
    settings = {"init_from_model": str(base), "save_interval": 3, "keep_checkpoints": 9, **way}
    whole = trained(sums_data, tmp_path, name="whole", **settings)
    shutil.copytree(whole.folder, tmp_path / "parts")
    for path in list_checkpoints(tmp_path / "parts")[1:]:
        shutil.rmtree(path)
    parts = trained(sums_data, tmp_path, name="parts", resume="auto", **settings)
    assert contents(parts.checkpoint) == contents(whole.checkpoint)
    assert contents(parts.checkpoint / "model") == contents(whole.checkpoint / "model")
    assert curve(parts.folder) == curve(whole.folder)


@pytest.fixture
def half(base, tmp_path):
    folder = tmp_path / "half"
    shutil.copytree(base, folder)
    tensors = load_file(base / "model.safetensors")
    narrow = {name: tensor if tensor.ndim == 1 else tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(narrow, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return folder


def dtypes_in(path: Path) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in load_file(path).items()}


@WAYS
def test_a_run_on_a_half_precision_model_resumes_bitwise_exactly(half, sums_data, tmp_path, way):
    settings = {"init_from_model": str(half), "save_interval": 2, "keep_checkpoints": 9, **way}
    whole = trained(sums_data, tmp_path, name="whole", max_iters=4, **settings)
    shutil.copytree(whole.folder, tmp_path / "parts")
    shutil.rmtree(list_checkpoints(tmp_path / "parts")[-1])
    parts = trained(sums_data, tmp_path, name="parts", max_iters=4, resume="auto", **settings)
    assert contents(parts.checkpoint) == contents(whole.checkpoint)
    assert contents(parts.checkpoint / "model") == contents(whole.checkpoint / "model")
    assert set(dtypes_in(parts.checkpoint / "state-00000-of-00001.safetensors").values()) == {torch.float32}
    if way:
        assert set(dtypes_in(parts.checkpoint / "model" / "adapter_model.safetensors").values()) == {torch.float32}
    else:
        assert dtypes_in(parts.checkpoint / "model" / "model.safetensors") == dtypes_in(half / "model.safetensors")


def test_a_model_is_saved_in_the_dtypes_it_was_loaded_from_or_in_save_dtype(base, half, sums_data, tmp_path):
    for number, (folder, save_dtype, dtype) in enumerate(
        [
            (half, "auto", torch.bfloat16),
            (base, "auto", torch.float32),
            (half, "float32", torch.float32),
            (base, "float16", torch.float16),
        ]
    ):
        settings = {"init_from_model": str(folder), "save_dtype": save_dtype, "max_iters": 1}
        saved = trained(sums_data, tmp_path, name=str(number), **settings).checkpoint / "model"
        assert json.loads((saved / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
        assert AutoModelForCausalLM.from_pretrained(saved, dtype="auto").dtype == dtype
        # The saved weights are the float32 weights of the run, rounded once.
        state = load_file(saved.parent / "state-00000-of-00001.safetensors")
        for name, tensor in load_file(saved / "model.safetensors").items():
            assert torch.equal(tensor, state[f"weights/lm.{name}"].to(tensor.dtype)), name
    adapters = trained(sums_data, tmp_path, init_from_model=str(half), save_dtype="bfloat16", max_iters=1, **ADAPTERS)
    assert set(dtypes_in(adapters.checkpoint / "model" / "adapter_model.safetensors").values()) == {torch.bfloat16}
    own = trained(sums_data, tmp_path, name="own", save_dtype="bfloat16", max_iters=1).checkpoint / "model"
    again = trained(sums_data, tmp_path, name="again", init_from_model=str(own), max_iters=1).checkpoint / "model"
    for folder in (own, again):
        assert set(dtypes_in(folder / "model.safetensors").values()) == {torch.bfloat16}


def test_a_weight_outside_the_float16_range_is_a_one_line_error(tmp_path):
    model = small_gpt()
    with torch.no_grad():
        model.embedding.weight[3, 4] = 1e6
    optimizer = torch.optim.AdamW(model.parameters())
    world = World(0, 1, torch.device("cpu"))
    with pytest.raises(
        DataError, match=r"^embedding.weight: has values outside the range of float16; set save_dtype to"
    ):
        save(tmp_path, {"step": 1}, model, optimizer, world, sharded=False, keep=1, about={}, save_dtype="float16")
    assert list_checkpoints(tmp_path) == []


def test_transformers_loads_a_trained_model(base, sums_data, tmp_path):
    result = trained(sums_data, tmp_path, init_from_model=str(base), max_iters=20, save_interval=20)
    theirs = AutoModelForCausalLM.from_pretrained(result.checkpoint / "model", dtype=torch.float32).eval()
    mine = open_model(result.checkpoint / "model").eval()
    x = torch.arange(12).reshape(2, 6)
    positions, segments = torch.arange(6).expand(2, -1), torch.zeros(2, 6, dtype=torch.int32)
    with torch.no_grad():
        logits = mine.logits(x, positions, segments)
        torch.testing.assert_close(theirs(input_ids=x).logits, logits)
        before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()(input_ids=x).logits
    assert (logits - before).abs().max() > 0.1


@WAYS
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_several_ranks_train_like_one(base, sums_data, tmp_path, way, parallel):
    # Each rank draws its own dropout masks.
    plain = tmp_path / "plain"
    shutil.copytree(base, plain)
    config = plain / "config.json"
    config.write_text(config.read_text().replace('"attention_dropout": 0.1', '"attention_dropout": 0.0'))
    settings = {"init_from_model": str(plain), "max_iters": 4, **({"lora": {"r": 4}} if way else {})}
    one = trained(sums_data, tmp_path, name="one", **settings)

    def run(rank: int) -> list:
        return curve(trained(sums_data, tmp_path, name="two", parallel=parallel, **settings).folder)

    for found_curve in ranks(2, run):
        assert len(found_curve) == 4
        assert all(abs(mine[1] - right[1]) < 1e-5 for mine, right in zip(found_curve, curve(one.folder), strict=True))
    opened = open_model(tmp_path / "two" / "step_00000004" / "model")
    assert opened.vocab_size == 300


def test_adapters_require_a_hugging_face_model(sums_data, tmp_path):
    own = trained(sums_data, tmp_path, name="own", max_iters=1)
    with pytest.raises(UsageError, match="is not a Hugging Face model, but lora is set"):
        trained(sums_data, tmp_path, init_from_model=str(own.folder), **ADAPTERS)


def test_adapters_resume_only_on_their_base_model(base, sums_data, tmp_path):
    under = tmp_path / "under"
    shutil.copytree(base, under)
    first = trained(sums_data, tmp_path, init_from_model=str(under), max_iters=2, **ADAPTERS)
    weights = bytearray((under / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (under / "model.safetensors").write_bytes(weights)
    said = (
        rf"step_00000002: the adapters were trained on {under} with weights \w{{12}}…, but init_from_model is "
        rf"{under} with "
    )
    with pytest.raises(UsageError, match=said):
        trained(sums_data, tmp_path, resume="auto", init_from_model=str(under), max_iters=4, **ADAPTERS)
    # The base model may be in another folder, if its weights are the same.
    assert trained(sums_data, tmp_path, resume="auto", init_from_model=str(base), max_iters=4, **ADAPTERS).step == 4
    assert first.step == 2


def test_adapters_load_from_any_directory_without_a_network(base, sums_data, tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    shutil.copytree(base, here / "model")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (here / "model" / name).write_text("{}")
    monkeypatch.chdir(here)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def refused(*_, **__):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    adapters = trained(sums_data, tmp_path, init_from_model="model", max_iters=1, **ADAPTERS).checkpoint / "model"
    assert {"tokenizer_config.json", "special_tokens_map.json"} <= {path.name for path in adapters.iterdir()}
    shutil.copytree(adapters, there / "copy")
    monkeypatch.chdir(there)
    opened = open_chat_model("copy", device="cpu")
    assert isinstance(opened.model, LoraModel)
    assert json.loads((adapters / "adapter_config.json").read_text())["base_model_name_or_path"] == str(here / "model")
    further = trained(sums_data, tmp_path, name="further", init_from_model="copy", max_iters=1).checkpoint / "model"
    assert base_of(further) == base_of(adapters) == {"folder": str(here / "model"), "sha256": ANY}

    (here / "model").rename(there / "moved")
    with pytest.raises(
        DataError, match=r"is not a folder on this machine; restore the folder, change base_model_name_or_path"
    ):
        open_ready("copy", "cpu")
    assert open_ready("copy", "cpu", base_model="moved").vocab_size == 300
    with pytest.raises(
        UsageError, match="moved: is not an adapter folder, but --base-model is given; remove the option"
    ):
        open_ready("moved", "cpu", base_model="moved")
    weights = bytearray((there / "moved" / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (there / "moved" / "model.safetensors").write_bytes(weights)
    changed = (
        rf"copy: these adapters were trained on {here / 'model'} with weights \w{{12}}…, "
        r"but moved has weights \w{12}…; use the"
    )
    with pytest.raises(DataError, match=changed):
        open_ready("copy", "cpu", base_model="moved")


def test_adapters_on_a_damaged_base_model_are_refused(base, sums_data, tmp_path):
    own = trained(sums_data, tmp_path, name="own", init_from_model=str(base), max_iters=1)
    assert trained(sums_data, tmp_path, name="further", init_from_model=str(own.folder), max_iters=1).step == 1
    adapted = trained(sums_data, tmp_path, init_from_model=str(own.folder), max_iters=1, **ADAPTERS)
    assert open_model(adapted.checkpoint / "model").vocab_size == 300
    damaged = own.checkpoint / "model" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\1")
    with pytest.raises(DataError, match=r"model\.safetensors: is damaged; .*; the model of another checkpoint"):
        open_model(adapted.checkpoint / "model")


def test_data_prepared_with_a_different_tokenizer_file_is_refused(base, tmp_path):
    (tmp_path / "words.jsonl").write_text(sums(200))
    paths = [str(tmp_path / name) for name in ("one.json", "other.json")]
    for path, size in zip(paths, ("270", "275"), strict=True):
        run_chatmill("tokenizer", "train", str(tmp_path / "words.jsonl"), "--vocab-size", size, "-o", path)
    data = prepare(tmp_path, "data", "--tokenizer", paths[0])
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    shutil.copy(paths[1], folder / "tokenizer.json")
    with pytest.raises(DataError, match="prepare the data with the model's tokenizer"):
        trained(data, tmp_path, init_from_model=str(folder), max_iters=1)
    shutil.copy(paths[0], folder / "tokenizer.json")
    assert trained(data, tmp_path, init_from_model=str(folder), max_iters=1).step == 1
