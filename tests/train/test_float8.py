"""Test training with float8 matrix products that are emulated on the CPU; test_gpu.py tests them on a GPU."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from model_fixtures import SIZES, conversation, inputs, packed, small_gpt
from train_fixtures import config, trained

from chatmill.errors import UsageError
from chatmill.train.float8 import check_float8, use_float8

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_float8_losses_and_gradients_are_close_and_parameter_names_unchanged(compute):
    batch = inputs(packed([[conversation(30, seed=seed)] for seed in range(4)], 32))
    results = []
    for is_float8 in (False, True):
        model = small_gpt(compute=compute)
        names = list(model.state_dict())
        if is_float8:
            use_float8(model, emulate=True)
            model.checkpoint_blocks()
        losses = model(*batch)
        losses.total.backward()
        assert list(model.state_dict()) == names
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        results.append((float(losses.total.detach()) / batch.targets.weight, gradient))
    (exact, gradient), (rounded, other) = results
    assert 0 < abs(rounded - exact) < 0.03
    assert F.cosine_similarity(gradient, other, dim=0) > 0.95


def test_a_hugging_face_model_is_converted_to_float8_except_its_head(tmp_path):
    from model_fixtures import save_qwen

    from chatmill.train.load_model import open_model

    model = open_model(save_qwen(tmp_path / "qwen", head_dim=16))
    batch = inputs(packed([[conversation(30, seed=1)]], 32))
    exact = float(model(*batch).total.detach())
    names = list(model.state_dict())
    use_float8(model, emulate=True)
    assert type(model.lm.model.layers[0].mlp.up_proj).__name__ == "Float8Linear"
    assert type(model.lm.lm_head) is torch.nn.Linear
    assert list(model.state_dict()) == names
    assert 0 < abs(float(model(*batch).total.detach()) - exact) / batch.targets.weight < 0.03


def test_layer_sizes_that_are_not_multiples_of_16_are_refused():
    with pytest.raises(UsageError, match=r"fp8 is true, and layer mlp.gate is 32 × 40; float8 requires multiples"):
        use_float8(small_gpt(replace(SIZES, n_ffn=40)))


def test_a_float8_run_without_a_gpu_is_refused(sums_data, tmp_path):
    with pytest.raises(UsageError, match="fp8 is true, and the device is a CPU; float8 requires a GPU of compute"):
        trained(sums_data, tmp_path, fp8=True)
    assert list(tmp_path.iterdir()) == []


def test_unsupported_gpus_and_row_lengths_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    for capability, block_size, message in (
        ((8, 0), 512, r"NVIDIA A100 \(compute capability 8.0\)"),
        ((9, 0), 500, "block_size is 500; float8 requires a multiple of 16"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        with pytest.raises(UsageError, match=message):
            check_float8(torch.device("cuda"), block_size=block_size)


def test_float8_with_lora_is_refused():
    with pytest.raises(UsageError, match="fp8 is true and lora is set"):
        config(fp8=True, lora={}, init_from_model="x")
