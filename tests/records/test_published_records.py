from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chatmill.errors import RecordError
from chatmill.records import Record, read_records

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(not (DATA / "llamafactory").is_dir(), reason="no published data next to the repository")


def read(name: str) -> tuple[list[Record], list[RecordError]]:
    faults: list[RecordError] = []
    return list(read_records([DATA / name], on_error="skip", on_reject=faults.append)), faults


def values(name: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads((DATA / name).read_text())
    return records


def test_instructions_are_read_completely():
    name = "llamafactory/alpaca_en_demo.json"
    records, faults = read(name)
    assert faults == []
    assert [[message.content for message in record.messages] for record in records] == [
        ["\n\n".join(text for text in (each["instruction"], each["input"]) if text), each["output"]]
        for each in values(name)
    ]
    assert {record.unread_keys for record in records} == {()}


def test_parts_with_reasoning_and_calls_are_read_completely():
    name = "llamafactory/reason_tool_use_demo_50.jsonl"
    records, faults = read(name)
    assert faults == []
    for record, each in zip(records, values(name), strict=True):
        for message, turn in zip(record.messages, each["messages"], strict=True):
            of_kind = {kind: [part["value"] for part in turn["content"] if part["type"] == kind] for kind in KINDS}
            assert (message.role, message.content) == (turn["role"], "".join(of_kind["text"]))
            assert message.reasoning == "".join(of_kind["reasoning"])
            calls = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in message.tool_calls]
            assert calls == [json.loads(value) for value in of_kind["tool_call"]]
        assert [json.loads(tool) for tool in record.tools] == json.loads(each["tools"])
        assert record.unread_keys == ()


KINDS = ("text", "reasoning", "tool_call")


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("dpo_en_demo.json", "preference", 'the record has "chosen", as in preference data (DPO)'),
        ("kto_en_demo.json", "preference", 'as "label", as in preference data (KTO)'),
        ("mllm_demo.json", "media", 'the record has "images", but chatmill trains only on text'),
    ],
)
def test_data_that_is_not_for_fine_tuning_is_refused(name, kind, reason):
    records, faults = read(f"llamafactory/{name}")
    assert records == []
    assert len(faults) == len(values(f"llamafactory/{name}"))
    assert {fault.kind for fault in faults} == {kind}
    assert all(reason in fault.what for fault in faults)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_tool_calls_of_sharegpt_are_read_completely(language):
    name = f"glaive_toolcall_{language}_demo.json"
    records, faults = read(name)
    assert faults == []
    roles = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
    for record, each in zip(records, values(name), strict=True):
        turns = each["conversations"]
        assert [message.role for message in record.messages] == [roles[turn["from"]] for turn in turns]
        texts = ["" if turn["from"] == "function_call" else turn["value"] for turn in turns]
        assert [message.content for message in record.messages] == texts
        assert record.unread_keys == ()
