"""A griffe extension for mkdocs.yml that prepares docstrings for the API pages.

>>> f(1)             the lines of an example become a `pycon` block
name    meaning      lines with columns become a `text` block
x: int = key(8, …)   a config key shows its default, 8, and its help as docstring
"""

from __future__ import annotations

import ast
import re
from textwrap import dedent
from typing import Any, TypeGuard

from griffe import Attribute, Docstring, ExprCall, Extension, Function, Object

COLUMNS = re.compile(r"\S {2,}\S")


class DocstringBlocks(Extension):
    """Puts examples into code fences, and shows the default and the help text of each config key."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if isinstance(obj, Attribute) and is_key(obj.value):
            document_key(obj, obj.value)
        for parameter in obj.parameters if isinstance(obj, Function) else ():
            if is_key(parameter.default):
                parameter.default = parameter.default.arguments[0]
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def is_key(value: Any) -> TypeGuard[ExprCall]:
    return isinstance(value, ExprCall) and str(value.function) == "key"


def document_key(attribute: Attribute, call: ExprCall) -> None:
    """Replace the call to `key` with the default value of the config key, and use the help text as the docstring."""
    default, description = call.arguments[:2]
    attribute.value = default
    attribute.docstring = Docstring(string_value(ast.parse(str(description), mode="eval").body), parent=attribute)


def string_value(node: ast.expr) -> str:
    """Return the value of a string literal; expressions in an f-string are kept as `{expression}`."""
    if isinstance(node, ast.JoinedStr):
        return "".join(string_value(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) else "{" + ast.unparse(node.value) + "}"


def fenced(docstring: str) -> str:
    """Return the docstring with a code fence around each example and each indented block."""
    return "\n\n".join(fenced_block(block) for block in re.split(r"\n[ \t]*\n", docstring))


def fenced_block(block: str) -> str:
    lines = block.splitlines()
    start = next((number for number, line in enumerate(lines) if line.lstrip().startswith(">>>")), None)
    if start is not None:
        return "\n".join([*lines[:start], "", fence("pycon", lines[start:])])
    if sum(bool(COLUMNS.search(line)) for line in lines) * 2 > len(lines):
        return fence("text", lines)
    return block


def fence(language: str, lines: list[str]) -> str:
    return f"```{language}\n" + dedent("\n".join(lines)) + "\n```"
