"""Compiled Jinja chat templates, with or without tracing. Errors in a template are reported with the template line.

A traced rendering records the origin of every character. Before a template is compiled, its string literals become
`TracedStr`, and filters that would lose the origin of a string are wrapped. Loops over messages record the index of the
current message.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError, nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.runtime import Undefined

from chatmill.errors import ChatmillError, DataError, RecordError, one_line
from chatmill.format.template.tracing.formatting import check_plain
from chatmill.format.template.tracing.limits import LimitError, Meter, TimeLimitError
from chatmill.format.template.tracing.sandbox import OF_DICT, Rewriter, Sandbox, sandbox_call, statement
from chatmill.format.template.tracing.steps import LENGTHS, STEP_FUNCTIONS
from chatmill.format.template.tracing.trace import OUTSIDE, Rendering, TracedPiece
from chatmill.format.template.tracing.traced_markup import TracedMarkup, escaped, mapped, marked, unmarked
from chatmill.format.template.tracing.traced_str import (
    TracedStr,
    added,
    joined,
    literal,
    made,
    opaque,
    texts_in,
    total,
    untraced,
)
from chatmill.format.template.tracing.values import UndefinedVariableError


class Program:
    """A compiled template that runs in a sandbox."""

    remedy = "change the conversation or the template"
    """The fix that error messages suggest."""

    def __init__(self, source: str, name: str, sandbox: Sandbox) -> None:
        self.name, self.sandbox = name, sandbox
        try:
            code = sandbox.compile(source, name, name)
        except TemplateSyntaxError as error:
            fault = one_line(error.message or "not a template")
            raise DataError(f"{name}:{error.lineno}: {fault}; fix the template") from None
        except (RecursionError, SyntaxError, ValueError, OverflowError) as error:
            raise DataError(
                f"{name}: Jinja cannot compile the template ({one_line(str(error))}); fix the template"
            ) from None
        self._template = sandbox.template_class.from_code(sandbox, code, sandbox.make_globals(None))

    def run(self, variables: Mapping[str, Any], meter: Meter) -> Iterator[str]:
        """Yield the output of the template piece by piece. Errors in the template are raised as `RecordError`."""
        self.sandbox.meter = meter
        written, texts = 0, self._texts(variables)
        try:
            for text in texts:
                written += str.__len__(text)
                try:
                    meter.check_size(written)
                except LimitError as error:
                    # Raise the error inside the template, so that the traceback contains the template line.
                    texts.throw(error)
                yield text
        except (ChatmillError, MemoryError):
            raise
        except TimeLimitError as error:
            raise TimeLimitError(f"{self.name}:{self._line_of(error)}") from None
        except Exception as error:
            what, kind = _explain(error)
            right = self.remedy
            if isinstance(error, UndefinedVariableError):
                right = f"set it with --template-arg {one_line(error.variable)}=…, or change the template"
            raise RecordError(f"{self.name}:{self._line_of(error)}: {what}", right, kind=kind) from None

    def _line_of(self, error: Exception) -> int:
        """Return the line of the template that raised the error."""
        frames = [
            (frame, line)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_filename == self.name
        ]
        return frames[-1][1] if frames else 0

    def _texts(self, variables: Mapping[str, Any]) -> Generator[str, None, None]:
        yield from self._template.generate(variables)


def _explain(error: Exception) -> tuple[str, str]:
    """Return a message for a template error, and the kind of error for the ledger."""
    text = one_line(str(error), 200)
    for type_, what, kind in (
        (LimitError, f"the template was stopped: {text}", "template_limit"),
        (SecurityError, f"blocked by the sandbox: {text}", "template_security"),
        (UndefinedError, f"the template uses an undefined value: {text}", "template_undefined"),
        (RecursionError, "the template was stopped: the recursion limit was exceeded", "template_limit"),
        (TemplateError, f'the template rejects the conversation: "{text}"', "template_refuses"),
    ):
        if isinstance(error, type_):
            return what, kind
    return f"the template fails with {type(error).__name__}: {text}", "template_fails"


TRACED_FILTERS = (
    *("abs", "attr", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "forceescape"),
    *(
        "groupby",
        "indent",
        "items",
        "join",
        "last",
        "length",
        "list",
        "lower",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
    ),
    *(
        "replace",
        "reverse",
        "round",
        "safe",
        "select",
        "selectattr",
        "slice",
        "sort",
        "string",
        "sum",
        "tojson",
        "trim",
    ),
    *("unique", "upper"),
)
"""Filters that read texts only through traced methods, or do not read texts at all."""


OF_TRACED_METHODS = ("format", "truncate")
"""Filters whose result is traced if the input is traced. For other filters, the origin of the result is unknown."""


TEXTS = frozenset((TracedStr, str))


class TracedSandbox(Sandbox):
    concat = staticmethod(joined)  # type: ignore[assignment]  # joins traced texts

    def __init__(self, *, now: datetime | None = None) -> None:
        super().__init__(now=now)
        self.literals: list[TracedStr] = []
        """The literals of the template, to which the compiled code refers by index."""
        self.messages: Mapping[int, int] = {}
        """Maps the `id` of each message object to the index of the message."""
        self._message_of_loop: dict[int, int] = {}
        self.tests["in"] = lambda value, container: value in self.container(container)

    def _metered(self, name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
        return super()._metered(name, filter if name in TRACED_FILTERS else self._untraced(name, filter))

    def _filters(self) -> dict[str, Callable[..., Any]]:
        def escape(value: Any) -> TracedMarkup:
            return escaped(self._soft_text(value))

        def of_text(filter: Callable[..., Any]) -> Callable[..., Any]:
            return lambda value, *args, **kwargs: filter(self._soft_text(value), *args, **kwargs)

        return super()._filters() | {
            **{name: of_text(FILTERS[name]) for name in ("capitalize", "lower", "trim", "upper")},
            **dict.fromkeys(("e", "escape"), escape),
            "indent": indented,
            "forceescape": lambda value: escaped(self.to_text(value)),
            "safe": lambda value: marked(self._soft_text(value)),
            "string": self._soft_text,
        }

    def _soft_text(self, value: Any) -> TracedStr:
        """Convert a value to a traced string. A string that is marked as safe stays marked."""
        return value if isinstance(value, TracedStr) else self.to_text(value)

    def _untraced(self, name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(filter)
        def called(*args: Any, **kwargs: Any) -> Any:
            given = list(texts_in([*args, kwargs]))
            if name in ("pprint", "urlencode"):
                # Pass plain strings, because `pprint` checks the exact type of a text and `urlencode` uses its bytes.
                args = untraced(args)
            out = filter(*args, **kwargs)
            if isinstance(out, str) and name not in OF_TRACED_METHODS and all(out is not text for text in given):
                # The origin is unknown, because the filter may have joined traced texts with untraced texts.
                return opaque(str.__str__(out), given) if given else out
            if given and not any(True for _ in texts_in(out)):
                if isinstance(out, str):
                    return opaque(str(out), given)
                opaque("", given)
            return out

        return called

    # Texts.

    def tagged(self, text: str) -> str:
        traced = literal(text)
        return made([piece._replace(tagged=True) for piece in traced.pieces], traced.trace)

    def to_text(self, value: Any) -> TracedStr:
        if isinstance(value, TracedStr):
            return unmarked(value)
        if isinstance(value, str | Undefined):
            return literal(str(value))
        check_plain(value)
        inside = list(texts_in(value))
        return opaque(str(value), inside) if inside else literal(str(value))

    def container(self, value: Any) -> Any:
        """Convert the right operand of `in` to a traced string, which adds a guard for the result of `in`."""
        return literal(value) if isinstance(value, str) else value

    def compared_length(self, value: Any, comparison: str, number: int) -> bool:
        """Compare the length of a value with a number; the guard is on the result, not on the exact length."""
        function = LENGTHS[comparison]
        if isinstance(value, TracedStr):
            return bool(value.observe(function, number))
        return bool(STEP_FUNCTIONS[function].call(value, number))

    def total(self, *values: Any) -> Any:
        if not TEXTS.issuperset(map(type, values)):
            return super().total(*values)
        self.meter.check_size(sum(map(str.__len__, values)))
        return total(values)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is type(right) is TracedStr:
            # Nearly all operations of a template concatenate texts.
            text = added(left, right)
            if str.__len__(text) > self.meter.max_characters:
                self.meter.check_size(str.__len__(text))
            return text
        return super().call_binop(context, operator, literal(left) if type(left) is str else left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in OF_DICT:
            # Nearly all lookups read a field of a message.
            return obj[attribute]
        return super().getattr(literal(obj) if type(obj) is str else obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(literal(obj) if type(obj) is str else obj, argument)

    def percent(self, pattern: str, values: Any) -> str:
        formatted: TracedStr = literal(pattern) % values
        return formatted

    def _format_of(self, text: str) -> Callable[..., str]:
        return literal(text).format

    def tojson(
        self, x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> TracedStr:
        """Encode a value as JSON.

        Strings are replaced with placeholders before encoding and inserted afterwards, so that they keep their origin.
        """
        mark, texts = os.urandom(8).hex(), list[TracedStr]()

        def with_placeholders(value: Any) -> Any:
            if isinstance(value, TracedStr):
                texts.append(value)
                return f"{mark}{len(texts) - 1}."
            if isinstance(value, dict):
                pairs = sorted(value.items()) if sort_keys else value.items()
                return {with_placeholders(key): with_placeholders(inner) for key, inner in pairs}
            if isinstance(value, list | tuple):
                return [with_placeholders(inner) for inner in value]
            return value

        encoded = json.dumps(with_placeholders(x), ensure_ascii=ensure_ascii, indent=indent, separators=separators)
        first, *others = encoded.split(mark)
        parts = [literal(first)]
        for part in others:
            number, _, text = part.partition(".")
            parts += [mapped(texts[int(number)], "escape_json", ensure_ascii), literal(text)]
        return joined(parts)

    def enter(self, loop: int, item: Any) -> str:
        self.meter.step()
        self._message_of_loop.pop(loop, None)
        if (message := self.messages.get(id(item))) is not None:
            self._message_of_loop[loop] = message
        return ""

    def leave(self, loop: int) -> None:
        self._message_of_loop.pop(loop, None)

    def owner(self) -> int:
        """Return the index of the current message in the innermost loop over messages."""
        return next(reversed(self._message_of_loop.values()), OUTSIDE)

    def begin(self, messages: Mapping[int, int]) -> None:
        self.messages = messages
        self._message_of_loop.clear()

    def rewriter(self) -> Rewriter:
        return _TracedRewriter(self)


def indented(s: TracedStr, width: int | str = 4, first: bool = False, blank: bool = False) -> TracedStr:
    """Implement Jinja's filter `indent` for traced strings."""
    by = literal(width if isinstance(width, str) else " " * width)
    newline = literal("\n")
    head, *lines = (unmarked(s) + newline).splitlines()
    text = joined([head, *(part for line in lines for part in (newline, by + line if blank or line else line))])
    text = by + text if first else text
    return marked(text) if isinstance(s, TracedMarkup) else text


class _TracedRewriter(Rewriter):
    """Rewrites the syntax tree of a template: string literals become traced, and loops report the current message."""

    def __init__(self, sandbox: TracedSandbox) -> None:
        super().__init__()
        self._literals = sandbox.literals
        self._loops = 0
        self.rules |= {
            nodes.Compare: self._compare,
            nodes.Getitem: self._lookup,
            nodes.Const: lambda node: self._literal(node.value, node) if isinstance(node.value, str) else node,
            nodes.TemplateData: lambda node: self._literal(node.data, node),
        }

    def _loop(self, node: nodes.For) -> Any:
        super()._loop(node)
        self._loops += 1
        if isinstance(node.target, nodes.Name):
            item = nodes.Name(node.target.name, "load")
            entered = sandbox_call("enter", [nodes.Const(self._loops), item], node)
            node.body[0] = nodes.ExprStmt(entered).set_lineno(node.lineno)
        return [node, statement(f"leave({self._loops})", node)]

    def _compare(self, node: nodes.Compare) -> nodes.Node:
        counted: Any = node.expr
        first = node.ops[0]
        counts = isinstance(counted, nodes.Filter) and counted.name in ("length", "count") and counted.node is not None
        if counts and len(node.ops) == 1 and first.op in LENGTHS and isinstance(first.expr, nodes.Const):
            subject = self.visit(counted.node)
            return sandbox_call("compared_length", [subject, nodes.Const(first.op), first.expr], node)
        self.generic_visit(node)
        for operand in node.ops:
            if operand.op in ("in", "notin"):
                operand.expr = sandbox_call("container", [operand.expr], node)
        return node

    def _lookup(self, node: nodes.Getitem) -> nodes.Node:
        # Do not trace a constant key, because a key is never output.
        name = node.arg
        self.generic_visit(node)
        if isinstance(name, nodes.Const):
            node.arg = name
        return node

    def _literal(self, text: str, node: nodes.Node) -> nodes.Node:
        self._literals.append(literal(text, node.lineno))
        return nodes.EnvironmentAttribute(f"literals[{len(self._literals) - 1}]").set_lineno(node.lineno)


class TracedProgram(Program):
    """A compiled template that records the origin of every character of its output."""

    sandbox: TracedSandbox

    def __init__(self, source: str, name: str, *, now: datetime | None = None) -> None:
        super().__init__(source, name, TracedSandbox(now=now))
        self._line = 0
        self._lines: dict[int, int] = {}

    def trace(self, variables: Mapping[str, Any], meter: Meter) -> Rendering:
        """Render the template, and record the origin of every piece of the output."""
        self.sandbox.begin({id(message): number for number, message in enumerate(variables["messages"])})
        pieces: list[TracedPiece] = []
        for text in self.run(variables, meter):
            owner, line = self.sandbox.owner(), self._line
            pieces += [
                TracedPiece(written, own_line or line, source, slot, tagged, mixed, owner, start)
                for written, own_line, source, slot, tagged, mixed, _, start in literal(text).pieces
                if written or slot is not None
            ]
        return Rendering(tuple(pieces))

    def _texts(self, variables: Mapping[str, Any]) -> Generator[str, None, None]:
        """Yield the output in pieces, and set `_line` to the template line that produced the latest piece."""
        running: Any = self._template.root_render_func(self._template.new_context(dict(variables)))
        try:
            for text in running:
                at = running.gi_frame.f_lasti
                line = self._lines.get(at)
                if line is None:
                    # Finding the line of an instruction takes time that grows with the size of the template.
                    line = self._lines[at] = self._template.get_corresponding_lineno(running.gi_frame.f_lineno)
                self._line = line
                yield text
        except Exception:
            self.sandbox.handle_exception()
