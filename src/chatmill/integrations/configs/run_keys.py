"""Translate the batch size, optimizer, schedule and run length from another trainer's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chatmill.integrations.configs.report import TheirKeys, Translation

EIGHT_BIT = "chatmill uses 8-bit moments, and bfloat16 weights with stochastic rounding"
PAGED = "chatmill does not page the optimizer state to host memory"
OPTIMIZERS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw", "adamw_torch_xla"), ("adamw", "")
    ),
    "adamw_torch_npu_fused": ("adamw", ""),
    "flash_adamw": ("adamw", "chatmill uses PyTorch's fused AdamW kernel"),
    "paged_adamw": ("adamw", PAGED),
    "paged_adamw_32bit": ("adamw", PAGED),
    **dict.fromkeys(
        ("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "ao_adamw_8bit", "ao_adamw_fp8"), ("adamw8bit", EIGHT_BIT)
    ),
    "paged_adamw_8bit": ("adamw8bit", f"{EIGHT_BIT}; {PAGED}"),
    "adamw_anyprecision": ("adamw_bf16", "chatmill uses bfloat16 weights and moments"),
    "muon": ("muon", "chatmill scales the updates to the RMS of AdamW updates"),
    "adafactor": (
        "adafactor",
        "chatmill's learning rate is relative to the RMS of each weight matrix; make it about 30 times higher",
    ),
}
SCHEDULES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


@dataclass(frozen=True)
class RunNames:
    """A trainer's key names and defaults for batch size, optimizer, schedule and run length."""

    micro_batch: str = "per_device_train_batch_size"
    optimizer: str = "optim"
    schedule: str = "lr_scheduler_type"
    epochs: str = "num_train_epochs"
    default_micro_batch: int = 8
    default_schedule: str = "linear"
    default_epochs: float = 3.0
    default_learning_rate: float | None = 5e-5
    default_warmup: float | None = 0.0
    """Default number of warmup steps; None means 3 percent of the run."""


def take_run(translation: Translation, keys: TheirKeys, names: RunNames, *, default_steps: int = 1) -> None:
    _take_batch(translation, keys, names, default_steps)
    _take_optimizer(translation, keys, names)
    _take_schedule(translation, keys, names)
    _take_length(translation, keys, names)


def _take_batch(translation: Translation, keys: TheirKeys, names: RunNames, default_steps: int) -> None:
    """Set `batch_size`, the number of rows per step: micro-batch size × accumulation steps × GPUs."""
    micro = keys.integer(names.micro_batch, least=1, most=2**20)
    steps = keys.integer("gradient_accumulation_steps", least=1, most=2**20)
    ranks = translation.ranks or 1
    rows, parts = micro or names.default_micro_batch, steps or default_steps
    batch = {"batch_size": rows * parts * ranks}
    product = f"{rows} rows × {parts} accumulation steps × {ranks} {'GPU' if ranks == 1 else 'GPUs'}"
    if translation.ranks is None:
        product += "; set the number of GPUs with --ranks"
    if micro is None:
        default = f"{names.micro_batch} {names.default_micro_batch}"
        translation.assume(f"{translation.trainer} uses {default} by default; {product}", train=batch)
    else:
        translation.take(keys.path(names.micro_batch), micro, train=batch, note=product)
    if steps is not None:
        taken = {"gradient_accumulation_steps": steps}
        translation.take(keys.path("gradient_accumulation_steps"), steps, train=taken)


def _take_optimizer(translation: Translation, keys: TheirKeys, names: RunNames) -> None:
    name = keys.text(names.optimizer)
    if name is not None:
        ours, note = OPTIMIZERS.get(name, (None, ""))
        if ours is None:
            note = f"chatmill does not support {name} and uses adamw; the loss will differ"
            translation.train["optimizer"] = "adamw"
            translation.none(keys.path(names.optimizer), name, note)
        else:
            translation.take(keys.path(names.optimizer), name, train={"optimizer": ours}, note=note)
    numbers = {
        "learning_rate": ("learning_rate", names.default_learning_rate, 1e300),
        "weight_decay": ("weight_decay", 0.0, 1e300),
        "adam_beta1": ("beta1", 0.9, 0.9999999),
        "adam_beta2": ("beta2", 0.999, 0.9999999),
        "adam_epsilon": ("adam_eps", 1e-8, 1e300),
        "max_grad_norm": ("grad_clip", 1.0, 1e300),
    }
    for theirs, (ours, default, most) in numbers.items():
        value = keys.number(theirs, most=most)
        if value is not None:
            translation.take(keys.path(theirs), value, train={ours: value})
        elif default is not None and ours not in translation.train:
            translation.assume(f"{translation.trainer} uses this value by default", train={ours: default})


def _take_schedule(translation: Translation, keys: TheirKeys, names: RunNames) -> None:
    kind = keys.text(names.schedule)
    options = keys.table("lr_scheduler_kwargs")
    ours = SCHEDULES.get(kind or names.default_schedule)
    end = _end_of_schedule(translation, keys, options)
    if kind is None:
        default = SCHEDULES[names.default_schedule]
        translation.assume(
            f"{translation.trainer} uses this value by default",
            train={"lr_schedule": default, "min_lr_ratio": end or 0.0},
        )
    elif ours is None:
        note = f"chatmill does not support {kind} and uses cosine decay to 0; the loss will differ"
        translation.train |= {"lr_schedule": "cosine", "min_lr_ratio": end or 0.0}
        translation.none(keys.path(names.schedule), kind, note)
    elif ours == "constant":
        translation.take(keys.path(names.schedule), kind, train={"lr_schedule": ours})
    else:
        taken = {"lr_schedule": ours, "min_lr_ratio": end or 0.0}
        note = "" if end else f"the learning rate decays to 0, as in {translation.trainer}"
        translation.take(keys.path(names.schedule), kind, train=taken, note=note)
    _take_warmup(translation, keys, names, without=kind == "constant")


def _end_of_schedule(translation: Translation, keys: TheirKeys, options: Mapping[str, Any] | None) -> float | None:
    """Return the final learning rate as a fraction of the peak learning rate, or None if it is not set."""
    if options is None:
        return None
    table = TheirKeys(options, translation, f"{keys.path('lr_scheduler_kwargs')}.")
    share, floor = table.number("min_lr_rate", most=1), table.number("min_lr")
    peak = translation.train.get("learning_rate")
    if floor is not None and share is None and peak:
        share = min(1.0, floor / peak)
    for name, value in (("min_lr_rate", options.get("min_lr_rate")), ("min_lr", options.get("min_lr"))):
        if value is not None:
            translation.take(table.path(name), value, train={"min_lr_ratio": share or 0.0})
    notes = dict.fromkeys(table.left, "chatmill does not support this schedule option; the loss will differ")
    translation.close(table, notes)
    return share


def _take_warmup(translation: Translation, keys: TheirKeys, names: RunNames, *, without: bool) -> None:
    steps, share = keys.number("warmup_steps"), keys.number("warmup_ratio", most=1)
    named = [(name, value) for name, value in (("warmup_steps", steps), ("warmup_ratio", share)) if value is not None]
    if without:
        translation.assume("the `constant` schedule of transformers has no warmup", train={"warmup_iters": 0})
        for name, value in named:
            translation.default(keys.path(name), value, note="the constant schedule has no warmup")
        return
    if steps is not None and (steps >= 1 or share is None):
        taken = {"warmup_iters": int(steps)} if steps >= 1 or steps == 0 else {"warmup_pct": steps}
        note = "" if steps >= 1 or steps == 0 else "a value below 1 means a fraction of the run"
        translation.take(keys.path("warmup_steps"), steps, train=taken, note=note)
        if share is not None:
            translation.default(keys.path("warmup_ratio"), share, note="chatmill uses warmup_steps instead")
    elif share is not None:
        translation.take(keys.path("warmup_ratio"), share, train={"warmup_pct": share})
        if steps is not None:
            translation.default(keys.path("warmup_steps"), steps, note="chatmill uses warmup_ratio instead")
    elif names.default_warmup is not None:
        translation.assume(
            f"{translation.trainer} uses this value by default", train={"warmup_iters": int(names.default_warmup)}
        )
    else:
        translation.assume(
            f"{translation.trainer} uses this value by default, but at most 100 steps", train={"warmup_pct": 0.03}
        )


def _take_length(translation: Translation, keys: TheirKeys, names: RunNames) -> None:
    epochs = keys.number(names.epochs, most=1_000_000)
    steps = keys.number("max_steps", least=None, most=2**31)
    if steps is not None and steps > 0:
        translation.take(keys.path("max_steps"), steps, train={"max_iters": int(steps)})
        if epochs is not None:
            translation.default(keys.path(names.epochs), epochs, note="chatmill uses max_steps instead")
        return
    if steps is not None:
        translation.default(keys.path("max_steps"), steps, note="the number of epochs sets the length of the run")
    if epochs:
        translation.take(keys.path(names.epochs), epochs, train={"epochs": epochs})
    else:
        if epochs is not None:
            translation.none(
                keys.path(names.epochs), epochs, "a run has at least one step, so chatmill uses the default"
            )
        translation.assume(f"{translation.trainer} uses this value by default", train={"epochs": names.default_epochs})
