"""Chat with a trained model, using the tokenizer and the chat format of its training data.

No other module in train/ imports the packages that render text: records, tokenizer and format.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.format import (
    TEMPLATE,
    Renderer,
    control_tokens_from_json,
    has_template,
    open_renderer,
    renderer_from_json,
)
from chatmill.records import Message, Record
from chatmill.store.layout import TOKENIZER_STATE
from chatmill.tokenizer import Tokenizer, open_tokenizer
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.generation import Sampling, generate_steps
from chatmill.train.load_model import BaseWeights, check_is_model, open_ready
from chatmill.train.model import CausalModel
from chatmill.train.preflight import read_optional, trained_with


@dataclass(frozen=True)
class ChatModel:
    """A model and the renderer that formats conversations for it."""

    model: CausalModel
    renderer: Renderer

    @property
    def tokenizer(self) -> Tokenizer:
        return self.renderer.tokenizer

    @property
    def end_id(self) -> int:
        """The id of the token that ends an answer."""
        return self.tokenizer.special_token_ids()[self.renderer.eot]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a prompt with these messages, formatted as in training."""
        return self.renderer.prompt_ids(Record(list(messages)))

    def answer(self, messages: Sequence[Message], *, max_tokens: int, sampling: Sampling) -> Iterator[int]:
        """Yield the token ids of the next answer, including the end token if the model generates one."""
        prompt = self.prompt(messages)
        most = self.model.max_positions
        if len(prompt) >= most:
            raise DataError(
                f"the conversation has {len(prompt):,} tokens, but the model has {most:,} positions; start a new "
                "conversation"
            )
        limit = min(max_tokens, most - len(prompt))
        for tokens in generate_steps(self.model, [prompt], max_tokens=limit, end_ids=[self.end_id], sampling=sampling):
            yield tokens[0]

    def text_pieces(self, ids: Iterable[int]) -> Iterator[str]:
        """Decode a stream of token ids; a character is yielded as soon as all of its bytes are decoded."""
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        for id in ids:
            yield decoder.decode(self.tokenizer.piece(id))
        yield decoder.decode(b"", final=True)


@dataclass(frozen=True)
class Reply:
    """A generated answer: its text, its number of tokens, and whether it ended with the end token."""

    text: str
    tokens: int
    stopped: bool


@dataclass
class ChatSession:
    """An ongoing conversation with a model."""

    model: ChatModel
    max_tokens: int
    sampling: Sampling
    messages: list[Message] = field(default_factory=list)

    def reset(self, system: str | None = None) -> None:
        """Start a new conversation, with a system message if one is given."""
        self.messages = [] if system is None else [Message("system", system)]

    def send(self, text: str, show: Callable[[str], None], *, role: Literal["user", "tool"] = "user") -> Reply:
        """Add a user or tool message and generate the answer; `show` is called with each piece of its text.

        A `KeyboardInterrupt` during generation ends the answer; the part generated so far stays in the conversation.
        """
        messages = [*self.messages, Message(role, text)]
        ids: list[int] = []

        def content() -> Iterator[int]:
            for id in self.model.answer(messages, max_tokens=self.max_tokens, sampling=self.sampling):
                ids.append(id)
                if id != self.model.end_id:
                    yield id

        try:
            for piece in self.model.text_pieces(content()):
                show(piece)
        except KeyboardInterrupt:
            show(" …")
        stopped = bool(ids) and ids[-1] == self.model.end_id
        answer = self.model.tokenizer.decode(ids[:-1] if stopped else ids)
        self.messages = [*messages, Message("assistant", answer)]
        return Reply(answer, len(ids), stopped)


def open_chat_model(
    path: str | Path,
    *,
    tokenizer: str | None = None,
    format: str | None = None,
    device: str = "auto",
    base: BaseWeights = "trained",
    base_model: str | None = None,
) -> ChatModel:
    """Open a model from a model folder, checkpoint or run, with the tokenizer and chat format of its training data.

    `tokenizer` and `format` override the tokenizer and chat format recorded in the model folder. A folder without a
    recorded format is treated as a Hugging Face model, and its chat template is used. `base` and `base_model` apply
    only to adapters; see `open_ready`.
    """
    folder = model_folder(path)
    # Check the model first: the check is quick, and its error message is clearer than one about a missing tokenizer.
    check_is_model(folder)
    renderer = _open_renderer(folder, trained_with(folder), tokenizer, format)
    model = open_ready(folder, device, base=base, base_model=base_model)
    if renderer.tokenizer.vocab_size > model.vocab_size:
        raise DataError(
            f"{renderer.tokenizer.name}: has {renderer.tokenizer.vocab_size:,} tokens, but the vocabulary of "
            f"model {folder} has {model.vocab_size:,}; pass the tokenizer that the model was trained with"
        )
    return ChatModel(model, renderer)


def _open_renderer(folder: Path, training: Mapping[str, Any], tokenizer: str | None, format: str | None) -> Renderer:
    stored = training.get("format")
    if format is None and stored is None:
        return _open_template(folder, tokenizer or str(folder))
    spec, opened = find_tokenizer(folder, training, control_tokens_from_json(stored), tokenizer)
    if format == TEMPLATE:
        return _open_template(folder, spec, recorded=stored is not None)
    if format is not None:
        return open_renderer(format, spec, add_tokens=True)
    return renderer_from_json(stored, opened, spec=spec, where=str(folder))


def _open_template(folder: Path, spec: str, *, recorded: bool = False) -> Renderer:
    if (spec == "bytes" or Path(spec).exists()) and not has_template(spec):
        if recorded:
            raise UsageError(
                f"{one_line(spec, 300)}: has no chat template; omit --format to use the format that {folder} records, "
                "or pass a folder with a chat template as --tokenizer"
            )
        raise UsageError(
            f"{one_line(spec, 300)}: has no chat template, and {folder} does not record a chat format; pass the chat "
            f"format of the model as --format, or a folder with a chat template as --tokenizer"
        )
    return open_renderer(TEMPLATE, spec)


def find_tokenizer(
    folder: Path, training: Mapping[str, Any], control: Mapping[str, str], named: str | None
) -> tuple[str, Tokenizer]:
    """Find the tokenizer that a model was trained with; return its path, or `bytes`, and the opened tokenizer."""
    state = read_optional(folder / TOKENIZER_STATE, "remove the file, and pass the tokenizer with --tokenizer")
    state = state if isinstance(state, dict) else {}
    besides = [str(token) for token in state.get("besides", ())]
    sha256 = training.get("tokenizer_sha256")

    def opened(spec: str) -> Tokenizer:
        # Add the tokens that training added, so that the hash of the training tokenizer equals the recorded hash.
        return open_tokenizer(spec, control=control, besides=besides, add_tokens=True)

    if named is not None:
        tokenizer = opened(named)
        if sha256 not in (None, tokenizer.sha256):
            raise DataError(
                f"{folder}: the hash of the model's tokenizer is {str(sha256)[:12]}…, but the hash of "
                f"{one_line(named, 300)} is {tokenizer.sha256[:12]}…; pass the tokenizer that the model "
                f"was trained with"
            )
        return named, tokenizer
    places = dict.fromkeys(_places(folder, training, state.get("name")))
    for place in places:
        try:
            tokenizer = opened(place)
        except ChatmillError:
            continue
        if sha256 in (None, tokenizer.sha256):
            return place, tokenizer
    looked = ", ".join(one_line(place, 200) for place in places)
    raise UsageError(
        f"{folder}: the tokenizer of this model was not found in {looked}; pass the tokenizer with --tokenizer"
    )


def _places(folder: Path, training: Mapping[str, Any], name: Any) -> Iterator[str]:
    if name == "bytes":
        yield "bytes"
        return
    yield str(folder)
    if isinstance(name, str) and Path(name).name == name:
        data = Path(str(training.get("dataset", ".")))
        yield from (str(place / name) for place in (folder, data, data.parent, Path()))
