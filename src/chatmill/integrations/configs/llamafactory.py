"""Convert LLaMA-Factory's dataset_info.json and run config to a recipe and a train config.

The conversion follows LLaMA-Factory's source at commit ff6d4d1: `hparams`, and `parser.py`, `converter.py` and
`template.py` in `data`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chatmill.errors import DataError, UsageError, one_line
from chatmill.integrations.configs.data_places import take_model
from chatmill.integrations.configs.hf_arguments import take_training_arguments
from chatmill.integrations.configs.llamafactory_data import take_entry, why_not_sft
from chatmill.integrations.configs.llamafactory_notes import NOTES, OFF, OTHER_LOSSES, OTHER_OPTIMIZERS
from chatmill.integrations.configs.llamafactory_rows import take_mixing, take_rows
from chatmill.integrations.configs.model_keys import LoraNames, take_lora
from chatmill.integrations.configs.read_config import read_config
from chatmill.integrations.configs.report import IS_OFF, TheirKeys, Translation
from chatmill.integrations.configs.rows_keys import take_val_size, without_val
from chatmill.integrations.configs.run_keys import RunNames
from chatmill.integrations.configs.write_config import ImportedConfig
from chatmill.remote.urls import Place, place

RUN = RunNames()
LORA = LoraNames(
    rank="lora_rank",
    targets="lora_target",
    saved="additional_target",
    separator=",",
    all_linear="all",
    default_rank=8,
    default_alpha=None,
)
DATASET_INFO = "dataset_info.json"
STAGES = {
    "pt": "chatmill supports only SFT, not pretraining",
    "rm": "chatmill supports only SFT, not reward models",
    "ppo": "chatmill supports only SFT, not reinforcement learning",
    "dpo": "chatmill supports only SFT, not preference training",
    "kto": "chatmill supports only SFT, not preference training",
}
PARENTS = 4
"""How many parent folders of a run config are searched for the data folder."""


def import_llamafactory(
    path: str | Path,
    train: str | Path | None = None,
    *,
    datasets: Sequence[str] = (),
    ranks: int | None = None,
    model: str | None = None,
) -> ImportedConfig:
    """Convert a dataset_info.json, a run config or both, with a report on each key.

    `path` and `train` can be passed in either order. If no dataset_info.json is passed, the one in the run config's
    `dataset_dir` is read. Without a run config, the recipe contains the given `datasets`, by default all datasets for
    SFT. `ranks` is the number of GPUs. `model` is the folder of a base model that replaces the model in the config.
    """
    info, run = _which(path, train)
    values = read_config(run, "a LLaMA-Factory config in YAML") if run is not None else {}
    translation = Translation("LLaMA-Factory", str(run or info), ranks=ranks, model=model)
    if run is None:
        assert info is not None
        order = _import_info(translation, info, datasets)
        return ImportedConfig.of(translation, order)
    if datasets:
        raise UsageError(
            "--dataset is only for a dataset_info.json without a run config; set dataset in the run config"
        )
    keys = TheirKeys(values, translation)
    _refuse(translation, keys)
    take_model(translation, keys, "model_name_or_path", "model_revision")
    _take_adapters(translation, keys)
    evaluates = _take_training(translation, keys)
    names = _take_data(translation, keys, info, run, evaluates=evaluates)
    translation.close(keys, NOTES, off=OFF)
    return ImportedConfig.of(translation, [*values, *names])


def _which(path: str | Path, train: str | Path | None) -> tuple[Place | None, Place | None]:
    """Return the paths of dataset_info.json and of the run config; a path is None if the file was not passed."""
    files = [place(each) for each in (path, train) if each is not None]
    info = [each for each in files if each.name.lower().endswith(".json")]
    run = [each for each in files if each.name.lower().endswith((".yaml", ".yml"))]
    if len(info) > 1 or len(run) > 1 or len(info) + len(run) < len(files):
        raise UsageError(f"{one_line(str(path))}: expected a {DATASET_INFO}, the .yaml file of a run, or one of each")
    return info[0] if info else None, run[0] if run else None


def _import_info(translation: Translation, path: Place, names: Sequence[str]) -> list[str]:
    """Import datasets without a run config, and report the datasets that are not for SFT."""
    entries = read_config(path, "a dataset_info.json")
    if unknown := [name for name in names if name not in entries]:
        raise DataError(f'{path}: does not contain the dataset "{one_line(unknown[0])}"')
    for name, entry in entries.items():
        if names and name not in names:
            continue
        reason = why_not_sft(entry) if isinstance(entry, dict) else None
        if reason and not names:
            translation.none(name, entry, f"not imported: {reason}")
        else:
            take_entry(translation, name, entry, path.parent)
    if not translation.sources and not translation.faults:
        translation.faults.append("the file contains no dataset for SFT")
    if names and len(names) < len(entries):
        translation.assume(f"unused datasets in the file: {len(entries) - len(names)}")
    train: dict[str, Any] = {"use_loss_mask": True, "block_size": 2048}
    note = "without a run config, row length and loss mask are as in LLaMA-Factory; other keys keep their defaults"
    translation.assume(note, recipe={"max_tokens": 2048}, train=train)
    if translation.model is not None:
        ours = {"recipe": {"tokenizer": translation.model}, "train": {"init_from_model": translation.model}}
        translation.assume("--model sets the model folder", **ours)
    else:
        translation.assume("without --model FOLDER, `chatmill train` trains a small byte-level model from scratch")
    return list(entries)


def _refuse(translation: Translation, keys: TheirKeys) -> None:
    if "train_dataset" in keys and "model_name_or_path" not in keys:
        raise DataError(
            f"{translation.place}: the config is for LLaMA-Factory's v1 engine, which chatmill does not support"
        )
    if "compute_environment" in keys and "model_name_or_path" not in keys:
        raise DataError(
            f"{translation.place}: is an Accelerate config; pass the run config, and the number of GPUs with --ranks"
        )
    stage = keys.text("stage")
    if stage in STAGES:
        translation.refuse(keys.path("stage"), stage, STAGES[stage])
    elif stage is not None:
        translation.default(keys.path("stage"), stage, note="chatmill always does supervised fine-tuning")
    kind = keys.peek("finetuning_type")
    if isinstance(kind, str) and kind not in ("lora", "full"):
        keys.pop("finetuning_type")
        translation.refuse("finetuning_type", kind, "chatmill trains all weights or LoRA adapters")
    for name in (
        "use_llama_pro",
        "mixture_of_depths",
        "use_mca",
        "use_megatron_bridge",
        "use_hyper_parallel",
        "use_kt",
    ):
        if value := keys.peek(name):
            keys.pop(name)
            translation.refuse(name, value, "chatmill does not support this engine or model modification")
    for name in ("image_max_pixels", "video_max_pixels", "image_min_pixels", "video_min_pixels"):
        if (value := keys.pop(name)) is not None:
            translation.refuse(keys.path(name), value, "chatmill trains only on text, not on images or audio")


def _take_adapters(translation: Translation, keys: TheirKeys) -> None:
    kind = keys.text("finetuning_type")
    lora = (kind or "lora") == "lora"
    if kind is not None:
        translation.take(keys.path("finetuning_type"), kind, other={"lora": "as below"} if lora else {})
    take_lora(translation, keys, LORA, used=lora)
    bits = keys.integer("quantization_bit")
    if bits == 4 and lora:
        note = "chatmill uses NF4 with double quantization"
        translation.take(keys.path("quantization_bit"), bits, train={"quantize": "nf4"}, note=note)
    elif bits is not None:
        note = "chatmill loads the base model in its stored precision, which takes more memory"
        translation.none(keys.path("quantization_bit"), bits, note)


def _take_training(translation: Translation, keys: TheirKeys) -> bool:
    disabled = keys.switch("disable_gradient_checkpointing")
    checkpoints = {"activation_checkpointing": not disabled}
    if disabled is not None:
        translation.take(keys.path("disable_gradient_checkpointing"), disabled, train=checkpoints)
    muon = keys.switch("use_muon")
    evaluates = take_training_arguments(translation, keys, RUN, checkpointing=not disabled)
    if muon:
        note = "chatmill scales the updates to the RMS of AdamW updates"
        translation.take(keys.path("use_muon"), muon, train={"optimizer": "muon"}, note=note)
        if translation.train.get("parallel") == "fsdp":
            translation.assume("muon needs whole matrices, so weights are not sharded", train={"parallel": "ddp"})
    elif muon is not None:
        translation.default(keys.path("use_muon"), muon, note=IS_OFF)
    for names, note in ((OTHER_OPTIMIZERS, "chatmill uses adamw"), (OTHER_LOSSES, "chatmill uses plain cross entropy")):
        for name in names:
            if value := keys.peek(name):
                keys.pop(name)
                translation.none(keys.path(name), value, f"{note}; the loss will differ")
    if (pure := keys.switch("pure_bf16")) is not None:
        taken = {"optimizer": "adamw_bf16"} if pure and "lora" not in translation.train else {}
        translation.take(keys.path("pure_bf16"), pure, train=taken, note="the weights are bfloat16" if taken else "")
    if (fp8 := keys.switch("fp8")) is not None:
        lora = "lora" in translation.train
        note = "chatmill supports float8 only for full fine-tuning" if lora and fp8 else ""
        translation.take(keys.path("fp8"), fp8, train={"fp8": fp8 and not lora}, note=note)
    patience = keys.integer("early_stopping_steps", least=1)
    if patience is not None and evaluates:
        translation.take(keys.path("early_stopping_steps"), patience, train={"early_stop_patience": patience})
    elif patience is not None:
        translation.none(keys.path("early_stopping_steps"), patience, "a run without evaluation cannot stop early")
    if (shuffles := keys.switch("disable_shuffling")) is not None:
        translation.take(keys.path("disable_shuffling"), shuffles, train={"epoch_shuffle": not shuffles})
    return evaluates


def _take_data(
    translation: Translation, keys: TheirKeys, info: Place | None, run: Place, *, evaluates: bool
) -> list[str]:
    folder = keys.text("dataset_dir")
    names, others = keys.texts("dataset", separator=","), keys.texts("eval_dataset", separator=",")
    if not names:
        translation.faults.append("the config has no dataset; expected the names of datasets in dataset_info.json")
        return []
    path = info if info is not None else _find_info(translation, folder, run)
    if path is None:
        return []
    entries = read_config(path, "a dataset_info.json")
    if folder is not None:
        translation.default(keys.path("dataset_dir"), folder, note=f"chatmill reads {path}")
    for key, group in (("dataset", names), ("eval_dataset", others)):
        for name in group or []:
            if name not in entries:
                translation.faults.append(f'{key}: "{one_line(name)}" is not in {path}')
            else:
                take_entry(translation, name, entries[name], path.parent, only_val=key != "dataset")
        if group is not None:
            sources = [source.get("name") for source in translation.sources]
            translation.take(keys.path(key), group, other={"sources": sources})
    if len(entries) > len(names):
        translation.assume(f"unused datasets in {path}: {len(entries) - len({*names, *(others or [])})}")
    take_mixing(translation, keys)
    most = keys.integer("max_samples", least=1)
    if most is not None:
        for source in translation.sources:
            source["max_samples"] = min(most, source.get("max_samples", most))
        translation.take(
            keys.path("max_samples"),
            most,
            other={"max_samples": most},
            note="the limit applies to each source separately",
        )
    take_rows(translation, keys)
    has_val = take_val_size(translation, keys, "val_size", other_val=bool(others))
    if not has_val:
        without_val(translation)
    return [*names, *(others or [])]


def _find_info(translation: Translation, folder: str | None, run: Place) -> Path | None:
    """Find dataset_info.json in `dataset_dir`, relative to the current folder or to a parent of the config."""
    if folder is not None and (folder.startswith("REMOTE:") or folder == "ONLINE"):
        translation.faults.append(f"dataset_dir is {folder}; download the data, and also pass its {DATASET_INFO}")
        return None
    name = Path(folder or "data") / DATASET_INFO
    above = list(run.resolve().parents)[:PARENTS] if isinstance(run, Path) else []
    places = [name, *(parent / name for parent in above)]
    for each in places:
        if each.is_file():
            return each
    translation.faults.append(
        f"{name} is not in the current folder or in a parent folder of the config; also pass the {DATASET_INFO}"
    )
    return None
