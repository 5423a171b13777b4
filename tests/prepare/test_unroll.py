from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepare_fixtures import Faults, build, conversations, job_of, lines, stored_rows, told

from chatmill.cli.main import main
from chatmill.errors import RecordError, UsageError
from chatmill.format import open_renderer
from chatmill.ledger import Ledger
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.unroll import render_unrolled, row_chunks, unrolled
from chatmill.records import Message, Record, unroll_record
from chatmill.records import unroll as records_unroll
from chatmill.records.record import new_message
from chatmill.rows import Part, Role, Rows, Rule, concat
from chatmill.show.dataset import open_view
from chatmill.show.explain import explain_token
from chatmill.store.read import open_dataset
from chatmill.store.reweigh import reweigh_dataset

NAMES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
TRAIN_ON = ("assistant", "last", "last-exchange")
RENDERERS = {name: open_renderer(name, "bytes") for name in ("chatml", "post-training")}


def record_of(roles: str, **weights: float) -> Record:
    """Return a record with one message per letter of `roles`; `m3=0.5` sets the weight of message 3."""
    messages = [Message(NAMES[role], f"{role}{at}", weight=weights.get(f"m{at}")) for at, role in enumerate(roles)]
    return Record(messages, file="chat.jsonl", line=1, source="chat")


def refuse(fault: RecordError) -> None:
    raise fault


def render(records: list[Record], train_on: str, ledger: Ledger, name: str = "chatml") -> Rows:
    renderer = RENDERERS[name]
    made = list(unrolled(records, renderer, train_on=train_on, on_reject=refuse, ledger=ledger))
    return render_unrolled(renderer, made, ledger) if made else concat([])


@pytest.mark.parametrize(
    ("roles", "weights", "train_on", "stops"),
    [
        ("uaua", {}, "assistant", [2, 4]),
        ("uaua", {}, "last", [4]),
        ("suauata", {}, "last-exchange", [5, 7]),
        ("auaa", {}, "assistant", [1, 3, 4]),
        ("uauta", {"m1": 0}, "assistant", [5]),
        ("uaua", {"m1": 0.5}, "last", [2, 4]),
        ("uaua", {"m3": 0}, "last", [4]),
        ("uau", {}, "assistant", [2]),
        ("uau", {}, "last-exchange", [3]),
        ("uau", {"m2": 1}, "assistant", [2, 3]),
        ("uu", {}, "assistant", [2]),
    ],
)
def test_a_conversation_has_a_row_for_each_answer_that_is_trained(roles, weights, train_on, stops):
    record = record_of(roles, **weights)
    made = unroll_record(record, train_on)
    assert [row.messages for row in made.rows] == [record.messages[:stop] for stop in stops]
    assert all(row.messages[0] is record.messages[0] for row in made.rows)
    assert [(row.file, row.line, row.source) for row in made.rows] == [("chat.jsonl", 1, "chat")] * len(stops)
    assert list(made.first_new) == [0, *stops[:-1]]
    assert made.trailing == len(roles) - stops[-1]


# `new_message` does not validate, so tool results may also have weights. Like answers, tool results with weights must
# not be trained on twice.
message_ = st.builds(
    new_message,
    role=st.sampled_from(["user", "tool", "assistant", "assistant"]),
    content=st.text("ab", max_size=3),
    weight=st.sampled_from([None, None, None, 0.0, 0.5]),
    complete=st.sampled_from([True, True, True, True, False]),
)
record_ = st.builds(
    Record,
    messages=st.lists(message_, min_size=1, max_size=8),
    tools=st.sampled_from([(), ('{"name":"f"}',)]),
)


def trained_messages(rows: Rows, row: int) -> dict[int, tuple[list[int], list[float]]]:
    one = rows[row : row + 1]
    out: dict[int, tuple[list[int], list[float]]] = {}
    for at, span in enumerate(one.spans):
        if span["weight"] > 0:
            ids, weights = out.setdefault(int(span["message"]), ([], []))
            ids += one.ids[one.span_start[at] : one.span_start[at + 1]].tolist()
            weights.append(float(span["weight"]))
    return out


@given(st.lists(record_, max_size=3), st.sampled_from(TRAIN_ON), st.sampled_from([*RENDERERS]))
def test_every_message_is_trained_once_as_without_unrolling_and_the_ledger_balances(records, train_on, name):
    ledger, renderer = Ledger(), RENDERERS[name]
    rows = render(records, train_on, ledger, name)
    rows.check()
    at = 0
    for record in records:
        plain = renderer.render([record], train_on=train_on)
        made = unroll_record(record, train_on)
        once: dict[int, Any] = {}
        for row in range(at, at + len(made.rows)):
            here = trained_messages(rows, row)
            assert not here.keys() & once.keys()
            spans = rows[row : row + 1].spans
            earlier = spans["message"][spans["rule"] == Rule.EARLIER_ROW]
            assert set(earlier.tolist()) == once.keys() & set(spans["message"].tolist())
            once |= here
        assert once == trained_messages(plain, 0)
        at += len(made.rows)
    assert at == len(rows)
    longest = [unroll_record(record, train_on).rows[-1] for record in records]
    # In the post-training format, each row ends with an EOS token, so every additional row adds an EOS token.
    ends = len(rows) - len(records) if name == "post-training" else 0
    rendered, repeated = ledger.total("rendered"), ledger.total("repeated")
    assert (rendered.rows, rendered.rows + repeated.rows) == (len(records), len(rows))
    assert rendered.tokens + repeated.tokens == len(rows.ids)
    assert (rendered.trained, repeated.trained) == (int(rows.mask().sum()), 0)
    assert rendered.tokens == len(renderer.render(longest).ids) + ends


def test_each_span_has_the_same_reason_as_in_the_whole_conversation():
    rows = render([record_of("uauaa", m1=0, m3=0.5)], "last-exchange", Ledger())
    answers = rows.spans[(rows.spans["role"] == Role.ASSISTANT) & (rows.spans["part"] == Part.CONTENT)]
    assert [(int(span["message"]), float(span["weight"]), Rule(span["rule"]).name) for span in answers] == [
        (1, 0.0, "FLAG"),
        (3, 0.5, "FLAG"),
        (1, 0.0, "FLAG"),
        (3, 0.0, "EARLIER_ROW"),
        (4, 1.0, "ROLE"),
    ]
    rows = render([record_of("uaua")], "last", Ledger())
    assert [Rule(rule).name for rule in np.unique(rows.spans["rule"])] == ["ROLE", "HEADER"]


def test_messages_without_a_row_are_noted():
    ledger = Ledger()
    render([record_of("uaua", m1=0), record_of("uau"), record_of("ua")], "assistant", ledger)
    assert {reason: entry.rows for bucket, reason, entry in ledger if bucket == "noted"} == {
        "answer_without_row": 1,
        "messages_after_last_answer": 1,
    }


def test_chunks_hold_whole_conversations_and_no_more_rows_than_the_limit():
    made = [unroll_record(record_of("ua" * count), "assistant") for count in (3, 1, 4, 1)]
    assert [[len(each.rows) for each in chunk] for chunk in row_chunks(made, 4)] == [[3, 1], [4], [1]]
    stream = iter(made)
    assert [[len(each.rows) for each in chunk] for chunk in row_chunks(stream, 2, limit=5)] == [[3], [1, 1]]
    assert next(stream) is made[-1]
    assert [[len(each.rows) for each in chunk] for chunk in row_chunks(made, 9, limit=3)] == [[3]]


# Datasets.


def write(folder: Path, records: list[dict[str, Any]]) -> tuple[str, ...]:
    (folder / "chat.jsonl").write_bytes(lines(records))
    return (str(folder / "chat.jsonl"),)


@pytest.mark.parametrize(
    "options",
    [
        {"fit": "windows", "max_tokens": 80},
        {"format": "post-training", "fit": "blocks", "max_tokens": 120},
        {"fit": "drop", "max_tokens": 100, "dedupe": True},
    ],
    ids=str,
)
def test_the_ledger_balances_for_any_fit_and_each_conversation_is_in_one_split(tmp_path, options):
    inputs = write(tmp_path, conversations(60, seed=3))
    job = job_of(inputs, unroll=True, val_split=0.3, **options)
    metadata = build(job, tmp_path / "x")
    metadata.ledger.check()
    stored = metadata.ledger.total("stored")
    assert stored.tokens == sum(split.num_tokens for split in metadata.splits.values())
    assert metadata.ledger.entries["repeated", "unroll"].tokens > 0
    sides = [{line for _, line, *_ in told(real(stored_rows(tmp_path / "x", split)))} for split in ("train", "val")]
    assert sides[0] and sides[1] and not sides[0] & sides[1]


def real(rows: Rows) -> Rows:
    padded = np.add.reduceat(rows.spans["part"] == Part.PAD, rows.first_span[rows.first_segment[:-1]])
    return rows.take(np.flatnonzero(padded == 0))


def test_a_conversation_is_refused_if_one_of_its_rows_is(tmp_path, monkeypatch):
    inputs = write(tmp_path, [{"messages": [{"role": "user", "content": "q"}, *answers]} for answers in ANSWERS])
    monkeypatch.setattr(records_unroll, "MAX_ROWS", 2)
    with pytest.raises(
        RecordError, match=r"chat\.jsonl:2: the record has 3 answers, too many to unroll; expected at most 2; split the"
    ):
        build(job_of(inputs, unroll=True), tmp_path / "x")
    faults = Faults()
    metadata = build(job_of(inputs, unroll=True, on_error="skip"), tmp_path / "x", on_fault=faults)
    assert faults == [("chat.jsonl", 2, "too_many_answers")]
    assert metadata.ledger.entries["rejected", "too_many_answers"].rows == 1
    assert [line for _, line, *_ in told(stored_rows(tmp_path / "x", "train"))] == [1, 1, 3]


ANSWERS = [[{"role": "assistant", "content": "a"}] * count for count in (2, 3, 1)]


def test_show_and_explain_name_the_answer_and_why_others_are_context(tmp_path):
    inputs = write(tmp_path, [{"messages": [{"role": "user", "content": "q"}, *ANSWERS[1]]}])
    build(job_of(inputs, unroll=True), tmp_path / "x")
    view = open_view(tmp_path / "x")
    row = view.row("train", 2)
    earlier = int(row.span_start[np.flatnonzero(row.spans["rule"] == Rule.EARLIER_ROW)[-1]])
    sentence = explain_token(view, "train", 2, earlier).sentence
    assert ", the end-of-turn marker of assistant message 2, from chat.jsonl:1, is context: the answer that" in sentence
    with pytest.raises(UsageError, match="so the loss mask of each row includes only one answer; prepare"):
        reweigh_dataset(tmp_path / "x", tmp_path / "y", train_on="assistant")


def test_the_metadata_has_the_key_only_where_it_is_set(tmp_path):
    inputs = write(tmp_path, conversations(5))
    for unroll in (False, True):
        build(job_of(inputs, unroll=unroll), tmp_path / f"{unroll}")
    configs = [open_dataset(tmp_path / f"{unroll}").metadata.config for unroll in (False, True)]
    assert [config.get("unroll") for config in configs] == [None, True]
    assert configs[0].keys() == configs[1].keys() - {"unroll"}


@pytest.mark.parametrize(("job", "source"), [("all", None), ("assistant", "all")])
def test_unroll_and_all_turns_are_refused_together(job, source):
    with pytest.raises(UsageError, match="--unroll makes one row per answer, but --train-on all trains on every turn"):
        Job((InputSource(("x",), train_on=source),), train_on=job, unroll=True).check()
    Job((InputSource(("x",), train_on="last"),), train_on="all", unroll=True).check()


# Commands.


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, [{"messages": [{"role": "user", "content": "q"}, *answers]} for answers in ANSWERS])

    def run(command: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["chatmill", *command.split()])
        with pytest.raises(SystemExit) as ended:
            main()
        return (ended.value.code or 0, *capsys.readouterr())

    return run


def test_render_shows_a_row_for_each_answer(run):
    code, out, _ = run("render chat.jsonl --unroll -n 4 --json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(row["line"], row["last_message"]) for row in rows] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert {sum(label >= 0 for label in row["labels"]) for row in rows} == {len("a") + 1}
    code, out, _ = run("render chat.jsonl --unroll -n 2")
    assert [line for line in out.splitlines() if line.startswith("chat.jsonl")] == [
        "chat.jsonl:1 up to message 1  23 tokens, 2 trained",
        "chat.jsonl:1 up to message 2  37 tokens, 2 trained",
    ]
    assert "repeated unroll: 1 row, 23 tokens" in out
    code, _, err = run("render chat.jsonl --unroll --train-on all")
    assert (code, err.count("\n")) == (2, 1)


def test_a_recipe_and_a_flag_unroll_the_same_way(run):
    Path("recipe.toml").write_text('unroll = true\n\n[[source]]\ninputs = ["chat.jsonl"]\n')
    assert run("prepare recipe.toml -o one --workers 1")[0] == 0
    assert run("prepare chat.jsonl -o two --unroll --workers 1")[0] == 0
    assert open_dataset("one").sha256 == open_dataset("two").sha256
    listed = run("show two")[1]
    assert "chat.jsonl:2 up to message 3  51 tokens, 4% trained" in listed
    assert "assistant 1  trained in an earlier row\n" in run("show two 1")[1]
