"""Generators: what answers the prompts of a rollout run. The model itself, a server, or the log of an earlier run.

A generator maps token ids to token ids. Sampling depends on the seed, the step and the row alone, so that a step can
be generated again by itself.
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
from chatmill.rollout.config import RolloutConfig
from chatmill.rollout.files import RolloutReplay
from chatmill.train.generation import Sampling, beam_search, generate
from chatmill.train.model import CausalModel

RETRIED = {408, 429, 500, 502, 503, 504}
"""HTTP status codes after which a request is sent again."""


class Generator(Protocol):
    """Generates an answer to each prompt."""

    def __call__(self, prompts: Sequence[Sequence[int]], *, step: int, first_row: int = 0) -> list[list[int]]:
        """The ids of an answer to each prompt; prompt i is row `first_row` + i of the step."""


@dataclass(frozen=True)
class CompletionServer:
    """A server that completes token ids and returns token ids: OpenAI's `completions`, with `return_token_ids`.

    vLLM is one. `concurrency` requests are sent at a time; a temporary failure is retried.
    """

    url: str
    """The base URL with the version, as in http://localhost:8000/v1."""
    model: str
    max_tokens: int
    end_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    concurrency: int = 16
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
        with ThreadPoolExecutor(max(1, min(self.concurrency, len(prompts)))) as pool:
            futures = [
                pool.submit(self._answer, [int(id) for id in prompt], step, first_row + row)
                for row, prompt in enumerate(prompts)
            ]
            try:
                return [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
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
        """The reply to one request; `DataError` with the server's message if there is none."""
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
                body_start = one_line(error.read(500).decode("utf-8", "replace"), 200)
                what, temporary = f"status {error.code}: {body_start}", error.code in RETRIED
            except (OSError, http.client.HTTPException) as error:
                what, temporary = one_line(str(getattr(error, "reason", error)) or type(error).__name__, 200), True
            if not temporary or attempt == self.attempts:
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


def generator_of(config: RolloutConfig, model: CausalModel, end_id: int) -> Generator:
    """The generator that a config names: a log, a server, or the model with its current weights."""
    if config.replay is not None:
        return RolloutReplay(config.replay)
    temperature = config.temperature if config.decoding == "sample" else 0.0
    limits: dict[str, Any] = {"max_tokens": config.max_new_tokens, "end_ids": (end_id,)}
    if config.server is not None:
        sampled: dict[str, Any] = {"temperature": temperature, "top_p": config.top_p, "seed": config.seed}
        return CompletionServer(config.server, config.server_model or "", **limits, **sampled)

    def answer(prompts: Sequence[Sequence[int]], *, step: int, first_row: int = 0) -> list[list[int]]:
        size = config.generate_batch_size
        if config.decoding == "beam":
            groups = max(1, size // config.beams)
            return beam_search(model, prompts, beams=config.beams, batch_size=groups, **limits)
        sampling = Sampling(temperature, config.top_k, config.top_p, config.seed, step)
        return generate(model, prompts, sampling=sampling, first_row=first_row, batch_size=size, **limits)

    return answer
