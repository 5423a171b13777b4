from __future__ import annotations

import pytest
from rollout_fixtures import FIRST_COORDINATE, Toy, box

from chatmill.rollout.scan import scan_rollout
from chatmill.rollout.vocabulary import Vocabulary


def read(toy, ids, **options):
    return scan_rollout(ids, Vocabulary(toy), **options)


def test_entries_are_in_order_with_character_and_token_positions():
    toy = Toy()
    ids = [*toy.encode('{"é": '), toy.token(b'1, "ob'), toy.token(b'ject_2": {"a": "'), 0xF0, 0x9F, 0x98, 0x80]
    ids += [toy.token(b'"}, "object'), *toy.encode("_3"), *toy.encode('": {"x')]
    found = read(toy, ids)
    text = '{"é": 1, "object_2": {"a": "😀"}, "object_3": {"x'
    assert found.data.decode() == text
    assert [(entry.key, entry.number, entry.is_object, entry.complete) for entry in found.entries] == [
        ("é", None, False, True),
        ("object_2", 2, True, True),
        ("object_3", 3, True, False),
    ]
    characters = [found.characters(entry.start, entry.stop) for entry in found.entries]
    assert [text[start:stop] for start, stop in characters] == [
        '"é": 1',
        '"object_2": {"a": "😀"}',
        '"object_3": {"x',
    ]
    # An entry includes every token that overlaps it, so the merged tokens belong to two entries.
    assert [found.tokens(entry.start, entry.stop) for entry in found.entries] == [(1, 8), (7, 14), (13, len(ids))]
    assert found.ended == "open"


def test_only_coordinates_inside_an_array_have_positions():
    toy = Toy()
    text = f'{{{box(1, "<|coord_7|>", 1, 2, 3, 4)}, "object_2": {{"bbox_2d": "<|coord_8|>", "x": ["a<|coord_9|>"]}}}}'
    ids = toy.rollout(text)
    found = read(toy, ids)
    assert found.coordinates(found.entries[1]) == ([], [])
    places, starts = found.coordinates(found.entries[0])
    assert places == [1, 2, 3, 4]
    assert [text.encode()[start : start + 11] for start in starts] == [f"<|coord_{k}|>".encode() for k in (1, 2, 3, 4)]
    assert [ids[found.tokens(start, start + 1)[0]] for start in starts] == [FIRST_COORDINATE + k for k in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("text", "ended", "keys"),
    [
        ('{"a": 1}', "closed", ["a"]),
        ("{}x", "closed", []),
        ("{", "open", []),
        ("{ ", "open", []),
        ('{"a', "open", [""]),
        ('{"a"', "open", [""]),
        ('{"a" ', "open", [""]),
        ('{"a":', "open", ["a"]),
        ('{"a": tru', "open", ["a"]),
        ('{"a": -', "open", ["a"]),
        ('{"a": "x\\', "open", ["a"]),
        ('{"a": 1', "open", ["a"]),
        ('{"a": 1,', "open", ["a"]),
        ('{"a": {"b": "}', "open", ["a"]),
        ('{"a": [1, "]', "open", ["a"]),
        ('{"a" 1}', "fault", [""]),
        ("{'a': 1}", "fault", []),
        ('{"a": 1,}', "fault", ["a"]),
        ('{"a": 1 "b": 2}', "fault", ["a"]),
        ('{"a": 1; "b": 2}', "fault", ["a"]),
        ('{"a": tru}', "fault", ["a"]),
        ('{"a": 01}', "fault", ["a"]),
        ('{"a": NaN}', "fault", ["a"]),
        ('{"a": [1}]', "fault", ["a"]),
        ('{"a": [1 2]}', "fault", ["a"]),
        ('{"a": [NaN]}', "fault", ["a"]),
        ('{"a": "\\x"}', "fault", ["a"]),
        ('{"a": "x\ny"}', "fault", ["a"]),
        ('{"\\x": 1}', "fault", [""]),
        ("[1]", "no_root", []),
        ("", "no_root", []),
    ],
)
def test_the_scan_reports_how_the_root_object_ends(text, ended, keys):
    toy = Toy()
    found = read(toy, toy.encode(text))
    assert (found.ended, [entry.key for entry in found.entries]) == (ended, keys)


def test_invalid_utf8_ends_the_scan_in_a_key_but_not_in_a_body():
    toy = Toy()
    ids = [*toy.encode('{"object_1": {"desc": "'), 0xFF, 0xC3, *toy.encode('"}, "b'), 0xFF, *toy.encode('": 1}')]
    found = read(toy, ids)
    assert [(entry.key, entry.complete) for entry in found.entries] == [("object_1", True), ("", False)]
    assert found.ended == "fault"
    assert found.characters(found.entries[0].start, found.entries[0].stop) == (1, 27)


def test_very_deep_nesting_is_scanned():
    toy = Toy()
    deep = 50_000
    body = '{"object_1": ' + '{"a": ' * deep + "1" + "}" * deep + ', "object_2": {'
    found = read(toy, list(body.encode()))
    assert [entry.complete for entry in found.entries] == [True, False]
    array = '{"a": ' + "[" * deep + "]" * deep + ', "object_2": {}}'
    assert read(toy, list(array.encode())).ended == "fault"
