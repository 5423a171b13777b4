"""Parse the subset of YAML that recipes use.

Plain values follow YAML 1.2: `no` is a string (the language code for Norwegian), 1e-3 is a number, and a date is a
string. Only tables, lists, strings, numbers, true, false and null are supported. Merge keys (`<<`) are not supported,
because a small file could create a huge table with them. Aliases are supported: all uses of an alias share one value.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from chatmill.errors import DataError, one_line

_TAG = "tag:yaml.org,2002:"


class RecipeLoader(yaml.SafeLoader):  # type: ignore[misc]
    """A YAML loader that accepts only plain values and rejects duplicate keys."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012
    yaml_constructors = {  # noqa: RUF012
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in ("null", "bool", "int", "float", "str", "seq", "map")
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        problem = f'the key "{key.value}" is given twice'
                        raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                    seen.add(key.value)
        return yaml.constructor.BaseConstructor.construct_mapping(self, node, deep=deep)  # type: ignore[no-any-return]


for _tag, _pattern, _first in (
    ("null", r"null|~|", [*"n~", ""]),
    ("bool", r"true|false", list("tf")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    RecipeLoader.add_implicit_resolver(_TAG + _tag, re.compile(f"^(?:{_pattern})$"), _first)


def parse_yaml(data: bytes, name: str, loader: type[RecipeLoader] = RecipeLoader) -> Any:
    """Parse a YAML file; if the file is invalid, raise `DataError` with the position of the error."""
    try:
        return yaml.load(data, loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        reason = f"{error.problem or error.context}{where}"
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:
        reason = str(error)
    raise DataError(f"{name}: is not valid YAML: {one_line(reason, 300)}") from None
