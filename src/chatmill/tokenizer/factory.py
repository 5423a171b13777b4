"""Open a tokenizer from a name or a path. The type of a file is detected from its content."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from chatmill.errors import DataError, UsageError, one_line
from chatmill.plain_file import read_plain
from chatmill.remote.named_files import TOKENIZER_LIMIT, given_name, local_file
from chatmill.tokenizer.backend import Backend, ByteLevel, faults_of, is_markup
from chatmill.tokenizer.compiled_cache import cache_key, read_compiled, write_compiled
from chatmill.tokenizer.sentencepiece_model import SentencePiece
from chatmill.tokenizer.tiktoken_ranks import RANK_LINE, load_ranks, load_tekken
from chatmill.tokenizer.tokenizer import Tokenizer
from chatmill.tokenizer.tokenizer_json import TokenizerJson

_EXPECTED = "expected a tokenizer.json, a SentencePiece model, tiktoken ranks or a tekken JSON file"

_MAX_BYTES = 1 << 30
# A higher id means that the file is damaged: no vocabulary in use is this large.
_MAX_ID = 2**24


class MissingTokensError(UsageError):
    """Raised if the vocabulary lacks control tokens of the format."""


def open_tokenizer(
    spec: str | Path, *, control: Mapping[str, str] | None = None, besides: Sequence[str] = (), add_tokens: bool = False
) -> Tokenizer:
    """Open a tokenizer file, a Hugging Face folder, or the built-in tokenizer `bytes`.

    `control` maps keys such as `eot` to the control tokens of a format, and `besides` lists other control tokens, such
    as coordinates. Raise `MissingTokensError` if the vocabulary lacks a token. With `add_tokens`, missing tokens get
    new ids after the end of the vocabulary.

    >>> from chatmill import load_format, open_tokenizer
    >>> tokenizer = open_tokenizer("bytes", control=load_format("chatml").tokens)
    >>> tokenizer.encode("Hi"), tokenizer.special_token_ids()
    ([72, 105], {'start': 269, 'eot': 270})
    >>> tokenizer.decode([269, 72, 105, 270])
    '<|im_start|>Hi<|im_end|>'
    """
    control = control or {}
    wanted = [*control.values(), *besides]
    if spec == "bytes":
        name, place = "bytes", "bytes"
        backend: Backend = ByteLevel()
        added: dict[str, int] = {}
    else:
        path = local_file(spec, limit=TOKENIZER_LIMIT)
        name, place = one_line(path.name or str(path), 200), one_line(given_name(path), 300)
        backend, added = _open_path(path, place, wanted)
    known = {**backend.control, **added}
    missing = [token for token in dict.fromkeys(wanted) if token not in known]
    if missing and not add_tokens:
        tokens = " ".join(one_line(token) for token in missing[:8]) + (" …" if len(missing) > 8 else "")
        raise MissingTokensError(
            f"{place}: the vocabulary lacks the control tokens {tokens}; add them with --add-tokens"
        )
    first = max([backend.vocab_size, *(id + 1 for id in added.values())])
    if first > _MAX_ID:
        raise DataError(f"{place}: a token has id {first - 1}; expected ids below {_MAX_ID}")
    added |= {token: first + index for index, token in enumerate(missing)}
    return Tokenizer(backend, name=name, control=control, added=added)


def _open_path(path: Path, place: str, control: Collection[str]) -> tuple[Backend, dict[str, int]]:
    """Open the backend for a file or folder. Also return the control tokens that only tokenizer_config.json adds, with
    their ids.
    """
    if not path.is_dir():
        return _open_file(path, place, control, declared={}), {}
    config = path / "tokenizer_config.json"
    declared, plain = _declared(config) if config.exists() else ({}, {})
    backend = _open_file(_tokenizer_in(path, place), place, {*control, *declared}, declared=declared)
    if unused := [one_line(repr(token)) for token, id in plain.items() if id >= backend.vocab_size]:
        message = f"{place}: ignoring text tokens that only tokenizer_config.json lists: {' '.join(unused)}"
        warnings.warn(message, stacklevel=2)
    return backend, _added_tokens(backend, declared, place)


def _tokenizer_in(folder: Path, place: str) -> Path:
    with faults_of(place, "the folder cannot be read", "check its permissions"):
        names = [folder / "tokenizer.json", folder / "tokenizer.model", *sorted(folder.glob("*.tiktoken"))]
        for path in [*names, folder / "tekken.json"]:
            if path.is_file():
                return path
    raise DataError(
        f"{place}: the folder contains no tokenizer; expected tokenizer.json, tokenizer.model or tekken.json"
    )


def _open_file(path: Path, place: str, control: Collection[str], *, declared: Mapping[str, int]) -> Backend:
    try:
        raw = read_plain(path, _MAX_BYTES)
    except FileNotFoundError as error:
        raise DataError(
            f"{place}: no such file or folder; {_EXPECTED}, a Hugging Face folder, or the name bytes"
        ) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{place}: cannot be read ({reason}); {_EXPECTED}") from error
    start = raw[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start:
        raise DataError(f"{place}: the file is empty; {_EXPECTED}")
    if start[:1] in b"{[" or path.suffix == ".json":
        key = cache_key(raw, *sorted(control))
        if key is not None and (compiled := read_compiled(key)) is not None:
            return TokenizerJson(place, raw, compiled, control=control)
        content = _json(raw, place)
        if isinstance(content.get("model"), dict) and "vocab" in content["model"]:
            backend = TokenizerJson(place, raw, content, control=control)
            if key is not None and (compiled := backend.compiled()) is not None:
                write_compiled(key, compiled)
            return backend
        if isinstance(content.get("config"), dict) and "pattern" in content["config"]:
            return load_tekken(place, raw, content)
        what = "JSON, but not a tokenizer: it has neither model.vocab nor config.pattern"
        raise DataError(f"{place}: {what}; {_EXPECTED}")
    if RANK_LINE.fullmatch(start.split(b"\n", 1)[0]):
        return load_ranks(place, raw, special=declared)
    # Every SentencePiece model starts with this byte, so other files are rejected without loading the library.
    if raw[:1] == b"\x0a":
        return SentencePiece(place, raw, control=control)
    raise DataError(f"{place}: not a tokenizer: neither JSON, tiktoken ranks nor a SentencePiece model; {_EXPECTED}")


def _json(raw: bytes, place: str) -> dict[str, Any]:
    with faults_of(place, "not valid JSON", "the file is damaged or truncated"):
        content = msgspec.json.decode(raw.removeprefix(b"\xef\xbb\xbf"))
    if not isinstance(content, dict):
        raise DataError(f"{place}: JSON, but not a tokenizer: the top level is a {type(content).__name__}; {_EXPECTED}")
    return content


def _declared(config: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return the added tokens of tokenizer_config.json with their ids, split into control tokens and text tokens."""
    place = one_line(given_name(config), 300)
    with faults_of(place, "cannot be read", "expected added_tokens_decoder to map ids to tokens"):
        listed = _json(read_plain(config), place).get("added_tokens_decoder") or {}
        control: dict[str, int] = {}
        plain: dict[str, int] = {}
        for id, token in listed.items():
            apart = token.get("special") or is_markup(token["content"])
            (control if apart else plain)[str(token["content"])] = int(id)
    return control, plain


def _added_tokens(backend: Backend, declared: Mapping[str, int], place: str) -> dict[str, int]:
    """Return the tokens from tokenizer_config.json whose ids are beyond the backend's vocabulary.

    Raise `DataError` if an id in tokenizer_config.json belongs to another token in the vocabulary.
    """
    added = {}
    for token, id in declared.items():
        if token in backend.control or id < backend.vocab_size:
            # Also accept an id whose token has the same text, because `declared` may contain the unknown token, which
            # is not a control token.
            if backend.control.get(token) != id and backend.piece(id) != token.encode():
                what = f'tokenizer_config.json gives "{one_line(token)}" the id {id}, but the tokenizer does not'
                raise DataError(f"{place}: {what}; both files must come from the same tokenizer")
        else:
            added[token] = id
    return added
