"""Traced renderings: a template run so that every character it writes can be asked where it came from.

The template is the same; its words become `TracedStr` before it is compiled, and the filters that would lose the origin
of a text are replaced. Which message a template was at when it wrote something is known from its loops.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, wraps
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context, Undefined

from chatmill.format.template.tracing.program import Program
from chatmill.format.template.tracing.provenance import TracedPiece
from chatmill.format.template.tracing.rewrite import Rewriter, attribute_call, statement
from chatmill.format.template.tracing.sandbox import Meter, Sandbox
from chatmill.format.template.tracing.traced_str import TracedStr, joined, literal, made, opaque, tagged, texts_in

NOBODY = -1

FOLLOWED = frozenset(
    (
        *("abs", "attr", "batch", "capitalize", "count", "d", "default", "dictsort", "first", "groupby", "items"),
        *("join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace"),
        *("reverse", "round", "select", "selectattr", "slice", "sort", "string", "sum", "tojson", "trim", "unique"),
        "upper",
    )
)
"""Filters that reach their result through the methods of a text, or never look into one."""


@dataclass(frozen=True)
class Rendering:
    """What was written: pieces, for each the message that the template was at, or `NOBODY`, and the line of it."""

    pieces: tuple[TracedPiece, ...]
    owners: tuple[int, ...]
    lines: tuple[int, ...]

    @cached_property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class TracedSandbox(Sandbox):
    concat = staticmethod(joined)  # type: ignore[assignment]  # what it joins are texts, and so is the whole

    def __init__(self, *, now: datetime | None = None) -> None:
        super().__init__(now=now)
        self.finalize = self.written
        self.words: list[TracedStr] = []
        """The template's own words; the compiled code takes them from here."""
        self.messages: Mapping[int, int] = {}
        """The number of each message of this rendering, by the identity of its object."""
        self._at: dict[int, int] = {}
        self.tests["in"] = lambda value, container: value in self.container(container)

    def _metered(self, name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
        if name not in FOLLOWED:
            return super()._metered(name, self._unfollowed(filter))
        return super()._metered(name, filter)

    def _filters(self) -> dict[str, Callable[..., Any]]:
        # Markup would escape what it is joined with; no template that is not escaped means that.
        return super()._filters() | {"string": self.written, "safe": self.written}

    def _unfollowed(self, filter: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(filter)
        def called(*args: Any, **kwargs: Any) -> Any:
            out = filter(*args, **kwargs)
            given = list(texts_in([*args, kwargs]))
            if given and not any(True for _ in texts_in(out)):
                if isinstance(out, str):
                    return opaque(str(out), given)
                opaque("", given)
            return out

        return called

    # What a template writes.

    def tagged(self, text: str) -> str:
        return tagged(literal(text))

    def written(self, value: Any) -> TracedStr:
        if isinstance(value, TracedStr):
            return value
        if isinstance(value, str | Undefined) or not (inside := list(texts_in(value))):
            return literal(str(value))
        return opaque(str(value), inside)

    def container(self, value: Any) -> Any:
        """What is looked into by `in`: a plain text would not tell what it was asked."""
        return literal(value) if isinstance(value, str) else value

    def compared_length(self, value: Any, comparison: str, number: int) -> bool:
        """`value | length > number`, without asking a text for more than that."""
        if isinstance(value, TracedStr):
            return bool(value.ask(LENGTHS[comparison], number))
        return LENGTHS[comparison](value, number)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if type(left) is str:
            left = literal(left)
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        return super().getattr(literal(obj) if type(obj) is str else obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(literal(obj) if type(obj) is str else obj, argument)

    def wrap_str_format(self, value: Any) -> Any:
        # The format method of a text is its own, and never looks inside of its values.
        return None if isinstance(getattr(value, "__self__", None), TracedStr) else super().wrap_str_format(value)

    def tojson(
        self, x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> TracedStr:
        """JSON whose strings keep their origin: they are left out, and put in where it has room for them."""
        mark, texts = secrets.token_hex(8), list[TracedStr]()

        def without(value: Any) -> Any:
            if isinstance(value, TracedStr):
                texts.append(value)
                return f"{mark}{len(texts) - 1}."
            if isinstance(value, dict):
                pairs = sorted(value.items()) if sort_keys else value.items()
                return {without(key): without(inner) for key, inner in pairs}
            if isinstance(value, list | tuple):
                return [without(inner) for inner in value]
            return value

        layout = json.dumps(without(x), ensure_ascii=ensure_ascii, indent=indent, separators=separators)
        first, *rest = layout.split(mark)
        parts = [literal(first)]
        for part in rest:
            number, _, words = part.partition(".")
            parts += [_escaped(texts[int(number)], ensure_ascii), literal(words)]
        return joined(parts)

    # Where a template is.

    def enter(self, loop: int, item: Any) -> str:
        self.meter.step()
        self._at.pop(loop, None)
        if (message := self.messages.get(id(item))) is not None:
            self._at[loop] = message
        return ""

    def leave(self, loop: int) -> None:
        self._at.pop(loop, None)

    def owner(self) -> int:
        """The message of the innermost loop over messages."""
        return next(reversed(self._at.values()), NOBODY)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if getattr(__obj, "__func__", None) is TracedSandbox.enter:
            return __obj(*args)
        return super().call(__context, __obj, *args, **kwargs)

    def begin(self, messages: Mapping[int, int]) -> None:
        self.messages = messages
        self._at.clear()

    def rewriter(self) -> Rewriter:
        return _TracedRewriter(self)


class _TracedRewriter(Rewriter):
    """The same, with the template's words taken from the sandbox, and its loops telling where they are."""

    def __init__(self, sandbox: TracedSandbox) -> None:
        super().__init__()
        self._words = sandbox.words
        self._loops = 0
        self.rules |= {
            nodes.Compare: self._compare,
            nodes.Getitem: self._lookup,
            nodes.Const: lambda node: self._word(node.value, node) if isinstance(node.value, str) else node,
            nodes.TemplateData: lambda node: self._word(node.data, node),
        }

    def _loop(self, node: nodes.For) -> Any:
        super()._loop(node)
        self._loops += 1
        if isinstance(node.target, nodes.Name):
            item = nodes.Name(node.target.name, "load")
            entered = attribute_call("enter", [nodes.Const(self._loops), item], node)
            node.body[0] = nodes.ExprStmt(entered).set_lineno(node.lineno)
        return [node, statement(f"leave({self._loops})", node)]

    def _compare(self, node: nodes.Compare) -> nodes.Node:
        counted: Any = node.expr
        first = node.ops[0]
        counts = isinstance(counted, nodes.Filter) and counted.name in ("length", "count") and counted.node is not None
        if counts and len(node.ops) == 1 and first.op in LENGTHS and isinstance(first.expr, nodes.Const):
            subject = self.visit(counted.node)
            return attribute_call("compared_length", [subject, nodes.Const(first.op), first.expr], node)
        self.generic_visit(node)
        for operand in node.ops:
            if operand.op in ("in", "notin"):
                operand.expr = attribute_call("container", [operand.expr], node)
        return node

    def _lookup(self, node: nodes.Getitem) -> nodes.Node:
        # A name in brackets is only looked up; everything else may be written.
        name = node.arg
        self.generic_visit(node)
        if isinstance(name, nodes.Const):
            node.arg = name
        return node

    def _word(self, text: str, node: nodes.Node) -> nodes.Node:
        self._words.append(literal(text, node.lineno))
        return nodes.EnvironmentAttribute(f"words[{len(self._words) - 1}]").set_lineno(node.lineno)


class TracedProgram(Program):
    """A template made ready for traced renderings."""

    sandbox: TracedSandbox

    def __init__(self, source: str, name: str, *, now: datetime | None = None) -> None:
        super().__init__(source, name, TracedSandbox(now=now))
        self._line = 0
        self._lines: dict[int, int] = {}

    def trace(self, variables: Mapping[str, Any], meter: Meter) -> Rendering:
        """Render, and keep for every piece where it came from and which message the template was at."""
        numbers = {id(message): number for number, message in enumerate(variables["messages"])}
        self.sandbox.begin(numbers)
        pieces: list[TracedPiece] = []
        owners: list[int] = []
        lines: list[int] = []
        for text in self.run(variables, meter):
            owner, line = self.sandbox.owner(), self._line
            for piece in literal(text).pieces:
                if piece.text or piece.slot is not None:
                    pieces.append(piece)
                    owners.append(owner)
                    lines.append(piece.line or line)
        return Rendering(tuple(pieces), tuple(owners), tuple(lines))

    def _pieces(self, variables: Mapping[str, Any]) -> Generator[str, None, None]:
        """What the template writes; while it waits, `_line` is the line of it that wrote the last."""
        running: Any = self._template.root_render_func(self._template.new_context(dict(variables)))
        try:
            for piece in running:
                at = running.gi_frame.f_lineno
                if at not in self._lines:
                    self._lines[at] = self._template.get_corresponding_lineno(at)
                self._line = self._lines[at]
                yield piece
        except Exception:
            self.sandbox.handle_exception()


def _escaped(text: TracedStr, ensure_ascii: bool) -> TracedStr:
    """A text as it stands inside the quotes of JSON."""
    if text.trace is None:
        return made([piece._replace(text=_escape(piece.text, ensure_ascii)) for piece in text.pieces], None)
    if len(text.pieces) == 1:
        piece = text.pieces[0]
        assert piece.slot is not None
        slot = text.trace.value(_escape, (piece.slot,), ensure_ascii)
        return made([piece._replace(text=_escape(piece.text, ensure_ascii), slot=slot)], text.trace)
    return joined([_escaped(made([piece], text.trace), ensure_ascii) for piece in text.pieces])


def _escape(text: str, ensure_ascii: bool) -> str:
    return json.dumps(text, ensure_ascii=ensure_ascii)[1:-1]


LENGTHS: dict[str, Callable[[Any, int], bool]] = {
    "eq": lambda value, number: len(value) == number,
    "ne": lambda value, number: len(value) != number,
    "lt": lambda value, number: len(value) < number,
    "lteq": lambda value, number: len(value) <= number,
    "gt": lambda value, number: len(value) > number,
    "gteq": lambda value, number: len(value) >= number,
}
