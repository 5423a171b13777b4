"""A model that can be spoken to: with the tokenizer and the format that it was trained with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.format import ChatFormat, load_format, prompt_ids
from chatmill.format.stored import stored_format
from chatmill.records import Message, Record
from chatmill.store.layout import TOKENIZER_STATE
from chatmill.tokenizer import Tokenizer, open_tokenizer

if TYPE_CHECKING:
    from chatmill.train.generate import Sampling
    from chatmill.train.port import CausalModel


@dataclass(frozen=True)
class Speaker:
    """A model, and how conversations are written for it."""

    model: CausalModel
    tokenizer: Tokenizer
    format: ChatFormat

    @property
    def end(self) -> int:
        """The token that ends an answer."""
        return self.tokenizer.special_token_ids()[self.format.eot]

    def answer(self, messages: Sequence[Message], *, max_tokens: int, sampling: Sampling) -> Iterator[int]:
        """The next answer, token by token, its end token included if it comes to one.

        What the model is given are the ids that training put before an answer to these messages.
        """
        from chatmill.train.generate import generate_steps

        prompt = prompt_ids(Record(list(messages)), self.format, self.tokenizer)
        room = self.model.max_positions - len(prompt)
        if room < 1:
            raise DataError(
                f"the conversation has {len(prompt):,} tokens, the model {self.model.max_positions:,} positions; "
                "begin a new one"
            )
        steps = generate_steps(
            self.model, [prompt], max_tokens=min(max_tokens, room), end_ids=[self.end], sampling=sampling
        )
        for tokens in steps:
            yield tokens[0]


def open_speaker(
    path: str | Path, *, tokenizer: str | None = None, format: str | None = None, device: str = "auto"
) -> Speaker:
    """The model of a folder, a checkpoint or a run, with what it was trained with; what is named goes first."""
    from chatmill.train.checkpoint import model_folder
    from chatmill.train.score import open_ready
    from chatmill.train.start import trained_with

    folder = model_folder(path)
    said = trained_with(folder)
    if format is None and said.get("format") is None:
        raise UsageError(f"{folder}: does not say which format it was trained with; name it with --format")
    chosen = load_format(format) if format is not None else stored_format(said["format"], where=str(folder))
    opened = find_tokenizer(folder, said, chosen.tokens, tokenizer)
    model = open_ready(folder, device)
    if opened.vocab_size > model.vocab_size:
        raise DataError(
            f"{opened.name}: has {opened.vocab_size:,} tokens, the model {folder} knows {model.vocab_size:,}; "
            "name the tokenizer it was trained with"
        )
    return Speaker(model, opened, chosen)


def find_tokenizer(folder: Path, said: Mapping[str, Any], control: Mapping[str, str], named: str | None) -> Tokenizer:
    """The tokenizer that a model was trained with: the one named, or that of its hash in one of the usual places."""
    state = _state(folder)
    besides = [str(token) for token in state.get("besides", ())]
    wanted = said.get("tokenizer_sha256")

    def opened(spec: str | Path) -> Tokenizer:
        # What was added in training is added again; the hash says whether that gives the same tokenizer.
        return open_tokenizer(spec, control=control, besides=besides, add_tokens=True)

    if named is not None:
        given = opened(named)
        if wanted is not None and given.sha256 != wanted:
            raise DataError(
                f"{folder}: trained with tokenizer {wanted[:12]}…, {one_line(named, 300)} is {given.sha256[:12]}…; "
                "name the one it was trained with"
            )
        return given
    places = dict.fromkeys(_places(folder, said, state.get("name")))
    for place in places:
        try:
            found = opened(place)
        except ChatmillError:
            continue
        if wanted is None or found.sha256 == wanted:
            return found
    looked = ", ".join(one_line(str(place), 200) for place in places)
    raise UsageError(f"{folder}: its tokenizer is in none of {looked}; name it with --tokenizer")


def _places(folder: Path, said: Mapping[str, Any], name: Any) -> Iterator[str | Path]:
    """Where the tokenizer of a model may lie: with the model, with its data, beside its data, or here."""
    if name == "bytes":
        yield "bytes"
        return
    yield folder
    if isinstance(name, str) and Path(name).name == name:
        data = Path(str(said.get("dataset", ".")))
        yield from (folder / name, data / name, data.parent / name, Path(name))


def _state(folder: Path) -> dict[str, Any]:
    path = folder / TOKENIZER_STATE
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); remove it and name the tokenizer with --tokenizer"
        ) from None
    return dict(found) if isinstance(found, dict) else {}
