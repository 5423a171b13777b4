from __future__ import annotations

import json
import random
import unicodedata
import warnings
from functools import cache
from pathlib import Path

import numpy as np
from tokenizer_fixtures import ANTHROPIC, DEEPSEEK, PATTERNS, pre_tokenizer_of, tokenizer_of_pairs

from chatmill.tokenizer import byte_bpe
from chatmill.tokenizer.backend import FOLDING
from chatmill.tokenizer.tokenizer_json import TokenizerJson
from fault_injection.trial import Tally, Trial

AT_ONCE = 200
CONTRACTIONS = ("s", "t", "re", "ve", "m", "ll", "d")
SPACES = (
    " ",
    "  ",
    "\n",
    "\r",
    "\r\n",
    "\n\n",
    "\t",
    "\x0b",
    "\x85",
    "\xa0",
    "\u180e",
    "\u2028",
    "\u200b",
    "\ufeff",
    "\0",
)
JOINED = ("\U0001f469\u200d\U0001f467", "\U0001f44d\U0001f3fd", "\U0001f1e9\U0001f1ea", "\u2764\ufe0f", "e\u0301")


@cache
def by_category() -> dict[str, list[str]]:
    categories: dict[str, list[str]] = {}
    for number in range(0x110000):
        if not 0xD800 <= number < 0xE000 and (number < 0x3400 or number % 13 == 0):
            categories.setdefault(unicodedata.category(chr(number)), []).append(chr(number))
    return categories


def piece(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.25:
        word = "".join(rng.choice((one, one, one.upper(), rng.choice(FOLDING))) for one in rng.choice(CONTRACTIONS))
        return rng.choice("''''\u2019\uff07") + word
    if kind < 0.4:
        return rng.choice(FOLDING)
    if kind < 0.55:
        return rng.choice(SPACES)
    if kind < 0.7:
        return rng.choice("abzSTREVMLD019'.,-/!_\\\"(")
    if kind < 0.75:
        return rng.choice(JOINED)
    of_category = by_category()[rng.choice(sorted(by_category()))]
    if kind < 0.95:
        return rng.choice(of_category)
    return rng.choice((*SPACES, rng.choice(of_category))) * rng.choice((2, 3, 4, 30, 300))


def text_of(rng: random.Random) -> str:
    return "".join(piece(rng) for _ in range(rng.randrange(1, 14)))


def files_tried(size: int) -> list[tuple[str, bytes]]:
    """Return the names and files of the tokenizers to test: one per split pattern, and real tokenizers. If `size` is
    small, return only two.
    """
    made = [(name, pre_tokenizer_of(pattern), None) for name, pattern in PATTERNS.items()]
    if size < 10_000:
        made = made[:2]
    files = [(name, tokenizer_of_pairs(cut, normalizer=normalizer)) for name, cut, normalizer in made]
    if size >= 10_000:
        real = [(path.parent.name, path.read_bytes()) for path in (DEEPSEEK, ANTHROPIC)]
        files += real
        for name, raw in real:
            cut = json.loads(raw)["pre_tokenizer"]
            files += [(f"pairs with the split pattern of {name}", tokenizer_of_pairs(cut))]
        for normalizer in ("NFC", "NFD", "NFKC"):
            cut = pre_tokenizer_of(PATTERNS["o200k"])
            files += [(f"o200k, {normalizer}", tokenizer_of_pairs(cut, normalizer=normalizer))]
    return files


def engines_of(name: str, raw: bytes) -> list[TokenizerJson]:
    content = json.loads(raw)
    opened = [TokenizerJson(name, raw, content, control=[])]
    if opened[0].engine == "compiled":
        compiled, byte_bpe._bpe = byte_bpe._bpe, None
        try:
            opened.append(TokenizerJson(name, raw, content, control=[]))
        finally:
            byte_bpe._bpe = compiled
    return opened


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    tally.expected = size
    warnings.simplefilter("ignore")
    backends = [backend for name, raw in files_tried(size) for backend in engines_of(name, raw)]
    for number in range(-(-size // AT_ONCE)):
        rng, backend = random.Random(f"{seed} {number}"), backends[number % len(backends)]
        texts = [text_of(rng) for _ in range(min(AT_ONCE, size - number * AT_ONCE))]
        (ids, start), (right, right_start) = backend.encode_batch(texts), backend._slow_batch(texts)
        tally.notes[f"texts encoded by {backend.engine}"] += len(texts)
        for n, text in enumerate(texts):
            if np.array_equal(ids[start[n] : start[n + 1]], right[right_start[n] : right_start[n + 1]]):
                tally.survives()
            else:
                tally.is_wrong(f"{backend.engine}, {backend._place}: wrong ids for {text!a}")


TRIAL = Trial(
    "texts that tokenizer engines may split differently",
    "Encodes random texts with the split patterns of GPT-2, cl100k, o200k, Qwen, DeepSeek, Anthropic and tekken. "
    "The ids must be the same as with `tokenizers`",
    work,
    full=120_000,
    short=1_200,
    in_memory=True,
)
