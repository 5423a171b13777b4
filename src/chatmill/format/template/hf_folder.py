"""The chat template, special tokens and stop tokens of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from chatmill.errors import DataError, UsageError, one_line
from chatmill.format.template.template_input import SPECIAL_NAMES
from chatmill.remote.named_files import TOKENIZER_LIMIT, given_name, local_file

TOOL_USE = "tool_use"
"""In a folder with several chat templates, the name of the template for conversations with tools."""


@dataclass(frozen=True)
class TemplateSource:
    name: str
    """The path of the template, with the key if the file is JSON.

    Error messages contain this name and a line number.
    """
    source: str


@dataclass(frozen=True)
class HFFolder:
    template: TemplateSource
    with_tools: TemplateSource | None = None
    """The template for conversations with tools, if the folder has one."""
    special: Mapping[str, str] = field(default_factory=dict)
    """Special tokens by name, such as `bos_token` and `eos_token`."""
    stops: tuple[int, ...] | None = None
    """Stop token ids, from `eos_token_id` in generation_config.json, or None if the key is missing."""
    tokenizer_json: Path | None = None
    marked_special: frozenset[str] = frozenset()
    """The tokens that tokenizer_config.json and special_tokens_map.json mark as special."""
    declared: tuple[dict[str, Any], ...] = ()
    """Added tokens from tokenizer_config.json, which may be missing from tokenizer.json."""


def read_folder(tokenizer: str, chat_template: str | None) -> HFFolder:
    """Read the chat template and the special tokens of a folder, but not its vocabulary.

    `chat_template` is the path of a file to use instead of the folder's template.
    """
    path = local_file(tokenizer, limit=TOKENIZER_LIMIT)
    is_folder = tokenizer != "bytes" and path.is_dir()
    files = [_json(path / name) for name in ("special_tokens_map.json", "tokenizer_config.json")] if is_folder else []
    config: dict[str, Any] = {key: value for file in files for key, value in file.items()}
    stops = _stops(path / "generation_config.json") if is_folder else None
    templates = _templates(path, config) if is_folder else {}
    tokenizer_json = path / "tokenizer.json" if is_folder else path
    if chat_template is not None:
        file = local_file(chat_template)
        templates = {"default": TemplateSource(_shown(file), _text(file))}
    if "default" not in templates:
        where = _shown(path)
        if templates:
            names = ", ".join(templates)
            raise UsageError(
                f"{where}: has the chat templates {names} but no default; choose a template with --chat-template FILE"
            )
        if tokenizer != "bytes" and not path.exists():
            raise UsageError(f"{where}: no such file or folder; expected the folder of a Hugging Face tokenizer")
        raise UsageError(f"{where}: has no chat template; pass a template with --chat-template FILE")
    return HFFolder(
        templates["default"],
        templates.get(TOOL_USE),
        {name: token for name in SPECIAL_NAMES if (token := _token(config.get(name))) is not None},
        stops,
        tokenizer_json if tokenizer != "bytes" and _is_tokenizer(tokenizer_json) else None,
        frozenset(token for file in files for token in _marked_special(file)),
        declared_tokens(path) if is_folder else (),
    )


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens that a folder defines, by name, such as `bos_token` and `eos_token`."""
    files = [_json(folder / name) for name in ("special_tokens_map.json", "tokenizer_config.json")]
    config: dict[str, Any] = {key: value for file in files for key, value in file.items()}
    return {name: token for name in SPECIAL_NAMES if (token := _token(config.get(name))) is not None}


def has_template(tokenizer: str) -> bool:
    """Whether `tokenizer` is a folder with at least one chat template."""
    path = local_file(tokenizer, limit=TOKENIZER_LIMIT)
    return tokenizer != "bytes" and path.is_dir() and bool(_templates(path, _json(path / "tokenizer_config.json")))


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, TemplateSource]:
    """Return the templates of a folder by name. chat_template.jinja takes precedence over tokenizer_config.json."""
    file = folder / "tokenizer_config.json"
    listed = config.get("chat_template")
    templates: dict[str, TemplateSource] = {}
    if isinstance(listed, str):
        templates["default"] = TemplateSource(f"{_shown(file)}:chat_template", listed)
    elif isinstance(listed, list):
        for entry in listed:
            if not (isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))):
                raise DataError(f"{_shown(file)}: chat_template must be a list of objects with a name and a template")
            key = f"{_shown(file)}:chat_template.{one_line(str(entry['name']))}"
            templates[entry["name"]] = TemplateSource(key, entry["template"])
    elif listed is not None:
        raise DataError(
            f"{_shown(file)}: chat_template is {one_line(repr(listed))}; expected a string or a list of templates"
        )
    if (own := folder / "chat_template.jinja").is_file():
        templates["default"] = TemplateSource(_shown(own), _text(own))
    elif "default" not in templates and isinstance(
        old := _json(folder / "chat_template.json").get("chat_template"), str
    ):
        templates["default"] = TemplateSource(f"{_shown(folder / 'chat_template.json')}:chat_template", old)
    for more in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[more.stem] = TemplateSource(_shown(more), _text(more))
    return templates


def _stops(path: Path) -> tuple[int, ...] | None:
    """Return the token ids in `eos_token_id` of a JSON file, or None if the key is missing."""
    given = _json(path).get("eos_token_id") if path.is_file() else None
    if given is None:
        return None
    ids = [given] if isinstance(given, int) else given
    if not isinstance(ids, list) or not all(type(id) is int for id in ids):
        raise DataError(f"{_shown(path)}: eos_token_id is {one_line(repr(given))}; expected an id or a list of ids")
    return tuple(ids)


def declared_tokens(folder: Path) -> tuple[dict[str, Any], ...]:
    """Return the added tokens listed in the folder's tokenizer_config.json, ordered by id."""
    listed = _json(folder / "tokenizer_config.json").get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return ()
    tokens = [{**token, "id": int(id)} for id, token in listed.items() if isinstance(token, dict) and id.isdecimal()]
    return tuple(sorted(tokens, key=lambda token: int(token["id"])))


def _marked_special(config: Mapping[str, Any]) -> Iterator[str]:
    given = [config.get(name) for name in SPECIAL_NAMES]
    for name in ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"):
        listed = config.get(name)
        given += listed.values() if isinstance(listed, dict) else listed if isinstance(listed, list) else []
    added = config.get("added_tokens_decoder")
    listed = added.values() if isinstance(added, dict) else ()
    given += [token for token in listed if isinstance(token, dict) and token.get("special")]
    return (token for token in map(_token, given) if token)


class _TokenizerFile(msgspec.Struct):
    """Decodes only the key `model`, which distinguishes a tokenizer.json from other JSON files."""

    model: dict[str, msgspec.Raw]


def _is_tokenizer(path: Path) -> bool:
    try:
        return path.is_file() and "vocab" in msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).model
    except (msgspec.DecodeError, OSError):
        return False


def _token(given: Any) -> str | None:
    """Return a special token that is given as a string or as an object with `content`."""
    if isinstance(given, dict):
        given = given.get("content")
    return given if isinstance(given, str) else None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise DataError(f"{_shown(path)}: cannot be read ({one_line(str(error))}); expected a JSON object") from None
    if not isinstance(content, dict):
        raise DataError(f"{_shown(path)}: expected a JSON object")
    return content


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise DataError(
            f"{_shown(path)}: cannot be read ({reason}); expected a Jinja file with a chat template"
        ) from None


def _shown(path: Path) -> str:
    return one_line(given_name(path), 300)
