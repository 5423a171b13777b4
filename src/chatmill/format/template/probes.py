"""Small conversations that show what a chat template does."""

from __future__ import annotations

from chatmill.records.record import Message, Record, ToolCall, new_message, new_record


def probe_record(name: str, *messages: Message, tools: tuple[str, ...] = ()) -> Record:
    """A small conversation that shows what a template does."""
    return new_record(list(messages), id=name, tools=tools, file="probe", line=0)


TOOLS = (
    '{"type":"function","function":{"name":"weather","description":"The weather in a city.","parameters":'
    '{"type":"object","properties":{"city":{"type":"string","description":"Which city."}},"required":["city"]}}}',
)
WEATHER_CALL = ToolCall("weather", '{"city":"Lisbon"}', "call00001")
WEATHER = new_message("tool", '{"sky":"clear"}', name="weather", tool_call_id="call00001")
QUESTION = probe_record(
    "question", new_message("user", "Which way is north?"), new_message("assistant", "Towards the pole star.")
)
TURNS = probe_record(
    "turns",
    *(new_message("user", "One?"), new_message("assistant", "First answer.")),
    *(new_message("user", "Two?"), new_message("assistant", "Second answer.")),
    *(new_message("user", "Three?"), new_message("assistant", "Third.")),
)
_ASKED = (new_message("user", "Rain?"), new_message("assistant", "", "", (WEATHER_CALL,)))
CALL = probe_record("style", *_ASKED, WEATHER, new_message("assistant", "No."), tools=TOOLS)
CALL_WITHOUT_RESULT = probe_record("style", *_ASKED, tools=TOOLS)
