"""Convert an Axolotl config to a recipe and a train config.

The conversion follows Axolotl's source at commit 067b021: `utils/schemas`, `prompt_strategies`, `core/builders`.
"""

from __future__ import annotations

from pathlib import Path

from chatmill.integrations.configs.axolotl_data import Layout, take_datasets
from chatmill.integrations.configs.axolotl_notes import NOTES
from chatmill.integrations.configs.data_places import take_model
from chatmill.integrations.configs.model_keys import (
    LoraNames,
    take_checkpointing,
    take_eight_bits,
    take_four_bits,
    take_lora,
    take_precision,
    take_sharding,
)
from chatmill.integrations.configs.read_config import read_config
from chatmill.integrations.configs.report import IS_OFF, OFF, TheirKeys, Translation
from chatmill.integrations.configs.rows_keys import (
    CUT_AT_THE_END,
    TEXT_CUT,
    take_length,
    take_packing,
    take_val_size,
    template_args,
    use_template,
    without_val,
)
from chatmill.integrations.configs.run_keys import RunNames, take_run
from chatmill.integrations.configs.run_output import (
    take_evaluation,
    take_logging,
    take_output_dir,
    take_saving,
    take_seed,
)
from chatmill.integrations.configs.write_config import ImportedConfig
from chatmill.remote.urls import place

RUN = RunNames(
    micro_batch="micro_batch_size",
    optimizer="optimizer",
    schedule="lr_scheduler",
    epochs="num_epochs",
    default_micro_batch=1,
    default_schedule="cosine",
    default_epochs=1.0,
    default_learning_rate=None,
    default_warmup=None,
)
LORA = LoraNames(rslora="peft_use_rslora", default_rank=8, default_alpha=16.0)
REFUSED = {
    "rl": "chatmill supports only SFT, not reinforcement learning",
    "reward_model": "chatmill supports only SFT, not reward models",
    "process_reward_model": "chatmill supports only SFT, not reward models",
    "pretraining_dataset": "chatmill supports only SFT, not pretraining",
    "processor_type": "chatmill trains only on text, not on images or audio",
    "diffusion": "chatmill trains only causal language models",
    "image_size": "chatmill trains only on text, not on images or audio",
    "image_resize_algorithm": "chatmill trains only on text, not on images or audio",
}
FITS = {
    "drop": ("drop", "chatmill drops rows that are too long, like Axolotl"),
    "raise": ("error", "a row that is too long stops the build with an error"),
}


def import_axolotl(path: str | Path, *, ranks: int | None = None, model: str | None = None) -> ImportedConfig:
    """Convert an Axolotl config to a recipe and a train config, with a report on each key.

    `ranks` is the number of GPUs. `model` is the folder of a base model to use instead of the model in the config.
    """
    values = read_config(path, "an Axolotl config in YAML")
    translation = Translation("Axolotl", str(place(path)), ranks=ranks, model=model)
    keys = TheirKeys(values, translation)
    _refuse(translation, keys)
    take_model(translation, keys, "base_model", _revision(keys), tokenizer="tokenizer_config")
    layout = Layout()
    take_datasets(translation, keys, "datasets", layout, only_val=False)
    if not translation.sources and not translation.faults:
        translation.faults.append("the config has no datasets; expected at least one")
    take_datasets(translation, keys, "test_datasets", layout, only_val=True)
    is_text = _take_layout(translation, keys, layout)
    _take_rows(translation, keys, is_text=is_text, is_chat="chat" in layout.kinds)
    _take_training(translation, keys)
    _take_output(translation, keys)
    translation.close(keys, NOTES)
    return ImportedConfig.of(translation, list(values))


def _refuse(translation: Translation, keys: TheirKeys) -> None:
    for name, reason in REFUSED.items():
        value = keys.pop(name)
        if value is not None and value not in OFF:
            translation.refuse(keys.path(name), value, reason)
        elif value is not None:
            translation.default(keys.path(name), value, note=IS_OFF)


def _revision(keys: TheirKeys) -> str:
    return "model_revision" if "model_revision" in keys else "revision_of_model"


def _take_layout(translation: Translation, keys: TheirKeys, layout: Layout) -> bool:
    """Convert the keys that select the chat template; return whether the datasets are plain text without turns."""
    template, jinja = keys.text("chat_template"), keys.text("chat_template_jinja")
    if "text" in layout.kinds and len(layout.kinds) > 1:
        other = layout.kinds.get("chat") or layout.kinds["style"]
        reason = (
            f"a recipe contains either plain text or conversations, but {other} has another type; "
            "import the datasets separately"
        )
        translation.refuse(layout.kinds["text"], "completion", reason)
    is_text = "text" in layout.kinds
    if is_text:
        translation.assume("the datasets have the type completion", recipe={"format": "text"})
    elif "chat" not in layout.kinds and layout.style is not None:
        translation.chat_template = layout.style.template()
    if "chat" in layout.kinds and layout.style is not None:
        where = layout.kinds["style"]
        translation.assume(f"{where}: a recipe has only one format, so the chat template also renders these rows")
    unused = "" if "chat" in layout.kinds else "no dataset has the type chat_template, so this key has no effect"
    named = [(keys.path("chat_template"), template), (keys.path("chat_template_jinja"), jinja)]
    for key, value in named:
        if value is None:
            continue
        if unused:
            translation.default(key, value, note=unused)
        elif key.endswith("jinja"):
            use_template(translation, key, value)
        else:
            _take_template(translation, key, value)
    if layout.chat_template is not None and not unused and jinja is None:
        key, value = layout.chat_template
        if key.endswith("jinja"):
            translation.chat_template = value + "\n"
        elif value == "chatml":
            translation.recipe["format"] = "chatml"
            translation.origins["format"] = f"{key}: chatml"
    if (values := keys.table("chat_template_kwargs")) is not None:
        template_args(translation, keys.path("chat_template_kwargs"), values)
    return is_text


def _take_template(translation: Translation, key: str, name: str) -> None:
    if name == "chatml":
        translation.take(key, name, recipe={"format": "chatml"})
    elif name.startswith("tokenizer_default") or name == "jinja":
        translation.default(
            key, name, note="chatmill uses chat_template_jinja if set, otherwise the tokenizer's chat template"
        )
    else:
        note = f"chatmill has no template {name} and uses the tokenizer's template; if that differs, set chat_template"
        translation.none(key, name, note)


def _take_rows(translation: Translation, keys: TheirKeys, *, is_text: bool, is_chat: bool) -> None:
    strategy = keys.text("excess_length_strategy")
    fit, note = FITS.get(strategy or "drop", ("exchanges", CUT_AT_THE_END))
    if is_text:
        fit, note = "windows", TEXT_CUT
    take_length(translation, keys, "sequence_len", 512, fit, note)
    if strategy is not None:
        translation.take(keys.path("excess_length_strategy"), strategy, recipe={"fit": fit}, note=note)
    if (least := keys.integer("min_sample_len")) is not None:
        taken = {"filters": {"min_tokens": max(1, least)}}
        translation.take(keys.path("min_sample_len"), least, recipe=taken)
    if (dedupe := keys.switch("dataset_exact_deduplication")) is not None:
        note = "conversations that differ only in case or whitespace are duplicates"
        translation.take(keys.path("dataset_exact_deduplication"), dedupe, recipe={"dedupe": dedupe}, note=note)
    take_packing(translation, keys, "sample_packing")
    _take_mask(translation, keys, is_chat=is_chat)
    if (shuffle := keys.switch("shuffle_merged_datasets")) is not None:
        translation.take(keys.path("shuffle_merged_datasets"), shuffle, train={"epoch_shuffle": shuffle})
    if (drop := keys.switch("dataloader_drop_last")) is not None:
        translation.take(keys.path("dataloader_drop_last"), drop, train={"epoch_drop_last": drop})


def _take_mask(translation: Translation, keys: TheirKeys, *, is_chat: bool) -> None:
    inputs = keys.switch("train_on_inputs")
    key = keys.path("train_on_inputs")
    if inputs and is_chat:
        note = "chatmill trains on all turns except tool results, but not on the headers of turns"
        translation.take(key, inputs, recipe={"train_on": "all"}, train={"use_loss_mask": True}, note=note)
    elif inputs is not None:
        note = "chatmill trains on every token" if inputs else "chatmill trains only on answers"
        translation.take(key, inputs, train={"use_loss_mask": not inputs}, note=note)
    else:
        translation.assume("Axolotl trains only on answers by default", train={"use_loss_mask": True})


def _take_training(translation: Translation, keys: TheirKeys) -> None:
    take_run(translation, keys, RUN, default_steps=_steps_of_batch_size(translation, keys))
    if "learning_rate" not in translation.train:
        translation.faults.append("learning_rate is missing; expected a number")
    if (share := keys.number("cosine_min_lr_ratio", most=1)) is not None:
        translation.take(keys.path("cosine_min_lr_ratio"), share, train={"min_lr_ratio": share})
    take_seed(translation, keys, 42)
    adapter = keys.text("adapter")
    lora = adapter in ("lora", "qlora")
    if adapter is not None and not lora:
        translation.refuse(
            keys.path("adapter"), adapter, "chatmill trains all weights, LoRA adapters or QLoRA adapters"
        )
    elif adapter == "qlora":
        translation.take(keys.path("adapter"), adapter, train={"quantize": "nf4"}, note="with lora")
    elif adapter is not None:
        translation.take(keys.path("adapter"), adapter, other={"lora": "as below"})
    take_lora(translation, keys, LORA, used=lora, all_linear="lora_target_linear")
    take_four_bits(translation, keys, "load_in_4bit", lora=lora)
    take_eight_bits(translation, keys)
    take_precision(translation, keys)
    if (fp8 := keys.switch("fp8")) is not None:
        note = "chatmill supports float8 only for full fine-tuning" if lora and fp8 else ""
        translation.take(keys.path("fp8"), fp8, train={"fp8": fp8 and not lora}, note=note)
    if (compiled := keys.pop("torch_compile")) is not None:
        taken = {"compile": None if compiled == "auto" else bool(compiled)}
        translation.take(keys.path("torch_compile"), compiled, train=taken)
    take_checkpointing(translation, keys, default=False)
    take_sharding(translation, keys)
    _take_special_tokens(translation, keys)


def _steps_of_batch_size(translation: Translation, keys: TheirKeys) -> int:
    """Return the number of gradient accumulation steps that Axolotl computes from `batch_size`; 1 if `batch_size` has
    no effect.
    """
    rows, micro = keys.integer("batch_size", least=1, most=2**24), keys.peek("micro_batch_size")
    if rows is None:
        return 1
    steps = max(1, rows // micro) if type(micro) is int and micro > 0 else rows
    if keys.peek("gradient_accumulation_steps") is not None:
        translation.default(keys.path("batch_size"), rows, note="chatmill uses gradient_accumulation_steps instead")
        return 1
    note = "the number of accumulation steps is batch_size divided by micro_batch_size"
    translation.take(keys.path("batch_size"), rows, train={"gradient_accumulation_steps": steps}, note=note)
    return steps


def _take_special_tokens(translation: Translation, keys: TheirKeys) -> None:
    tokens = keys.table("special_tokens")
    if tokens is None:
        return
    table = TheirKeys(tokens, translation, f"{keys.path('special_tokens')}.")
    stays = "chatmill uses the tokenizer in the model folder unchanged; edit the tokenizer if this token differs"
    notes = dict.fromkeys(table.left, stays) | {
        "pad_token": "chatmill never trains on padding, so the padding token has no effect"
    }
    translation.close(table, notes)


def _take_output(translation: Translation, keys: TheirKeys) -> None:
    take_output_dir(translation, keys)
    take_logging(translation, keys)
    take_saving(translation, keys)
    has_val = take_val_size(
        translation, keys, "val_set_size", other_val=any(source.get("only_val") for source in translation.sources)
    )
    take_evaluation(translation, keys, default=has_val)
    if not has_val:
        without_val(translation)
    if (metric := keys.text("metric_for_best_model")) is not None:
        if metric in ("loss", "eval_loss"):
            translation.default(
                keys.path("metric_for_best_model"),
                metric,
                note="chatmill also uses the val loss to select the best checkpoint",
            )
        else:
            note = "chatmill selects the checkpoint with the lowest val loss"
            translation.none(keys.path("metric_for_best_model"), metric, note)
    trackers: list[str] = []
    uses = {}
    for name, tracker in (("use_tensorboard", "tensorboard"), ("use_mlflow", "mlflow"), ("use_wandb", "wandb")):
        if (value := keys.switch(name)) is not None:
            uses[name] = value
            trackers += [tracker] if value else []
            translation.take(keys.path(name), value, other={"report_to": [tracker]} if value else {})
    if (project := keys.text("wandb_project")) is not None:
        if uses.get("use_wandb") is False:
            translation.default(
                keys.path("wandb_project"), project, note="use_wandb is false, so this key has no effect"
            )
        else:
            trackers = list(dict.fromkeys([*trackers, "wandb"]))
            note = f"set WANDB_PROJECT={project} for the run"
            translation.take(keys.path("wandb_project"), project, other={"report_to": ["wandb"]}, note=note)
    if trackers:
        translation.train["report_to"] = trackers
        translation.origins["report_to"] = "wandb_project, use_wandb, use_tensorboard, use_mlflow"
