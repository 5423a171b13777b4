"""Expand one parameter of a command function into several command-line options: the fields of a dataclass, or the keys
of a config.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Annotated, Any, NamedTuple, get_origin

import typer

from chatmill.config import NO_FLAG, flag_spellings, keys_of


class OptionGroup(NamedTuple):
    """Marks a parameter that expands to several options; `gather` combines their values."""

    options: list[inspect.Parameter]
    gather: Callable[..., Any] = dict


def option_parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def key_options(config: type[Any]) -> OptionGroup:
    keys = {name: each for name, each in keys_of(config).items() if each.flag != NO_FLAG}
    tuples = {name for name, each in keys.items() if get_origin(each.type) is tuple}
    options = []
    for name, each in keys.items():
        kind, default = (list[str] | None, None) if name in tuples else (each.type, each.default)
        options.append(option_parameter(name, Annotated[kind, option(config, name)], default))
    return OptionGroup(options, lambda **values: values | {name: tuple(values[name] or ()) for name in tuples})


def text_flags(*configs: type[Any], first: str | None = None) -> OptionGroup:
    """Return one string option for each config key, spelled with underscores or hyphens.

    The help text lists the key `first` before all other keys.
    """
    options = []
    keys = [each for config in configs for each in keys_of(config).values()]
    for each in sorted(keys, key=lambda each: each.name != first):
        shown = each.default is not None or "null" in each.help
        help = f"{each.help}  [default: {json.dumps(each.default)}]" if shown else each.help
        flag = typer.Option(*flag_spellings(each.name), metavar=each.metavar or "VALUE", help=help)
        options.append(option_parameter(each.name, Annotated[str | None, flag], None))
    return OptionGroup(options, lambda **values: {name: text for name, text in values.items() if text is not None})


def option(config: type[Any], name: str) -> Any:
    each = keys_of(config)[name]
    return typer.Option(each.flag or f"--{name.replace('_', '-')}", metavar=each.metavar, help=each.help)


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with its grouped parameters expanded to options.

    A dataclass parameter is replaced by one option per field, and the command receives an instance of the dataclass. A
    parameter annotated with an `OptionGroup` is replaced by the options of the group, and the command receives the
    result of `gather`.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, OptionGroup] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if (group := _group(parameter.annotation)) is not None:
            groups[name] = group
        parameters += [parameter] if group is None else group.options
    if not groups:
        return command

    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group.gather(**{each.name: values.pop(each.name) for each in group.options})
        command(**values)

    run.__doc__ = command.__doc__
    keyword_only = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    return run


def _group(annotation: Any) -> OptionGroup | None:
    """Return the options that a parameter with this annotation expands to, or None for an ordinary parameter."""
    if is_dataclass(annotation) and isinstance(annotation, type):
        return OptionGroup(list(inspect.signature(annotation, eval_str=True).parameters.values()), annotation)
    return next((each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, OptionGroup)), None)
