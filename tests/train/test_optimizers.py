from __future__ import annotations

import re
import shutil
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_fixtures import SIZES, VOCAB, conversation, packed, small_gpt
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_map
from train_fixtures import config, curve, ranks, trained

from chatmill.errors import DataError, UsageError
from chatmill.train.checkpoint import open_checkpoint, restore, save
from chatmill.train.checkpoint_files import list_checkpoints
from chatmill.train.config import GPTSizes
from chatmill.train.distributed import World
from chatmill.train.low_precision import (
    LowPrecisionAdamW,
    _codes,
    _rounded,
    _tables,
    code_levels,
)
from chatmill.train.model import Inputs
from chatmill.train.optimizers import OPTIMIZER_BYTES, fresh_state, make_optimizer
from chatmill.train.run_config import OptimizerConfig
from chatmill.train.step import Stepper, count_batch, micro_batches, total_norm

NAMES = sorted(OPTIMIZER_BYTES)
LOW = ["adamw8bit", "adamw_bf16"]
CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
WIDE = {"n_embd": 64, "n_ffn": 64}
"""Model sizes for which some parameters have 8-bit moments."""


@given(st.floats(-(2.0**126), 2.0**126, width=32), st.integers(0, 2**30 - 1))
def test_a_float_is_rounded_to_one_of_its_bfloat16_neighbours(value, bits):
    exact = torch.tensor([value])
    rounded = _rounded(exact, torch.tensor([bits], dtype=torch.int32))
    below = (exact.view(torch.int32) & -0x10000).view(torch.float32)
    above = ((exact.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    assert rounded.dtype == torch.bfloat16
    assert rounded.float() in ([exact] if below == exact else [below, above])


@given(st.integers(0x7F800001, 0x7FFFFFFF), st.booleans(), st.integers(0, 2**30 - 1))
def test_nan_stays_nan(payload, is_negative, bits):
    value = torch.tensor([payload | -0x80000000 if is_negative else payload], dtype=torch.int32).view(torch.float32)
    assert _rounded(value, torch.tensor([bits], dtype=torch.int32)).isnan()


def test_stochastic_rounding_preserves_the_mean():
    exact = torch.tensor([1.0 + 1 / 1024, -3.0 - 1 / 512, 1e-5, 0.0]).repeat(1 << 16, 1)
    torch.manual_seed(0)
    rounded = _rounded(exact, torch.randint(0, 1 << 30, exact.shape, dtype=torch.int32)).float()
    torch.testing.assert_close(rounded.mean(0), exact[0], rtol=2e-4, atol=0)


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_codes_are_those_of_dynamic_quantization(is_signed):
    quantization = pytest.importorskip("torchao.optim.quant_utils")
    expected = torch.tensor(quantization.create_dynamic_map(signed=is_signed))
    torch.testing.assert_close(code_levels(is_signed=is_signed), expected)


def test_a_code_is_that_of_the_nearest_value_and_only_zero_is_zero():
    signed, signed_edges, unsigned, unsigned_edges = _tables(CPU)
    values = torch.linspace(-1, 1, 5001)
    nearest = (values[:, None] - signed).abs().amin(1)
    torch.testing.assert_close((values - signed[_codes(values, signed_edges).int()]).abs(), nearest)
    small = torch.tensor([0.0, 1e-20, 1e-7, 1e-6, 1.0])
    assert _codes(small, unsigned_edges).tolist()[:2] == [0, 1]
    assert (unsigned[_codes(small, unsigned_edges).int()][1:] > 0).all()


def test_the_compiled_search_finds_the_same_codes(monkeypatch):
    _, edges, _, _ = _tables(CPU)
    values = torch.cat([torch.linspace(-1, 1, 999), edges, torch.tensor([float("nan")])])
    plain = _codes(values[:-1], edges)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(_codes(values[:-1], edges), plain)


def a_step(optimizer, parameter):
    parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)).to(parameter.dtype)
    optimizer.step()


@pytest.mark.parametrize("eight_bit", [True, False])
@pytest.mark.parametrize("shape", [(), (0,), (0, 256), (256, 0), (5,), (1, 4096), (3, 257), (5, 7, 256), (128, 96)])
def test_weights_of_any_shape_and_stride_get_the_steps_of_adamw(shape, eight_bit):
    numbers = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    for start in (torch.ones(shape), torch.ones(shape[::-1]).permute(tuple(range(len(shape)))[::-1])):
        ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
        optimizers = LowPrecisionAdamW([ours], **numbers, eight_bit=eight_bit), torch.optim.AdamW([theirs], **numbers)
        for _ in range(3):
            a_step(optimizers[0], ours)
            a_step(optimizers[1], theirs)
        # The tolerance allows for rounded moments in three steps of size 0.1.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.06 if eight_bit else 0.006)


@pytest.mark.parametrize("eight_bit", [True, False])
def test_with_float32_weights_the_first_step_equals_adamw(eight_bit):
    numbers = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    ours, theirs = (torch.nn.Parameter(torch.ones(32, 256)) for _ in range(2))
    a_step(LowPrecisionAdamW([ours], **numbers, eight_bit=eight_bit), ours)
    a_step(torch.optim.AdamW([theirs], **numbers), theirs)
    torch.testing.assert_close(ours, theirs)


def test_small_moments_do_not_cause_large_updates_of_a_row_without_gradients():
    # The moments are tiny compared with the largest moment in their block, and later gradients are 0, but m / (√v + ε)
    # must not explode.
    weight = torch.nn.Parameter(torch.zeros(16, 256))
    optimizer = LowPrecisionAdamW([weight], lr=0.1, betas=(0.9, 0.95), eps=1e-8, eight_bit=True)
    weight.grad = 10.0 ** torch.linspace(-12, 0, 256).expand(16, -1).clone()
    for _ in range(20):
        optimizer.step()
        weight.grad = torch.zeros_like(weight)
    assert weight.abs().max() < 20 * 0.1 * 2


def test_vectors_and_odd_matrices_keep_bfloat16_moments():
    optimizer = make_optimizer(small_gpt(), OptimizerConfig(optimizer="adamw8bit"))
    for shape in ((8192,), (100, 100), (16, 16)):
        state = optimizer.fresh_state(torch.zeros(shape))
        assert {name: tensor.dtype for name, tensor in state.items()} == {
            "step": torch.float32,
            "exp_avg": torch.bfloat16,
            "exp_avg_sq": torch.bfloat16,
        }
    state = optimizer.fresh_state(torch.zeros(64, 96, dtype=torch.bfloat16))
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items() if name != "step"} == {
        "exp_avg": ((64, 96), torch.uint8),
        "exp_avg_rms": ((64, 96), torch.uint8),
        "exp_avg_scale": ((64, 3), torch.float32),
        "exp_avg_rms_scale": ((64, 3), torch.float32),
    }


# The step.


def test_the_norm_of_bfloat16_gradients_is_computed_in_float32():
    gradients = [torch.full((1000,), 0.1, dtype=torch.bfloat16), torch.full((50, 50), 3.0, dtype=torch.bfloat16)]
    exact = torch.cat([gradient.double().flatten() for gradient in gradients]).norm()
    assert total_norm(gradients).dtype == torch.float32
    assert abs(float(total_norm(gradients) / exact) - 1) < 1e-6


@pytest.mark.parametrize("name", LOW)
def test_bfloat16_weights_with_float32_compute_have_bfloat16_gradients(name):
    model = small_gpt().to(torch.bfloat16)
    batch = packed([[conversation(30, seed=1)]], 32)
    stepper = Stepper(model, model, ALONE, OptimizerConfig(optimizer=name))
    parts = micro_batches(batch, 1, CPU)
    assert model.hidden(batch.x, batch.positions, batch.segments).dtype == torch.float32
    stepper.gradients(parts, weight=count_batch(batch, parts).weight)
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", NAMES)
def test_fresh_state_matches_the_state_after_a_step(name):
    model = small_gpt().to(torch.bfloat16 if name in LOW else torch.float32)
    optimizer = make_optimizer(model, OptimizerConfig(optimizer=name))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for parameter in model.parameters():
        made = tree_map(lambda tensor: (tensor.shape, tensor.dtype, tensor.device), dict(optimizer.state[parameter]))
        assert made == tree_map(lambda t: (t.shape, t.dtype, t.device), fresh_state(optimizer, parameter))


def test_muon_trains_layer_matrices_and_adamw_all_other_parameters():
    model = small_gpt()
    muon, adamw = make_optimizer(model, OptimizerConfig(optimizer="muon")).parts
    inside = {id(each) for group in muon.param_groups for each in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in inside}
    assert names == {name for name, p in model.named_parameters() if name.startswith("layers.") and p.ndim == 2}
    decays = {group["weight_decay"] for group in adamw.param_groups}
    assert sum(len(group["params"]) for group in adamw.param_groups) == len(list(model.parameters())) - len(names)
    assert decays == {0.1, 0.0}


# Runs.


def files(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "adamw"])
def test_resuming_from_any_step_is_bitwise_exact(sums_data, tmp_path, name):
    often = {
        "optimizer": name,
        "save_interval": 1,
        "keep_checkpoints": 8,
        "max_iters": 4,
        **(WIDE if name in LOW else {}),
    }
    whole = trained(sums_data, tmp_path / "whole", **often)
    for step in (1, 3):
        shutil.copytree(whole.folder, tmp_path / str(step) / "run")
        for path in list_checkpoints(tmp_path / str(step) / "run")[step:]:
            shutil.rmtree(path)
        again = trained(sums_data, tmp_path / str(step), resume="auto", **often)
        assert files(again.checkpoint) == files(whole.checkpoint)
        assert curve(again.folder) == curve(whole.folder)
    stored = load_file(whole.checkpoint / "state-00000-of-00001.safetensors")
    assert all(tensor.dtype != torch.float32 for key, tensor in stored.items() if key.startswith("weights/")) == (
        name in LOW
    )
    assert any(tensor.dtype == torch.uint8 for tensor in stored.values()) == (name == "adamw8bit")


@pytest.mark.parametrize("name", LOW)
def test_another_seed_rounds_differently(sums_data, tmp_path, name):
    # Data and initial weights are equal, so only rounding depends on the seed.
    ends = []
    for seed in (1, 1, 2):
        model = small_gpt().to(torch.bfloat16)
        batch = packed([[conversation(30, seed=1)]], 32)
        stepper = Stepper(model, model, ALONE, OptimizerConfig(optimizer=name))
        parts = micro_batches(batch, 1, CPU)
        torch.manual_seed(int(np.random.default_rng().integers(1 << 30)))
        stepper.step(parts, weight=count_batch(batch, parts).weight, lr=1e-4, key=(seed, 0))
        ends.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


@pytest.mark.parametrize(("name", "parallel"), [("adamw8bit", "fsdp"), ("adamw_bf16", "ddp")])
def test_replicas_stay_identical_and_one_rank_resumes_checkpoints_of_two(sums_data, tmp_path, name, parallel):
    """The two ranks use different random numbers for stochastic rounding."""
    sharded = "sharded" if parallel == "fsdp" else "full"
    often = {"optimizer": name, "parallel": parallel, "checkpoint": sharded, "max_iters": 4, **WIDE, "save_interval": 2}

    def run(rank: int):
        models = []
        from chatmill.train import setup

        make = setup.Stepper
        setup.Stepper = lambda model, *args: models.append(model) or make(model, *args)
        result = trained(sums_data, tmp_path / "two", **often)
        setup.Stepper = make
        from chatmill.train.distributed import whole

        total = [
            whole(parameter.detach()).view(torch.int16).long().sum().item() for parameter in models[0].parameters()
        ]
        return result.loss, total

    first, second = ranks(2, run)
    assert first == second
    run_dir = tmp_path / "two" / "run"
    ended = weights_of_run(run_dir / "step_00000004")
    shutil.rmtree(run_dir / "step_00000004")
    alone = trained(sums_data, tmp_path / "two", resume="auto", **often)
    after = weights_of_run(alone.checkpoint)
    for key, tensor in ended.items():
        # One rank sums gradients in a different order from two ranks, and rounds with different random numbers.
        torch.testing.assert_close(after[key].float(), tensor.float(), atol=0.02, rtol=0.05)


def weights_of_run(checkpoint) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model" / "model.safetensors")


def test_resuming_with_another_optimizer_is_refused(sums_data, tmp_path):
    trained(sums_data, tmp_path, max_iters=2, save_interval=1)
    with pytest.raises(
        UsageError, match="was written with optimizer adamw, but the config selects adafactor; resume with adamw"
    ):
        trained(sums_data, tmp_path, resume="auto", optimizer="adafactor")


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_optimizers_that_need_unsharded_matrices_are_refused_with_fsdp(name):
    with pytest.raises(UsageError, match=f"optimizer is {name} and parallel is fsdp; {name} requires unsharded"):
        config(optimizer=name, parallel="fsdp")


@pytest.fixture
def saved(tmp_path):
    def made(name: str):
        model = small_gpt(replace(SIZES, n_ffn=128)).to(torch.bfloat16 if name in LOW else torch.float32)
        optimizer = make_optimizer(model, OptimizerConfig(optimizer=name))
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        state = {"step": 1, "totals": {"trained": 5}}
        folder = save(tmp_path, state, model, optimizer, ALONE, sharded=False, keep=1, about=None)
        checkpoint, path = open_checkpoint(folder, ALONE), folder / "state-00000-of-00001.safetensors"

        def read(tensors: dict[str, torch.Tensor]) -> None:
            save_file(tensors, path)
            restore(checkpoint, model, make_optimizer(model, OptimizerConfig(optimizer=name)))

        return load_file(path), read

    return made


@pytest.mark.parametrize("name", NAMES)
def test_impossible_optimizer_state_is_refused(saved, name):
    tensors, read = saved(name)
    read(tensors)
    kinds = {key.rsplit("/", 1)[0].removeprefix("optimizer/"): key for key in tensors}
    assert {"weights", "step"} < kinds.keys()
    for kind, key in kinds.items():
        tensor = tensors[key]
        changes = [(tensor.to(torch.int64), "int64 is not part of the")]
        if kind != "weights":
            changes.append((torch.cat([tensor.reshape(-1)] * 2), r"\(\d+,\) .* is not part of the optimizer"))
        if tensor.is_floating_point():
            changes.append((torch.full_like(tensor, torch.nan), "has values that are not finite"))
        if kind == "step":
            changes += [
                (torch.full_like(tensor, number), f"is {number:g}, but the run has 1 steps") for number in (-1, 0.5, 2)
            ]
        elif tensor.is_floating_point() and kind not in ("weights", "exp_avg", "momentum_buffer"):
            changes.append((torch.full_like(tensor, -1), "has negative values"))
        for changed, fault in changes:
            with pytest.raises(DataError, match=f"{re.escape(key)} .*{fault}"):
                read({**tensors, key: changed})
    with pytest.raises(DataError, match="has no optimizer state"):
        read({key: tensor for key, tensor in tensors.items() if key.startswith("weights/")})
    with pytest.raises(DataError, match=r"optimizer state of .* is incomplete"):
        read({key: tensor for key, tensor in tensors.items() if key != kinds["step"]})


@cache
def chain_batch(changed: int, *seed: int):
    table = np.random.default_rng(0).integers(1, VOCAB, (VOCAB, 2))
    table[:changed] = np.random.default_rng(1).integers(1, VOCAB, (changed, 2))
    rng = np.random.default_rng(seed)
    ids = [rng.integers(1, VOCAB, 8)]
    for choice in rng.integers(0, 2, (31, 8)):
        ids.append(table[ids[-1], choice])
    return packed([[(row.tolist(), [1.0] * 32)] for row in np.stack(ids, axis=1)], 32)


def a_run(model, stepper, changed: int, *, lr: float, steps: int, seed: int) -> float:
    for step in range(steps):
        parts = micro_batches(batch := chain_batch(changed, seed, step), 1, CPU)
        weight = count_batch(batch, parts).weight
        stepper.step(parts, weight=weight, lr=lr * (1 - step / steps), key=(seed, step))
    val = [Inputs.of(chain_batch(changed, 99, number), "cpu") for number in range(4)]
    with torch.no_grad():
        return float(np.mean([float(model(*each).total) / each.targets.weight for each in val]))


@pytest.fixture(scope="module")
def converged() -> dict[str, torch.Tensor]:
    model = small_gpt(SMALL)
    stepper = Stepper(model, model, ALONE, OptimizerConfig())
    losses = [a_run(model, stepper, 0, lr=0.01, steps=40, seed=part) for part in range(4)]
    assert losses[-2] - losses[-1] < 0.05 < losses[0] - losses[-1]
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


SMALL = GPTSizes(vocab_size=VOCAB, n_layer=1, n_embd=32, n_head=2, n_ffn=128, max_positions=32)
FINETUNED = {"adamw": 1e-3, "adamw8bit": 1e-3, "adamw_bf16": 1e-3, "muon": 3e-3, "adafactor": 1e-2}
"""Learning rate of each optimizer; adafactor's is relative to the weights."""


def test_each_optimizer_is_close_to_float32_adamw_from_a_converged_model(converged):
    def finetuned(name: str, lr: float, *, nearest: bool = False) -> float:
        model = small_gpt(SMALL)
        model.load_state_dict(converged)
        if name in LOW or nearest:
            model.to(torch.bfloat16)
        stepper = Stepper(model, model, ALONE, OptimizerConfig(optimizer=name, weight_decay=0.0))
        return a_run(model, stepper, 6, lr=lr, steps=30, seed=7)

    losses = {name: finetuned(name, lr) for name, lr in FINETUNED.items()}
    assert max(abs(losses[name] - losses["adamw"]) for name in LOW) < 0.02
    assert max(losses.values()) < losses["adamw"] + 0.1
    # With rounding to nearest instead of stochastic rounding, the loss is clearly higher.
    assert finetuned("adamw", 1e-3, nearest=True) > losses["adamw"] + 0.04
