from __future__ import annotations

import json
import warnings
from itertools import pairwise
from typing import Any

import fastokens
import pytest
import tokenizers
from tokenizer_fixtures import ANTHROPIC, PRIMER, added, edited

from chatmill.tokenizer import open_tokenizer

BOS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|sys|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|sys|>": {"id": "<|sys|>", "ids": [0], "tokens": ["<|sys|>"]}},
}
CUT = {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
PAD = {
    "strategy": {"Fixed": 64},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<|sys|>",
}


def test_sections_that_add_cut_or_pad_are_ignored(trained, trained_json, tmp_path):
    text = "Hello <|eot|> the house"
    path = edited(trained, tmp_path / "tokenizer.json", post_processor=BOS, truncation=CUT, padding=PAD)
    assert open_tokenizer(path).encode(text) == open_tokenizer(trained_json).encode(text)


def test_dropout_is_ignored(trained, trained_json, tmp_path):
    model = {**json.loads(trained)["model"], "dropout": 0.9}
    path = edited(trained, tmp_path / "tokenizer.json", model=model)
    assert open_tokenizer(path).encode("the house " * 9) == open_tokenizer(trained_json).encode("the house " * 9)


def test_plain_added_tokens_match_and_keep_their_ids_if_tokens_before_them_are_removed(trained, tmp_path):
    content = json.loads(trained)
    end = len(content["model"]["vocab"])
    more = [
        added(end, "<|reserved|>", special=True),
        added(end + 1, "chatmill", special=False),
        added(end + 2, "<think>", special=False),
        added(end + 3, "    ", special=False),
        added(end + 4, "<|last|>", special=True),
    ]
    path = edited(trained, tmp_path / "tokenizer.json", added_tokens=[*content["added_tokens"], *more])
    tokenizer = open_tokenizer(path, control={"think": "<think>", "last": "<|last|>", "eot": "<|eot|>"})
    assert tokenizer.special_token_ids() == {"think": end + 2, "last": end + 4, "eot": 3}
    assert tokenizer.vocab_size == end + 5
    text = "a chatmill<think>    b<|reserved|>"
    ids = tokenizer.encode(text)
    assert [id for id in ids if id >= end] == [end + 1, end + 3]
    assert tokenizer.decode(ids) == text
    assert tokenizer.piece(end + 1) == b"chatmill"


def test_a_plain_added_token_can_be_a_control_token_of_the_format(trained, tmp_path):
    end = len(json.loads(trained)["model"]["vocab"])
    path = edited(trained, tmp_path / "tokenizer.json", added_tokens=[added(end, "STOP", special=False)])
    assert open_tokenizer(path).encode("STOP") == [end]
    tokenizer = open_tokenizer(path, control={"eot": "STOP"})
    assert tokenizer.special_token_ids() == {"eot": end}
    assert end not in tokenizer.encode("STOP")


def test_an_end_token_that_is_also_the_unknown_token_can_be_a_control_token(trained, tmp_path):
    model = {**json.loads(trained)["model"], "unk_token": "<|eot|>"}
    path = edited(trained, tmp_path / "tokenizer.json", model=model)
    tokenizer = open_tokenizer(path, control=PRIMER)
    assert tokenizer.special_token_ids()["eot"] == 3
    assert tokenizer.decode(tokenizer.encode("<|eot|>\x00é")) == "<|eot|>\x00é"


def test_a_prefix_space_is_added_as_the_file_specifies(trained, tmp_path):
    before = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    path = edited(trained, tmp_path / "tokenizer.json", pre_tokenizer=before)
    tokenizer = open_tokenizer(path)
    assert tokenizer.encode("house") == tokenizer.encode(" house")
    assert b"".join(map(tokenizer.piece, tokenizer.encode("house"))) == b" house"


def test_text_is_normalized_as_the_file_specifies():
    tokenizer = open_tokenizer(ANTHROPIC)
    assert tokenizer.encode("ﬁ ① ｆｕｌｌ") == tokenizer.encode("fi 1 full")
    assert tokenizer.decode(tokenizer.encode("ﬁ ① ｆｕｌｌ")) == "fi 1 full"


def metaspace_file(path: Any) -> Any:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    merges = [("▁", "h"), ("▁h", "i")]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    tokenizer.decoder = tokenizers.decoders.Sequence([*parts, tokenizers.decoders.Strip(" ", 1, 0)])
    tokenizer.save(str(path))
    return path


def test_a_file_that_fastokens_cannot_load_is_read_by_tokenizers_with_one_warning(tmp_path):
    path = metaspace_file(tmp_path / "tokenizer.json")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokenizer = open_tokenizer(path)
    assert len(caught) == 1
    line = str(caught[0].message)
    assert line.startswith(f"{path}: fastokens cannot load the file (ValueError: ")
    assert line.endswith("; using tokenizers instead, which is slower")
    assert "\n" not in line
    texts = ["hi", "", "hi é"]
    ids, offsets = tokenizer.encode_batch(texts)
    assert ids.tolist() == [261, 261, 257, 1 + 0xC3, 1 + 0xA9]
    assert offsets.tolist() == [0, 1, 1, 5]
    assert [tokenizer.decode(ids[a:b]) for a, b in pairwise(offsets)] == texts
    assert b"".join(map(tokenizer.piece, ids.tolist()[1:])) == " hi é".encode()


def test_a_file_on_which_fastokens_differs_is_read_by_tokenizers_with_one_warning(trained_json, monkeypatch):
    expected = open_tokenizer(trained_json).encode("Hello")
    monkeypatch.setattr("chatmill.tokenizer.byte_bpe._bpe", None)
    load = fastokens.Tokenizer.from_json_str

    class Other:
        def __init__(self, content: str) -> None:
            self.engine = load(content)

        def encode_batch_flat(self, texts: list[str], *, split_special_tokens: bool) -> tuple[bytes, bytes]:
            changed = [text.replace("house", "mouse") for text in [*texts[:-1], texts[-1] + "!"]]
            return self.engine.encode_batch_flat(changed, split_special_tokens=split_special_tokens)

    monkeypatch.setattr(fastokens, "Tokenizer", type("Tokenizer", (), {"from_json_str": Other}))
    with pytest.warns(
        UserWarning,
        match="fastokens does not return the same ids as tokenizers for a probe text; using tokenizers instead",
    ) as caught:
        tokenizer = open_tokenizer(trained_json)
    assert len(caught) == 1
    assert tokenizer.encode("Hello") == expected
