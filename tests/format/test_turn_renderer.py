from __future__ import annotations

import json
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.errors import DataError, RecordError
from chatmill.format import PRESETS, TurnRenderer, load_format, parse_format
from chatmill.records import Message, Record, ToolCall
from chatmill.records.record import new_message
from chatmill.rows import NO_MESSAGE, File, Part, Role, Rows, Rule, TrainOn, concat
from chatmill.tokenizer import open_tokenizer

FORMATS = {name: load_format(name) for name in PRESETS}
TOKENIZERS = {name: open_tokenizer("bytes", control=format.tokens) for name, format in FORMATS.items()}

CHAT = Record(
    [
        Message("system", "S"),
        Message("user", "q é"),
        Message("assistant", "a"),
        Message("user", ""),
        Message("assistant", ""),
    ],
    source="s",
    file="chat.jsonl",
    line=7,
)
TOOLS = Record(
    [
        Message("user", "sum?"),
        Message(
            "assistant",
            "let me",
            reasoning="hm",
            tool_calls=(ToolCall("add", '{"b":1,"a":2}'), ToolCall("übér", "{}")),
        ),
        Message("tool", "3", name="add"),
        Message("assistant", "it is 3"),
    ],
    file="tool.jsonl",
    line=1,
)


def told(rows: Rows, name: str, row: int = 0) -> list[str]:
    one, tokenizer = rows[row : row + 1], TOKENIZERS[name]
    lines = []
    for span, start, stop in zip(one.spans, one.span_start, one.span_start[1:], strict=False):
        mark = {0.0: " ", 1.0: "*"}.get(float(span["weight"]), str(span["weight"]))
        message = "-" if span["message"] == NO_MESSAGE else span["message"]
        what = f"{Role(span['role']).name} {Part(span['part']).name} {Rule(span['rule']).name}".lower()
        lines.append(f"{mark} {message} {what} {tokenizer.decode(one.ids[start:stop])!r}")
    return lines


def rendered(record: Record, name: str, **options: str) -> list[str]:
    rows = TurnRenderer(FORMATS[name], TOKENIZERS[name]).render([record], **options)
    rows.check()
    return told(rows, name)


def test_chatml_trains_content_and_the_end_of_turn_but_not_the_newline_after_it():
    assert rendered(CHAT, "chatml") == [
        "  0 system open header '<|im_start|>'",
        r"  0 system content role 'system\nS'",
        "  0 system close role '<|im_end|>'",
        r"  0 system close header '\n'",
        "  1 user open header '<|im_start|>'",
        r"  1 user content role 'user\nq é'",
        "  1 user close role '<|im_end|>'",
        r"  1 user close header '\n'",
        r"  2 assistant open header '<|im_start|>assistant\n'",
        "* 2 assistant content role 'a'",
        "* 2 assistant close role '<|im_end|>'",
        r"  2 assistant close header '\n'",
        "  3 user open header '<|im_start|>'",
        r"  3 user content role 'user\n'",
        "  3 user close role '<|im_end|>'",
        r"  3 user close header '\n'",
        r"  4 assistant open header '<|im_start|>assistant\n'",
        "* 4 assistant close role '<|im_end|>'",
        r"  4 assistant close header '\n'",
    ]


def test_ngpt_adds_its_default_system_text():
    tokens = FORMATS["ngpt"].tokens
    assert rendered(Record([Message("user", "q"), Message("assistant", "a")]), "ngpt") == [
        f"  - system open header '{tokens['sys']}'",
        "  - system content role 'you are a helpful assistant.'",
        f"  - system close role '{tokens['eot']}'",
        f"  0 user open header '{tokens['usr']}'",
        "  0 user content role 'q'",
        f"  0 user close role '{tokens['eot']}'",
        f"  1 assistant open header '{tokens['asst']}'",
        "* 1 assistant content role 'a'",
        f"* 1 assistant close role '{tokens['eot']}'",
    ]


def test_primer_adds_nothing_and_has_no_space_between_marker_and_text():
    assert rendered(Record([Message("user", "q"), Message("assistant", "a")]), "primer") == [
        "  0 user open header '<|usr|>'",
        "  0 user content role 'q'",
        "  0 user close role '<|eot|>'",
        "  1 assistant open header '<|asst|>'",
        "* 1 assistant content role 'a'",
        "* 1 assistant close role '<|eot|>'",
    ]


def test_post_training_trains_the_opening_marker_too_and_ends_each_conversation():
    assert rendered(Record([Message("user", "q"), Message("assistant", "a")]), "post-training") == [
        "  0 user open role '<|USER|>'",
        "  0 user content role 'q'",
        "  0 user close role '<|END|>'",
        "* 1 assistant open role '<|ASSISTANT|>'",
        "* 1 assistant content role 'a'",
        "* 1 assistant close role '<|END|>'",
        "  1 none eos header '<|EOS|>'",
    ]


def test_an_incomplete_turn_has_no_close_and_is_never_trained():
    record = Record(
        [Message("user", "q"), Message("assistant", "a", complete=False), Message("user", "r", complete=False)]
    )
    assert rendered(record, "post-training", train_on="all")[3:] == [
        "  1 assistant open unfinished '<|ASSISTANT|>'",
        "  1 assistant content unfinished 'a'",
        "  2 user open unfinished '<|USER|>'",
        "  2 user content unfinished 'r'",
        "  2 none eos header '<|EOS|>'",
    ]


def test_reasoning_and_tool_calls_are_trained_as_separate_parts_and_results_are_not_trained():
    assert rendered(TOOLS, "primer", train_on="all") == [
        "  0 user open header '<|usr|>'",
        "* 0 user content role 'sum?'",
        "* 0 user close role '<|eot|>'",
        "  1 assistant open header '<|asst|>'",
        r"* 1 assistant reasoning role '<think>\nhm\n</think>\n\n'",
        "* 1 assistant content role 'let me'",
        r"""* 1 assistant tool_call role '\n<tool_call>\n{"name":"add","arguments":{"b":1,"a":2}}\n</tool_call>"""
        r"""\n<tool_call>\n{"name":"übér","arguments":{}}\n</tool_call>'""",
        "* 1 assistant close role '<|eot|>'",
        "  2 tool open header '<|usr|>'",
        r"  2 tool content role '<tool_response>\n3\n</tool_response>'",
        "  2 tool close role '<|eot|>'",
        "  3 assistant open header '<|asst|>'",
        "* 3 assistant content role 'it is 3'",
        "* 3 assistant close role '<|eot|>'",
    ]


def test_tool_definitions_are_part_of_the_system_turn_which_is_added_if_missing():
    listed = '<tools>\n{"name":"f"}\n{"name":"g"}\n</tools>'
    for messages, number in (([Message("system", "S"), Message("user", "q")], "0"), ([Message("user", "q")], "-")):
        line = rendered(Record(messages, tools=('{"name":"f"}', '{"name":"g"}')), "primer")[1]
        assert line.startswith(f"  {number} system content role ")
        assert repr(listed)[1:-1] in line
        assert ("'S\\n\\n# Tools" in line) == (number == "0")


def test_a_weight_of_a_message_overrides_the_format_and_train_on():
    record = Record(
        [
            Message("user", "q", weight=1.0),
            Message("assistant", "a", weight=0.0),
            Message("assistant", "b", weight=0.25),
            Message("assistant", "c"),
        ]
    )
    for train_on in get_args(TrainOn):
        assert rendered(record, "primer", train_on=train_on) == [
            "  0 user open header '<|usr|>'",
            "* 0 user content flag 'q'",
            "* 0 user close flag '<|eot|>'",
            "  1 assistant open header '<|asst|>'",
            "  1 assistant content flag 'a'",
            "  1 assistant close flag '<|eot|>'",
            "  2 assistant open header '<|asst|>'",
            "0.25 2 assistant content flag 'b'",
            "0.25 2 assistant close flag '<|eot|>'",
            "  3 assistant open header '<|asst|>'",
            "* 3 assistant content role 'c'",
            "* 3 assistant close role '<|eot|>'",
        ]


def test_last_trains_only_the_last_answer_and_no_earlier_one_instead():
    chat = [Message("user", "q"), Message("assistant", "a"), Message("user", "r"), Message("assistant", "b")]
    trained = [line for line in rendered(Record(chat), "primer", train_on="last") if line[0] == "*"]
    assert trained == ["* 3 assistant content role 'b'", "* 3 assistant close role '<|eot|>'"]
    flagged = [*chat[:3], Message("assistant", "b", weight=0.0)]
    assert [line for line in rendered(Record(flagged), "primer", train_on="last") if line[0] == "*"] == []


@pytest.mark.parametrize(
    ("roles", "trained"),
    [
        ("suauata", [4, 6]),
        ("aua", [2]),
        ("ata", [0, 2]),
        ("uau", []),
        ("uuaa", [2, 3]),
        ("u", []),
    ],
)
def test_last_exchange_trains_every_answer_after_the_last_user_message(roles, trained):
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    record = Record([Message(names[role], str(at)) for at, role in enumerate(roles)])
    lines = [line for line in rendered(record, "primer", train_on="last-exchange") if line[0] == "*"]
    assert lines == [
        line
        for at in trained
        for line in (f"* {at} assistant content role '{at}'", f"* {at} assistant close role '<|eot|>'")
    ]


def test_a_format_with_control_tokens_inside_bodies_and_around_conversations():
    format = parse_format(
        """
        begin = "<s>"
        end = "</s>"
        [tokens]
        bos = "<s>"
        eos = "</s>"
        turn = "<t>"
        think = "<think>"
        unthink = "</think>"
        [user]
        open = "<t>U:"
        close = "!<t>"
        [assistant]
        open = "<t>A:"
        close = "!<t>."
        [body]
        reasoning = "<think>{}</think>\\n"
        tool_call = "CALL {}"
        """,
        where="own",
    )
    tokenizer = open_tokenizer("bytes", control=format.tokens, add_tokens=True)
    chat = [Message("user", "q"), Message("assistant", "a", reasoning="<think>", tool_calls=(ToolCall("f", "{}"),))]
    rows = TurnRenderer(format, tokenizer).render([Record(chat)])
    rows.check()
    spans = [
        (float(span["weight"]), Part(span["part"]).name, tokenizer.decode(rows.ids[start:stop]))
        for span, start, stop in zip(rows.spans, rows.span_start, rows.span_start[1:], strict=False)
    ]
    assert spans == [
        (0.0, "OPEN", "<s>"),
        (0.0, "OPEN", "<t>"),
        (0.0, "CONTENT", "U:q!"),
        (0.0, "CLOSE", "<t>"),
        (0.0, "OPEN", "<t>A:"),
        (1.0, "REASONING", "<think>"),
        (1.0, "REASONING", "<think>"),
        (1.0, "REASONING", "</think>"),
        (1.0, "REASONING", "\n"),
        (1.0, "CONTENT", "a"),
        (1.0, "TOOL_CALL", '\nCALL {"name":"f","arguments":{}}'),
        (1.0, "CONTENT", "!"),
        (1.0, "CLOSE", "<t>"),
        (0.0, "CLOSE", "."),
        (0.0, "EOS", "</s>"),
    ]
    think = tokenizer.special_token_ids()["think"]
    # Only the format writes the control token; the same text in the data is plain text.
    assert np.count_nonzero(rows.ids == think) == 1


def test_origins_name_the_file_and_line_of_every_row():
    rows = TurnRenderer(FORMATS["chatml"], TOKENIZERS["chatml"]).render([CHAT, TOOLS, CHAT])
    assert rows.files == (File("s", "chat.jsonl"), File("", "tool.jsonl"))
    assert rows.origins[["file", "line"]].tolist() == [(0, 7), (1, 1), (0, 7)]


def test_no_records_give_no_rows():
    assert len(TurnRenderer(FORMATS["chatml"], TOKENIZERS["chatml"]).render([])) == 0


def test_a_tokenizer_opened_for_another_format_is_refused():
    with pytest.raises(DataError, match="opened for other control tokens"):
        TurnRenderer(FORMATS["ngpt"], TOKENIZERS["primer"]).render([CHAT])


def test_a_role_that_the_format_does_not_define_is_a_record_error():
    format = parse_format(
        '[tokens]\nt="<t>"\n[user]\nopen="<t>"\nclose="<t>"\n[assistant]\nopen="<t>"\nclose="<t>"', where="two"
    )
    with pytest.raises(
        RecordError, match=r"chat.jsonl:7: message 0 has role system, which the format two does not define"
    ):
        list(TurnRenderer(format, TOKENIZERS["ngpt"]).renderable([CHAT]))
    rejected: list[RecordError] = []
    plain = Record([Message("user", "q")])
    assert list(TurnRenderer(format, TOKENIZERS["ngpt"]).renderable([CHAT, plain, TOOLS], rejected.append)) == [plain]
    assert [fault.line for fault in rejected] == [7, 1]


CONTROL = [token for format in FORMATS.values() for token in format.tokens.values()]
text_ = st.lists(st.one_of(st.sampled_from([*CONTROL, "<|", "|>", "\n", " "]), st.text(max_size=4)), max_size=4).map(
    "".join
)
calls_ = st.lists(st.builds(ToolCall, text_, st.sampled_from(["{}", '{"k":"v"}'])), max_size=2).map(tuple)
# `new_message` does not validate messages, so tool results may have any weight; formats must still render them.
plain_ = st.builds(
    new_message,
    role=st.sampled_from(["user", "tool", "assistant"]),
    content=text_,
    weight=st.sampled_from([None, None, None, 0.0, 0.5]),
    complete=st.sampled_from([True, True, True, False]),
)
answer_ = st.builds(Message, role=st.just("assistant"), content=text_, reasoning=text_, tool_calls=calls_)
system_ = st.lists(st.builds(Message, role=st.just("system"), content=text_), max_size=1)
messages_ = st.tuples(system_, st.lists(st.one_of(plain_, answer_), min_size=1, max_size=5)).map(lambda t: t[0] + t[1])
record_ = st.builds(
    Record, messages=messages_, tools=st.sampled_from([(), (), ('{"name":"f"}',)]), line=st.integers(0, 99)
)


@given(record_, st.sampled_from(PRESETS))
def test_control_tokens_come_only_from_the_format(record, name):
    rows = TurnRenderer(FORMATS[name], TOKENIZERS[name]).render([record])
    format, control = FORMATS[name], TOKENIZERS[name].special_token_ids()
    expected = []
    messages = record.messages
    if messages[0].role != "system" and (record.tools or format.default_system is not None):
        messages = [Message("system", ""), *messages]
    for message in messages:
        turn = format.turns[message.role]
        pieces = format.split(turn.open) + (format.split(turn.close) if message.complete else [])
        expected += [control[key] for key, _ in pieces if key is not None]
    expected += [control[key] for key, _ in format.split(format.end)]
    assert rows.ids[rows.ids >= 256].tolist() == expected


@given(st.lists(record_, max_size=6), st.sampled_from(PRESETS), st.sampled_from(get_args(TrainOn)))
def test_rendering_together_equals_rendering_one_by_one(records, name, train_on):
    together = TurnRenderer(FORMATS[name], TOKENIZERS[name]).render(records, train_on=train_on)
    together.check()
    apart = concat(
        [TurnRenderer(FORMATS[name], TOKENIZERS[name]).render([record], train_on=train_on) for record in records]
    )
    for column in ("ids", "spans", "first_span", "origins", "first_segment"):
        assert np.array_equal(getattr(together, column), getattr(apart, column)), column
    assert together.files == apart.files


@given(record_, st.sampled_from(PRESETS))
def test_the_prompt_of_every_answer_is_a_prefix_of_the_training_row(record, name):
    row = TurnRenderer(FORMATS[name], TOKENIZERS[name]).render([record]).ids.tolist()
    for at, message in enumerate(record.messages):
        if message.role == "assistant" and at and all(m.complete for m in record.messages[:at]):
            asked = Record(record.messages[:at], tools=record.tools)
            prompt = TurnRenderer(FORMATS[name], TOKENIZERS[name]).prompt_ids(asked)
            assert row[: len(prompt)] == prompt


@given(record_, st.sampled_from(PRESETS))
def test_the_row_decodes_to_the_text_of_the_conversation(record, name):
    format = FORMATS[name]
    messages = list(record.messages)
    listed = format.body["tools"].replace("{}", "\n".join(record.tools), 1) if record.tools else ""
    if messages[0].role == "system":
        content = messages[0].content
        messages[0] = Message("system", "\n\n".join(filter(None, [content, listed])), complete=messages[0].complete)
    elif listed or format.default_system is not None:
        messages.insert(0, Message("system", "\n\n".join(filter(None, [format.default_system or "", listed]))))
    written = ""
    for message in messages:
        turn = format.turns[message.role]
        body = format.body["reasoning"].replace("{}", message.reasoning, 1) if message.reasoning else ""
        body += message.content
        for number, call in enumerate(message.tool_calls):
            body += "\n" if message.content or number else ""
            name_text = json.dumps(call.name, ensure_ascii=False)
            body += format.body["tool_call"].replace("{}", f'{{"name":{name_text},"arguments":{call.arguments}}}', 1)
        written += turn.open + body + (turn.close if message.complete else "")
    written += format.end
    rows = TurnRenderer(format, TOKENIZERS[name]).render([record])
    assert TOKENIZERS[name].decode(rows.ids) == written
