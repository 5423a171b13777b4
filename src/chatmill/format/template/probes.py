"""Small conversations that show how a chat template behaves, for example with tool calls or without a system prompt.

In most conversations, the words of each message are unique, so that checks detect text in the wrong message.
"""

from __future__ import annotations

from chatmill.records.record import Message, Record, ToolCall, new_message, new_record


def probe_record(name: str, *messages: Message, tools: tuple[str, ...] = ()) -> Record:
    """Return a conversation whose id is a description of the tested case, such as "an empty answer"."""
    return new_record(list(messages), id=name, tools=tools, file="probe", line=0)


def user(text: str) -> Message:
    return new_message("user", text)


def answer(text: str, reasoning: str = "", *calls: ToolCall) -> Message:
    return new_message("assistant", text, reasoning, calls)


def result(text: str, call: ToolCall) -> Message:
    return new_message("tool", text, name=call.name, tool_call_id=call.id)


def dialog(*texts: str) -> list[Message]:
    """Return alternating user and assistant messages."""
    return [answer(text) if number % 2 else user(text) for number, text in enumerate(texts)]


TOOLS = (
    '{"type":"function","function":{"name":"weather","description":"The weather in a city.","parameters":'
    '{"type":"object","properties":{"city":{"type":"string","description":"Which city."}},"required":["city"]}}}',
)
WEATHER_CALL = ToolCall("weather", '{"city":"Lisbon"}', "call00001")
SECOND_CALL = ToolCall("weather", '{"city":"Oslo"}', "call00002")
WEATHER = result('{"sky":"clear"}', WEATHER_CALL)

# `ChatTemplate` renders these conversations to determine the style of a template.
QUESTION = probe_record("one turn", user("Which way is north?"), answer("Towards the pole star."))
_ASKED = (user("Rain?"), answer("", "", WEATHER_CALL))
CALL = probe_record("style", *_ASKED, WEATHER, answer("No."), tools=TOOLS)
CALL_WITHOUT_RESULT = probe_record("style", *_ASKED, tools=TOOLS)

TURNS = probe_record(
    "several turns", *dialog("First question?", "Answer alpha.", "Second beta?", "Reply gamma.", "Delta?", "Epsilon.")
)
SYSTEM = probe_record(
    "a system message", new_message("system", "Be short, zeta."), *dialog("Where are you?", "In a small room.")
)
SPACES = probe_record(
    "whitespace around content", *dialog("\n  How far? ", "  A mile. \n", " And then?\n", "\n\nHome.  ")
)
REASONING = probe_record(
    "reasoning",
    *(user("Two and two?"), answer("Four.", "I add two apples.")),
    *(user("And one?"), answer("Five.", "Counting on fingers.")),
)
TOOL = probe_record(
    "a tool call",
    *(user("Rain in Lisbon?"), answer("", "", WEATHER_CALL), WEATHER, answer("Not today.")),
    *(user("Thank you."), answer("Goodbye.")),
    tools=TOOLS,
)
TOOL_REASONING = probe_record(
    "a tool call after reasoning",
    *(user("Rain in Lisbon?"), answer("", "I must look.", WEATHER_CALL)),
    *(WEATHER, answer("Not today.", "Blue everywhere.")),
    tools=TOOLS,
)
SIXTEEN = probe_record(
    "sixteen messages",
    *(message for at in range(8) for message in (user(f"Question q{at}x?"), answer(f"Answer a{at}x."))),
)
BASIC = (QUESTION, TURNS, SYSTEM, SPACES, REASONING, TOOL, TOOL_REASONING)
"""Conversation shapes that most templates support."""
PLAIN = (QUESTION, TURNS, SIXTEEN)
"""Conversation shapes that every template must support; a template may reject all other shapes."""
TOOL_SHAPES = (
    TOOL,
    TOOL_REASONING,
    probe_record(
        "text and a tool call",
        *(user("Rain in Lisbon?"), answer("Looking outside.", "", WEATHER_CALL), WEATHER, answer("Not today.")),
        tools=TOOLS,
    ),
    probe_record(
        "two tool calls",
        *(user("Rain anywhere?"), answer("", "", WEATHER_CALL, SECOND_CALL)),
        *(WEATHER, result('{"sky":"grey"}', SECOND_CALL), answer("Maybe northwards.")),
        tools=TOOLS,
    ),
    probe_record("a tool call at the end", *(user("Rain in Lisbon?"), answer("", "", WEATHER_CALL)), tools=TOOLS),
    probe_record(
        "text and a tool call at the end",
        *(user("Rain in Lisbon?"), answer("Looking outside.", "", WEATHER_CALL)),
        tools=TOOLS,
    ),
)
PROBES = (
    *(*PLAIN, SYSTEM, SPACES, REASONING, *TOOL_SHAPES),
    probe_record(
        "<think> in content",
        *dialog(
            "Two and two?", "<think>\nAdd apples.\n</think>\n\nFour.", "And one?", "<think>\nFingers.\n</think>\nFive."
        ),
    ),
    probe_record("an unclosed <think>", *dialog("Two and two?", "<think>\nAdd apples.", "And one?", "Five.")),
    probe_record("an empty answer", *dialog("Hello there?", "", "Still silent?", "Speaking now.")),
    probe_record("a blank answer", *dialog("Hello there?", " \n", "Still silent?", "Speaking now.")),
    probe_record("an empty question", *dialog("", "Ask me.", "Alright then?", "Certainly.")),
    probe_record("Unicode", *dialog("Wie weit? 多远 ☂️", "Ein Stück. 一里路 é́ 👩‍🔬", "ثم؟", "Nach Hause. 家\u200b")),
    probe_record("two assistant messages in a row", user("Which way?"), answer("Northwards."), answer("Surely.")),
    probe_record("an assistant message first", answer("Welcome here."), user("Which way?"), answer("Northwards.")),
    probe_record("two user messages in a row", user("Good morning."), user("Which way?"), answer("Northwards.")),
    probe_record("a user message at the end", *dialog("Which way?", "Northwards.", "Further still?")),
    probe_record("equal texts", *dialog("Same.", "Same.", "Same.", "Same.")),
    probe_record("role words as content", *dialog("user", "assistant", "system", "user")),
)
"""One conversation for each record shape."""
