"""Preference data: DPO pairs and KTO labels, which are rejected unless `--columns` selects one answer."""

from __future__ import annotations

from typing import Any

from chatmill.errors import RecordError
from chatmill.records.shapes.decode import named

BETTER_KEYS = ("chosen", "chosen_messages", "chosen_response", "preferred_output")
WORSE_KEYS = ("rejected", "rejected_messages", "rejected_response", "non_preferred_output")
PREFERENCE_KEYS = (*BETTER_KEYS, *WORSE_KEYS)
LABEL_KEYS = ("label", "kto_tag")
"""Boolean keys in KTO data that mark an answer as desirable or not."""
PREFERENCE_DATA_KEYS = frozenset((*PREFERENCE_KEYS, *LABEL_KEYS))
_QUESTION_KEYS = ("question", "query", "input")


def refuse_preferences(owner: str, record: dict[str, Any]) -> None:
    """Raise `RecordError` if the record is a DPO pair or has a KTO label."""
    for key in PREFERENCE_KEYS:
        if record.get(key) is not None:
            what = f'{owner} has "{key}", as in preference data (DPO)'
            raise RecordError(what, one_answer(record), kind="preference")
    for key in LABEL_KEYS:
        if type(value := record.get(key)) in (bool, list) or (key == "kto_tag" and value is not None):
            what = f'{owner} has {named(value)} as "{key}", as in preference data (KTO)'
            raise RecordError(what, "keep the records with desirable answers, and remove the key", kind="preference")


def one_answer(record: dict[str, Any]) -> str:
    """Return advice for a DPO pair: how to keep only the better answer.

    >>> one_answer({"prompt": "2+2?", "chosen": "4", "rejected": "5"})
    'expected one answer; --columns completion=chosen selects the better answer'
    """
    if columns := _columns(record):
        return f"expected one answer; --columns {columns} selects the better answer"
    return "expected one answer; convert the record to messages that end with the better answer"


def _columns(record: dict[str, Any]) -> str:
    """Return the `--columns` value that selects the better answer, or "" if no value can select it."""
    key = next((key for key in BETTER_KEYS if record.get(key) is not None), None)
    if key is None:
        return ""
    answer = record[key]
    turns = [answer] if isinstance(answer, dict) else answer if isinstance(answer, list) else []
    if len(turns) > 1:
        # An answer that is a list of several messages already includes the prompt.
        return f"messages={key}{_message_names(turns)}"
    for prompt in ("messages", "conversations"):
        if isinstance(record.get(prompt), list):
            return f"prompt={prompt},completion={key}{_message_names(record[prompt])}"
    if isinstance(record.get("instruction"), str):
        return f"output={key}"
    if isinstance(record.get("prompt"), str | list):
        return f"completion={key}"
    question = next((name for name in _QUESTION_KEYS if isinstance(record.get(name), str)), None)
    return f"prompt={question},completion={key}" if question else ""


def _message_names(turns: list[Any]) -> str:
    """Return the part of a `--columns` value that renames the keys of ShareGPT messages; empty for other messages."""
    is_sharegpt = bool(turns) and isinstance(turns[0], dict) and "from" in turns[0]
    return ",role=from,content=value" if is_sharegpt else ""
