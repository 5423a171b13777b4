"""An independent implementation of `train_ranges` for tests, which computes the weight of each token from the weights
of its characters.
"""

from __future__ import annotations

import json
import random

from transformers.convert_slow_tokenizer import bytes_to_unicode

PIECES = (
    *(
        "The answer",
        " is",
        " 4",
        ".\n\n",
        "naïve",
        "e\u0301",
        "中文",
        "私は",
        "😀",
        "👩‍👩‍👧‍👦",
        "👍🏽",
        "\u200b",
        "\t",
        "  ",
    ),
    *("<|im_end|>", "<|eot|>", "don't", "1234", "हूँ", "\ufeff", "ﬁ", "🇩🇪"),
)


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 12)))


def random_ranges(rng: random.Random, size: int) -> list[list]:
    cuts = sorted(rng.sample(range(size + 1), min(size + 1, 2 * rng.randrange(1, 4))))
    return [[a, b, rng.choice([0, 0, 1, 0.5, 2])] for a, b in zip(cuts[::2], cuts[1::2], strict=False)]


def expected_weights(offsets, size: int, ranges, own: float, flagged: bool) -> tuple[list[float], int]:
    chars: list[float | None] = [None] * size
    for start, stop, weight in ranges:
        for at in range(start, stop):
            chars[at] = weight
    out, split = [], 0
    for begin, end in offsets:
        held = set(chars[begin:end])
        split += len(held) > 1
        given = {weight for weight in held if weight is not None}
        if not given:
            out.append(own)
        elif None not in held or 0 in given:
            out.append(min(given))
        else:
            out.append(min(own, *given) if flagged else own)
    return out, split


def pairs_of_bytes() -> bytes:
    """Return a tokenizer.json of a byte-level BPE that merges random pairs of bytes. Some tokens contain parts of two
    characters.
    """
    alphabet = bytes_to_unicode()
    letters = [alphabet[byte] for byte in sorted({*"".join(PIECES).encode()}) if byte >= 0x80 or chr(byte) in " aens<|"]
    pairs = [[one, other] for one in letters for other in letters]
    random.Random(5).shuffle(pairs)
    tokens = dict.fromkeys([*alphabet.values(), *("".join(pair) for pair in pairs)])
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    model = {"type": "BPE", "vocab": {token: id for id, token in enumerate(tokens)}, "merges": pairs}
    return json.dumps({"version": "1.0", "pre_tokenizer": level, "decoder": level, "model": model}).encode()
