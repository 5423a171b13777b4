from __future__ import annotations

import gzip
import json
import re
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.errors import DataError, RecordError, UsageError
from chatmill.records import Message, Record, ShapeOptions, read_records
from chatmill.records.shapes import parser
from chatmill.records.shapes.plain_text import TextTemplates

TURNS = [Message("user", "q"), Message("assistant", "a")]


def read(record: Any, shape: str, **options: str) -> Record | RecordError:
    parse = parser(shape, file="a.jsonl", source="a", limit=2**20, options=ShapeOptions(**options))
    (result,) = parse(1, json.dumps(record).encode())
    return result


def read_file(tmp_path, record: Any, columns: str | None) -> list[Record]:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([record]))
    return list(read_records([path], options=ShapeOptions(columns)))


@pytest.mark.parametrize(
    ("record", "columns", "messages", "unread"),
    [
        (
            {"dialog": [{"who": "Q", "says": "q", "mood": 1}, {"who": "A", "says": "a"}], "lang": "en"},
            "messages=dialog,role=who,content=says,user=Q,assistant=A",
            TURNS,
            ("dialog[].mood", "lang"),
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "messages": 3},
            "messages=conversations, role=from, content=value, user=human, assistant=gpt",
            TURNS,
            ("messages",),
        ),
        ({"question": "q", "answer": "a"}, "prompt=question,completion=answer", TURNS, ()),
        (
            {"conversations": [{"from": "User", "value": "q"}, {"from": "Bot", "value": "a"}]},
            "user=User,assistant=Bot",
            TURNS,
            (),
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            "messages=conversations,role=from,content=value,user=human",
            TURNS,
            (),
        ),
        (
            {"chat": '[{"from": "human", "value": "q", "n": 1}, {"from": "gpt", "value": "a"}]'},
            "messages=chat,role=from,content=value",
            TURNS,
            ("chat[].n",),
        ),
        ({"question": "q", "answer": "a", "output": 1}, "instruction=question,output=answer", TURNS, ("output",)),
        (
            {
                "conversations": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "a"},
                "rejected": 1,
            },
            "prompt=conversations,completion=chosen,role=from,content=value,user=human,assistant=gpt",
            TURNS,
            ("rejected",),
        ),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "learn": False}]},
            "train=learn",
            [TURNS[0], Message("assistant", "a", weight=0.0)],
            (),
        ),
        (
            {"messages": [{"role": "User", "content": "q"}, {"role": "Bot", "content": "a"}]},
            "user=User,assistant=Bot,assistant=Chatbot",
            TURNS,
            (),
        ),
    ],
)
def test_columns_map_keys_and_roles(tmp_path, record, columns, messages, unread):
    (found,) = read_file(tmp_path, record, columns)
    assert (found.messages, found.unread_keys) == (messages, unread)


CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": CHAT[1:]},
        {"prompt": "q", "chosen": CHAT, "rejected": CHAT},
        {"prompt": "q", "messages": CHAT, "chosen": CHAT, "rejected": CHAT},
        {"chosen": CHAT, "rejected": CHAT},
        {"chosen_messages": CHAT, "rejected_messages": CHAT},
        {"messages": CHAT[:1], "chosen": CHAT[1], "rejected": CHAT[1]},
        {"messages": CHAT[:1], "chosen": "a", "rejected": "b"},
        {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"}, "rejected": "b"},
        {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
        {"system": "", "question": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "completion": "b", "chosen_response": "a"},
    ],
)
def test_the_columns_in_the_error_about_a_preference_pair_select_the_better_answer(tmp_path, record):
    with pytest.raises(RecordError) as refused:
        read_file(tmp_path, record, None)
    columns = re.fullmatch(r"expected one answer; --columns (\S+) selects the better answer", refused.value.right)
    assert columns is not None
    (found,) = read_file(tmp_path, record, columns[1])
    assert [(turn.role, turn.content) for turn in found.messages] == [("user", "q"), ("assistant", "a")]
    assert found.messages[-1].weight is None


@pytest.mark.parametrize(
    ("record", "columns", "fault"),
    [
        (
            {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"}},
            "completion=chosen",
            '--columns reads "chosen" as "completion", a key that this record shape does not have; expected one answer'
            "; "
            "--columns prompt=conversations,completion=chosen,role=from,content=value selects the better answer",
        ),
        (
            {"messages": CHAT, "chosen": "a"},
            "output=chosen",
            '--columns reads "chosen" as "output", a key that this record shape does not have; expected one answer; '
            "--columns prompt=messages,completion=chosen selects the better answer",
        ),
        (
            {"chosen_messages": CHAT},
            "completion=chosen",
            'the record has "chosen_messages", as in preference data (DPO); expected one answer; --columns '
            "messages=chosen_messages selects the better answer",
        ),
        (
            {"prompt": "q", "chosen": [{"role": "system", "content": "s"}, *CHAT]},
            "completion=chosen",
            "the completion repeats the prompt; expected only the answer; if a column contains the whole "
            "conversation, use --columns messages=COLUMN",
        ),
        (
            {"input": {"messages": CHAT[:1]}, "preferred_output": CHAT[1:], "non_preferred_output": CHAT[1:]},
            None,
            'the record has "preferred_output", as in preference data (DPO); expected one answer; convert the record '
            "to messages that end with the better answer",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:--columns has")
def test_columns_that_lose_the_better_answer_or_repeat_its_prompt_are_refused(tmp_path, record, columns, fault):
    with pytest.raises(RecordError) as refused:
        read_file(tmp_path, record, columns)
    assert f"{refused.value.what}; {refused.value.right}" == fault


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ("messages", '--columns "messages" is not NAME=COLUMN; expected pairs such as'),
        ("messages=", '--columns "messages=" is not NAME=COLUMN'),
        ("bogus=x", '--columns has the unknown name "bogus"; expected one of messages, prompt, '),
        ("messages=a,messages=b", '--columns maps "b" or "messages" twice; expected each name once'),
        ("role=a,content=a", '--columns maps "a" or "content" twice; expected each name once'),
    ],
)
def test_invalid_columns_are_reported_in_one_line(tmp_path, columns, fault):
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(UsageError) as refused:
        list(read_records([tmp_path / "a.jsonl"], options=ShapeOptions(columns)))
    assert str(refused.value).startswith(fault)


def test_a_column_that_no_record_has_is_reported(tmp_path):
    records = [{"chat": [{"role": "user", "content": "q", "mood": 1}]}, {"chat": '[{"role": "user", "content": "q"}]'}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = ShapeOptions("messages=chat,system=sistem,name=mod")
    with pytest.warns(UserWarning, match="--columns has") as told:
        assert len(list(read_records([tmp_path / "a.jsonl"], options=options))) == 2
    right = "which none of the first 1,000 records has; correct or remove this name"
    assert {str(warning.message) for warning in told} == {
        f'--columns has the name "{name}", {right}' for name in ("mod", "sistem")
    }


@given(st.sampled_from(("messages", "sharegpt", "tool")), st.text(min_size=1, max_size=45) | st.just("Model"))
def test_the_columns_in_the_error_about_a_role_map_it(shape, name):
    key, role, text = ("conversations", "from", "value") if shape == "sharegpt" else ("messages", "role", "content")
    record = {key: [{role: "user", text: "q"}, {role: name, text: "a"}]}
    error = read(record, shape)
    if not isinstance(error, RecordError) or "--columns" not in error.right:
        assert name not in ("Model", "User")
        return
    words = shlex.split(error.right.partition("--columns ")[2])
    columns = words[0] if words[1:] == ["maps", "this", "role"] else words[-1]
    mapped = read(record, shape, columns=columns)
    assert isinstance(mapped, Record) and [message.content for message in mapped.messages] == ["q", "a"]
    assert mapped.messages[1].role == columns.partition("=")[0]


def test_an_error_about_a_role_names_columns_only_where_they_can_be_used():
    for shape in ("primer", "oasst1"):
        record = {"prompt": {"role": "User", "text": "q"}} if shape == "oasst1" else {"messages": [{"role": "User"}]}
        error = read(record, shape)
        assert isinstance(error, RecordError) and 'has role "User"' in error.what and "--columns" not in error.right
    with pytest.raises(RecordError, match=r"expected system, user, assistant or tool$"):
        Message("User", "q")


def test_columns_apply_only_to_shapes_with_configurable_keys():
    with pytest.raises(UsageError, match="--columns cannot be used with the shape primer, whose key names are fixed"):
        read({}, "primer", columns="role=from")


@given(st.permutations(["dialog", "who", "says", "extra"]), st.sampled_from(["x", "Ω"]))
def test_columns_give_the_same_records_as_renamed_keys(names, suffix):
    dialog, who, says, extra = (name + suffix for name in names)
    theirs = {dialog: [{who: "H", says: "q", extra: 1}, {who: "M", says: "a"}], extra: 2}
    ours = {"messages": [{"role": "user", "content": "q", extra: 1}, {"role": "assistant", "content": "a"}], extra: 2}
    columns = f"messages={dialog},role={who},content={says},user=H,assistant=M"
    renamed, plain = read(theirs, "messages", columns=columns), read(ours, "messages")
    assert isinstance(renamed, Record)
    assert isinstance(plain, Record)
    assert renamed.messages == plain.messages
    assert renamed.unread_keys == tuple(name.replace("messages[]", f"{dialog}[]") for name in plain.unread_keys)


def test_prompts_and_completions_can_be_texts_or_messages():
    system = {"role": "system", "content": "s"}
    shot = [{"role": "user", "content": "q0"}, {"role": "assistant", "content": "a0"}]
    found = [
        read({"prompt": "q", "completion": "a"}, "prompt-completion"),
        read({"prompt": "", "completion": "a"}, "prompt-completion"),
        read(
            {
                "prompt": [system, *shot, {"role": "user", "content": "q"}],
                "completion": [{"role": "assistant", "content": "a"}],
            },
            "prompt-completion",
        ),
    ]
    context = [Message("user", "q0"), Message("assistant", "a0", weight=0.0)]
    assert [each.messages if isinstance(each, Record) else each for each in found] == [
        TURNS,
        TURNS[1:],
        [Message("system", "s"), *context, *TURNS],
    ]
    refused = read({"prompt": "q", "completion": 3}, "prompt-completion")
    assert isinstance(refused, RecordError)
    assert str(refused).endswith("completion is a number; expected a string or a list of messages")


def trained_text(message: Message) -> str:
    marks = ["." if message.weight == 0 else "-"] * len(message.content)
    for start, stop, weight in message.train_ranges:
        marks[start:stop] = ["-" if weight else "."] * (stop - start)
    return "".join(marks)


@pytest.mark.parametrize(
    ("text", "trained"),
    [
        ("Q:a A:b Q:c A:d", "......-.......-"),
        ("A:b", "..-"),
        ("Q:a", "..."),
        ("Q:a A:b Q:c", "......-...."),
        ("A:A:", "..--"),
        ("x A:", "...."),
    ],
)
def test_text_after_the_response_template_is_trained(text, trained):
    found = read({"text": text}, "text", response_template="A:", instruction_template=" Q:")
    assert isinstance(found, Record)
    assert found.is_text
    assert [trained_text(message) for message in found.messages] == [trained]


@given(st.text("AQ: x", max_size=30))
def test_the_trained_parts_of_any_text_match_an_oracle(text):
    message = TextTemplates("A:", "Q:").train(text)
    expected, at = "", 0
    while (start := text.find("A:", at)) >= 0:
        stop = text.find("Q:", start + 2)
        stop = len(text) if stop < 0 else stop
        expected += "." * (start + 2 - at) + "-" * (stop - start - 2)
        at = stop
    assert trained_text(message) == expected + "." * (len(text) - at)
    assert message.weight == (None if at == len(text) and text else 0.0)


def test_invalid_templates_are_usage_errors():
    for options, fault in (
        ({"instruction_template": "Q"}, "--instruction-template requires --response-template"),
        ({"response_template": ""}, "must not be empty"),
    ):
        with pytest.raises(UsageError, match=fault):
            read({"text": "a"}, "text", **options)


def test_text_before_a_prompt_is_never_dropped():
    pair = {"prompt": "q", "completion": "a"}
    found = read({**pair, "system": "s", "history": []}, "prompt-completion")
    assert isinstance(found, Record)
    assert (found.messages, found.unread_keys) == ([Message("system", "s"), *TURNS], ())
    chat = {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "completion": "a"}
    for record, fault in (
        ({**pair, "history": [["a", "b"]]}, 'the record has a "history"; use the shape alpaca'),
        ({**chat, "system": "t"}, "the record has a system text and a system message; expected only one system text"),
    ):
        assert fault in str(read(record, "prompt-completion"))
    dolly = read({"instruction": "q", "context": "", "response": "a", "system": "s"}, "dolly")
    assert isinstance(dolly, Record)
    assert dolly.messages == [Message("system", "s"), *TURNS]


def test_templates_apply_only_to_texts(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "q", "completion": "a"}')
    with pytest.raises(
        UsageError, match="--response-template is only for records of shape text, not prompt-completion; remove"
    ):
        list(read_records([tmp_path / "a.jsonl"], options=ShapeOptions(response_template="A:")))


def test_a_json_array_in_a_jsonl_file_is_read(tmp_path):
    records = [{"messages": [{"role": "user", "content": f"{number} ,[]"}], "id": number} for number in range(3)]
    for name, text in (
        ("a.jsonl", json.dumps(records, indent=1)),
        ("b.jsonl", json.dumps(records)),
        ("c.jsonl", "\n\n" + json.dumps(records) + "\n"),
        ("d.jsonl", json.dumps(records[0]) + "\n" + json.dumps(records[1]) + "\n" + json.dumps(records[2])),
        ("e.jsonl", "\n".join(json.dumps(each["messages"]) for each in records)),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        for path in (tmp_path / name, tmp_path / f"{name}.gz"):
            found = list(read_records([path]))
            assert [each.messages for each in found] == [[Message("user", f"{number} ,[]")] for number in range(3)]
    (tmp_path / "f.jsonl").write_text(json.dumps(records[0]["messages"]))
    assert [each.messages for each in read_records([tmp_path / "f.jsonl"])] == [[Message("user", "0 ,[]")]]


def test_content_parts_of_all_types_are_read():
    parts = [
        {"type": "reasoning", "value": "r"},
        {"type": "text", "value": "a"},
        {"type": "text", "text": "b", "cache_control": {}},
        {"type": "output_text", "text": "c"},
        {"type": "text", "content": "d"},
        {"type": "tool_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
    ]
    found = read({"messages": [{"role": "assistant", "content": parts}]}, "messages")
    assert isinstance(found, Record)
    (message,) = found.messages
    assert (message.reasoning, message.content) == ("r", "abcd")
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("f", '{"x":1}')]
    assert found.unread_keys == ("messages[].content[].cache_control",)


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        (
            [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "b"}],
            "part 1 is a reasoning part after text",
        ),
        ([{"type": "tool_call", "value": "{"}], "part 0 is not JSON"),
        (
            [{"type": "tool_call", "value": '{"name": "f", "arguments": {}}'}, {"type": "text", "text": "a"}],
            "part 1 is text after a tool call",
        ),
        ([{"type": "image_url", "image_url": {}}], 'part 0 has type "image_url"; chatmill trains only on text'),
        ([{"type": "tool_use", "name": "f"}], 'part 0 has type "tool_use"; expected'),
        ([{"type": "reasoning", "value": "r", "train": False}], 'part 0 has a "train"; expected no weight'),
    ],
)
def test_unsupported_content_parts_are_refused(parts, fault):
    refused = read({"messages": [{"role": "assistant", "content": parts}]}, "messages")
    assert isinstance(refused, RecordError)
    assert fault in str(refused)


def test_content_parts_with_weights_become_ranges_of_the_text():
    parts = [
        {"type": "text", "text": "é1", "train": False},
        {"type": "text", "text": "keep"},
        {"type": "text", "text": "x", "weight": 0.5},
    ]
    found = read({"messages": [{"role": "assistant", "content": parts}]}, "messages")
    assert isinstance(found, Record)
    assert found.messages == [Message("assistant", "é1keepx", train_ranges=[[0, 2, 0.0], [6, 7, 0.5]])]
    untrained = read({"messages": [{"role": "assistant", "content": parts, "train": False}]}, "messages")
    assert isinstance(untrained, Record)
    assert untrained.messages == [Message("assistant", "é1keepx", train=False)]


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "as in preference data (DPO)"),
        ({"query": "q", "images": ["a.png"]}, 'has "images", but chatmill trains only on text'),
        ({"input_ids": [1, 2], "labels": [1, 2]}, "it is already tokenized"),
        ({"contents": [{"role": "user", "parts": [{"text": "q"}]}]}, "as in the Gemini format; expected messages"),
        ({"segments": [{"label": True, "text": "a"}]}, "as in the Axolotl segments format; expected messages"),
        ({"conversation": [{"human": "q", "assistant": "a"}]}, "the format of human and assistant pairs; expected"),
    ],
)
def test_data_of_another_kind_is_named_when_no_shape_is_detected(tmp_path, record, fault):
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    with pytest.raises(DataError) as refused:
        list(read_records([tmp_path / "a.jsonl"]))
    assert fault in str(refused.value)
    assert "a.jsonl:1: " in str(refused.value)
