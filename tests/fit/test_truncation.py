from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill import pack_sft_ids_and_mask
from chatmill.errors import DataError, RecordError
from chatmill.fit import RULES, truncate, truncate_with_sources
from chatmill.format import TurnRenderer, load_format, parse_format
from chatmill.ledger import Ledger
from chatmill.records import Message, Record
from chatmill.rows import EMPTY, Role, Rows, Rule, concat
from chatmill.tokenizer import open_tokenizer

PRIMER = load_format("primer")
TOKENIZER = open_tokenizer("bytes", control=PRIMER.tokens)
LETTER = {"<|sys|>": "S", "<|usr|>": "U", "<|asst|>": "A", "<|eot|>": "."}


def chat(*turns: str, line: int = 1) -> Record:
    """Build a record: `Shello` is a system, `Uhello` a user and `Ahello` an assistant message."""
    role = {"S": "system", "U": "user", "A": "assistant"}
    return Record([Message(role[turn[0]], turn[1:]) for turn in turns], file="chat.jsonl", line=line)


def rendered(*records: Record) -> Rows:
    return TurnRenderer(PRIMER, TOKENIZER).render(records)


def text_of(rows: Rows) -> list[tuple[str, str]]:
    """Return each row as text, with one letter per control token, and a line with a star under each trained token."""
    out = []
    for row in range(len(rows)):
        one = rows[row : row + 1]
        text = "".join(LETTER.get(piece, piece) for piece in (TOKENIZER.decode([id]) for id in one.ids.tolist()))
        out.append((text, "".join("*" if trained else " " for trained in one.mask())))
    return out


def fitted(rows: Rows, capacity: int | None, rule: str, **options) -> tuple[list[tuple[str, str]], dict]:
    ledger = Ledger()
    ledger.add("rendered", rows=len(rows), tokens=len(rows.ids))
    made = truncate(rows, capacity, rule, ledger=ledger, **options)
    made.check()
    ledger.add("stored", rows=len(made), tokens=len(made.ids))
    ledger.add("read", rows=len(rows))
    ledger.check()
    counts = {
        (bucket, reason): (entry.rows, entry.tokens)
        for bucket, reason, entry in ledger
        if bucket not in ("read", "rendered", "stored")
    }
    return text_of(made), counts


THREE = chat("Ss", "Uab", "Acd", "Uef", "Agh", "Uij", "Akl")  # Ss.Uab.Acd.Uef.Agh.Uij.Akl.  27 tokens


def test_every_rule_leaves_a_row_that_fits_unchanged():
    rows = rendered(THREE)
    for rule in RULES:
        assert truncate(rows, 27, rule, ledger=Ledger()) is rows
        assert truncate(rows, None, rule, ledger=Ledger()) is rows


def test_turns_drops_the_oldest_exchanges_and_keeps_system_and_last_answer():
    rows = rendered(THREE)
    assert fitted(rows, 26, "turns") == (
        [("Ss.Uef.Agh.Uij.Akl.", "        ***     ***")],
        {("truncated", "turns"): (0, 8)},
    )
    assert fitted(rows, 12, "turns") == ([("Ss.Uij.Akl.", "        ***")], {("truncated", "turns"): (0, 16)})


def test_turns_then_cuts_from_the_left_and_notes_a_cut_answer():
    rows = rendered(THREE)
    assert fitted(rows, 10, "turns") == ([("s.Uij.Akl.", "       ***")], {("truncated", "turns"): (0, 17)})
    assert fitted(rows, 2, "turns") == (
        [("l.", "**")],
        {("truncated", "turns"): (0, 25), ("noted", "answer_cut"): (1, 2)},
    )


def test_turns_keeps_the_bos_token():
    own = parse_format(
        'begin = "<s>"\n[tokens]\nbos = "<s>"\nt = "<t>"\n[user]\nopen = "<t>"\nclose = "<t>"\n'
        '[assistant]\nopen = "<t>"\nclose = "<t>"',
        where="own",
    )
    tokenizer = open_tokenizer("bytes", control=own.tokens, add_tokens=True)
    rows = TurnRenderer(own, tokenizer).render([chat("Uab", "Acd", "Uef", "Agh")])
    made = truncate(rows, 12, "turns", ledger=Ledger())
    assert tokenizer.decode(made.ids) == "<s><t>ef<t><t>gh<t>"


def test_tail_keeps_the_last_tokens():
    rows = rendered(THREE)
    assert fitted(rows, 6, "tail") == ([("j.Akl.", "   ***")], {("truncated", "tail"): (0, 21)})
    assert fitted(rows, 2, "tail") == (
        [("l.", "**")],
        {("truncated", "tail"): (0, 25), ("noted", "answer_cut"): (1, 2)},
    )


def test_drop_counts_the_rows_that_are_too_long():
    rows = concat([rendered(THREE), rendered(chat("Uab", "Acd"))])
    assert fitted(rows, 20, "drop") == ([("Uab.Acd.", "     ***")], {("dropped", "too_long"): (1, 27)})


def test_error_names_the_origin_of_the_first_row_that_is_too_long():
    rows = rendered(chat("Uab", "Acd"), chat("Uab", "A" + "x" * 20, line=7))
    with pytest.raises(RecordError) as caught:
        truncate(rows, 20, "error", ledger=Ledger())
    assert str(caught.value) == (
        "chat.jsonl:7: the row has 26 tokens, but at most 20 are allowed; "
        "raise the limit or use another rule: exchanges, turns, tail, windows, drop"
    )


def test_windows_train_each_exchange_once_with_the_system_turn_and_the_context_that_fits():
    rows = rendered(THREE)
    assert fitted(rows, 14, "windows") == (
        [("Ss.Uab.Acd.", "        ***"), ("Ss.cd.Uef.Agh.", "           ***"), ("Ss.gh.Uij.Akl.", "           ***")],
        {("repeated", "windows"): (2, 12)},
    )
    made = truncate(rows, 14, "windows", ledger=Ledger())
    context = made.spans[(made.spans["rule"] == Rule.EARLIER_WINDOW)]
    assert context["weight"].tolist() == [0.0] * len(context)
    assert int(context["length"].sum()) == 6


def test_windows_cut_an_answer_longer_than_a_window_and_note_it():
    rows = rendered(chat("Uq", "Aabcdefghijkl"))
    assert fitted(rows, 8, "windows") == (
        [("Uq.Aabcd", "    ****"), ("abcdefgh", "    ****"), ("efghijkl", "    ****"), ("fghijkl.", "       *")],
        {("repeated", "windows"): (3, 15), ("noted", "answer_cut"): (4, 32)},
    )


def test_windows_with_required_terminators_drop_the_rows_that_end_inside_an_answer():
    rows = rendered(chat("Uq", "Aabcdefghijkl"))
    made, counts = fitted(rows, 8, "windows", require_terminators=True)
    assert made == [("fghijkl.", "       *")]
    assert counts[("dropped", "no_terminator")] == (3, 24)


def test_windows_do_not_repeat_a_system_turn_longer_than_half_a_window():
    rows = rendered(chat("Sssssss", "Uq", "Aab", "Ur", "Acd"))
    assert fitted(rows, 12, "windows") == (
        [("ssss.Uq.Aab.", "         ***"), (".Aab.Ur.Acd.", "         ***")],
        {("repeated", "windows"): (2, 14), ("dropped", "no_trained_tokens"): (1, 12)},
    )


def test_rows_without_a_trained_token_are_dropped_unless_requested():
    rows = concat([rendered(chat("Uab")), rendered(chat("Ua", "Ab"))])
    assert fitted(rows, None, "turns") == ([("Ua.Ab.", "    **")], {("dropped", "no_trained_tokens"): (1, 4)})
    assert fitted(rows, 3, "tail", drop_untrained=False) == (
        [("ab.", "   "), ("Ab.", " **")],
        {("truncated", "tail"): (0, 4)},
    )


def test_a_row_that_lost_all_its_answers_is_counted_separately_from_one_without_answers():
    rows = concat([rendered(chat("Ua", "Abcd", "Uefghij")), rendered(chat("Uefghij"))])
    ledger = Ledger()
    assert len(truncate(rows, 6, "tail", ledger=ledger)) == 0
    assert {reason: (entry.rows, entry.tokens, entry.trained) for bucket, reason, entry in ledger} == {
        "no_trained_tokens": (1, 8, 0),
        "answers_cut_off": (1, 16, 4),
    }


def test_windows_of_a_row_with_only_a_system_turn_end_with_it():
    rows = concat([rendered(chat("Sabcdef")), rendered(chat("Uk", "A"))])
    assert fitted(rows, 5, "windows", drop_untrained=False) == (
        [("Sabcd", "     "), ("bcdef", "     "), ("cdef.", "     "), ("Uk.A.", "    *")],
        {("repeated", "windows"): (2, 7)},
    )


def test_rows_below_the_minimum_length_are_dropped():
    rows = rendered(chat("Ua", "Ab"))
    assert fitted(rows, 1, "tail", drop_untrained=False, min_tokens=2) == ([], {("dropped", "too_short"): (1, 6)})


def test_invalid_arguments_are_one_error_line():
    rows = rendered(THREE)
    with pytest.raises(DataError, match="the maximum row length is 0 tokens"):
        truncate(rows, 0, "turns", ledger=Ledger())
    packed = Rows(
        rows.ids,
        rows.spans,
        np.array([0, 3, len(rows.spans)]),
        np.repeat(rows.origins, 2),
        np.array([0, 2]),
        rows.files,
    )
    packed.check()
    with pytest.raises(DataError, match="truncate before packing"):
        truncate(packed, 5, "turns", ledger=Ledger())
    for rule in RULES:
        assert len(truncate(EMPTY, 5, rule, ledger=Ledger())) == 0


word_ = st.text("abc", max_size=6)
turn_ = st.tuples(st.sampled_from("UUAA"), word_).map("".join)
turns_ = st.tuples(st.lists(word_.map(lambda w: "S" + w), max_size=1), st.lists(turn_, max_size=8))
only_system_ = st.text("abc", min_size=4, max_size=14).map(lambda text: ([f"S{text}"], []))
chat_ = st.one_of(turns_.filter(any), only_system_).map(lambda parts: chat(*parts[0], *parts[1]))
options_ = st.fixed_dictionaries(
    {"drop_untrained": st.booleans(), "require_terminators": st.booleans(), "min_tokens": st.integers(1, 3)}
)


@given(st.lists(chat_, min_size=1, max_size=5), st.integers(1, 40), st.sampled_from(RULES[:-1]), options_)
def test_no_row_is_too_long_and_every_token_is_accounted_for(chats, capacity, rule, options):
    made, counts = fitted(rendered(*chats), capacity, rule, **options)
    assert all(len(text) <= capacity for text, _ in made)
    assert all(len(text) >= options["min_tokens"] for text, _ in made)
    assert not options["drop_untrained"] or all("*" in mask for _, mask in made)
    assert ("repeated", "windows") not in counts or rule == "windows"


@settings(max_examples=400)
@given(st.lists(chat_, min_size=2, max_size=5), st.integers(2, 12), st.sampled_from(RULES[:-1]), st.booleans())
def test_rows_hold_tokens_of_one_conversation_in_their_order(chats, capacity, rule, drop):
    rows = rendered(*chats)
    numbered = replace(rows, ids=np.arange(len(rows.ids), dtype=np.uint32))
    made, source = truncate_with_sources(
        numbered, capacity, rule, ledger=Ledger(), drop_untrained=drop, require_terminators=False
    )
    for row, of in enumerate(source.tolist()):
        ids = made[row : row + 1].ids.astype(np.int64)
        assert np.all(np.diff(ids) > 0)
        assert np.all((rows.row_start[of] <= ids) & (ids < rows.row_start[of + 1]))


@given(st.lists(chat_, min_size=1, max_size=12), st.integers(1, 60), st.sampled_from(RULES[:-1]), options_)
def test_kept_rows_are_the_same_whether_copied_in_bulk_or_one_by_one(chats, capacity, rule, options):
    rows = rendered(*(replace_line(chat, number) for number, chat in enumerate(chats)))
    made = []
    for stretch in (0, 10**9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("chatmill.fit.truncation.STRETCH", stretch)
            made.append(truncate_with_sources(rows, capacity, rule, ledger=Ledger(), **options))
    (one, source), (other, other_source) = made
    assert source.tolist() == other_source.tolist()
    for field in ("ids", "spans", "first_span", "origins", "first_segment"):
        assert np.array_equal(getattr(one, field), getattr(other, field)), field
    assert one.files == other.files


def replace_line(record: Record, line: int) -> Record:
    return msgspec.structs.replace(record, line=line)


@given(
    st.lists(chat_, min_size=1, max_size=5),
    st.integers(1, 40),
    st.sampled_from(["exchanges", "turns", "tail", "drop"]),
    options_,
)
def test_every_trained_token_is_stored_cut_or_dropped(chats, capacity, rule, options):
    rows, ledger = rendered(*chats), Ledger()
    made = truncate(rows, capacity, rule, ledger=ledger, **options)
    gone = ledger.total("truncated").trained + ledger.total("dropped").trained
    assert int(made.mask().sum()) + gone == int(rows.mask().sum())


@given(chat_, st.integers(1, 40))
def test_turns_on_rows_equals_the_documented_function(record, capacity):
    rows = rendered(record)
    made = truncate(rows, capacity, "turns", ledger=Ledger(), drop_untrained=False)
    special = {f"{key}_id": id for key, id in TOKENIZER.special_token_ids().items()}
    packed, mask = pack_sft_ids_and_mask(
        rows.ids.tolist(), rows.mask().tolist(), S=max(capacity, len(rows.ids)), pad_id=0, **special
    )
    assert (packed[: len(rows.ids)], mask[: len(rows.ids)]) == (rows.ids.tolist(), rows.mask().tolist())
    packed, mask = pack_sft_ids_and_mask(rows.ids.tolist(), rows.mask().tolist(), S=capacity, pad_id=0, **special)
    assert (made.ids.tolist(), made.mask().tolist()) == (packed[: len(made.ids)], mask[: len(made.ids)])
    assert packed[len(made.ids) :] == [0] * (capacity - len(made.ids))


@given(chat_, st.integers(1, 40))
def test_tail_equals_the_end_of_the_token_list(record, capacity):
    rows = rendered(record)
    made = truncate(rows, capacity, "tail", ledger=Ledger(), drop_untrained=False)
    assert made.ids.tolist() == rows.ids.tolist()[-capacity:]
    assert made.mask().tolist() == rows.mask().tolist()[-capacity:]


@given(chat_, st.integers(2, 40))
def test_each_trained_token_is_trained_in_exactly_one_window(record, capacity):
    rows = rendered(record)
    # Use positions as token ids, so that each token of a window can be found in the conversation.
    numbered = replace(rows, ids=np.arange(len(rows.ids), dtype=np.uint32))
    made = truncate(numbered, capacity, "windows", ledger=Ledger(), drop_untrained=False)
    trained = made.ids[made.mask()]
    assert sorted(trained.tolist()) == np.flatnonzero(rows.mask()).tolist()
    system = rows.span_start[np.count_nonzero(rows.spans["role"] == Role.SYSTEM)]
    for row in range(len(made)):
        ids = made[row : row + 1].ids
        assert len(ids) <= capacity
        # Tokens keep their order and have at most one gap, which directly follows the system turn.
        gaps = np.flatnonzero(np.diff(ids.astype(np.int64)) != 1)
        assert len(gaps) <= 1
        if 2 * system <= capacity:
            assert ids[:system].tolist() == list(range(system))
            assert all(gap == system - 1 for gap in gaps)
        # A window that is not full begins with the first token of the conversation.
        if len(ids) < capacity and len(ids):
            assert len(gaps) == 0
            assert ids[0] == 0
