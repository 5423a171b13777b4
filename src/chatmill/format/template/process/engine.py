"""The server in a template process: it opens the chat templates of one renderer and renders records on request."""

from __future__ import annotations

# Import the modules that Jinja imports lazily, because imports fail after the lockdown.
import html  # noqa: F401
import pprint  # noqa: F401
import time
from datetime import datetime
from typing import Any

import jinja2.debug  # noqa: F401
import msgspec

from chatmill.errors import DataError, RecordError
from chatmill.format.template.answers.derive import derive
from chatmill.format.template.answers.derived import DerivedAnswers
from chatmill.format.template.answers.renderings import KeptRenderings
from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.process import messages
from chatmill.format.template.process.fork_server import run_server
from chatmill.format.template.template import ChatTemplate
from chatmill.format.template.template_input import plain_input
from chatmill.format.template.tracing.limits import TimeLimitError
from chatmill.records.record import Record

WARM_UP = "{% for m in messages %}{{ '%s' % m.role + m | tojson }}{% endfor %}{{ strftime_now('%Y') }}{{ [].x.y }}"


def main() -> None:
    _warm_up()
    run_server(TemplateEngine)


class TemplateEngine:
    def __init__(self) -> None:
        self.templates: list[ChatTemplate] = []
        self.names: list[str] = []
        self.tokens, self.ends = ControlTokens({}), frozenset[str]()
        self.eos: str | None = None
        self._kept: KeptRenderings | None = None

    def __call__(self, frame: bytes) -> bytes:
        """Decode a request and return the encoded response."""
        request = messages.decode_request(frame)
        try:
            return messages.encode(self.answer(request))
        except MemoryError:
            return messages.encode(messages.Stopped("memory", ""))
        except UnicodeEncodeError:
            name = "" if isinstance(request, messages.OpenTemplates) else f"{self.names[request.template]}: "
            what = f"{name}the output of the template contains a lone surrogate"
            return messages.encode(messages.RecordFault(what, "change the template", "template_fails"))

    def answer(self, request: messages.Request) -> messages.Response:
        deadline = time.process_time() + request.seconds
        try:
            if isinstance(request, messages.OpenTemplates):
                return self._open(request, deadline)
            template = self.templates[request.template]
            template.deadline = deadline
            if isinstance(request, messages.RenderText):
                given = plain_input(request.record, template.style)
                return messages.Text(template.render(given, request.messages, prompt=request.prompt))
            return self._derive(request, template)
        except RecordError as error:
            return messages.RecordFault(error.what, error.right, error.kind)
        except DataError as error:
            return messages.TemplateFault(str(error))
        except TimeLimitError as error:
            return messages.Stopped("time", str(error))

    def _open(self, request: messages.OpenTemplates, deadline: float) -> messages.Opened:
        variables = msgspec.json.decode(request.variables)
        now = datetime.fromisoformat(request.now)
        self.tokens, self.ends = ControlTokens(dict.fromkeys(request.tokens, 0)), frozenset(request.ends)
        eos = variables.get("eos_token")
        self.eos = eos if eos in self.tokens.ids else None
        self.names = [name for name, _ in request.sources]
        self.templates = [
            ChatTemplate(source, name, variables=variables, now=now, deadline=deadline)
            for name, source in request.sources
        ]
        return messages.Opened(
            [template.has_tags for template in self.templates], [template.style for template in self.templates]
        )

    def _derive(self, request: messages.Derive, template: ChatTemplate) -> messages.Derived:
        if request.keep:
            self._kept = KeptRenderings(request.record, template)
        elif self._kept and not self._kept.contains(request.record, template):
            self._kept = None
        kept = self._kept

        def attempt(cacheable: bool) -> DerivedAnswers:
            return derive(
                request.record,
                template,
                self.tokens,
                ends=self.ends,
                mask=request.mask,
                cacheable=cacheable,
                last_only=request.last_only,
                text_tokens=request.text_tokens,
                eos=self.eos,
                kept=kept,
            )

        try:
            derived = attempt(request.cacheable)
        except RecordError:
            if not request.cacheable:
                raise
            # Try again without guards: recording guards renders additional prompts, and an error in these prompts is
            # not a reason to reject the record.
            derived = attempt(False)
        steps = derived.steps
        if steps is not None:
            try:
                messages.encode(steps)
            except (OverflowError, TypeError):
                # Drop steps that contain numbers too large for MessagePack, as in `content[:10 ** 30]`.
                steps = None
        return messages.Derived(
            derived.rendering.pieces, derived.answers, derived.prefixes, derived.contexts, steps, derived.notes
        )


def _warm_up() -> None:
    """Trigger lazy imports and fill caches before the process restricts its system calls."""
    engine = TemplateEngine()
    record: Any = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    opened = messages.OpenTemplates([("warm", WARM_UP)], b"{}", "2000-01-01", ["x"], [], 60.0)
    engine.answer(opened)
    derive = messages.Derive(0, msgspec.convert(record, Record), "derived", True, False, [], 60.0)
    messages.decode_request(messages.encode(derive))
    messages.encode(engine.answer(derive))
