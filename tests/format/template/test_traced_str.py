from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.format.template.tracing.trace import FieldPath, Trace, ready, replay
from chatmill.format.template.tracing.traced_str import TracedStr, field, joined, literal, total

WORDS = st.text(alphabet="ab <|>/\n", max_size=8)
SEPARATORS = st.sampled_from(["a", " ", "\n", "<|", "b/"])
SLICES = st.tuples(st.none() | st.integers(-4, 4), st.none() | st.integers(-4, 4))

STRIPS = st.tuples(st.sampled_from(["strip", "lstrip", "rstrip"]), st.sampled_from([(), ("\n",), ("ab",)]))
SPLITS = st.tuples(st.sampled_from(["split", "rsplit"]), st.tuples(SEPARATORS) | st.just(()))
PARTS = st.tuples(st.sampled_from(["partition", "rpartition"]), st.tuples(SEPARATORS))
MAPS = st.tuples(st.sampled_from(["upper", "lower", "capitalize", "title"]), st.just(()))
REPLACE = st.tuples(st.just("replace"), st.tuples(SEPARATORS, st.just("#")))
REMOVE = st.tuples(st.sampled_from(["removeprefix", "removesuffix"]), st.tuples(SEPARATORS))
METHODS = st.one_of(STRIPS, SPLITS, PARTS, MAPS, REPLACE, REMOVE)
QUESTIONS = st.tuples(st.sampled_from(["startswith", "endswith", "find", "count", "__contains__"]), SEPARATORS)


def program(texts, steps):
    value, asked = texts[0], []
    for number, (kind, step) in enumerate(steps):
        if kind == "join":
            value = value + step + texts[(number + 1) % len(texts)]
        elif kind == "slice":
            value = value[slice(*step)]
        elif kind == "ask":
            name, part = step
            asked.append(getattr(value, name)(part))
            asked.append(value == texts[-1])
        else:
            name, args = step
            out = getattr(value, name)(*args)
            value = out if isinstance(out, str) else out[-1] if out else texts[0]
    return value, asked


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), WORDS),
        st.tuples(st.just("slice"), SLICES),
        st.tuples(st.just("ask"), QUESTIONS),
        st.tuples(st.just("method"), METHODS),
    ),
    max_size=6,
)


def fields(texts, trace):
    return [field(text, FieldPath(number, ("content",)), number, trace) for number, text in enumerate(texts)]


@given(st.lists(WORDS, min_size=2, max_size=3), STEPS)
@settings(max_examples=300)
def test_a_traced_text_equals_the_plain_one(texts, steps):
    traced, asked = program(fields(texts, Trace(texts)), steps)
    plain, plainly = program(texts, steps)
    assert isinstance(traced, str) and str.__str__(traced) == plain and asked == plainly
    if isinstance(traced, TracedStr):
        assert "".join(piece.text for piece in traced.pieces) == plain


@given(st.lists(WORDS, min_size=2, max_size=3), STEPS)
@settings(max_examples=300)
def test_a_piece_of_a_field_contains_only_characters_of_that_field(texts, steps):
    # Each field has its own letters, which occur nowhere else.
    own = [
        text.translate({ord(ch): chr(0xE000 + 64 * number + ord(ch) % 64) for ch in set(text)})
        for number, text in enumerate(texts)
    ]
    steps = [
        step for step in steps if step[0] != "method" or step[1][0] not in ("upper", "lower", "capitalize", "title")
    ]
    traced, _ = program(fields(own, Trace(own)), steps)
    for piece in literal(traced).pieces:
        if piece.mixed:
            continue
        for ch in piece.text:
            origin = (ord(ch) - 0xE000) // 64 if ord(ch) >= 0xE000 else None
            assert origin == (piece.source.message if piece.source is not None else None)


@given(st.lists(WORDS, min_size=2, max_size=3), st.lists(WORDS, min_size=3, max_size=3), STEPS)
@settings(max_examples=400)
def test_a_replayed_trace_gives_the_same_result_as_rendering(texts, others, steps):
    others = others[: len(texts)]
    trace = Trace(texts)
    traced, _ = program(fields(texts, trace), steps)
    if not trace.cacheable:
        return
    pieces = literal(traced).pieces
    for again in (texts, others):
        slots = replay(ready(trace.steps), list(again))
        if slots is None:
            assert again is others
            continue
        written = "".join(piece.text if piece.slot is None else slots[piece.slot] for piece in pieces)
        assert written == program(again, steps)[0]


def test_joining_and_formatting_keep_every_piece():
    trace = Trace(["ab", "cd"])
    one, two = fields(["ab", "cd"], trace)
    for made, text in (
        ("<" + one + ">" + two, "<ab>cd"),
        (literal(", ").join([one, two]), "ab, cd"),
        (literal("{}-{x}").format(one, x=two), "ab-cd"),
        (literal("%s=%s%%") % (one, two), "ab=cd%"),
        (joined([one, literal("/"), two]), "ab/cd"),
        (total([one, "/", literal("/"), "", two]), "ab//cd"),
    ):
        assert made.plain() == text
        sources = {piece.text: piece.source for piece in made.pieces if piece.source}
        assert sources == {"ab": FieldPath(0, ("content",)), "cd": FieldPath(1, ("content",))}
        assert not any(piece.mixed for piece in made.pieces)


def test_every_string_method_is_traced_or_disables_the_cache():
    for name in dir(str):
        if not name.startswith("_"):
            assert name in TracedStr.__dict__, name


def test_literals_that_remain_after_a_field_is_cut_away_need_no_trace():
    trace = Trace(["why"])
    (why,) = fields(["why"], trace)
    rest = ("<think>" + why + "</think>\n ").split("</think>")[-1]
    assert rest.trace is None and rest.strip().plain() == ""
    assert not rest.strip()
    assert replay(ready(trace.steps), ["another"]) is not None
    assert replay(ready(trace.steps), ["an</think>other"]) is None


def test_a_lookup_by_text_cannot_be_replayed():
    trace = Trace(["a"])
    (one,) = fields(["a"], trace)
    assert {"a": 1}.get(one) == 1
    assert not trace.cacheable


def test_an_empty_field_is_kept_because_it_may_have_text_in_another_conversation():
    trace = Trace(["", "b"])
    one, two = fields(["", "b"], trace)
    for made in (one.strip() + two, total(["", one.strip(), literal(""), two])):
        slots = replay(ready(trace.steps), [" x ", "y"])
        assert "".join(slots[piece.slot] for piece in made.pieces) == "xy"
