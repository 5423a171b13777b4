"""The chat template of a saved model folder: the template that the training data was rendered with.

    data rendered with       template of the base model     template of the saved model
    its template             the same                       copied from the base model
    another template         any, or none                   the template of the data
    chatml, or a TOML file   any                            none

transformers and vLLM render prompts with the template in the model folder. For a preset or a TOML format, there is no
template that renders prompts as in training. The folder of such a model has no template, so that
`apply_chat_template` fails instead of prompting the model with a template that it was not trained on. `chatmill chat`
uses the format in training.json.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from chatmill.errors import DataError, one_line
from chatmill.load.source import DataSource
from chatmill.plain_file import read_plain
from chatmill.store import files
from chatmill.store.layout import TOKENIZER_STATE
from chatmill.store.primer_cache import PrimerCache

TEMPLATE, TEXT = "template", "text"
"""Names of the formats that render with a chat template, and without any chat format."""
DEFAULT, TOOL_USE = "default", "tool_use"
JINJA, OLD_JSON, TOKENIZER_CONFIG = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"
KEY = "chat_template"


def format_of(source: DataSource) -> Any:
    """Return the stored chat format of a dataset or a cache, or None if it is unknown."""
    metadata = source.dataset.meta if isinstance(source.dataset, PrimerCache) else source.dataset.metadata
    return None if metadata is None else metadata.format


def format_label(format: Any) -> str | None:
    """Return a short text that identifies a stored format, or None if the format is unknown.

    >>> format_label("chatml"), format_label({"name": "template", "template": "{{ messages }}"})
    ('chatml', 'template f24189f08c85…')
    """
    name = format.get("name") if isinstance(format, Mapping) else format
    if not isinstance(name, str):
        return None
    templates = _trained_templates(format)
    return one_line(name, 100) if not templates else _shown(templates).removeprefix("chat ")


def read_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates that transformers finds in a model folder, by name."""
    listed = _read_config(folder / TOKENIZER_CONFIG).get(KEY)
    templates: dict[str, str] = {}
    if isinstance(listed, str):
        templates[DEFAULT] = listed
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("template"), str):
            templates[str(entry.get("name"))] = entry["template"]
    if (folder / JINJA).is_file():
        templates[DEFAULT] = _read_text(folder / JINJA)
    elif isinstance(old := _read_config(folder / OLD_JSON).get(KEY), str):
        templates.setdefault(DEFAULT, old)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    return templates


def replaced_templates(folder: Path, format: Any) -> dict[str, str] | None:
    """Return the chat templates that replace those in a folder because the model was trained with this format. Return
    None if the templates in the folder are kept.
    """
    trained = _trained_templates(format)
    if trained is None:
        return None
    templates = read_templates(folder)
    if not trained:
        return {} if templates else None
    has_tokenizer = any(path.name != TOKENIZER_STATE for path in folder.glob("tokenizer*"))
    same = {name: text for name, text in templates.items() if name in (DEFAULT, TOOL_USE)} == trained
    return trained if has_tokenizer and not same else None


def write_templates(folder: Path, format: Any) -> None:
    """Replace the chat templates in a saved model folder if the model was trained with another format."""
    templates = replaced_templates(folder, format)
    if templates is None:
        return
    for name in (JINJA, OLD_JSON):
        (folder / name).unlink(missing_ok=True)
    stored = _read_config(folder / TOKENIZER_CONFIG)
    config = {name: value for name, value in stored.items() if name != KEY}
    if len(templates) == 1:
        files.write_file(folder / JINJA, templates[DEFAULT].encode())
    elif templates:
        # Use the list that all versions of transformers read, because a model folder of chatmill has no subfolders.
        config[KEY] = [{"name": name, "template": text} for name, text in templates.items()]
    if config != stored:
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        files.write_file(folder / TOKENIZER_CONFIG, text.encode(), overwrite=True)


PREPARE_AGAIN = "prepare the data again with --format template"


def template_notes(base: Path, format: Any, data: str, *, remedy: str = PREPARE_AGAIN) -> Iterator[str]:
    """Yield a warning if a model trained on `data` is saved with chat templates other than those of its base model.

    `remedy` is the advice on how to train with the template of the base model.
    """
    templates = replaced_templates(base, format)
    if templates is None:
        return
    own = read_templates(base)
    theirs = f"the {_shown(own)}" if own else "no chat template"
    if templates:
        yield (
            f"note: {data} was rendered with the {_shown(templates)}, but {base} has {theirs}; saved models get the "
            "chat template of the data"
        )
    else:
        yield (
            f"warning: {data} was rendered with the format {format_label(format)}, but {base} has {theirs}; saved "
            "models get no chat template, because transformers and vLLM would prompt them with a template that they "
            f"were not trained on; chatmill chat uses {format_label(format)}; to keep the template, {remedy}"
        )


def template_record(base: Path, format: Any) -> dict[str, Any]:
    """Return the entry `chat_template` of training.json, which records that the templates of the base model were
    replaced or left out; empty if they were copied.
    """
    templates = replaced_templates(base, format)
    if templates is None:
        return {}
    hashes = {"saved_sha256": _hashes(templates), "base_sha256": _hashes(read_templates(base))}
    return {KEY: hashes}


def _trained_templates(format: Any) -> dict[str, str] | None:
    """Return the chat templates that a format renders with; empty for a format without templates, and None if the
    format does not determine the templates.
    """
    if isinstance(format, str):
        return None if format in (TEMPLATE, TEXT) else {}
    name = format.get("name") if isinstance(format, Mapping) else None
    if not isinstance(name, str) or name == TEXT:
        return None
    if name != TEMPLATE:
        return {}
    stored = {DEFAULT: format.get("template"), TOOL_USE: format.get("tool_use")}
    templates = {name: text for name, text in stored.items() if isinstance(text, str)}
    return templates if DEFAULT in templates else None


def _hashes(templates: Mapping[str, str]) -> dict[str, str]:
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in templates.items()}


def _shown(templates: Mapping[str, str]) -> str:
    """Describe templates in an error message: `chat template 9f2c…`, or `chat templates default 9f2c…, tool_use …`."""
    hashes = _hashes(templates)
    if hashes.keys() == {DEFAULT}:
        return f"chat template {hashes[DEFAULT][:12]}…"
    return f"chat templates {', '.join(f'{one_line(name)} {sha256[:12]}…' for name, sha256 in hashes.items())}"


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(read_plain(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({one_line(str(error))}); expected a JSON object") from None
    if not isinstance(config, dict):
        raise DataError(f"{path}: expected a JSON object")
    return config


def _read_text(path: Path) -> str:
    try:
        return read_plain(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({one_line(str(error))}); expected a chat template") from None
