from __future__ import annotations

import json
import random
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_record_fast_path import RECORD

from chatmill.errors import RecordError
from chatmill.records import ChatColumns, FilePart, Record, keys_of, read_blocks, read_part, record_key, units
from chatmill.records.shapes import messages

columns = pytest.importorskip("chatmill._native._columns").columns
reading = import_module("chatmill.records.read")
ROLES = ("system", "user", "assistant", "tool")
TEXT = st.text(max_size=40)
PLAIN = st.fixed_dictionaries(
    {
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(ROLES), "content": TEXT},
                optional=dict.fromkeys(["name", "tool_calls", "weight"], st.none()),
            ),
            min_size=1,
            max_size=20,
        )
    },
    optional={"id": st.none() | TEXT | st.integers(-(10**17), 10**17), "tools": st.none()},
)


def taken(block: bytes) -> list[tuple[bytes, list[tuple[str, str]]]]:
    end, data, counts, stops, roles, start, stop = columns(block, 0)
    assert block[:end].count(b"\n") == len(stops) // 8 or end == len(block)
    starts, ends = np.frombuffer(start, np.int64).tolist(), np.frombuffer(stop, np.int64).tolist()
    found, at, before = [], 0, 0
    for count, until in zip(
        np.frombuffer(counts, np.int64).tolist(), np.frombuffer(stops, np.int64).tolist(), strict=True
    ):
        turns = [(ROLES[roles[n]], data[starts[n] : ends[n]].decode()) for n in range(at, at + count)]
        found.append((data[before:until], turns))
        at, before = at + count, until
    assert at == len(roles) and before == len(data)
    return found


def expected(line: bytes) -> tuple[bytes, list[tuple[str, str]]]:
    turns = messages.decode(line).messages
    return msgspec.msgpack.encode((turns, ())), [(turn.role, turn.content) for turn in turns]


@given(st.lists(PLAIN, min_size=1, max_size=5), st.booleans(), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_all_plain_lines_are_read_as_columns(records, ascii_only, line_end, ended):
    written = [json.dumps(record, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass") for record in records]
    block = line_end.encode().join(written) + line_end.encode() * ended
    assert taken(block) == [expected(line) for line in written]


@given(st.lists(RECORD | PLAIN, min_size=1, max_size=4), st.randoms(use_true_random=False), st.integers(0, 3))
def test_columns_of_any_bytes_equal_the_records_of_the_object_reader(records, rng, hits):
    block = bytearray(b"\n".join(json.dumps(record, ensure_ascii=rng.random() < 0.5).encode() for record in records))
    for _ in range(hits):
        at = rng.randrange(len(block))
        block[at : at + rng.randrange(2)] = bytes(
            rng.choices(b'{}[]":,\\u0nt \t\r\n\x00\xc3\xa9\xed\xa0\x80\xff', k=rng.randrange(3))
        )
    found = taken(bytes(block))
    assert found == [expected(line) for line in bytes(block).split(b"\n")[: len(found)]]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b" ",
        b"[]",
        b"{}",
        b'{"messages": []}',
        b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"content": "a"}]}',
        b'{"messages": [{"role": "user", "content": null}]}',
        b'{"messages": [{"role": "developer", "content": "a"}]}',
        b'{"messages": [{"role": "user", "content": "a", "role": "user"}]}',
        b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
        b'{"messages": [{"role": "user", "content": "a", "weight": 1}]}',
        b'{"messages": [{"role": "user", "content": "a", "other": null}]}',
        b'{"messages": [{"role\t": "user", "content": "a"}]}',
        b'{"messages": [{"role": "user", "content": "a"}]} {}',
        b'{"messages": [{"role": "user", "content": "a"}]}}',
        b'{"messages": [{"role": "user", "content": "a"}], "messages": []}',
        b'{"messages": [{"role": "user", "content": "a"}], "id": 1.5}',
        b'{"messages": [{"role": "user", "content": "a"}], "id": 01}',
        b'{"messages": [{"role": "user", "content": "a"}], "id": n5}',
        b'{"messages": [{"role": "user", "content": "a"}], "id": n"b"}',
        b'{"messages": [{"role": "user", "content": "a"}], "id": 9999999999999999999}',
        b'{"messages": [{"role": "user", "content": "a"}], "tools": []}',
        b'{"messages": [{"role": "user", "content": "a"},]}',
        b'{"messages": [{"role": "user", "content": "a\x01"}]}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"messages": [{"role": "user", "content": "\xc3"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800\\u0041"}]}',
        b'{"messages": [{"role": "user", "content": "\\udc00"}]}',
        b'{"messages": [{"role": "user", "content": "\\x41"}]}',
        b'{"messages": [{"role": "user", "content": "\\u00g0"}]}',
        b'{"messages": [{"role": "user", "content": "a',
        b'{"messages": [{"role": "user", "content": "a\\',
        b'{"messages": [{"role": "user", "content": "a\\u12',
        b'{"messages": [{"role": "us',
        b'{"messages": [{"role": "user", "content": "a", "name": nul',
    ],
)
def test_columns_end_at_the_first_other_line(line):
    good = b'{"messages": [{"role": "user", "content": "a\\n\\u00e9\\ud83d\\ude00"}], "id": -12}\n'
    for block in (good + line, good + line + b"\n", good + line + b"\n" + good):
        end, *_ = columns(block, 0)
        assert (end, taken(block)) == (len(good), [expected(good)])
        assert columns(block, len(good))[0] == len(good)


def test_sizes_at_which_the_encoding_changes():
    for size in (0, 1, 31, 32, 255, 256, 65_535, 65_536):
        for roles in (["user"], ["assistant"] * 15, ["user"] * 16, ["tool"] * 17):
            turns = [{"content": "x" * size, "role": role} for role in roles]
            for ordered in (turns, [dict(reversed(turn.items())) for turn in turns]):
                line = json.dumps({"messages": ordered}).encode()
                assert taken(line) == [expected(line)]
    many = json.dumps({"messages": [{"role": "user", "content": ""}] * 65_536}).encode()
    assert taken(many) == [expected(many)]


MIXED = [
    {"messages": [{"role": "user", "content": "Hé\n"}, {"role": "assistant", "content": "Yes"}], "id": "a"},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "weight": 1}]},
    {"messages": [{"role": "user", "content": 1}]},
    {"messages": []},
]


def parts(folder: Path, data: bytes) -> list[FilePart]:
    path = folder / "a.jsonl"
    path.write_bytes(data)
    return [FilePart(path, "messages", "s"), *FilePart(path, "messages", "s").cut(3000)]


@pytest.mark.parametrize("share", [0.0, 0.002, 0.05, 0.5, 1.0])
def test_blocks_have_the_same_records_and_faults_as_the_part(tmp_path, monkeypatch, share):
    rng = random.Random(share)
    rows = [MIXED[rng.randrange(1, 4)] if rng.random() < share else MIXED[0] for _ in range(2000)]
    written = [json.dumps(row).encode() + rng.choice((b"", b"", b" \t", b"\r")) for row in rows]
    if share:
        written[rng.randrange(2000)] = b"  "
    monkeypatch.setattr(units, "WIDE_BLOCK", 20_000)
    monkeypatch.setattr(reading, "MIN_COLUMN_BYTES", 2_000)
    monkeypatch.setattr(reading, "RETRY_BYTES", 500)
    for part in parts(tmp_path, b"\n".join(written)):
        records, faults, ends = one_by_one(part)
        blocks, block_faults, block_ends = in_blocks(part)
        assert [record for block in blocks for record in block] == records
        assert all(keys_of(block) == b"".join(map(record_key, block)) for block in blocks)
        assert (block_faults, block_ends) == (faults, ends)
        if part.stop is None:
            kinds = {type(block) for block in blocks}
            assert share == 0.5 or kinds == {0: {ChatColumns}, 1: {list}}.get(share, {ChatColumns, list})


@pytest.mark.parametrize("size", [100, 999, 1000, 1001, 1490, 1510, 2400, 2600, 9999])
def test_the_blocks_of_a_part_have_about_equal_sizes(tmp_path, size):
    (tmp_path / "a.jsonl").write_bytes(data := b'{"a": 1}\n' * (size // 9))
    found = [*units.blocks(tmp_path / "a.jsonl", limit=10**6, stop=len(data), size=1000)]
    assert b"".join(found) == data
    assert len(found) == max(1, round(len(data) / 1000))
    assert max(map(len, found)) - min(map(len, found)) <= 2 * len(found) + 9


def one_by_one(part: FilePart) -> tuple[list[Record], list[str], list[int]]:
    faults: list[str] = []
    ends: list[int] = []
    return [*read_part(part, on_fault=lambda fault: faults.append(str(fault)), on_end=ends.append)], faults, ends


def in_blocks(part: FilePart) -> tuple[list[Sequence[Record]], list[str], list[int]]:
    faults: list[str] = []
    ends: list[int] = []
    return [*read_blocks(part, on_fault=lambda fault: faults.append(str(fault)), on_end=ends.append)], faults, ends


def test_records_before_a_fault_come_before_it(tmp_path):
    (part, *_) = parts(tmp_path, b"\n".join(json.dumps(row).encode() for row in (MIXED[0], MIXED[2], MIXED[1])))

    def stop(fault: RecordError) -> None:
        raise fault

    blocks = read_blocks(part, on_fault=stop, on_end=print)
    assert [record.line for record in next(blocks)] == [1]
    with pytest.raises(RecordError, match=r"a\.jsonl:2: "):
        next(blocks)


def test_a_line_over_the_limit_is_never_in_columns(tmp_path):
    (part, *_) = parts(tmp_path, b"\n".join(json.dumps(MIXED[0]).encode() for _ in range(50)))
    faults: list[str] = []
    blocks = list(read_blocks(part, on_fault=lambda fault: faults.append(fault.kind), on_end=print, max_line_bytes=60))
    assert blocks == [] and faults == ["too_long"] * 50


def test_without_the_compiled_extension_blocks_are_lists(tmp_path, monkeypatch):
    (part, *_) = parts(tmp_path, json.dumps(MIXED[0]).encode())
    (plain,) = read_blocks(part, on_fault=print, on_end=print)
    monkeypatch.setattr(reading, "COMPILED", False)
    (listed,) = read_blocks(part, on_fault=print, on_end=print)
    assert type(plain) is ChatColumns and type(listed) is list
    assert [*plain] == listed and plain[0] == listed[0] and plain[0:1] == listed
