"""Train a small model on a GPU with every training option, and compare losses: `python scripts/gpu_check.py`.

Each variant trains, stops halfway, and resumes from its checkpoint. The losses must be close to those of float32 on the
CPU, and the steps must not make the host wait for the GPU. The script requires numpy, torch, safetensors and one GPU,
and may run for more than five minutes, because it compiles each variant. If transformers and peft are installed, the
script also checks Hugging Face models and LoRA; if bitsandbytes is installed, it also checks QLoRA.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))

from chatmill.train import sharded_save
from chatmill.train.config import TrainConfig
from chatmill.train.load_model import open_ready
from chatmill.train.loop import train_model
from chatmill.train.run_dir import read_metrics

STEPS = 12
CLOSE = 0.02
"""Maximum difference between bfloat16 and float32 losses."""
WAYS: dict[str, dict[str, Any]] = {
    "float32 on the CPU": {"device": "cpu"},
    "float32": {"dtype": "float32", "compile": False},
    "bfloat16": {"compile": False},
    "bfloat16, compiled": {},
    "compiled, checkpointed": {"activation_checkpointing": True},
    "compiled, offloaded": {"activation_offload": True},
    "losses by row": {"compile": False, "log_rows": True},
    "ddp": {"parallel": "ddp"},
    "fsdp": {"parallel": "fsdp"},
    "fsdp, checkpointed": {"parallel": "fsdp", "activation_checkpointing": True},
    "fsdp, offloaded": {"parallel": "fsdp", "activation_offload": True},
    "fsdp, sharded files": {"parallel": "fsdp", "checkpoint": "sharded"},
    "adamw8bit": {"optimizer": "adamw8bit"},
    "adamw_bf16": {"optimizer": "adamw_bf16"},
    "fsdp, adamw8bit": {"parallel": "fsdp", "optimizer": "adamw8bit"},
}
QLORA: dict[str, Any] = {"lora": {"r": 8}, "quantize": "nf4", "learning_rate": 3e-3}
QLORA_WAYS: dict[str, dict[str, Any]] = {
    "QLoRA on the CPU": {"device": "cpu", "dtype": "float32"},
    "QLoRA": {"compile": False},
    "QLoRA, compiled": {},
    "QLoRA, checkpointed": {"activation_checkpointing": True},
    "QLoRA, offloaded": {"activation_offload": True},
    "QLoRA, ddp": {"parallel": "ddp"},
}
HF_WAYS: dict[str, dict[str, Any]] = {
    "Hugging Face on the CPU": {"device": "cpu", "dtype": "float32"},
    "Hugging Face": {},
    "Hugging Face, fsdp": {"parallel": "fsdp"},
    "Hugging Face, fsdp, plain": {"parallel": "fsdp", "compile": False, "activation_checkpointing": True},
}
LORA: dict[str, Any] = {"lora": {"r": 8}, "learning_rate": 3e-3}
LORA_WAYS: dict[str, dict[str, Any]] = {
    "LoRA on the CPU": {"device": "cpu", "dtype": "float32"},
    "LoRA": {},
    "LoRA, fsdp": {"parallel": "fsdp"},
    "LoRA, fsdp, plain": {"parallel": "fsdp", "compile": False, "activation_checkpointing": True},
}
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29417"}


def write_data(folder: Path) -> Path:
    """Write a dataset without metadata, as other programs do: ascending token ids, and a loss mask that selects the
    second half of each episode.
    """
    shard = folder / "train" / "shard_00000"
    shard.mkdir(parents=True)
    rng = np.random.default_rng(0)
    lengths = rng.integers(40, 200, 400)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    np.concatenate([(rng.integers(1000) + np.arange(length)) % 1000 for length in lengths]).astype("<u2").tofile(
        shard / "tokens.bin"
    )
    np.concatenate([np.arange(length) > length // 2 for length in lengths]).astype("u1").tofile(shard / "mask.bin")
    np.stack([starts, lengths], axis=1).astype("<u8").tofile(shard / "episodes.idx")
    return folder


def write_model(folder: Path) -> Path:
    """Save a small Qwen3 with random bfloat16 weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    sizes = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    AutoModelForCausalLM.from_config(Qwen3Config(**sizes, **heads), dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def config(data: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "dataset_dir": str(data),
        "batch_size": 8,
        "gradient_accumulation_steps": 2,
        "block_size": 512,
        "packing": "bins",
        "use_loss_mask": True,
        "pad_token_id": 0,
        "n_layer": 4,
        "n_embd": 256,
        "n_head": 4,
        "n_kv_head": 2,
        "max_positions": 512,
        "max_iters": STEPS,
        "save_interval": STEPS // 2,
        "eval_interval": 0,
        "audit_dir": None,
    }
    return TrainConfig.from_mapping({**values, **changes})


def losses(data: Path, out: Path, name: str, **changes: Any) -> list[float]:
    """Return the loss of every step of a run that is stopped halfway and resumed."""
    ranks = "parallel" in changes
    for variable, value in ONE_RANK.items():
        os.environ.pop(variable, None)
        if ranks:
            os.environ[variable] = value
    run = name.replace(" ", "_").replace(",", "")
    settings = config(data, **changes)

    def stop(step: Any) -> None:
        if step.step == STEPS // 2 + 2:
            raise KeyboardInterrupt

    for resume, watch in ((None, stop), ("auto", None)):
        try:
            train_model(settings, model_name=run, out_dir=out, resume=resume, watch=watch, quiet=True)
        except KeyboardInterrupt:
            continue
    if "log_rows" in changes:
        lines = (out / run / "rows" / "rank_00000.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))
    if changes.get("parallel") == "fsdp":
        # Check that a sharded checkpoint opens as one model.
        assert open_ready(out / run).num_parameters > 0
    return [line["loss"] for line in read_metrics(out / run)]


def waits(optimizer: str) -> int:
    """Return the number of operations that made the host wait for the GPU during the steps of a run."""
    with warnings.catch_warnings(record=True) as seen, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        data = write_data(Path(folder) / "data")

        def watch(step: Any) -> None:
            torch.cuda.set_sync_debug_mode("warn" if 3 <= step.step < STEPS - 1 else "default")

        settings = config(data, save_interval=0, log_rows=True, optimizer=optimizer)
        train_model(settings, model_name="waits", out_dir=Path(folder), watch=watch, quiet=True)
        torch.cuda.set_sync_debug_mode("default")
        found = [each for each in seen if "called a synchronizing CUDA operation" in str(each.message)]
    for place in sorted({f"{each.filename}:{each.lineno}" for each in found}):
        print(f"  the host waited at {place}")
    return len(found)


def compare(data: Path, folder: Path, ways: dict[str, dict[str, Any]]) -> int:
    """Train each variant; return how many failed or have losses far from those of the first variant."""
    faults = 0
    right: list[float] = []
    for name, changes in ways.items():
        began = time.perf_counter()
        try:
            curve = losses(data, folder, name, **changes)
        except Exception:
            traceback.print_exc()
            faults += 1
            continue
        right = right or curve
        far = max(abs(one - other) for one, other in zip(curve, right, strict=True))
        faults += far > CLOSE
        seconds = time.perf_counter() - began
        print(f"{name:<24} {curve[0]:.5f} to {curve[-1]:.5f}, difference {far:.5f}, {seconds:.1f} s", flush=True)
    return faults


def main() -> int:
    if not torch.cuda.is_available():
        print("torch does not find a GPU")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(Path(folder) / "data")
        ways = dict(WAYS)
        if find_spec("torchao") is not None and torch.cuda.get_device_capability() >= (8, 9):
            ways["fp8"] = {"fp8": True}
        # Lower the size limit of weight files, so that this small model is saved in several files.
        sharded_save.SHARD_BYTES = 1 << 18
        faults = compare(data, Path(folder), ways)
        if all(find_spec(name) for name in ("transformers", "peft")):
            model = {"init_from_model": str(write_model(Path(folder) / "model"))}
            faults += compare(data, Path(folder), {name: model | changes for name, changes in HF_WAYS.items()})
            faults += compare(data, Path(folder), {name: model | LORA | changes for name, changes in LORA_WAYS.items()})
        if all(find_spec(name) for name in ("transformers", "peft", "bitsandbytes")):
            base = {"init_from_model": str(write_model(Path(folder) / "base")), **QLORA}
            faults += compare(data, Path(folder), {name: base | changes for name, changes in QLORA_WAYS.items()})
    for variable in ONE_RANK:
        os.environ.pop(variable, None)
    count = sum(map(waits, ("adamw", "adamw8bit")))
    print(f"operations that made the host wait: {count}")
    return 1 if faults or count else 0


if __name__ == "__main__":
    sys.exit(main())
