"""20 000 broken records of each shape: every one becomes a record or one line, and nothing else happens."""

from __future__ import annotations

import gzip
import json
import random
import re

import pytest

from chatmill.records import read

COUNT = 20_000
LINE = re.compile(r"a\.(?:jsonl|json|txt)(?:\.gz)?:(\d+)(?: \(id=.*\))?: .+; .+")

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
FLAT = {"message_tree_id": "t", "text": "hé", "rank": 0, "deleted": False}
RECORDS = {
    "messages": {
        "id": "m",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s"}], "name": "n"},
            {"role": "user", "content": 'h\u00e9 \U0001f600 \\ "q"'},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r", "train": True},
            {"role": "tool", "content": "4", "tool_call_id": "c", "weight": 0},
        ],
        "tools": [{"name": "f"}],
    },
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "{}"},
            {"from": "gpt", "value": "a", "weight": 1},
        ],
        "system": "s",
        "tools": '[{"name": "f"}]',
    },
    "alpaca": {"instruction": "q", "input": "i", "output": "é", "system": "s", "history": [["a", "b"]], "id": 1},
    "dolly": {"instruction": "q", "context": "c", "response": "é", "category": "open"},
    "oasst1": {
        "message_tree_id": "t",
        "prompt": {
            "message_id": "a",
            "text": "q",
            "role": "prompter",
            "rank": None,
            "deleted": False,
            "replies": [
                {"message_id": "b", "text": "é", "role": "assistant", "rank": 1, "deleted": False, "replies": []},
                {"message_id": "c", "text": "y", "role": "assistant", "rank": 0, "deleted": False, "replies": []},
            ],
        },
    },
    "tool": {
        "system": "s",
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant_toolcall", "name": "f", "arguments": {"a": "é"}, "id": "c"},
            {"role": "toolresult", "content": {"r": [1]}, "name": "f", "train": False},
        ],
    },
    "primer": {"messages": [{"role": role, "content": f"é {role}"} for role in ("system", "user", "assistant")]},
    "transcript": {"text": "<|SYSTEM|> s <|END|>\n<|USER|>é<|END|><|ASSISTANT|>a<|END|><|EOS|><|USER|>x", "id": 4},
}
RAW = "<|SYSTEM|> s <|END|> <|USER|>é<|END|><|ASSISTANT|>a<|END|> <|EOS|><|USER|>x".encode()
WRONG = [None, True, 0, -1, 1.5, 10**30, "", "x", "\0", "<|USER|>", [], {}, ["x"], {"x": 1}, [[]], "@nest@"]


def broken_value(value, chance: random.Random):
    """The value with one node replaced, removed, renamed or doubled, somewhere inside."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        deed = chance.random()
        if deed < 0.15:
            return {name: inner for name, inner in value.items() if name != key}
        if deed < 0.3:
            return {(name + "x" if name == key else name): inner for name, inner in value.items()}
        return {**value, key: broken_value(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.85:
        at = chance.randrange(len(value))
        return [*value[:at], broken_value(value[at], chance), *value[at + chance.randrange(2) :]]
    return chance.choice(WRONG)


def broken_bytes(data: bytes, chance: random.Random) -> bytes:
    """The bytes with some flipped, cut, put in or doubled."""
    held = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(held) + 1)
        deed = chance.randrange(6)
        if deed == 0 and at < len(held):
            held[at] ^= 1 << chance.randrange(8)
        elif deed == 1:
            del held[at:]
        elif deed == 2:
            held[at:at] = chance.randbytes(chance.randint(1, 4))
        elif deed == 3:
            del held[at : at + chance.randint(1, 12)]
        elif deed == 4:
            held[at:at] = held[at : at + chance.randint(1, 40)]
        else:
            held[at:at] = chance.choice([b"\0", b'"', b"\\", b"\\ud800", b"[" * 50, b"}", b"NaN", b"1e999", b"<|END|>"])
    return bytes(held)


def broken(value, seed: str) -> list[bytes]:
    chance = random.Random(seed)
    found = []
    for index in range(COUNT):
        data = value if isinstance(value, bytes) else b""
        if not data:
            data = json.dumps(
                value if index % 2 else broken_value(value, chance), ensure_ascii=bool(index % 3)
            ).encode()
            depth = chance.choice([5, 400, 3000])
            data = data.replace(b'"@nest@"', b"[" * depth + b"]" * depth)
        if index % 2 or isinstance(value, bytes):
            data = broken_bytes(data, chance)
        found.append(data.replace(b"\n", b" "))
    return found


def read_all(path, data: bytes, shape: str) -> tuple[list[int], list[int]]:
    """The lines where records begin, and those of the faults, each of which is one line of the promised form."""
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

    records = [record.line for record in read([path.name], shape=shape, on_error="skip", on_reject=check)]
    return records, faults


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("shape", RECORDS)
def test_each_line_is_a_record_or_one_fault(tmp_path, shape):
    lines = broken(RECORDS[shape], shape)
    records, faults = read_all(tmp_path / "a.jsonl", b"\n".join(lines), shape)
    wanted = {number for number, line in enumerate(lines, 1) if line.strip()}
    if shape == "transcript":
        # A line of nothing but the mark that ends a conversation holds none.
        wanted -= {number for number, line in enumerate(lines, 1) if not line.replace(b"<|EOS|>", b"").strip()}
        records = sorted(set(records))
    assert sorted(records + faults) == sorted(wanted)
    assert min(len(records), len(faults)) > COUNT // 50


def test_raw_transcript_lines_are_records_or_one_fault(tmp_path):
    lines = broken(RAW, "raw")
    records, faults = read_all(tmp_path / "a.txt", b"\n".join(lines), "transcript-lines")
    wanted = {number for number, line in enumerate(lines, 1) if line.replace(b"<|EOS|>", b"").strip()}
    assert sorted([*set(records), *faults]) == sorted(wanted)
    assert min(len(records), len(faults)) > COUNT // 50


def test_a_broken_stream_gives_records_or_faults_in_order(tmp_path):
    pieces = broken(RAW, "stream")
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
        # Every other file is broken before it is packed, the rest after.
        data = broken_bytes(whole, chance) if index % 2 else whole
        data = gzip.compress(data, 1) if name.endswith(".gz") else data
        (tmp_path / name).write_bytes(data if index % 2 else broken_bytes(data, chance))
        faults = []
        list(read([name], shape="messages", on_error="skip", on_reject=faults.append))
        assert all(LINE.fullmatch(str(fault)) for fault in faults)
