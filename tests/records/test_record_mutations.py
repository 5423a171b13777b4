from __future__ import annotations

import gzip
import json
import random
import re

import pytest
from record_mutations import FLAT, RAW, RECORDS, broken, broken_bytes, broken_value

from chatmill.records import read_records

COUNT = 20_000
LINE = re.compile(r"a\.(?:jsonl|json|txt)(?:\.gz)?:(\d+)(?: \(id=.*\))?: .+; .+")


def read_all(path, data: bytes, shape: str) -> tuple[list[int], list[int]]:
    path.write_bytes(data)
    faults: list[int] = []

    def check(fault):
        line = str(fault)
        found = LINE.fullmatch(line)
        assert found, line
        assert line.isprintable(), line
        assert int(found[1]) == fault.line
        assert fault.kind
        faults.append(fault.line)

    records = [record.line for record in read_records([path.name], shape=shape, on_error="skip", on_reject=check)]
    return records, faults


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("shape", RECORDS)
def test_each_line_is_a_record_or_one_fault(tmp_path, shape):
    lines = broken(RECORDS[shape], shape, COUNT)
    records, faults = read_all(tmp_path / "a.jsonl", b"\n".join(lines), shape)
    wanted = {number for number, line in enumerate(lines, 1) if line.strip()}
    if shape == "transcript":
        # A line with only <|EOS|> is not a conversation.
        wanted -= {number for number, line in enumerate(lines, 1) if not line.replace(b"<|EOS|>", b"").strip()}
        records = sorted(set(records))
    assert sorted(records + faults) == sorted(wanted)
    assert min(len(records), len(faults)) > COUNT // 50


def test_raw_transcript_lines_are_records_or_one_fault(tmp_path):
    lines = broken(RAW, "raw", COUNT)
    records, faults = read_all(tmp_path / "a.txt", b"\n".join(lines), "transcript-lines")
    wanted = {number for number, line in enumerate(lines, 1) if line.replace(b"<|EOS|>", b"").strip()}
    assert sorted([*set(records), *faults]) == sorted(wanted)
    assert min(len(records), len(faults)) > COUNT // 50


def test_a_broken_stream_gives_records_or_faults_in_order(tmp_path):
    pieces = broken(RAW, "stream", COUNT)
    records, faults = read_all(tmp_path / "a.txt", b"<|EOS|>\n".join(pieces), "transcript-stream")
    assert records == sorted(records)
    assert faults == sorted(faults)
    assert set(records) | set(faults) >= {
        n for n, piece in enumerate(pieces, 1) if piece.replace(b"<|EOS|>", b"").strip()
    }


def test_broken_flat_trees_are_records_or_faults(tmp_path):
    lines = []
    for tree in range(COUNT // 4):
        for name, parent, role in [("a", None, "prompter"), ("b", "a", "assistant"), ("c", "a", "assistant")]:
            message = {**FLAT, "message_tree_id": str(tree), "message_id": name, "parent_id": parent, "role": role}
            lines.append(json.dumps(message).encode())
    chance = random.Random("flat")
    for at in chance.sample(range(len(lines)), COUNT // 4):
        value = json.loads(lines[at])
        wrong = json.dumps(broken_value(value, chance)).encode()
        lines[at] = (wrong if chance.random() < 0.5 else broken_bytes(lines[at], chance)).replace(b"\n", b" ")
    records, faults = read_all(tmp_path / "a.jsonl", b"\n".join(lines), "oasst1")
    assert len(set(records) | set(faults)) == len(records) + len(faults)
    assert min(len(records), len(faults)) > COUNT // 50


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.jsonl.gz", "a.jsonl"])
def test_broken_files_of_every_kind_never_raise_anything_else(tmp_path, name):
    chance = random.Random(name)
    whole = json.dumps([RECORDS["messages"]] * 3, indent=1).encode()
    for index in range(500):
        data = broken_bytes(whole, chance) if index % 2 else whole
        data = gzip.compress(data, 1) if name.endswith(".gz") else data
        (tmp_path / name).write_bytes(data if index % 2 else broken_bytes(data, chance))
        faults = []
        list(read_records([name], shape="messages", on_error="skip", on_reject=faults.append))
        assert all(LINE.fullmatch(str(fault)) for fault in faults)
