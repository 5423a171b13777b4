from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_fixtures import TEMPLATES, open_template, trl_tokenizer
from test_text_tokens import CHATML, DEEPSEEK, INST, WORDS, opened

from chatmill.errors import DataError, RecordError
from chatmill.format import TemplateRenderer
from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.laid_out_columns import ColumnSearch, LaidOutColumns
from chatmill.format.template.process.client import TemplateProcess
from chatmill.format.template.trace_cache import CachedTrace, TraceCache
from chatmill.ledger import Ledger
from chatmill.records import ChatColumns, plan, read_blocks, read_records
from chatmill.records.columns import COMPILED

pytestmark = pytest.mark.skipif(not COMPILED, reason="only the compiled module reads columns")

TEXTS = st.one_of(
    st.sampled_from(["Hi", "Hello there", "ünï 漢字 👍🏽", "a\n", "1+1=2"]),
    st.sampled_from(["", " ", "\n\n", "<think>\nq", "</think>", "nk>", "<thi", "x<|im_end|>", "<|im_", "<", "[INST]a"]),
    st.text(alphabet="ab <|>\nthink/", max_size=12),
)
NAMES = ("qwen2_5", "qwen3", "llama3", "gemma3", "phi3", "deepseekv3")
PLAIN = ("qwen2_5", "phi3", "deepseek", "inst")
"""Templates that output every text unchanged."""
SOURCES = {"chatml": CHATML, "deepseek": DEEPSEEK, "words": WORDS, "inst": INST}


@st.composite
def conversations(draw):
    messages = [{"role": "system", "content": draw(TEXTS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 2))):
        messages += [{"role": "user", "content": draw(TEXTS)}, {"role": "assistant", "content": draw(TEXTS)}]
    return {"id": draw(st.sampled_from(["a", "b"])), "messages": messages}


def columns_of(path: Path) -> ChatColumns:
    (part,) = plan([path])
    (block,) = read_blocks(part, on_fault=pytest.fail, on_end=lambda lines: None)
    assert isinstance(block, ChatColumns)
    return block


def written(records: list[dict]) -> Path:
    path = Path(mkdtemp()) / "talk.jsonl"
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
    return path


def outcome(renderer: TemplateRenderer, records) -> tuple:
    faults: list[str] = []
    ledger = Ledger()
    if not isinstance(records, LaidOutColumns):
        records = list(renderer.renderable(records, lambda fault: faults.append(str(fault))))
    rows = renderer.render(records, ledger=ledger)
    rows.check()
    arrays = [part.tolist() for part in (rows.ids, rows.spans, rows.first_span)]
    return arrays, rows.origins.tobytes(), rows.files, ledger.to_json(), faults


@cache
def renderers(name: str) -> tuple[TemplateRenderer, TemplateRenderer]:
    """Return two separate renderers for the same template: one for conversations in columns, and one for single
    records.
    """

    def made() -> TemplateRenderer:
        if name in SOURCES:
            return opened.__wrapped__(SOURCES[name])
        return open_template(str(trl_tokenizer()), chat_template=str(TEMPLATES / f"{name}.jinja"))

    return made(), made()


@pytest.mark.parametrize("name", [*NAMES, *SOURCES])
def test_columns_give_the_same_rows_as_records(name):
    in_columns, by_record = renderers(name)
    whole = []

    @settings(max_examples=25)
    @given(st.lists(conversations(), min_size=1, max_size=12))
    def check(records):
        path = written(records)
        with patch("chatmill.format.template.trace_cache.MAX_TRACES", 0):
            expected = outcome(by_record, read_records([path]))
        laid_out = in_columns.lay_out_columns(columns_of(path))
        whole.append(isinstance(laid_out, LaidOutColumns))
        assert outcome(in_columns, laid_out) == expected

    check()
    assert any(whole)
    assert name not in PLAIN or any(in_columns._cache._plain.values())


TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


def test_conversations_of_one_shape_share_a_layout_and_are_not_converted_to_records():
    renderer, _ = renderers("qwen2_5")
    path = written([{"messages": TALK}] * 9)
    renderer.lay_out_columns(columns_of(path))
    columns = columns_of(path)
    with patch.object(ChatColumns, "_records", property(lambda self: pytest.fail("a record was read"))):
        laid_out = renderer.lay_out_columns(columns)
        assert isinstance(laid_out, LaidOutColumns)
        renderer.render(laid_out)
    assert len(laid_out.laid_out.distinct) == 1
    assert laid_out.laid_out.which.tolist() == [0] * 9


def test_a_trace_is_compared_with_the_template_at_uses_1_2_4_8():
    renderer = open_template(str(trl_tokenizer()), chat_template=str(TEMPLATES / "qwen2_5.jinja"))
    compared = []
    right = TemplateRenderer.text
    path = written([{"messages": [TALK[0], {"role": "assistant", "content": str(at)}]} for at in range(20)])
    with patch.object(
        TemplateRenderer,
        "text",
        lambda self, record, *args, **options: (
            compared.append(record.messages[-1].content),
            right(self, record, *args, **options),
        )[1],
    ):
        renderer.lay_out_columns(columns_of(path))
    # Only these conversations are checked; all others reuse the trace of the first conversation without a check.
    assert compared == ["1", "2", "4", "8", "16"]


def test_a_wrong_cached_trace_is_detected_in_columns():
    renderer = open_template(str(trl_tokenizer()), chat_template=str(TEMPLATES / "qwen2_5.jinja"))
    path = written([{"id": "a", "messages": TALK}, {"id": "b", "messages": TALK}])
    with patch.object(TemplateRenderer, "text", lambda *args, **options: "other"):
        records = renderer.lay_out_columns(columns_of(path))
    assert isinstance(records, list)
    with pytest.raises(RecordError, match=r"talk.jsonl:2 \(id=b\): the cached trace differs from the template"):
        renderer.render(records)


def test_a_wrong_trace_of_an_earlier_block_is_detected_at_the_first_conversation_that_uses_it():
    renderer = open_template(str(trl_tokenizer()), chat_template=str(TEMPLATES / "qwen2_5.jinja"))
    longer = [*TALK, *TALK]
    renderer.lay_out_columns(columns_of(written([{"messages": TALK}, {"messages": longer}])))
    path = written([{"messages": talk} for talk in (longer, TALK, longer, TALK)])
    right = TemplateRenderer.text

    def wrong_for_short(self, record, *args, **options):
        return "other" if len(record.messages) == 2 else right(self, record, *args, **options)

    with patch.object(TemplateRenderer, "text", wrong_for_short):
        records = renderer.lay_out_columns(columns_of(path))
    assert isinstance(records, list)
    faults: list[RecordError] = []
    assert [record.line for record in renderer.renderable(records, faults.append)] == [1, 3, 4]
    assert [(fault.line, fault.kind) for fault in faults] == [(2, "not_alike")]


def test_several_new_shapes_in_one_block_give_the_same_rows_as_records():
    longer = [{"role": "system", "content": "Be brief."}, *TALK, *TALK]
    talks = [[{**one, "content": f"{one['content']} {at}"} for one in (TALK, longer)[at % 2]] for at in range(12)]
    path = written([{"messages": talk} for talk in talks])
    in_columns, by_record = renderers.__wrapped__("qwen2_5")
    laid_out = in_columns.lay_out_columns(columns_of(path))
    assert isinstance(laid_out, LaidOutColumns)
    # The first conversation of each shape is derived; the others of the shape share one layout.
    assert laid_out.laid_out.which.tolist() == [0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3]
    assert outcome(in_columns, laid_out) == outcome(by_record, read_records([path]))


def test_records_after_a_rejected_one_are_not_laid_out_yet():
    renderer = open_template(str(trl_tokenizer()), chat_template=str(TEMPLATES / "gemma3.jinja"))
    refused = [TALK[1], TALK[0], TALK[1]]
    path = written([{"messages": TALK}, {"id": "x", "messages": refused}, {"messages": TALK}, {"messages": refused}])
    derived = []
    right = TemplateRenderer.derive
    with patch.object(
        TemplateRenderer,
        "derive",
        lambda self, record, **options: (derived.append(record.line), right(self, record, **options))[1],
    ):
        records = renderer.lay_out_columns(columns_of(path))
        assert derived == [1, 2]
        faults: list[RecordError] = []
        assert [record.line for record in renderer.renderable(records, faults.append)] == [1, 3]
    assert derived == [1, 2, 4]
    assert [(fault.line, fault.id) for fault in faults] == [(2, "x"), (4, None)]


@pytest.mark.parametrize("limit", ["layout_table.MAX_KEPT", "encode.MAX_KINDS"])
def test_rows_do_not_depend_on_the_limits_of_tables(limit):
    renderer, _ = renderers("qwen2_5")
    longer = [{"role": "system", "content": "Be brief."}, *TALK, *TALK]
    paths = [written([{"messages": talk} for talk in talks]) for talks in ([TALK, longer], [longer, TALK], [TALK] * 3)]
    expected = [outcome(renderer, renderer.lay_out_columns(columns_of(path))) for path in paths]
    with patch(f"chatmill.format.template.{limit}", 0):
        limited = [outcome(renderer, renderer.lay_out_columns(columns_of(path))) for path in paths]
    assert [one[0] for one in limited] == [one[0] for one in expected]


@settings(max_examples=50)
@given(
    st.lists(st.text(alphabet="<|ab漢>", min_size=1, max_size=4), unique=True, max_size=4),
    st.lists(st.lists(st.text(alphabet="<|ab漢>", max_size=8), min_size=1, max_size=4), min_size=1, max_size=5),
)
def test_the_search_finds_the_conversations_with_a_control_token(tokens, talks):
    messages = [[{"role": "user", "content": text} for text in texts] for texts in talks]
    columns = columns_of(written([{"messages": each} for each in messages]))
    control = ControlTokens({token: at for at, token in enumerate(tokens)})
    holding = {row for row, texts in enumerate(talks) if any(token in text for token in tokens for text in texts)}
    assert ColumnSearch(control).rows(columns) == holding


@given(
    st.lists(st.text(alphabet="<|ab", min_size=1, max_size=4), unique=True, max_size=3),
    *[st.text(alphabet="<|ab", max_size=4)] * 3,
)
def test_texts_between_safe_literals_never_form_a_token(tokens, before, text, after):
    control = ControlTokens({token: at for at, token in enumerate(tokens)})
    whole = before + text + after
    places = {match for token in tokens for match in range(len(whole)) if whole.startswith(token, match)}
    inside = {len(before) + at for token in tokens for at in range(len(text)) if text.startswith(token, at)}
    if not control.may_touch(before, after):
        assert places == inside


@pytest.mark.parametrize("name", ["qwen2_5", "gemma3", "deepseek"])
def test_rows_do_not_depend_on_a_warm_up(name):
    renderer, by_record = renderers(name)

    @settings(max_examples=6)
    @given(st.lists(conversations(), min_size=1, max_size=12))
    def check(records):
        path = written(records)
        renderer._cache = TraceCache()
        renderer.warm_up([columns_of(path)], processes=3)
        with patch("chatmill.format.template.trace_cache.MAX_TRACES", 0):
            expected = outcome(by_record, read_records([path]))
        assert outcome(renderer, renderer.lay_out_columns(columns_of(path))) == expected

    check()


def test_after_a_warm_up_known_shapes_are_not_derived_again():
    renderer = open_template(str(trl_tokenizer()), chat_template=str(TEMPLATES / "qwen2_5.jinja"))
    longer = [{"role": "system", "content": "Be brief."}, *TALK, *TALK]
    first = written([{"messages": talk} for talk in (TALK, longer, TALK)])
    derived = []
    right = TemplateProcess.derive

    def counted(self, template, record, **options):
        derived.append(len(record.messages))
        return right(self, template, record, **options)

    with patch.object(TemplateProcess, "derive", counted):
        renderer.turn_marks(False)
        derived.clear()
        renderer.warm_up([columns_of(first)], processes=2)
        assert sorted(derived) == [2, 5]
        renderer.lay_out_columns(columns_of(first))
        renderer.lay_out_columns(columns_of(written([{"messages": [*TALK, *TALK]}])))
    assert derived[2:] == [4]


def test_a_warm_up_derives_short_conversations_from_the_first_messages_of_a_long_one():
    renderer = open_template(str(trl_tokenizer()), chat_template=str(TEMPLATES / "qwen2_5.jinja"))
    long = [{"role": turn["role"], "content": f"{turn['content']} {number}"} for number, turn in enumerate(TALK * 3)]
    path = written([{"messages": talk} for talk in (TALK, long, TALK * 2, [*TALK, TALK[1]])])
    derived = []
    right = TemplateProcess.derive

    def counted(self, template, record, **options):
        derived.append(([message.content for message in record.messages], options.get("keep", False)))
        return right(self, template, record, **options)

    with patch.object(TemplateProcess, "derive", counted):
        renderer.turn_marks(False)
        derived.clear()
        renderer.warm_up([columns_of(path)], processes=1)
    texts = [turn["content"] for turn in long]
    assert derived == [
        (texts, True),
        (texts[:4], False),
        (texts[:2], False),
        (["Hi", "Hello.", "Hello."], False),
    ]


def test_a_warm_up_derives_the_own_conversation_if_the_first_messages_of_a_long_one_are_rejected(tmp_path):
    source = tmp_path / "strict.jinja"
    refusing = "{% if 'no' in messages[0].content %}{{ raise_exception('no') }}{% endif %}"
    source.write_text(refusing + (TEMPLATES / "qwen2_5.jinja").read_text("utf-8"), "utf-8")
    renderer = open_template(str(trl_tokenizer()), chat_template=str(source))
    path = written([{"messages": TALK}, {"messages": [{"role": "user", "content": "no"}, TALK[1], *TALK]}])
    columns = columns_of(path)
    derived = []
    right = TemplateProcess.derive

    def counted(self, template, record, **options):
        derived.append(record.messages[0].content)
        return right(self, template, record, **options)

    renderer.turn_marks(False)
    with patch.object(TemplateProcess, "derive", counted):
        renderer.warm_up([columns], processes=1)
    assert derived == ["no", "Hi"]
    assert len(renderer._cache) == 1
    assert renderer._cache.follow((False, columns.roles[:2].tobytes()), ["Hi", "Hello."]) is not None


def test_a_warm_up_leaves_errors_to_the_process_that_renders_the_record():
    renderer = open_template(str(trl_tokenizer()), chat_template=str(TEMPLATES / "gemma3.jinja"))
    refused = [TALK[1], TALK[0], TALK[1]]
    path = written([{"messages": refused}, {"messages": TALK}])
    renderer.warm_up([columns_of(path)], processes=2)
    faults: list[RecordError] = []
    records = renderer.lay_out_columns(columns_of(path))
    assert [record.line for record in renderer.renderable(records, faults.append)] == [2]
    assert [fault.line for fault in faults] == [1]


def test_a_warm_up_stops_if_the_template_process_cannot_be_used():
    renderer = open_template(str(trl_tokenizer()), chat_template=str(TEMPLATES / "qwen2_5.jinja"))
    with patch.object(TemplateProcess, "derive", side_effect=DataError("no process")):
        renderer.warm_up([columns_of(written([{"messages": TALK}]))], processes=2)
    assert len(renderer._cache) == 0
    assert len(renderer.render([*renderer.renderable(read_records([written([{"messages": TALK}])]))])) == 1


def test_conversations_are_derived_if_the_template_process_cannot_be_copied():
    renderer = open_template(str(trl_tokenizer()), chat_template=str(TEMPLATES / "qwen2_5.jinja"))
    path = written([{"messages": TALK * count} for count in range(1, 9)])
    with patch.object(TemplateProcess, "copy", side_effect=DataError("no process")):
        renderer.warm_up([columns_of(path)], processes=2)
    assert len(renderer.render(renderer.lay_out_columns(columns_of(path)))) == 8


@given(st.lists(st.integers(1, 40), max_size=20))
def test_a_trace_is_checked_when_its_uses_reach_a_power_of_two(counts):
    trace = CachedTrace((), None, is_plain=True, needs_empty=False)
    used = 0
    for count in counts:
        powers = {1 << bit for bit in range(12)} & {*range(used + 1, used + count + 1)}
        assert trace.use(count) == bool(powers)
        used += count
    assert trace.uses == used
