from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from chatmill.cli.main import main
from chatmill.format import load_format, open_renderer, transcript_turns
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


ANSWERS = (
    {},
    {"train": True},
    {"train": False},
    {"weight": 0.5},
    {"train_ranges": [[0, 2, 0]]},
    {"train_ranges": [[0, 2, 1]]},
    {"weight": 0, "train_ranges": [[0, 2]]},
)
exchange_ = st.tuples(st.sampled_from([{}, {}, {"train": False}, {"train": True}]), st.sampled_from([{}, *ANSWERS]))
weighted_ = st.fixed_dictionaries(
    {"exchanges": st.lists(exchange_, min_size=1, max_size=3), "own": st.sampled_from([{}, {}, {"weight": 2}])}
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(drawn=[{"exchanges": [({}, {"weight": 0.5})], "own": {"weight": 2}}])
@given(drawn=st.lists(weighted_, min_size=1, max_size=6))
def test_conversations_are_counted_if_their_transcripts_have_other_weights(run, drawn):
    """The original records and the transcripts are rendered with the same format, and their weights are compared."""
    chats = []
    for each in drawn:
        turns = [
            ({"role": "user", "content": "ask"} | q, {"role": "assistant", "content": "reply"} | a)
            for q, a in each["exchanges"]
        ]
        chats.append({"messages": [turn for pair in turns for turn in pair], **each["own"]})
    Path("in.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    command = ("export", "transcripts", "in.jsonl", "-o", "out.txt", "--context-length", "99", "--overwrite")
    code, out, _ = run(*command, "--json")
    assert code == 0
    counted = json.loads(out)["ledger"].get("noted", {}).get("weights_left_out", {"rows": 0, "tokens": 0})
    renderer, transcript_renderer = open_renderer("chatml", "bytes"), open_renderer("post-training", "bytes")
    records, again = (list(read_records([name])) for name in ("in.jsonl", "out.txt"))
    differ = [
        record
        for record, other in zip(records, again, strict=True)
        if renderer.render([record]).weights().tolist() != renderer.render([other]).weights().tolist()
    ]
    assert counted["rows"] == len(differ)
    assert counted["tokens"] == sum(len(transcript_renderer.render([record]).ids) for record in differ)


def test_a_note_reports_weights_that_are_left_out_and_weight_zero_drops_the_record(run):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    long = [*turns, {"role": "user", "content": "x" * 50}, {"role": "assistant", "content": "no", "train": False}]
    chats = [{"weight": 0.5, "messages": turns}, {"weight": 0, "messages": turns}, {"messages": long}]
    Path("in.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    code, out, err = run("export", "transcripts", "in.jsonl", "-o", "out.txt", "--context-length", "20")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "out.txt: 2 conversations, 17 tokens",
        "  truncated pair_over_context: 57 tokens",
        "  dropped no_trained_tokens: 1 row, 9 tokens",
        "  noted record_weight: 2 rows, 0 tokens",
        "  noted weights_left_out: 1 row, 9 tokens",
        "note: the weights or train_ranges of 1 conversation are left out, because transcripts cannot store them",
    ]
    assert Path("out.txt").read_text() == "<|USER|>hi<|END|><|ASSISTANT|>yo<|END|><|EOS|>\n" * 2
