"""What a tokenizer folder says about its chat template: the template, the special tokens, where generation stops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from chatmill.errors import DataError, UsageError, one_line
from chatmill.format.template.tracing.sandbox import SPECIAL_NAMES

TOOL_USE = "tool_use"
"""The name under which a folder keeps another template for conversations with tools."""


@dataclass(frozen=True)
class TemplateSource:
    name: str
    """As errors call it."""
    source: str


@dataclass(frozen=True)
class HFFolder:
    template: TemplateSource
    with_tools: TemplateSource | None = None
    """For conversations with tools, where the folder has one of its own."""
    special: Mapping[str, str] = field(default_factory=dict)
    """`bos_token` and the like."""
    stops: tuple[int, ...] | None = None
    """The ids a server stops at, of generation_config.json; None where there is no such file."""
    tokenizer_json: Path | None = None


def read_folder(tokenizer: str, chat_template: str | None) -> HFFolder:
    """Everything beside the vocabulary; `chat_template` is a file that goes before the folder's own."""
    path = Path(tokenizer)
    config: dict[str, Any] = {}
    stops: tuple[int, ...] | None = None
    tokenizer_json: Path | None = None
    templates: dict[str, TemplateSource] = {}
    if tokenizer != "bytes" and path.is_dir():
        config = _json(path / "special_tokens_map.json") | _json(path / "tokenizer_config.json")
        stops = _stops(path / "generation_config.json")
        templates = _templates(path, config)
        tokenizer_json = path / "tokenizer.json"
    elif tokenizer != "bytes":
        tokenizer_json = path
    if chat_template is not None:
        templates = {"default": TemplateSource(_shown(Path(chat_template)), _text(Path(chat_template)))}
    if "default" not in templates:
        where = _shown(path)
        if templates:
            names = ", ".join(templates)
            raise UsageError(f"{where}: has chat templates {names} but no default; choose one with --chat-template")
        if tokenizer != "bytes" and not path.exists():
            raise UsageError(f"{where}: no such file or folder; expected the folder of a Hugging Face tokenizer")
        raise UsageError(f"{where}: has no chat template; give one with --chat-template FILE")
    return HFFolder(
        templates["default"],
        templates.get(TOOL_USE),
        {name: token for name in SPECIAL_NAMES if (token := _token(config.get(name))) is not None},
        stops,
        tokenizer_json if tokenizer_json is not None and _is_tokenizer(tokenizer_json) else None,
    )


def has_template(tokenizer: str) -> bool:
    """Whether the folder of a tokenizer has a chat template."""
    path = Path(tokenizer)
    return path.is_dir() and "default" in _templates(path, _json(path / "tokenizer_config.json"))


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, TemplateSource]:
    """The templates of a folder by their names; a file of its own goes before what the config holds."""
    file = folder / "tokenizer_config.json"
    given = config.get("chat_template")
    found: dict[str, TemplateSource] = {}
    if isinstance(given, str):
        found["default"] = TemplateSource(_shown(file), given)
    elif isinstance(given, list):
        for entry in given:
            if not (isinstance(entry, dict) and isinstance(entry.get("name"), str)):
                raise DataError(f"{_shown(file)}: chat_template holds something else than names and templates")
            found[str(entry.get("name"))] = TemplateSource(_shown(file), str(entry.get("template")))
    if (own := folder / "chat_template.jinja").is_file():
        found["default"] = TemplateSource(_shown(own), _text(own))
    elif "default" not in found and isinstance(old := _json(folder / "chat_template.json").get("chat_template"), str):
        found["default"] = TemplateSource(_shown(folder / "chat_template.json"), old)
    for more in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[more.stem] = TemplateSource(_shown(more), _text(more))
    return found


def _stops(path: Path) -> tuple[int, ...] | None:
    """The ids of `eos_token_id`: one, or a list of them."""
    if not path.is_file():
        return None
    given = _json(path).get("eos_token_id")
    ids = [given] if isinstance(given, int) else given
    if not isinstance(ids, list) or not all(type(id) is int for id in ids):
        raise DataError(f"{_shown(path)}: eos_token_id is {one_line(repr(given))}; expected an id or a list of ids")
    return tuple(ids)


class _TokenizerFile(msgspec.Struct):
    """A tokenizer.json, as far as it takes to know that it is one."""

    model: dict[str, msgspec.Raw]


def _is_tokenizer(path: Path) -> bool:
    try:
        return path.is_file() and "vocab" in msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).model
    except (msgspec.DecodeError, OSError):
        return False


def _token(given: Any) -> str | None:
    """A special token, written as text or as an object with its content."""
    if isinstance(given, dict):
        given = given.get("content")
    return given if isinstance(given, str) else None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise DataError(f"{_shown(path)}: cannot be read ({one_line(str(error))}); expected a JSON object") from None
    if not isinstance(found, dict):
        raise DataError(f"{_shown(path)}: holds no JSON object")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise DataError(f"{_shown(path)}: cannot be read ({reason}); a chat template is a Jinja file") from None


def _shown(path: Path) -> str:
    return one_line(str(path), 300)
