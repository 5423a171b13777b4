from __future__ import annotations

import json

import pytest
from tokenizer_fixtures import PRIMER, training_texts

from chatmill.errors import DataError, UsageError
from chatmill.tokenizer import open_tokenizer, train_bpe

CONTROL = list(PRIMER.values())


def test_control_tokens_have_the_first_ids_and_the_size_is_as_requested(trained_json):
    # A fallback to the slower engine would warn, and warnings are errors here.
    tokenizer = open_tokenizer(trained_json, control=PRIMER)
    assert tokenizer.special_token_ids() == {"sys": 0, "usr": 1, "asst": 2, "eot": 3}
    assert tokenizer.vocab_size == 1000


def test_the_same_texts_give_the_same_bytes(trained):
    assert train_bpe(training_texts(), vocab_size=1000, control=CONTROL) == trained


def test_merges_are_learned_from_the_texts(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train_bpe(["hey hey hey"] * 5, vocab_size=300, control=CONTROL))
    tokenizer = open_tokenizer(path)
    assert [tokenizer.piece(id) for id in tokenizer.encode("hey hey")] == [b"hey", b" hey"]


def test_any_text_can_be_encoded_even_if_training_saw_none(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train_bpe([], vocab_size=260, control=CONTROL))
    tokenizer = open_tokenizer(path, control=PRIMER)
    everything = "".join(chr(code) for code in range(0x3000) if not 0xD800 <= code < 0xE000) + "😀"
    assert b"".join(map(tokenizer.piece, tokenizer.encode(everything))) == everything.encode()
    assert tokenizer.vocab_size == 260


def test_a_control_token_that_is_a_word_of_the_texts_never_comes_from_text(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train_bpe(["stop stop"] * 9, vocab_size=400, control=["stop"]))
    tokenizer = open_tokenizer(path, control={"eot": "stop"})
    assert tokenizer.special_token_ids() == {"eot": 0}
    assert 0 not in tokenizer.encode("stop stop")
    assert tokenizer.decode(tokenizer.encode("stop stop")) == "stop stop"


def test_a_too_small_vocabulary_is_an_error_with_the_minimum():
    with pytest.raises(UsageError) as caught:
        train_bpe([], vocab_size=259, control=[*CONTROL, "<|eot|>"])
    line = "--vocab-size 259 is too small for 256 bytes and 4 control tokens; expected at least 260"
    assert str(caught.value) == line


def test_progress_counts_the_texts_read():
    seen: list[int] = []
    content = train_bpe(iter("abc"), vocab_size=260, control=CONTROL, progress=seen.append)
    assert seen == [1, 2, 3]
    assert json.loads(content)["model"]["type"] == "BPE"


def test_an_error_of_the_reader_is_raised_unchanged():
    def texts():
        yield "fine"
        raise DataError("chat.jsonl:2: invalid JSON; correct it")

    with pytest.raises(DataError) as caught:
        train_bpe(texts(), vocab_size=300, control=[])
    assert str(caught.value) == "chat.jsonl:2: invalid JSON; correct it"


def test_a_lone_surrogate_is_one_line():
    with pytest.raises(DataError) as caught:
        train_bpe(["fine", "a\ud800"], vocab_size=300, control=[])
    assert str(caught.value) == "text 2 contains a lone surrogate at character 1; expected valid Unicode"
