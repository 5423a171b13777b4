"""Load tiktoken vocabularies, which are files of base64 tokens with ranks, and Mistral's tekken JSON files."""

from __future__ import annotations

import base64
import hashlib
import importlib
import re
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from chatmill.errors import DataError, UsageError, one_line
from chatmill.tokenizer.backend import Ids, Offsets, faults_of, flat

RANK_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) ([0-9]+)\r?")

_PUBLISHED = ("r50k_base", "p50k_base", "cl100k_base", "o200k_base")

# The special tokens of tekken files before version 11, which do not list their special tokens. Other special ids are
# unused.
_TEKKEN = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


class Tiktoken:
    """A tiktoken vocabulary: merge ranks and a split pattern. No merge produces the id of a special token."""

    engine = "tiktoken"

    def __init__(
        self, place: str, raw: bytes, *, pattern: str, ranks: Mapping[bytes, int], special: Mapping[str, int]
    ) -> None:
        _check(place, ranks, special)
        with faults_of(place, "cannot be loaded by tiktoken", "expected ranks in merge order and a valid pattern"):
            self._encoding = _tiktoken(place).Encoding(
                place, pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens=dict(special)
            )
        self.control = dict(special)
        self.vocab_size = self._encoding.max_token_value + 1
        self.sha256 = hashlib.sha256(raw).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        # Do not use encode_ordinary, because it silently replaces lone surrogates.
        return flat([self._encoding.encode_to_numpy(text, disallowed_special=()) for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._encoding.decode(list(ids))
        return text

    def piece(self, id: int) -> bytes:
        piece: bytes = self._encoding.decode_single_token_bytes(id)
        return piece


def load_ranks(place: str, raw: bytes, *, special: Mapping[str, int]) -> Tiktoken:
    """Load a tiktoken rank file.

    Published rank files are recognized by their hash. For an unknown rank file, the split pattern of cl100k is assumed,
    with a warning. `special` maps control tokens from other files in the same folder to ids.
    """
    right = "expected a token in base64, a space and a number"
    ranks = {}
    with faults_of(place, "a token is not base64", right):
        for number, line in enumerate(raw.split(b"\n"), start=1):
            if match := RANK_LINE.fullmatch(line):
                ranks[base64.b64decode(match[1])] = int(match[2])
            elif line.strip():
                text = one_line(line.decode("utf-8", "replace"), 40)
                raise DataError(f'{place}:{number}: "{text}" is not a rank; {right}')
    published = _published(place, hashlib.sha256(raw).hexdigest())
    known = published or _definition(place, "cl100k_base")[1] | {"special_tokens": {}}
    special = {**known["special_tokens"], **special}
    tokenizer = Tiktoken(place, raw, pattern=known["pat_str"], ranks=ranks, special=special)
    if published is None:
        warnings.warn(
            f"{place}: the file does not define how text is split before merging; "
            "assuming the pattern of cl100k_base, which Llama 3 uses",
            stacklevel=2,
        )
    return tokenizer


def load_tekken(place: str, raw: bytes, content: dict[str, Any]) -> Tiktoken:
    """Load a tekken file, in which the special tokens have the lowest ids, and all other ids follow in rank order.

    [<unk> <s> </s> … filler] [rank 0, rank 1, …]
    """
    right = "expected config.pattern, config.default_num_special_tokens, config.default_vocab_size and vocab"
    with faults_of(place, "cannot read the tekken file", right):
        config = content["config"]
        first = int(config["default_num_special_tokens"])
        count = int(config["default_vocab_size"]) - first
        special = {f"<SPECIAL_{id}>": id for id in range(first)}
        listed = content.get("special_tokens")
        if listed is None:
            listed = [{"rank": id, "token_str": token} for id, token in enumerate(_TEKKEN)]
        for token in listed:
            special.pop(f"<SPECIAL_{token['rank']}>", None)
            special[token["token_str"]] = token["rank"]
        ranks = {base64.b64decode(token["token_bytes"]): token["rank"] + first for token in content["vocab"][:count]}
        pattern = config["pattern"]
    return Tiktoken(place, raw, pattern=pattern, ranks=ranks, special=special)


def _check(place: str, ranks: Mapping[bytes, int], special: Mapping[str, int]) -> None:
    """Raise `DataError` for problems that would make tiktoken panic while loading or encoding."""
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing:
        raise DataError(f"{place}: the rank is missing for {missing} of the 256 single bytes; the file is incomplete")
    if len({*ranks.values(), *special.values()}) < len(ranks) + len(special):
        raise DataError(f"{place}: two tokens have the same id; expected a unique id for each token")


def _published(place: str, sha256: str) -> dict[str, Any] | None:
    """Return the definition of the published encoding whose rank file has this hash, or None if no encoding matches."""
    for name in _PUBLISHED:
        expected, definition = _definition(place, name)
        if expected == sha256:
            return definition
    return None


def _definition(place: str, name: str) -> tuple[str, dict[str, Any]]:
    """Return the hash of an encoding's rank file and the definition of the encoding, from the tiktoken package.

    tiktoken's constructor would download the ranks, so this function runs it with a loader that only records the hash.
    """
    _tiktoken(place)
    hashes = []

    def note(url: str, expected_hash: str) -> dict[bytes, int]:
        hashes.append(expected_hash)
        return {}

    constructor = importlib.import_module("tiktoken_ext.openai_public").ENCODING_CONSTRUCTORS[name]
    definition = types.FunctionType(constructor.__code__, {**constructor.__globals__, "load_tiktoken_bpe": note})()
    return hashes[0], definition


def _tiktoken(place: str) -> Any:
    try:
        import tiktoken
    except ImportError as error:
        message = f"{place}: a tiktoken vocabulary requires tiktoken; pip install 'chatmill[tiktoken]'"
        raise UsageError(message) from error
    return tiktoken
