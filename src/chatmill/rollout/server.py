"""Requests to OpenAI-compatible servers: a JSON body out, one answer back, as JSON or as a stream of events."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

import numpy as np

from chatmill.errors import DataError, UsageError, one_line

RETRIED = {408, 429, 500, 502, 503, 504}
"""HTTP status codes after which a request is sent again."""
REJECTED = {400, 404, 405, 422}
"""HTTP status codes of a server that does not know the path or a field of a request."""
MAX_REPLY_BYTES = 64 << 20
"""A longer reply is refused."""
READ_BYTES = 1 << 16


@dataclass
class ServerAnswer:
    """The first choice of a reply, and what the server counted."""

    text: str = ""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    has_text: bool = False
    parsed: str = ""
    """The field into which the server moved a part of the answer: reasoning or tool calls."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True)
class Server:
    """Sends requests to one model of a server, several at a time, and retries after temporary failures."""

    url: str
    """The base URL with the version, as in http://localhost:8000/v1."""
    model: str
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    concurrency: int = 16
    timeout: float = 600.0
    """Seconds for one answer."""
    attempts: int = 4
    pause: float = 0.5
    """Seconds before the second attempt; each later pause is twice as long."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request, such as Authorization. Their values are removed from error messages."""
    advice: ClassVar[str] = ""
    """What to try when the server rejects a request."""

    def __post_init__(self) -> None:
        check_server_url(self.url)

    def sampled(self, step: int, row: int) -> dict[str, Any]:
        """The fields that all requests have; the seed depends on (seed, step, row) alone."""
        return {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": int(np.random.SeedSequence((self.seed, step, row)).generate_state(1)[0]) >> 1,
        }

    def answers(self, bodies: Sequence[Mapping[str, Any]], path: str) -> list[ServerAnswer]:
        """The answer to each request, in their order."""
        with ThreadPoolExecutor(max(1, min(self.concurrency, len(bodies)))) as pool:
            futures = [pool.submit(self._post, path, body) for body in bodies]
            try:
                return [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                raise

    def fault(self, what: str, right: str) -> DataError:
        """The error of a server: one line, without the values of headers."""
        message = f"{self.url}: {what}; {right}"
        for value in self.headers.values():
            for secret in (value, value.removeprefix("Bearer ")):
                message = message.replace(secret, "…") if secret else message
        return DataError(message)

    def _post(self, path: str, body: Mapping[str, Any]) -> ServerAnswer:
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **self.headers},
        )
        for attempt in range(1, self.attempts + 1):
            right = f"check the server, and that it serves {one_line(self.model)}"
            try:
                return read_answer(self._read(request))
            except urllib.error.HTTPError as error:
                what, temporary = f"status {error.code}: {_start_of(error)}", error.code in RETRIED
                right += self._advice if error.code in REJECTED else ""
            except (OSError, http.client.HTTPException, _CutError) as error:
                what, temporary = one_line(str(getattr(error, "reason", error)) or type(error).__name__, 200), True
            except _ReplyError as error:
                raise self.fault(str(error), f"expected a completion of {one_line(self.model)}{self._advice}") from None
            if not temporary or attempt == self.attempts:
                raise self.fault(f"no answer ({what})", right)
            time.sleep(self.pause * 2 ** (attempt - 1))
        raise AssertionError

    @property
    def _advice(self) -> str:
        return f"; {self.advice}" if self.advice else ""

    def _read(self, request: urllib.request.Request) -> bytes:
        """The body of a reply. `timeout` holds for all of it, not only for the time between two reads."""
        deadline = time.monotonic() + self.timeout
        data = bytearray()
        with _OPENER.open(request, timeout=self.timeout) as response:
            while part := response.read1(READ_BYTES):
                data += part
                if len(data) > MAX_REPLY_BYTES:
                    raise _ReplyError(f"the reply is longer than {MAX_REPLY_BYTES >> 20} MiB")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the answer took longer than {self.timeout:g} seconds")
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
        return bytes(data)


def check_server_url(url: str) -> None:
    """Raise `UsageError` for what is no base URL of a server, or would store a password with the run."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        what = "the URL of the server has a user, a password or a query, which would be stored with the run"
        raise UsageError(f"{what}; give a URL without, and name the variable that holds the key as server_key_env")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f'"{one_line(url)}" is no server; expected http://… or https://…')


def _start_of(error: urllib.error.HTTPError) -> str:
    try:
        with error:
            return one_line(error.read(500).decode("utf-8", "replace"), 200)
    except (OSError, http.client.HTTPException):
        return ""


class _ReplyError(Exception):
    """A reply that is no completion."""


class _CutError(Exception):
    """A stream that ends before its answer does."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: it would turn the POST into a GET and carry the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def read_answer(data: bytes) -> ServerAnswer:
    """The answer in a reply, which is one JSON object, or a stream of them of which each has the next part.

    Chat completions have their text in `message` or `delta`, others in the choice itself.
    """
    start = data.lstrip()
    streamed = start.startswith((b"data:", b"event:", b":"))
    parts = [_object(part) for part in (_events(start) if streamed else [start])]
    # A stream may end without a part that has text; a whole reply has one, which may be empty.
    answer, has_choice = ServerAnswer(has_text=streamed), False
    for part in parts:
        if part.get("error") is not None:
            raise _ReplyError(f"the server reports an error ({one_line(json.dumps(part['error']), 200)})")
        usage = part.get("usage")
        if isinstance(usage, dict):
            answer.prompt_tokens = _count(usage.get("prompt_tokens"))
            answer.completion_tokens = _count(usage.get("completion_tokens"))
        choices = part.get("choices")
        if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
            continue
        has_choice = True
        _add_choice(answer, choices[0], part)
    if streamed and answer.finish_reason is None:
        raise _CutError("the stream ended before the answer did")
    if not has_choice:
        raise _ReplyError("the reply has no choices")
    return answer


def _add_choice(answer: ServerAnswer, choice: dict[str, Any], part: dict[str, Any]) -> None:
    message = choice.get("message", choice.get("delta"))
    holder, key = (message, "content") if isinstance(message, dict) else (choice, "text")
    if isinstance(text := holder.get(key), str):
        answer.text, answer.has_text = answer.text + text, True
    for name in ("reasoning_content", "reasoning", "tool_calls", "function_call"):
        if holder.get(name):
            answer.parsed = name
    if (ids := _ids(choice.get("token_ids"))) is not None:
        answer.token_ids = (answer.token_ids or []) + ids
    prompt = _ids(choice.get("prompt_token_ids", part.get("prompt_token_ids")))
    answer.prompt_token_ids = answer.prompt_token_ids if prompt is None else prompt
    if isinstance(reason := choice.get("finish_reason"), str):
        answer.finish_reason = reason


def _events(data: bytes) -> list[bytes]:
    """The data of complete server-sent events, up to [DONE]; an empty line ends each.

    Only line feeds end a line: JSON may hold other line breaks.
    """
    events: list[bytes] = []
    for block in data.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]:
        lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
        if lines and lines[0].strip() == b"[DONE]":
            break
        if lines:
            events.append(b"\n".join(lines))
    return events


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _ReplyError("the server returned no JSON object")
    return value


def _ids(value: Any) -> list[int] | None:
    return value if isinstance(value, list) and all(type(id) is int and id >= 0 for id in value) else None


def _count(value: Any) -> int | None:
    return value if type(value) is int else None
