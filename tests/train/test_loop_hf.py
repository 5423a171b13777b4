"""The loop with Hugging Face models and adapters: trained, stopped, gone on with, and opened by transformers."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from model_fixtures import save_qwen
from train_fixtures import curve, prepare, ranks, run_chatmill, sums, trained

from chatmill.errors import DataError, UsageError
from chatmill.train.checkpoint import list_checkpoints
from chatmill.train.load_model import open_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft  # noqa: F401
    from transformers import AutoModelForCausalLM

ADAPTERS = {"lora": {"r": 4, "dropout": 0.2}}
WAYS = pytest.mark.parametrize("way", [{}, ADAPTERS], ids=["all weights", "adapters"])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model as transformers writes it, with dropout."""
    folder = tmp_path_factory.mktemp("base") / "model"
    return save_qwen(folder, vocab_size=300, max_position_embeddings=64, attention_dropout=0.1)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors"}


@WAYS
def test_a_run_that_goes_on_ends_with_the_same_bits_dropout_included(base, sums_data, tmp_path, way):
    settings = {"init_from_model": str(base), "save_interval": 3, "keep_checkpoints": 9, **way}
    whole = trained(sums_data, tmp_path, name="whole", **settings)
    shutil.copytree(whole.folder, tmp_path / "parts")
    for path in list_checkpoints(tmp_path / "parts")[1:]:
        shutil.rmtree(path)
    parts = trained(sums_data, tmp_path, name="parts", resume="auto", **settings)
    assert contents(parts.checkpoint) == contents(whole.checkpoint)
    assert contents(parts.checkpoint / "model") == contents(whole.checkpoint / "model")
    assert curve(parts.folder) == curve(whole.folder)


def test_transformers_opens_what_was_trained_for_twenty_steps(base, sums_data, tmp_path):
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
def test_ranks_train_them_as_one_does(base, sums_data, tmp_path, way, parallel):
    # Without dropout, which is drawn by each rank for itself.
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


def test_adapters_need_a_hugging_face_model(sums_data, tmp_path):
    own = trained(sums_data, tmp_path, name="own", max_iters=1)
    with pytest.raises(UsageError, match="is no Hugging Face model, and lora is given"):
        trained(sums_data, tmp_path, init_from_model=str(own.folder), **ADAPTERS)


def test_adapters_go_on_only_with_the_model_they_began_on(base, sums_data, tmp_path):
    under = tmp_path / "under"
    shutil.copytree(base, under)
    first = trained(sums_data, tmp_path, init_from_model=str(under), max_iters=2, **ADAPTERS)
    weights = bytearray((under / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (under / "model.safetensors").write_bytes(weights)
    said = (
        rf"step_00000002: its adapters were trained on {under} with weights \w{{12}}…, init_from_model is {under} with "
    )
    with pytest.raises(UsageError, match=said):
        trained(sums_data, tmp_path, resume="auto", init_from_model=str(under), max_iters=4, **ADAPTERS)
    # Where it lies does not matter.
    assert trained(sums_data, tmp_path, resume="auto", init_from_model=str(base), max_iters=4, **ADAPTERS).step == 4
    assert first.step == 2


def test_adapters_on_a_damaged_model_of_a_checkpoint_are_not_opened(base, sums_data, tmp_path):
    own = trained(sums_data, tmp_path, name="own", init_from_model=str(base), max_iters=1)
    adapted = trained(sums_data, tmp_path, init_from_model=str(own.folder), max_iters=1, **ADAPTERS)
    assert open_model(adapted.checkpoint / "model").vocab_size == 300
    damaged = own.checkpoint / "model" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\1")
    with pytest.raises(DataError, match=r"model\.safetensors: is damaged, .*; this model is not used"):
        open_model(adapted.checkpoint / "model")


def test_data_made_with_another_tokenizer_file_is_refused(base, tmp_path):
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
