"""A model that can be spoken to: with the tokenizer and the format that it was trained with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from chatmill.train.generate import Sampling
    from chatmill.train.model import CausalModel


@dataclass(frozen=True)
class ChatModel:
    """A model, and how conversations are written for it."""

    model: CausalModel
    format: Renderer

    @property
    def tokenizer(self) -> Tokenizer:
        return self.format.tokenizer

    @property
    def end(self) -> int:
        """The token that ends an answer."""
        return self.tokenizer.special_token_ids()[self.format.eot]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids that training puts before an answer to these messages."""
        return self.format.prompt_ids(Record(list(messages)))

    def answer(self, messages: Sequence[Message], *, max_tokens: int, sampling: Sampling) -> Iterator[int]:
        """The next answer, token by token, its end token included if it comes to one."""
        from chatmill.train.generate import generate_steps

        prompt = self.prompt(messages)
        room = self.model.max_positions - len(prompt)
        if room < 1:
            most = self.model.max_positions
            raise DataError(
                f"the conversation has {len(prompt):,} tokens, the model {most:,} positions; begin a new one"
            )
        steps = generate_steps(
            self.model, [prompt], max_tokens=min(max_tokens, room), end_ids=[self.end], sampling=sampling
        )
        for tokens in steps:
            yield tokens[0]


def open_speaker(
    path: str | Path, *, tokenizer: str | None = None, format: str | None = None, device: str = "auto"
) -> ChatModel:
    """The model of a folder, a checkpoint or a run, with what it was trained with; what is named goes first.

    A model that does not say its format is one of Hugging Face: it has a chat template.
    """
    from chatmill.train.checkpoint import model_folder
    from chatmill.train.load_model import model_type
    from chatmill.train.preflight import trained_with
    from chatmill.train.score import open_ready

    folder = model_folder(path)
    # Before the rest, which takes longer and would say less of a folder that is no model's.
    if not (folder / "adapter_config.json").exists():
        model_type(folder)
    opened = _open_format(folder, trained_with(folder), tokenizer, format)
    model = open_ready(folder, device)
    if opened.tokenizer.vocab_size > model.vocab_size:
        raise DataError(
            f"{opened.tokenizer.name}: has {opened.tokenizer.vocab_size:,} tokens, the model {folder} knows "
            f"{model.vocab_size:,}; name the tokenizer it was trained with"
        )
    return ChatModel(model, opened)


def _open_format(folder: Path, said: Mapping[str, Any], tokenizer: str | None, format: str | None) -> Renderer:
    stored = said.get("format")
    if format is None and stored is None:
        return _open_template(folder, tokenizer or str(folder))
    found = find_tokenizer(folder, said, control_tokens_from_json(stored), tokenizer)
    if format == TEMPLATE:
        return _open_template(folder, found.spec)
    if format is not None:
        return open_renderer(format, found.spec, add_tokens=True)
    return renderer_from_json(stored, found.tokenizer, spec=found.spec, where=str(folder))


def _open_template(folder: Path, spec: str) -> Renderer:
    """The chat template of a tokenizer's folder."""
    if (spec == "bytes" or Path(spec).exists()) and not has_template(spec):
        raise UsageError(
            f"{one_line(spec, 300)}: has no chat template, and {folder} names no other format; "
            "give the one it was trained in with --format, or a folder that has a template with --tokenizer"
        )
    return open_renderer(TEMPLATE, spec)


@dataclass(frozen=True)
class LocatedTokenizer:
    """A tokenizer, and what it was opened from."""

    spec: str
    tokenizer: Tokenizer


def find_tokenizer(
    folder: Path, said: Mapping[str, Any], control: Mapping[str, str], named: str | None
) -> LocatedTokenizer:
    """The tokenizer that a model was trained with: the one named, or that of its hash in one of the usual places."""
    state = _state(folder)
    besides = [str(token) for token in state.get("besides", ())]
    wanted = said.get("tokenizer_sha256")

    def opened(spec: str) -> LocatedTokenizer:
        # What was added in training is added again; the hash says whether that gives the same tokenizer.
        return LocatedTokenizer(spec, open_tokenizer(spec, control=control, besides=besides, add_tokens=True))

    if named is not None:
        given = opened(named)
        if wanted is not None and given.tokenizer.sha256 != wanted:
            raise DataError(
                f"{folder}: trained with tokenizer {wanted[:12]}…, {one_line(named, 300)} is "
                f"{given.tokenizer.sha256[:12]}…; name the one it was trained with"
            )
        return given
    places = dict.fromkeys(_places(folder, said, state.get("name")))
    for place in places:
        try:
            found = opened(place)
        except ChatmillError:
            continue
        if wanted is None or found.tokenizer.sha256 == wanted:
            return found
    looked = ", ".join(one_line(place, 200) for place in places)
    raise UsageError(f"{folder}: its tokenizer is in none of {looked}; name it with --tokenizer")


def _places(folder: Path, said: Mapping[str, Any], name: Any) -> Iterator[str]:
    """Where the tokenizer of a model may lie: with the model, with its data, beside its data, or here."""
    if name == "bytes":
        yield "bytes"
        return
    yield str(folder)
    if isinstance(name, str) and Path(name).name == name:
        data = Path(str(said.get("dataset", ".")))
        yield from (str(place / name) for place in (folder, data, data.parent, Path()))


def _state(folder: Path) -> dict[str, Any]:
    path = folder / TOKENIZER_STATE
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); remove it and name the tokenizer with --tokenizer"
        ) from None
    return dict(found) if isinstance(found, dict) else {}
