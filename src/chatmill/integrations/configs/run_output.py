"""Convert the config keys of other trainers for checkpoints, evaluations, logs, trackers and seeds."""

from __future__ import annotations

from pathlib import Path

from chatmill.integrations.configs.report import IS_OFF, TheirKeys, Translation

ONLY_AT_THE_END = 1_000_000_000
"""A save_interval longer than any run, so that only the final checkpoint is saved."""


def take_output_dir(translation: Translation, keys: TheirKeys) -> None:
    """Convert `output_dir`; the last component of the path becomes the name of the run."""
    if (folder := keys.text("output_dir")) is not None:
        translation.run_name = Path(folder).name or None
        name = translation.run_name or "imported"
        translation.take(
            keys.path("output_dir"),
            folder,
            other={"--model_name": name},
            note=f"the run is saved in checkpoints/{name}",
        )


def take_saving(translation: Translation, keys: TheirKeys) -> None:
    """Convert the checkpoint interval; only intervals in steps have a counterpart in chatmill."""
    strategy, steps = keys.text_or_no("save_strategy"), keys.number("save_steps")
    often = keys.number("saves_per_epoch")
    at_the_end = {"save_interval": ONLY_AT_THE_END}
    if strategy == "no":
        translation.take(
            keys.path("save_strategy"),
            strategy,
            train=at_the_end,
            note="chatmill saves a checkpoint only at the end of the run",
        )
    elif strategy is not None:
        _take_strategy(translation, keys, "save_strategy", strategy, "save_interval")
    _take_interval(translation, keys, "save_steps", steps, "save_interval", used=strategy in (None, "steps"))
    if often is not None:
        _per_epoch(translation, keys, "saves_per_epoch", often, "save_interval")
    if (limit := keys.integer("save_total_limit")) is not None:
        taken = {"keep_checkpoints": max(1, limit)}
        translation.take(keys.path("save_total_limit"), limit, train=taken)


def take_evaluation(translation: Translation, keys: TheirKeys, *, default: bool) -> bool:
    """Convert the evaluation interval; return whether the run evaluates at all."""
    theirs = next((name for name in ("eval_strategy", "evaluation_strategy") if name in keys), "eval_strategy")
    strategy, steps, often = keys.text_or_no(theirs), keys.number("eval_steps"), keys.number("evals_per_epoch")
    evaluates = default or steps is not None or bool(often) or strategy not in (None, "no")
    if strategy == "no":
        evaluates = False
        translation.take(keys.path(theirs), strategy, train={"eval_interval": 0})
    elif strategy is not None:
        _take_strategy(translation, keys, theirs, strategy, "eval_interval")
    _take_interval(
        translation, keys, "eval_steps", steps, "eval_interval", used=strategy in (None, "steps") and evaluates
    )
    if often is not None:
        if often == 0:
            translation.take(keys.path("evals_per_epoch"), often, train={"eval_interval": 0})
            evaluates = False
        else:
            _per_epoch(translation, keys, "evals_per_epoch", often, "eval_interval")
    if not evaluates and "eval_interval" not in translation.train:
        translation.assume(f"{translation.trainer} does not evaluate by default", train={"eval_interval": 0})
    for name, ours in (("early_stopping_patience", "early_stop_patience"), ("load_best_model_at_end", "keep_best")):
        value = keys.integer(name) if ours == "early_stop_patience" else keys.switch(name)
        if value is None:
            continue
        if not value:
            translation.default(keys.path(name), value, note=IS_OFF)
        elif translation.train.get("eval_interval") == 0 or translation.train.get("save_interval") == 0:
            translation.none(keys.path(name), value, "a run without evaluation has no best checkpoint")
        else:
            translation.take(
                keys.path(name), value, train={ours: value}, note="chatmill compares checkpoints by the val loss"
            )
    return evaluates


def _take_strategy(translation: Translation, keys: TheirKeys, name: str, strategy: str, ours: str) -> None:
    if strategy == "steps":
        translation.default(keys.path(name), strategy, note=f"chatmill uses {ours}")
    elif strategy == "best":
        translation.take(
            keys.path(name), strategy, train={"keep_best": True}, note="chatmill also keeps the newest checkpoints"
        )
    else:
        note = f"chatmill needs a number of steps, not epochs; {ours} stays {_now(translation, ours)}"
        translation.none(keys.path(name), strategy, note)


def _take_interval(
    translation: Translation, keys: TheirKeys, name: str, steps: float | None, ours: str, *, used: bool
) -> None:
    if steps is None:
        return
    if not used:
        translation.default(keys.path(name), steps, note="this key has no effect with this strategy")
    elif isinstance(steps, int) and steps >= 1:
        translation.take(keys.path(name), steps, train={ours: min(steps, 2**31)})
    else:
        note = f"chatmill needs a number of steps, not a fraction of the run; {ours} stays {_now(translation, ours)}"
        translation.none(keys.path(name), steps, note)


def _per_epoch(translation: Translation, keys: TheirKeys, name: str, often: float, ours: str) -> None:
    note = f"the steps per epoch are not known before `chatmill prepare`; {ours} stays {_now(translation, ours)}"
    translation.none(keys.path(name), often, note)


def _now(translation: Translation, ours: str) -> int:
    return int(translation.train.get(ours, 500))


def take_logging(translation: Translation, keys: TheirKeys) -> None:
    steps = keys.number("logging_steps")
    if steps is not None and isinstance(steps, int) and steps >= 1:
        translation.take(keys.path("logging_steps"), steps, train={"log_interval": min(steps, 2**31)})
    elif steps is not None:
        translation.none(
            keys.path("logging_steps"),
            steps,
            "chatmill needs a number of steps, not a fraction of the run; log_interval stays 10",
        )


def take_seed(translation: Translation, keys: TheirKeys, default: int | None) -> None:
    """Convert `seed` and `data_seed`, the seed for the order of rows."""
    seed, data_seed = keys.integer("seed", most=2**31), keys.integer("data_seed", most=2**31)
    note = "even with the same seed, the order of rows differs between trainers"
    if seed is not None:
        taken = {"seed": seed} | ({} if data_seed is not None else {"epoch_seed": seed})
        translation.take(keys.path("seed"), seed, train=taken, note=note)
    elif default is not None:
        translation.assume(
            f"{translation.trainer} uses this value by default", train={"seed": default, "epoch_seed": default}
        )
    if data_seed is not None:
        translation.take(keys.path("data_seed"), data_seed, train={"epoch_seed": data_seed}, note=note)


def take_report_to(translation: Translation, keys: TheirKeys, name: str = "report_to") -> None:
    trackers = keys.texts(name)
    if trackers is None:
        return
    if trackers in (["none"], ["None"], []):
        translation.take(keys.path(name), trackers, train={"report_to": []})
        return
    known = [each for each in dict.fromkeys(trackers) if each in ("tensorboard", "wandb", "mlflow")]
    others = [each for each in trackers if each not in known]
    note = f"chatmill does not report to {', '.join(others)}" if others else ""
    if known:
        translation.take(keys.path(name), trackers, train={"report_to": known}, note=note)
    else:
        translation.none(keys.path(name), trackers, f"{note}; set report_to to tensorboard, wandb or mlflow")
