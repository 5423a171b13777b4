import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "conversations.jsonl": 400,
    "tool_conversations.jsonl": 150,
    "primer.jsonl": 120,
    "desk_chat.jsonl": 500,
    "desk_tools.jsonl": 600,
    "desk_chat_heldout.jsonl": 80,
    "desk_tools_heldout.jsonl": 50,
}


def records(name: str) -> list[dict]:
    return [json.loads(line) for line in (ROOT / "data" / name).read_text("utf-8").splitlines()]


def test_the_committed_files_are_what_the_script_writes():
    command = [sys.executable, ROOT / "scripts/make_data.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("name", "count"), FILES.items())
def test_every_conversation_is_different(name, count):
    assert len({json.dumps(record["messages"]) for record in records(name)}) == count


def test_the_files_stay_small():
    assert sum((ROOT / "data" / name).stat().st_size for name in FILES) < 1_000_000


def test_primer_holds_role_and_content_only():
    for record in records("primer.jsonl"):
        assert record.keys() == {"messages"}
        assert all(message.keys() == {"role", "content"} for message in record["messages"])


@pytest.mark.parametrize("name", ["tool_conversations.jsonl", "desk_tools.jsonl", "desk_tools_heldout.jsonl"])
def test_every_tool_call_is_followed_by_its_result(name):
    for record in records(name):
        assert record.keys() - {"system"} == {"messages"}
        messages = record["messages"]
        for message, after in pairwise(messages):
            if message["role"] == "assistant_toolcall":
                assert (after["role"], after["name"]) == ("toolresult", message["name"])
        assert messages[-1]["role"] == "assistant"
