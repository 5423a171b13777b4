"""Generate the answers for a rollout run with the model or a server, or read them from the log of an earlier run.

Prompts and answers are token ids. Sampling depends only on (seed, step, row).
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from chatmill.errors import DataError, UsageError, one_line
from chatmill.format import TemplateRenderer
from chatmill.records import Record
from chatmill.rollout.config import RolloutConfig
from chatmill.rollout.files import RolloutReplay
from chatmill.rollout.server import Server, ServerAnswer
from chatmill.rollout.task import Task
from chatmill.rollout.vocabulary import COORDINATES, vocabulary_of
from chatmill.train.generation import Sampling, beam_search, generate
from chatmill.train.model import CausalModel

COORDINATE_TEXT = re.compile(r"(<\|coord_(?:0|[1-9][0-9]{0,2})\|>)")


class Generator(Protocol):
    """A callable that generates an answer to each prompt."""

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, step: int, first_row: int = 0, records: Sequence[Record] = ()
    ) -> list[list[int]]:
        """Return the token ids of one answer per prompt; prompt i belongs to `records[i]` and row `first_row` + i."""


@dataclass(frozen=True)
class CompletionServer(Server):
    """A generator that exchanges token ids with a server that supports `return_token_ids`, such as vLLM.

    Up to `concurrency` requests are sent concurrently. Requests are retried after temporary failures.
    """

    end_ids: tuple[int, ...] = ()
    advice = 'for a server that only supports text, set server_api to "chat" or "completions"'

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, step: int, first_row: int = 0, records: Sequence[Record] = ()
    ) -> list[list[int]]:
        extra = {"stop_token_ids": list(self.end_ids), "return_token_ids": True, "skip_special_tokens": False}
        bodies = [
            {**self.sampled(step, row), "prompt": [int(id) for id in prompt], **extra}
            for row, prompt in enumerate(prompts, start=first_row)
        ]
        answers = self.answers(bodies, "completions")
        return [self._ids(answer, body["prompt"]) for answer, body in zip(answers, bodies, strict=True)]

    def _ids(self, answer: ServerAnswer, prompt: list[int]) -> list[int]:
        if answer.prompt_token_ids not in (None, prompt):
            raise self.fault("the server returned a different prompt than it received", "check the server's tokenizer")
        if answer.token_ids is None:
            right = "expected choices[0].token_ids, which vLLM returns with return_token_ids"
            raise self.fault("the server returned no token ids", f"{right}; {self.advice}")
        return answer.token_ids


@dataclass(frozen=True, kw_only=True)
class TextServer(Server):
    """A generator that receives text from an OpenAI-compatible server and encodes it with the task's tokenizer.

    With `api` "completions", the prompt is sent as text. With "chat", the messages are sent, and the server applies its
    chat template. If the server reports the number of prompt tokens, this number must be the same as in training. The
    encoded tokens may differ from the tokens that the model generated.
    """

    task: Task
    api: Literal["completions", "chat"]
    counts: Counter[str] = field(default_factory=Counter)
    """`as_text` is the number of answers received; `retokenized` is the number of answers whose token count differs
    from the count reported by the server.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        renderer = self.task.renderer
        if self.task.schema.uses_coordinates and isinstance(renderer, TemplateRenderer):
            special = next((token for token in COORDINATES if token not in renderer.text_tokens.ids), None)
            if special is not None:
                raise UsageError(
                    f"{self.task.tokenizer.name}: {special} is a special token, but servers omit special tokens from "
                    'the response text; set "special": false in tokenizer.json, or use server_api "tokens"'
                )

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, step: int, first_row: int = 0, records: Sequence[Record] = ()
    ) -> list[list[int]]:
        if self.api == "chat" and len(records) != len(prompts):
            raise UsageError("a chat server requires messages; pass one record per prompt")
        end = vocabulary_of(self.task.tokenizer).text([self.task.eos_id]).decode()
        bodies = [
            {
                **self.sampled(step, first_row + at),
                "stop": [end],
                "stream": False,
                **self._question(at, prompts, records),
            }
            for at in range(len(prompts))
        ]
        answers = self.answers(bodies, "chat/completions" if self.api == "chat" else "completions")
        for prompt, answer in zip(prompts, answers, strict=True):
            self._check(prompt, answer)
        # Some servers include the stop text in the answer.
        ended = [answer.finish_reason == "stop" for answer in answers]
        texts = [answer.text.removesuffix(end if stop else "") for answer, stop in zip(answers, ended, strict=True)]
        try:
            encoded = encode_answers(texts, self.task)
        except DataError as error:
            right = "check that the server's model uses this tokenizer"
            raise self.fault(f"an answer cannot be encoded ({error})", right) from None
        ids = [of_text + [self.task.eos_id] * stop for of_text, stop in zip(encoded, ended, strict=True)]
        for answer, mine in zip(answers, ids, strict=True):
            # Some servers do not count the end-of-turn token.
            counted = {len(mine), len(mine) - (answer.finish_reason == "stop"), None}
            self.counts["retokenized"] += answer.completion_tokens not in counted
        self.counts["as_text"] += len(ids)
        return ids

    def _question(self, at: int, prompts: Sequence[Sequence[int]], records: Sequence[Record]) -> dict[str, Any]:
        if self.api == "completions":
            return {"prompt": vocabulary_of(self.task.tokenizer).text(prompts[at]).decode("utf-8", "replace")}
        return chat_request(records[at])

    def _check(self, prompt: Sequence[int], answer: ServerAnswer) -> None:
        if answer.parsed:
            raise self.fault(
                f"the server returned part of the answer as {answer.parsed}",
                "turn off the server's reasoning and tool parsers",
            )
        if not answer.has_text:
            raise self.fault("the reply has no text", "expected choices[0] with text or message.content")
        if answer.finish_reason not in ("stop", "length"):
            reason = json.dumps(answer.finish_reason)
            raise self.fault(f"the answer ended with finish_reason {one_line(reason)}", 'expected "stop" or "length"')
        if answer.prompt_tokens not in (None, len(prompt)):
            other = "completions" if self.api == "chat" else "chat"
            raise self.fault(
                f"the server reports {answer.prompt_tokens} prompt tokens, but the training prompt has {len(prompt)}",
                f'use the same tokenizer and chat template as the server, or server_api "{other}"',
            )


def chat_request(record: Record) -> dict[str, Any]:
    """Return the messages and tools of a record in OpenAI's chat format."""
    messages = []
    for message in record.messages:
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            fields["reasoning_content"] = message.reasoning
        if message.tool_calls:
            fields["tool_calls"] = [
                {
                    **({} if call.id is None else {"id": call.id}),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments_text},
                }
                for call in message.tool_calls
            ]
        fields |= {key: value for key in ("name", "tool_call_id") if (value := getattr(message, key)) is not None}
        messages.append(fields)
    request: dict[str, Any] = {"messages": messages}
    if record.tools:
        request["tools"] = [json.loads(tool) for tool in record.tools]
    if record.template_kwargs:
        request["chat_template_kwargs"] = json.loads(record.template_kwargs)
    return request


def encode_answers(texts: Sequence[str], task: Task) -> list[list[int]]:
    """Encode answers. Coordinates become single tokens; other control tokens are encoded as text."""
    vocabulary = vocabulary_of(task.tokenizer)
    coordinates: Mapping[str, int] = {}
    split = [[text] for text in texts]
    if task.schema.uses_coordinates:
        coordinates = dict(zip(COORDINATES, vocabulary.coordinate_ids, strict=True))
        split = [COORDINATE_TEXT.split(text) for text in texts]
    # Text and coordinates alternate, starting with text.
    encoded = iter(vocabulary.encode([piece for pieces in split for piece in pieces[::2]]))
    return [
        [id for at, piece in enumerate(pieces) for id in ([coordinates[piece]] if at % 2 else next(encoded))]
        for pieces in split
    ]


def generator_of(config: RolloutConfig, model: CausalModel, task: Task) -> Generator:
    """Return the generator that a config selects."""
    if config.replay is not None:
        return RolloutReplay(config.replay)
    temperature = config.temperature if config.decoding == "sample" else 0.0
    if config.server is not None:
        fields: dict[str, Any] = {
            "url": config.server,
            "model": config.server_model or "",
            "max_tokens": config.max_new_tokens,
            "temperature": temperature,
            "top_p": config.top_p,
            "seed": config.seed,
            "headers": {} if config.server_key_env is None else {"Authorization": _bearer(config.server_key_env)},
        }
        if config.server_api == "tokens":
            return CompletionServer(**fields, end_ids=(task.eos_id,))
        return TextServer(**fields, task=task, api=config.server_api)
    limits: dict[str, Any] = {"max_tokens": config.max_new_tokens, "end_ids": (task.eos_id,)}

    def answer(
        prompts: Sequence[Sequence[int]], *, step: int, first_row: int = 0, records: Sequence[Record] = ()
    ) -> list[list[int]]:
        size = config.generate_batch_size
        if config.decoding == "beam":
            groups = max(1, size // config.beams)
            return beam_search(model, prompts, beams=config.beams, batch_size=groups, **limits)
        sampling = Sampling(temperature, config.top_k, config.top_p, config.seed, step)
        return generate(model, prompts, sampling=sampling, first_row=first_row, batch_size=size, **limits)

    return answer


def _bearer(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        state = "is empty" if variable in os.environ else "is not set"
        raise UsageError(
            f"server_key_env: the environment variable {one_line(variable)} {state}; set it to the API key"
        )
    return f"Bearer {key}"


def text_counts(generator: Generator) -> list[int]:
    """Return the counts `as_text` and `retokenized` of a `TextServer`, and reset them; return zeros for other
    generators.
    """
    if not isinstance(generator, TextServer):
        return [0, 0]
    counts = [generator.counts["as_text"], generator.counts["retokenized"]]
    generator.counts.clear()
    return counts
