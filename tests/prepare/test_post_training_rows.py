from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatmill.errors import DataError, RecordError
from chatmill.format import load_format, open_renderer
from chatmill.format.chat_format import parse_format
from chatmill.format.template.template_input import only_turns
from chatmill.prepare import InputSource, Job, prepare_dataset
from chatmill.records import Message, Record
from chatmill.records.record import new_message
from chatmill.rows import Rule
from chatmill.show import explain_token, open_view
from chatmill.store import open_dataset

U, A = "<|USER|>q<|END|>", "<|ASSISTANT|>a<|END|>"
LETTERS = {"<|SYSTEM|>": "S", "<|USER|>": "U", "<|ASSISTANT|>": "A", "<|END|>": "E", "<|EOS|>": "X"}
LETTERS |= {"<|usr|>": "U", "<|asst|>": "A", "<|eot|>": "E"}


def build(folder: Path, *texts: str, **options) -> tuple[list[str], dict[str, tuple[int, int]]]:
    (folder / "in.txt").write_text("".join(json.dumps(text) + "\n" for text in texts))
    source = InputSource((str(folder / "in.txt"),), shape="transcript-lines")
    metadata = prepare_dataset(Job((source,), **{"format": "post-training", **options}), folder / "data")
    split, tokenizer = open_dataset(folder / "data")["train"], open_view(folder / "data").text.tokenizer
    shown = []
    for number in range(len(split)):
        row = split.rows([number])
        pieces = [tokenizer.decode([id]) for id in row.ids.tolist()]
        shown.append("".join(LETTERS.get(piece, piece) for piece in pieces))
        shown.append("".join(".*"[int(bit)] for bit in row.mask()))
    reasons = {
        reason: (entry.rows, entry.tokens)
        for bucket, reason, entry in metadata.ledger
        if bucket in ("noted", "dropped")
    }
    return shown, reasons


@pytest.mark.parametrize(
    ("text", "row", "mask", "noted"),
    [
        (A + U + A, "AaEUqEAaEX", "......***.", {"answer_incomplete_user": (0, 3)}),
        (U + A + "<|USER|>r" + A, "UqEAaEUrAaEX", "...***......", {"answer_incomplete_user": (0, 3)}),
        (U + A + "<|ASSISTANT|>b" + U + A, "UqEAaEAbUqEAaEX", "...***.........", {"answer_unfinished": (0, 5)}),
        ("<|SYSTEM|>s<|END|>" + A + U + A, "SsEAaEUqEAaEX", ".........***.", {"answer_incomplete_user": (0, 3)}),
        ("x " + U + "y" + A + "<|END|>", "x UqEyAaEEX", "......***..", {"text_outside_turns": (0, 4)}),
        (U + "\n" + A + " \n", "UqE\nAaE \nX", "....***...", {"whitespace_between_turns": (0, 3)}),
    ],
)
def test_tokens_that_the_rules_exclude_are_context_and_are_counted(tmp_path, text, row, mask, noted):
    assert build(tmp_path, text) == ([row, mask], noted)


def test_records_without_markers_or_answers_are_counted_and_not_refused(tmp_path):
    rows, reasons = build(tmp_path, "no markers", U, A, U + A)
    assert rows == ["UqEAaEX", "...***."]
    assert reasons == {
        "text_outside_turns": (0, 10),
        "answer_incomplete_user": (0, 3),
        "no_trained_tokens": (3, 11 + 4 + 4),
    }


def test_in_blocks_records_without_markers_are_masked(tmp_path):
    rows, reasons = build(tmp_path, "no markers", U + A, fit="blocks", max_tokens=18)
    assert rows == ["no markersXUqEAaEX", "." * 14 + "***."]
    assert reasons == {"text_outside_turns": (0, 10)}


@pytest.mark.parametrize(
    ("fit", "answer", "reasons"),
    [
        ("tail", "long", {"answer_incomplete_user": (0, 6), "no_trained_tokens": (1, 8)}),
        ("tail", "much too long", {"answer_cut": (1, 8), "answer_unfinished": (0, 7), "no_trained_tokens": (1, 8)}),
        ("turns", "much too long", {"answer_cut": (1, 8), "answer_unfinished": (0, 7), "no_trained_tokens": (1, 8)}),
        # The mask of a window excludes an answer that the window contains only in part.
        ("windows", "too long", {"answer_cut": (3, 24), "answer_unfinished": (0, 20), "no_trained_tokens": (3, 24)}),
    ],
)
def test_an_answer_whose_user_turn_is_cut_off_is_not_trained(tmp_path, fit, answer, reasons):
    long = f"{U}<|ASSISTANT|>{answer}<|END|>"
    assert build(tmp_path, U + A, long, fit=fit, max_tokens=8) == (["UqEAaEX", "...***."], reasons)


def test_a_flag_on_a_message_that_is_not_an_answer_does_not_train_it():
    record = Record([Message("user", "q", train=True), Message("assistant", "a")])
    rows = open_renderer("post-training", "bytes").render([record])
    assert rows.mask().astype(int).tolist() == [0, 0, 0, 1, 1, 1, 0]
    assert set(rows.spans["rule"][:3].tolist()) == {Rule.NOT_ANSWER}


def test_other_formats_keep_text_outside_turns_and_drop_whitespace(tmp_path):
    rows, reasons = build(tmp_path, U + "\n" + A, U + "x" + A, format="primer")
    assert rows == ["UqEAaE", "....**", "UqExAaE", ".....**"]
    assert reasons == {"whitespace_left_out": (1, 0), "text_outside_turns": (0, 1)}


def test_a_chat_template_drops_whitespace_and_refuses_text_outside_turns():
    user, answer = Message("user", "q"), Message("assistant", "a")
    space, text = (new_message("none", content, complete=False) for content in ("\n", "x"))
    assert only_turns(Record([user, space, answer])).messages == [user, answer]
    with pytest.raises(RecordError, match="message 1 is text outside turns, which a chat template cannot render"):
        only_turns(Record([user, text, answer]))
    with pytest.raises(RecordError, match=r"the text has no turn markers such as <\|USER\|>; expected a transcript"):
        only_turns(Record([space, text]))


def test_explain_gives_the_reason_why_a_token_is_context(tmp_path):
    build(tmp_path, "x" + U + "\n" + A + "<|ASSISTANT|>b", fit="blocks", max_tokens=12)
    view = open_view(tmp_path / "data")
    told = [explain_token(view, "train", 0, token) for token in (0, 4, 9)]
    assert [(each.rule, each.weight) for each in told] == [("outside", 0), ("whitespace", 0), ("unfinished", 0)]
    assert told[0].sentence.endswith(
        "the text outside turns, from in.txt:1, is context: the token is outside the turns of its transcript, "
        "and only answers are trained (rule outside)."
    )


def test_a_custom_format_may_have_the_rule():
    preset = load_format("post-training")
    assert preset.requires_user and preset.to_json()["requires_user"]
    assert "requires_user" not in load_format("chatml").to_json()
    text = '[tokens]\nu = "<u>"\na = "<a>"\ne = "<e>"\n[user]\nopen = "<u>"\nclose = "<e>"\n[assistant]\n'
    with pytest.raises(DataError) as refused:
        parse_format("requires_user = true\n" + text + 'open = "<a>x"\nclose = "<e>y"\n', where="f.toml")
    assert "assistant.close must contain one control token" in str(refused.value)
    assert "assistant.open must be a single control token" in str(refused.value)
    with pytest.raises(DataError, match="requires_user must be true or false"):
        parse_format("requires_user = 1\n" + text + 'open = "<a>"\nclose = "<e>"\n', where="f.toml")
