from __future__ import annotations

import json

import numpy as np
import pytest
from rollout_fixtures import EOS, FIRST_COORDINATE, HURTING, Toy, box, spans, target, thing

from chatmill.errors import DataError, UsageError
from chatmill.rollout import serialize_append
from chatmill.rollout.schema import Detection, Fields
from chatmill.rollout.target import build_answer, build_target
from chatmill.rows import OWN_ID, Part, Rule

CAT, DOG, BIRD = thing("cat", 10, 20, 300, 400), thing("dog", 500, 500, 700, 800), thing("bird", 0, 0, 9, 9)
FOUND_CAT = box(1, "cat", 12, 20, 310, 390)
APPENDED_DOG = (
    '"desc": "dog", "bbox_2d": ["<|coord_500|>", "<|coord_500|>", "<|coord_700|>", "<|coord_800|>"]}'
)  # fmt: skip


@pytest.fixture(params=[(), HURTING], ids=["bytes", "hurting merges"])
def toy(request):
    return Toy(request.param)


def test_a_target_is_the_kept_prefix_the_missed_objects_and_the_end(toy):
    found = target(toy, f"{{{FOUND_CAT}}}", [CAT, DOG])
    assert found.prefix_text == f"{{{FOUND_CAT}"
    assert found.appended_text == f', "object_2": {{{APPENDED_DOG}}}'
    assert toy.text(found.ids) == f'{{{FOUND_CAT}, "object_2": {{{APPENDED_DOG}}}<|im_end|>'
    assert found.ids[-1] == EOS
    assert (found.matched, found.missed, found.start_index) == (((0, 0),), (1,), 2)
    assert (found.truncated, found.fallback, found.target_is_json, found.dropped) == (False, None, True, {})
    assert list(json.loads(found.prefix_text + found.appended_text)) == ["object_1", "object_2"]
    found.rows.check()
    assert found.rows.ids.tolist() == found.ids


def test_the_end_of_turn_is_a_hard_stop_and_is_removed_with_everything_after_it(toy):
    ids = [*toy.rollout(f"{{{FOUND_CAT}"), EOS, *toy.rollout(f", {box(2, 'dog', 1, 2, 3, 4)}}}")]
    found = build_target(ids, [CAT], tokenizer=toy)
    assert (found.prefix_text, found.appended_text) == (f"{{{FOUND_CAT}", "}")
    assert found.truncated


@pytest.mark.parametrize("text", ["<|im_end|>", "STOP"])
def test_a_stop_text_ends_the_rollout_even_inside_a_string(toy, text):
    rollout = f'{{{FOUND_CAT}, "object_2": {{"desc": "a {text} b", "bbox_2d": []}}}}'
    found = target(toy, rollout, [], stop_texts=("STOP", "<|im_end|>"))
    assert (found.prefix_text, found.truncated, found.dropped) == (f"{{{FOUND_CAT}", True, {"incomplete": 1})


def test_other_stop_tokens_can_be_given(toy):
    ids = [*toy.rollout(f"{{{FOUND_CAT}"), 7, *toy.rollout(", ")]
    assert build_target(ids, [], tokenizer=toy, stop_ids=(7,)).truncated
    assert not build_target(ids, [], tokenizer=toy).truncated


def test_an_unknown_id_ends_the_rollout(toy):
    for stranger in (-1, 290, 10**6, 10**30):
        ids = [*toy.rollout(f"{{{FOUND_CAT}"), stranger, *toy.rollout(f", {box(2, 'dog', 1, 2, 3, 4)}}}")]
        assert build_target(ids, [], tokenizer=toy).prefix_text == f"{{{FOUND_CAT}"


def test_an_unfinished_object_at_the_end_is_dropped(toy):
    found = target(toy, f'{{{FOUND_CAT}, "object_2": {{"desc": "do', [CAT, DOG])
    assert found.prefix_text == f"{{{FOUND_CAT}"
    assert (found.start_index, found.truncated, found.dropped) == (2, True, {"incomplete": 1})


def test_the_closing_brace_of_the_root_is_dropped_with_everything_after_it(toy):
    found = target(toy, f'{{{FOUND_CAT}\n}} and {{"object_9": {{}}}}', [DOG])
    assert found.prefix_text == f"{{{FOUND_CAT}"
    assert (found.start_index, found.truncated) == (2, False)


@pytest.mark.parametrize(
    "ending", ["}", "}}", "}},", "},", '},"', "}, ", "}\n}", '}, "object_2": {"desc', "}}<|im_end|>", "} x"]
)
@pytest.mark.parametrize("before", ['"', '"]', "]"])
def test_a_cut_inside_a_token_replaces_only_that_token(ending, before):
    toy = Toy()
    body = '"desc": "a", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>'
    rest = {'"': "]", '"]': "", "]": ""}[before]
    head = f'{{"object_1": {{{body}' + ('"' if before == "]" else "")
    ids = toy.rollout(head)
    if rest:
        ids.append(toy.token(b'"'))
        fused = toy.token((rest + ending).encode())
    else:
        fused = toy.token((before + ending).encode())
    found = build_target([*ids, fused], [], tokenizer=toy)
    assert found.fallback is None
    assert found.prefix_ids[: len(ids)] == ids
    assert toy.text(found.prefix_ids) == f'{{"object_1": {{{body}"]}}'
    assert found.kept == len(ids) + (len(found.prefix_ids) == len(ids) + 1 and found.prefix_ids[-1] == fused)
    assert found.valid_objects == [thing("a", 1, 2, 3, 4)]


def test_a_cut_that_no_tokens_can_represent_falls_back_to_an_open_brace():
    toy = Toy([b"{", b"}", b'{"object_1": {"desc": "a"}} trailing'], whole=False)
    ids = [toy.token(b'{"object_1": {"desc": "a"}} trailing')]
    found = build_target(ids, [], tokenizer=toy)
    assert (found.fallback, found.prefix_text, found.kept) == ("no_cut", "{", 0)
    assert (found.appended_text, found.valid_objects, found.dropped) == ("}", [], {"fallback": 1})


def test_half_a_character_before_the_cut_is_encoded_with_byte_tokens():
    toy = Toy()
    ids = [*toy.encode('{"object_1": {"desc": "caf'), toy.token(b"\xc3"), toy.token(b'\xa9"}} bye')]
    found = build_target(ids, [], tokenizer=toy)
    assert found.fallback is None
    assert found.prefix_text == '{"object_1": {"desc": "café"}'
    assert found.prefix_ids == [*ids[:-1], 0xA9, 0x22, 0x7D]


@pytest.mark.parametrize(
    ("rollout", "reason"),
    [
        ("", "empty"),
        (" \n\t", "empty"),
        ("no object", "no_brace"),
        ("Sure: {}", "text_before"),
        (f"[{{{FOUND_CAT}}}]", "array_root"),
        ("\u00a0{}", "text_before"),
        ('"{"', "text_before"),
        ("<|im_end|>{}", "empty"),
    ],
)
def test_an_unusable_rollout_becomes_an_open_brace_with_all_objects_appended(toy, rollout, reason):
    found = target(toy, rollout, [CAT, DOG])
    assert (found.fallback, found.prefix_text, found.kept, found.start_index) == (reason, "{", 0, 1)
    assert found.prefix_ids == toy.encode("{")
    assert (found.matched, found.missed, found.valid_objects) == ((), (0, 1), [])
    assert json.loads(found.prefix_text + found.appended_text).keys() == {"object_1", "object_2"}
    assert found.rows.weights()[: len(found.prefix_ids)].tolist() == [0.0] * len(found.prefix_ids)


def test_whitespace_before_the_root_is_kept(toy):
    assert target(toy, f" \n{{{FOUND_CAT}}}", []).prefix_text == f" \n{{{FOUND_CAT}"


@pytest.mark.parametrize("rollout", ["{", "{}", "{ }", "{hello", '{"object_1', '{"object_1": 3', '{"a": [1}, "b"'])
def test_without_a_complete_object_the_prefix_is_the_open_root(toy, rollout):
    found = target(toy, rollout, [CAT])
    assert (found.prefix_text, found.fallback, found.start_index) == ("{", None, 1)
    assert found.appended_text.startswith('"object_1": {')


# Keys.


def test_an_invalid_object_still_counts_for_the_next_key(toy):
    found = target(toy, f'{{{box(2, "cat", 10, 20, 300, 400)}, "object_9": {{"desc": 3}}}}', [CAT, DOG])
    assert (found.start_index, found.dropped) == (10, {"desc": 1})
    assert found.appended_text.startswith(', "object_10": {')


@pytest.mark.parametrize(
    ("entries", "start"),
    [
        ('"object_7": 5, "object_1": {}', 8),
        ('"object_1": {}, "object_7": 5', 2),
        ('"object_x": {}, "object_": 1, "Object_8": 1, "object_2": {}', 3),
        ('"object_1": {"desc": "\\"object_9\\": 1"}', 2),
        ('"object_1": {"desc": "object_9"}', 2),
        ('"object_1": {"object_9": {}}', 10),
        ('"a": [{"object_4": 1}], "object_1": {}', 5),
        ('"object\\u005f6": {}', 7),
        ('"object_007": {}', 8),
        ('"object_1": {"object\\u005f9": {}}', 10),
        ('"object_0": {}', 1),
        ('"object_\u0663": {}, "object_1": {}', 2),
        ('"object_1": {broken [ "object_5": }', 6),
    ],
)
def test_the_first_appended_key_follows_the_largest_kept_one(toy, entries, start):
    assert target(toy, f"{{{entries}}}", [DOG]).start_index == start


def test_a_key_with_too_many_digits_is_invalid(toy):
    found = target(toy, f'{{"object_{"9" * 5000}": {{}}, "object_3": {{}}', [DOG])
    assert (found.start_index, found.dropped) == (4, {"key": 1, "desc": 1})


def test_a_missing_comma_ends_the_scan(toy):
    found = target(toy, f"{{{FOUND_CAT} {box(2, 'dog', 1, 2, 3, 4)}}}", [])
    assert (found.prefix_text, found.truncated) == (f"{{{FOUND_CAT}", False)


@pytest.mark.parametrize("other", ['"thing": {}', '"object_x": {}', '"object_2": [1]', '"object_2": "x"', '"n": null'])
def test_entries_that_are_not_objects_are_kept_only_before_an_object(toy, other):
    assert target(toy, f"{{{FOUND_CAT}, {other}}}", []).prefix_text == f"{{{FOUND_CAT}"
    assert target(toy, f"{{{other}, {FOUND_CAT}}}", []).prefix_text == f"{{{other}, {FOUND_CAT}"


def test_mismatched_brackets_in_a_body_invalidate_only_that_entry(toy):
    broken = '"object_1": {"desc": "a", "bbox_2d": [1, 2}'
    found = target(toy, f"{{{broken}, {box(2, 'cat', 12, 20, 310, 390)}}}", [CAT])
    assert (found.valid_objects, found.dropped) == ([thing("cat", 12, 20, 310, 390)], {"not_json": 1})
    assert found.prefix_text.startswith(f"{{{broken}, ")
    assert (found.matched, found.target_is_json) == (((0, 0),), False)


# Serializing.


@pytest.mark.parametrize(("prefix", "comma"), [("{", ""), ('{"a": 1, ', ""), ('{"a": {} \n', ", ")])
def test_a_leading_comma_is_written_only_after_an_entry(prefix, comma):
    places = '["<|coord_0|>", "<|coord_1|>", "<|coord_2|>", "<|coord_999|>"]'
    text = f'{comma}"object_1": {{"desc": "é\\n", "bbox_2d": {places}}}}}'
    assert serialize_append([thing("é\n", 0, 1, 2, 999)], 1, prefix) == text


def test_entries_are_separated_and_numbered_and_polygons_are_pairs():
    polygon = {"desc": "p", "poly": [1, 2, 3, 4, 5, 6]}
    pairs = '[["<|coord_1|>", "<|coord_2|>"], ["<|coord_3|>", "<|coord_4|>"], ["<|coord_5|>", "<|coord_6|>"]]'
    entry = f'{{"desc": "p", "poly": {pairs}}}'
    assert serialize_append([polygon, polygon], 9, "{") == f'"object_9": {entry}, "object_10": {entry}}}'


@pytest.mark.parametrize("prefix", ["{", "}"])
def test_no_objects_give_the_closing_brace(prefix):
    assert serialize_append([], 1, prefix) == "}"


@pytest.mark.parametrize("prefix", [",", '{"object_1": {}, ', '{"object_1": {},\n'])
def test_no_objects_after_a_comma_are_an_error(prefix):
    with pytest.raises(DataError, match=r"^the prefix ends in a comma, but there are no objects to append; end the"):
        serialize_append([], 1, prefix)


@pytest.mark.parametrize("comma", [",", ", ", ",\n", ' , "object_2"', ', "object_2": {"desc'])
@pytest.mark.parametrize("fused", [False, True])
def test_a_comma_after_the_last_object_is_trimmed_without_changing_the_rest(comma, fused):
    toy = Toy()
    kept = f"{{{FOUND_CAT}"
    before = toy.rollout(kept[:-1])
    ids = [*before, *([toy.token(f"}}{comma}".encode())] if fused else toy.rollout(f"}}{comma}"))]
    found = build_target(ids, [CAT], tokenizer=toy)
    assert found.prefix_ids[: len(before)] == before
    assert (found.prefix_text, found.appended_text, found.missed) == (kept, "}", ())
    assert found.target_is_json and found.fallback is None


@pytest.mark.parametrize("prefix", ["", " ", "]", '{"a": 1', "{x"])
def test_a_prefix_that_cannot_be_continued_is_an_error(prefix):
    with pytest.raises(DataError, match="cannot append to a prefix"):
        serialize_append([], 1, prefix)


@pytest.mark.parametrize(
    "wrong",
    [
        {"desc": " ", "bbox_2d": [1, 2, 3, 4]},
        {"desc": "a"},
        {"desc": "a", "bbox_2d": [1, 2, 3, 1000]},
        {"desc": "a", "bbox_2d": [1, 2, 3, True]},
        {"desc": "a", "bbox_2d": [3, 2, 1, 4]},
        {"desc": "a", "bbox_2d": [1, 2, 3]},
        {"desc": "a", "poly": [1, 2, 3, 4]},
        {"desc": "a", "bbox_2d": [1, 2, 3, 4], "poly": [1, 2, 3, 4, 5, 6]},
        {"desc": "a", "bbox_2d": [1, 2, 3, 4], "label": 1},
    ],
)
def test_a_true_object_that_does_not_fit_the_schema_is_an_error(toy, wrong):
    with pytest.raises(DataError, match="a ground-truth object does not match"):
        target(toy, "{}", [wrong])


# Loss mask.


def coordinate(k):
    return FIRST_COORDINATE + k


def test_matched_slots_are_trained_toward_the_true_value_and_the_rest_of_the_prefix_is_context(toy):
    found = target(toy, f"{{{FOUND_CAT}}}", [CAT])
    slots = [(ids, target) for part, ids, _, target, _ in spans(found) if part == Part.SLOT]
    assert slots == [
        ([coordinate(shown)], coordinate(true)) for shown, true in ((12, 10), (20, 20), (310, 300), (390, 400))
    ]
    context = [span for span in spans(found) if span[0] == Part.PREFIX]
    assert {(weight, target, rule) for _, _, weight, target, rule in context} == {(0.0, -1, Rule.ROLLOUT)}
    wanted = np.where(found.rows.mask(), found.rows.targets(), -100)
    assert [int(id) for id in wanted if id != -100] == [coordinate(k) for k in (10, 20, 300, 400)] + [*b"}", EOS]
    assert found.slots == 4


def test_false_positives_and_dropped_entries_are_context(toy):
    found = target(toy, f'{{{box(1, "ghost", 900, 900, 950, 950)}, "object_2": {{"desc": 1}}}}', [])
    assert [(part, weight) for part, _, weight, _, _ in spans(found)] == [
        (Part.PREFIX, 0.0),
        (Part.BRACE, 1.0),
        (Part.EOS, 1.0),
    ]
    assert found.false_positives == (0,)


@pytest.mark.parametrize("train_values", [True, False])
def test_appended_tokens_are_trained_except_optionally_values(train_values):
    found = build_target([], [DOG], tokenizer=Toy(), train_values=train_values)
    value = (1.0, Rule.MISSED) if train_values else (0.0, Rule.VALUES_OFF)
    texts = [(Part.PREFIX, "{", 0.0, Rule.ROLLOUT), (Part.STRUCTURE, '"object_1": {"desc": "', 1.0, Rule.MISSED)]
    texts += [(Part.VALUE, "dog", *value), (Part.STRUCTURE, '", "bbox_2d": ["', 1.0, Rule.MISSED)]
    for k in (500, 500, 700, 800):
        texts += [(Part.COORD, f"<|coord_{k}|>", 1.0, Rule.MISSED), (Part.STRUCTURE, '", "', 1.0, Rule.MISSED)]
    texts[-1:] = [(Part.STRUCTURE, '"]}', 1.0, Rule.MISSED), (Part.BRACE, "}", 1.0, Rule.MISSED)]
    texts += [(Part.EOS, "<|im_end|>", 1.0, Rule.MISSED)]
    toy = Toy()
    assert [(part, toy.text(ids), weight, rule) for part, ids, weight, _, rule in spans(found)] == texts
    assert {target for _, _, _, target, _ in spans(found)} == {OWN_ID}


def test_a_token_with_any_part_of_a_value_counts_as_that_value():
    toy = Toy([b' "dog"', b': "do', b'g", "', b"}}"])
    found = build_target([], [DOG], tokenizer=toy, train_values=False)
    untrained = [toy.text(ids) for part, ids, weight, _, _ in spans(found) if weight == 0 and part == Part.VALUE]
    assert untrained == [' "dog"'] or untrained == [': "dog", "']
    assert all("dog" not in toy.text(ids) for _, ids, weight, _, _ in spans(found) if weight)


def test_coordinate_text_in_a_description_is_plain_text(toy):
    named = thing("<|coord_5|>", 1, 2, 3, 4)
    found = build_target([], [named], tokenizer=toy)
    assert [id for id in found.ids if id >= FIRST_COORDINATE and toy.piece(id).startswith(b"<|coord")] == [
        coordinate(k) for k in (1, 2, 3, 4)
    ]
    again = target(toy, f"{{{box(1, '<|coord_5|>', 1, 2, 3, 4)}}}", [named])
    assert [ids for part, ids, *_ in spans(again) if part == Part.SLOT] == [[coordinate(k)] for k in (1, 2, 3, 4)]


def test_coordinates_written_as_text_are_read_but_are_not_slots(toy):
    found = build_target(toy.encode(f"{{{FOUND_CAT}}}"), [CAT], tokenizer=toy)
    assert (found.matched, found.slots) == (((0, 0),), 0)
    mixed = toy.encode('{"object_1": {"desc": "cat", "bbox_2d": ["<|coord_12|>", "') + toy.rollout(
        '<|coord_20|>", "<|coord_310|>", "<|coord_390|>"]}'
    )
    assert build_target(mixed, [CAT], tokenizer=toy).slots == 3


def polygon_text(*corners):
    pairs = ", ".join(f'["<|coord_{x}|>", "<|coord_{y}|>"]' for x, y in corners)
    return f'{{"object_1": {{"desc": "p", "poly": [{pairs}]}}}}'


def test_corners_of_a_polygon_are_trained_toward_the_nearest_order_of_the_true_ones(toy):
    true = {"desc": "p", "poly": [0, 0, 500, 0, 500, 500, 0, 500]}
    found = target(toy, polygon_text((510, 500), (500, 3), (0, 0), (5, 500)), [true])
    slots = [target - FIRST_COORDINATE for part, _, _, target, _ in spans(found) if part == Part.SLOT]
    assert slots == [500, 500, 500, 0, 0, 0, 0, 500]


@pytest.mark.parametrize("true", [{"desc": "p", "poly": [0, 0, 500, 0, 500, 500]}, thing("p", 0, 0, 500, 500)])
def test_matched_objects_of_a_different_shape_have_no_slots(toy, true):
    found = target(toy, polygon_text((0, 0), (500, 0), (500, 500), (0, 500)), [true])
    assert (found.matched, found.slots) == (((0, 0),), 0)


# Other choices.


def test_the_end_token_can_be_given(toy):
    end = toy.token(b"</end>")
    ids = [*toy.rollout(f"{{{FOUND_CAT}"), end, *toy.rollout(f", {box(2, 'dog', 1, 2, 3, 4)}}}")]
    found = build_target(ids, [], tokenizer=toy, eos_id=end)
    assert (found.ids[-1], found.prefix_text, found.truncated) == (end, f"{{{FOUND_CAT}", True)

    class NoEnd(Toy):
        def special_token_ids(self):
            return {}

    with pytest.raises(UsageError, match="pass eos_id"):
        build_target([], [], tokenizer=NoEnd())


def test_fields_are_read_matched_by_equality_and_appended(toy):
    schema = Fields(("name", "year"))
    rollout = '{"object_1": {"year": 1990, "name": "Ada"}, "object_2": {"name": "Bob", "year": "1990"}, "object_3": {}}'
    true = [{"name": "Bob", "year": 1990}, {"name": "Ada", "year": 1990}, {"name": "Eve\u00e9", "year": None}]
    found = target(toy, rollout, true, schema=schema)
    assert found.matched == ((0, 1),)
    assert (found.missed, found.dropped, found.start_index) == ((0, 2), {"field_missing": 1}, 4)
    assert found.appended_text == (
        ', "object_4": {"name": "Bob", "year": 1990}, "object_5": {"name": "Eve\u00e9", "year": null}}'
    )
    values = b"".join(toy.piece(id) for part, ids, *_ in spans(found) if part == Part.VALUE for id in ids).decode()
    assert all(value in values for value in ("Bob", "1990", "Eve\u00e9", "null"))


def test_an_answer_is_trained_from_its_first_brace_to_the_end_token(toy):
    rows = build_answer([CAT, DOG], tokenizer=toy)
    text = toy.text(rows.ids.tolist())
    assert text == "{" + serialize_append([CAT, DOG], 1, "{") + "<|im_end|>"
    assert rows.mask().all()
    assert build_target(rows.ids.tolist(), [CAT, DOG], tokenizer=toy).missed == ()


def test_the_gate_decides_which_objects_are_matched_and_appended(toy):
    found = target(toy, f"{{{box(1, 'cat', 10, 20, 200, 300)}}}", [CAT])
    assert (found.matched, found.gated) == (((0, 0),), 0)
    strict = target(toy, f"{{{box(1, 'cat', 10, 20, 200, 300)}}}", [CAT], schema=Detection(gate=0.9))
    assert (strict.matched, strict.missed, strict.gated) == ((), (0,), 1)


@pytest.mark.parametrize("train_cut", [True, False])
@pytest.mark.parametrize(
    ("merges", "text", "kept", "anew"),
    [
        ([b"}}"], f"{{{box(1, 'dog', 500, 500, 700, 800)}}}", True, "}"),
        ([b"{}"], "{}", False, "{"),
        ([], f"{{{box(1, 'dog', 500, 500, 700, 800)}}}", True, ""),
        ([], "no object", False, "{"),
    ],
)
def test_tokens_encoded_again_at_the_cut_are_trained_on_request(train_cut, merges, text, kept, anew):
    toy = Toy(merges)
    found = build_target(toy.encode(text), [CAT], tokenizer=toy, train_cut=train_cut)
    start = found.kept
    assert (start > 0, toy.text(found.prefix_ids[start:])) == (kept, anew)
    mask = found.rows.mask().tolist()
    assert mask[:start] == [False] * start
    assert mask[start : len(found.prefix_ids)] == [train_cut] * (len(found.prefix_ids) - start)
    assert mask[len(found.prefix_ids) :] == [True] * (len(found.ids) - len(found.prefix_ids))
