"""Compiled templates; errors inside of them name the line of the template."""

from __future__ import annotations

import traceback
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.exceptions import SecurityError

from chatmill.errors import ChatmillError, DataError, RecordError, one_line
from chatmill.format.template.tracing.sandbox import LimitError, Meter, Sandbox


class Program:
    """A compiled template in its sandbox."""

    def __init__(self, source: str, name: str, sandbox: Sandbox) -> None:
        self.source, self.name, self.sandbox = source, name, sandbox
        try:
            code = sandbox.compile(source, name, name)
        except TemplateSyntaxError as error:
            raise DataError(f"{name}:{error.lineno}: {one_line(error.message or 'no template')}; mend it") from None
        except (RecursionError, SyntaxError, ValueError, OverflowError) as error:
            raise DataError(f"{name}: no template that Jinja can compile ({one_line(str(error))}); mend it") from None
        self._template = sandbox.template_class.from_code(sandbox, code, sandbox.make_globals(None))

    def run(self, variables: Mapping[str, Any], meter: Meter) -> Iterator[str]:
        """The texts that the template writes, one after the other; any error is a `RecordError`."""
        self.sandbox.meter = meter
        with self._record_errors():
            written, texts = 0, self._texts(variables)
            for text in texts:
                written += str.__len__(text)
                try:
                    meter.check_size(written)
                except LimitError as error:
                    # Raised inside of the template, so that the line is known.
                    texts.throw(error)
                yield text

    def _texts(self, variables: Mapping[str, Any]) -> Generator[str, None, None]:
        yield from self._template.generate(variables)

    def render(self, variables: Mapping[str, Any], meter: Meter) -> str:
        return "".join(self.run(variables, meter))

    def line(self, number: int) -> str:
        """A line of the template with its number, for messages."""
        lines = self.source.split("\n")
        text = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        return f"{self.name}:{number}: {one_line(text, 160)}"

    @contextmanager
    def _record_errors(self) -> Iterator[None]:
        try:
            yield
        except (ChatmillError, MemoryError, GeneratorExit):
            raise
        except Exception as error:
            what, kind = _explain(error)
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self.name]
            line = frames[-1].lineno or 0 if frames else 0
            right = "change the conversation or the template"
            raise RecordError(f"{self.name}:{line}: {what}", right, kind=kind) from None


def _explain(error: Exception) -> tuple[str, str]:
    """An error in a template as a message, and its kind for the ledger."""
    text = one_line(str(error), 200)
    for type_, what, kind in (
        (LimitError, f"the template was stopped: {text}", "template_limit"),
        (SecurityError, f"the template reaches for what it may not see: {text}", "template_security"),
        (UndefinedError, f"the template uses what is not there: {text}", "template_undefined"),
        (RecursionError, "the template was stopped: it calls itself too often", "template_limit"),
        (TemplateError, f'the template refuses the conversation: "{text}"', "template_refuses"),
    ):
        if isinstance(error, type_):
            return what, kind
    return f"the template fails with {type(error).__name__}: {text}", "template_fails"
