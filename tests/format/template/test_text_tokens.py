from __future__ import annotations

import json
import re
import warnings
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from template_fixtures import TOOLS, answer, messages_of, open_template, user
from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from chatmill.errors import RecordError
from chatmill.format import TemplateRenderer, renderer_from_json
from chatmill.ledger import Ledger
from chatmill.records import Message, Record, ToolCall
from chatmill.rows import Rows
from chatmill.tokenizer import open_tokenizer, train_bpe

CHATML = """{%- if tools -%}<|im_start|>system
Call a tool within <tool_call></tool_call>:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
<tool_call>name and arguments</tool_call><|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.reasoning_content -%}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
{%- elif message.role == 'assistant' and loop.last -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n' + call.function.name + ' ' + (call.function.arguments | tojson) + '\\n</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}"""
# The header tokens of this template are not special tokens, and its prompt ends with a tag that precedes every answer.
DEEPSEEK = """{{- '<s>' -}}{%- for message in messages -%}
{%- if message.role == 'system' -%}{{- message.content -}}
{%- elif message.role == 'user' -%}{{- '<｜User｜>' + message.content -}}
{%- elif message.role == 'tool' -%}{{- '<｜out▁begin｜>' + message.content + '<｜out▁end｜>' -}}
{%- else -%}{{- '<｜Assistant｜></think>' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + call.function.name + '<｜sep｜>' + (call.function.arguments | tojson) + '</tool_call>' -}}
{%- endfor -%}{{- '</s>' -}}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜></think>' -}}{%- endif -%}"""
# The headers of this template are plain words, and a text can complete the prompt's `<thi` to form a tag.
WORDS = """{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{- 'ASSISTANT: <thi' + message.content + 'nk></s>' -}}
{%- else -%}{{- 'USER: ' + message.content + 'nk>\\n' -}}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT: <thi' -}}{%- endif -%}"""
INST = """{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- '[INST]' + message.content + '[/INST]' -}}
{%- else -%}{{- '<think>' + (message.reasoning_content or '') + '</think>' + message.content + '</s>' -}}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<think>' -}}{%- endif -%}"""
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<｜sep｜>", "<tool_response>", "</tool_response>"]
HEADERS = ["<｜User｜>", "<｜Assistant｜>", "<｜out▁begin｜>", "<｜out▁end｜>", "[INST]", "[/INST]"]
LEARNED = {
    CHATML: {*TAGS, *HEADERS} - {"<tool_response>", "</tool_response>"},
    DEEPSEEK: {*TAGS, "[INST]", "[/INST]"},
    WORDS: {*TAGS, *HEADERS},
    INST: {*TAGS, *HEADERS} - {"[INST]", "[/INST]"},
}
ODD = {
    "plain": [AddedToken(token, normalized=False) for token in (*TAGS, *HEADERS)],
    "normalized": [AddedToken(token, normalized=True) for token in (*TAGS, *HEADERS)],
    "stripping": [
        AddedToken(token, normalized=False, lstrip=token in TAGS[::2], rstrip=token in TAGS[::3])
        for token in (*TAGS, *HEADERS)
    ],
    "single words": [AddedToken(token, normalized=False, single_word=True) for token in (*TAGS, *HEADERS)],
    "overlapping": [
        AddedToken(token, normalized=token == "<think>\n")
        for token in (*TAGS, *HEADERS, "<think>\n", "think>x", "<think><think>", "</think>\n\n<tool_call>")
    ],
}
TEXTS = [
    "x ",
    " \n",
    "\n",
    "éé",
    "e\u0301",
    "\u0338",
    "Ｗ",
    "<",
    "<thi",
    "nk>",
    "/",
    ">",
    "日本",
    "they're 123",
    "  ",
    "word",
]


@cache
def folder(kind: str, normalizer: str = "NFC") -> str:
    path = Path(mkdtemp())
    made = Tokenizer.from_buffer(
        train_bpe(["the user asks, the assistant answers"] * 4, vocab_size=400, control=SPECIAL)
    )
    made.normalizer = getattr(normalizers, normalizer)()
    made.add_tokens(ODD[kind])
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": CHATML}))
    return str(path)


@cache
def opened(template: str, kind: str = "plain", normalizer: str = "NFC", **options: str) -> TemplateRenderer:
    path = Path(mkdtemp()) / "chat.jinja"
    path.write_text(template)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return open_template(folder(kind, normalizer), chat_template=str(path), **options)


@cache
def peer(kind: str, normalizer: str = "NFC") -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=f"{folder(kind, normalizer)}/tokenizer.json", eos_token="</s>")


def peer_ids(renderer: TemplateRenderer, record: Record, kind: str, normalizer: str = "NFC") -> list[int]:
    messages, tools = messages_of(renderer, record)
    source = renderer.templates[bool(record.tools)].source
    options = {"chat_template": source, "tokenize": True, "return_dict": False}
    return list(peer(kind, normalizer).apply_chat_template(messages, tools=tools, **options))


def rows_of(renderer: TemplateRenderer, *records: Record) -> Rows:
    """Render records; discard the Hypothesis example if a record is rejected."""
    try:
        return renderer.render(records)
    except RecordError:
        reject()


def conversations(tokens: list[str], *, calls: bool = True) -> st.SearchStrategy[Record]:
    texts = st.lists(st.sampled_from([*tokens, *TEXTS]), min_size=1, max_size=6).map("".join).filter(str.strip)

    @st.composite
    def draw_record(draw: st.DrawFn) -> Record:
        turns = [user(draw(texts)), answer(draw(texts), draw(st.just("") | texts))]
        if calls and draw(st.booleans()):
            call = ToolCall("lookup", json.dumps({"word": draw(texts)}, ensure_ascii=False), "call00001")
            turns += [user(draw(texts)), answer(draw(texts), "", call), Message("tool", draw(texts), name="lookup")]
            turns += [answer(draw(texts))]
        system = [Message("system", draw(texts))] if calls and draw(st.booleans()) else []
        return Record([*system, *turns], tools=TOOLS if calls and draw(st.booleans()) else ())

    return draw_record()


@pytest.mark.parametrize("template", LEARNED, ids=["chatml", "deepseek", "words", "inst"])
def test_headers_and_ends_are_learned_from_the_template(template):
    assert opened(template).text_tokens.ids.keys() == LEARNED[template]


# Only the assistant header is a token, and the last answer has a different end token.
LAST = """{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{- '[INST]' + message.content + ('</think>' if loop.last else '[/INST]') -}}
{%- else -%}{{- 'Q: ' + message.content + '\\n' -}}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '[INST]' -}}{%- endif -%}"""
REFUSES = """{{- raise_exception('no') if messages[0].role in ('user', 'system') else '<think>' -}}"""
# The template accepts only one exchange, and its prompt ends with a tag that rows do not contain.
ONCE = """{%- if messages | length > 2 -%}{{- raise_exception('one exchange') -}}{%- endif -%}
{{- '<s>You think within <think></think>.\\n<｜User｜>' + messages[0].content -}}
{%- if messages | length > 1 -%}{{- '<｜Assistant｜>' + messages[1].content + '</s>' -}}
{%- elif add_generation_prompt -%}{{- '<｜Assistant｜><think>\\n' -}}{%- endif -%}"""


@pytest.mark.parametrize(
    ("template", "never"),
    [
        (LAST, {"[INST]", "[/INST]", "</think>"}),
        (REFUSES, {*TAGS, *HEADERS}),
        (ONCE, {"<｜User｜>", "<｜Assistant｜>"}),
    ],
    ids=["last", "refuses", "once"],
)
def test_headers_of_unusual_templates_are_learned_too(template, never):
    assert opened(template).text_tokens.ids.keys() == {*TAGS, *HEADERS} - never


CASES = [
    *((template, "plain") for template in LEARNED),
    *((CHATML, kind) for kind in ODD if kind != "plain"),
    *((WORDS, kind) for kind in ("normalized", "overlapping")),
]
NAMES = {CHATML: "chatml", DEEPSEEK: "deepseek", WORDS: "words", INST: "inst"}


@pytest.mark.parametrize(("template", "kind"), CASES, ids=[f"{NAMES[template]}-{kind}" for template, kind in CASES])
@settings(max_examples=15)
@given(data=st.data())
def test_ids_match_transformers(template, kind, data):
    renderer = opened(template, kind)
    tokens = sorted(renderer.text_tokens.ids)
    record = data.draw(conversations(tokens, calls=template in (CHATML, DEEPSEEK)))
    plain = Record([user("a"), answer("b")])
    rows = rows_of(renderer, plain, record)[1:]
    rows.check()
    assert rows.ids.tolist() == peer_ids(renderer, record, kind)


def spans_of(renderer: TemplateRenderer, rows: Rows) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = []
    fields = ("role", "part", "message", "weight")
    for span, start, stop in zip(rows.spans, rows.span_start[:-1], rows.span_start[1:], strict=True):
        size = sum(len(renderer.tokenizer.piece(id)) for id in rows.ids[start:stop].tolist())
        out += [tuple(span[field].item() for field in fields)] * size
    return out


@pytest.mark.parametrize("template", [CHATML, DEEPSEEK, INST], ids=["chatml", "deepseek", "inst"])
@settings(max_examples=12)
@given(data=st.data())
def test_text_tokens_do_not_change_the_mask(template, data):
    calls = template is not INST
    # Remove the tag at the end of the prompt, because an answer's text could also start with this tag.
    template = re.sub(r"<think>(?:\\n)?' -}}{%- endif -%}$", "' -}}{%- endif -%}", template)
    renderer = opened(template)
    record = data.draw(conversations(sorted(renderer.text_tokens.ids), calls=calls))
    plain = opened(template, text_tokens="never")
    assert spans_of(renderer, rows_of(renderer, record)) == spans_of(plain, rows_of(plain, record))


@settings(max_examples=12)
@given(data=st.data())
def test_special_tokens_and_those_of_headers_never_come_from_text(data):
    renderer = opened(DEEPSEEK)
    hard = renderer.control_tokens.ids.keys() - renderer.text_tokens.ids.keys()
    assert hard == {*SPECIAL, "<｜User｜>", "<｜Assistant｜>", "<｜out▁begin｜>", "<｜out▁end｜>"}
    record = data.draw(conversations([*sorted(hard), *TAGS]))
    words = Record(
        [Message(m.role, "x", m.reasoning and "x", m.tool_calls, m.name) for m in record.messages], tools=record.tools
    )
    ids = [renderer.control_tokens.ids[token] for token in sorted(hard)]
    counts = [[rows_of(renderer, one).ids.tolist().count(id) for id in ids] for one in (record, words)]
    assert counts[0] == counts[1]


@settings(max_examples=12)
@given(data=st.data())
def test_never_encodes_all_added_tokens_as_text(data):
    renderer = opened(CHATML, text_tokens="never")
    assert not renderer.text_tokens.ids
    record = data.draw(conversations([*TAGS, *HEADERS]))
    rows_of(renderer, record)
    pieces = renderer.derive(record).rendering.pieces
    ids: list[int] = []
    texts = [""]
    for source, text in [(piece.source, piece.text) for piece in pieces]:
        start = 0
        for match in renderer.control_tokens.find(text) if source is None else []:
            texts[-1] += text[start : match.start()]
            texts += [match[0], ""]
            start = match.end()
        texts[-1] += text[start:]
    for at, text in enumerate(texts):
        ids += [renderer.control_tokens.ids[text]] if at % 2 else renderer.tokenizer.encode(text)
    assert rows_of(renderer, record).ids.tolist() == ids


def test_the_ledger_counts_rows_with_either_kind():
    renderer, ledger = opened(DEEPSEEK), Ledger()
    texts = ["plain", "<think>", "<｜User｜>", "<think><s>", "<thi nk>"]
    renderer.render([Record([user(text), answer("b")]) for text in texts], ledger=ledger)
    noted = {reason: entry.rows for bucket, reason, entry in ledger if bucket == "noted"}
    assert noted == {"control_text": 2, "text_token": 2}


def test_a_stored_format_keeps_text_tokens_and_an_older_one_has_none():
    renderer = opened(DEEPSEEK)
    stored = renderer.to_json()
    assert stored["text_tokens"] == sorted(LEARNED[DEEPSEEK])
    record = Record([user("<think>"), answer("</think><｜User｜>b")])
    spec = folder("plain")
    older = {key: value for key, value in stored.items() if key != "text_tokens"}
    for format, same in ((stored, renderer), (older, opened(DEEPSEEK, text_tokens="never"))):
        tokenizer = open_tokenizer(spec, control=format["tokens"])
        again = renderer_from_json(format, tokenizer, spec=spec, where="model")
        assert again.render([record]).ids.tolist() == same.render([record]).ids.tolist()
    assert "text_tokens" not in opened(DEEPSEEK, text_tokens="never").to_json()


@pytest.mark.parametrize(
    "config",
    [
        {"additional_special_tokens": ["<think>"]},
        {"extra_special_tokens": {"think_token": "<think>"}},
        {"added_tokens_decoder": {"277": {"content": "<think>", "special": True}}},
        {"pad_token": {"content": "<think>"}},
    ],
)
def test_a_token_that_the_config_marks_special_never_comes_from_text(tmp_path, config):
    (tmp_path / "tokenizer.json").write_bytes(Path(folder("plain"), "tokenizer.json").read_bytes())
    id = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("<think>")
    if "added_tokens_decoder" in config:
        config = {"added_tokens_decoder": {str(id): config["added_tokens_decoder"]["277"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, **config}))
    renderer = open_template(str(tmp_path))
    assert "<think>" not in renderer.text_tokens.ids and "</think>" in renderer.text_tokens.ids
    assert renderer.render([Record([user("<think>"), answer("b")])]).ids.tolist().count(id) == 1


@pytest.mark.parametrize("listed", [True, False], ids=["changed", "added"])
@pytest.mark.parametrize("flag", ["lstrip", "single_word", None])
def test_tokens_of_the_config_are_added_with_its_flags(tmp_path, listed, flag):
    made = Tokenizer.from_file(f"{folder('plain')}/tokenizer.json")
    first = made.token_to_id(TAGS[0])
    if not listed:
        content = json.loads(made.to_str())
        content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < first]
        made = Tokenizer.from_str(json.dumps(content))
    made.save(str(tmp_path / "tokenizer.json"))
    flags = {"special": False, "normalized": False, "lstrip": flag == "lstrip", "single_word": flag == "single_word"}
    declared = {str(first + at): {"content": token, **flags} for at, token in enumerate([*TAGS, *HEADERS])}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": declared, "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    renderer, right = open_template(str(tmp_path)), AutoTokenizer.from_pretrained(str(tmp_path))
    assert renderer.text_tokens.ids.keys() == LEARNED[CHATML]
    record = Record([user("a <think> b<think>c\n\n<tool_call>"), answer("\n <think>\nx</think>")])
    messages, _ = messages_of(renderer, record)
    ids = right.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert renderer.render([record]).ids.tolist() == list(ids)
    again = renderer_from_json(
        renderer.to_json(), open_tokenizer(str(tmp_path), control=renderer.tokens), spec=str(tmp_path), where="model"
    )
    assert again.render([record]).ids.tolist() == list(ids)
