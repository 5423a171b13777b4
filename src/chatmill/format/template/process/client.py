"""The client of a template process: starts the process, sends requests, and kills a process that reaches a limit.

The limits on CPU time, response size and memory also apply if a malicious template takes over its process. The memory
limit of a process depends on the size of the conversation. A process that reaches a limit is killed and replaced. After
several processes have been killed, the client reports an error in the template instead of an error in the record.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import msgspec

from chatmill.errors import DataError, RecordError, one_line
from chatmill.format.template.answers.derived import DerivedAnswers
from chatmill.format.template.hf_folder import TemplateSource
from chatmill.format.template.process import messages
from chatmill.format.template.process.channel import Channel, EndedError, fork_server, stop_servers, too_long
from chatmill.format.template.template_input import Style
from chatmill.records.record import Record, new_record

if TYPE_CHECKING:
    from chatmill.format.renderer import Mask

SECONDS = 3.0
"""CPU time limit for a small conversation, in seconds. A normal template needs a few milliseconds."""
SECONDS_PER_CHARACTER = 2e-6
SECONDS_PER_PAIR = 5e-4
"""CPU time limit per pair of messages, in seconds. A template may visit all messages of every prefix."""
MEMORY = 512 << 20
MEMORY_PER_BYTE = 64
MEMORY_PER_MESSAGE = 4
"""Added to MEMORY_PER_BYTE for each message, because every prefix of the conversation is rendered."""
RESPONSE = 16 << 20
RESPONSE_PER_BYTE = 64
MAX_KILLS = 3
"""Number of killed or crashed processes after which a renderer gives up on its template."""
ENGINE = "chatmill.format.template.process.engine"
_RIGHT = "change the conversation or the template"


@dataclass(frozen=True)
class OpenedTemplate:
    """A chat template that is open in the template process."""

    number: int
    name: str
    source: str
    has_tags: bool
    """Whether the template has generation tags."""
    style: Style

    def quote(self, line: int) -> str:
        """Return a line of the template with its line number, for error messages."""
        lines = self.source.split("\n")
        text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        return f"{self.name}:{line}: {one_line(text, 160)}"


class TemplateProcess:
    """The chat templates of one renderer, which run in a separate, restricted process."""

    def __init__(
        self,
        sources: Sequence[TemplateSource],
        *,
        variables: Mapping[str, Any],
        now: datetime,
        tokens: Sequence[str],
        ends: Sequence[str],
    ) -> None:
        self._name = sources[0].name
        self._copy = partial(TemplateProcess, sources, variables=variables, now=now, tokens=tokens, ends=ends)
        self._channel: Channel | None = None
        self._lock = threading.Lock()
        self._kills = 0
        try:
            variables_json = msgspec.json.encode(variables)
            self._open = messages.OpenTemplates(
                [(source.name, source.source) for source in sources],
                *(variables_json, now.isoformat(), list(tokens), list(ends), SECONDS),
            )
            messages.encode(self._open)
        except (UnicodeEncodeError, TypeError, OverflowError) as error:
            raise DataError(f"{self._name}: cannot be opened with these arguments ({one_line(str(error))})") from None
        _processes.add(self)
        with self._lock:
            opened = self._started(MEMORY)
        self.templates = [
            OpenedTemplate(number, source.name, source.source, opened.has_tags[number], opened.styles[number])
            for number, source in enumerate(sources)
        ]

    def copy(self) -> TemplateProcess:
        """Return another process with the same templates, to run several requests in parallel."""
        return self._copy()

    @property
    def protections(self) -> list[str]:
        """The names of the active protections of the process, as returned by `lock_down`."""
        with self._lock:
            if self._channel is None:
                self._started(MEMORY)
            assert self._channel is not None
            return [one_line(name) for name in self._channel.protections]

    def text(self, template: int, record: Record, count: int | None = None, *, prompt: bool = False) -> str:
        """Render the first `count` messages as text, with the generation prompt if `prompt` is true."""
        request = messages.RenderText(template, _sent(record), count, prompt, _seconds(record))
        response = self._request(request)
        if not isinstance(response, messages.Text):
            raise self._broken()
        return response.text

    def derive(
        self,
        template: int,
        record: Record,
        *,
        texts: int,
        mask: Mask,
        cacheable: bool,
        last_only: bool = False,
        text_tokens: Iterable[str] = (),
        keep: bool = False,
    ) -> DerivedAnswers:
        """Render a record and find its answers. `texts` is the number of text fields in the record.

        `text_tokens` contains the control tokens, such as `<think>`, that are also recognized in message text. With
        `keep`, the process keeps the renderings, so that deriving the answers of the first messages of the record is
        faster, until it derives the answers of another conversation.
        """
        may_hold, seconds = sorted(text_tokens), _seconds(record)
        request = messages.Derive(template, _sent(record), mask, cacheable, last_only, may_hold, seconds, keep)
        response = self._request(request)
        try:
            if not isinstance(response, messages.Derived):
                raise messages.BrokenResponseError
            return messages.check_derived(response, record, texts)
        except (messages.BrokenResponseError, RecursionError):
            raise self._broken() from None

    def close(self) -> None:
        """Kill the process. The next request starts a new process."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    __del__ = close

    def after_fork(self) -> None:
        """Close the connection in a forked child without killing the parent's template process."""
        self._lock = threading.Lock()
        self.close()

    def _request(self, request: messages.RenderText | messages.Derive) -> messages.Response:
        """Send a request about one record and return the response.

        Raise `RecordError` or `DataError` for an error response.
        """
        try:
            frame = messages.encode(request)
        except UnicodeEncodeError:
            what = "a text contains a lone surrogate"
            raise RecordError(what, "use valid Unicode", kind="not_text") from None
        with self._lock:
            try:
                response = self._exchange(frame, len(request.record.messages), request.seconds)
            except EndedError as error:
                raise self._stopped(str(error)) from None
            if isinstance(response, messages.Stopped):
                memory = f"the memory limit of {self._memory() >> 20:,} MiB was exceeded"
                why = memory if response.limit == "memory" else too_long(request.seconds)
                raise self._stopped(why, response.place)
        if isinstance(response, messages.TemplateFault):
            raise DataError(one_line(response.what, 600))
        if isinstance(response, messages.RecordFault):
            raise RecordError(one_line(response.what, 600), one_line(response.right, 200), kind=response.kind)
        return response

    def _exchange(self, frame: bytes, count: int, seconds: float) -> messages.Response:
        memory = max(MEMORY, min(len(frame) * (MEMORY_PER_BYTE + MEMORY_PER_MESSAGE * count), _half_of_memory()))
        limit = RESPONSE + RESPONSE_PER_BYTE * len(frame)
        for attempt in range(2):
            if self._channel is None or self._channel.memory < memory:
                self.close()
                self._started(memory)
            assert self._channel is not None
            try:
                return _decoded(self._channel.exchange(frame, seconds=seconds, limit=limit))
            except (EOFError, OSError):
                code = self._end()
                if code in (None, -signal.SIGKILL, -signal.SIGXCPU) and not attempt:
                    # Retry once if the process was killed from outside or reached its total CPU limit.
                    continue
                raise EndedError(f"the process ended with {_shown_exit(code)}") from None
            except BaseException:
                self._end()
                raise
        raise AssertionError

    def _started(self, memory: int) -> messages.Opened:
        """Start a process and open the templates in it."""
        try:
            channel = self._channel = _new_channel(memory)
            response = _decoded(channel.exchange(messages.encode(self._open), seconds=SECONDS, limit=1 << 20))
        except EndedError as error:
            why = str(error)
        except (EOFError, OSError):
            why = f"the process ended with {_shown_exit(self._end())}"
        except BaseException:
            self._end()
            raise
        else:
            if isinstance(response, messages.TemplateFault):
                raise DataError(one_line(response.what, 600))
            if isinstance(response, messages.Opened):
                count = len(self._open.sources)
                if len(response.has_tags) == len(response.styles) == count:
                    return response
            is_time = isinstance(response, messages.Stopped) and response.limit == "time"
            why = too_long(SECONDS) if is_time else f"the memory limit of {memory >> 20:,} MiB was exceeded"
        self._end()
        raise DataError(f"{self._name}: the template was stopped: {why}; fix the template")

    def _memory(self) -> int:
        return MEMORY if self._channel is None else self._channel.memory

    def _end(self) -> int | None:
        channel, self._channel = self._channel, None
        return None if channel is None else channel.end()

    def _stopped(self, why: str, place: str = "") -> DataError:
        """Kill the process. Return an error about the record or, after too many kills, an error about the template."""
        self._end()
        self._kills += 1
        what = f"{one_line(place, 300) or self._name}: the template was stopped: {why}"
        if self._kills >= MAX_KILLS:
            return DataError(f"{what}; giving up after {self._kills} attempts; fix the template")
        return RecordError(what, _RIGHT, kind="template_limit")

    def _broken(self) -> DataError:
        with self._lock:
            return self._stopped("the process sent an invalid response")


_processes: weakref.WeakSet[TemplateProcess] = weakref.WeakSet()


def _after_fork() -> None:
    for process in list(_processes):
        process.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def start_server() -> None:
    """Start, in the background, the server that forks template processes."""
    fork_server(ENGINE)


def _new_channel(memory: int) -> Channel:
    try:
        return Channel(fork_server(ENGINE), memory)
    except (EOFError, OSError):
        # Start a new server, because the old one may have been killed.
        stop_servers()
    try:
        return Channel(fork_server(ENGINE), memory)
    except EOFError:
        stop_servers()
        what = "the process that runs chat templates exits immediately"
        raise DataError(f"{what}; check that {one_line(sys.executable, 200)} can import jinja2 and msgspec") from None
    except OSError as error:
        raise DataError(
            f"cannot start a process for the chat template: {error.strerror}; free some memory, or end other processes"
        ) from None


def _decoded(frame: bytes) -> messages.Response:
    try:
        response: messages.Response = messages.decode_response(frame)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise EndedError("the process sent an invalid response") from None
    return response


def _sent(record: Record) -> Record:
    """Return a copy of the record with only its messages and tools, to send to the template process."""
    return new_record(record.messages, None, record.tools)


def _seconds(record: Record) -> float:
    """Return the CPU time limit for a request about a record."""
    count = len(record.messages)
    size = sum(len(message.content) + len(message.reasoning) for message in record.messages)
    return SECONDS + SECONDS_PER_CHARACTER * size * count + SECONDS_PER_PAIR * count**2


@cache
def _half_of_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (ValueError, OSError):
        return 8 << 30


def _shown_exit(code: int | None) -> str:
    if code is None:
        return "no exit code"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
