"""Values in chat templates that are not plain data: undefined values, namespaces, and `dict`."""

from __future__ import annotations

from functools import partial
from typing import Any

from jinja2 import Undefined, UndefinedError
from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace, missing


class UndefinedVariableError(UndefinedError):
    """Raised if a template uses the value of an undefined variable."""

    def __init__(self, variable: str, message: str) -> None:
        super().__init__(message)
        self.variable = variable


class UndefinedValue(Undefined):
    """Jinja's undefined value, which renders as an empty string.

    If a template reads a forbidden attribute, the result raises an error when it is rendered.
    """

    __slots__ = ()

    def __init__(
        self, hint: str | None = None, obj: Any = missing, name: Any = None, exc: Any = UndefinedError
    ) -> None:
        if hint is None and obj is missing and isinstance(name, str):
            exc = partial(UndefinedVariableError, name)
        super().__init__(hint, obj, name, exc)

    def __str__(self) -> str:
        if self._undefined_exception is SecurityError:
            self._fail_with_undefined_error()
        return ""


class TemplateNamespace(Namespace):
    """A namespace that rejects names with a leading underscore, which could give access to internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no parameter `self`, because a template may use this name
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a namespace cannot have {name!r}: names with a leading underscore are not available to templates"
        )


class TemplateDict:
    """A replacement for `dict` in templates; it can be called, and its only method is `fromkeys`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)
