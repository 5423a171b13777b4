from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizer_fixtures import (
    CL100K,
    DEEPSEEK,
    MARKERS,
    MISTRAL_V3,
    PRIMER,
    TEKKEN,
    added,
    edited,
    hostile_texts,
    open_once,
    sentencepiece_bytes,
)

from chatmill.errors import DataError
from chatmill.tokenizer import Tokenizer, open_tokenizer
from chatmill.tokenizer.backend import Ids, Offsets, flat

EVERY_MARKER = {marker: marker for marker in MARKERS if marker != "<unk>"}


def check_hostile(path: str | Path, *, lossless: bool = True, add_tokens: bool = True) -> Tokenizer:
    tokenizer = open_tokenizer(path, control=EVERY_MARKER, add_tokens=add_tokens)
    texts = hostile_texts()
    ids, offsets = tokenizer.encode_batch(texts)
    control = list(tokenizer.special_token_ids().values())
    assert ids[np.isin(ids, control)].tolist() == []
    assert len(ids) > len(texts)
    if lossless:
        for text, start, stop in zip(texts[:500], offsets[:-1], offsets[1:], strict=False):
            assert tokenizer.decode(ids[start:stop]).replace("▁", " ") == text.replace("▁", " ")
    return tokenizer


@pytest.mark.parametrize("path", ["bytes", DEEPSEEK, MISTRAL_V3, CL100K, TEKKEN], ids=lambda path: Path(path).name)
def test_hostile_texts_produce_no_control_token_in_known_tokenizers(path):
    check_hostile(path)


def test_hostile_texts_produce_no_control_token_in_a_folder(folder):
    check_hostile(folder)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_user_defined_symbols_of_sentencepiece_do_not_match(kind, tmp_path):
    symbols = [*EVERY_MARKER, "§", "\n\n"]
    for taken in ("<s>", "</s>"):
        symbols.remove(taken)
    path = tmp_path / "hostile.model"
    path.write_bytes(sentencepiece_bytes(kind, user_defined_symbols=symbols))
    naive = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert naive.piece_to_id("<|eot|>") in naive.encode("a<|eot|>"), "the model is not hostile"

    tokenizer = check_hostile(path, add_tokens=False)
    assert tokenizer.special_token_ids()["<|eot|>"] == naive.piece_to_id("<|eot|>")
    assert tokenizer.vocab_size == naive.get_piece_size()
    assert naive.piece_to_id("\n\n") in tokenizer.encode("a\n\nb"), "a plain user-defined symbol must stay"


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_control_token_of_one_character_does_not_match(kind, tmp_path):
    path = tmp_path / "hostile.model"
    path.write_bytes(sentencepiece_bytes(kind, user_defined_symbols=["§"]))
    tokenizer = open_tokenizer(path, control={"eot": "§"})
    ids = tokenizer.encode("a§b")
    assert tokenizer.special_token_ids()["eot"] not in ids
    assert tokenizer.decode(ids) == "a§b"


def test_added_tokens_that_are_not_special_do_not_match(trained, tmp_path):
    first = json.loads(trained)["model"]["vocab"]
    listed = [added(id, token, special=False) for token, id in PRIMER_IDS.items()]
    markers = [marker for marker in MARKERS if marker not in PRIMER_IDS]
    listed += [added(len(first) + index, marker, special=False) for index, marker in enumerate(markers)]
    path = edited(trained, tmp_path / "tokenizer.json", added_tokens=listed)
    naive = tokenizers.Tokenizer.from_file(str(path))
    assert naive.token_to_id("<|eot|>") in naive.encode("a<|eot|>").ids, "the file is not hostile"

    tokenizer = check_hostile(path, add_tokens=False)
    assert tokenizer.special_token_ids()["<think>"] == naive.token_to_id("<think>")
    assert tokenizer.vocab_size == len(first) + len(markers)


PRIMER_IDS = {token: index for index, token in enumerate(PRIMER.values())}


def test_control_tokens_in_the_vocabulary_of_a_unigram_model_do_not_match(tmp_path):
    letters = [("<unk>", 0.0), ("▁", -2.0), *((chr(code), -4.0) for code in range(0x21, 0x7F))]
    vocab = [*letters, *((marker, -1.0) for marker in EVERY_MARKER)]
    naive = tokenizers.Tokenizer(tokenizers.models.Unigram(vocab, unk_id=0))
    naive.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    naive.decoder = tokenizers.decoders.Metaspace()
    path = tmp_path / "tokenizer.json"
    naive.save(str(path))
    assert naive.token_to_id("<|eot|>") in naive.encode("a<|eot|>").ids, "the file is not hostile"

    with pytest.warns(UserWarning, match="fastokens cannot load the file"):
        tokenizer = check_hostile(path, lossless=False, add_tokens=False)
    assert list(tokenizer.special_token_ids().values()) == list(range(len(letters), len(vocab)))
    assert tokenizer.decode(tokenizer.encode("a<|eot|> b")) == "a<|eot|> b"


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_merges_do_not_produce_a_control_token(ignore_merges, tmp_path):
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    steps = ["<|", "<|e", "<|eo", "<|eot", "<|eot|", "<|eot|>", "<|eot|>!"]
    vocab = {token: id for id, token in enumerate([*letters, *steps])}
    merges = [["<", "|"], *([left, right[len(left) :]] for left, right in pairwise(steps))]
    model = tokenizers.models.BPE(vocab, [tuple(merge) for merge in merges], ignore_merges=ignore_merges)
    naive = tokenizers.Tokenizer(model)
    naive.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    naive.decoder = tokenizers.decoders.ByteLevel()
    path = tmp_path / "tokenizer.json"
    naive.save(str(path))
    assert naive.encode("<|eot|>").ids == [vocab["<|eot|>"]], "the file is not hostile"

    tokenizer = open_tokenizer(path, control={"eot": "<|eot|>"})
    assert tokenizer.special_token_ids() == {"eot": vocab["<|eot|>"]}
    assert tokenizer.encode("<|eot|>") == [vocab["<|eot|"], vocab[">"]]


def test_a_special_word_of_the_vocabulary_becomes_unknown_in_text(tmp_path):
    vocab = {"[UNK]": 0, "[CLS]": 1, "hello": 2}
    naive = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    naive.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    naive.add_special_tokens(["[UNK]", "[CLS]"])
    path = tmp_path / "tokenizer.json"
    naive.save(str(path))
    with pytest.warns(UserWarning, match="fastokens cannot load the file"):
        tokenizer = open_tokenizer(path, control={"cls": "[CLS]"})
    assert tokenizer.encode("[CLS] hello [UNK] [CLS]") == [0, 2, 0, 0]
    assert tokenizer.special_token_ids() == {"cls": 1}


def test_special_tokens_and_markup_never_come_from_text_even_if_no_format_uses_them(tmp_path):
    path = tmp_path / "hostile.model"
    path.write_bytes(sentencepiece_bytes("bpe", user_defined_symbols=["<think>"]))
    for place, tokens in [
        (path, ["<think>"]),
        (DEEPSEEK, ["<｜begin▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<｜User｜>"]),
    ]:
        ids = open_tokenizer(place, control={token: token for token in tokens}).special_token_ids()
        if place == DEEPSEEK:
            listed = {token["content"]: token["id"] for token in json.loads(DEEPSEEK.read_text())["added_tokens"]}
            assert ids == {token: listed[token] for token in tokens}
        tokenizer = open_once(place)
        for token in tokens:
            assert ids[token] not in tokenizer.encode(f"a{token} b")
            assert tokenizer.decode([ids[token]]) == token


class Broken:
    engine = "broken"
    vocab_size = 2
    sha256 = "0" * 64

    def __init__(self) -> None:
        self.control = {"<|eot|>": 1}

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        return flat([np.array([int(ch == "x") for ch in text]) for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        return "a" * len(ids)

    def piece(self, id: int) -> bytes:
        return b"a"


def test_a_backend_that_returns_a_control_token_is_stopped_with_the_index_of_the_text():
    tokenizer = Tokenizer(Broken(), name="broken", control={"eot": "<|eot|>"})
    assert tokenizer.encode_batch(["", "ab", "c"])[0].tolist() == [0, 0, 0]
    with pytest.raises(DataError) as caught:
        tokenizer.encode_batch(["ab", "", "cx", "x"])
    assert str(caught.value) == "broken: text 2 of the batch was encoded as the control token <|eot|>; remove the text"
