"""Test that the C code splits text into the same words as `tokenizers`, for each split pattern, with SSE2 and NEON.

`split_words.c` is compiled for this processor, and for x86-64 if `gcc-x86-64-linux-gnu` and `qemu-user` are installed.
The C program splits each text twice: 64 bytes at a time, and one word at a time. The program exits with an error if the
results differ, if it reads past the end of the text, or on undefined behavior.
"""

from __future__ import annotations

import json
import platform
import random
import shutil
import subprocess
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_fixtures import DEEPSEEK, PATTERNS, mixed_texts, pre_tokenizer_of

from chatmill.tokenizer import byte_bpe
from chatmill.tokenizer.split_pattern import KNOWN, classes, split_of

NATIVE = Path(str(byte_bpe.__file__)).parents[1] / "_native"
LEFT = 2**32 - 1
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SECTIONS: dict[str, Any] = {
    name: pre_tokenizer_of(pattern) for name, pattern in PATTERNS.items() if name != "unusual"
} | {"deepseek": json.loads(DEEPSEEK.read_text())["pre_tokenizer"]}
MACHINES = {"here": (["cc"], []), "x86-64": (["x86_64-linux-gnu-gcc", "-static"], ["qemu-x86_64"])}
FLAGS = ["-O2", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]

Cut = Callable[[Sequence[bytes]], list[list[int] | None]]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def compiled(machine: str) -> Path:
        path = tmp_path_factory.mktemp("split") / "split_words"
        source = Path(__file__).with_name("split_words.c")
        command = [*MACHINES[machine][0], *FLAGS, f"-I{NATIVE}", str(source), "-o", str(path)]
        subprocess.run(command, check=True, timeout=300)
        return path

    return compiled


@pytest.fixture(scope="module", params=MACHINES)
def command(request: pytest.FixtureRequest, program: Callable[[str], Path]) -> list[str]:
    compiler, runner = MACHINES[request.param]
    if request.param == "x86-64" and platform.machine() == "x86_64":
        pytest.skip("this is x86-64")
    if any(shutil.which(needed) is None for needed in (compiler[0], *runner)):
        pytest.skip(f"{' or '.join([compiler[0], *runner])} is not installed")
    return [*runner, str(program(request.param))]


@pytest.fixture(scope="module", params=SECTIONS)
def section(request: pytest.FixtureRequest) -> Any:
    return SECTIONS[request.param]


@pytest.fixture(scope="module")
def cut(command: list[str], section: Any, tmp_path_factory: pytest.TempPathFactory) -> Cut:
    split = split_of(section)
    assert split is not None
    table = tmp_path_factory.mktemp("classes") / "classes"
    table.write_bytes(classes(split, nfc=False))

    def ends(texts: Sequence[bytes]) -> list[list[int] | None]:
        data = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
        done = subprocess.run(
            [*command, str(int(split.pattern)), str(table)], input=data, capture_output=True, timeout=300
        )
        assert done.returncode == 0, (done.returncode, done.stderr)
        numbers, found, at = array("I", done.stdout), [], 0
        while at < len(numbers):
            count = numbers[at]
            found.append(None if count == LEFT else numbers[at + 1 : at + 1 + count].tolist())
            at += 1 if count == LEFT else 1 + count
        assert len(found) == len(texts)
        return found

    return ends


def assert_cut_as_by_tokenizers(cut: Cut, section: Any, texts: Sequence[str]) -> None:
    right = pieces_by_tokenizers(json.dumps(section), tuple(texts))
    left = 0
    for text, ends, words in zip(texts, cut([text.encode() for text in texts]), right, strict=True):
        if ends is None:
            left += 1
            assert "ſ" in text or any(ord(one) >= KNOWN or one in "\u3040\u3097\u3098" for one in text), text
        else:
            written = text.encode()
            assert [written[a:b].decode(errors="replace") for a, b in zip([0, *ends], ends, strict=False)] == words
    assert left < max(2, len(texts) // 2)


@cache
def pieces_by_tokenizers(section: str, texts: tuple[str, ...]) -> list[list[str]]:
    parts = json.loads(section).get("pretokenizers", [])
    regexes = [part["pattern"]["Regex"] for part in parts if part["type"] == "Split"]
    peer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Split(tokenizers.Regex(regex), "isolated") for regex in regexes or [GPT2]]
    )
    return [[word for word, _ in peer.pre_tokenize_str(text)] for text in texts]


TRICKY = ["a", "S", "1", " ", "\n", "\r", "\t", "'", ".", "/", "\x01", "é", "Ā", "中", "ー", "・", "\u0301", "\u3000"]
PIECES = [
    *("a", "Ab", "AB", "sS", "s", "T", "re", "LL", "ve", "d", "m", "12", "1234567", " ", "  ", "\n", "\n\n", "\r\n"),
    *("\t", " \n ", "'", "''", "!", "..", "/", "//", "\x00", "\x7f", "'s", "'S", "'Ll", "x'", "/\n", ".\n", "     "),
    *(
        "word ",
        " the",
        "é",
        "ß",
        "Ñ",
        "中文",
        "カー・",
        "\u0301",
        "\u0940",
        "ªⅷ",
        "٣",
        "\u00a0",
        "ǅ",
        "\U0001d7d8",
        "😀",
    ),
]


def random_texts(seed: int, pieces: Sequence[str], count: int, most: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(pieces, k=rng.randrange(1, most))) for _ in range(count)]


def test_every_short_text_of_a_tricky_alphabet(cut, section):
    assert_cut_as_by_tokenizers(
        cut, section, ["".join(one) for size in range(4) for one in product(TRICKY, repeat=size)]
    )


def test_ascii_texts_of_several_windows(cut, section):
    texts = random_texts(1, [piece for piece in TRICKY if piece.isascii()], 800, 200)
    assert_cut_as_by_tokenizers(cut, section, texts + random_texts(2, PIECES[:37], 800, 90))


def test_texts_of_several_windows(cut, section):
    assert_cut_as_by_tokenizers(cut, section, random_texts(3, PIECES, 800, 90) + random_texts(4, TRICKY, 600, 200))


def test_every_character_between_others(cut, section):
    # Above 0x3400, long runs of characters have the same class, so testing a few characters of each run is enough.
    numbers = [n for n in range(KNOWN) if n < 0x3400 or n % 31 == 0]
    characters = [chr(n) for n in numbers if not 0xD800 <= n < 0xE000 and chr(n) not in "ſ\u3040\u3097\u3098"]
    lines = [
        "".join(f"a{one}B {one}1{one} .{one}\n{one}'{one}s" for one in characters[at : at + 16])
        for at in range(0, len(characters), 16)
    ]
    assert_cut_as_by_tokenizers(cut, section, lines)


def test_contractions_and_runs_at_every_position_of_a_window(cut, section):
    pieces = [
        "'s",
        "'LL",
        "'ve",
        "'x",
        "''s",
        "x's's",
        "\n\n ",
        "  \n  ",
        ".\n\n",
        "./\n/",
        "12345",
        "aB",
        "   ",
        "é",
        "中",
    ]
    texts = [
        before * n + piece + after
        for n in (0, 1, 2, *range(52, 70))
        for piece in pieces
        for before in ("b", " ", "\n")
        for after in ("", "t", " are", "1", "\n", "é")
    ]
    assert_cut_as_by_tokenizers(cut, section, texts)


def test_mixed_texts(cut, section):
    known = [text for text in mixed_texts(8, 300_000) if max(map(ord, text)) < KNOWN]
    assert_cut_as_by_tokenizers(cut, section, known)


@settings(max_examples=10)
@given(texts=st.lists(st.text(st.sampled_from([*TRICKY, *"bBsStTlLrRvVeEmMdD0😀"]), max_size=150), max_size=60))
def test_any_texts(cut, section, texts):
    assert_cut_as_by_tokenizers(cut, section, [*texts, "", "a", "b"])


def test_random_bytes_are_split_or_skipped(cut):
    rng = random.Random(6)
    texts = [rng.randbytes(rng.randrange(300)) for _ in range(2000)]
    texts += [bytes(rng.choices(b"a 'sT\n/\x00\x80\xc3\xa9\xe4\xf0\xff1", k=rng.randrange(200))) for _ in range(3000)]
    for text, ends in zip(texts, cut(texts), strict=True):
        assert ends is None or (ends or [0])[-1] == len(text)


def test_other_patterns_are_not_mistaken_for_these(section):
    assert split_of(section) is not None
    changed = json.dumps(section, ensure_ascii=False)
    for old, new in (
        (r"\\p{N}", r"\\p{Nd}"), ("Isolated", "Removed"), ('"invert": false', '"invert": true'), (r"\\s+(?!\\S)|", ""),
        ('"add_prefix_space": false', '"add_prefix_space": true'), ('"use_regex": false', '"use_regex": true'),
        ("Regex", "String"), ("一-龥", "一-龦"), ("'s|", ""),
    ):  # fmt: skip
        if old in changed:
            assert split_of(json.loads(changed.replace(old, new))) is None, old
    for other in (None, {}, [], "ByteLevel", {"type": "Sequence", "pretokenizers": []}, {"type": "Sequence"}):
        assert split_of(other) is None


def test_the_patterns_have_unique_names():
    names = {name: split_of(section).pattern.name for name, section in SECTIONS.items()}  # type: ignore[union-attr]
    assert names == {"o200k": "O200K", "cl100k": "CL100K", "qwen2": "QWEN2", "qwen3.5": "QWEN2", "tekken": "TEKKEN",
                     "gpt2": "GPT2", "deepseek": "DEEPSEEK"}  # fmt: skip
