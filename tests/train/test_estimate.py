from __future__ import annotations

import importlib
import json
import operator
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._functorch.config as partitioner
import torch.distributed as dist
from model_fixtures import SIZES, VOCAB
from torch.autograd.graph import saved_tensors_hooks
from train_fixtures import config, trained
from transformers import AutoConfig, AutoModelForCausalLM

from chatmill.cli.guard import guarded
from chatmill.cli.main import main as chatmill
from chatmill.errors import UsageError
from chatmill.train import GPT
from chatmill.train.activations import count_activations
from chatmill.train.command import main
from chatmill.train.config import GPTSizes, TrainConfig, size_keys
from chatmill.train.distributed import World, local
from chatmill.train.estimate import GIB, Estimator
from chatmill.train.fitting import DoesNotFitError, Fit, estimate_run, fit_run
from chatmill.train.hf import HFModel
from chatmill.train.optimizers import OPTIMIZER_BYTES
from chatmill.train.preflight import make_model
from chatmill.train.step import Stepper

ROOT = Path(__file__).resolve().parents[2]
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ARCHITECTURES = {
    "llama": COMMON,
    "gemma2": COMMON | {"head_dim": 16, "sliding_window": 3},
    "gpt2": {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64},
}
LARGE = {"n_layer": 8, "n_embd": 1024, "n_head": 16, "n_ffn": 3072, "vocab_size": 50_000, "block_size": 4096}


def memory_table():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module("memory_table")
    finally:
        sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **COMMON)).bfloat16().save_pretrained(folder)
    return folder


def state_bytes(stepper: Stepper) -> list[int]:
    for parameter in stepper.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    stepper.optimizer.step()
    weights = [*stepper.model.parameters(), *stepper.model.buffers()]
    states = [each for state in stepper.optimizer.state.values() for each in state.values() if torch.is_tensor(each)]
    gradients = [each.grad for each in weights if each.grad is not None]
    return [sum(local(each.detach()).nbytes for each in part) for part in (weights, gradients, states)]


def own(**changes) -> TrainConfig:
    sizes = {name: getattr(SIZES, name) for name in size_keys()}
    return config(**sizes | {"n_embd": 64, "n_ffn": 96, "n_layer": 3} | changes)


@pytest.mark.parametrize(
    "changes",
    [*({"optimizer": name} for name in OPTIMIZER_BYTES), {"lora": {"r": 4}}, {"optimizer": "muon", "hf": True}],
)
def test_estimated_weights_gradients_and_optimizer_state_equal_those_of_a_real_run(changes, llama):
    hf = "lora" in changes or changes.get("hf")
    keys = {name: value for name, value in changes.items() if name != "hf"}
    run = config(init_from_model=str(llama), **keys) if hf else own(**keys)
    estimate = Estimator(on_gpu=False, vocab_size=VOCAB)(run)
    world = World(0, 1, torch.device("cpu"))
    model = make_model(run, VOCAB, compute=None)
    parts = [estimate.parts[name].size for name in ("weights", "gradients", "optimizer")]
    assert parts == state_bytes(Stepper(model, model, world, run))
    assert estimate.state == sum(parts)


@pytest.fixture(params=[0, 2])
def first_or_last_of_three(request):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=3)
    yield World(request.param, 3, torch.device("cpu"))
    dist.destroy_process_group()


def test_estimated_shards_equal_those_that_ranks_hold(first_or_last_of_three):
    world = first_or_last_of_three
    for name in ("adamw", "adamw8bit"):
        run = own(parallel="fsdp", optimizer=name, batch_size=6)
        model = make_model(run, VOCAB, compute=None)
        held = state_bytes(Stepper(model, world.distribute(model, sharded=True, compute=None), world, run))
        estimate = Estimator(on_gpu=False, vocab_size=VOCAB)(run, ranks=3)
        parts = [estimate.parts[name].size for name in ("weights", "gradients", "optimizer")]
        # The estimate is for the first rank, whose shard of every weight has the most rows.
        assert parts == pytest.approx(held) if world.is_first else all(map(operator.ge, parts, held))


# Activations.


def really_saved(model, run) -> int:
    weights = {each.untyped_storage()._cdata for each in [*model.parameters(), *model.buffers()]}
    storages = {}

    def save(tensor):
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for key, storage in storages.items() if key not in weights)


@pytest.mark.parametrize(
    ("name", "compute"),
    [("own", None), ("own", torch.bfloat16), ("llama", torch.bfloat16), ("gemma2", None), ("gpt2", None)],
)
def test_counted_activations_equal_those_that_autograd_saves(name, compute):
    rows, length = 2, 32
    x = torch.zeros(rows, length, dtype=torch.long)
    positions, segments = (torch.arange(length) % 16).repeat(rows, 1), (torch.arange(length) // 16).repeat(rows, 1)
    sizes = GPTSizes(vocab_size=VOCAB, n_layer=3, n_embd=64, n_head=4, n_kv_head=2, n_ffn=96, qk_norm=True)

    def make():
        if name == "own":
            return GPT(sizes, compute=compute)
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **ARCHITECTURES[name]))
        return HFModel(lm.float(), compute=compute, separates=True).train()

    model = make()
    saved = really_saved(model, lambda: model.hidden(x, positions, segments))
    with torch.device("meta"):
        shape = make()
    counted = count_activations(shape, rows, length, on_gpu=False)
    assert len(counted.layers) == 3
    assert counted.outside + sum(each.eager + each.casts for each in counted.layers) == saved


def test_compiled_layers_recompute_elementwise_results_and_keep_matrix_products():
    sizes = GPTSizes(vocab_size=VOCAB, n_layer=4, n_embd=64, n_head=4, n_kv_head=2, n_ffn=96, qk_norm=True)
    with torch.device("meta"):
        model = GPT(sizes, compute=torch.bfloat16)
    layer = count_activations(model, 2, 64, on_gpu=True).layers[-1]
    width, heads, kv, ffn = 64, 64, 32, 96
    projections = heads + 2 * kv
    # Kept values: layer input, projections, rotated queries and keys, attention output, residual sum, gate and up.
    values = width + projections + heads + kv + heads + width + 2 * ffn
    norms, largest = 4 * (2 + 4 + 2), 4 * 4
    assert 2 * values <= layer.compiled / (2 * 64) <= 2 * values + norms + largest
    # Additional inputs of matrix products: the outputs of both norms, and the product of gate and up.
    inputs = 2 * width + ffn
    assert 2 * (values + inputs) <= layer.compiled_inputs / (2 * 64) <= 2 * (values + inputs) + norms + largest
    assert layer.input == 2 * 2 * 64 * width
    assert layer.casts == 2 * (width * (projections + heads) + 3 * width * ffn)
    assert layer.eager > layer.compiled_inputs


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@partitioner.patch(activation_memory_budget=1.0)
def test_a_compiled_model_keeps_the_counted_activations(compute):
    sizes = GPTSizes(vocab_size=VOCAB, n_layer=3, n_embd=64, n_head=4, n_kv_head=2, n_ffn=96, qk_norm=True)
    x = torch.zeros(2, 64, dtype=torch.long)
    positions, segments = torch.arange(64).repeat(2, 1), torch.zeros_like(x)

    def kept(*, recompute: bool) -> int:
        torch._dynamo.reset()
        model = GPT(sizes, compute=compute)
        model.compile_blocks(recompute=recompute)
        for block in model.blocks():
            # torch decides what to keep before it generates kernels, so use a backend that does not generate kernels.
            block.compile(backend="aot_eager_decomp_partition", dynamic=False)
        return really_saved(model, lambda: model.hidden(x, positions, segments))

    with torch.device("meta"):
        shape = GPT(sizes, compute=compute)
    counted = count_activations(shape, 2, 64, on_gpu=False)
    expected = counted.outside + sum(each.compiled for each in counted.layers)
    assert expected <= kept(recompute=True) <= 1.05 * expected
    default = counted.outside + sum(each.compiled_inputs + each.casts for each in counted.layers)
    assert default == pytest.approx(kept(recompute=False), rel=0.15)
    assert kept(recompute=True) < 0.75 * kept(recompute=False)


def test_estimates_of_architectures_that_cannot_be_counted_are_marked_approximate(tmp_path):
    made = AutoConfig.for_model("opt", **COMMON | {"ffn_dim": 96, "word_embed_proj_dim": 64})
    AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path)
    run = config(init_from_model=str(tmp_path), batch_size=4)
    estimate = Estimator(on_gpu=False)(run)
    assert estimate.approximate is not None
    assert any(line.startswith("activations are approximate: ") for line in Fit(estimate, 1e9).notes())
    # Autograd saves at least the input and the output of every matrix product.
    assert estimate.parts["activations"].size >= 4 * 4 * run.block_size * 3 * (4 * 128 + 2 * 160)


# Measured runs.


def test_estimates_are_within_15_percent_of_measured_memory(tmp_path):
    table = memory_table()
    lines = {name: (estimated, gib) for name, _, estimated, gib in table.compared(tmp_path)}
    assert set(lines) >= table.FITTED | {"1.7b-own-adamw", "4b-own-adamw", "8b-hf-qlora"}
    for name, (estimated, gib) in lines.items():
        assert abs(estimated / gib - 1) < (0.03 if name in table.FITTED else 0.15), name
    page = (ROOT / "docs/explanation/models.md").read_text("utf-8")
    for name, (estimated, gib) in lines.items():
        assert re.search(rf"\| `{name}` \|[^|]+\| {estimated:.1f} \| {gib:.1f} \|", page), name


def test_the_docs_page_lists_which_model_fits_which_gpu(tmp_path):
    table = memory_table()
    page = (ROOT / "docs/explanation/models.md").read_text("utf-8").splitlines()
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in page if line.count("|") == 7}
    ways = ["full, `adamw8bit`"]
    made = [line.split("|")[1:3] for line in table.fitting_table(tmp_path, ["4 B"], ways)][2:]
    for way, cell in made:
        assert rows[way.strip()][1] == cell
    assert set(rows) >= set(table.WAYS)


# Parts together.


def test_each_key_that_saves_memory_lowers_the_estimate():
    estimator = Estimator(on_gpu=True)

    def peak(*, ranks: int = 1, **changes) -> dict[str, float]:
        estimate = estimator(TrainConfig(**LARGE | changes), ranks=ranks)
        return {name: part.size / GIB for name, part in estimate.parts.items()} | {"total": estimate.total / GIB}

    plain = peak()
    assert peak(gradient_accumulation_steps=4)["activations"] < plain["activations"] / 3
    kept = peak(activation_checkpointing=True)
    assert kept["total"] < plain["total"]
    assert peak(activation_offload=True)["activations"] < kept["activations"]
    assert peak(optimizer="adamw8bit")["optimizer"] < plain["optimizer"] / 3
    assert peak(dtype="float32")["activations"] > 1.8 * plain["activations"]
    assert peak(compile=False)["activations"] > 1.3 * plain["activations"]
    assert peak(fp8=True)["activations"] < 0.9 * plain["activations"]
    ddp, fsdp = peak(ranks=4), peak(ranks=4, parallel="fsdp")
    assert ddp["weights"] == plain["weights"]
    assert ddp["activations"] == pytest.approx(plain["activations"] / 4, rel=0.1)
    assert fsdp["weights"] == pytest.approx(plain["weights"] / 4, rel=0.01)
    assert fsdp["gathered"] > 0


def test_activation_offload_counts_host_memory():
    estimate = Estimator(on_gpu=True)(TrainConfig(**LARGE, activation_offload=True))
    assert estimate.host == 8 * 8 * 4096 * 1024 * 2
    assert any("GiB of host memory" in line for line in Fit(estimate, None).notes())


def test_rows_that_cannot_be_divided_among_ranks_are_refused():
    with pytest.raises(UsageError, match="batch_size 8 cannot be divided among 3 ranks"):
        Estimator(on_gpu=True)(TrainConfig(**LARGE), ranks=3)


def test_changes_that_fit_are_suggested_cheapest_first():
    fit = estimate_run(TrainConfig(**LARGE), gpu_memory=8)
    assert (fit.fits, fit.is_refused) == (False, True)
    keys = [next(iter(change.keys)) for change in fit.changes]
    order = "gradient_accumulation_steps activation_checkpointing activation_offload optimizer parallel block_size"
    assert sorted(keys, key=order.split().index) == keys
    assert set(keys) == set(order.split())
    fitting = next(change for change in fit.changes if change.estimate.total <= 8 * GIB)
    assert f"{fitting.flags(1)} ({fitting.estimate.total / GIB:.1f} GiB)" in fit.refusal()


def test_adapters_are_suggested_for_a_hugging_face_model(llama):
    run = config(init_from_model=str(llama), device="auto")
    total = estimate_run(run, gpu_memory=1e3).estimate.total
    fit = fit_run(Estimator(on_gpu=True), run, ranks=1, available=0.9 * total)
    flags = [change.flags(1) for change in fit.changes]
    assert "--lora '{\"r\": 16}'" in flags
    assert "--lora '{\"r\": 16}' --quantize nf4" in flags
    assert not fit.is_refused


def test_changes_are_combined_if_no_single_change_fits():
    run = TrainConfig(**LARGE | {"vocab_size": 1000, "batch_size": 64})
    changed = replace(run, gradient_accumulation_steps=64, activation_offload=True, optimizer="adamw8bit")
    smallest = Estimator(on_gpu=True)(changed).total
    fit = estimate_run(run, gpu_memory=1.01 * smallest / GIB)
    assert fit.changes[-1].keys == {
        "gradient_accumulation_steps": 64,
        "activation_offload": True,
        "optimizer": "adamw8bit",
    }
    assert fit.changes[-1].estimate.total == smallest


def test_a_run_that_cannot_fit_is_refused_before_the_model_is_created(sums_data, tmp_path, monkeypatch):
    def train_with(available: float, **changes) -> None:
        monkeypatch.setattr("chatmill.train.fitting.available_memory", lambda: available)
        trained(sums_data, tmp_path / "out", max_iters=1, **changes)

    with monkeypatch.context() as patched:
        patched.setattr("chatmill.train.preflight.GPT", None)
        with pytest.raises(DoesNotFitError) as error:
            train_with(20_000.0)
        assert re.fullmatch(
            r"the run needs about [0-9.]+ GiB of host memory, but 0.0 GiB are available; .+; pass --estimate to "
            "see the details, or --check_memory false to run anyway",
            str(error.value),
        )
    assert not (tmp_path / "out").exists()
    train_with(20_000.0, check_memory=False)
    assert (tmp_path / "out").exists()


def test_a_run_that_fits_easily_is_not_estimated(sums_data, tmp_path, monkeypatch):
    monkeypatch.setattr("chatmill.train.fitting.available_memory", lambda: 2.0**34)
    monkeypatch.setattr("chatmill.train.fitting.Estimator", None)
    trained(sums_data, tmp_path, max_iters=1)


def test_the_commands_print_an_estimate_and_write_nothing(sums_data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = ["--n_layer", "2", "--n_embd", "64", "--n_head", "4"]
    args = [*sizes, "--dataset_dir", str(sums_data), "--batch-size", "8", "--estimate", "--gpus", "2"]
    main([*args, "--gpu-memory", "16"])
    plain = capsys.readouterr().out
    assert [line.split()[0] for line in plain.splitlines()[:8]] == [
        *("GiB", "weights", "gradients", "optimizer", "activations", "workspace", "CUDA", "total")
    ]
    assert plain.splitlines()[8:] == [
        "2 GPUs, 4 rows of 512 tokens at a time; memory use peaks at the loss",
        "fits: 16.0 GiB available",
    ]
    monkeypatch.setattr(sys, "argv", ["chatmill", "train", *args])
    with pytest.raises(SystemExit) as ended:
        chatmill()
    assert ended.value.code in (0, None)
    assert "pass --gpu_memory GIB to check whether the run fits\n" in capsys.readouterr().out
    main([*args, "--gpu_memory", "0.01", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (result["fits"], result["ranks"], result["rows"], result["device"]) == (False, 2, 4, "cuda")
    assert result["total"] == pytest.approx(sum(part["at_peak"] for part in result["parts"].values()), abs=9)
    assert all(change["total"] > 0 for change in result["changes"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gpus", "2"], "--gpus requires --estimate"),
        (["--gpu_memory", "24"], "--gpu_memory requires --estimate"),
        (["--estimate", "--gpus", "none"], "gpus is"),
        (["--estimate", "--device", "cpu", "--gpus", "2"], "device is cpu, but --gpus applies to GPUs"),
        (["--estimate"], "vocab_size is missing; set dataset_dir or vocab_size"),
        (["--estimate", "--init_from_model", "nowhere"], "nowhere: no such folder"),
    ],
)
def test_wrong_flags_are_usage_errors(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        guarded(lambda: main(args))
    err = capsys.readouterr().err
    assert (ended.value.code, err.count("\n")) == (2, 1)
    assert message in err
