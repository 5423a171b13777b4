from __future__ import annotations

import json
from pathlib import Path

import pytest

FOUR = ["hi", "yo", "so", "what"]


def line(*texts: str) -> str:
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return json.dumps({"messages": turns}) + "\n"


@pytest.fixture
def run(run):
    Path("chat.jsonl").write_text(line("a", "b") + line(*FOUR))
    assert run("prepare", "chat.jsonl", "-o", "v1", "--format", "primer", "--workers", "1")[0] == 0
    return run


def test_reweigh_reports_trained_tokens_and_shared_files(run):
    code, out, err = run("reweigh", "v1", "--train-on", "last", "-o", "v2")
    sha256 = json.loads(Path("v2/dataset_metadata.json").read_text())["sha256"]
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "train: 2 episodes, 24 tokens, 7 (29.2%) trained, previously 10 (41.7%)",
        "3 files are shared with v1",
        f"v2: sha256 {sha256}",
    ]
    assert run("verify", "v2", "--full")[0] == 0
    code, out, _ = run("reweigh", "v1", "--train-on", "last", "-o", "v3", "--json")
    parent = json.loads(Path("v1/dataset_metadata.json").read_text())["sha256"]
    assert (code, json.loads(out)) == (
        0,
        {
            "path": "v3",
            "sha256": sha256,
            "parent": parent,
            "train_on": "last",
            "splits": {"train": {"episodes": 2, "tokens": 24, "trained": 7, "trained_before": 10}},
            "untrained_conversations": 0,
            "linked_files": 3,
            "copied_files": 0,
        },
    )


def test_reweigh_gives_the_same_files_as_preparing_with_that_option(run):
    run("reweigh", "v1", "--train-on", "all", "-o", "v2")
    run("prepare", "chat.jsonl", "-o", "v3", "--format", "primer", "--train-on", "all", "--workers", "1")
    for path in sorted(Path("v3/train/shard_00000").iterdir()):
        assert (Path("v2/train/shard_00000") / path.name).read_bytes() == path.read_bytes()
    assert run("diff", "v2", "v3") == (
        0,
        "v2 and v3 have the same conversations; order, shards or packing may differ\n        2 equal\n",
        "",
    )


def test_diff_names_what_differs_and_why(run):
    run("reweigh", "v1", "--train-on", "last", "-o", "v2")
    assert run("diff", "v1", "v2") == (
        0,
        "        1 equal\n"
        "        1 mask     same tokens, different loss mask: chat.jsonl:2\n"
        "fit: train_on assistant -> last\n",
        "",
    )
    assert run("diff", "v1", "v1", "--exit-code") == (
        0,
        "v1 and v1 are the same dataset, byte for byte\n        2 equal\n",
        "",
    )


def test_diff_as_json_and_its_exit_code(run):
    with Path("chat.jsonl").open("a") as file:
        file.write(line("new", "one"))
    run("prepare", "chat.jsonl", "-o", "v2", "--format", "primer", "--workers", "1")
    code, out, _ = run("diff", "v1", "v2", "--exit-code", "--json")
    none = {"count": 0, "examples": []}
    assert (code, json.loads(out)) == (
        1,
        {
            "same": False,
            "identical": False,
            "matched_by": "key",
            "equal": 2,
            "added": {"count": 1, "examples": [{"split": "train", "file": "chat.jsonl", "line": 3}]},
            "removed": none,
            "changed": none,
            "mask": none,
            "moved": none,
            "causes": [{"part": "input", "what": "records read", "one": 2, "other": 3}],
        },
    )


def test_export_parquet_reports_what_it_wrote(run):
    code, out, err = run("export", "parquet", "v1", "-o", "out")
    assert (code, out, err) == (0, "out/train: 2 rows, 24 tokens, 41.7% trained, 1 file\n", "")
    assert sorted(str(path.relative_to("out")) for path in Path("out").rglob("*.*")) == [
        "README.md",
        "chatmill_export.json",
        "data/train-00000-of-00001.parquet",
    ]
    counts = {"rows": 2, "conversations": 2, "tokens": 24, "trained": 10, "weighted": 0, "files": 1}
    code, out, _ = run("export", "parquet", "v1", "-o", "out", "--split", "train", "--overwrite", "--json")
    assert (code, json.loads(out)) == (0, {"path": "out", "splits": {"train": counts}})


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["reweigh", "none", "--train-on", "last", "-o", "v2"], 1, "none: no such folder"),
        (["reweigh", "v1", "--train-on", "last", "-o", "v1"], 1, "v1: already exists"),
        (["reweigh", "v1", "--train-on", "last", "-o", "v1/new"], 1, "v1/new: overlaps with v1; use another folder"),
        (["diff", "v1", "none"], 1, "none: no such folder"),
        (["export", "parquet", "none", "-o", "out"], 1, "none: no such folder"),
        (["export", "parquet", "v1", "-o", "v1"], 1, "v1: already exists"),
        (["export", "parquet", "v1", "-o", "v1", "--overwrite"], 1, "v1: has no chatmill_export.json"),
        (["export", "parquet", "v1", "-o", "out", "--split", "val"], 1, "v1: has no split val; expected train"),
    ],
)
def test_errors_are_reported_in_one_line_and_leave_no_files(run, args, code, words):
    found, out, err = run(*args)
    assert (found, out) == (code, "")
    assert err.startswith("chatmill: ")
    assert words in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in Path().iterdir()) == ["chat.jsonl", "v1"]


def test_train_on_must_be_one_of_three_values(run):
    assert run("reweigh", "v1", "--train-on", "user", "-o", "v2")[0] == 2


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("prepare chat.jsonl -o loop/d", "loop/d: cannot be created (File exists); use another folder"),
        ("export parquet v1 -o loop", "loop: is a symbolic link; use the folder itself"),
        ("reweigh v1 -o loop --train-on all", "loop: is a symbolic link; use the folder itself"),
        ("report v1 -o loop", "loop: already exists; use another name or pass --overwrite"),
        ("build-sft-primer --primer-jsonl loop", "loop: no such file; expected a file, a folder or a glob"),
    ],
)
def test_a_link_to_itself_is_reported_in_one_line_and_kept(run, args, line):
    Path("loop").symlink_to("loop")
    assert run(*args.split()) == (1, "", f"chatmill: {line}\n")
    assert Path("loop").readlink() == Path("loop")
