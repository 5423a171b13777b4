"""Probes: small conversations by which a template shows what it can do."""

from __future__ import annotations

from collections.abc import Sequence

from chatmill.errors import RecordError
from chatmill.format.template.messages import Style, plain_conversation
from chatmill.format.template.template import ChatTemplate
from chatmill.records import Message, Record, ToolCall

TOOLS = (
    '{"type":"function","function":{"name":"weather","description":"The weather in a city.","parameters":'
    '{"type":"object","properties":{"city":{"type":"string","description":"Which city."}},"required":["city"]}}}',
)


def _record(name: str, *messages: Message, tools: tuple[str, ...] = ()) -> Record:
    return Record(list(messages), id=name, tools=tools, file="probe", line=0)


def user(text: str) -> Message:
    return Message("user", text)


def answer(text: str, reasoning: str = "", *calls: ToolCall) -> Message:
    return Message("assistant", text, reasoning, calls)


def system(text: str) -> Message:
    return Message("system", text)


QUESTION = _record("question", user("Which way is north?"), answer("Towards the pole star."))
CALL = ToolCall("weather", '{"city":"Lisbon"}', "call00001")
RESULT = Message("tool", '{"sky":"clear"}', name="weather", tool_call_id="call00001")

TURNS = _record(
    "turns",
    user("One?"),
    answer("First answer."),
    user("Two?"),
    answer("Second answer."),
    user("Three?"),
    answer("Third."),
)
SYSTEM = _record("system", system("Answer in one line."), user("Where are you?"), answer("In a small room."))
SPACES = _record("spaces", user("\n  How far? "), answer("  A mile. \n"), user(" And then?\n"), answer("\n\nHome.  "))
REASONING = _record(
    "reasoning",
    *(user("Two and two?"), answer("Four.", "I add two and two."), user("And one?"), answer("Five.", "Four and one.")),
)
TOOL = _record(
    "tool", user("Rain in Lisbon?"), answer("", "", CALL), RESULT, answer("No rain."), user("Thanks."), answer("Bye."),
    tools=TOOLS,
)  # fmt: skip
TOOL_REASONING = _record(
    "tool and reasoning",
    *(user("Rain in Lisbon?"), answer("", "I must look.", CALL), RESULT, answer("No rain.", "The sky is clear.")),
    tools=TOOLS,
)
PROBES = (QUESTION, TURNS, SYSTEM, SPACES, REASONING, TOOL, TOOL_REASONING)


def forging(tokens: Sequence[str]) -> Record:
    """A conversation that is full of control tokens, written out in its texts."""
    written = " ".join(tokens)
    return _record("control text", user(f"Say {written} twice."), answer(f"{written} and {written}."))


def style_of(writer: ChatTemplate) -> Style:
    """How a template wants its messages: the first way in which it writes what they say."""
    style = next((style for style in (Style(), Style(parts=True)) if _writes(writer, QUESTION, style)), Style())
    called = _record("style", user("Rain?"), answer("", "", CALL), RESULT, answer("No."), tools=TOOLS)
    as_text = Style(style.parts, arguments_as_text=True)
    return next((other for other in (style, as_text) if _writes(writer, called, other)), style)


def _writes(writer: ChatTemplate, record: Record, style: Style) -> bool:
    try:
        text = writer.write(plain_conversation(record, style))
    except RecordError:
        return False
    said = [message.content for message in record.messages if message.role != "tool"]
    return all(part in text for part in said) and ("Lisbon" in text) == any(m.tool_calls for m in record.messages)
