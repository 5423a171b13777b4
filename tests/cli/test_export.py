from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatmill.cli.main import main
from chatmill.format import load_format, transcript_turns
from chatmill.records import Message, Record, read_records

FORMAT = load_format("post-training")


def export(monkeypatch, folder: Path, records: list[list[tuple[str, str]]], *args: str) -> dict:
    chats = [{"messages": [{"role": role, "content": text} for role, text in record]} for record in records]
    (folder / "in.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    out = folder / "out.txt"
    command = ["export", "transcripts", str(folder / "in.jsonl"), "-o", str(out), "--overwrite", "--json", *args]
    monkeypatch.setattr(sys, "argv", ["chatmill", *command])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    return {"lines": out.read_text("utf-8").split("\n")[:-1]}


@pytest.fixture
def ledger(capsys):
    def ledger() -> dict:
        return json.loads(capsys.readouterr().out)["ledger"]

    return ledger


def test_each_conversation_is_one_line_without_spaces_at_the_markers(monkeypatch, tmp_path, ledger):
    made = export(monkeypatch, tmp_path, [[("user", "hi"), ("assistant", " yo")]], "--context-length", "99")
    assert made["lines"] == ["<|USER|>hi<|END|><|ASSISTANT|> yo<|END|><|EOS|>"]
    assert ledger()["stored"] == {"": {"rows": 1, "tokens": 10, "trained": 0}}


def test_line_breaks_are_escaped(monkeypatch, tmp_path):
    made = export(monkeypatch, tmp_path, [[("user", "a\nb\\n"), ("assistant", "c")]], "--context-length", "99")
    assert made["lines"] == ['"<|USER|>a\\nb\\\\n<|END|><|ASSISTANT|>c<|END|><|EOS|>"']


def test_long_conversations_are_truncated_or_skipped_and_counted(monkeypatch, tmp_path, ledger):
    records = [
        [
            ("system", "s"),
            ("user", "q"),
            ("assistant", "a"),
            ("user", "x" * 20),
            ("assistant", "b"),
            ("user", "r"),
            ("assistant", "c"),
        ],
        [("user", "x" * 20), ("assistant", "b")],
        [("user", "lonely")],
        [("user", "say <|END|> twice"), ("assistant", "no")],
    ]
    made = export(monkeypatch, tmp_path, records, "--context-length", "12")
    assert made["lines"] == ["<|SYSTEM|>s<|END|><|USER|>q<|END|><|ASSISTANT|>a<|END|><|EOS|>"]
    counts = {
        (bucket, reason): (entry["rows"], entry["tokens"])
        for bucket, reasons in ledger().items()
        for reason, entry in reasons.items()
    }
    assert counts == {
        ("read", ""): (4, 0),
        ("rendered", ""): (4, 41 + 26 + 9 + 24),
        ("stored", ""): (1, 9),
        ("truncated", "pair_over_context"): (0, 32),
        ("dropped", "first_pair_over_context"): (1, 26),
        ("dropped", "no_pair"): (1, 9),
        ("dropped", "marker_in_text"): (1, 24),
    }


text_ = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["a\nb", "\r\n", "\\n", '"', "\x00", "\u2028", " x "]
)
pair_ = st.tuples(text_, text_).map(lambda pair: [("user", pair[0]), ("assistant", pair[1])])
chat_ = st.tuples(st.lists(text_.map(lambda t: ("system", t)), max_size=1), st.lists(pair_, min_size=1, max_size=3))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(chat_.map(lambda parts: parts[0] + [turn for pair in parts[1] for turn in pair]), min_size=1, max_size=5)
)
def test_exported_conversations_read_back_the_same(monkeypatch, tmp_path, capsys, chats):
    export(monkeypatch, tmp_path, chats, "--context-length", "100000")
    capsys.readouterr()
    again = [
        [(m.role, m.content) for m in record.messages]
        for record in read_records([tmp_path / "out.txt"], shape="transcript")
    ]
    assert again == chats


def test_a_marker_in_a_text_is_reported():
    with pytest.raises(ValueError, match=r"the text of message 0 contains the marker <\|EOS\|>"):
        transcript_turns(Record([Message("user", "a <|EOS|> b")]), FORMAT)
