from __future__ import annotations

import json

import pytest

from chatmill.errors import DataError, UsageError
from chatmill.rollout import serialize_append
from chatmill.rollout.schema import Detection, Fields, UnfitError, read_body

BOX = '["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]'
FLAT = '["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>", "<|coord_5|>", "<|coord_6|>"]'
PAIRS = '[["<|coord_1|>", "<|coord_2|>"], ["<|coord_3|>", "<|coord_4|>"], ["<|coord_5|>", "<|coord_6|>"]]'


def read(body, schema):
    try:
        return read_body(body.encode(), schema)
    except UnfitError as error:
        return error.reason


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (f'{{"desc": "a", "bbox_2d": {BOX}}}', {"desc": "a", "bbox_2d": [1, 2, 3, 4]}),
        (f'{{"bbox_2d": {BOX}, "desc": " a"}}', {"desc": " a", "bbox_2d": [1, 2, 3, 4]}),
        (f'{{"desc": "a", "poly": {FLAT}}}', {"desc": "a", "poly": [1, 2, 3, 4, 5, 6]}),
        (f'{{"desc": "a", "poly": {PAIRS}}}', {"desc": "a", "poly": [1, 2, 3, 4, 5, 6]}),
        (f'{{"desc": "\\u0061", "bbox_2d": {BOX.replace("coord_3", "coord_1").replace("coord_4", "coord_2")}}}',
         {"desc": "a", "bbox_2d": [1, 2, 1, 2]}),
        (f'{{"desc": "", "bbox_2d": {BOX}}}', "desc"),
        (f'{{"desc": " \\n\\t", "bbox_2d": {BOX}}}', "desc"),
        (f'{{"desc": null, "bbox_2d": {BOX}}}', "desc"),
        (f'{{"bbox_2d": {BOX}}}', "desc"),
        ('{"desc": "a"}', "geometry"),
        (f'{{"desc": "a", "bbox_2d": {BOX}, "poly": {FLAT}}}', "geometry"),
        (f'{{"desc": "a", "bbox_2d": {BOX}, "score": 1}}', "other_key"),
        (f'{{"desc": "a", "desc": "b", "bbox_2d": {BOX}}}', "key_twice"),
        ('{"desc": "a", "bbox_2d": [1, 2, 3, 4]}', "coordinate"),
        ('{"desc": "a", "bbox_2d": "<|coord_1|>"}', "coordinate"),
        (f'{{"desc": "a", "bbox_2d": {BOX.replace("coord_4", "coord_1000")}}}', "coordinate"),
        (f'{{"desc": "a", "bbox_2d": {BOX.replace("coord_4", "coord_04")}}}', "coordinate"),
        (f'{{"desc": "a", "bbox_2d": [{BOX}]}}', "coordinate"),
        (f'{{"desc": "a", "bbox_2d": {FLAT}}}', "length"),
        (f'{{"desc": "a", "poly": {BOX}}}', "length"),
        ('{"desc": "a", "poly": []}', "length"),
        (f'{{"desc": "a", "poly": {FLAT[:-1]}, "<|coord_7|>"]}}', "length"),
        (f'{{"desc": "a", "poly": [["<|coord_1|>"], {PAIRS[1:]}}}', "length"),
        (f'{{"desc": "a", "poly": ["<|coord_1|>", {PAIRS[1:]}}}', "coordinate"),
        (f'{{"desc": "a", "bbox_2d": {BOX.replace("coord_1", "coord_9")}}}', "reversed"),
        (f'{{"desc": "a", "bbox_2d": {BOX.replace("coord_2", "coord_9")}}}', "reversed"),
        (f'{{"desc": "a", "bbox_2d": {BOX[:-1]}}}', "not_json"),
        (f'{{"desc": NaN, "bbox_2d": {BOX}}}', "not_json"),
        (f"{{'desc': 'a', 'bbox_2d': {BOX}}}", "not_json"),
        (f'{{"desc": "a\n", "bbox_2d": {BOX}}}', "not_json"),
        ('{"desc": ' + "[" * 50_000 + "]" * 50_000 + "}", "not_json"),
    ],
)  # fmt: skip
def test_a_detection_is_read_or_dropped_with_a_reason(body, found):
    assert read(body, Detection()) == found


def test_invalid_utf8_is_not_json():
    with pytest.raises(UnfitError, match="not_json"):
        read_body(b'{"desc": "\xff", "bbox_2d": ' + BOX.encode() + b"}", Detection())


def body(schema, thing) -> str:
    entry = serialize_append([thing], 1, "{", schema=schema)
    return entry.removeprefix('"object_1": ').removesuffix("}")


@pytest.mark.parametrize(
    "thing",
    [
        {"desc": 'é "quoted" \\ \n', "bbox_2d": [0, 0, 999, 999]},
        {"desc": "a", "bbox_2d": ["<|coord_0|>", "<|coord_1|>", 2, 3]},
        {"desc": "a", "poly": [[0, 1], [2, 3], [4, 5]]},
        {"desc": "a", "poly": (0, 1, 2, 3, 4, 5, 6, 7)},
    ],
)
def test_written_objects_are_read_back(thing):
    schema = Detection()
    checked = schema.check(thing)
    text = body(schema, checked)
    assert read(text, schema) == checked
    assert schema.check(checked) == checked


@pytest.mark.parametrize("value", ["", "é\n", 3, -1.5, True, None])
def test_fields_of_every_plain_type_are_written_and_read_back(value):
    schema = Fields(("a", 'b "'))
    thing = schema.check({'b "': value, "a": "x"})
    text = body(schema, thing)
    assert json.loads(text) == {"a": "x", 'b "': value}
    assert read(text, schema) == thing


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"a": 1}', "field_missing"),
        ('{"a": 1, "b": 2, "c": 3}', "other_key"),
        ('{"a": [1], "b": 2}', "not_plain"),
        ('{"a": 1, "b": {}}', "not_plain"),
        ('{"a": 1, "b": }', "not_json"),
    ],
)
def test_fields_are_dropped_with_a_reason(body, reason):
    assert read(body, Fields(("a", "b"))) == reason


@pytest.mark.parametrize("thing", [{"a": 1}, {"a": 1, "b": float("nan")}, {"a": 1, "b": object()}, {"a": [], "b": 1}])
def test_true_fields_that_do_not_fit_are_an_error(thing):
    with pytest.raises(DataError, match="expected the fields a, b"):
        Fields(("a", "b")).check(thing)


@pytest.mark.parametrize("names", [(), ("a", "a")])
def test_field_names_must_exist_and_be_unique(names):
    with pytest.raises(UsageError, match="expected at least one"):
        Fields(names)
