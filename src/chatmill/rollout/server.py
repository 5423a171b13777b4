"""Send requests to OpenAI-compatible servers, and parse the replies."""

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
"""Status codes after which a request is retried."""
REJECTED = {400, 404, 405, 422}
"""Status codes for an unsupported path or request field."""
MAX_REPLY_BYTES = 64 << 20
READ_BYTES = 1 << 16


@dataclass
class ServerAnswer:
    """The first choice in a server's reply, and the token counts that the server reports."""

    text: str = ""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    has_text: bool = False
    parsed: str = ""
    """The field, such as reasoning or tool_calls, to which the server moved part of the answer."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True)
class Server:
    """A client for one model on a server; it retries requests after temporary failures."""

    url: str
    """The base URL of the server, such as http://localhost:8000/v1."""
    model: str
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    concurrency: int = 16
    timeout: float = 600.0
    """Maximum time in seconds for one answer."""
    attempts: int = 4
    pause: float = 0.5
    """Seconds before the first retry, doubled for each further retry."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers for every request, such as Authorization. Errors never contain header values."""
    advice: ClassVar[str] = ""
    """Advice to show if the server rejects a request."""

    def __post_init__(self) -> None:
        check_server_url(self.url)

    def sampled(self, step: int, row: int) -> dict[str, Any]:
        """Return the request fields for the model and for sampling, with a seed that depends on (seed, step, row)."""
        return {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": int(np.random.SeedSequence((self.seed, step, row)).generate_state(1)[0]) >> 1,
        }

    def answers(self, bodies: Sequence[Mapping[str, Any]], path: str) -> list[ServerAnswer]:
        """Send the requests concurrently, and return the answers in the order of the requests."""
        with ThreadPoolExecutor(max(1, min(self.concurrency, len(bodies)))) as pool:
            futures = [pool.submit(self._post, path, body) for body in bodies]
            try:
                return [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                raise

    def fault(self, what: str, right: str) -> DataError:
        """Return a one-line error; header values, which can contain an API key, are removed from it."""
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
            right = f"check that the server is running and serves {one_line(self.model)}"
            try:
                return read_answer(self._read(request))
            except urllib.error.HTTPError as error:
                what, temporary = f"status {error.code}: {_start_of(error)}", error.code in RETRIED
                right += self._advice if error.code in REJECTED else ""
            except (OSError, http.client.HTTPException, _CutError) as error:
                what, temporary = one_line(str(getattr(error, "reason", error)) or type(error).__name__, 200), True
            except _ReplyError as error:
                raise self.fault(
                    str(error), f"expected a completion from {one_line(self.model)}{self._advice}"
                ) from None
            if not temporary or attempt == self.attempts:
                raise self.fault(f"the server returned no answer ({what})", right)
            time.sleep(self.pause * 2 ** (attempt - 1))
        raise AssertionError

    @property
    def _advice(self) -> str:
        return f"; {self.advice}" if self.advice else ""

    def _read(self, request: urllib.request.Request) -> bytes:
        """Return the body of the reply. `timeout` limits the time for the whole reply."""
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
    """Raise `UsageError` if a string is not a base URL, or contains a password or query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        what = "the server URL contains a user name, password or query, which the run would store"
        raise UsageError(
            f"{what}; remove them, and set server_key_env to the name of the environment variable with the API key"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f'"{one_line(url)}" is not a server URL; expected http://… or https://…')


def _start_of(error: urllib.error.HTTPError) -> str:
    try:
        with error:
            return one_line(error.read(500).decode("utf-8", "replace"), 200)
    except (OSError, http.client.HTTPException):
        return ""


class _ReplyError(Exception):
    """Raised if a server's reply is not a completion."""


class _CutError(Exception):
    """Raised if an event stream ends before the answer is complete."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would send the API key to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def read_answer(data: bytes) -> ServerAnswer:
    """Parse a server's reply: one JSON object, or a stream of objects that each contain part of the answer."""
    start = data.lstrip()
    streamed = start.startswith((b"data:", b"event:", b":"))
    parts = [_object(part) for part in (_events(start) if streamed else [start])]
    # A single object must have a text field, but a stream may have none.
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
        raise _CutError("the stream ended before the answer was complete")
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
    """Return the data of the complete server-sent events before [DONE].

    Lines are split only at line feeds, because JSON may contain other line breaks.
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
        raise _ReplyError("the server did not return a JSON object")
    return value


def _ids(value: Any) -> list[int] | None:
    return value if isinstance(value, list) and all(type(id) is int and id >= 0 for id in value) else None


def _count(value: Any) -> int | None:
    return value if type(value) is int else None
