from __future__ import annotations

import copy
from contextlib import suppress

import pytest
from hostile_templates import NAMES, OBJECTS, prying
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.runtime import Undefined
from transformers.utils.chat_template_utils import _compile_jinja_template

from chatmill.errors import RecordError
from chatmill.format.template.tracing.limits import Meter
from chatmill.format.template.tracing.program import Program, TracedProgram
from chatmill.format.template.tracing.sandbox import Sandbox
from chatmill.format.template.tracing.trace import FieldPath, Trace, fill_slots, ready, replay
from chatmill.format.template.tracing.traced_str import field

VARIABLES = {
    "messages": [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": " Ünï "}],
    "number": 7,
    "share": 2.5,
    "flags": [True, None, "x", 3],
    "call": {"name": "f", "arguments": {"b": [1, 2], "a": "<z>"}},
}
VALUES = (
    *("messages[0].content", "messages[1]['content']", "'%s-%d%%'", "'{}{:>4}'", "'{0!r}|{x:^7}'", "'a,b , c'", "''"),
    *(
        "number",
        "share",
        "flags",
        "flags[2:]",
        "call",
        "call.arguments",
        "call.arguments.b",
        "none",
        "true",
        "[]",
        "{}",
    ),
    *(
        "messages",
        "(1, 'two')",
        "range(3)",
        "messages | map(attribute='role') | list",
        "'x' ~ number",
        "namespace(a=1)",
    ),
    *("nothing", "messages[0].nothing", "[] | first", "messages[1].content | safe", "'<%s>' | safe", "call.name | e"),
    *("call.arguments.a", "call.arguments.a | safe", "call.arguments.a | forceescape"),
)
TEXTS = (
    "messages[0].content",
    "messages[1].role",
    "' '",
    "''",
    "call.name",
    "(call.name | safe)",
    "messages[0].content[:0]",
)
METHODS = (
    *("upper()", "title()", "strip()", "strip('H')", "split()", "split(',', 1)", "rsplit(',')", "splitlines(true)"),
    *("replace('i', 'o')", "replace('i', 'oo', 1)", "find('i')", "index('e')", "count('e')", "startswith(('H', ' '))"),
    *(
        "format(1, 2, x='y')",
        "format('a', 'b', x=[1])",
        "format(share, number, x=none)",
        "join(['1', '2'])",
        "center(11)",
    ),
    *("zfill(9)", "ljust(4, '*')", "partition(' ')", "encode()", "translate({})", "isdigit()", "expandtabs(2)"),
    *("items() | list", "keys() | list", "values() | list", "get('name', 'no')", "copy()", "index(1)", "count(1)"),
    *("nothing", "a", "append(1)", "update(a=1)", "__class__", "real", "pieces", "casefold()", "removeprefix('Hi')"),
)
FILTERS = (
    *("upper", "lower", "title", "capitalize", "trim", "length", "string", "list", "first", "last", "reverse | list"),
    *(
        "tojson",
        "tojson(indent=2)",
        "tojson(sort_keys=true)",
        "join(', ')",
        "join('-', attribute='role')",
        "sort",
        "sum",
    ),
    *("unique | list", "map('string') | join", "map('upper') | list", "map(attribute='content') | list", "dictsort"),
    *(
        "selectattr('role') | list",
        "rejectattr('role', 'equalto', 'user') | list",
        "select('string') | list",
        "items | list",
    ),
    *("default('d')", "default('d', true)", "int", "float", "abs", "round(1)", "batch(2) | list", "slice(2) | list"),
    *(
        "replace('i', 'o')",
        "indent(2)",
        "indent(2, true)",
        "center(20)",
        "truncate(5)",
        "wordcount",
        "wordwrap(4)",
        "e",
    ),
    *(
        "escape",
        "safe",
        "striptags",
        "urlencode",
        "xmlattr",
        "pprint",
        "format(1, 2)",
        "format('a', 3)",
        "groupby('role')",
    ),
    *(
        "min",
        "max",
        "attr('name')",
        "filesizeformat",
        "random",
        "map('int') | sum",
        "groupby('role') | map('first') | list",
    ),
)
OPERATIONS = st.one_of(
    st.sampled_from([f".{name}" for name in METHODS]), st.sampled_from([f" | {name}" for name in FILTERS])
)
EXPRESSIONS = st.one_of(
    st.tuples(st.sampled_from(VALUES), OPERATIONS).map(lambda pair: f"({pair[0]}){pair[1]}"),
    st.tuples(
        st.sampled_from(VALUES),
        st.sampled_from(("+", "*", "%", "~", "==", "in", "//", "-", "<")),
        st.sampled_from(VALUES),
    ).map(lambda parts: f"({parts[0]}) {parts[1]} ({parts[2]})"),
    st.lists(st.sampled_from(VALUES), min_size=3, max_size=5).map(lambda values: " + ".join(f"({x})" for x in values)),
    st.lists(st.sampled_from(TEXTS), min_size=3, max_size=5).map(" + ".join),
    st.tuples(st.sampled_from(VALUES), OPERATIONS, OPERATIONS).map(lambda parts: f"(({parts[0]}){parts[1]}){parts[2]}"),
    st.tuples(
        st.sampled_from(("%5.1f|%x", "%-4d.", "%+d%%", "%s %s", "%r", "%(name)s", "%5s|%c", "%e", "%.2s")),
        st.sampled_from(VALUES),
    ).map(lambda pair: f"'{pair[0]}' % ({pair[1]})"),
    st.tuples(
        st.sampled_from((":>9", ":x", ":,", ":.1f", "!r", "!s:<5", ":05d", ":%", ":^+9.2e", ":_b")),
        st.sampled_from(VALUES),
    ).map(lambda pair: "'[{0" + pair[0] + "}]'.format(" + pair[1] + ")"),
)


@given(EXPRESSIONS)
@settings(max_examples=200, deadline=None)
def test_an_expression_gives_the_text_of_transformers_or_an_error(expression):
    source = "{{ " + expression + " }}"
    try:
        text = "".join(Program(source, "t", Sandbox()).run(VARIABLES, Meter()))
    except RecordError:
        return
    assert text == _compile_jinja_template(source).render(VARIABLES), expression


def traced(value, path, texts, trace):
    if isinstance(value, str):
        texts.append(value)
        return field(value, FieldPath(0, path), len(texts) - 1, trace)
    if isinstance(value, dict):
        return {key: traced(inner, (*path, key), texts, trace) for key, inner in value.items()}
    if isinstance(value, list):
        return [traced(inner, (*path, at), texts, trace) for at, inner in enumerate(value)]
    return value


@given(
    EXPRESSIONS, st.sampled_from(("{{ X }}", "{{ (X) + '<' }}", "{% macro m() %}{{ X }}{% endmacro %}{{ m() + '<' }}"))
)
@settings(max_examples=200, deadline=None)
def test_a_traced_expression_gives_the_text_of_the_plain_one_or_an_error(expression, around):
    source = around.replace("X", expression)
    texts: list[str] = []
    trace = Trace(texts)
    variables = traced(VARIABLES, (), texts, trace)
    trace.num_slots = len(texts)
    try:
        rendering = TracedProgram(source, "t").trace(variables, Meter())
    except RecordError:
        return
    assert rendering.text == "".join(Program(source, "t", Sandbox()).run(VARIABLES, Meter())), source
    if trace.cacheable:
        slots = replay(ready(trace.steps), list(texts))
        assert slots is not None
        items = [piece.text if piece.slot is None else piece.slot for piece in rendering.pieces]
        assert fill_slots(items, slots) == rendering.text


SAFE = (
    *("'<' + (content | safe) + '<' + content", "content + '<' + ('<' | safe)", "'' + content + (content | e) + ''"),
    *("(content | safe) + '<b>'", "'<b>' + (content | safe)", "(content | safe) + content", "content + (content | e)"),
    *(
        "(content | safe) ~ '<b>'",
        "((content | safe) + '<') | trim",
        "[content | safe, '<'] | join",
        "'<%s' % (content | safe)",
    ),
    *("(content | safe).split(' ')[0] + '<'", "(content | safe)[1:] + '<'", "(content | safe) | upper + '<'"),
    *("(content | safe | string) + '<'", "[content | safe]", "(content | safe).replace('a', '<')", "content | e | e"),
    *(
        "(content | safe).join(['<', 'x' | safe])",
        "(content | safe) is escaped",
        "(content | safe) | replace('a', '<')",
    ),
    *("content | forceescape | forceescape", "(content | safe) | tojson", "(content | safe) * 2 + '<'"),
)


@pytest.mark.parametrize("expression", SAFE)
def test_a_safe_text_escapes_what_it_is_joined_with_as_in_transformers(expression):
    source = "{{ " + expression + " }}"
    content, other = '"a" <i>&amp;\'é', "ba <z>"
    expected = _compile_jinja_template(source).render(content=content)
    assert "".join(Program(source, "t", Sandbox()).run({"content": content}, Meter())) == expected
    trace = Trace([content])
    variables = {"content": field(content, FieldPath(0, ("content",)), 0, trace), "messages": []}
    rendering = TracedProgram(source, "t").trace(variables, Meter())
    assert rendering.text == expected
    slots = replay(ready(trace.steps), [other]) if trace.cacheable else None
    if slots is not None:
        items = [piece.text if piece.slot is None else piece.slot for piece in rendering.pieces]
        assert fill_slots(items, slots) == _compile_jinja_template(source).render(content=other)


@pytest.mark.parametrize(
    "expression", ["('%s' | safe) % content", "('%s' | safe) | format(content)", "('{}' | safe).format(1)"]
)
@pytest.mark.parametrize(
    "program", [lambda source: Program(source, "t", Sandbox()), lambda source: TracedProgram(source, "t")]
)
def test_formatting_with_a_safe_pattern_is_rejected(expression, program):
    with pytest.raises(RecordError, match="on safe text is not available to templates"):
        list(program("{{ " + expression + " }}").run({"content": "<"}, Meter()))


@pytest.mark.parametrize("conversion", ["%r", "%s", "%9s", "%-9s|", "%.2s", "%a"])
@pytest.mark.parametrize("value", ["content", "(content | safe)", "content[1:]", "[content | safe]", "nothing"])
def test_percent_gives_the_text_of_transformers(conversion, value):
    source = f"{{{{ '{conversion}' % {value} }}}}"
    expected = _compile_jinja_template(source).render(content="a'<é")
    assert "".join(Program(source, "t", Sandbox()).run({"content": "a'<é"}, Meter())) == expected
    variables = {"content": field("a'<é", FieldPath(0, ("content",)), 0, Trace(["a'<é"])), "messages": []}
    assert TracedProgram(source, "t").trace(variables, Meter()).text == expected


def test_a_large_number_is_data_unless_it_is_a_width():
    number = 2**63
    source = (
        "{{ n | string }} {{ n | tojson }} {{ none | default(n, true) }} {{ '{}'.format(n) }} {{ '%d' | format(n) }}"
    )
    assert "".join(Program(source, "t", Sandbox()).run({"n": number}, Meter())) == " ".join([str(number)] * 5)
    for expression in ("'x' | center(n)", "'x'.ljust(n)", "[1] | tojson(indent=n)", "'x' | indent(n)"):
        with pytest.raises(RecordError, match="the width or count"):
            list(Program("{{ " + expression + " }}", "t", Sandbox()).run({"n": number}, Meter()))


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_the_output_and_errors_of_a_prying_template_expose_nothing_of_python(number):
    try:
        written = "".join(Program(prying(number), "t", Sandbox()).run(VARIABLES, Meter()))
    except RecordError as error:
        written = str(error)
    assert not any(
        mark in written for mark in ("<class", "<function", "<bound", "<built", "object at", "0x", "<module")
    )


@pytest.mark.parametrize("filter", [filter for filter in FILTERS if "random" not in filter])
def test_no_filter_changes_the_data_of_a_conversation(filter):
    given = copy.deepcopy(VARIABLES)
    for value in ("messages", "flags", "call", "call.arguments", "call.arguments.b"):
        with suppress(RecordError):
            list(Program("{{ " + value + " | " + filter + " }}", "t", Sandbox()).run(given, Meter()))
    assert given == VARIABLES


@pytest.mark.parametrize("value", OBJECTS)
def test_an_attribute_that_is_not_listed_is_never_accessible(value):
    if value in ("f", "caller", "loop", "loop.cycle"):
        return
    sandbox = Sandbox()
    held: list[object] = []
    sandbox.globals["keep"] = held.append
    source = f"{{{{ keep({value}) or '' }}}}"
    list(Program(source, "t", sandbox).run(VARIABLES, Meter()))
    for name in NAMES:
        try:
            found = sandbox.getattr(held[0], name)
        except Exception:
            continue
        assert isinstance(found, Undefined), (value, name)


OF_LINES = (
    *("indent", "indent(2, true)", "indent('> ', blank=true)", "safe | indent(3, true)", "indent | indent(1, true)"),
    *("wordwrap(4)", "wordwrap(4, wrapstring='|')", "truncate(9)", "truncate(9, true, '|')", "center(40)", "title"),
    *(
        "striptags",
        "urlize",
        "pprint",
        "urlencode",
        "format",
        "format()",
        "string",
        "trim",
        "tojson(indent=2) | indent(4)",
    ),
    *("list | join('|')", "replace('Q', '|')", "upper", "e", "reverse", "wordwrap(3) | indent(2, true)"),
)


@pytest.mark.parametrize("filter", OF_LINES)
def test_no_filter_turns_text_into_a_literal(filter):
    """Literal text of a template can be encoded as a control token, but message text must not be."""
    source = "{{ ('a ' + content) | " + filter + " }}"
    trace, items = Trace([]), []
    for content in ("Q", "Q\nQ Q", "Q Q\n\n QQQQQQQQ\r\nQ", "QQQQQQQQQQQQQQ Q"):
        expected = _compile_jinja_template(source).render(content=content)
        slots = replay(ready(trace.steps), [content]) if trace.cacheable and trace.num_slots else None
        if slots is not None:
            assert fill_slots(items, slots) == expected
        trace = Trace([content])
        variables = {"content": field(content, FieldPath(0, ("content",)), 0, trace), "messages": []}
        rendering = TracedProgram(source, "t").trace(variables, Meter())
        assert rendering.text == expected
        assert not any("q" in piece.text.lower() for piece in rendering.pieces if piece.source is None)
        items = [piece.text if piece.slot is None else piece.slot for piece in rendering.pieces]
