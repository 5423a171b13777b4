from __future__ import annotations

import multiprocessing
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_fixtures import CL100K, DEEPSEEK, MISTRAL_V1, O200K, PRIMER, TEKKEN, mixed_texts, open_once

from chatmill.errors import DataError, UsageError
from chatmill.tokenizer import Tokenizer, open_tokenizer

SMALL = ("bytes", "trained_json", "trained_model", "folder")
REAL = {"deepseek": DEEPSEEK, "mistral": MISTRAL_V1, "tekken": TEKKEN, "cl100k": CL100K, "o200k": O200K}


@pytest.fixture(params=[*SMALL, *REAL])
def path(request: pytest.FixtureRequest) -> str | Path:
    if request.param == "bytes":
        return "bytes"
    return REAL.get(request.param) or request.getfixturevalue(request.param)


@pytest.fixture
def tokenizer(path: str | Path) -> Tokenizer:
    return opened(path)


@cache
def opened(path: str | Path) -> Tokenizer:
    return open_tokenizer(path, control=PRIMER, add_tokens=path in REAL.values())


def is_sentencepiece(tokenizer: Tokenizer) -> bool:
    return ".model" in tokenizer.name


TEXT = st.text() | st.text("ab <|>\n\té你😀", max_size=40)


@pytest.mark.parametrize("name", [*SMALL, *REAL])
def test_decoding_restores_the_text(name, request):
    tokenizer = opened("bytes" if name == "bytes" else REAL.get(name) or request.getfixturevalue(name))

    @settings(max_examples=150)
    @given(TEXT)
    def check(text: str) -> None:
        if is_sentencepiece(tokenizer):
            # SentencePiece represents spaces by this character, so it decodes the character as a space.
            text = text.replace("▁", "_")
        assert tokenizer.decode(tokenizer.encode(text)) == text

    check()


def test_the_pieces_of_a_text_are_its_bytes(tokenizer):
    for text in mixed_texts(5, 20_000):
        pieces = b"".join(tokenizer.piece(id) for id in tokenizer.encode(text))
        if is_sentencepiece(tokenizer):
            # SentencePiece adds a space at the start of the text, and decodes "▁" as a space.
            assert pieces == b" " + text.replace("▁", " ").encode()
        else:
            assert pieces == text.encode()


def test_a_batch_gives_the_same_ids_as_its_texts_one_by_one(tokenizer):
    texts = ["", "a", "", *mixed_texts(6, 20_000), "  ", "<|eot|>", ""]
    ids, offsets = tokenizer.encode_batch(texts)
    alone = [tokenizer.encode(text) for text in texts]
    assert ids.dtype == np.uint32
    assert offsets.dtype == np.int64
    assert ids.tolist() == [id for one in alone for id in one]
    assert offsets.tolist() == np.cumsum([0, *map(len, alone)]).tolist()


def test_an_empty_batch_has_no_ids(tokenizer):
    ids, offsets = tokenizer.encode_batch([])
    assert (ids.tolist(), ids.dtype, offsets.tolist(), offsets.dtype) == ([], np.uint32, [0], np.int64)


def test_control_ids_decode_to_their_tokens_between_texts(tokenizer):
    special = tokenizer.special_token_ids()
    ids = [special["usr"], *tokenizer.encode("Hi  there"), special["eot"], special["asst"], *tokenizer.encode(" é")]
    assert tokenizer.decode(ids) == "<|usr|>Hi  there<|eot|><|asst|> é"
    assert tokenizer.decode([]) == ""
    assert tokenizer.piece(special["eot"]) == b"<|eot|>"


def test_special_ids_are_those_of_the_format_and_are_in_the_vocabulary(tokenizer):
    special = tokenizer.special_token_ids()
    assert list(special) == ["sys", "usr", "asst", "eot"]
    assert len(set(special.values())) == 4
    assert all(0 <= id < tokenizer.vocab_size for id in special.values())
    assert tokenizer.control == PRIMER


def test_the_hash_does_not_depend_on_the_location_of_the_file(path, tmp_path):
    if path == "bytes":
        assert open_tokenizer("bytes").sha256 == opened("bytes").sha256
        return
    moved = tmp_path / "moved"
    shutil.copytree(path, moved) if Path(path).is_dir() else shutil.copy(path, moved)
    again = open_tokenizer(moved, control=PRIMER, add_tokens=path in REAL.values())
    assert again.sha256 == opened(path).sha256
    assert len(again.sha256) == 64


def test_different_tokenizers_have_different_hashes(trained_json, trained_model):
    paths = ["bytes", trained_json, trained_model, *REAL.values()]
    assert len({opened(path).sha256 for path in paths}) == len(paths)


@pytest.mark.parametrize(
    ("text", "character"), [("\ud800", "U+D800 at character 0"), ("fine \udfff", "U+DFFF at character 5")]
)
def test_a_lone_surrogate_is_one_line(tokenizer, text, character):
    with pytest.raises(DataError) as caught:
        tokenizer.encode_batch(["fine", text])
    expected = f"text 1 of the batch contains a lone surrogate {character}; expected valid Unicode"
    assert str(caught.value) == expected


def test_ids_out_of_range_are_one_line(tokenizer):
    last = tokenizer.vocab_size - 1
    for id in (-1, tokenizer.vocab_size, 2**40):
        expected = f"{tokenizer.name}: no token has id {id}; expected 0 to {last}"
        with pytest.raises(DataError) as caught:
            tokenizer.decode([0, id])
        assert str(caught.value) == expected
        with pytest.raises(DataError) as caught:
            tokenizer.piece(id)
        assert str(caught.value) == expected


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_encodes_the_same(tokenizer):
    texts = mixed_texts(7, 200_000)
    before = tokenizer.encode_batch(texts)[0].tolist()
    context = multiprocessing.get_context("fork")
    theirs, ours = context.Pipe()
    child = context.Process(target=lambda: ours.send(tokenizer.encode_batch(texts)[0].tolist()))
    child.start()
    ours.close()
    # If the child ends without responding, `recv` raises EOFError.
    assert theirs.recv() == before
    child.join()
    assert child.exitcode == 0


def test_the_vocabulary_sizes_of_known_tokenizers():
    sizes = {name: open_once(path).vocab_size for name, path in REAL.items()}
    assert sizes == {"deepseek": 129280, "mistral": 32000, "tekken": 131072, "cl100k": 100277, "o200k": 200019}
    assert open_once("bytes").vocab_size == 271


def test_bytes_are_their_own_ids():
    tokenizer = open_tokenizer("bytes", control={"start": "<|im_start|>", "eot": "<|im_end|>"})
    assert tokenizer.encode("aé\n") == [0x61, 0xC3, 0xA9, 0x0A]
    assert tokenizer.special_token_ids() == {"start": 269, "eot": 270}
    assert tokenizer.name == "bytes"


def test_the_bytes_tokenizer_has_the_control_tokens_of_all_presets_at_fixed_ids():
    ngpt = [f"<|ngpt_{role}_84a5023f67d74cf29cc4001becde983c|>" for role in ("sys", "usr", "asst", "eot")]
    primer = ["<|sys|>", "<|usr|>", "<|asst|>", "<|eot|>"]
    post_training = ["<|SYSTEM|>", "<|USER|>", "<|ASSISTANT|>", "<|END|>", "<|EOS|>"]
    tokens = [*ngpt, *primer, *post_training, "<|im_start|>", "<|im_end|>"]
    tokenizer = open_tokenizer("bytes", control={token: token for token in tokens})
    assert tokenizer.special_token_ids() == {token: 256 + index for index, token in enumerate(tokens)}
    assert tokenizer.decode(range(256, 271)) == "".join(tokens)


def test_missing_control_tokens_are_listed_together_with_the_flag(trained_json):
    with pytest.raises(UsageError) as caught:
        open_tokenizer(trained_json, control={"start": "<|im_start|>", "sys": "<|sys|>", "eot": "<|im_end|>"})
    lacks = "the vocabulary lacks the control tokens <|im_start|> <|im_end|>; add them with --add-tokens"
    assert str(caught.value) == f"{trained_json}: {lacks}"


def test_added_tokens_follow_the_vocabulary_in_the_order_of_the_format(path):
    plain = open_once(path)
    control = {"b": "<|b|>", "a": "<|a|>", "again": "<|b|>"}
    tokenizer = open_tokenizer(path, control=control, add_tokens=True)
    end = plain.vocab_size
    assert tokenizer.special_token_ids() == {"b": end, "a": end + 1, "again": end}
    assert tokenizer.vocab_size == end + 2
    assert tokenizer.decode([end, end + 1]) == "<|b|><|a|>"
    assert tokenizer.encode("<|b|><|a|>") == plain.encode("<|b|><|a|>")


def test_only_tokens_that_were_missing_change_the_hash(trained_json):
    plain = open_tokenizer(trained_json).sha256
    assert open_tokenizer(trained_json, control=PRIMER, add_tokens=True).sha256 == plain
    one = open_tokenizer(trained_json, control={"a": "<|a|>"}, add_tokens=True).sha256
    two = open_tokenizer(trained_json, control={"a": "<|a|>", "b": "<|b|>"}, add_tokens=True).sha256
    assert len({plain, one, two}) == 3
    assert open_tokenizer(trained_json, control={"x": "<|a|>"}, add_tokens=True).sha256 == one
