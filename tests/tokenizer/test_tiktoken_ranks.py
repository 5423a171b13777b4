from __future__ import annotations

import base64
import json

import pytest
import tiktoken
from tokenizer_fixtures import CL100K, O200K, OLD_TEKKEN, TEKKEN

from chatmill.errors import DataError
from chatmill.tokenizer import open_tokenizer

BYTES = {bytes([byte]): byte for byte in range(256)}


def rank_lines(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


@pytest.mark.parametrize(
    ("path", "text", "ids", "end"),
    [
        (CL100K, "hello world 12345 don't", [15339, 1917, 220, 4513, 1774, 1541, 956], 100257),
        (O200K, "hello world", [24912, 2375], 199999),
    ],
)
def test_published_files_are_recognized_by_their_content(path, text, ids, end):
    tokenizer = open_tokenizer(path, control={"eot": "<|endoftext|>"})
    assert tokenizer.encode(text) == ids
    assert tokenizer.special_token_ids() == {"eot": end}
    assert end not in tokenizer.encode("<|endoftext|>")


def test_a_hole_in_the_vocabulary_is_one_line():
    tokenizer = open_tokenizer(CL100K)
    for ask in (lambda: tokenizer.piece(100256), lambda: tokenizer.decode([15339, 100256])):
        with pytest.raises(DataError) as caught:
            ask()
        assert "100256" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_file_of_unknown_origin_is_split_like_cl100k_with_a_warning(tmp_path):
    path = tmp_path / "tokenizer.model"
    ranks = {**BYTES, b"12": 256, b"34": 257, b"123": 258}
    path.write_bytes(rank_lines(ranks))
    with pytest.warns(UserWarning, match="assuming the pattern of cl100k_base, which Llama 3 uses") as caught:
        tokenizer = open_tokenizer(path)
    assert len(caught) == 1
    assert tokenizer.encode("1234") == [258, ord("4")]
    assert tokenizer.vocab_size == 259
    assert tokenizer.piece(258) == b"123"


def test_a_folder_gives_a_rank_file_its_special_tokens(tmp_path):
    (tmp_path / "small.tiktoken").write_bytes(rank_lines(BYTES))
    tokens = {"300": {"content": "<|begin|>", "special": True}, "302": {"content": "<|eot|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    with pytest.warns(UserWarning, match="cl100k_base"):
        tokenizer = open_tokenizer(tmp_path, control={"eot": "<|eot|>", "new": "<|new|>"}, add_tokens=True)
    assert tokenizer.special_token_ids() == {"eot": 302, "new": 303}
    assert tokenizer.decode([300, 97, 302, 303]) == "<|begin|>a<|eot|><|new|>"
    assert tokenizer.encode("<|eot|>") == list(b"<|eot|>")


@pytest.mark.parametrize(("path", "system"), [(OLD_TEKKEN, "[SYSTEM_PROMPT]"), (TEKKEN, "<SPECIAL_20>")])
def test_special_tokens_of_tekken_have_the_first_ids_and_ranks_follow(path, system):
    content = json.loads(path.read_text())
    first = content["config"]["default_num_special_tokens"]
    tokenizer = open_tokenizer(path, control={"bos": "<s>", "eos": "</s>", "inst": "[INST]", "more": system})
    ids = tokenizer.special_token_ids()
    assert (ids["bos"], ids["eos"], ids["inst"], first) == (1, 2, 3, 1000)
    assert ids["more"] == {"[SYSTEM_PROMPT]": 17, "<SPECIAL_20>": 20}[system]
    assert tokenizer.vocab_size == content["config"]["default_vocab_size"]
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in content["vocab"]}
    peer = tiktoken.Encoding(
        "peer",
        pat_str=content["config"]["pattern"],
        mergeable_ranks={token: rank for token, rank in ranks.items() if rank < tokenizer.vocab_size - first},
        special_tokens={},
    )
    text = "Hello, Welt! 你好 [INST] <s> 2024\n\n\tdef f(x): 😀"
    assert tokenizer.encode(text) == [rank + first for rank in peer.encode_ordinary(text)]
    assert tokenizer.piece(first + 72) == bytes([72])
