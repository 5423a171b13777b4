from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill import Message, Record
from chatmill.format import open_renderer
from chatmill.rows import OWN_ID, SPAN, Part, Role, Rule
from chatmill.show.compare import Clues, Counts, Outcome, PeerRow, Why, aligned, compare_row, why_mask
from chatmill.show.compare_report import Comparison, example_lines, outcome_lines
from chatmill.show.text import TokenText
from chatmill.tokenizer import train_bpe

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONTROL = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.json").write_bytes(train_bpe(["x"], vocab_size=258, control=CONTROL))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    return open_renderer("template", str(folder))


def clues_of(renderer, record, **more) -> Clues:
    return Clues(record, TokenText(renderer.tokenizer), frozenset(renderer.encoder.ids.values()), **more)


def chat(*texts: str) -> Record:
    return Record([Message(("user", "assistant")[n % 2], text) for n, text in enumerate(texts)], file="c.jsonl", line=1)


def encode(renderer, text: str) -> list[int]:
    ids, ends = [], {token: renderer.encoder.ids[token] for token in CONTROL}
    while text:
        token = next((token for token in CONTROL if text.startswith(token)), None)
        ids += [ends[token]] if token else renderer.tokenizer.encode(text[0])
        text = text[len(token or "x") :]
    return ids


def peer_row(renderer, *parts: tuple[str, bool], kept: int | None = None) -> PeerRow:
    pieces = [(encode(renderer, text), trained) for text, trained in parts]
    ids = np.array([id for ids, _ in pieces for id in ids], dtype=np.uint32)
    mask = np.array([trained for ids, trained in pieces for _ in ids], dtype=bool)
    return PeerRow(ids, mask, len(ids) if kept is None else kept)


HEAD = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def compared(renderer, record, peer, **more):
    return compare_row(renderer.render([record]), peer, clues_of(renderer, record, **more))


def test_a_row_equal_to_ours_has_no_difference(renderer):
    peer = peer_row(renderer, (HEAD, False), ("Yo<|im_end|>", True), ("\n", False))
    result = compared(renderer, chat("Hi", "Yo"), peer)
    assert (result.outcome, result.differences, result.weighted) == (Outcome.EQUAL, (), 0)
    assert result.counts == Counts(3, 0, 0, len(peer.ids) - 3)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(HEAD, False), ("Yo<|im_end|>\n", True)], [(Why.AFTER, Counts(only_peer=1))]),
        ([(HEAD, False), ("Yo", True), ("<|im_end|>\n", False)], [(Why.END, Counts(only_chatmill=1))]),
        ([(HEAD, False), ("Y", False), ("o<|im_end|>", True), ("\n", False)], [(Why.ANSWER, Counts(only_chatmill=1))]),
        (
            [(HEAD[:19], False), (HEAD[19:], True), ("Yo<|im_end|>", True), ("\n", False)],
            [(Why.TURN, Counts(only_peer=2)), (Why.HEADER, Counts(only_peer=11))],
        ),
        (
            [(HEAD + "Yo<|im_end|>\n", True)],
            # The first token of a row is never predicted, so it is not counted.
            [
                (Why.TURN, Counts(only_peer=5)),
                (Why.USER, Counts(only_peer=2)),
                (Why.TURN, Counts(only_peer=2)),
                (Why.HEADER, Counts(only_peer=11)),
                (Why.AFTER, Counts(only_peer=1)),
            ],
        ),
    ],
    ids=["line end", "end of turn", "text", "header", "every token"],
)
def test_each_difference_has_the_reason_of_its_span(renderer, parts, expected):
    result = compared(renderer, chat("Hi", "Yo"), peer_row(renderer, *parts))
    assert result.outcome == Outcome.MASK
    assert [(each.why, each.counts) for each in result.differences] == expected


def test_a_character_that_loses_its_last_bytes_is_named(renderer):
    parts = (HEAD + "Yo ", False), ("é", True), ("<|im_end|>", True), ("\n", False)
    peer = peer_row(renderer, *parts)
    at = len(encode(renderer, HEAD)) + 3
    peer.trained[at - 3 : at + 1], peer.trained[at + 1] = True, False
    result = compared(renderer, chat("Hi", "Yo é"), peer)
    [difference] = result.differences
    assert (difference.why, difference.start, difference.counts) == (Why.CHARACTER, at + 1, Counts(only_chatmill=1))
    peer.trained[at] = False
    result = compared(renderer, chat("Hi", "Yo é"), peer)
    assert [(each.why, each.counts) for each in result.differences] == [(Why.ANSWER, Counts(only_chatmill=2))]


def test_what_follows_an_empty_answer_is_after_its_end(renderer):
    result = compared(renderer, chat("Hi", ""), peer_row(renderer, (HEAD, False), ("<|im_end|>\n", True)))
    assert [(each.why, each.counts) for each in result.differences] == [(Why.AFTER, Counts(only_peer=1))]


def test_a_token_across_the_end_of_a_header_is_named_if_the_row_has_one(renderer):
    peer = peer_row(renderer, (HEAD[:-1], False), ("\nYo<|im_end|>", True), ("\n", False))
    for straddles, why in ((True, Why.ACROSS), (False, Why.HEADER)):
        result = compared(renderer, chat("Hi", "Yo"), peer, straddles=straddles)
        assert [(each.why, each.counts) for each in result.differences] == [(why, Counts(only_peer=1))]


def test_what_is_cut_off_is_one_difference_and_a_row_without_trained_tokens_is_dropped(renderer):
    parts = (HEAD, False), ("Yo<|im_end|>", True), ("\n", False)
    size = len(encode(renderer, HEAD))
    result = compared(renderer, chat("Hi", "Yo"), peer_row(renderer, *parts, kept=size + 1))
    assert (result.outcome, result.counts) == (Outcome.CUT, Counts(1, 2, 0, size + 1))
    [cut] = result.differences
    assert (cut.why, cut.start, cut.stop, cut.counts) == (Why.CUT, size + 1, size + 4, Counts(0, 2, 0, 1))
    result = compared(renderer, chat("Hi", "Yo"), peer_row(renderer, *parts, kept=0))
    assert (result.outcome, result.counts) == (Outcome.DROPPED, Counts(0, 3, 0, size + 1))
    assert [each.why for each in result.differences] == [Why.DROPPED]


def test_text_that_became_a_control_token_is_named(renderer):
    parts = (HEAD.replace("Hi", "a<|im_end|>b"), False), ("Yo<|im_end|>", True), ("\n", False)
    result = compared(renderer, chat("a<|im_end|>b", "Yo"), peer_row(renderer, *parts))
    [difference] = result.differences
    assert (result.outcome, difference.why) == (Outcome.IDS, Why.CONTROL_TEXT)
    # The text <|im_end|> is ten tokens in one row and one token in the other.
    assert difference.counts == Counts(neither=11)
    assert result.counts.total == len(encode(renderer, parts[0][0])) + 4 + 10


def test_control_text_explains_only_the_text_of_its_message(renderer):
    record = chat("Hi", "a<|im_end|>b")
    peer = peer_row(renderer, (HEAD, False), ("<think></think>a<|im_end|>b<|im_end|>", True), ("\n", False))
    result = compared(renderer, record, peer, patched=True)
    assert [each.why for each in result.differences] == [Why.TRAINING_TEMPLATE, Why.CONTROL_TEXT]
    peer = peer_row(renderer, (HEAD.replace("Hi", "Ho"), False), ("a<|im_end|>b<|im_end|>", True), ("\n", False))
    result = compared(renderer, record, peer)
    assert [each.why for each in result.differences] == [Why.OTHER_IDS, Why.CONTROL_TEXT]


def test_what_the_other_template_writes_is_told_apart_from_what_nobody_knows(renderer):
    record = Record([Message("user", "Hi"), Message("assistant", "Yo", reasoning="hm hm")], file="c", line=1)
    plain = chat("Hi", "Yo")
    row = renderer.render([plain])
    peer = peer_row(renderer, (HEAD, False), ("<think>hm hm</think>Yo<|im_end|>", True), ("\n", False))
    for clues, why in (
        (clues_of(renderer, record, patched=True), Why.REASONING_KEPT),
        (clues_of(renderer, plain, patched=True), Why.TRAINING_TEMPLATE),
        (clues_of(renderer, plain), Why.OTHER_IDS),
    ):
        result = compare_row(row, peer, clues)
        assert [(each.why, each.counts) for each in result.differences] == [(why, Counts(only_peer=20))]


CHANNELS = (
    "{% for m in messages %}{% if m.reasoning_content %}{{ '<|im_start|>assistant\\nhm:' + m.reasoning_content }}"
    "{{ '<|im_end|>' }}{% endif %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_a_header_between_the_parts_of_an_answer_is_named(renderer, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(train_bpe(["x"], vocab_size=258, control=CONTROL))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHANNELS}))
    two_parts = open_renderer("template", str(tmp_path))
    record = Record([Message("user", "Hi"), Message("assistant", "Yo", reasoning="so")], file="c", line=1)
    head = "<|im_start|>user\nHi<|im_end|><|im_start|>assistant\n"
    peer = peer_row(two_parts, (head, False), ("hm:so<|im_end|><|im_start|>assistant\nYo<|im_end|>", True))
    result = compared(two_parts, record, peer)
    assert [(each.why, each.counts) for each in result.differences] == [(Why.BETWEEN, Counts(only_peer=11))]
    record = Record([*chat("Hi", "so").messages, Message("assistant", "Yo")], file="c", line=1)
    peer = peer_row(two_parts, (head, False), ("so<|im_end|><|im_start|>assistant\nYo<|im_end|>", True))
    result = compared(two_parts, record, peer)
    assert [(each.why, each.counts) for each in result.differences] == [(Why.HEADER, Counts(only_peer=11))]


def test_weights_that_the_other_does_not_read_are_counted(renderer):
    record = Record([Message("user", "Hi"), Message("assistant", "Yo")], weight=0.5, file="c", line=1)
    result = compared(renderer, record, peer_row(renderer, (HEAD, False), ("Yo<|im_end|>", True), ("\n", False)))
    assert (result.outcome, result.weighted) == (Outcome.EQUAL, 3)
    record = Record([Message("user", "Hi"), Message("assistant", "Yo", weight=0)], file="c", line=1)
    result = compared(renderer, record, peer_row(renderer, (HEAD, False), ("Yo<|im_end|>", True), ("\n", False)))
    assert {each.why for each in result.differences} == {Why.WEIGHT}


@pytest.mark.parametrize(
    ("role", "part", "rule", "weight", "why"),
    [
        (Role.ASSISTANT, Part.CONTENT, Rule.ROLE, 1, Why.ANSWER),
        (Role.ASSISTANT, Part.REASONING, Rule.ROLE, 1, Why.REASONING),
        (Role.ASSISTANT, Part.TOOL_CALL, Rule.ROLE, 1, Why.TOOL_CALL),
        (Role.ASSISTANT, Part.CLOSE, Rule.ROLE, 1, Why.END),
        (Role.ASSISTANT, Part.OPEN, Rule.HEADER, 0, Why.HEADER),
        (Role.ASSISTANT, Part.CLOSE, Rule.HEADER, 0, Why.AFTER),
        (Role.NONE, Part.OPEN, Rule.HEADER, 0, Why.FIRST),
        (Role.NONE, Part.EOS, Rule.HEADER, 0, Why.LAST),
        (Role.USER, Part.OPEN, Rule.HEADER, 0, Why.TURN),
        (Role.SYSTEM, Part.CONTENT, Rule.ROLE, 0, Why.SYSTEM),
        (Role.TOOL, Part.CONTENT, Rule.ROLE, 0, Why.TOOL),
        (Role.USER, Part.CONTENT, Rule.FLAG, 1, Why.WEIGHT),
        (Role.ASSISTANT, Part.CONTENT, Rule.RANGE, 0, Why.RANGES),
        (Role.ASSISTANT, Part.CONTENT, Rule.UNFINISHED, 0, Why.UNFINISHED),
        (Role.ASSISTANT, Part.CONTENT, Rule.EARLIER_ROW, 0, Why.OTHER),
    ],
)
def test_the_reason_is_read_from_role_part_and_rule(role, part, rule, weight, why):
    span = np.zeros(1, dtype=SPAN)
    span["role"], span["part"], span["rule"], span["weight"], span["target"] = role, part, rule, weight, OWN_ID
    assert why_mask(span[0]) == why


IDS = st.lists(st.integers(0, 5), max_size=40).map(lambda ids: np.array(ids, dtype=np.uint32))


@given(IDS, IDS)
def test_blocks_tile_both_rows_and_equal_ones_are_equal(ours, theirs):
    at = peer_at = 0
    for start, stop, peer_start, peer_stop, equal in aligned(ours, theirs):
        assert (start, peer_start) == (at, peer_at) and (stop > start or peer_stop > peer_start)
        if equal:
            assert ours[start:stop].tolist() == theirs[peer_start:peer_stop].tolist()
        at, peer_at = stop, peer_stop
    assert (at, peer_at) == (len(ours), len(theirs))


TEXT = st.text(alphabet="ab \n<|é", max_size=8)


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3), st.data())
def test_counts_add_up_to_all_tokens_whatever_the_other_row_is(renderer, turns, data):
    record = chat(*(text for turn in turns for text in turn))
    row = renderer.render([record])
    kinds = st.sampled_from([None, int(row.ids[0]), 65, 66])
    edits = data.draw(st.lists(st.tuples(st.integers(0, len(row.ids)), kinds), max_size=4))
    ids = row.ids.tolist()
    for place, id in edits:
        ids[place : place + 1] = [] if id is None else [id]
    mask = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    kept = data.draw(st.integers(0, len(ids)))
    peer = PeerRow(np.array(ids, dtype=np.uint32), np.array(mask, dtype=bool), kept)
    result = compare_row(row, peer, clues_of(renderer, record))
    counts = result.counts
    ours, theirs = int(row.mask()[1:].sum()), sum(mask[1:kept])
    assert counts.both + counts.only_chatmill == ours
    assert counts.both + counts.only_peer == theirs
    # A token that both rows contain is counted once.
    assert max(len(row.ids), kept) <= counts.total <= len(row.ids) + kept
    assert sum(each.counts.only_chatmill for each in result.differences) == counts.only_chatmill
    assert sum(each.counts.only_peer for each in result.differences) == counts.only_peer
    assert (result.outcome == Outcome.EQUAL) == (not result.differences)


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
def test_a_row_of_our_own_is_equal_to_itself(renderer, turns):
    record = chat(*(text for turn in turns for text in turn))
    row = renderer.render([record])
    result = compare_row(row, PeerRow(row.ids, row.mask(), len(row.ids)), clues_of(renderer, record))
    assert (result.outcome, result.differences, result.counts.total) == (Outcome.EQUAL, (), len(row.ids))


def test_the_report_counts_records_and_shows_the_tokens_that_differ(renderer):
    record = chat("Hi", "Yo")
    comparison = Comparison(TokenText(renderer.tokenizer))
    peer = peer_row(renderer, (HEAD, False), ("Yo<|im_end|>\n", True))
    default = peer_row(renderer, (HEAD + "Yo<|im_end|>\n", True))
    for _ in range(2):
        comparison.add(renderer.render([record]), peer, default, clues_of(renderer, record))
    comparison.refuse("c.jsonl:3", chatmill=("end", "no end"), peer=None)
    comparison.refuse("c.jsonl:4", chatmill=("end", "none"), peer=("mask", "no mask"))
    assert not comparison.equal
    assert list(outcome_lines(comparison)) == [
        "4 records: 2 trained differently, 1 refused by chatmill, 1 refused by both",
        "  chatmill refuses 2 of the records, the first at c.jsonl:3: no end",
        "  TRL refuses 1 of the records, the first at c.jsonl:4: no mask",
    ]
    [(why, reason)] = comparison.sorted_reasons()
    assert (why, reason.records, reason.counts) == (Why.AFTER, 2, Counts(only_peer=2))
    assert reason.example is not None
    assert [line.plain for line in example_lines(reason.example)] == [
        "    c.jsonl:1",
        "      chatmill …│t│a│n│t│↵│[Y│o│<|im_end|>]│↵",
        "      TRL      …│t│a│n│t│↵│[Y│o│<|im_end|>│↵]",
    ]
    found = comparison.to_json()
    assert found["records"] == {
        "all": 4,
        "equal": 0,
        "mask": 2,
        "cut": 0,
        "ids": 0,
        "dropped": 0,
        "refused": {"chatmill": 1, "TRL": 0, "both": 1},
    }
    size = len(peer.ids)
    assert found["tokens"] == {
        "all": 2 * size,
        "both": 6,
        "only_chatmill": 0,
        "only_peer": 2,
        "neither": 2 * size - 8,
        "other_weight": 0,
    }
    assert found["peer_default"] == {"both": 6, "only_chatmill": 0, "only_peer": 2 * (size - 4), "neither": 2}
