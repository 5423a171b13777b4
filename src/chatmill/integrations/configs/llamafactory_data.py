"""Convert entries of LLaMA-Factory's dataset_info.json to recipe sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatmill.errors import DataError
from chatmill.integrations.configs.data_places import data_inputs, source_name
from chatmill.integrations.configs.report import TheirKeys, Translation
from chatmill.remote.urls import Place

MEDIA = ("images", "videos", "audios")
PREFERENCES = ("chosen", "rejected", "kto_tag")
ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
TAGS = {
    "role_tag": ("role", "from"),
    "content_tag": ("content", "value"),
    "user_tag": ("user", "human"),
    "assistant_tag": ("assistant", "gpt"),
    "observation_tag": ("tool", "observation"),
    "function_tag": ("", "function_call"),
    "system_tag": ("system", "system"),
}
"""Maps each LLaMA-Factory tag to chatmill's name for it and to its default value."""
INPUT_NOTE = "unlike LLaMA-Factory, chatmill writes an empty line between instruction and input"


def why_not_sft(entry: Mapping[str, Any]) -> str | None:
    """Return the reason why an entry of dataset_info.json cannot be used for SFT, or None if the entry can be used."""
    columns = entry.get("columns") if isinstance(entry.get("columns"), dict) else {}
    assert isinstance(columns, dict)
    if entry.get("ranking") or any(columns.get(name) for name in PREFERENCES):
        return "the dataset has preference pairs, but chatmill supports only SFT"
    if any(columns.get(name) for name in MEDIA):
        return "the dataset has images, videos or audio, but chatmill trains only on text"
    if "script_url" in entry:
        return "a script loads the dataset, but chatmill does not run code from datasets"
    if not any(name in entry for name in ("file_name", "hf_hub_url", "cloud_file_name")):
        return "chatmill reads only files and the Hugging Face Hub; download the dataset, and set file_name"
    return None


def take_entry(translation: Translation, name: str, entry: Any, folder: Place, *, only_val: bool = False) -> None:
    """Convert one entry of dataset_info.json to a source; an unusable entry makes the import fail."""
    if not isinstance(entry, dict):
        translation.refuse(name, entry, "an entry of dataset_info.json must be an object")
        return
    if reason := why_not_sft(entry):
        translation.refuse(name, entry, reason)
        return
    keys = TheirKeys(entry, translation, f"{name}.")
    number = len(translation.sources)
    taken = [source["name"] for source in translation.sources]
    translation.sources.append({"name": source_name(name, taken)})
    translation.origins[f"sources[{number}].name"] = f"dataset_info.json: {name}"
    _take_place(translation, keys, number, folder)
    if only_val:
        translation.sources[number]["only_val"] = True
        translation.origins[f"sources[{number}].only_val"] = "eval_dataset"
    formatting = keys.text("formatting") or "alpaca"
    columns, tags = keys.table("columns"), keys.table("tags")
    renamed: dict[str, Any] = {}
    if formatting == "alpaca":
        shape = _take_alpaca(translation, keys, columns, tags, renamed)
    elif formatting in ("sharegpt", "openai"):
        shape = _take_messages(translation, keys, columns, tags, renamed)
    else:
        translation.refuse(keys.path("formatting"), formatting, "expected alpaca, sharegpt or openai")
        return
    translation.sources[number]["shape"] = shape
    if renamed:
        translation.sources[number]["columns"] = renamed
    if formatting == "alpaca" and "formatting" not in entry:
        translation.assume(f"{name}: formatting alpaca; {INPUT_NOTE}")
    if "formatting" in entry:
        note = INPUT_NOTE if formatting == "alpaca" else ""
        translation.take(keys.path("formatting"), formatting, other={"shape": shape}, note=note)
    if (count := keys.integer("num_samples", least=1)) is not None:
        note = "chatmill reads the first rows; LLaMA-Factory samples rows, and repeats rows of smaller datasets"
        translation.take(keys.path("num_samples"), count, source=(number, {"max_samples": count}), note=note)
    translation.close(
        keys,
        {
            "ranking": "",
            "ms_hub_url": "chatmill reads the dataset from the Hugging Face Hub or from the file instead",
            "om_hub_url": "chatmill reads the dataset from the Hugging Face Hub or from the file instead",
        },
    )


def _take_place(translation: Translation, keys: TheirKeys, number: int, folder: Place) -> None:
    """Convert the location of a dataset; as in LLaMA-Factory, a dataset on the Hub takes precedence over a file."""
    values = {name: keys.text(name) for name in ("hf_hub_url", "cloud_file_name", "file_name")}
    subset, split, sub_folder = keys.text("subset"), keys.text("split"), keys.text("folder")
    key, path = next(((name, value) for name, value in values.items() if value is not None), ("file_name", None))
    if path is None:
        translation.faults.append(f"{keys.path('file_name')}: the file name is missing; expected a path")
        return
    try:
        if key == "file_name":
            inputs = data_inputs(str(folder / path))
        else:
            inputs = data_inputs(path, config=subset, split=split or "train")
    except DataError as error:
        translation.refuse(keys.path(key), path, str(error))
        return
    translation.take(keys.path(key), path, source=(number, {"inputs": inputs}))
    for name, value in values.items():
        if value is not None and name != key:
            translation.default(keys.path(name), value, note=f"chatmill uses {key} instead")
    on_hub = inputs[0].startswith("hf://")
    for name, value in (("subset", subset), ("split", split)):
        if value is not None and on_hub:
            translation.take(keys.path(name), value, other={"inputs": inputs})
        elif value is not None:
            translation.none(keys.path(name), value, "chatmill reads the whole file")
    if sub_folder is not None:
        translation.none(keys.path("folder"), sub_folder, "change the URL in inputs to match the files in this folder")


def _take_alpaca(
    translation: Translation,
    keys: TheirKeys,
    columns: Mapping[str, Any] | None,
    tags: Mapping[str, Any] | None,
    renamed: dict[str, Any],
) -> str:
    if columns is not None:
        table = TheirKeys(columns, translation, keys.path("columns."))
        for theirs, ours in (*ALPACA.items(), ("system", "system"), ("tools", "tools")):
            _take_column(translation, table, theirs, ours, renamed)
        _close_columns(translation, keys, table, columns)
    if tags is not None:
        translation.default(keys.path("tags"), tags, note="chatmill does not read this key with formatting alpaca")
    return "alpaca"


def _take_messages(
    translation: Translation,
    keys: TheirKeys,
    columns: Mapping[str, Any] | None,
    tags: Mapping[str, Any] | None,
    renamed: dict[str, Any],
) -> str:
    table = TheirKeys(columns or {}, translation, keys.path("columns."))
    messages = table.text("messages")
    # If an entry has `tags`, LLaMA-Factory uses default values only for `role_tag` and `content_tag`.
    needed = ("role_tag", "content_tag") if tags is not None else tuple(TAGS)
    named = {tag: default if tag in needed else None for tag, (_, default) in TAGS.items()}
    given = TheirKeys(tags or {}, translation, keys.path("tags."))
    for tag in TAGS:
        if (value := given.text(tag)) is not None:
            named[tag] = value
            ours = TAGS[tag][0] or "tool_calls"
            translation.take(given.path(tag), value, other={} if value == ours else {f"columns.{ours}": value})
    translation.close(given, {})
    place = messages or "conversations"
    is_sharegpt = (place, named["role_tag"], named["content_tag"]) == ("conversations", "from", "value")
    if not is_sharegpt:
        parts = {"messages": place, "role": named["role_tag"], "content": named["content_tag"]}
        renamed |= {ours: theirs for ours, theirs in parts.items() if ours != theirs}
    for tag in ("user_tag", "assistant_tag", "observation_tag", "system_tag"):
        role, default = TAGS[tag]
        usual = (role, default) if is_sharegpt or tag in ("user_tag", "assistant_tag") else (role,)
        if named[tag] is not None and named[tag] not in usual:
            renamed[role] = named[tag]
    if messages is not None:
        place_of_messages = {"columns.messages": messages} if "messages" in renamed else {}
        translation.take(table.path("messages"), messages, other=place_of_messages)
    for name in ("system", "tools"):
        _take_column(translation, table, name, name, renamed)
    if columns is not None:
        _close_columns(translation, keys, table, columns)
    return "sharegpt" if is_sharegpt else "messages"


def _take_column(translation: Translation, table: TheirKeys, theirs: str, ours: str, renamed: dict[str, Any]) -> None:
    column = table.text(theirs)
    if column is None:
        return
    if column == ours:
        translation.default(table.path(theirs), column, note="chatmill already expects this name")
    elif "," in column or "=" in column or column != column.strip():
        translation.refuse(table.path(theirs), column, "chatmill cannot read a column with this name")
    elif ours in renamed:
        translation.none(table.path(theirs), column, f"another column is already used as {ours}")
    else:
        renamed[ours] = column
        translation.take(table.path(theirs), column, other={f"columns.{ours}": column})


def _close_columns(translation: Translation, keys: TheirKeys, table: TheirKeys, columns: Mapping[str, Any]) -> None:
    others = (*ALPACA, "messages", "system", "tools", *MEDIA, *PREFERENCES)
    translation.close(table, dict.fromkeys(others, "chatmill does not read this key with this formatting"))
