from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_fixtures import ANTHROPIC, DEEPSEEK, PATTERNS, added, mixed_texts, open_once, pre_tokenizer_of

import chatmill
from chatmill.tokenizer import TextColumns, byte_bpe, open_tokenizer, tokenizer_json
from chatmill.tokenizer.tokenizer_json import TokenizerJson

pytest.importorskip("chatmill._native._bpe")
KINDS = {
    "gpt2": pre_tokenizer_of(None),
    "llama3": pre_tokenizer_of(PATTERNS["cl100k"]),
    "qwen2": pre_tokenizer_of(PATTERNS["qwen2"]),
    "qwen3.5": pre_tokenizer_of(PATTERNS["qwen3.5"]),
    "o200k": pre_tokenizer_of(PATTERNS["o200k"]),
    "tekken": pre_tokenizer_of(PATTERNS["tekken"]),
    "deepseek": json.loads(DEEPSEEK.read_text())["pre_tokenizer"],
}


def as_kind(raw: bytes, kind: str) -> bytes:
    content = json.loads(raw)
    content["added_tokens"] = []
    content["pre_tokenizer"] = KINDS[kind]
    content["model"]["ignore_merges"] = kind == "llama3"
    normalizers = {"qwen2": {"type": "NFC"}, "deepseek": {"type": "Sequence", "normalizers": []}}
    content["normalizer"] = normalizers.get(kind)
    return json.dumps(content).encode()


@pytest.fixture(scope="module", params=KINDS)
def engines(request: pytest.FixtureRequest, trained: bytes) -> tuple[TokenizerJson, tokenizers.Tokenizer]:
    raw = as_kind(trained, request.param)
    backend = TokenizerJson(request.param, raw, json.loads(raw), control=[])
    assert backend.engine == "compiled"
    return backend, tokenizers.Tokenizer.from_str(raw.decode())


def assert_equal(engines: tuple[TokenizerJson, tokenizers.Tokenizer], texts: list[str]) -> None:
    backend, peer = engines
    ids, offsets = backend.encode_batch(texts)
    right = [encoding.ids for encoding in peer.encode_batch_fast(texts, add_special_tokens=False)]
    assert [ids[a:b].tolist() for a, b in pairwise(offsets.tolist())] == right


SMALL = ["a", "S", "1", " ", "\n", "\r", "\t", "'", ".", "é", "中", "\u0301", "\u3000", "😀"]


def test_every_short_text_of_a_tricky_alphabet(engines):
    assert_equal(engines, ["".join(text) for size in range(4) for text in product(SMALL, repeat=size)])


@given(
    st.text(
        st.sampled_from(
            [*"abSsTtRrEeVvLlMmDd019 \n\r\t'.,-é中ſ½²\u0301\u1100\u1161\u11a8가\u0085\u00a0\u2028\u3000😀🇩𝐀𠀀"]
        )
    )
)
def test_any_text_of_a_tricky_alphabet(engines, text):
    assert_equal(engines, [text, text * 3, "x" * 50 + text])


@given(st.lists(st.text(), max_size=4))
def test_any_text(engines, texts):
    assert_equal(engines, texts)


def test_every_character_between_others(engines):
    characters = [chr(n) for n in range(0x110000) if not 0xD800 <= n < 0xE000 and (n < 0x3400 or n % 31 == 0)]
    assert_equal(
        engines,
        [
            "".join(f"a{one} {one}{one}1{one}" for one in characters[at : at + 64])
            for at in range(0, len(characters), 64)
        ],
    )


def test_words_and_runs_of_every_length(engines):
    lengths = [*range(70), *range(120, 132), *range(508, 518), 3000]
    texts = [
        before + one * n + after
        for one in ("x", " ", "\n", "-", "1", "é", "中", "'s", " \n")
        for n in lengths
        for before in ("", "a b ")
        for after in ("", "y", " z")
    ]
    assert_equal(engines, texts)


def test_long_words_are_merged_as_in_tokenizers(engines, trained):
    rng = random.Random(3)
    learned = [token for token in json.loads(trained)["model"]["vocab"] if token.isalpha() and len(token) > 1]
    letters = {
        "learned": learned,
        "latin": [*"aeinrstABC"],
        "chinese": [*"的一是不了人我在有他这为之大来以个中上们"],
        "kana": [*"あいうえおかきくけこさしすせそ"],
        "accents": [*"aéèüñ"],
    }
    texts = ["".join(rng.choices(one, k=rng.randrange(1, 180))) for one in letters.values() for _ in range(300)]
    assert_equal(engines, texts)
    assert_equal(engines, [text[: rng.randrange(120, 130)] * 4 for text in texts])


def test_contractions_at_every_position(engines):
    words = [
        "'s",
        "'t",
        "'re",
        "'ve",
        "'m",
        "'ll",
        "'d",
        "'S",
        "'LL",
        "'r",
        "'l",
        "'x",
        "''s",
        " 's",
        "é's",
        "'sé",
        "'ſ",
        "'",
    ]
    assert_equal(
        engines,
        ["b" * n + word + after for n in range(70) for word in words for after in ("", "are", " are", "'s", "1", "\n")],
    )


def test_megabytes_of_mixed_text(engines):
    assert_equal(engines, mixed_texts(5, 400_000))


def test_cached_words_are_dropped_and_added_again(engines):
    backend, peer = engines
    rng = random.Random(2)
    few = [" ".join(rng.choices(["the", "house", "of", "running", "ways"], k=20)) for _ in range(50)]
    many = [" ".join("".join(rng.choices("abcdefgh", k=9)) for _ in range(400)) for _ in range(400)]
    for texts in (few, many, few, many[:50], few):
        assert_equal((backend, peer), texts)


def columns(texts: list[str], before: list[str], after: list[str], kinds: list[int]) -> TextColumns:
    written = [text.encode() for text in texts]
    stop = np.cumsum([0, *map(len, written)])
    edges = [[text.encode() for text in side] for side in (before, after)]
    return TextColumns(b"".join(written), stop[:-1].copy(), stop[1:].copy(), np.array(kinds, np.uint8), *edges)


@given(st.lists(st.tuples(st.text(max_size=20), st.integers(0, 2)), max_size=6))
def test_columns_give_the_same_ids_as_their_texts(engines, given):
    before, after = ["", "user\n", " 中"], ["", "\n", "\u0301'"]
    texts, kinds = [text for text, _ in given], [kind for _, kind in given]
    written = [before[kind] + text + after[kind] for text, kind in given]
    side_by_side = columns(texts, before, after, kinds)
    assert list(side_by_side) == written and side_by_side[1:] == written[1:]
    ids, offsets = engines[0].encode_batch(side_by_side)
    right, right_offsets = engines[0].encode_batch(written)
    assert ids.tolist() == right.tolist() and offsets.tolist() == right_offsets.tolist()
    assert_equal(engines, written)


def test_many_threads_encode_at_once(engines):
    """The threads start with words that are not cached yet. A list is cleared while another call encodes it."""
    backend, peer = engines
    encoder, rng = backend._encode._encoder, random.Random(4)
    new = [" ".join("".join(rng.choices("abcdefgh'é1", k=7)) for _ in range(900)) for _ in range(40)]
    batches = [[*new[at : at + 10], *mixed_texts(at, 60_000)] for at in range(0, 40, 10)]
    right = [[each.ids for each in peer.encode_batch_fast(texts, add_special_tokens=False)] for texts in batches]
    start = threading.Barrier(8)

    def encode(number: int) -> list[list[int]]:
        texts = batches[number % 4]
        start.wait()
        for _ in range(3):
            as_columns = columns(texts, ["", "x"], ["", "y"], [0] * len(texts))
            ids, offsets = backend.encode_batch(as_columns if number > 3 else texts)
        return [ids[a:b].tolist() for a, b in pairwise(offsets.tolist())]

    with ThreadPoolExecutor(8) as pool:
        encoded = [pool.submit(encode, number) for number in range(8)]
        while not all(each.done() for each in encoded):
            changing = list(new)
            encoding = threading.Thread(target=encoder.encode, args=(changing, False))
            encoding.start()
            changing.clear()
            encoding.join()
    for number in range(8):
        assert encoded[number].result() == right[number % 4]


FORKED = """
import json, os, sys
from chatmill.tokenizer.tokenizer_json import TokenizerJson
from tokenizer_fixtures import mixed_texts

raw = open(sys.argv[1], "rb").read()
backend, texts = TokenizerJson("forked", raw, json.loads(raw), control=[]), mixed_texts(9, 200_000)
right = backend.encode_batch(texts)[0].tobytes()
if (child := os.fork()) == 0:
    os._exit(0 if backend.encode_batch(texts)[0].tobytes() == right else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""A program that encodes, forks and encodes again. The program runs in its own process, because threads do not survive
a fork.
"""


@pytest.mark.parametrize("kind", ["gpt2", "deepseek"])
def test_a_forked_process_encodes_the_same(trained, tmp_path, kind):
    (tmp_path / "tokenizer.json").write_bytes(as_kind(trained, kind))
    paths = [str(Path(chatmill.__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(tmp_path / "tokenizer.json")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, timeout=120)
    assert done.returncode == 0


def test_skipped_texts_go_to_the_fast_engine_if_there_are_many(trained, monkeypatch):
    raw = as_kind(trained, "gpt2")
    backend = TokenizerJson("gpt2", raw, json.loads(raw), control=[])
    texts = ["a", "x" * 600, "b \U000f0000", "c"]
    right, offsets = backend._slow_batch(texts)
    for _ in range(3):
        ids, starts = backend.encode_batch(texts)
        assert ids.tolist() == right.tolist() and starts.tolist() == offsets.tolist()
    assert "_not_native" not in vars(backend)
    assert len(backend.encode_batch(["y" * 2**20])[0]) == len(backend._slow_batch(["y" * 2**20])[0])
    assert vars(backend)["_not_native"] != backend._slow_batch


def changed(trained: bytes, **parts: Any) -> dict[str, Any]:
    content = json.loads(as_kind(trained, "gpt2"))
    model = parts.pop("model", {})
    return {**content, **parts, "model": {**content["model"], **model}}


def test_other_kinds_of_files_use_other_engines(trained):
    prefix = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    token = {"id": 1000, "content": "zz", "special": False, "single_word": False, "lstrip": False, "rstrip": False}
    content = changed(trained)
    merges = content["model"]["merges"]
    assert byte_bpe.byte_bpe(content, str, None) is not None  # type: ignore[arg-type]
    for other in (
        {"pre_tokenizer": prefix},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {**prefix, "add_prefix_space": False, "use_regex": False}},
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}},
        {"normalizer": {"type": "NFC"}, "added_tokens": [token]},
        {"model": {"type": "Unigram"}},
        {"model": {"continuing_subword_prefix": "##"}},
        {"model": {"end_of_word_suffix": "</w>"}},
        {"model": {"byte_fallback": True}},
        {"model": {"merges": [*merges, merges[0]]}},
        {"model": {"merges": [*(" ".join(merge) for merge in merges), "#version s"]}},
        {"model": {"vocab": {**content["model"]["vocab"], "abcabc": 5}}},
        {"model": {"vocab": {name: id for name, id in content["model"]["vocab"].items() if name != "Ģ"}}},
    ):
        assert byte_bpe.byte_bpe(changed(trained, **other), str, None) is None, other  # type: ignore[arg-type]


def test_a_file_of_another_engine_gives_the_same_ids_without_the_compiled_part(trained_json: Path, monkeypatch):
    texts = mixed_texts(4, 50_000)
    with_it = open_tokenizer(trained_json).encode_batch(texts)
    monkeypatch.setattr(byte_bpe, "_bpe", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        without = open_tokenizer(trained_json)
    assert without.engine == "fastokens"
    for one, other in zip(with_it, without.encode_batch(texts), strict=True):
        assert one.tolist() == other.tolist()


def test_an_engine_that_differs_on_the_probe_is_not_used(trained_json, monkeypatch):
    made = []

    def wrong(content: Any, normalize: Any, fallback: Any) -> Any:
        made.append(fallback)
        return lambda texts: fallback([*texts[:-1], texts[-1] + "!"])

    monkeypatch.setattr(tokenizer_json, "byte_bpe", wrong)
    tokenizer = open_tokenizer(trained_json)
    assert made == [tokenizer._backend._fallback]
    assert tokenizer._backend._encode == tokenizer._backend._not_native


def test_real_files_with_a_known_pattern_are_compiled():
    assert open_once(DEEPSEEK).engine == "compiled"
    assert open_once(ANTHROPIC).engine == "fastokens"  # NFKC normalization is not supported


def test_texts_with_an_added_token_are_skipped(trained):
    size = len(changed(trained)["model"]["vocab"])
    tokens = ["<dsml:", "｜X｜", "zz", "z" * 300]
    content = changed(trained, added_tokens=[added(size + n, token, special=False) for n, token in enumerate(tokens)])
    raw = json.dumps(content).encode()
    backend = TokenizerJson("added", raw, content, control=[])
    assert backend.engine == "compiled"
    texts = [
        "a <dsml:b",
        "<dsml",
        "<dsml<dsml:",
        "｜X",
        "｜X｜ y",
        "z",
        "zz",
        "a z z",
        "<" * 70,
        "z" * 299,
        "plain",
        "",
    ]
    left = backend._encode._encoder.encode(texts, False)[2]
    assert left == [n for n, text in enumerate(texts) if any(token in text for token in tokens[:3])]
    assert_equal((backend, tokenizers.Tokenizer.from_str(raw.decode())), [*texts, *mixed_texts(6, 20_000)])


def test_cached_words_are_dropped_if_they_take_too_much_memory(engines):
    rng = random.Random(3)
    many = ["".join(rng.choices("abcdefghij", k=500)) for _ in range(16_000)]
    ids, offsets = engines[0].encode_batch(many)
    again, _ = engines[0].encode_batch(many[-50:])
    assert again.tolist() == ids[offsets[-51] :].tolist()
    assert_equal(engines, many[:50])


@given(
    st.lists(
        st.sampled_from([b"\xe2", b"\xff", b"\xf4\x90", b"\xc3", b"\x80", b"a", b" ", b"'", "é😀".encode()]),
        max_size=70,
    )
)
def test_invalid_utf8_is_skipped(engines, pieces):
    data = b"".join(pieces)
    stop = np.array([len(data)])
    engine = engines[0]._encode
    found = engine._encoder.encode_columns(data, stop * 0, stop, np.zeros(1, np.uint8), [b""], [b""])
    try:
        text = data.decode()
    except UnicodeDecodeError:
        # The engine does not detect some invalid sequences, but encodes them with at most four ids per byte.
        assert found[2] == [0] or len(found[0]) <= 4 * len(data)
    else:
        assert_equal(engines, [text])


def test_no_texts_give_no_ids(trained):
    engine = byte_bpe.byte_bpe(changed(trained), str, None)  # type: ignore[arg-type]
    assert engine is not None
    assert [array.tolist() for array in engine([])] == [[], [0]]


def test_columns_that_do_not_fit_together_are_rejected(trained):
    content = changed(trained)
    engine = byte_bpe.byte_bpe(content, str, None)  # type: ignore[arg-type]
    assert engine is not None
    encoder, ones = engine._encoder, np.ones(1, np.int64)
    zero, kind = np.zeros(1, np.int64), np.zeros(1, np.uint8)
    assert encoder.encode_columns(b"ab", zero, ones, kind, [b""], [b""])[1] == np.array([0, 1]).tobytes()
    for arguments in (
        (b"ab", zero, ones * 3, kind, [b""], [b""]),
        (b"ab", -ones, ones, kind, [b""], [b""]),
        (b"ab", ones * 2, ones, kind, [b""], [b""]),
        (b"ab", zero, np.ones(2, np.int64), kind, [b""], [b""]),
        (b"ab", zero, ones, kind, (b"",), [b""]),
    ):
        with pytest.raises(ValueError, match="expected"):
            encoder.encode_columns(*arguments)
    with pytest.raises(IndexError):
        encoder.encode_columns(b"ab", zero, ones, kind, [], [b""])
    with pytest.raises(TypeError):
        encoder.encode_columns(b"ab", zero, ones, kind, ["a"], [b""])
    with pytest.raises(TypeError):
        encoder.encode([b"a"], False)
    with pytest.raises(UnicodeEncodeError):
        encoder.encode(["\ud800"], False)
