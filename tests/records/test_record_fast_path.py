from __future__ import annotations

import json

from hypothesis import assume, given
from hypothesis import strategies as st

from chatmill.errors import RecordError
from chatmill.records.shapes import messages
from chatmill.records.shapes.decode import decode_object

TEXT = st.text(max_size=8)
CONTENT = st.one_of(
    TEXT, TEXT, TEXT, st.none(), st.integers(), st.lists(st.just({"type": "text", "text": "a"}), max_size=2)
)
ODD = st.one_of(st.none(), st.none(), st.booleans(), st.integers(-1, 2), TEXT, st.just([]), st.just({"a": 1}))
KEYS = ["name", "tool_calls", "tool_call_id", "function_call", "refusal", "audio", "reasoning_content", "reasoning"]
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "bot"]), "content": CONTENT},
    optional=dict.fromkeys([*KEYS, "train", "weight", "other"], ODD),
)
PLAIN_TURN = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXT})
RECORD = st.fixed_dictionaries(
    {"messages": st.lists(PLAIN_TURN, max_size=4) | st.lists(TURN | PLAIN_TURN, max_size=3)},
    optional={"id": ODD, "tools": ODD, "system": ODD, "functions": ODD, "other": ODD},
)


@given(RECORD, st.booleans())
def test_the_fast_and_slow_paths_agree_on_messages(record, ascii_only):
    data = _encoded(record, ascii_only)
    fast = messages.decode(data)
    assume(fast is not None)
    assert messages.parse(decode_object(data)) == fast


@given(RECORD, st.booleans())
def test_the_fast_and_slow_paths_agree_on_primer(record, ascii_only):
    data = _encoded(record, ascii_only)
    fast = messages.decode_primer(data)
    try:
        careful = messages.parse_primer(decode_object(data))
    except RecordError:
        careful = None
    # The shape `primer` allows only one form of each record, so the fast path decodes every valid record.
    assert fast == careful


@given(st.lists(PLAIN_TURN, min_size=1, max_size=4), st.none() | st.integers() | TEXT)
def test_plain_turns_use_the_fast_path(turns, name):
    data = _encoded({"messages": turns, "id": name}, False)
    fast = messages.decode(data)
    # An id that needs more than 64 bits is left to the slow path.
    assert fast is not None or (isinstance(name, int) and abs(name) >= 2**63)


def _encoded(record, ascii_only):
    return json.dumps(record, ensure_ascii=ascii_only).encode()
