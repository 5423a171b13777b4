from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.cli.prepare import warnings_of
from chatmill.fit import truncate
from chatmill.format import open_renderer
from chatmill.ledger import Ledger
from chatmill.prepare import InputSource, Job, prepare_dataset
from chatmill.prepare.unroll import render_unrolled
from chatmill.records import Message, Record, unroll_record
from chatmill.rows import Part, Role, Rows
from chatmill.store.read import open_dataset

RENDERER = open_renderer("chatml", "bytes")
ROLES = {"S": "system", "U": "user", "A": "assistant", "T": "tool"}
OVER = "last_exchange_over_max_tokens"


def chat(*turns: str, flags: dict[int, float] | None = None) -> Record:
    """Build a record from strings such as `Uhi`, a user message with the content `hi`. `flags` maps message indices to
    weights.
    """
    weights = {at: weight for at, weight in (flags or {}).items() if at < len(turns) and turns[at][0] != "T"}
    return Record([Message(ROLES[turn[0]], turn[1:], weight=weights.get(at)) for at, turn in enumerate(turns)])


def written(message: Message) -> str:
    return f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n"


def tokens(messages: list[Message]) -> int:
    """Count tokens: each control token and each ASCII character is one token."""
    return sum(len(message.role) + len(message.content) + 4 for message in messages)


def expected(messages: list[Message], trained: list[bool], capacity: int) -> list[Message] | None:
    if tokens(messages) <= capacity:
        return messages if any(trained) else None
    if not any(trained):
        return None
    head = 0
    while head < len(messages) and messages[head].role == "system":
        head += 1
    # Alternating runs of prompt messages (user, system) and answers.
    runs = [
        (asks, [at for at, _ in group])
        for asks, group in groupby(list(enumerate(messages))[head:], lambda pair: pair[1].role in ("user", "system"))
    ]
    exchanges: list[list[int]] = []
    for asks, numbers in runs:
        if not exchanges or (asks and any(messages[at].role == "user" for at in numbers)):
            exchanges.append([])
        exchanges[-1] += numbers
    last = max(at for at, each in enumerate(trained) if each)
    while exchanges and exchanges[-1][0] > last:
        exchanges.pop()
    for first in range(max(1, len(exchanges))):
        kept = messages[:head] + [messages[at] for exchange in exchanges[first:] for at in exchange]
        if tokens(kept) <= capacity:
            return kept
    return None


def is_trained(messages: list[Message], train_on: str) -> list[bool]:
    """Return whether each message is trained on, according to its weight or, if it has no weight, to its role."""
    answers = [at for at, message in enumerate(messages) if message.role == "assistant"]
    users = [at for at, message in enumerate(messages) if message.role == "user"]
    by_role = {
        "assistant": answers,
        "last": answers[-1:],
        "last-exchange": [at for at in answers if at > max(users, default=-1)],
        "all": [at for at, message in enumerate(messages) if message.role != "tool"],
    }[train_on]
    return [at in by_role if message.weight is None else message.weight > 0 for at, message in enumerate(messages)]


def fitted(rows: Rows, capacity: int, **options) -> tuple[Rows, Ledger]:
    ledger = Ledger()
    trained = int(rows.mask().sum())
    ledger.add("read", rows=len(rows))
    ledger.add("rendered", rows=len(rows), tokens=len(rows.ids), trained=trained)
    made = truncate(rows, capacity, ledger=ledger, **options)
    made.check()
    ledger.add("stored", rows=len(made), tokens=len(made.ids), trained=int(made.mask().sum()))
    ledger.check()
    lost = ledger.total("truncated").trained + ledger.total("dropped").trained
    assert int(made.mask().sum()) + lost == trained
    return made, ledger


def texts(rows: Rows) -> list[str]:
    return [RENDERER.tokenizer.decode(rows[row : row + 1].ids) for row in range(len(rows))]


word_ = st.text("ab", max_size=12)
turn_ = st.tuples(st.sampled_from("SUUUAAAATT"), word_).map("".join)
flags_ = st.dictionaries(st.integers(0, 9), st.sampled_from([0.0, 1.0, 0.5]), max_size=2)
chat_ = st.builds(lambda turns, flags: chat(*turns, flags=flags), st.lists(turn_, min_size=1, max_size=10), flags_)
capacity_ = st.integers(2, 160)
train_on_ = st.sampled_from(["assistant", "last", "last-exchange", "all"])


@settings(max_examples=300)
@given(st.lists(chat_, min_size=1, max_size=5), capacity_, train_on_)
def test_the_longest_suffix_of_whole_exchanges_that_fits_is_kept_and_the_ledger_balances(chats, capacity, train_on):
    made, ledger = fitted(RENDERER.render(chats, train_on=train_on), capacity)
    wanted = [expected(each.messages, is_trained(each.messages, train_on), capacity) for each in chats]
    assert texts(made) == ["".join(map(written, kept)) for kept in wanted if kept is not None]
    over = [
        each
        for each, kept in zip(chats, wanted, strict=True)
        if kept is None and any(is_trained(each.messages, train_on))
    ]
    entry = ledger.entries.get(("dropped", OVER))
    counted = (0, 0) if entry is None else (entry.rows, entry.tokens)
    assert counted == (len(over), sum(tokens(each.messages) for each in over))
    assert ("noted", "answer_cut") not in ledger.entries
    assert ("dropped", "answers_cut_off") not in ledger.entries


@given(chat_, capacity_)
def test_a_cut_row_begins_with_the_head_and_a_question_or_at_the_start_of_its_conversation(record, capacity):
    rows = RENDERER.render([record])
    made, _ = fitted(rows, capacity)
    for text in texts(made):
        whole = "".join(map(written, record.messages))
        if not whole.startswith(text):
            roles = [part.partition("\n")[0] for part in text.split("<|im_start|>")[1:]]
            spoken = [role for role in roles if role != "system"]
            assert spoken[0] == "user"
            assert len(text.replace("<|im_start|>", "^").replace("<|im_end|>", "$")) <= capacity


@given(chat_, capacity_)
def test_each_row_of_unroll_keeps_its_answer_and_whole_exchanges_before_it(record, capacity):
    made = unroll_record(record, "assistant")
    rows = render_unrolled(RENDERER, [made], Ledger())
    kept = truncate(rows, capacity, ledger=Ledger())
    wanted = []
    for number, row in enumerate(made.rows):
        trained = [
            at == made.answers[number]
            or (at >= made.first_new[number] and bool(message.weight) and message.role != "assistant")
            for at, message in enumerate(row.messages)
        ]
        wanted.append(expected(row.messages, trained, capacity))
    assert texts(kept) == ["".join(map(written, each)) for each in wanted if each is not None]


def kept_of(record: Record, capacity: int, **options) -> str | None:
    """Return the kept messages in the notation of `chat`, or None if the row is dropped."""
    made, _ = fitted(RENDERER.render([record], **options), capacity)
    if not len(made):
        return None
    parts = texts(made)[0].split("<|im_start|>")[1:]
    return " ".join(part[0].upper() + part.partition("\n")[2].removesuffix("<|im_end|>\n") for part in parts)


def test_whole_exchanges_are_removed_and_the_system_message_and_tool_steps_are_kept():
    record = chat("Ss", "U1", "Aa", "U2", "Ab", "Tt", "Ac")
    assert kept_of(record, tokens(record.messages)) == "Ss U1 Aa U2 Ab Tt Ac"
    assert kept_of(record, tokens(record.messages) - 1) == "Ss U2 Ab Tt Ac"
    least = tokens([*record.messages[:1], *record.messages[3:]])
    assert kept_of(record, least) == "Ss U2 Ab Tt Ac"
    assert kept_of(record, least - 1) is None


def test_a_row_never_begins_in_the_middle_of_an_answer():
    record = chat("Uq", "A" + "x" * 600)
    ledger = Ledger()
    assert len(truncate(RENDERER.render([record]), 512, ledger=ledger)) == 0
    assert {(bucket, reason): entry.rows for bucket, reason, entry in ledger} == {("dropped", OVER): 1}
    # Truncation with `turns` keeps the row.
    assert len(truncate(RENDERER.render([record]), 512, "turns", ledger=Ledger())) == 1


def test_consecutive_user_messages_are_one_question():
    record = chat("U1", "Aa", "U2", "U3", "Ab")
    assert kept_of(record, tokens(record.messages) - 1) == "U2 U3 Ab"
    assert kept_of(record, tokens(record.messages[2:]) - 1) is None


def test_a_conversation_that_begins_with_an_answer_loses_it_first():
    record = chat("Ss", "Agreet", "U1", "Aa", "U2", "Ab")
    assert kept_of(record, tokens(record.messages) - 1) == "Ss U1 Aa U2 Ab"
    assert kept_of(chat("Alone"), 5) is None


def test_later_system_messages_stay_with_the_question_after_them_and_leading_ones_with_the_head():
    record = chat("Ss", "St", "U1", "Aa", "Sz", "U2", "Ab")
    assert kept_of(record, tokens(record.messages) - 1) == "Ss St Sz U2 Ab"
    assert kept_of(chat("U1", "Aa", "Sz", "Ab", "U2", "Ac"), 60) == "U2 Ac"


def test_messages_after_the_last_trained_exchange_are_removed_first():
    record = chat("U1", "Aa", "U2")
    assert kept_of(record, tokens(record.messages) - 1) == "U1 Aa"
    assert kept_of(record, tokens(record.messages) - 1, train_on="all") == "U2"
    silent = chat("U1", "Aa", "U2", "Ab", flags={3: 0.0})
    assert kept_of(silent, tokens(silent.messages) - 1) == "U1 Aa"


def test_a_template_keeps_its_head_and_whole_exchanges(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    from chatmill.format import TemplateOptions

    renderer = open_renderer("template", "bytes", template=TemplateOptions(chat_template=str(template)))
    record = chat("Ss", "U1", "Aa", "U2", "Ab")
    rows = renderer.render([record])
    made, _ = fitted(rows, len(rows.ids) - 1)
    assert renderer.tokenizer.decode(made.ids) == "".join(map(written, [record.messages[0], *record.messages[3:]]))


def test_exchanges_is_the_default_of_prepare_and_applies_before_packing(tmp_path):
    lines = [chat("Uq", "A" + "x" * size, "Ur", "Aok") for size in (10, 300)] + [chat("Uq", "A" + "x" * 90)]
    data = "".join(
        json.dumps({"messages": [{"role": each.role, "content": each.content} for each in line.messages]}) + "\n"
        for line in lines
    )
    Path(tmp_path, "chat.jsonl").write_text(data)
    job = Job((InputSource((str(tmp_path / "chat.jsonl"),)),), max_tokens=80, pack=200)
    assert job.fit == "exchanges"
    metadata = prepare_dataset(job, tmp_path / "v1")
    episodes = open_dataset(tmp_path / "v1")["train"]
    assert len(episodes) == 1
    whole, last = "".join(map(written, lines[0].messages)), "".join(map(written, lines[1].messages[2:]))
    assert RENDERER.tokenizer.decode(episodes.tokens(0)) in (whole + last, last + whole)
    assert metadata.ledger.entries["dropped", OVER].rows == 1
    assert metadata.config["fit"] == "exchanges"
    [cut, dropped] = warnings_of(metadata.ledger)
    assert cut.endswith("raise --max-tokens, or use --fit windows")
    assert dropped == (
        "1 row was dropped because the last exchange does not fit, a loss of 91 of 409 trained tokens (22.2%); "
        "raise --max-tokens, or use --fit turns or --fit windows"
    )


@pytest.mark.parametrize("rule", ["turns", "tail", "windows"])
def test_other_rules_are_unchanged(rule):
    rows = RENDERER.render([chat("Ss", "U1", "A" + "x" * 50)])
    assert len(truncate(rows, 30, rule, ledger=Ledger())) >= 1


@pytest.mark.parametrize("rule", ["exchanges", "turns"])
@pytest.mark.parametrize("in_head", [True, False])
def test_a_header_in_the_head_is_counted_if_its_message_is_cut(rule, in_head):
    rows = open_renderer("primer", "bytes").render([chat("Ss", "Uq", "Aa", "Uq", "Aa")])
    if in_head:
        # Some templates write tools after the header of the first user message.
        header = (rows.spans["message"] == 1) & (rows.spans["part"] == Part.OPEN)
        rows.spans["message"][header], rows.spans["role"][header] = 0, Role.SYSTEM
        rows.spans["part"][header] = Part.CLOSE
    ledger = Ledger()
    is_dropped = in_head and rule == "exchanges"
    assert len(truncate(rows, 10, rule, ledger=ledger).ids) == (0 if is_dropped else 9 + in_head)
    counted = [(bucket, reason) for bucket, reason, _ in ledger if bucket != "truncated"]
    assert counted == [("dropped" if is_dropped else "noted", "header_of_cut_message")] * in_head
    assert truncate(rows, 15, rule, ledger=(whole := Ledger())) is rows
    assert not list(whole)
