from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from chatmill.format import TurnRenderer, load_format
from chatmill.records import Message, Record
from chatmill.rollout.target import build_answer
from chatmill.rollout.vocabulary import COORDINATES
from chatmill.rows import Part
from chatmill.store.read import open_dataset
from chatmill.tokenizer import open_tokenizer

FORMAT = load_format("chatml")
CAT, DOG = {"desc": "cat", "bbox_2d": [10, 20, 300, 400]}, {"desc": "dog", "bbox_2d": [500, 500, 700, 800]}


@pytest.fixture
def tokenizer():
    return open_tokenizer("bytes", control=FORMAT.tokens, besides=COORDINATES, add_tokens=True)


@pytest.fixture
def files(tokenizer, tmp_path):
    truth = [
        {"id": 1, "messages": [{"role": "user", "content": "what is here?"}], "objects": [CAT, DOG]},
        {"id": "two", "messages": [{"role": "user", "content": "and here?"}], "objects": []},
    ]
    full = build_answer([CAT, DOG], tokenizer=tokenizer).ids.tolist()
    prompt = TurnRenderer(FORMAT, tokenizer).prompt_ids(Record([Message("user", "what is here?")]))
    rollouts = [
        {"id": "1", "response_token_ids": full, "prompt_token_ids": prompt},
        {"id": "1", "response_token_ids": full[:80], "step": 3, "row": 1},
        {"id": "two", "response_token_ids": [104, 105]},
    ]
    write(tmp_path / "truth.jsonl", truth)
    write(tmp_path / "rollouts.jsonl", rollouts)
    return truth, rollouts


def write(path: Path, lines: list) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


BUILD = ("rollout", "build", "rollouts.jsonl", "truth.jsonl", "-o", "out", "--add-tokens")


def test_rollouts_become_a_dataset_that_verifies_and_reads_back(run, files, tokenizer):
    code, out, err = run(*BUILD, "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert said["train"]["episodes"] == 3
    assert {key: value for key, value in said["health"].items() if value} == {
        "rollouts": 3,
        "valid": 3,
        "dropped": {"incomplete": 1},
        "truncated": 1,
        "fallback": {"no_brace": 1},
        "matched": 3,
        "missed": 1,
        "slots": 12,
        "rollout_tokens": said["health"]["rollout_tokens"],
        "kept_tokens": said["health"]["kept_tokens"],
        "target_tokens": said["health"]["target_tokens"],
        "trained_tokens": said["train"]["trained_tokens"],
    }
    assert run("verify", "out", "--full")[0] == 0
    rows = open_dataset("out")["train"].rows([0, 1, 2])
    assert [int(line) for line in rows.origins["line"]] == [1, 1, 2]
    assert {file.path for file in rows.files} == {"truth.jsonl"}
    first = rows[:1]
    slots = first.spans[first.spans["part"] == Part.SLOT]
    assert slots["target"].tolist() == [
        tokenizer.token_id(f"<|coord_{k}|>") for k in (*CAT["bbox_2d"], *DOG["bbox_2d"])
    ]
    text = tokenizer.decode(rows[1:2].ids.tolist())
    assert text.startswith(
        '<|im_start|>user\nwhat is here?<|im_end|>\n<|im_start|>assistant\n{"object_1": {"desc": "cat"'
    )
    assert text.endswith('"<|coord_800|>"]}}<|im_end|>')
    assert np.array_equal(rows[2:3].ids[-3:], [*b"{}", tokenizer.special_token_ids()["eot"]])


def test_the_summary_describes_the_dataset(run, files):
    code, out, _ = run(*BUILD)
    assert code == 0
    assert "out/train: 3 episodes" in out
    assert "true objects 4: 3 found (75.0%), 1 appended; 0 false positives" in out
    assert "entries dropped: 1 incomplete" in out and "nothing kept: 1 no_brace" in out
    assert "rollouts with an incomplete answer: 1" in out


def test_the_same_files_give_the_same_bytes_and_values_may_be_left_out(run, files):
    run(*BUILD)
    hashes = [
        json.loads(run(*BUILD, "--overwrite", "--json", *more)[1])["sha256"] for more in ([], ["--no-train-values"])
    ]
    assert hashes[0] == json.loads(run(*BUILD, "--overwrite", "--json")[1])["sha256"] != hashes[1]
    run(*BUILD, "--overwrite", "--no-train-values")
    rows = open_dataset("out")["train"].rows([1])
    values = rows.spans[rows.spans["part"] == Part.VALUE]
    assert values["weight"].tolist() == [0.0]


def test_rollout_answers_builds_a_dataset_of_true_answers(run, files, tokenizer):
    code, out, _ = run("rollout", "answers", "truth.jsonl", "-o", "out", "--add-tokens")
    assert code == 0 and "out/train: 2 episodes" in out
    assert run("verify", "out", "--full")[0] == 0
    rows = open_dataset("out")["train"].rows([0, 1])
    answer = build_answer([CAT, DOG], tokenizer=tokenizer)
    assert rows[:1].ids.tolist()[-len(answer.ids) :] == answer.ids.tolist()
    assert rows[:1].mask().tolist() == [False] * (len(rows[:1].ids) - len(answer.ids)) + [True] * len(answer.ids)
    assert tokenizer.decode(rows[1:2].ids.tolist()).endswith("assistant\n{}<|im_end|>")


def test_keys_of_the_truth_that_are_not_read_are_named(run, files, tmp_path):
    truth, _ = files
    write(tmp_path / "truth.jsonl", [{**record, "score": 1} for record in truth])
    for command in (["build", "rollouts.jsonl", "truth.jsonl"], ["answers", "truth.jsonl"]):
        code, out, _ = run("rollout", *command, "-o", command[0], "--add-tokens")
        assert code == 0
        assert 'note: 2 records have the key "score", which is not read' in out.splitlines()


def test_fields_need_no_coordinates(run, tmp_path):
    chat = [{"role": "user", "content": "who?"}]
    write(tmp_path / "truth.jsonl", [{"id": 1, "messages": chat, "objects": [{"name": "Ada", "born": 1815}]}])
    answer = list(b'{"object_1": {"name": "Ada", "born": 1815}}')
    write(tmp_path / "rollouts.jsonl", [{"id": "1", "response_token_ids": answer}])
    code, out, _ = run(*BUILD[:-1], "--fields", "name, born", "--json")
    assert (code, json.loads(out)["health"]["matched"]) == (0, 1)


ANSWERED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("truth.jsonl", lambda lines: lines[0].pop("id"), "truth.jsonl:1: the record has no id"),
        ("truth.jsonl", lambda lines: lines[1].update(id=1), "truth.jsonl:2 (id=1): the id is already used in line 1"),
        ("truth.jsonl", lambda lines: lines[0].pop("objects"), "the record has no objects"),
        ("truth.jsonl", lambda lines: lines[0].update(objects=3), "objects is a number"),
        ("truth.jsonl", lambda lines: lines[0].update(objects=[CAT, 3]), "objects[1] is a number"),
        (
            "truth.jsonl",
            lambda lines: lines[0].update(objects=[{"desc": "x"}]),
            "(id=1): a ground-truth object does not match",
        ),
        ("truth.jsonl", lambda lines: lines[0].update(messages=ANSWERED), "the last message is an assistant message"),
        ("truth.jsonl", lambda lines: lines[0].update(messages=[]), "truth.jsonl:1 (id=1): "),
        ("rollouts.jsonl", lambda lines: lines[0].update(id="9"), "rollouts.jsonl:1 (id=9): the rollout has an"),
        ("rollouts.jsonl", lambda lines: lines[0].pop("response_token_ids"), "rollouts.jsonl:1: is not a rollout"),
        ("rollouts.jsonl", lambda lines: lines[0].update(extra=1), "rollouts.jsonl:1: is not a rollout"),
        (
            "rollouts.jsonl",
            lambda lines: lines[0].update(prompt_token_ids=[1]),
            "truth.jsonl:1 (id=1): the prompt for training differs",
        ),
        ("rollouts.jsonl", lambda lines: lines.clear(), "rollouts.jsonl: contains no rollout"),
    ],
)
def test_every_error_is_reported_in_one_line_and_leaves_no_files(run, files, tmp_path, file, change, said):
    truth, rollouts = files
    lines = truth if file == "truth.jsonl" else rollouts
    change(lines)
    write(tmp_path / file, lines)
    code, out, err = run(*BUILD)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert said in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rollouts.jsonl", "truth.jsonl"]


def test_missing_coordinates_and_wrong_flags_are_usage_errors(run, files):
    for more, said in (
        ([], "lacks the control tokens <|coord_0|>"),
        (["--add-tokens", "--gate", "0"], "gate is 0; expected a number above 0"),
        (["--add-tokens", "--fields", "a,a"], "without duplicates"),
        (["--add-tokens", "--format", "nope"], 'no format "nope"'),
    ):
        code, _, err = run(*BUILD[:-1], *more)
        assert code == 2 and said in err and err.count("\n") == 1


def test_an_existing_dataset_is_replaced_only_with_overwrite(run, files):
    run(*BUILD)
    code, _, err = run(*BUILD)
    assert code == 1 and "already exists" in err


def test_a_glob_must_match_one_file(run, files):
    line = "chatmill: *.jsonl: matches 2 files; expected one file\n"
    assert run("rollout", "answers", "*.jsonl", "-o", "out", "--add-tokens") == (2, "", line)
    assert run("rollout", "build", "*.jsonl", "truth.jsonl", "-o", "out", "--add-tokens") == (2, "", line)
    assert run("rollout", "answers", "t*.jsonl", "-o", "out", "--add-tokens")[0] == 0
