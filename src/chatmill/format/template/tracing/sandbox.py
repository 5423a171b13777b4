"""A Jinja sandbox for Hugging Face chat templates, with limits on steps, characters and time.

Templates see plain data only and cannot change it. Before a template is compiled, its syntax tree is rewritten so that
its loops count steps; what would read other files or escape text is refused.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, missing
from jinja2.visitor import NodeTransformer

SECONDS = 20.0
STEPS = 2**16
CHARACTERS = 2**20
GROWTH = 8
"""Additional characters that a template may write for each character of the conversation."""
MAX_INT_BITS = 4096
"""Larger integers only keep a machine busy."""

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Variables that a tokenizer may define for its template; undefined ones are written as an empty text."""


class LimitError(TemplateError):
    """The template exceeded a limit."""


@dataclass
class Meter:
    """The limits of one rendering, and the steps that it has used."""

    max_characters: int = CHARACTERS
    max_steps: int = STEPS
    deadline: float = float("inf")
    steps: int = 0

    def step(self) -> None:
        """Count one loop iteration or call."""
        self.steps += 1
        if self.steps > self.max_steps:
            raise LimitError(f"it ran for more than {self.max_steps:,} steps")
        if not self.steps & 0xFF and time.monotonic() > self.deadline:
            raise LimitError(f"it ran for more than {SECONDS:g} seconds")

    def check_size(self, characters: float) -> None:
        if characters > self.max_characters:
            raise LimitError(f"it wrote more than {self.max_characters:,} characters")


def meter_for(characters: int, messages: int) -> Meter:
    """Limits for a conversation of this size; templates may look at all messages for each message."""
    return Meter(CHARACTERS + GROWTH * characters, STEPS + 64 * messages**2, time.monotonic() + SECONDS)


class Missing(Undefined):
    """Jinja's undefined, except that writing a variable that nobody defines is an error: it is probably a typo."""

    def __str__(self) -> str:
        unknown = self._undefined_obj is missing and self._undefined_name not in SPECIAL_NAMES
        if unknown or self._undefined_exception is SecurityError:
            self._fail_with_undefined_error()
        return ""


class Generation(Extension):
    """The tag `{% generation %}`; its content is passed through `Sandbox.tagged`."""

    tags = {"generation"}  # noqa: RUF012  # so the base class has it

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


class _Namespace(Namespace):
    """Namespaces without underscored names, through which templates have accessed internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name of the template's own
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a namespace cannot hold {name!r}: names with an underscore in front are not for templates"
        )


class _Dict:
    """`dict` as a function, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one template, and for one rendering at a time."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, *, now: datetime | None = None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, undefined=Missing, extensions=[Generation, loopcontrols])
        self.meter = Meter()
        self.has_tags = False
        """Whether the template has generation tags."""
        self._now = now
        self.filters = {name: self._metered(name, filter) for name, filter in {**FILTERS, **self._filters()}.items()}
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": self._strftime,
            "dict": _Dict(),
            "namespace": _Namespace,
            "lipsum": self._random,
        }

    # Overridden for tracing.

    def tagged(self, text: str) -> str:
        """Text between generation tags."""
        return text

    def to_text(self, value: Any) -> str:
        """A value as the template writes it."""
        return str(value)

    def joined(self, *values: Any) -> str:
        """The operator `~`."""
        texts = [self.to_text(value) for value in values]
        self.meter.check_size(sum(map(_size, texts)))
        return self.concat(texts)

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

        return {"tojson": self.tojson, "join": join, "replace": replace, "random": self._random}

    # Attribute access that is always safe, without the checks of Jinja, which are slow.

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _OF_DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in _OF_LOOP:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) is _Namespace:
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)

    # Limits.

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @wraps(wrapped)
        def checked(*args: Any, **kwargs: Any) -> str:
            self._check_numbers((*args, *kwargs.values()))
            self._check_growth("format", value.__self__, args)
            return str(wrapped(*args, **kwargs))

        return checked

    def _metered(self, name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that respects the limits."""

        @wraps(filter)
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.meter.step()
            self._check_numbers((*args, *kwargs.values()))
            if args and isinstance(args[0], str):
                self._check_growth(name, args[0], args[1:])
            out = filter(*args, **kwargs)
            if isinstance(out, str):
                self.meter.check_size(_size(out))
            return out

        return checked

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.meter.step()
        subject = getattr(__obj, "__self__", None)
        if isinstance(subject, str):
            __self._check_numbers((*args, *kwargs.values()))
            __self._check_growth(__obj.__name__, subject, args)
        out = super().call(__context, __obj, *args, **kwargs)
        if isinstance(out, str):
            __self.meter.check_size(_size(out))
        return out

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            self.meter.check_size(_size(left) + _size(right))
            return left + right
        if operator == "**" or (operator == "*" and isinstance(left, int) and isinstance(right, int)):
            bits = [abs(value).bit_length() if isinstance(value, int) else 64 for value in (left, right)]
            if (bits[0] * abs(right) if operator == "**" else sum(bits)) > MAX_INT_BITS:
                raise LimitError(f"it made a number of more than {MAX_INT_BITS:,} bits")
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int):
                    self.meter.check_size(_size(many) * times)
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self.meter.check_size(_size(left) + _size(right))
        elif operator == "%" and isinstance(left, str):
            self._check_growth("format", left, (right,))
        return super().call_binop(context, operator, left, right)

    def _check_numbers(self, values: tuple[Any, ...]) -> None:
        for value in values:
            if isinstance(value, int) and abs(value) > self.meter.max_characters:
                raise LimitError(f"it asks for a width or count of {value}")

    def _check_growth(self, name: str, subject: str, args: tuple[Any, ...]) -> None:
        """Check how long the result of a method may become before it is called."""
        if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            self.meter.check_size(_size(subject) + str.count(subject, args[0]) * _size(args[1]))
        elif name == "join" and args and isinstance(args[0], list | tuple):
            self.meter.check_size(sum(_size(part) + _size(subject) for part in args[0] if isinstance(part, str)))
        elif name in ("expandtabs", "indent"):
            width = 8 if not args else args[0] if isinstance(args[0], int) else _size(args[0])
            self.meter.check_size(_size(subject) + (str.count(subject, "\t") + str.count(subject, "\n") + 1) * width)
        elif name in ("format", "format_map") and re.search(r"\d{7}", subject):
            raise LimitError("it asks for a width of millions")

    # Functions of templates.

    def _strftime(self, format: str) -> str:
        self._check_growth("format", format, ())
        return (self._now or datetime.now()).strftime(format)

    @staticmethod
    def _random(*_: Any, **__: Any) -> Any:
        raise TemplateError("it draws at random, and a dataset must come out the same every time")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = self.rewriter().visit(super()._parse(source, name, filename))
        return tree

    def rewriter(self) -> Rewriter:
        return Rewriter()


class Rewriter(NodeTransformer):
    """Rewrites a syntax tree: loops count steps, and `~` goes through the sandbox."""

    def __init__(self) -> None:
        self.rules: dict[type[nodes.Node], Callable[[Any], Any]] = {
            nodes.For: self._loop,
            nodes.Concat: self._concat,
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

    def _autoescape(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:
        raise TemplateSyntaxError("autoescape changes text behind the reader's back; leave it out", node.lineno)

    def _other_file(self, node: nodes.Stmt) -> nodes.Node:
        raise TemplateSyntaxError("a chat template is one file; it cannot read others", node.lineno)


def statement(code: str, at: nodes.Node) -> nodes.Node:
    """An attribute of the sandbox, evaluated for its effect."""
    return nodes.ExprStmt(nodes.EnvironmentAttribute(code)).set_lineno(at.lineno)


def sandbox_call(method: str, args: list[nodes.Expr], at: nodes.Node) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)
    return call.set_lineno(at.lineno)  # type: ignore[return-value]  # it returns itself


_OF_DICT = frozenset(dir(dict))
_OF_LOOP = frozenset(("first", "last", "index", "index0", "length", "previtem", "nextitem"))


def _size(value: Any) -> int:
    """The length of a text or list, without a guard for traced texts."""
    return str.__len__(value) if isinstance(value, str) else len(value)


def _raise(message: object = "") -> None:
    raise TemplateError(str(message))
