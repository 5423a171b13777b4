from __future__ import annotations

import json
from pathlib import Path

import pytest
from prepare_fixtures import build, lines, stored_rows

from chatmill.errors import DataError
from chatmill.prepare.job import Filters, InputSource, Job
from chatmill.store.read import open_dataset
from chatmill.store.removed import removed_records
from chatmill.store.reweigh import reweigh_dataset
from chatmill.store.verify import verify_dataset


def record(question: str, answer: str = "yes") -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


FIRST = [record("one"), record("two"), record(" ONE"), record("x" * 300), record("three"), record("four")]
SECOND = [record("two"), record("five"), record("no"), record("five"), record("six")]
LISTED = [
    {"source": "a", "file": "a.jsonl", "line": 2, "reason": "duplicate"},
    {"source": "a", "file": "a.jsonl", "line": 3, "reason": "duplicate"},
    {"source": "a", "file": "a.jsonl", "line": 4, "reason": "filter max_tokens"},
    {"source": "a", "file": "a.jsonl", "line": 6, "reason": "max_samples"},
    {"source": "b", "file": "b.jsonl", "line": 3, "reason": "filter no_match"},
    {"source": "b", "file": "b.jsonl", "line": 4, "reason": "duplicate"},
]
LISTED[0]["twin"] = {"source": "b", "file": "b.jsonl", "line": 1}
LISTED[1]["twin"] = {"source": "a", "file": "a.jsonl", "line": 1}
LISTED[5]["twin"] = {"source": "b", "file": "b.jsonl", "line": 2}


@pytest.fixture
def dataset(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_bytes(lines(FIRST))
    Path("b.jsonl").write_bytes(lines(SECOND))
    sources = (
        InputSource(("a.jsonl",), name="a", max_samples=2),
        InputSource(("b.jsonl",), name="b", filters=Filters(no_match="^no$")),
    )
    job = Job(sources, dedupe=True, precedence=("b",), filters=Filters(max_tokens=100))
    build(job, Path("v1"), unit_bytes=150)
    return Path("v1")


def test_every_removed_record_is_listed_in_input_order_with_its_twin(dataset):
    assert [json.loads(line) for line in (dataset / "removed.jsonl").read_text().splitlines()] == LISTED
    rows = stored_rows(dataset, "train")
    kept = [(rows.files[origin["file"]].path, int(origin["line"])) for origin in rows.origins]
    assert kept == [("a.jsonl", 1), ("a.jsonl", 5), ("b.jsonl", 1), ("b.jsonl", 2), ("b.jsonl", 5)]


def test_the_config_contains_the_filters_that_removed_records(dataset):
    config = json.loads((dataset / "dataset_metadata.json").read_text())["config"]
    assert config["filters"]["max_tokens"] == 100
    assert [source.get("max_samples") for source in config["sources"]] == [2, None]
    assert [source.get("filters") for source in config["sources"]] == [None, {"no_match": "^no$"}]


def test_the_list_is_verified_kept_by_reweighing_and_absent_if_nothing_was_removed(dataset):
    assert verify_dataset(dataset, full=True).faults == ()
    reweigh_dataset(dataset, "v2", train_on="last")
    assert Path("v2/removed.jsonl").read_bytes() == (dataset / "removed.jsonl").read_bytes()
    assert verify_dataset(Path("v2"), full=True).faults == ()
    build(Job((InputSource(("a.jsonl",)),), filters=Filters(min_tokens=1)), Path("v3"))
    assert not Path("v3/removed.jsonl").exists()
    assert list(removed_records(open_dataset("v3"))) == []
    assert "removed" not in json.loads(Path("v3/dataset_metadata.json").read_text())
    listed = dataset / "removed.jsonl"
    listed.chmod(0o644)
    listed.write_bytes(listed.read_bytes().replace(b'"line": 6', b'"line": x'))
    assert any("removed.jsonl" in fault for fault in verify_dataset(dataset, full=True).faults)
    with pytest.raises(DataError, match=r"removed.jsonl:4: is not a removed record"):
        list(removed_records(open_dataset(dataset)))
    listed.unlink()
    with pytest.raises(DataError, match=r"removed.jsonl: missing"):
        open_dataset(dataset)


def test_the_command_lists_removed_records_by_reason_and_source(dataset, capsys, monkeypatch):
    def run(*arguments: str) -> list[str]:
        from chatmill.cli.removed import removed

        options = dict(zip(arguments[::2], arguments[1::2], strict=True))
        removed(dataset, options.get("reason"), options.get("source"), as_json="json" in options)
        return capsys.readouterr().out.splitlines()

    assert [json.loads(line) for line in run("json", "yes")] == LISTED
    assert run("reason", "duplicate", "source", "a") == [
        "a.jsonl:2: duplicate, twin b.jsonl:1",
        "a.jsonl:3: duplicate, twin a.jsonl:1",
    ]
    assert run("source", "c") == ["v1: no record from source c was removed"]
