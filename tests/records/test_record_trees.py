from __future__ import annotations

import json

import pytest

from chatmill.records import Message, Record


def record(*messages: Message, id: str, line: int = 1, unread_keys: tuple[str, ...] = ()) -> Record:
    return Record(list(messages), id, source="a", file="a.jsonl", line=line, unread_keys=unread_keys)


def user(content: str) -> Message:
    return Message("user", content)


def assistant(content: str) -> Message:
    return Message("assistant", content)


def lines(values) -> bytes:
    return "\n".join(json.dumps(value) for value in values).encode()


def node(text, role="assistant", rank=None, deleted=False, replies=()):
    return {
        "message_id": text,
        "text": text,
        "role": role,
        "rank": rank,
        "deleted": deleted,
        "replies": list(replies),
    }


TREE = node(
    "q",
    "prompter",
    replies=[
        node("unranked"),
        node("second", rank=1),
        node("best but deleted", rank=0, deleted=True, replies=[node("lost", "prompter")]),
        node(
            "first",
            rank=0.0,
            replies=[
                node("tie a", "prompter", rank=2),
                node("tie b", "prompter", rank=2),
                node("worse", "prompter", rank=3),
            ],
        ),
    ],
)
BEST = (user("q"), assistant("first"), user("tie a"))


def flat(tree, id, parent=None):
    message = {key: value for key, value in tree.items() if key != "replies"}
    yield {**message, "message_tree_id": id, "parent_id": parent}
    for reply in tree["replies"]:
        yield from flat(reply, id, tree["message_id"])


def test_oasst1_chooses_the_best_ranked_reply_that_is_not_deleted(read_bytes):
    data = lines([{"message_tree_id": "t1", "tree_state": "ready", "prompt": TREE}])
    assert read_bytes(data, shape="oasst1") == (
        [record(*BEST, id="t1", unread_keys=("tree_state",))],
        [],
    )


def test_oasst1_reads_a_tree_with_only_a_prompt(read_bytes):
    data = lines([{**TREE, "parent_id": None, "lang": "en"}])
    assert read_bytes(data) == ([record(*BEST, id=TREE["message_id"], unread_keys=("messages[].lang",))], [])


def test_oasst1_groups_flat_messages_by_tree(read_bytes):
    other = node("hello", "prompter", replies=[node("hi")])
    data = lines([*flat(TREE, "t1"), *flat(other, "t2"), {"message_tree_id": "t3", "prompt": other}])
    expected = [
        record(*BEST, id="t1"),
        record(user("hello"), assistant("hi"), id="t2", line=10),
        record(user("hello"), assistant("hi"), id="t3", line=12),
    ]
    assert read_bytes(data, shape="oasst1") == (expected, [])


def test_oasst1_follows_a_flat_chain_of_any_depth(read_bytes):
    chain = [
        {
            "message_id": str(index),
            "parent_id": str(index - 1) if index else None,
            "message_tree_id": "t",
            "text": str(index),
            "role": "assistant" if index % 2 else "prompter",
        }
        for index in range(5000)
    ]
    turns = [Message("assistant" if index % 2 else "user", str(index)) for index in range(5000)]
    assert read_bytes(lines(chain), shape="oasst1") == ([record(*turns, id="t")], [])


def reply(name, parent, **fields):
    return {"message_id": name, "parent_id": parent, "message_tree_id": "t", "text": name, "role": "prompter", **fields}


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        (
            [reply("a", None), reply("b", "z")],
            'message 1 replies to "z", which is not in its tree; expected all messages of a tree on consecutive lines',
        ),
        ([reply("a", None), reply("a", "a")], 'message 1 repeats message_id "a"; expected each message once'),
        ([reply("a", None), reply("b", None)], "the tree has 2 messages without parent_id; expected one root message"),
        ([reply("a", "b"), reply("b", "a")], "the tree has 0 messages without parent_id; expected one root message"),
        ([reply("a", None), reply("b", 1)], "message 1: parent_id is a number; expected a string"),
    ],
)
def test_errors_of_invalid_flat_trees(read_bytes, messages, line):
    assert read_bytes(b"\n\n" + lines(messages), shape="oasst1") == ([], [f"a.jsonl:3 (id=t): {line}"])


@pytest.mark.parametrize(
    ("broken", "line"),
    [
        (b"{", "a.jsonl:2: invalid JSON at column 2 (unexpected end); expected one JSON object"),
        (
            lines([reply(None, "a")]),
            "a.jsonl:2 (id=t): the record is neither a message tree nor a message of a tree; "
            'expected "prompt", "replies", or the strings "message_id" and "message_tree_id"',
        ),
    ],
)
def test_an_invalid_line_in_a_flat_tree_is_a_separate_fault(read_bytes, broken, line):
    data = lines([reply("a", None)]) + b"\n" + broken + b"\n" + lines([reply("b", "a"), reply("c", "a")])
    assert read_bytes(data, shape="oasst1") == ([record(user("a"), user("b"), id="t")], [line])


def test_a_tree_over_the_limit_is_one_fault(read_bytes):
    chain = [reply(str(index), str(index - 1) if index else None) for index in range(100)]
    data = lines([*chain, reply("a", None, message_tree_id="u")])
    records, faults = read_bytes(data, shape="oasst1", max_line_bytes=500)
    assert records == [record(user("a"), id="u", line=101)]
    assert faults == ["a.jsonl:1: the record is longer than 500 bytes; split the conversation, or remove it"]
