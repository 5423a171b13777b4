"""A format as a dataset or a model remembers it, back again."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from chatmill.errors import ChatmillError, DataError, one_line
from chatmill.format.chat_format import PRESETS, ChatFormat, TurnMarkers, load_format
from chatmill.format.renderer import TEMPLATE, TurnRenderer
from chatmill.format.template.hf_folder import HFFolder, TemplateSource
from chatmill.format.template.renderer import TemplateRenderer
from chatmill.tokenizer import Tokenizer


def control_tokens_from_json(value: Any) -> dict[str, str]:
    """The control tokens of a stored format, by key; none if it does not name them."""
    if isinstance(value, str) and value in PRESETS:
        return dict(load_format(value).tokens)
    tokens = value.get("tokens") if isinstance(value, dict) else None
    return {str(key): str(token) for key, token in tokens.items()} if isinstance(tokens, dict) else {}


def renderer_from_json(value: Any, tokenizer: Tokenizer, *, spec: str, where: str) -> TurnRenderer | TemplateRenderer:
    """The format that `to_json` gave this value, or the preset of this name, with a tokenizer opened from `spec`.

    What comes back writes conversations just as the one that was stored did; `DataError` if it cannot.
    """
    try:
        if isinstance(value, dict) and value.get("name") == TEMPLATE:
            made: TurnRenderer | TemplateRenderer = _template(value, tokenizer, spec, where)
        else:
            made = TurnRenderer(load_format(value) if value in PRESETS else _turns(value), tokenizer)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ChatmillError):
            raise
        raise DataError(f"{where}: the format that it was trained with cannot be read; name it with --format") from None
    # Whether the date matters is known only after conversations have been written.
    if not isinstance(value, str) and {**made.to_json(), "now": value.get("now")} != {"now": None, **value}:
        shown = one_line(str(value.get("name")))
        raise DataError(f"{where}: the format {shown} was stored by another version; name it with --format")
    return made


def _turns(value: Any) -> ChatFormat:
    return ChatFormat(
        name=value["name"],
        tokens=dict(value["tokens"]),
        turns={role: TurnMarkers(*pair) for role, pair in value["turns"].items()},
        trained=tuple(value["trained"]),
        default_system=value["default_system"],
        begin=value["begin"],
        end=value["end"],
        body=dict(value["body"]),
    )


def _template(value: dict[str, Any], tokenizer: Tokenizer, spec: str, where: str) -> TemplateRenderer:
    path = Path(spec, "tokenizer.json") if Path(spec).is_dir() else Path(spec)
    stops = [tokenizer.token_id(token) for token in value["ends"]]
    folder = HFFolder(
        TemplateSource(where, value["template"]),
        TemplateSource(where, value["tool_use"]) if "tool_use" in value else None,
        special=value["special"],
        stops=tuple(id for id in stops if id is not None),
        tokenizer_json=path if path.suffix == ".json" and path.is_file() else None,
    )
    now = None if value["now"] is None else datetime.fromisoformat(value["now"])
    return TemplateRenderer(folder, tokenizer, arguments=value["arguments"], mask=value["mask"], now=now)
