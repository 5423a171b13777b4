from __future__ import annotations

import warnings

import pytest
import torch
from model_fixtures import conversation, inputs, packed, save_qwen

from chatmill.errors import DataError, UsageError
from chatmill.train.config import LoraSizes
from chatmill.train.hf import HFModel
from chatmill.train.load_model import open_model
from chatmill.train.lora import LoraModel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

CHATS = [conversation(length, seed=length) for length in (5, 9, 3, 7)]
BATCH = packed([CHATS[:2], CHATS[2:]], 16)


@pytest.fixture
def base(tmp_path):
    return save_qwen(tmp_path / "base")


def adapted(folder, **changes) -> LoraModel:
    torch.manual_seed(1)
    return LoraModel.on(HFModel.load(folder), LoraSizes(r=4, **changes)).train()


class Run:
    def __init__(self, model: HFModel) -> None:
        self.model = model
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-2)

    def steps(self, count: int) -> Run:
        given = inputs(BATCH)
        for _ in range(count):
            (self.model(*given).total / given.targets.weight).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self


def logits_of(model) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model.logits(BATCH.x, BATCH.positions, BATCH.segments)


def test_new_adapters_do_not_change_logits_and_are_the_only_trained_weights(base):
    plain = open_model(base)
    model = adapted(base)
    assert torch.equal(logits_of(model), logits_of(plain))
    names = set(model.trained_state())
    assert names and all("lora_" in name for name in names)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Run(model).steps(3)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == names


def test_adapted_layers_compute_what_peft_does(base):
    model = adapted(base, alpha=7.0)
    Run(model).steps(3)
    layers = [module for module in model.lm.modules() if type(module).__name__ == "AdaptedLinear"]
    assert len(layers) == 2 * 7
    model.eval()

    def outcome() -> list[torch.Tensor]:
        model.zero_grad()
        logits = model.logits(BATCH.x, BATCH.positions, BATCH.segments)
        logits.square().sum().backward()
        return [logits.detach(), *(weight.grad for weight in model.parameters() if weight.requires_grad)]

    ours = outcome()
    for layer in layers:
        layer.__class__ = peft.tuners.lora.Linear
    for mine, theirs in zip(ours, outcome(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


def test_saved_adapters_load_bitwise_equal_with_their_base_model(base, tmp_path):
    model = adapted(base)
    Run(model).steps(3)
    (tmp_path / "adapters").mkdir()
    model.save(tmp_path / "adapters")
    assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    again = open_model(tmp_path / "adapters")
    assert isinstance(again, LoraModel) and torch.equal(logits_of(again), logits_of(model))
    assert list(again.trained_state()) == list(model.trained_state())


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_adapters_that_are_trained_further_keep_the_precision_of_their_base_model(base, tmp_path, weights):
    """The optimizer adamw8bit requires bfloat16 for trained weights. This does not apply to the base model of LoRA
    adapters, which is not trained.
    """
    adapted(base).save(tmp_path / "adapters")
    model = open_model(tmp_path / "adapters", weights=weights)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(logits_of(model), logits_of(open_model(tmp_path / "adapters")))


def test_training_resumed_from_saved_weights_is_bitwise_exact(base):
    undisturbed = Run(adapted(base, dropout=0.2))
    torch.manual_seed(7)
    undisturbed.steps(6)

    first = Run(adapted(base, dropout=0.2))
    torch.manual_seed(7)
    first.steps(3)
    generator = torch.get_rng_state()
    weights = {name: tensor.clone() for name, tensor in first.model.trained_state().items()}
    second = Run(LoraModel.on(HFModel.load(base), LoraSizes(r=4, dropout=0.2)).train())
    second.model.load_state_dict(weights, strict=False)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    torch.set_rng_state(generator)
    second.steps(3)
    for name, tensor in undisturbed.model.trained_state().items():
        assert torch.equal(second.model.trained_state()[name], tensor), name


def test_adapters_may_be_on_some_layers_only(base):
    names = adapted(base, targets=["q_proj", "v_proj"]).trained_state()
    assert {name.split(".")[5] for name in names} == {"q_proj", "v_proj"}


@pytest.mark.parametrize(
    ("targets", "says"), [(["nonesuch"], "nonesuch"), (["q_proj", "lm_head"], "lm_head is the output head")]
)
def test_invalid_targets_are_a_one_line_error(base, targets, says):
    with pytest.raises(UsageError, match=says) as caught:
        adapted(base, targets=targets)
    assert "\n" not in str(caught.value)


def test_adapters_with_a_missing_base_model_are_a_one_line_error(base, tmp_path):
    (tmp_path / "adapters").mkdir()
    adapted(base).save(tmp_path / "adapters")
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(DataError) as caught:
        open_model(tmp_path / "adapters")
    assert str(caught.value) == (
        f"{tmp_path / 'adapters'}: base model {base} is not a folder on this machine; "
        "restore the folder, change base_model_name_or_path in adapter_config.json, or pass --base-model to chat, eval "
        "and merge"
    )
