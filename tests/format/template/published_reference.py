"""Render chat templates with transformers, and find the position of each conversation text in the output.

Unique words are added at both ends of every text, and their positions in the output show the position of the text.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from unittest.mock import patch

from published_conversations import CONVERSATIONS, TOOL, with_tools
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils, logging

logging.set_verbosity_error()


class FixedTime(datetime):
    """A clock that always shows the same time, because some templates print the date and the time."""

    @classmethod
    def now(cls, tz=None):
        return cls.fromisoformat(DATE)


DATE = "2026-03-05"

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the answer is in the user's assistant: where is the moon?\n\n",
    "Above the hills, I think. It is warm: 24 degrees. The weather of a city, for the user and the system.\n",
    '{"name": "weather", "arguments": {"city": "Lisboa"}}\n\n\n',
    "### Instruction:\nHow long is it?\n\n### Response:\nNine hours, no more.\n\n",
]


@lru_cache(1)
def vocabulary() -> str:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        CORPUS * 4, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    return bpe.to_str()


def write_folder(folder: Path, source: str, tokens: dict, *, generation_config: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    bpe = Tokenizer.from_str(vocabulary())
    special = dict.fromkeys([*tokens["control"], tokens["bos"], tokens["eos"]])
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special if token])
    bpe.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in tokens["soft"] if token not in special]
    )
    (folder / "tokenizer.json").write_text(bpe.to_str(), "utf-8")
    config = {"bos_token": tokens["bos"], "eos_token": tokens["eos"], "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v}))
    (folder / "chat_template.jinja").write_text(source, "utf-8")
    stops = [bpe.token_to_id(token) for token in tokens["stops"]]
    if generation_config:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))


@dataclass(frozen=True)
class Style:
    """The form in which messages are passed to a template; the default is the usual form in transformers."""

    arguments_as_text: bool = False
    parts: bool = False


class Reference:
    def __init__(self, folder: Path, source: str, tokens: dict) -> None:
        self.source, self.tokens = source, tokens
        self.peer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"),
            **{f"{name}_token": tokens[name] for name in ("bos", "eos") if tokens[name]},
        )
        added = sorted({*tokens["control"], *tokens["soft"], tokens["bos"], tokens["eos"]} - {None, ""}, key=len)
        self.added = re.compile("|".join(re.escape(token) for token in reversed(added)))
        self.ends = re.compile("|".join(re.escape(token) for token in sorted(tokens["ends"], key=len, reverse=True)))
        self.style = self._style()

    def _style(self) -> Style:
        for style in (Style(), Style(parts=True)):
            for arguments_as_text in (False, True):
                style = Style(arguments_as_text, style.parts)
                try:
                    text = self.text(CONVERSATIONS["tool"], style=style)
                except Exception:
                    continue
                # A template that prints arguments as a Python dict does not support arguments as objects.
                if "Lisboa" in text and "{'city': 'Lisboa'}" not in text:
                    return style
        for style in (Style(), Style(parts=True)):
            try:
                if "Above the hills" in self.text(CONVERSATIONS["one_turn"], style=style):
                    return style
            except Exception:
                continue
        return Style()

    def given(self, messages, style=None) -> list[dict]:
        style = style or self.style
        out = []
        for message in messages:
            message = {**message, "content": message["content"] or ""}
            if style.parts:
                message["content"] = [{"type": "text", "text": message["content"]}]
            if style.arguments_as_text and "tool_calls" in message:
                message["tool_calls"] = [
                    {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                    for call in message["tool_calls"]
                ]
            out.append(message)
        return out

    def apply(self, messages, *, prompt=False, tokenize=False, style=None, tools=None):
        tools = with_tools(messages) if tools is None else tools
        with patch.object(chat_template_utils, "datetime", FixedTime):
            return self.peer.apply_chat_template(
                self.given(messages, style),
                tools=[TOOL] if tools else None,
                chat_template=self.source,
                add_generation_prompt=prompt,
                tokenize=tokenize,
                **({"return_dict": False} if tokenize else {}),
            )

    def text(self, messages, *, prompt=False, style=None, tools=None) -> str:
        return self.apply(messages, prompt=prompt, style=style, tools=tools)

    def border(self, text: str, at: int) -> int:
        """Return `at` or, if position `at` is inside an added token, the start of the token."""
        for match in self.added.finditer(text):
            if match.start() < at < match.end():
                return match.start()
            if match.start() >= at:
                break
        return at


def pieces(messages) -> list[tuple]:
    """Return a pair (message index, path of keys) for each text in a conversation."""
    out = []
    for number, message in enumerate(messages):
        if "reasoning_content" in message:
            out.append((number, ("reasoning_content",)))
        out.append((number, ("content",)))
        for at, call in enumerate(message.get("tool_calls", ())):
            out.append((number, ("tool_calls", at, "function", "name")))
            for key in call["function"]["arguments"]:
                out.append((number, ("tool_calls", at, "function", "arguments", key)))
    return out


def read_piece(messages, piece) -> str:
    value = messages[piece[0]]
    for key in piece[1]:
        value = value[key]
    return value or ""


def with_pieces(messages, texts: dict) -> list[dict]:
    out = copy.deepcopy(messages)
    for (number, path), text in texts.items():
        value = out[number]
        for key in path[:-1]:
            value = value[key]
        value[path[-1]] = text
    return out


def mark(number: int, side: str) -> str:
    letters = "bcdfghjkmnpqrstvwxyz"
    return f"Q{side}{letters[number // 20 % 20]}{letters[number % 20]}{letters[number // 400]}X"


MARK = re.compile(r"Q[az][b-z]{3}X")


@dataclass
class Places:
    """A rendered conversation and the position of each message text in it; None for texts that cannot be located."""

    text: str
    spans: dict = field(default_factory=dict)

    def of(self, number: int) -> list[tuple[int, int]]:
        return [span for (owner, _), span in self.spans.items() if owner == number and span is not None]


def marked(text: str, number: int, *, first_word: bool = False) -> str:
    """Add unique words before the first and after the last character of a text that is not whitespace.

    With `first_word`, the first unique word is added after a word of the text, not before the text.
    """
    stripped = text.strip()
    left = text.index(stripped) if stripped else len(text)
    if not first_word:
        return text[:left] + mark(number, "a") + stripped + mark(number, "z") + text[left + len(stripped) :]
    word = re.search(r"[^\W_]+(?![^\W_]|.*[<>])", stripped, re.DOTALL) or re.search(r"\w+", stripped)
    if word is None:
        return text[: left + len(stripped)] + mark(number, "z") + text[left + len(stripped) :]
    at = left + word.end()
    return (
        text[:at]
        + mark(number, "a")
        + text[at : left + len(stripped)]
        + mark(number, "z")
        + text[left + len(stripped) :]
    )


def unmarked(text: str) -> tuple[str, dict]:
    out, places, last = [], {}, 0
    length = 0
    for match in MARK.finditer(text):
        out.append(text[last : match.start()])
        length += match.start() - last
        places.setdefault(match[0], []).append(length)
        last = match.end()
    out.append(text[last:])
    return "".join(out), places


def locate(reference: Reference, messages, *, prompt: bool = False, tools: bool = False) -> Places:
    text = reference.text(messages, prompt=prompt, tools=tools)
    out = Places(text)
    texts = pieces(messages)

    def attempt(chosen, first_word) -> bool:
        changes = {texts[n]: marked(read_piece(messages, texts[n]), n, first_word=first_word) for n in chosen}
        try:
            plain, places = unmarked(reference.text(with_pieces(messages, changes), prompt=prompt, tools=tools))
        except Exception:
            return False
        if plain != text:
            return False
        for n in chosen:
            starts, stops = places.get(mark(n, "a"), []), places.get(mark(n, "z"), [])
            if not stops:
                out.spans[texts[n]] = None
                continue
            # Some templates repeat the function name of a call next to the result, so use the first occurrence.
            start, stop = (starts[0] if starts else stops[0]), stops[0]
            if first_word and starts:
                own = read_piece(messages, texts[n]).strip()
                shift = marked(own, n, first_word=True).index(mark(n, "a"))
                start = start - shift if text[start - shift : start] == own[:shift] else start
            out.spans[texts[n]] = (start, stop)
        return True

    everything = range(len(texts))
    if not attempt(everything, False):
        for n in everything:
            if not (attempt([n], False) or attempt([n], True)):
                # Unique words in this text would change the output, so search for the text itself.
                out.spans[texts[n]] = written_once(read_piece(messages, texts[n]).strip(), text)
    for piece, span in out.spans.items():
        # If another text of the same message has been located, treat an empty text as not located, even though its
        # unique words were rendered.
        if span is not None and span[0] == span[1] and any(stop > start for start, stop in out.of(piece[0])):
            out.spans[piece] = None
    return out


def written_once(own: str, text: str) -> tuple[int, int] | None:
    return (text.index(own), text.index(own) + len(own)) if own and text.count(own) == 1 else None
