"""A Jinja sandbox for Hugging Face chat templates, with limits on steps, characters and time.

Templates can read plain data but not change it, and can use only the attributes in `ATTRIBUTES`. Using an existing
attribute that is not in `ATTRIBUTES` raises an error, so that the output never differs silently from transformers.
Jinja's syntax tree is rewritten so that every loop iteration counts toward the step limit. Templates that read other
files or use autoescape are rejected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, _GroupTuple
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from chatmill.format.template.tracing.formatting import check_plain, format_fields, format_percent
from chatmill.format.template.tracing.limits import MAX_INT_BITS, LimitError, Meter
from chatmill.format.template.tracing.values import TemplateDict, TemplateNamespace, UndefinedValue

ATTRIBUTES: dict[type, frozenset[str]] = {
    str: frozenset(
        name
        for name in dir(str)
        if not name.startswith("_") and name not in ("encode", "format_map", "maketrans", "translate")
    ),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    _GroupTuple: frozenset(("grouper", "list")),
    LoopContext: frozenset(
        (
            *("changed", "cycle", "depth", "depth0", "first", "index", "index0", "last", "length", "nextitem"),
            *("previtem", "revindex", "revindex0"),
        )
    ),
    Cycler: frozenset(("current", "next", "reset")),
}
"""The attributes that a template may use, by type. A template cannot use attributes of any other type."""

WRITING_FILTERS = (
    *("capitalize", "center", "e", "escape", "filesizeformat", "forceescape", "format", "indent", "lower", "pprint"),
    *("replace", "safe", "string", "striptags", "title", "trim", "truncate", "upper", "urlencode", "urlize"),
    *("wordcount", "wordwrap", "xmlattr"),
)
"""Filters that convert their value to text."""
TEXT_FILTERS = ("indent", "striptags", "truncate", "urlize", "wordwrap")
"""Filters that accept only texts."""


class Generation(Extension):
    """The tag `{% generation %}`, which passes its content to `Sandbox.tagged`."""

    tags = {"generation"}  # noqa: RUF012  # as in the base class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        assert isinstance(self.environment, Sandbox)
        self.environment.has_tags = True
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclosed"), [], [], body).set_lineno(line)

    def _enclosed(self, caller: Macro) -> str:
        sandbox = self.environment
        assert isinstance(sandbox, Sandbox)
        return sandbox.tagged(caller())


class Sandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment for one template, which runs one rendering at a time."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, *, now: datetime | None = None) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=UndefinedValue,
            extensions=[Generation, loopcontrols],
            # Constant expressions are evaluated when the template runs, so that the limits apply to them.
            optimized=False,
        )
        self.meter = Meter()
        self.has_tags = False
        """Whether the template has generation tags."""
        self._now = now
        self.finalize = self.to_text
        self.filters = {name: self._metered(name, filter) for name, filter in {**FILTERS, **self._filters()}.items()}
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": self._strftime,
            "dict": TemplateDict(),
            "namespace": TemplateNamespace,
            "lipsum": self._random,
        }

    # `TracedSandbox` overrides the following methods.

    def tagged(self, text: str) -> str:
        """Return `text`, marked as text between generation tags."""
        return text

    def to_text(self, value: Any) -> str:
        """Convert a value to the text that the template outputs."""
        if not isinstance(value, str):
            check_plain(value)
        return str(value)

    def joined(self, *values: Any) -> str:
        """Implement the operator `~`."""
        texts = [self.to_text(value) for value in values]
        self.meter.check_size(sum(map(_size, texts)))
        return self.concat(texts)

    def total(self, *values: Any) -> Any:
        """Add three or more values, usually texts, from left to right."""
        if TEXT.issuperset(map(type, values)):
            self.meter.check_size(sum(map(len, values)))
            return "".join(values)
        out, *others = values
        for value in others:
            out = self.call_binop(None, "+", out, value)
        return out

    def tojson(
        self, x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def _filters(self) -> dict[str, Callable[..., Any]]:
        def join(value: Any, d: Any = "", attribute: Any = None) -> Any:
            parts = list(value) if attribute is None else [self.getitem(item, attribute) for item in value]
            texts, by = [self.to_text(part) for part in parts], self.to_text(d)
            self.meter.check_size(sum(map(_size, texts)) + _size(by) * len(texts))
            return by.join(texts)

        def replace(s: Any, old: Any, new: Any, count: int = -1) -> Any:
            subject, old, new = self.to_text(s), self.to_text(old), self.to_text(new)
            self._check_growth("replace", subject, (old, new))
            return subject.replace(old, new, count)

        def format(value: Any, *args: Any, **kwargs: Any) -> Any:
            if args and kwargs:
                raise TypeError("can't handle positional and keyword arguments at the same time")
            return self.percent(value if isinstance(value, str) else self.to_text(value), kwargs or args)

        return {
            "tojson": self.tojson,
            "join": join,
            "replace": replace,
            "random": self._random,
            "format": format,
            "attr": self.attribute,
        }

    def percent(self, pattern: str, values: Any) -> str:
        """Implement the operator `%` for texts."""
        if isinstance(pattern, Markup):
            raise SecurityError("'%' on safe text is not available to templates")
        return self._formatted(format_percent(pattern, values))

    def _formatted(self, parts: Iterable[tuple[str, Any]]) -> str:
        texts, size = [], 0
        for text, _ in parts:
            size += len(text)
            self.meter.check_size(size)
            texts.append(text)
        return "".join(texts)

    # Attributes and calls are checked against lists of allowed names, whereas Jinja's own checks use lists of forbidden
    # names.

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict:
            if attribute not in OF_DICT:
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        elif type(obj) is LoopContext and attribute in ATTRIBUTES[LoopContext]:
            return getattr(obj, attribute)
        return self.attribute(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, (*_WITH_ITEMS, Undefined)):
            try:
                return obj[argument]
            except (TypeError, LookupError):
                pass
        if isinstance(argument, str):
            return self.attribute(obj, str(argument))
        return self.undefined(obj=obj, name=argument)

    def attribute(self, obj: Any, name: str) -> Any:
        """Return an attribute (never an item), or an undefined value if it does not exist.

        Raise an error for a forbidden attribute.
        """
        if isinstance(obj, Undefined):
            # Raise Jinja's error, which names the undefined value.
            obj._fail_with_undefined_error()
        # Treat traced and safe texts like plain texts.
        type_ = str if isinstance(obj, str) else type(obj)
        if name in ATTRIBUTES.get(type_, ()):
            if type_ is str and name == "format":
                return self._format_of(obj)
            return getattr(obj, name)
        if type_ is TemplateNamespace and not name.startswith("_"):
            return getattr(obj, name, None) if hasattr(obj, name) else self.undefined(obj=obj, name=name)
        if not hasattr(type_ if type_ is str else obj, name):
            return self.undefined(obj=obj, name=name)
        if not super().is_safe_attribute(obj, name, None):
            # Return an undefined value that raises on use, as in transformers.
            return self.unsafe_undefined(obj, name)
        raise SecurityError(f"{name!r} of a {type_.__name__} is not available to templates")

    def _format_of(self, text: str) -> Callable[..., str]:
        """Return a safe implementation of `str.format` for this text."""
        if isinstance(text, Markup):
            raise SecurityError("'format' on safe text is not available to templates")
        return lambda *args, **kwargs: self._formatted(format_fields(text, args, kwargs))

    def is_safe_callable(self, obj: Any) -> bool:
        # Allow undefined values here, because calling one raises an error that names the value.
        return type(obj) in _CALLABLE or isinstance(obj, Undefined) or obj in (TemplateNamespace, Cycler, Joiner)

    # Limits.

    def _metered(self, name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper that checks the limits before and after it calls the filter."""
        first = int(hasattr(filter, "jinja_pass_arg"))

        @wraps(filter)
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.meter.step()
            if name not in ("d", "default", "format"):
                self._check_numbers((*args[first + 1 :], *kwargs.values()))
            if len(args) > first:
                if isinstance(args[first], str):
                    self._check_growth(name, args[first], args[first + 1 :])
                elif name in TEXT_FILTERS:
                    # Reject lists, because Jinja's `indent` would modify a list in place.
                    raise TypeError(f"{name} expects text, not a {type(args[first]).__name__}")
                elif name in WRITING_FILTERS:
                    check_plain(args[first])
            out = filter(*args, **kwargs)
            if isinstance(out, str):
                self.meter.check_size(_size(out))
            elif isinstance(out, int):
                _check_bits(out.bit_length())
            return out

        return checked

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if getattr(__obj, "__self__", None) is __self and __obj.__name__ in OWN_METHODS:
            return __obj(*args)
        __self.meter.step()
        if not __self.is_safe_callable(__obj):
            raise SecurityError(f"a {type(__obj).__name__} cannot be called")
        subject = getattr(__obj, "__self__", None)
        if isinstance(subject, str):
            if __obj.__name__ != "format":
                __self._check_numbers((*args, *kwargs.values()))
            __self._check_growth(__obj.__name__, subject, args)
        out = super().call(__context, __obj, *args, **kwargs)
        if isinstance(out, str):
            __self.meter.check_size(_size(out))
        return out

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            self.meter.check_size(str.__len__(left) + str.__len__(right))
            return left + right
        if isinstance(left, int) and isinstance(right, int):
            bits = [value.bit_length() for value in (left, right)]
            _check_bits(bits[0] * abs(right) if operator == "**" else sum(bits))
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int):
                    self.meter.check_size(_size(many) * times)
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self.meter.check_size(_size(left) + _size(right))
        elif operator == "%" and isinstance(left, str):
            return self.percent(left, right)
        return super().call_binop(context, operator, left, right)

    def _check_numbers(self, values: tuple[Any, ...]) -> None:
        for value in values:
            if isinstance(value, int) and abs(value) > self.meter.max_characters:
                raise LimitError(f"the width or count {value} exceeds the limit of {self.meter.max_characters}")

    def _check_growth(self, name: str, subject: str, args: tuple[Any, ...]) -> None:
        """Raise `LimitError` if the result of a string method or filter could exceed the size limit."""
        if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            self.meter.check_size(_size(subject) + str.count(subject, args[0]) * _size(args[1]))
        elif name == "join" and args and isinstance(args[0], list | tuple):
            self.meter.check_size(sum(_size(part) + _size(subject) for part in args[0] if isinstance(part, str)))
        elif name in ("expandtabs", "indent"):
            width = 8 if not args else args[0] if isinstance(args[0], int) else _size(args[0])
            self.meter.check_size(_size(subject) + (str.count(subject, "\t") + str.count(subject, "\n") + 1) * width)

    def _strftime(self, format: str) -> str:
        if re.search(r"\d{4}", format):
            raise LimitError("the date format contains a number with more than 3 digits")
        return (self._now or datetime.now()).strftime(format)

    @staticmethod
    def _random(*_: Any, **__: Any) -> Any:
        raise TemplateError("random functions are not available to templates, because datasets must be reproducible")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = self.rewriter().visit(super()._parse(source, name, filename))
        return tree

    def rewriter(self) -> Rewriter:
        return Rewriter()


class Rewriter(NodeTransformer):
    """Rewrites a Jinja syntax tree: every loop iteration counts as a step, `~` calls `Sandbox.joined`, and a chain of
    `+` calls `Sandbox.total`.
    """

    def __init__(self) -> None:
        self.rules: dict[type[nodes.Node], Callable[[Any], Any]] = {
            nodes.For: self._loop,
            nodes.Concat: self._concat,
            nodes.Add: self._add,
            nodes.ScopedEvalContextModifier: self._autoescape,
            **dict.fromkeys((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends), self._other_file),
        }

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        rule = self.rules.get(type(node))
        return rule(node) if rule is not None else self.generic_visit(node)

    def _loop(self, node: nodes.For) -> Any:
        self.generic_visit(node)
        node.body.insert(0, statement("meter.step()", node))
        return node

    def _concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return sandbox_call("joined", node.nodes, node)

    def _add(self, node: nodes.Add) -> nodes.Node:
        operands = [node.right]
        while isinstance(node.left, nodes.Add):
            node = node.left
            operands.append(node.right)
        operands = [self.visit(operand) for operand in (node.left, *reversed(operands))]
        if len(operands) == 2:
            node.left, node.right = operands
            return node
        return sandbox_call("total", operands, node)

    def _autoescape(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:
        raise TemplateSyntaxError(
            "autoescape is not available to templates, because it silently changes text", node.lineno
        )

    def _other_file(self, node: nodes.Stmt) -> nodes.Node:
        raise TemplateSyntaxError("a chat template cannot read other files", node.lineno)


def statement(code: str, at: nodes.Node) -> nodes.Node:
    """Return a statement that evaluates the sandbox attribute `code` only for its side effect."""
    return nodes.ExprStmt(nodes.EnvironmentAttribute(code)).set_lineno(at.lineno)


def sandbox_call(method: str, args: list[nodes.Expr], at: nodes.Node) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)
    return call.set_lineno(at.lineno)  # type: ignore[return-value]  # returns the node itself


OF_DICT = frozenset(dir(dict))
TEXT = frozenset((str,))
OWN_METHODS = frozenset(("enter", "total"))
"""Methods of a sandbox that the rewritten templates call. Their calls do not count as steps."""
_WITH_ITEMS = (dict, list, tuple, str, range)
_CALLABLE = (BuiltinMethodType, FunctionType, MethodType, Macro, LoopContext, Joiner, TemplateDict)


def _size(value: Any) -> int:
    """Return the length of a text or list without adding a guard."""
    return str.__len__(value) if isinstance(value, str) else len(value)


def _check_bits(bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise LimitError(f"a number with more than {MAX_INT_BITS:,} bits was computed")


def _raise(message: object = "") -> None:
    check_plain(message)
    raise TemplateError(str(message))
