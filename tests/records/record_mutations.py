from __future__ import annotations

import json
import random

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
FLAT = {"message_tree_id": "t", "text": "hé", "rank": 0, "deleted": False}
RECORDS = {
    "messages": {
        "id": "m",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s"}], "name": "n"},
            {"role": "user", "content": 'h\u00e9 \U0001f600 \\ "q"'},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r", "train": True},
            {"role": "tool", "content": "4", "tool_call_id": "c", "weight": 0},
        ],
        "tools": [{"name": "f"}],
    },
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "{}"},
            {"from": "gpt", "value": "a", "weight": 1},
        ],
        "system": "s",
        "tools": '[{"name": "f"}]',
    },
    "alpaca": {"instruction": "q", "input": "i", "output": "é", "system": "s", "history": [["a", "b"]], "id": 1},
    "dolly": {"instruction": "q", "context": "c", "response": "é", "category": "open"},
    "oasst1": {
        "message_tree_id": "t",
        "prompt": {
            "message_id": "a",
            "text": "q",
            "role": "prompter",
            "rank": None,
            "deleted": False,
            "replies": [
                {"message_id": "b", "text": "é", "role": "assistant", "rank": 1, "deleted": False, "replies": []},
                {"message_id": "c", "text": "y", "role": "assistant", "rank": 0, "deleted": False, "replies": []},
            ],
        },
    },
    "tool": {
        "system": "s",
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant_toolcall", "name": "f", "arguments": {"a": "é"}, "id": "c"},
            {"role": "toolresult", "content": {"r": [1]}, "name": "f", "train": False},
        ],
    },
    "primer": {"messages": [{"role": role, "content": f"é {role}"} for role in ("system", "user", "assistant")]},
    "transcript": {"text": "<|SYSTEM|> s <|END|>\n<|USER|>é<|END|><|ASSISTANT|>a<|END|><|EOS|><|USER|>x", "id": 4},
}
RAW = "<|SYSTEM|> s <|END|> <|USER|>é<|END|><|ASSISTANT|>a<|END|> <|EOS|><|USER|>x".encode()
WRONG = [None, True, 0, -1, 1.5, 10**30, "", "x", "\0", "<|USER|>", [], {}, ["x"], {"x": 1}, [[]], "@nest@"]


def broken_value(value, chance: random.Random):
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        deed = chance.random()
        if deed < 0.15:
            return {name: inner for name, inner in value.items() if name != key}
        if deed < 0.3:
            return {(name + "x" if name == key else name): inner for name, inner in value.items()}
        return {**value, key: broken_value(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.85:
        at = chance.randrange(len(value))
        return [*value[:at], broken_value(value[at], chance), *value[at + chance.randrange(2) :]]
    return chance.choice(WRONG)


def broken_bytes(data: bytes, chance: random.Random) -> bytes:
    held = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(held) + 1)
        deed = chance.randrange(6)
        if deed == 0 and at < len(held):
            held[at] ^= 1 << chance.randrange(8)
        elif deed == 1:
            del held[at:]
        elif deed == 2:
            held[at:at] = chance.randbytes(chance.randint(1, 4))
        elif deed == 3:
            del held[at : at + chance.randint(1, 12)]
        elif deed == 4:
            held[at:at] = held[at : at + chance.randint(1, 40)]
        else:
            held[at:at] = chance.choice([b"\0", b'"', b"\\", b"\\ud800", b"[" * 50, b"}", b"NaN", b"1e999", b"<|END|>"])
    return bytes(held)


def broken(value, seed: str, count: int) -> list[bytes]:
    chance = random.Random(seed)
    found = []
    for index in range(count):
        data = value if isinstance(value, bytes) else b""
        if not data:
            data = json.dumps(
                value if index % 2 else broken_value(value, chance), ensure_ascii=bool(index % 3)
            ).encode()
            depth = chance.choice([5, 400, 3000])
            data = data.replace(b'"@nest@"', b"[" * depth + b"]" * depth)
        if index % 2 or isinstance(value, bytes):
            data = broken_bytes(data, chance)
        found.append(data.replace(b"\n", b" "))
    return found
