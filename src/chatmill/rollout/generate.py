"""Generators: who answers prompts. A model that is trained here is joined from outside; a server is asked here.

A generator gives ids for ids. What it draws depends on its seed, the step and the row alone, so that a step can be
generated again by itself.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from chatmill.errors import DataError, UsageError, one_line

AGAIN = {408, 429, 500, 502, 503, 504}
"""What a server answers that may be otherwise in a moment."""


class Generator(Protocol):
    def __call__(self, prompts: Sequence[Sequence[int]], *, step: int, first_row: int = 0) -> list[list[int]]:
        """An answer to each prompt, as ids; prompt i is row `first_row` + i of the step."""


@dataclass(frozen=True)
class CompletionServer:
    """A server that completes token ids and returns token ids: OpenAI's `completions`, with `return_token_ids`.

    vLLM is one. Requests are sent `together` at a time; one that fails for a reason that may pass is sent again.
    """

    url: str
    """Up to and with the version, as in http://localhost:8000/v1."""
    model: str
    max_tokens: int
    end_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    together: int = 16
    timeout: float = 600.0
    attempts: int = 4
    pause: float = 0.5
    """Seconds before the second attempt; each later pause is twice as long."""
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with every request, such as Authorization."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UsageError(f'"{one_line(self.url)}" is no server; expected http://… or https://…')

    def __call__(self, prompts: Sequence[Sequence[int]], *, step: int, first_row: int = 0) -> list[list[int]]:
        with ThreadPoolExecutor(max(1, min(self.together, len(prompts)))) as pool:
            asked = [
                pool.submit(self._answer, [int(id) for id in prompt], step, first_row + row)
                for row, prompt in enumerate(prompts)
            ]
            try:
                return [answer.result() for answer in asked]
            except BaseException:
                for answer in asked:
                    answer.cancel()
                raise

    def _answer(self, prompt: list[int], step: int, row: int) -> list[int]:
        reply = self._post(
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "seed": int(np.random.SeedSequence((self.seed, step, row)).generate_state(1)[0]) >> 1,
                "stop_token_ids": list(self.end_ids),
                "return_token_ids": True,
                "skip_special_tokens": False,
            }
        )
        choices = reply.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        used = choice.get("prompt_token_ids", reply.get("prompt_token_ids"))
        if used is not None and used != prompt:
            raise DataError(f"{self.url}: the server answered another prompt than it was sent; check its tokenizer")
        ids = choice.get("token_ids")
        if not isinstance(ids, list) or not all(type(id) is int and id >= 0 for id in ids):
            right = "expected choices[0].token_ids; use one that knows return_token_ids, such as vLLM"
            raise DataError(f"{self.url}: the server returned no token ids; {right}")
        return ids

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        """The reply to one request; `DataError` with what the server said if there is none."""
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **self.headers},
        )
        for attempt in range(1, self.attempts + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    return self._object(response.read())
            except urllib.error.HTTPError as error:
                said = one_line(error.read(500).decode("utf-8", "replace"), 200)
                what, may_pass = f"status {error.code}: {said}", error.code in AGAIN
            except (OSError, http.client.HTTPException) as error:
                what, may_pass = one_line(str(getattr(error, "reason", error)) or type(error).__name__, 200), True
            if not may_pass or attempt == self.attempts:
                raise DataError(f"{self.url}: no answer ({what}); check the server, and that it serves {self.model}")
            time.sleep(self.pause * 2 ** (attempt - 1))
        raise AssertionError

    def _object(self, data: bytes) -> dict[str, Any]:
        try:
            reply = json.loads(data)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise DataError(f"{self.url}: the server returned no JSON object; expected a completion")
        return reply
