"""Compare each optimizer with float32 AdamW, starting from a model trained to convergence.

    python benchmarks/optimizers.py prepare -o TOKENS [--conversations FILE ...]
    python benchmarks/optimizers.py train TOKENS --out optimizers.json [--fp8] [--small]

`prepare` writes token files from text on this machine: Python sources for pretraining, conversations and other prose
for fine-tuning. `train` requires only numpy, torch and safetensors (torchao for --fp8). The steps of `train` are:

1. Train a GPT with 34M parameters on the Python sources with adamw. The learning rate is constant until the validation
   loss falls by less than 0.005 nats in four evaluations, and then decays to zero.

2. Select a learning rate for adamw, adafactor and muon on the tuning split. adamw8bit, adamw_bf16 and fp8 use
   adamw's learning rate.

3. Fine-tune the GPT with each optimizer and three seeds, which determine the data order and the stochastic rounding.

4. Compare each validation loss with that of adamw for the same seed. The mean difference must be at most 0.02 nats.

"nearest" is the control: AdamW on bfloat16 weights, rounded to nearest. The limit of 0.02 nats does not apply to the
control. Each result is written as soon as it is available. A restarted run continues after the last result.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MOST = 0.02
FALL = 0.005
PATIENCE = 4
SEEDS = (1, 2, 3)
RATES = {
    "adamw": (3e-5, 1e-4, 3e-4, 1e-3),
    "adafactor": (1e-3, 3e-3, 1e-2, 3e-2),
    "muon": (3e-5, 1e-4, 3e-4, 1e-3),
}
"""Learning rates to try; for adafactor, they are relative to the RMS of the weights."""
SAME_RATE = {"adamw8bit": "adamw", "adamw_bf16": "adamw", "fp8": "adamw", "nearest": "adamw"}
CONTROL = "nearest"
PRETRAIN_RATE = 1e-3
SPLITS = ("pretrain", "pretrain_val", "finetune", "finetune_tune", "finetune_val")


@dataclass(frozen=True)
class Size:
    model: dict[str, int]
    rows: int
    length: int
    val_batches: int
    pretrain_steps: int
    """Maximum number of pretraining steps."""
    eval_every: int
    cooldown: int
    finetune_steps: int
    """Maximum number of steps, within one pass over the data."""
    seeds: Sequence[int] = SEEDS


FULL = Size({"n_layer": 8, "n_embd": 512, "n_head": 8, "n_ffn": 1408}, 32, 512, 6, 6000, 200, 300, 150)
SMALL = Size({"n_layer": 2, "n_embd": 64, "n_head": 2, "n_ffn": 128}, 4, 32, 2, 30, 10, 5, 4, (1, 2))


# Prepare.


def prepare(folder: Path, conversations: Sequence[Path], *, megabytes: float) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    sources = list(_sources(int(megabytes * 1e6)))
    prose = list(_prose(conversations))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16384,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*sources[::4], *prose[::2]], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for name, texts, parts in (
        ("pretrain", sources, (("pretrain", 0.97), ("pretrain_val", 1.0))),
        ("finetune", prose, (("finetune", 0.8), ("finetune_tune", 0.9), ("finetune_val", 1.0))),
    ):
        order = np.random.default_rng(0).permutation(len(texts))
        encoded = tokenizer.encode_batch_fast([texts[at] for at in order], add_special_tokens=False)
        start = 0
        for split, share in parts:
            stop = round(share * len(encoded))
            ids = np.concatenate([np.array([*each.ids, 0], dtype=np.uint16) for each in encoded[start:stop]])
            np.save(folder / f"{split}.npy", ids)
            counts[split], start = len(ids), stop
        print(f"{name}: {len(texts):,} texts, {sum(map(len, texts)) / 1e6:.1f} MB")
    about = {"vocab_size": tokenizer.get_vocab_size(), "tokens": counts}
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(about), f"{sum(path.stat().st_size for path in folder.iterdir()) / 1e6:.1f} MB")


def _sources(limit: int) -> Iterator[str]:
    """Yield the text of Python files in the standard library and in installed packages, ordered by a hash of the file
    path.
    """
    import hashlib
    import sysconfig

    root = Path(sysconfig.get_paths()["stdlib"])
    packages = Path(sysconfig.get_paths()["purelib"])
    paths = sorted({*root.rglob("*.py"), *packages.rglob("*.py")}, key=lambda path: (path.name, str(path)))
    paths.sort(key=lambda path: hashlib.sha256("/".join(path.parts[-3:]).encode()).digest())
    taken, known = 0, set()
    for path in paths:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            continue
        if 2000 < len(text) < 200_000 and (key := hash(text)) not in known:
            known.add(key)
            taken += len(text)
            yield text
        if taken > limit:
            return


def _prose(conversations: Sequence[Path]) -> Iterator[str]:
    import sysconfig

    for path in conversations:
        for file in sorted(path.rglob("*.json*")) if path.is_dir() else [path]:
            yield from _texts(file)
    packages = Path(sysconfig.get_paths()["purelib"])
    for path in sorted({*packages.rglob("METADATA"), *packages.rglob("*.md"), *packages.rglob("*.rst")}):
        text = path.read_text(errors="ignore")
        if len(text) > 500:
            yield text[:50_000]


def _texts(path: Path) -> Iterator[str]:
    """For each record of a JSON or JSONL file, yield its strings of more than 15 characters, joined by newlines."""
    raw = path.read_text(errors="ignore")
    try:
        records = json.loads(raw)
        records = records if isinstance(records, list) else [records]
    except ValueError:
        records = []
        for line in raw.splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                continue
    for record in records:
        text = "\n".join(each for each in _strings(record) if len(each) > 15)
        if len(text) > 100:
            yield text[:20_000]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


# Train.


class Training:
    """The token data, and one compiled model per precision; every run loads new weights into the compiled model."""

    def __init__(self, folder: Path, size: Size, device: str) -> None:
        import torch

        self.size, self.device = size, torch.device(device)
        self.data = {split: np.load(folder / f"{split}.npy") for split in SPLITS}
        self.vocab_size = json.loads((folder / "about.json").read_text())["vocab_size"]
        self.models: dict[str, Any] = {}

    def model(self, kind: str, weights: dict[str, Any] | None) -> Any:
        import torch

        from chatmill.train.config import GPTSizes
        from chatmill.train.gpt import GPT

        if kind not in self.models:
            torch.manual_seed(0)
            sizes = GPTSizes(vocab_size=self.vocab_size, max_positions=self.size.length, **self.size.model)
            is_gpu = self.device.type == "cuda"
            model = GPT(sizes, compute=torch.bfloat16 if is_gpu else None).to(self.device)
            if kind == "bfloat16":
                model.to(torch.bfloat16)
            if kind == "fp8":
                from chatmill.train.float8 import use_float8

                use_float8(model, emulate=not is_gpu)
            if is_gpu:
                model.compile_blocks()
            self.models[kind] = model
        model = self.models[kind]
        if weights is not None:
            model.load_state_dict(weights)
        return model

    def stepper(self, name: str, model: Any, lr: float) -> Any:
        import torch

        from chatmill.train.config import OptimizerConfig
        from chatmill.train.distributed import World
        from chatmill.train.step import Stepper

        plain = name in ("fp8", CONTROL)
        # Weight decay is multiplied by the learning rate, and adafactor's learning rates are about 30 times adamw's.
        decay = 0.1 if name != "adafactor" else 0.003
        settings = OptimizerConfig(optimizer="adamw" if plain else name, learning_rate=lr, weight_decay=decay)
        return Stepper(model, model, World(0, 1, torch.device(self.device)), settings)

    def parts(self, split: str, starts: Any) -> list[Any]:
        """Return one micro-batch of the token windows that begin at the offsets `starts`. The loss includes every
        token.
        """
        import torch

        from chatmill.train.loss import TrainedPositions, moved
        from chatmill.train.model import Inputs
        from chatmill.train.step import MicroBatch

        length, tokens = self.size.length, self.data[split]
        rows = np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)
        x, y = torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())
        positions = torch.arange(length, dtype=torch.int32).expand(len(rows), -1).contiguous()
        targets = TrainedPositions.of(y, torch.ones(y.shape)).to(self.device)
        segments = torch.zeros_like(positions)
        inputs = Inputs(*(moved(part, self.device) for part in (x, positions, segments)), targets)
        return [MicroBatch(inputs, torch.zeros((len(rows), 1), dtype=torch.int64))]

    def train(self, stepper: Any, split: str, step: int, *, lr: float, seed: int) -> Any:
        """Take one optimizer step. The seed determines the order of the token windows in each epoch."""
        length, rows = self.size.length, self.size.rows
        count = (len(self.data[split]) - 1) // length
        batches = count // rows
        epoch, batch = divmod(step, batches)
        order = np.random.default_rng((seed, epoch)).permutation(count)
        offset = int(np.random.default_rng((seed, epoch, 1)).integers(length)) if epoch else 0
        starts = np.minimum(order[batch * rows : (batch + 1) * rows] * length + offset, length * count - length)
        parts = self.parts(split, starts)
        return stepper.step(parts, weight=parts[0].inputs.targets.weight, lr=lr, key=(seed, step))

    def loss(self, model: Any, split: str) -> float:
        count = (len(self.data[split]) - 1) // self.size.length // self.size.rows
        totals = []
        for batch in range(min(count, self.size.val_batches)):
            starts = (np.arange(self.size.rows) + batch * self.size.rows) * self.size.length
            [part] = self.parts(split, starts)
            # With gradients enabled, the layers compiled for training are reused.
            totals.append(float(model(*part.inputs).total.detach()) / part.inputs.targets.weight)
        return float(np.mean(totals))

    def pretrain(self) -> tuple[dict[str, Any], dict[str, Any]]:
        model = self.model("float32", None)
        stepper, size = self.stepper("adamw", model, PRETRAIN_RATE), self.size
        losses: list[float] = []
        began, step, converged = time.perf_counter(), 0, False
        while step < size.pretrain_steps and not converged:
            for _ in range(size.eval_every):
                pending = self.train(stepper, "pretrain", step, lr=PRETRAIN_RATE * min(1, (step + 1) / 100), seed=0)
                step += 1
            losses.append(self.loss(model, "pretrain_val"))
            print(f"  step {step:,}: train {pending.read().loss:.3f}, val {losses[-1]:.4f}", flush=True)
            converged = len(losses) > PATIENCE and min(losses[-PATIENCE:]) > min(losses[:-PATIENCE]) - FALL
        for number in range(size.cooldown):
            lr = PRETRAIN_RATE * (1 - number / size.cooldown)
            self.train(stepper, "pretrain", step + number, lr=lr, seed=0)
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        about = {
            "parameters": model.num_parameters,
            "steps": step + size.cooldown,
            "val_losses": losses,
            "val_loss": self.loss(model, "pretrain_val"),
            "val_loss_finetune": self.loss(model, "finetune_val"),
            "converged": converged,
            "seconds": time.perf_counter() - began,
        }
        return weights, about

    def finetune(self, name: str, weights: dict[str, Any], *, lr: float, seed: int) -> dict[str, Any]:
        """Train for at most one epoch, with a short warm-up and cosine decay to a tenth of the learning rate."""
        import torch

        from chatmill.train.step import LRSchedule

        kinds = {"adamw8bit": "bfloat16", "adamw_bf16": "bfloat16", CONTROL: "bfloat16", "fp8": "fp8"}
        began = time.perf_counter()
        model = self.model(kinds.get(name, "float32"), weights)
        stepper, size = self.stepper(name, model, lr), self.size
        batches = (len(self.data["finetune"]) - 1) // size.length // size.rows
        steps = min(size.finetune_steps, batches)
        schedule = LRSchedule(lr, lr / 10, max(1, steps // 20), steps, "cosine")
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for step in range(steps):
            pending = self.train(stepper, "finetune", step, lr=schedule(step), seed=seed)
        last = pending.read().loss
        result = {"lr": lr, "seed": seed, "steps": steps, "train_loss": last}
        result |= {"tune_loss": self.loss(model, "finetune_tune"), "val_loss": self.loss(model, "finetune_val")}
        if self.device.type == "cuda":
            result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return {**result, "seconds": time.perf_counter() - began}


def train(folder: Path, out: Path, *, size: Size, fp8: bool, device: str) -> int:
    """Run all experiments whose results are not yet in the file `out`; return 1 if an optimizer exceeds the limit or if
    pretraining did not converge.
    """
    import torch
    from safetensors.torch import load_file, save_file

    began = time.perf_counter()
    training = Training(folder, size, device)
    results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"rates": {}, "runs": {}}
    stored = out.with_suffix(".pretrained.safetensors")

    def keep() -> None:
        out.write_text(json.dumps(results, indent=1) + "\n")

    if "pretraining" in results and stored.exists():
        weights = load_file(stored, device=device)
    else:
        weights, results["pretraining"] = training.pretrain()
        save_file(weights, stored)
        keep()
    print("pretraining", json.dumps({k: v for k, v in results["pretraining"].items() if k != "val_losses"}), flush=True)
    names = ["adamw", "adamw8bit", "adamw_bf16", "adafactor", "muon", CONTROL, *(["fp8"] if fp8 else [])]
    for name in names:
        if name in RATES and name not in results["rates"]:
            tried = {lr: training.finetune(name, weights, lr=lr, seed=0)["tune_loss"] for lr in RATES[name]}
            results["rates"][name] = {"tried": tried, "chosen": min(tried, key=lambda lr: tried[lr])}
            keep()
            print(name, json.dumps(results["rates"][name]), flush=True)
        lr = float(results["rates"][SAME_RATE.get(name, name)]["chosen"])
        for seed in size.seeds:
            if (key := f"{name}/{seed}") not in results["runs"]:
                results["runs"][key] = training.finetune(name, weights, lr=lr, seed=seed)
                keep()
                print(key, json.dumps(results["runs"][key]), flush=True)
    results["compared"] = compared(results["runs"], names, size.seeds)
    results["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    results["versions"] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    results["seconds"] = results.get("seconds", 0) + time.perf_counter() - began
    keep()
    far = [name for name, each in results["compared"].items() if name != CONTROL and each["mean"] > MOST]
    for name, each in results["compared"].items():
        shown = ", ".join(f"{value:+.4f}" for value in each["differences"])
        print(f"{name:12} {each['mean']:+.4f} nats ({shown}){'  control' if name == CONTROL else ''}")
    print(
        f"{results['seconds']:.0f} s; "
        + (
            f"worse than adamw by more than {MOST} nats: {', '.join(far)}"
            if far
            else f"no optimizer is worse than adamw by more than {MOST} nats"
        )
    )
    if not results["pretraining"]["converged"]:
        print("pretraining did not converge; the comparison is not valid")
        return 1
    return 1 if far else 0


def compared(runs: dict[str, Any], names: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    table = {}
    for name in names[1:]:
        pairs = [(runs[f"{name}/{seed}"]["val_loss"], runs[f"adamw/{seed}"]["val_loss"]) for seed in seeds]
        differences = [mine - float32 for mine, float32 in pairs]
        table[name] = {"mean": float(np.mean(differences)), "differences": differences}
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare", help="write the token files")
    preparing.add_argument("-o", "--output", type=Path, required=True)
    preparing.add_argument(
        "--conversations", type=Path, nargs="*", default=[], help="JSON files, or folders of JSON files"
    )
    preparing.add_argument("--megabytes", type=float, default=24, help="size of the Python sources")
    training = commands.add_parser("train", help="train with every optimizer and compare the losses")
    training.add_argument("tokens", type=Path)
    training.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    training.add_argument("--fp8", action="store_true", help="also train with AdamW and float8 matrix products")
    training.add_argument("--small", action="store_true", help="use a tiny model, to test the script")
    training.add_argument("--device", choices=["cpu", "cuda"])
    args = parser.parse_args()
    if args.command == "prepare":
        prepare(args.output, args.conversations, megabytes=args.megabytes)
        return 0
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return train(args.tokens, args.out, size=SMALL if args.small else FULL, fp8=args.fp8, device=device)


if __name__ == "__main__":
    sys.exit(main())
