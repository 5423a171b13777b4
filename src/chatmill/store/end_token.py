"""Find the end-of-text token in another program's tokenizer files.

The following forms are searched for, in this order:

    {"eot_token_id": 50256}                               a name with an id; also eos, end_of_text, im_end, …
    {"eos_token": "<|endoftext|>", "vocab": {…}}          a name with a text that is in a vocabulary
    {"eos_token": {"content": "</s>"}}, added_tokens …    the same in the form of Hugging Face
    {"special_tokens": {"<|endoftext|>": 50256}}          a special token with a known text
    {"encoding": "cl100k_base"}                           a tiktoken encoding
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

END_NAMES = (
    "eot",
    "endofturn",
    "turnend",
    "imend",
    "assistantend",
    "eos",
    "endoftext",
    "endofsentence",
    "endofsequence",
    "eod",
    "endofdocument",
    "end",
    "stop",
)
"""Names of end tokens in order of precedence, in lower case without punctuation."""
COMMON = {"end", "stop"}
"""Ambiguous names, which are accepted only in brackets or together with "token": `<|end|>`, `stop_token_id`."""
SUFFIXES = {"id", "ids", "idx", "index", "token", "tokens", "str", "string"}
SWITCHES = {"add", "append", "has", "is", "n", "no", "num", "prepend", "skip", "strip", "use", "with"}
"""Words that start the names of flags and counts, such as `add_eos_token`."""
VOCABULARIES = {
    "chars",
    "decoder",
    "encoder",
    "idtotoken",
    "idtoword",
    "itos",
    "merges",
    "model",
    "stoi",
    "tokens",
    "tokentoid",
    "vocab",
    "vocabulary",
    "wordtoid",
}
"""Keys of vocabularies, in lower case without punctuation.

The entries of a vocabulary are not settings: in a vocabulary, "eos" may be an ordinary token.
"""
ENCODINGS = {
    "gpt2": {"<|endoftext|>": 50256},
    "r50k_base": {"<|endoftext|>": 50256},
    "p50k_base": {"<|endoftext|>": 50256},
    "p50k_edit": {"<|endoftext|>": 50256},
    "cl100k_base": {"<|endoftext|>": 100257},
    "o200k_base": {"<|endoftext|>": 199999},
    "o200k_harmony": {"<|endoftext|>": 199999, "<|return|>": 200002, "<|end|>": 200007},
}
"""The end tokens of tiktoken encodings."""
ENCODING_NAMES = {
    "base",
    "encoding",
    "encodingname",
    "kind",
    "name",
    "tiktoken",
    "tokenization",
    "tokenizer",
    "tokenizerkind",
    "tokenizername",
    "tokenizertype",
    "tokenkind",
    "type",
}
DEEPEST = 4
"""Maximum depth of nested objects that are searched."""
IN_BRACKETS = re.compile(r"</s>|[<\[]\|?[^\s<>\[\]|]+\|?[>\]]")


class _Named(NamedTuple):
    """A key of a JSON object that names an end token, and the value of the key. If there are several such keys, the one
    with the smallest (`depth`, `is_part`, `rank`) is used.
    """

    depth: int
    is_part: bool
    """Whether other words precede the name, as in `myPT_eot`."""
    rank: int
    name: str
    value: Any


def end_token(states: Sequence[Any], vocabularies: Sequence[Any] = ()) -> int | None:
    """Return the id of the end-of-text token that is defined in the given JSON values; None if it is not defined.

    `vocabularies` contains additional JSON values that map tokens to ids.

    >>> from chatmill.store.end_token import end_token
    >>> end_token([{"eos_token": "</s>", "special_tokens": {"<s>": 1, "</s>": 2}}])
    2
    """
    tables = [*states, *vocabularies]
    encoding = next((ENCODINGS[name] for state in states for name in _encodings(state)), None)
    if encoding is not None:
        tables.append(encoding)
    for in_brackets in (False, True):
        named = [each for state in states for each in _named(state, in_brackets=in_brackets)]
        if named:
            first = min(each[:3] for each in named)
            ids = {_id_of(each.name, each.value, tables) for each in named if each[:3] == first}
            return ids.pop() if len(ids) == 1 else None
    for table in tables:
        texts = [(rank, id) for text, id in _texts(table) if (rank := _rank(text)) is not None]
        if texts:
            first_rank = min(rank for rank, _ in texts)
            ids = {id for rank, id in texts if rank == first_rank}
            return ids.pop() if len(ids) == 1 else None
    return None


def names_tokens(state: Any) -> bool:
    """Whether a JSON value describes a tokenizer: an object that defines an end token or contains a vocabulary."""
    if not isinstance(state, dict):
        return False
    return end_token([state]) is not None or any(_compact(name) in VOCABULARIES | {"tokenkind"} for name in state)


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())


def _compact(name: str) -> str:
    return "".join(_words(name))


def _place(name: str) -> tuple[bool, int] | None:
    """If `name` ends with a name from `END_NAMES`, return whether other words precede that name, and its index in
    `END_NAMES`; otherwise, return None.
    """
    if name.strip() == "</s>":
        return False, END_NAMES.index("eos")
    every = _words(name)
    words = list(every)
    while len(words) > 1 and words[-1] in SUFFIXES:
        words.pop()
    if words and words[0] in SWITCHES:
        return None
    for first in range(len(words)):
        if (compact := "".join(words[first:])) in END_NAMES:
            is_said = words != every or IN_BRACKETS.fullmatch(name) is not None
            if compact in COMMON and (first > 0 or not is_said):
                return None
            return first > 0, END_NAMES.index(compact)
    return None


def _rank(text: str) -> tuple[bool, int] | None:
    """Return the precedence of a special token, such as `<|endoftext|>`, among end tokens; None if it is not an end
    token.
    """
    return _place(text) if IN_BRACKETS.fullmatch(text) else None


def _named(node: Any, *, in_brackets: bool, depth: int = 0) -> Iterator[_Named]:
    """Yield the keys in a JSON value that are names of end tokens, with their values."""
    if not isinstance(node, dict) or depth > DEEPEST:
        return
    for name, value in node.items():
        is_text = IN_BRACKETS.fullmatch(name) is not None
        place = _place(name) if is_text == in_brackets else None
        is_value = isinstance(value, int | str | list | dict) and not isinstance(value, bool)
        if place is not None and is_value and value not in (-1, "", [], {}):
            yield _Named(depth, *place, name, value)
        elif _compact(name) not in VOCABULARIES:
            yield from _named(value, in_brackets=in_brackets, depth=depth + 1)


def _id_of(name: str, value: Any, tables: Sequence[Any]) -> int | None:
    """Return the token id for a JSON value, which can be an id, a token, a Hugging Face token object, or a list of
    these.
    """
    if isinstance(value, list):
        value = value[0]
    if isinstance(value, dict):
        value = next((value[key] for key in ("id", "content", "text", "token") if value.get(key) is not None), None)
    if type(value) is int:
        return value if value >= 0 else None
    if not isinstance(value, str):
        return None
    if value.isascii() and value.isdigit() and _words(name)[-1:] in (["id"], ["ids"]):
        return int(value)
    return next((id for table in tables if (id := _look_up(value, table)) is not None), None)


def _look_up(text: str, node: Any, key: str = "vocab", depth: int = 0) -> int | None:
    """Return the id of a token in a vocabulary, which is a list of tokens, or nested objects that map tokens to ids or
    ids to tokens.
    """
    if depth > DEEPEST:
        return None
    if isinstance(node, dict):
        if type(id := node.get(text)) is int:
            return id
        for name, value in node.items():
            if name.isascii() and name.isdigit() and text in (value, _content(value)):
                return int(name)
            if isinstance(value, dict | list) and (id := _look_up(text, value, name, depth + 1)) is not None:
                return id
    if isinstance(node, list):
        for number, value in enumerate(node):
            if isinstance(value, dict) and _content(value) == text and type(value.get("id")) is int:
                return int(value["id"])
            is_piece = isinstance(value, list) and value[:1] == [text]
            if (is_piece or value == text) and _compact(key) in VOCABULARIES:
                return number
    return None


def _texts(node: Any, depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yield all tokens in a JSON value, with their ids."""
    if depth > DEEPEST:
        return
    if isinstance(node, list):
        for number, value in enumerate(node):
            if (text := _content(value)) is not None and type(value.get("id")) is int:
                yield text, value["id"]
            elif isinstance(value, str):
                yield value, number
    if isinstance(node, dict):
        for name, value in node.items():
            if type(value) is int:
                yield name, value
            elif name.isascii() and name.isdigit() and isinstance(text := _content(value) or value, str):
                yield text, int(name)
            elif isinstance(value, dict) or _compact(name) in VOCABULARIES:
                yield from _texts(value, depth + 1)


def _content(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, Mapping) else None
    return content if isinstance(content, str) else None


def _encodings(node: Any, depth: int = 0) -> Iterator[str]:
    """Yield the names of tiktoken encodings in a JSON value that describes a tokenizer."""
    if isinstance(node, dict) and depth <= DEEPEST:
        for name, value in node.items():
            if isinstance(value, str) and _compact(name) in ENCODING_NAMES:
                encoding = re.split(r"[/:]", value)[-1]
                if encoding in ENCODINGS:
                    yield encoding
            yield from _encodings(value, depth + 1)
