from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatmill.records import shuffle_split
from chatmill.store import files
from chatmill.store.primer_cache import open_cache, verify_cache
from chatmill.tokenizer import open_tokenizer

USR, ASST, EOT = 261, 262, 263


def chat(*turns: tuple[str, str]) -> str:
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]}) + "\n"


def lines(count: int) -> str:
    return "".join(chat(("user", f"{number:02d}?"), ("assistant", f"{number:02d}!")) for number in range(count))


def primer(count: int = 20) -> None:
    Path("data").mkdir(exist_ok=True)
    Path("data/primer.jsonl").write_text(lines(count))


def contents(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def texts(path: str, split: str) -> list[str]:
    opened = open_tokenizer("bytes")
    episodes = open_cache(path)[split]
    return [opened.decode(episodes.tokens(number).tolist()) for number in range(len(episodes))]


def test_the_documented_command_prints_the_documented_summary(run):
    primer()
    flags = "--primer-jsonl data/primer.jsonl --out-dir data/cache/sft --seed 42 --val-frac 0.1 --t-max 1024"
    assert run("build-sft-primer", *flags.split()) == (
        0,
        "examples: 18 train, 2 val\n"
        "tokens:   180 train, 20 val\n"
        "labels:   72 train, 8 val\n"
        "written:  data/cache/sft/primer/train, data/cache/sft/primer/val\n",
        "",
    )
    assert sorted(contents("data/cache")) == [
        "data/cache/sft/primer/meta.json",
        "data/cache/sft/primer/train/shard_00000.bin",
        "data/cache/sft/primer/val/shard_00000.bin",
    ]
    assert verify_cache("data/cache/sft/primer", full=True).faults == ()


def test_rows_are_the_examples_in_shuffled_order(run):
    primer()
    run("build-sft-primer", "--val-frac", "0.25", "--seed", "7")
    split = shuffle_split(20, 0.25, seed=7)
    for name, numbers in split._asdict().items():
        right = [f"<|usr|>{number:02d}?<|eot|><|asst|>{number:02d}!<|eot|>" for number in numbers]
        assert texts("data/cache/sft/primer", name) == right
    train = open_cache("data/cache/sft/primer")["train"]
    assert train.mask(0).tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_all_flags_have_defaults(run):
    primer()
    assert run("build-sft-primer")[0] == 0
    meta = open_cache("data/cache/sft/primer").meta
    assert (meta.val_frac, meta.seed, meta.T_max, meta.splits["val"].num_examples) == (0.1, 42, 1024, 2)


def test_the_bytes_do_not_depend_on_the_name_of_the_input(run):
    primer()
    Path("other.jsonl").write_text(lines(20))
    run("build-sft-primer")
    before = contents("data/cache/sft/primer")
    assert run("build-sft-primer", "--primer-jsonl", "other.jsonl", "--overwrite")[0] == 0
    assert contents("data/cache/sft/primer") == before
    assert run("build-sft-primer", "--seed", "43", "--overwrite")[0] == 0
    assert contents("data/cache/sft/primer") != before


def test_long_rows_keep_their_last_tokens_and_the_cut_is_reported(run):
    Path("p.jsonl").write_text(
        chat(("user", "long"), ("assistant", "answer")) + chat(("assistant", "a"), ("user", "bc"))
    )
    code, out, _ = run(
        "build-sft-primer", "--primer-jsonl", "p.jsonl", "--val-frac", "0", "--t-max", "4", "--seed", "1"
    )
    assert (code, out.splitlines()[4:]) == (
        0,
        [
            "  truncated tail: 13 tokens",
            "  noted answer_cut: 1 row, 4 tokens",
            "  noted no_trained_tokens: 1 row, 4 tokens",
        ],
    )
    train = open_cache("data/cache/sft/primer")["train"]
    rows = {tuple(train.tokens(number).tolist()): train.mask(number).tolist() for number in range(2)}
    assert rows == {(*b"wer", EOT): [1, 1, 1, 1], (USR, *b"bc", EOT): [0, 0, 0, 0]}


def test_json_gives_paths_counts_and_the_ledger(run):
    primer(10)
    code, out, err = run("build-sft-primer", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["sha256"] == open_cache("data/cache/sft/primer").sha256
    assert found["path"] == "data/cache/sft/primer"
    assert found["splits"] == {
        "train": {
            "path": "data/cache/sft/primer/train",
            "num_examples": 9,
            "num_tokens": 90,
            "num_label_tokens": 36,
            "num_shards": 1,
        },
        "val": {
            "path": "data/cache/sft/primer/val",
            "num_examples": 1,
            "num_tokens": 10,
            "num_label_tokens": 4,
            "num_shards": 1,
        },
    }
    assert found["ledger"]["stored"] == {"": {"rows": 10, "tokens": 100, "trained": 40}}


def test_an_empty_validation_split_is_reported_unless_it_was_requested(run):
    primer(9)
    assert run("build-sft-primer", "--val-frac", "0")[2] == ""
    assert list(Path("data/cache/sft/primer/val").iterdir()) == []
    code, _, err = run("build-sft-primer", "--overwrite")
    assert (code, err) == (0, "no validation rows: 0.1 of 9 examples, rounded down, is 0\n")


def test_missing_control_tokens_are_refused_or_added(run):
    primer()
    run("tokenizer", "train", "data/primer.jsonl", "--vocab-size", "259", "-o", "tok.json")
    code, _, err = run("build-sft-primer", "--tokenizer", "tok.json")
    assert code == 2
    assert "<|eot|>; add them with --add-tokens" in err
    assert not Path("data/cache").exists()
    assert run("build-sft-primer", "--tokenizer", "tok.json", "--add-tokens")[0] == 0
    meta = open_cache("data/cache/sft/primer").meta
    assert (meta.vocab_size, meta.special_token_ids["eot"]) == (263, 262)


# Tests of the commands build-sft-dolly15k and build-sft-oasst1.


def test_dolly_and_openassistant_are_built_alike(run):
    Path("d.jsonl").write_text('{"instruction": "i", "context": "c", "response": "r", "category": "x"}\n' * 4)
    tree = {
        "message_tree_id": "t",
        "prompt": {"text": "q", "role": "prompter", "replies": [{"text": "a", "role": "assistant", "replies": []}]},
    }
    Path("o.jsonl").write_text((json.dumps(tree) + "\n") * 4)
    assert run("build-sft-dolly15k", "--input", "d.jsonl", "--val-frac", "0.5")[0] == 0
    assert run("build-sft-oasst1", "--input", "o.jsonl", "--val-frac", "0.5")[0] == 0
    for split in ("train", "val"):
        assert texts("data/cache/sft/dolly15k", split) == ["<|usr|>i\n\nc<|eot|><|asst|>r<|eot|>"] * 2
        assert texts("data/cache/sft/oasst1", split) == ["<|usr|>q<|eot|><|asst|>a<|eot|>"] * 2
    assert open_cache("data/cache/sft/oasst1").meta.source == "oasst1"


def test_invalid_records_of_other_sources_can_be_skipped(run):
    good = '{"message_tree_id": "t", "prompt": {"text": "q", "role": "prompter", "replies": [%s]}}\n'
    answer = '{"text": "a", "role": "assistant", "replies": []}'
    Path("o.jsonl").write_text(good % answer + good % "" + "{\n" + good % answer)
    build = ("build-sft-oasst1", "--input", "o.jsonl", "--val-frac", "0")
    assert run(*build) == (
        1,
        "",
        "chatmill: o.jsonl:2 (id=t): no message has role assistant; "
        "expected at least one assistant message to train on\n",
    )
    code, out, err = run(*build, "--on-error", "skip", "--rejects", "bad.jsonl")
    assert (code, out.splitlines()[0]) == (0, "examples: 2 train, 0 val")
    assert err.startswith("rejected 2: ")
    assert err.endswith("see bad.jsonl\n")
    assert sorted(json.loads(line)["line"] for line in Path("bad.jsonl").read_text().splitlines()) == [2, 3]
    ledger = open_cache("data/cache/sft/oasst1").meta.ledger
    assert (ledger.total("read").rows, ledger.total("rejected").rows) == (4, 2)
    Path("o.jsonl").write_text("{\n")
    code, _, err = run(*build, "--on-error", "skip", "--overwrite")
    assert (code, err) == (
        1,
        "chatmill: o.jsonl: all records were rejected (see data/cache/sft/oasst1.rejects.jsonl); "
        "expected at least one valid record\n",
    )


def test_a_source_without_a_default_file_asks_for_one(run):
    code, _, err = run("build-sft-oasst1")
    assert (code, err) == (2, "chatmill: no input; pass --input, or set data.oasst1.path in chatmill.toml\n")


# Settings.

SETTINGS = """
[data.primer]
path = "mine.jsonl"
val_frac = 0.5
[data.caches]
sft_token_cache = "caches"
[training]
seed = 7
[model]
T = 8
"""


def test_flags_override_the_settings_file(run):
    Path("mine.jsonl").write_text(lines(10))
    Path("chatmill.toml").write_text(SETTINGS)
    assert run("build-sft-primer")[0] == 0
    meta = open_cache("caches/primer").meta
    assert (meta.val_frac, meta.seed, meta.T_max, meta.splits["val"].num_examples) == (0.5, 7, 8, 5)
    flags = ("--seed", "9", "--val-frac", "0.2", "--t-max", "100", "--out-dir", "other")
    assert run("build-sft-primer", *flags)[0] == 0
    meta = open_cache("other/primer").meta
    assert (meta.val_frac, meta.seed, meta.T_max, meta.splits["val"].num_examples) == (0.2, 9, 100, 2)


def test_each_source_has_its_own_path_and_share(run):
    Path("d.jsonl").write_text('{"instruction": "i", "response": "r"}\n' * 10)
    Path("chatmill.toml").write_text(SETTINGS + '[data.dolly15k]\npath = "d.jsonl"\nval_frac = 0\n')
    assert run("build-sft-dolly15k")[0] == 0
    assert open_cache("caches/dolly15k").meta.splits["train"].num_examples == 10


def test_all_errors_of_settings_and_flags_are_reported_in_one_line(run):
    primer()
    Path("chatmill.toml").write_text(
        'model.T = "long"\ntraining.seed = true\ntraining.sed = 1\ndata.primer.val_frac = 1\n[data.caches]\n'
    )
    code, out, err = run("build-sft-primer", "--t-max", "1")
    known = (
        "data.caches.sft_token_cache, data.dolly15k.path, data.dolly15k.val_frac, data.mix_sft, data.oasst1.path, "
        "data.oasst1.val_frac, data.primer.path, data.primer.val_frac, model.T, tokenizer.add_tokens, tokenizer.path, "
        "training.seed"
    )
    assert (code, out) == (2, "")
    assert err == (
        "chatmill: chatmill.toml: model.T is 'long'; expected an integer from 2 to 2147483648; "
        "chatmill.toml: training.seed is True; expected an integer from 0 to 2147483648; "
        "chatmill.toml: data.primer.val_frac is 1; expected a number of at least 0 and below 1; "
        f'chatmill.toml: unknown key "training.sed", unknown key "data.caches" (known: {known}); '
        "--t-max is 1; expected an integer from 2 to 2147483648\n"
    )


@pytest.mark.parametrize("content", [b"model = [", b"\xff", b"model.T = 1\nmodel.T = 2"])
def test_a_settings_file_that_cannot_be_read_is_reported_in_one_line(run, content):
    primer()
    Path("chatmill.toml").write_bytes(content)
    code, out, err = run("build-sft-primer")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("chatmill: chatmill.toml: ")


# Bad input.

GOOD = chat(("user", "q"), ("assistant", "a"))


@pytest.mark.parametrize(
    ("content", "args", "code", "line"),
    [
        (None, [], 1, "data/primer.jsonl: no such file"),
        (b"", [], 1, "data/primer.jsonl: no records"),
        (b"\n\n", [], 1, "data/primer.jsonl: no records"),
        (GOOD.encode() + b"{", [], 1, "data/primer.jsonl:2: "),
        (GOOD.encode() + b"\xff\n", [], 1, "data/primer.jsonl:2: "),
        (b'{"messages": []}\n', [], 1, "data/primer.jsonl:1: "),
        (b'{"messages": [{"role": "tool", "content": "x"}]}\n', [], 1, "data/primer.jsonl:1: "),
        (b'{"messages": [{"role": "user", "content": 1}]}\n', [], 1, "data/primer.jsonl:1: "),
        (b'{"messages": [{"role": "user", "content": "", "name": "n"}]}\n', [], 1, "data/primer.jsonl:1: "),
        (GOOD.encode() + chat(("user", "q")).encode(), [], 1, "data/primer.jsonl:2: no message has role assistant"),
        (GOOD.encode(), ["--val-frac", "1"], 2, "--val-frac is 1.0"),
        (GOOD.encode(), ["--val-frac", "-0.1"], 2, "--val-frac is -0.1"),
        (GOOD.encode(), ["--val-frac", "nan"], 2, "--val-frac is nan"),
        (GOOD.encode(), ["--t-max", "1"], 2, "--t-max is 1"),
        (GOOD.encode(), ["--seed", "-1"], 2, "--seed is -1"),
        (GOOD.encode(), ["--tokenizer", "none.json"], 1, "none.json"),
        (GOOD.encode(), ["--out-dir", "data/primer.jsonl"], 1, "data/primer.jsonl"),
    ],
)
def test_a_failed_build_is_reported_in_one_line_and_publishes_nothing(run, content, args, code, line):
    Path("data").mkdir()
    if content is not None:
        Path("data/primer.jsonl").write_bytes(content)
    found, out, err = run("build-sft-primer", *args)
    assert (found, out) == (code, "")
    assert line in err
    assert err.count("\n") == 1
    assert err.startswith("chatmill: ")
    assert sorted(contents(".")) == (["data/primer.jsonl"] if content is not None else [])


def test_an_existing_cache_is_kept_unless_overwrite_is_given(run):
    primer()
    run("build-sft-primer")
    before = contents("data/cache")
    code, _, err = run("build-sft-primer", "--seed", "1")
    assert (code, err) == (
        1,
        "chatmill: data/cache/sft/primer: already exists; use another name or pass --overwrite\n",
    )
    assert contents("data/cache") == before
    Path("data/primer.jsonl").write_text("{\n")
    assert run("build-sft-primer", "--overwrite")[0] == 1
    assert contents("data/cache") == before


def test_an_input_inside_the_cache_it_would_replace_is_refused(run):
    primer()
    run("build-sft-primer")
    Path("data/primer.jsonl").rename("data/cache/sft/primer/primer.jsonl")
    code, _, err = run("build-sft-primer", "--primer-jsonl", "data/cache/sft/primer/primer.jsonl", "--overwrite")
    assert code == 1
    assert "primer: is not replaced, because meta.json does not list primer.jsonl" in err
    assert Path("data/cache/sft/primer/primer.jsonl").is_file()


def test_a_full_disk_is_reported_in_one_line_and_leaves_no_files(run, monkeypatch):
    class Full(files.Disk):
        def write(self, fd, data):
            raise OSError(28, "No space left on device")

    primer()
    monkeypatch.setattr(files, "disk", Full())
    code, _, err = run("build-sft-primer")
    assert (code, err) == (
        1,
        "chatmill: data/cache/sft/.primer.building/train/shard_00000.bin: No space left on device\n",
    )
    assert sorted(contents("data")) == ["data/primer.jsonl"]
