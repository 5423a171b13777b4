from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.errors import DataError
from chatmill.load import EpisodeLoader

GPT2 = {"token_kind": "gpt2", "chars": None, "base_vocab_size": 50257, "model_vocab_size": 50304}
CONTENT = {"content": "</s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
DECODER = {"0": {"content": "<unk>"}, "1": {"content": "<s>"}, "2": {**CONTENT, "special": True}}
FORMS: dict[str, tuple[Any, int]] = {
    "an id": ({"eot_token_id": 9}, 9),
    "tiktoken's name": ({"eot_token": 9, "n_vocab": 10}, 9),
    "eos": ({"vocab_size": 10, "bos_id": 1, "eos_id": 2, "pad_id": -1}, 2),
    "in camel case": ({"eosTokenId": 7}, 7),
    "id 0": ({"add_eos_token": True, "eos_token_id": 0}, 0),
    "several": ({"eos_token_id": [7, 8]}, 7),
    "as text": ({"eos_token_id": "7"}, 7),
    "by name": ({"special_token_ids": {"bos": 1, "eot": 9}}, 9),
    "by name, nested": ({"tokenizer": {"type": "bpe", "special_tokens": {"bos": 1, "eos": 9}}}, 9),
    "by text": ({"special_tokens": {"<|startoftext|>": 1, "<|endoftext|>": 9}}, 9),
    "with an object": ({"special_tokens": {"eos": {"id": 3, "content": "</s>"}}}, 3),
    "the turn end before the text end": ({"special_tokens": {"<|endoftext|>": 1, "<|im_end|>": 9}}, 9),
    "nanochat's": ({"special_tokens": {"<|bos|>": 1, "<|user_end|>": 2, "<|assistant_end|>": 9}}, 9),
    "a text and a vocabulary": ({"eos_token": "<|endoftext|>", "vocab": {"a": 0, "<|endoftext|>": 9}}, 9),
    "a text and ids by number": ({"eos_token": "</s>", "id_to_token": {"0": "a", "5": "</s>"}}, 5),
    "a text and a list": ({"eos_token": "<eos>", "itos": ["a", "b", "<eos>"]}, 2),
    "pieces with scores": ({"eos_token": "</s>", "model": {"vocab": [["<unk>", 0.0], ["</s>", -1.5]]}}, 1),
    "as tokenizer_config.json": ({"eos_token": CONTENT, "added_tokens_decoder": DECODER}, 2),
    "as tokenizer.json": ({"eos_token": "</s>", "added_tokens": [{"id": 4, "content": "</s>"}]}, 4),
    "only a vocabulary": ({"vocab": {"eos": 3, "end": 4, "</s>": 2}}, 2),
    "gpt2": (GPT2, 50256),
    "gpt2 with additional tokens": (
        {**GPT2, "special_token_encoder": {"<myPT_eot>": 50275}, "special_tokens_by_name": {"myPT_eot": 50275}},
        50275,
    ),
    "an encoding": ({"encoding_name": "cl100k_base"}, 100257),
    "an encoding and its token": ({"library": "tiktoken", "encoding": "o200k_base", "eos": "<|endoftext|>"}, 199999),
}
UNKNOWN: dict[str, Any] = {
    "nothing": {},
    "no JSON": ...,
    "no object": [9],
    "characters": {"token_kind": "char", "chars": ["a", "b"]},
    "none": {"eos_token": None, "eos_id": -1},
    "unrelated names": {"vocab": {"eos": 3, "end": 4}, "think_end_id": 3, "end": 10, "stop": 5, "num_eos": 2},
    "a text without a vocabulary": {"eos_token": "<|endoftext|>"},
    "a text that the encoding lacks": {"eos_token": "<|im_end|>", "encoding": "gpt2"},
    "two tokens for one name": {"special_tokens": {"<|eot|>": 3, "<eot>": 4}},
}


def store(folder: Path, state: Any, *, metadata: bool = True) -> Path:
    (folder / "train").mkdir(parents=True)
    np.array([5, 6, 7], np.uint32).tofile(folder / "train/tokens.bin")
    np.array([1, 1, 1], np.uint8).tofile(folder / "train/mask.bin")
    np.array([[0, 3]], np.uint64).tofile(folder / "train/episodes.idx")
    if metadata:
        (folder / "dataset_metadata.json").write_text('{"num_train_episodes": 1}')
    (folder / "tokenizer_state.json").write_text("{" if state is ... else json.dumps(state))
    return folder


def padded(folder: Path, **more: Any) -> list[int]:
    return EpisodeLoader(folder, {"batch_size": 1, "block_size": 4, **more}, tensors=False).get_batch().x[0].tolist()


@pytest.mark.parametrize("metadata", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_padded_with_the_end_token_of_the_tokenizer_files(tmp_path, form, metadata):
    state, id = FORMS[form]
    assert padded(store(tmp_path / "d", state, metadata=metadata)) == [5, 6, 7, id]


@pytest.mark.parametrize("form", UNKNOWN)
def test_without_an_end_token_one_line_names_pad_token_id(tmp_path, form):
    folder = store(tmp_path / "d", UNKNOWN[form])
    with pytest.raises(DataError) as error:
        padded(folder)
    assert str(error.value) == f"{folder}: does not record an end-of-turn token; set pad_token_id"
    assert padded(folder, pad_token_id=3) == [5, 6, 7, 3]


BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "vocab.json": ({"eos_token": "<|endoftext|>"}, {"vocab.json": {"a": 0, "<|endoftext|>": 8}}, 8),
    "tokenizer.json": (
        {"eos_token": "</s>"},
        {"tokenizer.json": {"added_tokens": [{"id": 2, "content": "</s>"}], "model": {"vocab": {"a": 0}}}},
        2,
    ),
    "special_tokens_map.json": (
        {"name": "mine"},
        {"special_tokens_map.json": {"eos_token": CONTENT}, "added_tokens.json": {"</s>": 6}},
        6,
    ),
    "tokenizer_config.json": (
        {"name": "mine"},
        {"tokenizer_config.json": {"eos_token": "</s>", "added_tokens_decoder": DECODER}},
        2,
    ),
}


@pytest.mark.parametrize("form", BESIDE)
def test_tokenizer_files_next_to_the_dataset_are_also_read(tmp_path, form):
    state, files, id = BESIDE[form]
    folder = store(tmp_path / "d", state)
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    assert padded(folder) == [5, 6, 7, id]


def test_a_chatmill_tokenizer_state_without_metadata_is_an_incomplete_copy(tmp_path):
    ours = {"name": "bytes", "sha256": "0" * 64, "vocab_size": 300, "control": {"eot": "<|eot|>"}}
    ours |= {"special_token_ids": {"eot": 9}, "added_tokens": []}
    for number, damaged in enumerate(({}, *({name: None} for name in ours))):
        state = {name: value for name, value in ours.items() if name not in damaged}
        folder = store(tmp_path / str(number), state, metadata=False)
        with pytest.raises(DataError, match="the build or the copy is incomplete"):
            padded(folder)
