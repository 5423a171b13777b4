from __future__ import annotations

import base64
import json
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from tokenizer_fixtures import CL100K, MISTRAL_V1, TEKKEN, edited

from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.tokenizer import open_tokenizer
from chatmill.tokenizer.backend import faults_of

RIGHT = "expected a tokenizer.json, a SentencePiece model, tiktoken ranks or a tekken JSON file"


def line_of(path: str | Path, kind: type[ChatmillError] = DataError) -> str:
    with pytest.raises(kind) as caught:
        open_tokenizer(path)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"{path}:")
    return line.removeprefix(f"{path}:").strip()


def test_a_missing_file_is_one_line(tmp_path):
    assert (
        line_of(tmp_path / "none.json") == f"no such file or folder; {RIGHT}, a Hugging Face folder, or the name bytes"
    )
    assert line_of("bites") == f"no such file or folder; {RIGHT}, a Hugging Face folder, or the name bytes"


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    path = tmp_path / "loop.json"
    path.symlink_to(path)
    assert line_of(path).startswith("cannot be read (")


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path):
    (tmp_path / "README.md").write_text("no tokenizer here")
    right = "expected tokenizer.json, tokenizer.model or tekken.json"
    assert line_of(tmp_path) == f"the folder contains no tokenizer; {right}"


@pytest.mark.parametrize(
    ("name", "raw", "line"),
    [
        ("tokenizer.json", b"", f"the file is empty; {RIGHT}"),
        ("tokenizer.json", b" \n\n", f"the file is empty; {RIGHT}"),
        ("x.model", b"", f"the file is empty; {RIGHT}"),
        (
            "tokenizer.json",
            b'{"model": {"vocab": {"a": 0',
            "not valid JSON (DecodeError: Input data was truncated); the file is damaged or truncated",
        ),
        ("tokenizer.json", b"[" * 100_000, "not valid JSON (RecursionError: "),
        ("tokenizer.json", b"hello", "not valid JSON (DecodeError: "),
        ("tokenizer.json", b'{"model": {"vocab": {"\xff": 0}}}', "not valid JSON ("),
        ("tokenizer.json", b"[1, 2]", f"JSON, but not a tokenizer: the top level is a list; {RIGHT}"),
        (
            "tokenizer.json",
            b'{"a": 1}',
            f"JSON, but not a tokenizer: it has neither model.vocab nor config.pattern; {RIGHT}",
        ),
        ("tokenizer.json", b'{"model": {"vocab": 7}}', "cannot load the tokenizer.json ("),
        ("tekken.json", b'{"config": {"pattern": "."}}', "cannot read the tekken file (KeyError: "),
        (
            "x.model",
            b"\x89PNG\r\n\x1a\n",
            f"not a tokenizer: neither JSON, tiktoken ranks nor a SentencePiece model; {RIGHT}",
        ),
        (
            "notes.txt",
            b"# Notes\n",
            f"not a tokenizer: neither JSON, tiktoken ranks nor a SentencePiece model; {RIGHT}",
        ),
        (
            "x.model",
            b"\x0a" + random.Random(0).randbytes(999),
            "cannot load the SentencePiece model (DecodeError",
        ),
        ("x.model", MISTRAL_V1.read_bytes()[:1000], "cannot load the SentencePiece model (DecodeError"),
        ("x.model", b"\x0a\x03\x0a\x01a", "cannot load the SentencePiece model (RuntimeError"),
        ("x.tiktoken", b"YQ== 0\nYg== 1\n", "the rank is missing for 254 of the 256 single bytes"),
        (
            "x.tiktoken",
            b"YQ== 0\n\nnonsense\n",
            '3: "nonsense" is not a rank; expected a token in base64, a space and a number',
        ),
        ("x.tiktoken", b"YQ== 0\nYg= 1\n", "a token is not base64 (Error: Incorrect padding); expected "),
    ],
)
def test_a_bad_file_is_one_line(name, raw, line, tmp_path):
    path = tmp_path / name
    path.write_bytes(raw)
    assert line_of(path).startswith(line)


@pytest.mark.parametrize(
    "change",
    [
        {"added_tokens": 7},
        {"added_tokens": [7]},
        {"added_tokens": [{"id": "0", "content": "<x>", "special": True}]},
        {"added_tokens": [{"content": "<x>", "special": True}]},
        {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 5}},
        {"model": {"type": "Unigram", "vocab": [["a"]]}},
        {"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}},
        {"model": {"type": "BPE", "vocab": {"a": "x"}, "merges": []}},
        {"added_tokens": [], "model": {"type": "Magic", "vocab": {"a": 0}}},
        {"pre_tokenizer": {"type": "Magic"}},
        {"decoder": 7},
    ],
)
def test_a_tokenizer_json_with_a_wrong_part_is_one_line(change, trained, tmp_path):
    path = edited(trained, tmp_path / "tokenizer.json", **change)
    assert line_of(path).startswith("cannot load the tokenizer.json (")


def test_an_added_token_with_the_id_of_another_is_one_line(trained, tmp_path):
    wrong = [{"id": 300, "content": "<x>", "special": True}]
    path = edited(trained, tmp_path / "tokenizer.json", added_tokens=wrong)
    what = 'added token "<x>" is listed with id 300, which differs from its id in the model'
    assert line_of(path) == f"{what}; the file is damaged"


def test_a_merge_without_the_prefix_of_its_model_is_one_line(trained, tmp_path):
    """The Rust library would abort the process, because it removes the prefix without checking that there is one."""
    model = {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": [["a", "b"]],
        "continuing_subword_prefix": "##",
    }
    path = edited(trained, tmp_path / "tokenizer.json", added_tokens=[], model=model)
    what = 'a merge ends with "b", without the continuing_subword_prefix "##"'
    assert line_of(path) == f"{what}; the file is damaged"


def test_an_absurd_id_is_one_line(trained, tmp_path):
    far = [{"id": 4_000_000_000, "content": "<x>", "special": True}]
    path = edited(trained, tmp_path / "tokenizer.json", added_tokens=far)
    assert line_of(path) == "a token has id 4000000000; expected ids below 16777216"


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ("{", "not valid JSON"),
        ('{"added_tokens_decoder": [1]}', "cannot be read (AttributeError"),
        ('{"added_tokens_decoder": {"x": {"content": "<x>"}}}', "cannot be read (ValueError"),
        ('{"added_tokens_decoder": {"5": {"special": true}}}', "cannot be read (KeyError"),
    ],
)
def test_a_bad_tokenizer_config_is_one_line(config, line, trained, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(trained)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(DataError) as caught:
        open_tokenizer(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'tokenizer_config.json'}: {line}")


def small_files(trained: bytes) -> dict[str, bytes]:
    ranks = [(base64.b64encode(token).decode(), rank) for rank, token in enumerate([bytes([b]) for b in range(256)])]
    tekken = {
        "config": {"pattern": r"\S+|\s+", "default_num_special_tokens": 30, "default_vocab_size": 286},
        "vocab": [{"rank": rank, "token_bytes": token} for token, rank in ranks],
    }
    return {
        "tokenizer.json": trained,
        "tekken.json": json.dumps(tekken).encode(),
        "small.tiktoken": "".join(f"{token} {rank}\n" for token, rank in ranks).encode(),
    }


def test_a_damaged_file_opens_or_is_one_line(trained, trained_model, tmp_path):
    rng = random.Random(4)
    refused = 0
    for name, raw in {**small_files(trained), "small.model": trained_model.read_bytes()}.items():
        for _ in range(60):
            damaged = bytearray(raw[: rng.randrange(len(raw))] if rng.random() < 0.2 else raw)
            for _ in range(rng.randrange(1, 5)):
                damaged[rng.randrange(len(damaged))] = rng.choice(b'09",:{}[]\x00\xff')
            (tmp_path / name).write_bytes(damaged)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                line = ""
                try:
                    open_tokenizer(tmp_path / name).encode("Hello <|eot|> é你\n")
                except ChatmillError as error:
                    line = str(error)
            assert "\n" not in line
            refused += bool(line)
    assert refused > 100


@pytest.mark.parametrize(
    ("path", "module", "line"),
    [
        (
            MISTRAL_V1,
            "sentencepiece",
            "a SentencePiece model requires sentencepiece; pip install 'chatmill[sentencepiece]'",
        ),
        (MISTRAL_V1, "google", "a SentencePiece model requires sentencepiece; pip install 'chatmill[sentencepiece]'"),
        (CL100K, "tiktoken", "a tiktoken vocabulary requires tiktoken; pip install 'chatmill[tiktoken]'"),
        (TEKKEN, "tiktoken", "a tiktoken vocabulary requires tiktoken; pip install 'chatmill[tiktoken]'"),
    ],
)
def test_a_missing_library_is_one_line_with_the_command_that_installs_it(path, module, line, monkeypatch):
    for loaded in [name for name in sys.modules if name.split(".")[0] in (module, "sentencepiece")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    assert line_of(path, UsageError) == line


def test_a_library_panic_is_one_line_and_an_interrupt_is_not_caught():
    panic: Any = type("PanicException", (BaseException,), {})
    with pytest.raises(DataError) as caught, faults_of("x.json", "cannot be loaded", "correct it"):
        raise panic("no entry\nfound")
    assert str(caught.value) == "x.json: cannot be loaded (PanicException: no entry\\nfound); correct it"
    with pytest.raises(KeyboardInterrupt), faults_of("x.json", "cannot be loaded", "correct it"):
        raise KeyboardInterrupt
