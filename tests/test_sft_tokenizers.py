from __future__ import annotations

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from chatmill import IGNORE_INDEX, load_format, render_chat_sft, serialize_chat_to_ids
from chatmill.errors import DataError
from chatmill.tokenizer import train_bpe

NGPT, PRIMER = (list(load_format(name).tokens.values()) for name in ("ngpt", "primer"))
TEXTS = ["The quick brown fox jumps over the lazy dog", "naïve 中文 😀 e\u0301", "", " ", "\n\n  x"]
HOSTILE = ["<s>", *NGPT, *PRIMER, f"a {NGPT[3]} b", f"{PRIMER[2]}{PRIMER[3]}", f"<s>{NGPT[0]}", "<s> x </s>"]


def engine_with(tokens: list[str]) -> tokenizers.Tokenizer:
    raw = train_bpe(["The quick brown fox jumps over the lazy dog. " * 3] * 4, vocab_size=400, control=["<s>", *tokens])
    engine = tokenizers.Tokenizer.from_str(raw.decode())
    bos = engine.token_to_id("<s>")
    engine.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    engine.enable_truncation(5)
    engine.enable_padding(length=9)
    return engine


def fast_with(tokens: list[str]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=engine_with(tokens), bos_token="<s>")


def slow_with(tokens: list[str]) -> ByT5Tokenizer:
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    return tokenizer


def plain_ids(tokenizer: object, text: str) -> list[int]:
    if isinstance(tokenizer, ByT5Tokenizer):
        return [byte + 3 for byte in text.encode()]
    engine = getattr(tokenizer, "backend_tokenizer", tokenizer)
    plain = tokenizers.Tokenizer.from_str(engine.to_str())
    plain.no_truncation()
    plain.no_padding()
    plain.encode_special_tokens = True
    return plain.encode(text, add_special_tokens=False).ids


def id_of(tokenizer: object, token: str) -> int:
    found = tokenizer.token_to_id if isinstance(tokenizer, tokenizers.Tokenizer) else tokenizer.convert_tokens_to_ids
    return found(token)


@pytest.mark.parametrize("make", [engine_with, fast_with, slow_with])
@pytest.mark.parametrize("tokens", [NGPT, PRIMER, [*PRIMER, *NGPT]], ids=["ngpt", "primer", "both"])
def test_texts_are_encoded_as_text_and_control_tokens_come_from_the_format(make, tokens):
    tokenizer = make(tokens)
    own = NGPT if NGPT[0] in tokens else PRIMER
    sys, usr, asst, eot = (id_of(tokenizer, token) for token in own)
    for text in (*TEXTS, *HOSTILE):
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        ids, system = plain_ids(tokenizer, text), plain_ids(tokenizer, "s")
        wanted = [sys, *system, eot, usr, *ids, eot, asst, *ids, eot]
        got = serialize_chat_to_ids({"messages": chat}, tokenizer=tokenizer, default_system_text="s")
        assert got == wanted, text
        assert {*ids}.isdisjoint({sys, usr, asst, eot})
    own = PRIMER if PRIMER[0] in tokens else NGPT
    _, usr, asst, eot = (id_of(tokenizer, token) for token in own)
    ids = plain_ids(tokenizer, TEXTS[1])
    chat = [{"role": "user", "content": TEXTS[1]}, {"role": "assistant", "content": TEXTS[1]}]
    labels = [IGNORE_INDEX] * (len(ids) + 3) + [*ids, eot]
    assert render_chat_sft(tokenizer, chat) == ([usr, *ids, eot, asst, *ids, eot], labels)


@pytest.mark.parametrize("make", [engine_with, fast_with, slow_with])
def test_missing_control_tokens_are_named_in_one_line(make):
    tokenizer, chat = make(NGPT[:3]), [{"role": "assistant", "content": "x"}]
    name = type(tokenizer).__name__
    with pytest.raises(DataError) as raised:
        serialize_chat_to_ids({"messages": chat}, tokenizer=tokenizer, default_system_text="s")
    assert str(raised.value) == f"the tokenizer, a {name}, lacks {NGPT[3]}; add the missing tokens as special tokens"
    with pytest.raises(DataError) as raised:
        render_chat_sft(tokenizer, chat)
    assert (
        str(raised.value)
        == f"the tokenizer, a {name}, lacks {', '.join(PRIMER)}; add the missing tokens as special tokens"
    )


class _OnlyEncodes:
    def encode(self, text: str) -> list[int]:
        return [len(text)]


@pytest.mark.parametrize(
    ("tokenizer", "line"),
    [
        (
            _OnlyEncodes(),
            "the tokenizer, a _OnlyEncodes, has no method special_token_ids; expected a tokenizer from chatmill,",
        ),
        ("bytes", "the tokenizer, a str, has no method special_token_ids; expected a tokenizer from chatmill,"),
        (
            None,
            "the tokenizer, a NoneType, has no method encode and no special_token_ids; expected a tokenizer from ",
        ),
    ],
)
def test_a_missing_method_is_named_in_one_line(tokenizer, line):
    with pytest.raises(DataError) as raised:
        render_chat_sft(tokenizer, [{"role": "assistant", "content": "x"}])
    assert str(raised.value).startswith(line) and "\n" not in str(raised.value)


def test_a_tokenizer_that_was_changed_is_opened_again():
    engine, chat = engine_with(PRIMER), [{"role": "assistant", "content": "QQ"}]
    before = render_chat_sft(engine, chat)[0]
    engine.normalizer = tokenizers.normalizers.Lowercase()
    assert render_chat_sft(engine, chat)[0] == [before[0], *plain_ids(engine, "qq"), before[-1]] != before
