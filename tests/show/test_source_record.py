from __future__ import annotations

import gzip
import json

import pytest
from show_fixtures import hostile_lines, line, make

from chatmill.errors import DataError
from chatmill.prepare.engine import LocalEngine
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.show.dataset import open_view
from chatmill.show.row_view import origin_of
from chatmill.show.source_record import MAX_CHARACTERS, source_record


def record_of(shown, number: int, *folders, segment: int = 0):
    row = shown.row("train", number)
    file, at, _ = origin_of(row, segment)
    key = row.origins[segment]["key"].tolist()
    shape, options = shown.shape_of(file)
    return source_record(file, at, shape=shape, options=options, key=key, folders=folders).for_display()


def test_every_record_is_found_by_its_line_and_unchanged(tmp_path):
    lines = [line(f"question {n}", f"answer {n} ü") for n in range(3000)]
    shown = make(tmp_path, [*lines[:10], "\n", "  \n", *lines[10:]])
    for number in (0, 9, 10, 1021, 1022, 1023, 2045, 2999):
        found = record_of(shown, number, tmp_path)
        assert (json.loads(found["text"]), found["same"], found["as_read"]) == (json.loads(lines[number]), True, False)


def test_changed_and_missing_records_are_reported(tmp_path):
    shown = make(tmp_path, [line("a", "b"), line("c", "d")])
    (tmp_path / "chat.jsonl").write_text(line("a", "B"))
    found = record_of(shown, 0, tmp_path)
    assert (found["same"], '"B"' in found["text"]) == (False, True)
    with pytest.raises(DataError, match="no longer has a line 2"):
        record_of(shown, 1, tmp_path)
    (tmp_path / "chat.jsonl").unlink()
    with pytest.raises(DataError, match=r"chat\.jsonl: not found"):
        record_of(shown, 0, tmp_path)


@pytest.mark.parametrize("name", ["chat.jsonl.gz", "chat.json", "chat.parquet"])
def test_records_in_files_without_lines_are_also_found(tmp_path, name):
    records = [json.loads(line(f"q{n}", f"a{n}")) for n in range(5)]
    path = tmp_path / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress("".join(json.dumps(each) + "\n" for each in records).encode()))
    elif name.endswith(".json"):
        path.write_text(json.dumps(records, indent=1))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    prepare_dataset(Job((InputSource((str(path),)),), format="primer"), tmp_path / "v", engine=LocalEngine(workers=1))
    found = record_of(open_view(tmp_path / "v"), 3, tmp_path)
    assert found["same"] is True
    assert "q3" in found["text"] and "a3" in found["text"] and "q2" not in found["text"]


def test_an_absolute_path_is_not_followed(tmp_path):
    (tmp_path / "secret.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="is an absolute path"):
        source_record(str(tmp_path / "secret.jsonl"), 1, shape="messages", key=[0, 0], folders=[tmp_path])


def test_a_hostile_record_is_shown_as_text_and_a_very_long_one_in_part(tmp_path):
    shown = make(tmp_path, hostile_lines(), format="chatml")
    for number in range(len(shown.dataset["train"])):
        found = record_of(shown, number, tmp_path)
        assert found["same"] is True
        assert found["text"].replace("\n", "").replace("\u200d", "").isprintable()
        assert found["cut"] == (number == len(shown.dataset["train"]) - 2)
        assert len(found["text"]) <= MAX_CHARACTERS + 1


def test_text_that_is_not_json_is_shown_unchanged(tmp_path):
    (tmp_path / "talk.txt").write_bytes(b"<|User|>hi\xff<|Assistant|>\n")
    found = source_record("talk.txt", 1, shape=None, key=[1, 2], folders=[tmp_path]).for_display()
    assert (found["text"], found["same"]) == ("<|User|>hi\\xff<|Assistant|>", None)
