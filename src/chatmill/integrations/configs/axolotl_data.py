"""Convert the `datasets` of an Axolotl config to recipe sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chatmill.errors import DataError
from chatmill.integrations.configs.chat_templates import INSTRUCT, STYLES, PromptStyle
from chatmill.integrations.configs.data_places import data_inputs, parse_split, source_name
from chatmill.integrations.configs.report import TheirKeys, Translation

CHAT_TYPES = ("chat_template", "chat_template.default", "sharegpt", "messages", "messages.chat")
PREFERENCE_TYPES = ("chatml.", "llama3.", "chat_template.argilla", "bradley_terry", "stepwise_supervised", "zephyr.")
INPUT_NOTE = "chatmill writes the input after the instruction, without the line ### Input:"
NOT_READ = "chatmill does not read this key for this type"
ENDS = "chatmill trains on the end token of each trained turn"
COLUMNS = {
    "gpteacher": {"output": "response"},
    "oasst": {"instruction": "INSTRUCTION", "output": "RESPONSE"},
    "jeopardy": {"instruction": "question", "input": "category", "output": "answer"},
    "alpaca_chat.load_qa": {"instruction": "question", "output": "answer"},
    "alpaca_chat.load_camel_ai": {"instruction": "message_1", "output": "message_2"},
}
"""Column names of Axolotl types that have one instruction and one answer per record."""
NOTES = {
    "ds_type": "chatmill detects the file type from the file name",
    "trust_remote_code": "chatmill does not run code from datasets",
    "preprocess_shards": "chatmill uses its own worker processes; the result is the same",
    "shards": "chatmill reads the whole dataset; set max_samples to read part of it",
    "shards_idx": "chatmill reads the whole dataset; set max_samples to read part of it",
    "conversation": "chatmill uses the chat template instead of a FastChat format",
    "split_thinking": "chatmill reads reasoning from a separate key, and does not parse <think> in the text",
    "template_thinking_key": "chatmill passes reasoning to the chat template as reasoning_content",
    "drop_system_message": "chatmill keeps system messages, so the prompts will differ",
    "field_human": NOT_READ,
    "field_model": NOT_READ,
    "input_format": NOT_READ,
    "input_transform": "chatmill does not run functions on records",
    "logprobs_field": "chatmill does not support distillation from log probabilities",
    "temperature": "chatmill does not support distillation from log probabilities",
    "skip": "chatmill reads the whole dataset",
    "text_column": NOT_READ,
}


@dataclass
class Layout:
    """How the records of all sources in a recipe are rendered."""

    kinds: dict[str, str] = field(default_factory=dict)
    """Maps each kind of source (`text`, `chat` or `style`) to the config key of the first source of that kind."""
    style: PromptStyle | None = None
    chat_template: tuple[str, Any] | None = None
    """The config key and value of the first chat template that a dataset sets."""


def take_datasets(translation: Translation, keys: TheirKeys, name: str, layout: Layout, *, only_val: bool) -> None:
    """Convert each entry of `datasets` or `test_datasets` to a recipe source."""
    entries = keys.tables(name)
    for number, entry in enumerate(entries or []):
        _take_dataset(translation, TheirKeys(entry, translation, f"{keys.path(name)}[{number}]."), layout, only_val)


def _take_dataset(translation: Translation, keys: TheirKeys, layout: Layout, only_val: bool) -> None:
    number = len(translation.sources)
    translation.sources.append({})
    _take_place(translation, keys, number)
    if only_val:
        translation.sources[number]["only_val"] = True
        translation.origins[f"sources[{number}].only_val"] = "test_datasets"
    kind = keys.pop("type")
    if isinstance(kind, dict):
        _take_user_defined(translation, keys, kind, number, layout)
    elif kind is None or not isinstance(kind, str):
        translation.refuse(keys.path("type"), kind, "chatmill does not read pretokenized data; use the original text")
    else:
        _take_type(translation, keys, kind, number, layout)
    notes = NOTES | dict.fromkeys(
        (
            *("field", "field_messages", "field_tools", "field_thinking", "message_property_mappings", "roles"),
            *("message_field_role", "message_field_content", "message_field_training"),
            *("message_field_training_detail", "roles_to_train", "train_on_eos", "train_on_eot"),
            *("chat_template", "chat_template_jinja"),
        ),
        NOT_READ,
    )
    translation.close(keys, notes, off={"field": "text"})


def _take_place(translation: Translation, keys: TheirKeys, number: int) -> None:
    path, files, config = keys.text("path"), keys.texts("data_files"), keys.text("name")
    text, revision = keys.text("split"), keys.text("revision")
    split = parse_split(text)
    if path is None:
        translation.faults.append(f"{keys.path('path')}: the path is missing; expected a file or a dataset on the Hub")
        return
    try:
        inputs = data_inputs(path, files=files, config=config, split=split.name, revision=revision or "")
    except DataError as error:
        translation.refuse(keys.path("path"), path, str(error))
        inputs = [path]
    name = source_name((files or [path])[0] if path in ("json", "parquet") else path, _names(translation))
    translation.take(keys.path("path"), path, source=(number, {"name": name, "inputs": inputs}))
    on_hub = inputs[0].startswith("hf://")
    if files is not None:
        translation.take(keys.path("data_files"), files, other={"inputs": inputs})
    if config is not None:
        note = "" if on_hub and not files else "chatmill reads the file unchanged"
        translation.take(keys.path("name"), config, other={"inputs": inputs}, note=note)
    if text is not None:
        taken = {} if split.first is None else {"max_samples": split.first}
        if split.note and not taken:
            translation.none(keys.path("split"), text, split.note)
        elif taken:
            translation.take(keys.path("split"), text, source=(number, taken), note=split.note)
        else:
            note = "the URL in inputs contains the split" if on_hub and not files else "chatmill reads the whole file"
            translation.default(keys.path("split"), text, note=note)
    if revision is not None:
        if on_hub and files:
            translation.take(keys.path("revision"), revision, other={"inputs": inputs})
        else:
            translation.none(
                keys.path("revision"),
                revision,
                "chatmill reads the newest revision; set data_files to read another revision",
            )


def _names(translation: Translation) -> list[str]:
    return [source["name"] for source in translation.sources if "name" in source]


def _take_type(translation: Translation, keys: TheirKeys, kind: str, number: int, layout: Layout) -> None:
    base, _, style = kind.partition(":")
    if kind in CHAT_TYPES:
        layout.kinds.setdefault("chat", keys.path("type"))
        take_messages(translation, keys, kind, number, layout)
    elif base == "completion":
        layout.kinds.setdefault("text", keys.path("type"))
        column = keys.text("field")
        translation.take(keys.path("type"), kind, source=(number, {"shape": "text"}), other={"format": "text"})
        if column is not None:
            columns = {} if column == "text" else {"columns": {"text": column}}
            translation.take(keys.path("field"), column, source=(number, columns))
    elif base == "alpaca" or kind in COLUMNS or base in ("alpaca_chat.load", "alpaca_w_system.load_open_orca"):
        style = style or ("chat" if base.startswith("alpaca_chat") else "instruct")
        taken: dict[str, Any] = {"shape": "alpaca"}
        if kind in COLUMNS:
            taken["columns"] = COLUMNS[kind]
        layout.kinds.setdefault("style", keys.path("type"))
        layout.style = layout.style or STYLES.get(style, INSTRUCT)
        note = INPUT_NOTE if style in STYLES else f"unknown style {style}; chatmill uses the style ### Instruction:"
        translation.take(keys.path("type"), kind, source=(number, taken), note=note)
    elif kind.startswith(PREFERENCE_TYPES):
        translation.refuse(keys.path("type"), kind, "chatmill supports only SFT, not preferences or rewards")
    elif kind == "input_output":
        reason = "chatmill does not support labeled segments; write them as messages with train_ranges"
        translation.refuse(keys.path("type"), kind, reason)
    else:
        reason = "chatmill does not support this type; expected chat_template, alpaca, completion or a table"
        translation.refuse(keys.path("type"), kind, reason)


def take_messages(translation: Translation, keys: TheirKeys, kind: str, number: int, layout: Layout) -> None:
    """Convert the column names, message keys, roles and trained turns of a dataset of messages."""
    is_sharegpt = kind == "sharegpt"
    columns: dict[str, Any] = {}
    translation.take(keys.path("type"), kind, source=(number, {"shape": "sharegpt" if is_sharegpt else "messages"}))
    named = {"field_messages": "messages", "field_tools": "tools", "field_thinking": "reasoning_content"}
    named |= {"message_field_role": "role", "message_field_content": "content", "message_field_training": "train"}
    named |= {"message_field_training_detail": "train_detail"}
    for theirs, ours in named.items():
        if (column := keys.text(theirs)) is not None:
            if ours == "train_detail" and column not in ("train_detail", "training_detail"):
                translation.none(keys.path(theirs), column, "chatmill reads only train_detail and training_detail")
            else:
                _rename(translation, keys.path(theirs), column, ours, columns)
    if (mappings := keys.table("message_property_mappings")) is not None:
        table = TheirKeys(mappings, translation, f"{keys.path('message_property_mappings')}.")
        for ours in ("role", "content", "reasoning_content", "tool_calls", "name"):
            if (column := table.text(ours)) is not None:
                _rename(translation, table.path(ours), column, ours, columns)
        translation.close(table, dict.fromkeys(table.left, "chatmill does not read this property"))
    _take_roles(translation, keys, columns)
    if is_sharegpt and not columns.keys() <= {"user", "assistant", "system", "tool"}:
        columns = {"messages": "conversations", "role": "from", "content": "value"} | columns
        translation.sources[number]["shape"] = "messages"
    if columns:
        translation.sources[number]["columns"] = columns
    _take_trained(translation, keys, number)
    for name in ("chat_template", "chat_template_jinja"):
        if (value := keys.text(name)) is not None:
            layout.chat_template = layout.chat_template or (keys.path(name), value)
            translation.default(keys.path(name), value, note="the recipe uses this chat template")


def _rename(translation: Translation, key: str, column: str, ours: str, columns: dict[str, Any]) -> None:
    if column == ours:
        translation.default(key, column, note="chatmill already expects this name")
    elif "," in column or "=" in column or column != column.strip():
        translation.refuse(key, column, "chatmill cannot read a column with this name")
    else:
        columns[ours] = column
        translation.take(key, column, other={f"columns.{ours}": column})


def _take_roles(translation: Translation, keys: TheirKeys, columns: dict[str, Any]) -> None:
    roles = keys.table("roles")
    if roles is None:
        return
    table = TheirKeys(roles, translation, f"{keys.path('roles')}.")
    for role in ("user", "assistant", "system", "tool"):
        if (names := table.texts(role)) is not None:
            others = [name for name in names if name != role]
            if others:
                columns[role] = others
            translation.take(table.path(role), names, other={f"columns.{role}": others} if others else {})
    translation.close(
        table, dict.fromkeys(table.left, "chatmill does not have this role and rejects records that use it")
    )


def _take_trained(translation: Translation, keys: TheirKeys, number: int) -> None:
    if (roles := keys.texts("roles_to_train")) is not None:
        names = {{"gpt": "assistant", "human": "user"}.get(role, role) for role in roles}
        if names == {"assistant"}:
            translation.default(keys.path("roles_to_train"), roles, note="train_on assistant")
        elif not names:
            taken = {"train_on": "last"}
            translation.take(
                keys.path("roles_to_train"), roles, source=(number, taken), note="chatmill trains only on the last turn"
            )
        else:
            note = (
                "chatmill trains on all turns except tool results"
                if names != {"user", "assistant"}
                else "chatmill also trains on system turns"
            )
            translation.take(keys.path("roles_to_train"), roles, source=(number, {"train_on": "all"}), note=note)
    for name in ("train_on_eos", "train_on_eot"):
        if (value := keys.text_or_no(name)) is None:
            continue
        if value == "turn":
            translation.default(keys.path(name), value, note=ENDS)
        else:
            effects = {"all": "chatmill does not train on the end tokens of other turns", "last": ENDS}
            note = effects.get(
                value, "chatmill trains on the end token of each trained turn, so that the model learns to stop"
            )
            translation.none(keys.path(name), value, note)


def _take_user_defined(
    translation: Translation, keys: TheirKeys, kind: Mapping[str, Any], number: int, layout: Layout
) -> None:
    """Convert a `type` that is a table of column names and prompt formats."""
    table = TheirKeys(kind, translation, f"{keys.path('type')}.")
    translation.sources[number]["shape"] = "alpaca"
    columns: dict[str, Any] = {}
    for theirs, ours in (
        ("field_instruction", "instruction"),
        ("field_input", "input"),
        ("field_output", "output"),
        ("field_system", "system"),
    ):
        if (column := table.text(theirs)) is not None:
            _rename(translation, table.path(theirs), column, ours, columns)
    if columns:
        translation.sources[number]["columns"] = columns
    system, around = table.pop("system_prompt"), table.pop("system_format")
    texts = {"no_input_format": table.text("no_input_format"), "format": table.text("format")}
    question = next((text for text in texts.values() if text and text.count("{instruction}") == 1), "{instruction} ")
    question = question.replace("{input}", "")
    system_format = around if isinstance(around, str) and around.count("{system}") == 1 else "{system}"
    layout.kinds.setdefault("style", keys.path("type"))
    layout.style = layout.style or PromptStyle(
        question.replace("{instruction}", "{}"), system_format.replace("{system}", "{}"), str(system or "")
    )
    for name, value in (("system_prompt", system), ("system_format", around), *texts.items()):
        if value is not None:
            note = "chatmill writes the input after the instruction" if name == "format" else ""
            translation.take(table.path(name), value, other={"chat_template": "written"}, note=note)
    translation.close(table, {})
