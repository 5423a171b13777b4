"""Open a renderer from a format name and a tokenizer, or from the metadata of a dataset or model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.format.chat_format import PRESETS, ChatFormat, UnknownFormatError, load_format
from chatmill.format.renderer import Mask, TextTokens
from chatmill.format.template.hf_folder import HFFolder, TemplateSource, declared_tokens, has_template, read_folder
from chatmill.format.template.process.client import start_server
from chatmill.format.template.renderer import TemplateRenderer
from chatmill.format.text_format import TEXT, text_format
from chatmill.format.turn_renderer import TurnRenderer
from chatmill.tokenizer import MissingTokensError, Tokenizer, open_tokenizer

TEMPLATE = "template"
"""The format name that selects the chat template of the tokenizer folder."""
DEFAULT_FORMAT = "chatml"
"""The format to use if none is given and no chat template is found."""


@dataclass(frozen=True)
class TemplateOptions:
    """Options for rendering with a chat template."""

    chat_template: str | None = None
    """A Jinja file to use instead of the template in the tokenizer folder."""
    arguments: Sequence[str] = ()
    """Template variables, as `name=value`."""
    mask: Mask = "derived"
    date: str | None = None
    """The date for templates that print the current date, as YYYY-MM-DD (default: today)."""
    text_tokens: TextTokens = "as-transformers"
    allow_no_end_token: bool = False
    """Whether to train on answers without an end-of-turn token instead of rejecting them."""
    strip_prompt_space: bool = False
    """Whether to treat trailing spaces of the assistant header as part of the answer instead of the prompt."""

    def given(self) -> list[str]:
        """Return the command-line flags of the options that differ from their defaults."""
        flags = {
            "--chat-template": self.chat_template is not None,
            "--template-arg": bool(self.arguments),
            "--mask": self.mask != "derived",
            "--template-date": self.date is not None,
            "--text-tokens": self.text_tokens != "as-transformers",
            "--allow-no-end-token": self.allow_no_end_token,
            "--strip-prompt-space": self.strip_prompt_space,
        }
        return [flag for flag, used in flags.items() if used]


def resolve_format(name: str | None, tokenizer: str, *, chat_template: str | None = None) -> str:
    """Return the name of the format to use.

    Without `name`, the format is "template" if a chat template is given or is in the tokenizer folder, else "chatml".
    A path to a tokenizer file selects only the tokenizer, not a chat template in the same folder.

    >>> from chatmill.format import resolve_format
    >>> resolve_format(None, "bytes"), resolve_format("primer", "bytes")
    ('chatml', 'primer')
    """
    if name is not None:
        return name
    return TEMPLATE if chat_template is not None or has_template(tokenizer) else DEFAULT_FORMAT


def open_renderer(
    name: str | None, tokenizer: str, *, add_tokens: bool = False, template: TemplateOptions | None = None
) -> TurnRenderer | TemplateRenderer:
    """Open a renderer for a preset, a .toml file, or "template" (the chat template in the tokenizer folder).

    If `name` is None, `resolve_format` chooses the format. `tokenizer` is a Hugging Face folder, a tokenizer file, or
    "bytes". The vocabulary must contain the control tokens of the format. With `add_tokens`, missing control tokens get
    new ids after the end of the vocabulary.

    >>> from chatmill import Message, Record, open_renderer
    >>> renderer = open_renderer("primer", "bytes")
    >>> record = Record([Message("user", "Hi"), Message("assistant", "Yo")])
    >>> renderer.tokenizer.decode(renderer.render([record]).ids)
    '<|usr|>Hi<|eot|><|asst|>Yo<|eot|>'
    >>> renderer.tokenizer.decode(renderer.prompt_ids(Record(record.messages[:1])))
    '<|usr|>Hi<|eot|><|asst|>'
    """
    template = template or TemplateOptions()
    name = resolve_format(name, tokenizer, chat_template=template.chat_template)
    if name != TEMPLATE:
        if used := template.given():
            raise UsageError(f"{', '.join(used)} can be used only with chat templates; add --format template")
        try:
            format = text_format(tokenizer) if name == TEXT else load_format(name)
        except UnknownFormatError as error:
            raise UsageError(f"{error}, or text, or template (the chat template of the tokenizer folder)") from None
        try:
            return TurnRenderer(format, open_tokenizer(tokenizer, control=format.tokens, add_tokens=add_tokens))
        except MissingTokensError as error:
            if has_template(tokenizer):
                raise UsageError(f"{error}, or use the chat template of the folder with --format template") from None
            raise
    if add_tokens:
        raise UsageError(
            "--add-tokens with --format template: a template can use only tokens of its tokenizer; use a preset, for "
            "example --format chatml"
        )
    flags = {"--allow-no-end-token": template.allow_no_end_token, "--strip-prompt-space": template.strip_prompt_space}
    if template.mask == "tags" and any(flags.values()):
        names = ", ".join(flag for flag, given in flags.items() if given)
        raise UsageError(
            f"{names} with --mask tags: generation tags decide which tokens are trained on; remove one of the flags"
        )
    folder = read_folder(tokenizer, template.chat_template)
    start_server()
    return TemplateRenderer(
        folder,
        open_tokenizer(tokenizer),
        arguments=_template_arguments(template.arguments),
        mask=template.mask,
        now=_date(template.date),
        text_tokens=() if template.text_tokens == "never" else None,
        allow_no_end=template.allow_no_end_token,
        strip_prompt_space=template.strip_prompt_space,
    )


def _template_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse arguments like `enable_thinking=false`. Values that are valid JSON are decoded; all other values stay
    strings.
    """
    out: dict[str, Any] = {}
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if not separator or not name.isidentifier() or name in ("messages", "tools", "add_generation_prompt"):
            raise UsageError(
                f'--template-arg "{one_line(argument)}" is not NAME=VALUE; use, for example, enable_thinking=false'
            )
        try:
            out[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            out[name] = value
    return out


def _date(date: str | None) -> datetime:
    if date is None:
        return datetime.combine(datetime.now().date(), datetime.min.time())
    try:
        return datetime.strptime(date, "%Y-%m-%d")
    except ValueError:
        raise UsageError(f'--template-date "{one_line(date)}" is not a date; use YYYY-MM-DD') from None


def control_tokens_from_json(stored: Any) -> dict[str, str]:
    """Return the control tokens of a stored format, by key."""
    if isinstance(stored, str) and stored in PRESETS:
        return dict(load_format(stored).tokens)
    tokens = stored.get("tokens") if isinstance(stored, dict) else None
    return {str(key): str(token) for key, token in tokens.items()} if isinstance(tokens, dict) else {}


def renderer_from_json(stored: Any, tokenizer: Tokenizer, *, spec: str, where: str) -> TurnRenderer | TemplateRenderer:
    """Restore a renderer from a preset name or from the result of `to_json`.

    `tokenizer` must have been opened from `spec`. The restored renderer produces the same rows as the stored one. Raise
    `DataError` if the renderer cannot be restored.
    """
    try:
        if isinstance(stored, dict) and stored.get("name") == TEMPLATE:
            renderer: TurnRenderer | TemplateRenderer = _template_renderer(stored, tokenizer, spec, where)
        else:
            renderer = TurnRenderer(
                load_format(stored) if stored in PRESETS else ChatFormat.from_json(stored), tokenizer
            )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ChatmillError):
            raise
        raise DataError(f"{where}: cannot read the stored format; set the format with --format") from None
    # Do not compare `now`, because it is stored only if the template uses the date.
    if not isinstance(stored, str) and {**renderer.to_json(), "now": stored.get("now")} != {"now": None, **stored}:
        shown = one_line(str(stored.get("name")))
        raise DataError(
            f"{where}: the format {shown} was stored by another version of chatmill; set the format with --format"
        )
    return renderer


def _template_renderer(stored: dict[str, Any], tokenizer: Tokenizer, spec: str, where: str) -> TemplateRenderer:
    path = Path(spec, "tokenizer.json") if Path(spec).is_dir() else Path(spec)
    stops = [tokenizer.token_id(token) for token in stored["ends"]]
    folder = HFFolder(
        TemplateSource(f"{where}:template", stored["template"]),
        TemplateSource(f"{where}:tool_use", stored["tool_use"]) if "tool_use" in stored else None,
        special=stored["special"],
        stops=tuple(id for id in stops if id is not None),
        tokenizer_json=path if path.suffix == ".json" and path.is_file() else None,
        declared=declared_tokens(Path(spec)) if Path(spec).is_dir() else (),
    )
    now = None if stored["now"] is None else datetime.fromisoformat(stored["now"])
    return TemplateRenderer(
        folder,
        tokenizer,
        arguments=stored["arguments"],
        mask=stored["mask"],
        now=now,
        text_tokens=stored.get("text_tokens", ()),
        allow_no_end=stored.get("allow_no_end_token", False),
        strip_prompt_space=stored.get("strip_prompt_space", False),
    )
