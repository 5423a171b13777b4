"""Programs: templates made ready to run; what goes wrong in one is a fault that names its line."""

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
    """A template made ready to run in its sandbox."""

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
        """The pieces a rendering is made of; everything that goes wrong is a `RecordError`."""
        self.sandbox.meter = meter
        with self._faults():
            written, pieces = 0, self._pieces(variables)
            for piece in pieces:
                written += str.__len__(piece)
                try:
                    meter.size(written)
                except LimitError as error:
                    # Raised where it was written, so that the line is known.
                    pieces.throw(error)
                yield piece

    def _pieces(self, variables: Mapping[str, Any]) -> Generator[str, None, None]:
        yield from self._template.generate(variables)

    def render(self, variables: Mapping[str, Any], meter: Meter) -> str:
        return "".join(self.run(variables, meter))

    def line(self, number: int) -> str:
        """A line of the template with its place, to quote."""
        lines = self.source.split("\n")
        text = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        return f"{self.name}:{number}: {one_line(text, 160)}"

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except (ChatmillError, MemoryError, GeneratorExit):
            raise
        except Exception as error:
            what, kind = _words(error)
            right = "change the conversation or the template"
            raise RecordError(f"{self.name}:{self._line_of(error)}: {what}", right, kind=kind) from None

    def _line_of(self, error: Exception) -> int:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self.name]
        return frames[-1].lineno or 0 if frames else 0


def _words(error: Exception) -> tuple[str, str]:
    """What went wrong in a template, for people and for counting."""
    said = one_line(str(error), 200)
    if isinstance(error, LimitError):
        return f"the template was stopped: {said}", "template_limit"
    if isinstance(error, SecurityError):
        return f"the template reaches for what it may not see: {said}", "template_security"
    if isinstance(error, UndefinedError):
        return f"the template uses what is not there: {said}", "template_undefined"
    if isinstance(error, RecursionError):
        return "the template was stopped: it calls itself too often", "template_limit"
    if isinstance(error, TemplateError):
        return f'the template refuses the conversation: "{said}"', "template_refuses"
    return f"the template fails with {type(error).__name__}: {said}", "template_fails"
