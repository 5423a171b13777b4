"""Rewriting: what is changed in a template's tree before it is compiled, and what is refused there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.visitor import NodeTransformer


class Rewriter(NodeTransformer):
    """A template's tree with its loops counted, and nothing in it that Jinja would do behind the sandbox's back."""

    def __init__(self) -> None:
        self.rules: dict[type[nodes.Node], Callable[[Any], Any]] = {
            nodes.For: self._loop,
            nodes.Concat: self._concat,
            nodes.ScopedEvalContextModifier: self._escaped,
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
        return attribute_call("joined", node.nodes, node)

    def _escaped(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:
        raise TemplateSyntaxError("autoescape changes text behind the reader's back; leave it out", node.lineno)

    def _other_file(self, node: nodes.Stmt) -> nodes.Node:
        raise TemplateSyntaxError("a chat template is one file; it cannot read others", node.lineno)


def statement(code: str, at: nodes.Node) -> nodes.Node:
    """An attribute of the environment, evaluated for its effect."""
    return nodes.ExprStmt(nodes.EnvironmentAttribute(code)).set_lineno(at.lineno)


def attribute_call(name: str, args: list[nodes.Expr], at: nodes.Node) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)
    return call.set_lineno(at.lineno)  # type: ignore[return-value]  # it returns itself
