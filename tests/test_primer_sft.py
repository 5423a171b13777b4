from __future__ import annotations

import json

from chatmill import render_chat_sft
from chatmill.prepare import CountedRecords
from chatmill.prepare.primer import CacheConfig, build_cache
from chatmill.records import read_records, shuffle_split
from chatmill.tokenizer import open_tokenizer

SYS, USR, ASST, EOT = 1, 2, 3, 4


class WordTokenizer:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def special_token_ids(self) -> dict[str, int]:
        return {"sys": SYS, "usr": USR, "asst": ASST, "eot": EOT}


def write_primer(path, count):
    lines = [
        {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"{number}!"}]}
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_only_assistant_content_and_its_end_are_labelled():
    messages = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
    ]
    ids, labels = render_chat_sft(WordTokenizer(), messages)
    b, e, h, i, y, o = (ord(letter) for letter in "behiyo")
    assert ids == [SYS, b, e, EOT, USR, h, i, EOT, ASST, y, o, EOT]
    assert labels == [-100] * 9 + [y, o, EOT]


def test_one_seed_gives_one_split_of_a_file(tmp_path):
    records = list(read_records([write_primer(tmp_path / "primer.jsonl", 25)], shape="primer"))
    once = shuffle_split(len(records), 0.2, seed=42)
    again = shuffle_split(len(records), 0.2, seed=42)
    assert (once.train, once.val) == (again.train, again.val)
    assert (len(once.train), len(once.val)) == (20, 5)
    assert sorted(once.train + once.val) == list(range(25))
    assert once != shuffle_split(len(records), 0.2, seed=43)


def test_a_build_leaves_documented_metadata_and_shards_in_both_splits(tmp_path):
    path = str(write_primer(tmp_path / "primer.jsonl", 10))
    config = CacheConfig(path=path, out_dir=str(tmp_path), seed=42, val_frac=0.2, t_max=6)
    build_cache("primer", config, CountedRecords([path], shape="primer"))
    meta = json.loads((tmp_path / "primer" / "meta.json").read_text())
    assert meta["source"] == "primer"
    assert meta["tokenizer_sha256"] == open_tokenizer("bytes").sha256
    assert meta["special_token_ids"] == {"sys": 260, "usr": 261, "asst": 262, "eot": 263}
    assert (meta["val_frac"], meta["seed"], meta["T_max"]) == (0.2, 42, 6)
    for name, examples in (("train", 8), ("val", 2)):
        split = meta["splits"][name]
        # <|usr|> 7 ? <|eot|> <|asst|> 7 ! <|eot|>: T_max keeps the last six tokens, and the mask includes three of
        # them.
        counts = {"num_examples": examples, "num_tokens": 6 * examples, "num_label_tokens": 3 * examples}
        assert {key: split[key] for key in counts} == counts
        assert split["num_shards"] == 1
        assert split["shard_size"] >= split["num_tokens"]
        shards = sorted(path.name for path in (tmp_path / "primer" / name).iterdir())
        assert shards == ["shard_00000.bin"]
