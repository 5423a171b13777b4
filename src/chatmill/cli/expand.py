"""Parameters of commands that stand for several options: a group of options, or the keys of configurations."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Annotated, Any, get_origin

import typer

from chatmill.config import flag_spellings, keys_of


class OptionGroup:
    """Marks a parameter that stands for several options and gets their values as a dict."""

    def options(self) -> Iterator[inspect.Parameter]:
        raise NotImplementedError

    def gather(self, **values: Any) -> dict[str, Any]:
        """The value of the parameter."""
        return values

    @staticmethod
    def parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


class KeyOptions(OptionGroup):
    """Marks a parameter that gets the value of every key of a configuration, from options of the keys' own types."""

    def __init__(self, config: type[Any]) -> None:
        self.config = config

    def options(self) -> Iterator[inspect.Parameter]:
        for each in keys_of(self.config).values():
            kind, default = each.type, each.default
            if get_origin(kind) is tuple:
                kind, default = list[str] | None, None
            yield self.parameter(each.name, Annotated[kind, option(self.config, each.name)], default)

    def gather(self, **values: Any) -> dict[str, Any]:
        tuples = {each.name for each in keys_of(self.config).values() if get_origin(each.type) is tuple}
        return {name: tuple(value or ()) if name in tuples else value for name, value in values.items()}


class TextFlags(OptionGroup):
    """Marks a parameter that gets the flags of configurations that are given, as text, in both spellings."""

    def __init__(self, *configs: type[Any]) -> None:
        self.keys = [each for config in configs for each in keys_of(config).values()]

    def options(self) -> Iterator[inspect.Parameter]:
        for each in self.keys:
            shown = each.default is not None or "null" in each.help
            help = f"{each.help}  [default: {json.dumps(each.default)}]" if shown else each.help
            flag = typer.Option(*flag_spellings(each.name), metavar=each.metavar or "VALUE", help=help)
            yield self.parameter(each.name, Annotated[str | None, flag], None)

    def gather(self, **values: str | None) -> dict[str, str]:
        return {name: text for name, text in values.items() if text is not None}


def option(config: type[Any], name: str) -> Any:
    """The typer option of a declared key."""
    each = keys_of(config)[name]
    return typer.Option(flag_of(config, name), metavar=each.metavar, help=each.help)


def flag_of(config: type[Any], name: str) -> str:
    """The flag of a key, or of a parameter that is none."""
    each = keys_of(config).get(name)
    return each.flag if each is not None and each.flag is not None else f"--{name.replace('_', '-')}"


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """The command with all options that its parameters stand for.

    A parameter whose type is a dataclass stands for one option per field, and gets an instance. One that is annotated
    with an `OptionGroup` stands for the options of the group, and gets a dict.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[list[str], Callable[..., Any]]] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        options, gather = _expansion(parameter.annotation)
        if gather is not None:
            groups[name] = [each.name for each in options], gather
        parameters += options if gather is not None else [parameter]
    if not groups:
        return command

    def run(**values: Any) -> None:
        for name, (options, gather) in groups.items():
            values[name] = gather(**{option: values.pop(option) for option in options})
        command(**values)

    run.__doc__ = command.__doc__
    keyword_only = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    return run


def _expansion(annotation: Any) -> tuple[list[inspect.Parameter], Callable[..., Any] | None]:
    """The options that a parameter of this type stands for, and what makes its value of theirs."""
    for marker in getattr(annotation, "__metadata__", ()):
        if isinstance(marker, OptionGroup):
            return list(marker.options()), marker.gather
    if is_dataclass(annotation) and isinstance(annotation, type):
        return list(inspect.signature(annotation, eval_str=True).parameters.values()), annotation
    return [], None
