"""Convert a config of `trl sft` or of the alignment handbook to a recipe and a train config.

The conversion follows TRL's source at commit f2cd577 (`trainer/sft_config.py`, `trainer/model_config.py`,
`scripts/utils.py`) and the alignment handbook at commit 925acdf.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chatmill.errors import DataError
from chatmill.integrations.configs.axolotl_notes import ATTENTION, KERNEL, NO_CODE
from chatmill.integrations.configs.data_places import data_inputs, parse_split, source_name, take_model
from chatmill.integrations.configs.hf_arguments import NOTES as HF_NOTES
from chatmill.integrations.configs.hf_arguments import take_training_arguments
from chatmill.integrations.configs.model_keys import LoraNames, take_eight_bits, take_four_bits, take_lora
from chatmill.integrations.configs.read_config import read_config
from chatmill.integrations.configs.report import TheirKeys, Translation
from chatmill.integrations.configs.rows_keys import (
    CUT_AT_THE_END,
    TEXT_CUT,
    take_length,
    take_packing,
    take_val_size,
    use_template,
    without_val,
)
from chatmill.integrations.configs.run_keys import RunNames
from chatmill.integrations.configs.write_config import ImportedConfig
from chatmill.remote.urls import place

RUN = RunNames(default_learning_rate=2e-5)
LORA = LoraNames(default_dropout=0.05)
PREFERENCE_KEYS = (
    *("beta", "max_prompt_length", "max_completion_length", "num_generations", "reward_funcs", "reward_model_path"),
    *("ref_model", "ref_model_init_kwargs", "precompute_ref_log_probs", "desirable_weight", "undesirable_weight"),
    *("lmbda", "teacher_model_name_or_path", "num_ppo_epochs", "center_rewards_coefficient"),
)
SFT_LOSSES = ("nll", "chunked_nll")
NOTES = HF_NOTES | {
    "attn_implementation": ATTENTION,
    "trust_remote_code": NO_CODE,
    **dict.fromkeys(("dataset_num_proc", "dataset_streaming", "padding_free", "pad_to_multiple_of"), KERNEL),
    **dict.fromkeys(("eval_packing", "ignore_bias_buffers", "bnb_4bit_quant_storage"), KERNEL),
    "dtype": "chatmill trains float32 weights; with adamw8bit and adamw_bf16, it trains bfloat16 weights",
    "torch_dtype": "chatmill trains float32 weights; with adamw8bit and adamw_bf16, it trains bfloat16 weights",
    "model_init_kwargs": "chatmill loads the model with the settings in the model folder",
    "router_aux_loss_coef": "chatmill does not use an auxiliary loss to balance experts; the loss will differ",
    "shuffle_dataset": "chatmill shuffles rows in each epoch; see epoch_shuffle",
    "dataset_kwargs": "chatmill adds no tokens beyond those in the chat template",
    "eos_token": "chatmill finds the end of a turn in the chat template, and adds no tokens",
    "pad_token": "chatmill never trains on padding, so the padding token has no effect",
    "truncation_mode": CUT_AT_THE_END,
    "lora_modules_to_save": "chatmill trains only the adapters, not these modules; the loss will differ",
    "lora_target_parameters": "all target layers have adapters; the loss will differ",
    "lora_task_type": "chatmill trains only causal language models",
    "use_dora": "chatmill trains plain LoRA; the loss will differ",
    "bnb_4bit_quant_type": "chatmill uses NF4 for 4-bit weights",
    "use_bnb_nested_quant": "chatmill uses double quantization for 4-bit weights, which takes less memory",
    "concatenate_chunks": KERNEL,
    "num_of_sequences": KERNEL,
    "chars_per_token": KERNEL,
    "benchmarks": "chatmill does not run benchmarks",
    "callbacks": NO_CODE,
}
OFF = {"lora_task_type": "CAUSAL_LM", "bnb_4bit_quant_type": "nf4", "truncation_mode": ""}


def import_trl(path: str | Path, *, ranks: int | None = None, model: str | None = None) -> ImportedConfig:
    """Convert a `trl sft` config to a recipe and a train config, with a report on each key.

    `ranks` is the number of GPUs. `model` is the folder of a base model to use instead of the model in the config.
    """
    values = read_config(path, "a `trl sft` config in YAML")
    translation = Translation("TRL", str(place(path)), ranks=ranks, model=model)
    keys = TheirKeys(values, translation)
    _refuse(translation, keys)
    take_model(translation, keys, "model_name_or_path", "model_revision")
    lora = keys.switch("use_peft")
    if lora is not None:
        translation.take(keys.path("use_peft"), lora, other={"lora": "as below"} if lora else {})
    take_lora(translation, keys, LORA, used=bool(lora))
    take_four_bits(translation, keys, "load_in_4bit", lora=bool(lora))
    take_eight_bits(translation, keys)
    evaluates = take_training_arguments(translation, keys, RUN, checkpointing=True)
    _take_data(translation, keys, evaluates=evaluates)
    if (names := keys.table("env")) is not None:
        translation.none(
            "env", sorted(map(str, names)), "chatmill does not set environment variables; export them yourself"
        )
    translation.close(keys, NOTES, off=OFF)
    return ImportedConfig.of(translation, list(values))


def _refuse(translation: Translation, keys: TheirKeys) -> None:
    if "compute_environment" in keys and "model_name_or_path" not in keys:
        place = translation.place
        raise DataError(
            f"{place}: is an Accelerate config; pass the `trl sft` config, and the number of GPUs with --ranks"
        )
    loss = keys.text("loss_type")
    if loss == "dft":
        translation.none(keys.path("loss_type"), loss, "chatmill uses plain cross entropy; the loss will differ")
    elif loss is not None and loss not in SFT_LOSSES:
        translation.refuse(keys.path("loss_type"), loss, "chatmill supports only SFT losses")
    elif loss is not None:
        translation.default(keys.path("loss_type"), loss, note="chatmill computes the same cross entropy in chunks")
    for name in PREFERENCE_KEYS:
        if (value := keys.pop(name)) is not None:
            translation.refuse(keys.path(name), value, "chatmill supports only SFT, not preference or reward training")


def _take_data(translation: Translation, keys: TheirKeys, *, evaluates: bool) -> None:
    shapes = _take_sources(translation, keys, evaluates=evaluates)
    column = keys.text("dataset_text_field")
    is_text = shapes == {"text"} or (column is not None and column != "text")
    if column is not None:
        if is_text and column != "text":
            for source in translation.sources:
                source |= {"shape": "text", "columns": {"text": column}}
        ours = {"shape": "text", "columns": {"text": column}} if is_text else {}
        translation.take(keys.path("dataset_text_field"), column, other=ours)
    if is_text:
        translation.assume("each record is a single text", recipe={"format": "text"})
    elif not shapes:
        translation.assume(
            "chatmill detects the shape of records; add `format: text` to the recipe if each record is a single text"
        )
    packs = take_packing(translation, keys, "packing")
    if (strategy := keys.text("packing_strategy")) is not None:
        if strategy == "bfd" or not packs:
            note = "chatmill packs whole conversations by best fit" if packs else "rows are not packed"
            translation.default(keys.path("packing_strategy"), strategy, note=note)
        else:
            note = "chatmill packs whole conversations by best fit, and does not split them"
            translation.none(keys.path("packing_strategy"), strategy, note)
    fit, note = ("windows", TEXT_CUT) if is_text else ("exchanges", CUT_AT_THE_END)
    lengths = [name for name in ("max_length", "max_seq_length") if name in keys]
    if lengths and keys.peek(lengths[0]) is None:
        translation.faults.append(f"{lengths[0]} is null; expected the maximum length of a row")
    take_length(translation, keys, lengths[0] if lengths else "max_length", 1024, fit, note)
    for name in lengths[1:]:
        translation.default(keys.path(name), keys.pop(name), note="chatmill uses max_length instead")
    _take_mask(translation, keys, shapes, is_text=is_text)
    template, path = keys.text("chat_template"), keys.text("chat_template_path")
    if template is not None:
        use_template(translation, keys.path("chat_template"), template)
    if path is not None:
        if path.endswith((".jinja", ".jinja2", ".txt")) and template is None:
            use_template(translation, keys.path("chat_template_path"), path)
        else:
            note = "chatmill uses the template in the model folder; save this template to a file and set chat_template"
            translation.none(keys.path("chat_template_path"), path, note)


def _take_mask(translation: Translation, keys: TheirKeys, shapes: set[str], *, is_text: bool) -> None:
    """Set the loss mask. By default, TRL masks only the prompts of prompt-completion data."""
    assistant, completion = keys.switch("assistant_only_loss"), keys.switch("completion_only_loss")
    pairs = shapes == {"prompt-completion"}
    masks = bool(assistant) or (pairs and completion is not False)
    for name, value in (("assistant_only_loss", assistant), ("completion_only_loss", completion)):
        if value is not None:
            translation.take(keys.path(name), value, train={"use_loss_mask": masks})
    if assistant is None and completion is None and not is_text:
        note = (
            "TRL trains only on completions" if pairs else "TRL trains on every token unless assistant_only_loss is set"
        )
        unsure = "" if shapes else "; set use_loss_mask to true if records have a prompt and a completion"
        translation.assume(note + unsure, train={"use_loss_mask": masks})


def _take_sources(translation: Translation, keys: TheirKeys, *, evaluates: bool) -> set[str]:
    """Convert the datasets to sources; return the record shapes that the config implies."""
    shapes: set[str] = set()
    mixture = keys.table("dataset_mixture")
    entries = keys.tables("datasets")
    size = None
    if mixture is not None:
        table = TheirKeys(mixture, translation, "dataset_mixture.")
        for number, entry in enumerate(table.tables("datasets") or []):
            one = TheirKeys(entry, translation, f"dataset_mixture.datasets[{number}].")
            _take_entry(translation, one, ("id", "config", "weight"), shapes)
        if (seed := table.integer("seed")) is not None:
            translation.none("dataset_mixture.seed", seed, "chatmill shuffles rows with epoch_seed")
        size = table
    for number, entry in enumerate(entries or []):
        one = TheirKeys(entry, translation, f"datasets[{number}].")
        _take_entry(translation, one, ("path", "name", "fraction"), shapes)
    names = ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split")
    name, config, split, test = (keys.text(each) for each in names)
    given = {"dataset_config": config, "dataset_train_split": split, "dataset_test_split": test}
    if translation.sources:
        for key, value in {"dataset_name": name, **given}.items():
            if value is not None:
                translation.default(keys.path(key), value, note="chatmill uses the mixture instead")
    elif name is not None:
        _take_named(translation, keys, name, given, evaluates=evaluates)
    else:
        translation.faults.append("the config has neither dataset_name nor datasets; expected one of them")
    has_val = any(source.get("only_val") for source in translation.sources)
    if size is not None:
        has_val = take_val_size(translation, size, "test_split_size", other_val=has_val)
        translation.close(size, {"streaming": KERNEL})
    has_val = take_val_size(translation, keys, "test_split_size", other_val=has_val) or has_val
    if not has_val:
        without_val(translation)
    return shapes


def _take_entry(translation: Translation, keys: TheirKeys, names: tuple[str, str, str], shapes: set[str]) -> None:
    """Convert one dataset of a mixture; its fraction becomes the `epochs` of the source."""
    path, config, fraction = keys.text(names[0]), keys.text(names[1]), keys.number(names[2])
    split, files, folder = keys.text("split"), keys.texts("data_files"), keys.text("data_dir")
    if path is None:
        translation.faults.append(
            f"{keys.path(names[0])}: the dataset is missing; expected a path or a dataset on the Hub"
        )
        return
    number = _add_source(translation, keys.path(names[0]), path, config, split, files)
    for name, value in ((names[1], config), ("data_files", files)):
        if value is not None:
            translation.take(keys.path(name), value, other={"inputs": translation.sources[number]["inputs"]})
    _take_split(translation, keys.path("split"), split, number)
    if fraction is not None:
        note = "" if fraction in (0, 1) else "chatmill trains on a different part of the dataset in each epoch"
        if fraction == 1:
            translation.default(keys.path(names[2]), fraction, note="chatmill trains on the whole dataset")
        elif fraction == 0:
            translation.refuse(keys.path(names[2]), fraction, "a fraction of 0 selects no rows; remove the dataset")
        else:
            translation.take(keys.path(names[2]), fraction, source=(number, {"epochs": fraction}), note=note)
    if (columns := keys.texts("columns")) is not None:
        shape = _shape_of(columns)
        if shape:
            shapes.add(shape)
            translation.take(keys.path("columns"), columns, source=(number, {"shape": shape}))
        else:
            translation.none(keys.path("columns"), columns, "chatmill detects the shape of records")
    if folder is not None:
        translation.none(keys.path("data_dir"), folder, "change the URL in inputs to match the files in this folder")
    translation.close(keys, {})


def _shape_of(columns: list[str]) -> str | None:
    for needed, shape in (
        ({"messages"}, "messages"),
        ({"prompt", "completion"}, "prompt-completion"),
        ({"text"}, "text"),
    ):
        if needed <= set(columns):
            return shape
    return None


def _take_named(
    translation: Translation, keys: TheirKeys, name: str, given: dict[str, Any], *, evaluates: bool
) -> None:
    config, split, test = given["dataset_config"], given["dataset_train_split"], given["dataset_test_split"]
    number = _add_source(translation, keys.path("dataset_name"), name, config, split, None)
    if config is not None:
        ours = {"inputs": translation.sources[number]["inputs"]}
        translation.take(keys.path("dataset_config"), config, other=ours)
    _take_split(translation, keys.path("dataset_train_split"), split, number)
    on_hub = translation.sources[number]["inputs"][0].startswith("hf://")
    if evaluates and on_hub:
        inputs = data_inputs(name, config=config, split=parse_split(test or "test").name)
        source = {"name": f"{translation.sources[number]['name']}-test", "inputs": inputs, "only_val": True}
        translation.sources.append(source)
        if test is not None:
            translation.take(keys.path("dataset_test_split"), test, other={"only_val": True, "inputs": inputs})
        else:
            translation.assume(
                f"TRL evaluates on the test split, so the source {source['name']} is used for validation"
            )
    elif test is not None:
        note = (
            "the run does not evaluate" if not evaluates else "add a source with only_val and the files of this split"
        )
        translation.none(keys.path("dataset_test_split"), test, note)


def _add_source(
    translation: Translation, key: str, path: str, config: str | None, split: str | None, files: list[str] | None
) -> int:
    number = len(translation.sources)
    taken = [source["name"] for source in translation.sources]
    try:
        inputs = data_inputs(path, files=files, config=config, split=parse_split(split).name)
    except DataError as error:
        translation.refuse(key, path, str(error))
        inputs = [path]
    translation.sources.append({})
    translation.take(key, path, source=(number, {"name": source_name(path, taken), "inputs": inputs}))
    return number


def _take_split(translation: Translation, key: str, text: str | None, number: int) -> None:
    if text is None:
        return
    split = parse_split(text)
    if split.first is not None:
        translation.take(key, text, source=(number, {"max_samples": split.first}), note=split.note)
    elif split.note:
        translation.none(key, text, split.note)
    else:
        on_hub = translation.sources[number]["inputs"][0].startswith("hf://")
        translation.default(
            key, text, note="the URL in inputs contains the split" if on_hub else "chatmill reads the whole file"
        )
