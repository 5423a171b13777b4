from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

Messages = list[dict[str, Any]]
Calls = Sequence[tuple[str, str, dict[str, str]]]

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Which city."}},
            "required": ["city"],
        },
    },
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def answer(text: str | None, *, reasoning: str | None = None, calls: Calls = ()) -> dict[str, Any]:
    out = {"role": "assistant", "content": text}
    if reasoning is not None:
        out["reasoning_content"] = reasoning
    if calls:
        out["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
            for id, name, arguments in calls
        ]
    return out


def result(text: str, id: str = "call00001") -> dict[str, Any]:
    return {"role": "tool", "content": text, "name": "weather", "tool_call_id": id}


LISBOA = ("call00001", "weather", {"city": "Lisboa"})
OSLO = ("call00002", "weather", {"city": "Oslo"})
ASK = user("How warm is it over there?")
WARM = answer("It is warm: 24 degrees.")

CONVERSATIONS = {
    "one_turn": [user("Where is the moon?"), answer("Above the hills, I think.")],
    "turns": [
        user("Where is the moon?"),
        answer("Above the hills, I think."),
        user("And the sun?"),
        answer("Behind them.\n\nWait for the day."),
        user("How long?"),
        answer("Nine hours"),
    ],
    "system": [
        system("You like short answers."),
        user("Where is the moon?"),
        answer("Up."),
        user("And the sun?"),
        answer("Down there."),
    ],
    "tool": [ASK, answer("", calls=[LISBOA]), result('{"degrees": 24}'), WARM],
    "tool_turns": [
        ASK,
        answer("", calls=[LISBOA]),
        result("24 degrees, sunny"),
        WARM,
        user("Then up north?"),
        answer("", calls=[OSLO]),
        result("3 degrees", "call00002"),
        answer("Cold: only 3."),
    ],
    "text_and_call": [ASK, answer("I shall look it up.", calls=[LISBOA]), result("24 degrees, sunny"), WARM],
    "two_calls": [
        ASK,
        answer("", calls=[LISBOA, OSLO]),
        result("24 degrees, sunny"),
        result("3 degrees, snow", "call00002"),
        answer("Warm in one, cold in the other."),
    ],
    "call_last": [ASK, answer("", calls=[LISBOA])],
    "text_and_call_last": [ASK, answer("I shall look it up.", calls=[LISBOA])],
    "null_content": [ASK, answer(None, calls=[LISBOA]), result("24 degrees, sunny"), WARM],
    "reasoning": [
        user("Is seven a prime?"),
        answer("Yes, it is.", reasoning="Nothing divides it."),
        user("And eight?"),
        answer("No: two divides it.", reasoning="Even numbers\nare not."),
    ],
    "reasoning_call": [
        ASK,
        answer("", reasoning="I need a tool for that.", calls=[LISBOA]),
        result("24 degrees, sunny"),
        answer("It is warm: 24 degrees.", reasoning="The tool knows it."),
    ],
    "think_in_content": [user("Is seven a prime?"), answer("<think>\nNothing divides it.\n</think>\n\nYes, it is.")],
    "think_in_history": [
        user("Is seven a prime?"),
        answer("<think>\nNothing divides it.\n</think>\n\nYes, it is."),
        user("What is a <think> tag, and </think>?"),
        answer("It opens a thought."),
    ],
    "unclosed_think": [user("Is seven a prime?"), answer("<think>\nNothing divides it. Yes")],
    "empty": [user("Say nothing."), answer(""), user("Say more."), answer("Something more.")],
    "empty_last": [user("Say nothing."), answer("")],
    "blank": [user("Say nothing."), answer("  \n"), user("Say more."), answer("Something more.")],
    "white_space": [
        user("  Where is the moon? \n"),
        answer("\n Above the hills. \n\n"),
        user("And the sun?\n"),
        answer(" Behind them. "),
    ],
    "unicode": [
        user("Ünïcödé 漢字 👍🏽 and a zero\u200bwidth?"),
        answer("Sí: 漢字 \u0301 🇵🇹 ﬁne"),
        user("And <b>tags</b> {{ braces }} {% raw %}?"),
        answer("{{ no }} \\n \"quotes\" & 'more' <i>"),
    ],
    "control_text": [
        user("What is {end} for, and {header}?"),
        answer("It ends a turn: {end} as in {header} hello."),
        user("So {end}\n{header}"),
        answer("{end}"),
    ],
    "two_assistants": [
        user("Where is the moon?"),
        answer("Above the hills, I think."),
        answer("No, it is behind them."),
        user("And the sun?"),
        answer("Down there."),
    ],
    "assistant_first": [answer("Hello, how are you?"), user("Where is the moon?"), answer("Above the hills.")],
    "two_users": [user("Where is the moon?"), user("And where is the sun?"), answer("Both are up.")],
    "last_user": [user("Where is the moon?"), answer("Above the hills."), user("And the sun?")],
    "equal": [user("Same words."), answer("Same words."), user("Same words."), answer("Same words.")],
    "role_words": [
        user("assistant"),
        answer("user"),
        user("system"),
        answer("assistant"),
        user("tool"),
        answer("model"),
    ],
    "sixteen": [
        message
        for number in range(8)
        for message in (user(f"Question number {number}, please"), answer(f"The answer to {number} it is."))
    ],
}
MAIN = (
    "one_turn",
    "turns",
    "system",
    "tool",
    "text_and_call",
    "two_calls",
    "call_last",
    "reasoning",
    "two_assistants",
    "empty",
)
"""Conversations that are also tested without a generation_config.json."""


def conversation(name: str, tokens: Mapping[str, Any]) -> Messages:
    """Return a test conversation; the messages of "control_text" contain control tokens of the template."""
    messages = copy.deepcopy(CONVERSATIONS[name])
    if name == "control_text":
        header = next((token for token in tokens["control"] if token not in tokens["ends"]), "<|user|>")
        for message in messages:
            message["content"] = message["content"].format(end=tokens["ends"][0], header=header)
    return messages


def with_tools(messages: Messages) -> bool:
    return any("tool_calls" in message for message in messages)
