from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from chatmill.tokenizer import open_tokenizer
from chatmill.tokenizer.control_encoder import ControlEncoder

TEXTS = ["the quick brown fox, the lazy dog. ", "Größe ändern: ünï 漢字 ", "a b  c\n\nd "] * 3
TOKENS = [
    AddedToken("<s>", special=True),
    AddedToken("<|end|>", special=True, rstrip=True),
    AddedToken("<|left|>", special=True, lstrip=True),
    AddedToken("<think>", special=False, normalized=False),
]


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def nfc() -> Tokenizer:
    made = byte_level()
    made.normalizer = normalizers.NFC()
    return made


def metaspace(scheme: str) -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return made


KINDS = {
    "bytes": byte_level,
    "nfc": nfc,
    "metaspace always": lambda: metaspace("always"),
    "metaspace first": lambda: metaspace("first"),
}


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    out = {}
    for name, make in KINDS.items():
        made = make()
        special = ["<unk>"] if "metaspace" in name else []
        alphabet = pre_tokenizers.ByteLevel.alphabet() if not special else list(" abcdefghijklmnopqrstuvwxyz.,\n<|>/")
        trainer = trainers.BpeTrainer(
            vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        made.train_from_iterator(TEXTS, trainer)
        made.add_tokens(TOKENS)
        path = tmp_path_factory.mktemp("control") / f"{name.replace(' ', '_')}.json"
        made.save(str(path))
        with warnings.catch_warnings():
            # Ignore the warning that the fast engine does not support some of these files.
            warnings.simplefilter("ignore")
            out[name] = (ControlEncoder(open_tokenizer(path), path.read_bytes()), made)
    return out


def test_sections_are_used_if_they_give_the_ids_of_the_whole(encoders):
    by_sections = {name: encoder.by_sections for name, (encoder, _) in encoders.items()}
    assert by_sections == {"bytes": True, "nfc": True, "metaspace always": True, "metaspace first": False}


PARTS = st.lists(
    st.one_of(st.sampled_from([token.content for token in TOKENS]), st.text("ab c.\n", max_size=6)), max_size=8
)


@pytest.mark.parametrize("name", KINDS)
def test_the_whole_is_encoded_like_the_tokenizer_itself_encodes_it(encoders, name):
    encoder, original = encoders[name]
    names = {token.content for token in TOKENS}

    @given(PARTS)
    @settings(max_examples=80)
    def check(parts):
        text = "".join(parts)
        ids, begins = encoder.encode_whole(parts, [part in names for part in parts])
        right = original.encode(text, add_special_tokens=False)
        assert ids.tolist() == right.ids == encoder.reference(text)
        # In both encoders, ordinary tokens start at the same character positions of the joined text.
        for begin, id, (start, _) in zip(begins.tolist(), right.ids, right.offsets, strict=True):
            if id not in encoder.ids.values():
                assert begin == start

    check()


@pytest.mark.parametrize("name", [name for name in KINDS if name != "metaspace first"])
def test_sections_between_control_tokens_give_the_same_ids(encoders, name):
    encoder, original = encoders[name]
    names = [token.content for token in TOKENS]

    @given(st.lists(st.tuples(st.text("ab c.\n", max_size=6), st.sampled_from(names)), min_size=1, max_size=5))
    @settings(max_examples=80)
    def check(pairs):
        ids: list[int] = []
        before = None
        for text, token in pairs:
            ids += [*encoder.tokenizer.encode(encoder.strip(text, before, token)[0]), encoder.ids[token]]
            before = token
        assert ids == original.encode("".join(map("".join, pairs)), add_special_tokens=False).ids

    check()


@pytest.mark.parametrize("name", KINDS)
def test_the_name_of_a_control_token_in_a_text_is_text(encoders, name):
    encoder, _ = encoders[name]
    text = "say <|end|> and <think> <s>"
    ids, _ = encoder.encode_whole(["<s>", text, "<|end|>"], [True, False, True])
    control = np.isin(ids, list(encoder.ids.values()))
    assert control.tolist() == [True, *[False] * (len(ids) - 2), True]
    assert not np.isin(encoder.tokenizer.encode_batch([text])[0], list(encoder.ids.values())).any()


def test_byte_lengths_of_ids_match_their_pieces(encoders):
    encoder, _ = encoders["bytes"]
    for text in ("the fox", "Größe 漢字", ""):
        ids = encoder.tokenizer.encode_batch([text])[0]
        assert encoder.tokenizer.byte_lengths(ids).sum() == len(text.encode())


@pytest.mark.parametrize(
    ("normalizer", "flags"),
    [(None, {"single_word": True}), (normalizers.Prepend("a"), {"normalized": True})],
    ids=["single word", "prepended"],
)
def test_a_control_token_that_does_not_match_at_its_position_is_text(tmp_path, normalizer, flags):
    made = byte_level()
    made.normalizer = normalizer
    made.train_from_iterator(
        TEXTS, trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    )
    tokens = ["<|one|>", "<two>"]
    made.add_tokens([AddedToken(token, special=token == "<|one|>", **flags) for token in tokens])
    made.save(str(tmp_path / "tokenizer.json"))
    raw = (tmp_path / "tokenizer.json").read_bytes()
    opened = open_tokenizer(tmp_path / "tokenizer.json")
    encoders = [ControlEncoder(opened, raw, text_tokens=text_tokens) for text_tokens in ([], ["<two>"])]
    assert not any(encoder.by_sections for encoder in encoders)

    @given(st.lists(st.sampled_from([*tokens, "ab", " ", "\n", "c."]), max_size=8))
    @settings(max_examples=60)
    def check(parts):
        right = made.encode("".join(parts), add_special_tokens=False).ids
        for encoder in encoders:
            ids, begins = encoder.encode_whole(parts, [part in {*tokens} - encoder.text_tokens for part in parts])
            assert ids.tolist() == right
            assert np.all(np.diff(begins) >= 0)

    check()
