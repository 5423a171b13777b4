from __future__ import annotations

import json
import re

import pytest

from chatmill.cli.prepare import warnings_of
from chatmill.errors import DataError
from chatmill.prepare.engine import LocalEngine
from chatmill.prepare.exclude import read_excluded
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.store.read import open_dataset


def record(text: str, id: str | None = None) -> str:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": f"about {text}"}]
    return json.dumps({"messages": messages} | ({} if id is None else {"id": id})) + "\n"


def build(folder, texts, excluded: str | None, *, unit_bytes: int = 2**22, target: str = "v", **options):
    (folder / "chat.jsonl").write_text("".join(record(text, f"id:{n}") for n, text in enumerate(texts, 1)))
    if excluded is not None:
        (folder / "exclude.txt").write_text(excluded)
        options["exclude"] = str(folder / "exclude.txt")
    job = Job((InputSource((str(folder / "chat.jsonl"),)),), **options)
    metadata = prepare_dataset(job, folder / target, engine=LocalEngine(workers=1), unit_bytes=unit_bytes)
    train = open_dataset(folder / target)["train"]
    return metadata, train.rows(range(len(train))).origins["line"].tolist()


TEXTS = [f"thing number {n}" for n in range(1, 11)]


@pytest.mark.parametrize("unit_bytes", [1, 300, 2**22])
def test_places_and_ids_are_excluded_for_any_unit_size(tmp_path, unit_bytes):
    excluded = (
        '# comment\n\nchat.jsonl:3\n{"file": "chat.jsonl", "line": 9, "reason": "duplicate"}\n{"id": "id:5"}\nunknown\n'
    )
    metadata, lines = build(tmp_path, TEXTS, excluded, unit_bytes=unit_bytes)
    assert lines == [1, 2, 4, 6, 7, 8, 10]
    counts = {(bucket, reason): entry.rows for bucket, reason, entry in metadata.ledger}
    assert counts[("dropped", "excluded")] == 2
    assert counts[("filtered", "excluded")] == 1
    assert (counts[("read", "")], counts[("stored", "")]) == (10, 7)
    removed = [json.loads(line) for line in (tmp_path / "v" / "removed.jsonl").read_text().splitlines()]
    assert [(each["line"], each["reason"]) for each in removed] == [(3, "excluded"), (5, "excluded"), (9, "excluded")]


def test_a_duplicate_of_an_excluded_record_is_kept(tmp_path):
    texts = ["one two three four five six", "other", "one two three four five six", "one two three four five six"]
    for options in ({"dedupe": True}, {"near_dedupe": 0.8}):
        name = next(iter(options))
        assert build(tmp_path, texts, None, target=f"{name}0", **options)[1] == [1, 2]
        assert build(tmp_path, texts, "chat.jsonl:1\n", target=f"{name}1", **options)[1] == [2, 3]
        assert build(tmp_path, texts, '{"id": "id:1"}', target=f"{name}2", **options)[1] == [2, 3]


def test_removed_records_of_one_build_are_excluded_from_the_next(tmp_path):
    build(tmp_path, [*TEXTS, *TEXTS[:4]], None, dedupe=True)
    removed = (tmp_path / "v" / "removed.jsonl").read_text()
    assert build(tmp_path, [*TEXTS, *TEXTS[:4]], removed, target="next")[1] == list(range(1, 11))


def test_lines_without_a_record_are_counted_and_unknown_files_are_refused(tmp_path):
    for number, (listed, kept, unmatched) in enumerate(
        (
            ("chat.jsonl:1\nchat.jsonl:77\nchat.jsonl:78\n", range(2, 11), {"exclude_without_record": 2}),
            ('{"id": "id:1"}\nother\nthird\nother\n{"id": "id:77"}\n', range(2, 11), {"exclude_without_record": 3}),
            ('chat.jsonl:1\n{"id": "id:2"}\nother\nchat.jsonl:77\n', range(3, 11), {"exclude_without_record": 2}),
            ('{"id": "id:1"}\n{"id": "id:10"}\nchat.jsonl:2\n', range(3, 10), {}),
        )
    ):
        metadata, lines = build(tmp_path, TEXTS, listed, target=f"t{number}", unit_bytes=300)
        assert lines == list(kept)
        assert {reason: entry.rows for bucket, reason, entry in metadata.ledger if bucket == "noted"} == unmatched
        count = len(TEXTS) - len(lines)
        assert f"{count} row{'s were' if count > 1 else ' was'} excluded by --exclude" in list(
            warnings_of(metadata.ledger)
        )
    with pytest.raises(
        DataError, match=re.escape("names other.jsonl, which is not an input file; expected chat.jsonl")
    ):
        build(tmp_path, TEXTS, "other.jsonl:1\n", target="w")


@pytest.mark.parametrize(
    "line", ["{", '{"line": 3}', '{"file": "a", "line": "3"}', '{"id": 3}', '{"file": "a", "line": 0}']
)
def test_a_line_that_names_no_record_is_refused(tmp_path, line):
    (tmp_path / "list").write_text(f"chat.jsonl:1\n{line}\n")
    with pytest.raises(
        DataError, match=re.escape(f"{tmp_path}/list:2: does not name a record; expected FILE:LINE, an id")
    ):
        read_excluded(str(tmp_path / "list"))
    with pytest.raises(DataError, match="cannot be read"):
        read_excluded(str(tmp_path / "none"))


def test_the_hash_of_the_list_is_stored_only_if_there_is_a_list(tmp_path):
    assert "exclude" not in build(tmp_path, TEXTS, None)[0].config
    first = build(tmp_path, TEXTS, "chat.jsonl:1\n", target="a")[0]
    assert len(first.config["exclude"]) == 64 and str(tmp_path) not in json.dumps(first.config)
    assert first.config["exclude"] != build(tmp_path, TEXTS, "chat.jsonl:2\n", target="b")[0].config["exclude"]
