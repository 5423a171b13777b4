from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model_fixtures import small_gpt
from torch import Tensor, nn
from train_fixtures import config, prepare, trained

from chatmill.errors import UsageError
from chatmill.train import MODEL_FAMILIES, CausalModel, LMHead, Losses, TrainedPositions, open_model, train_model
from chatmill.train.loss import trained_states


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("data"), "sums", "--format", "primer")


class ZLoss:
    def __init__(self, penalty: float) -> None:
        self.penalty, self.calls = penalty, 0

    def __call__(self, hidden: Tensor, head: LMHead, targets: TrainedPositions) -> Losses:
        self.calls += 1
        logits = head.logits(trained_states(hidden, targets))
        normalizer = torch.logsumexp(logits, dim=1)
        tokens = normalizer - logits.gather(1, targets.ids[:, None]).squeeze(1) + self.penalty * normalizer**2
        return Losses((tokens * targets.weights).sum(), tokens.detach())


def run(dataset: Path, out: Path, name: str, loss: ZLoss | None) -> float:
    settings = config(max_iters=2, save_interval=0)
    result = train_model(settings, model_name=name, dataset_dir=dataset, out_dir=out, loss=loss, quiet=True)
    assert result.loss is not None
    return result.loss


def test_a_custom_loss_is_trained(dataset, tmp_path):
    same, penalized = ZLoss(0.0), ZLoss(1.0)
    usual = run(dataset, tmp_path, "usual", None)
    assert run(dataset, tmp_path, "same", same) == pytest.approx(usual, rel=1e-5)
    assert run(dataset, tmp_path, "penalized", penalized) > usual + 1
    assert (same.calls, penalized.calls) == (2, 2)


class Bigram(CausalModel):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size, self.max_positions = vocab_size, 64
        self.embedding = nn.Embedding(vocab_size, 8)
        self.unembedding = nn.Linear(8, vocab_size, bias=False)

    def hidden(self, x, positions, segments):
        return self.embedding(x)

    def head(self):
        return LMHead(self.unembedding.weight)

    def blocks(self):
        return []

    def checkpoint_blocks(self, *, offload=False):
        pass

    def save(self, folder, state=None):
        (folder / "config.json").write_text(json.dumps({"model_type": "bigram", "vocab_size": self.vocab_size}))
        torch.save(dict(state or self.state_dict()), folder / "weights.pt")

    @classmethod
    def load(cls, folder, *, compute=None, weights="float32"):
        model = cls(json.loads((folder / "config.json").read_text())["vocab_size"])
        model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
        return model


def test_a_custom_model_family_is_loaded_trained_and_saved(dataset, tmp_path, monkeypatch):
    monkeypatch.setitem(MODEL_FAMILIES, "bigram", Bigram.load)
    (tmp_path / "fresh").mkdir()
    torch.manual_seed(0)
    Bigram(512).save(tmp_path / "fresh")
    result = trained(dataset, tmp_path, init_from_model=str(tmp_path / "fresh"), max_iters=2)
    assert (result.step, result.loss is not None) == (2, True)
    opened = open_model(result.checkpoint / "model")
    assert type(opened) is Bigram
    before = open_model(tmp_path / "fresh").embedding.weight
    assert not torch.equal(opened.embedding.weight, before)


def test_a_model_family_without_adapters_refuses_lora(tmp_path):
    with pytest.raises(UsageError, match="is not a Hugging Face model, but lora is set"):
        small_gpt().with_lora(None, tmp_path)
