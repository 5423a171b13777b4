from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.errors import RecordError, UsageError
from chatmill.format import open_renderer, renderer_from_json
from chatmill.format.template import renderer as template_renderer
from chatmill.ledger import Ledger
from chatmill.prepare.unroll import render_unrolled, unrolled
from chatmill.records import Message, Record
from chatmill.rows import Rule
from chatmill.tokenizer import train_bpe

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and mood is defined %}({{ mood }}) {% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if mood is defined %}({{ mood }}) {% endif %}{% endif %}"
)


def folder(path: Path, **config: object) -> Path:
    path.mkdir()
    control = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
    (path / "tokenizer.json").write_bytes(train_bpe(["the user and assistant " * 9], vocab_size=300, control=control))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **config}))
    return path


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    path = folder(tmp_path_factory.mktemp("hf") / "model", chat_template=TEMPLATE)
    return open_renderer("template", str(path))


def conversation(weight: float = 1.0, flag: float | None = None, **fields: object) -> Record:
    turns = [Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d")]
    turns[1] = Message("assistant", "b", weight=flag)
    return Record(turns, weight=weight, file="a", line=1, **fields)


@pytest.mark.parametrize("train_on", ["assistant", "last", "last-exchange", "all"])
@settings(max_examples=15)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=4),
    flag=st.sampled_from([None, 0.0, 0.5]),
)
def test_the_weight_of_a_record_multiplies_those_of_its_tokens(template, train_on, weights, flag):
    for renderer in (open_renderer("chatml", "bytes"), template):
        plain = renderer.render([conversation(flag=flag) for _ in weights], train_on=train_on)
        rows = renderer.render([conversation(weight, flag) for weight in weights], train_on=train_on)
        factor = np.repeat(np.array(weights, dtype=np.float32), rows.lengths)
        assert rows.ids.tolist() == plain.ids.tolist()
        assert rows.weights().tolist() == (plain.weights() * factor).tolist()
        # `reweigh` keeps the weight of each record, and the mask still excludes records with weight 0.
        for other in ("last", "assistant", "all"):
            again = rows.reweigh(other)
            expected = renderer.render([conversation(weight, flag) for weight in weights], train_on=other)
            assert again.weights().tolist() == expected.weights().tolist()
            again.check()


def test_an_untrained_record_has_the_rule_flag(template):
    rows = template.render([conversation(0.0)])
    assert not rows.mask().any()
    assert set(rows.spans["rule"].tolist()) == {Rule.FLAG, Rule.HEADER}


def test_records_can_have_their_own_template_variables(template):
    kwargs = ['{"mood":"glad"}', "", '{"mood":"sad"}', "", '{"mood":"glad"}']
    records = [conversation(template_kwargs=each) for each in kwargs]
    decode = template.tokenizer.decode
    ledger = Ledger()
    rows = template.render(list(template.renderable(records)), ledger=ledger)
    texts = [decode(rows[at : at + 1].ids) for at in range(len(rows))]
    for text, each in zip(texts, kwargs, strict=True):
        mood = f"({json.loads(each)['mood']}) " if each else ""
        answers = [
            f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n{mood}{a}<|im_end|>\n" for q, a in ("ab", "cd")
        ]
        assert text == "".join(answers)
    alone = [template.render([record]) for record in records]
    assert rows.ids.tolist() == np.concatenate([row.ids for row in alone]).tolist()
    assert rows.mask().tolist() == np.concatenate([row.mask() for row in alone]).tolist()
    assert decode(rows[2:3].ids[rows[2:3].mask()]) == "b<|im_end|>d<|im_end|>"
    prompt = Record([Message("user", "a")], template_kwargs='{"mood":"sad"}')
    assert decode(template.prompt_ids(prompt)).endswith("<|im_start|>assistant\n(sad) ")


def test_the_number_of_template_variables_does_not_change_the_rendering(template, monkeypatch):
    monkeypatch.setattr(template_renderer, "MAX_KWARGS", 2)
    moods = [0, 1, 2, 0, 3, 3, 1, 0]
    records = [conversation(template_kwargs=json.dumps({"mood": mood})) for mood in moods]
    rows = template.render(list(template.renderable(records)))
    answers = "".join(f"({mood}) b<|im_end|>({mood}) d<|im_end|>" for mood in moods)
    decoded = template.tokenizer.decode(rows.ids)
    assert "".join(part.split("\n")[1] for part in decoded.split("<|im_start|>assistant")[1:]) == answers
    assert template.tokenizer.decode(rows.ids[rows.mask()]) == "b<|im_end|>d<|im_end|>" * len(moods)
    assert len(template._variants) <= 16


def test_a_preset_counts_template_variables_that_it_cannot_use():
    ledger = Ledger()
    open_renderer("chatml", "bytes").render([conversation(template_kwargs='{"a":1}')] * 2, ledger=ledger)
    assert ledger.to_json() == {"noted": {"template_kwargs_unused": {"rows": 2, "tokens": 0, "trained": 0}}}


# Texts.


def text(content: str, **fields: object) -> Record:
    return Record([Message("assistant", content, **fields)], is_text=True, file="a", line=1)


def test_a_text_is_encoded_as_the_tokenizer_encodes_it(tmp_path):
    path = folder(tmp_path / "model")
    engine = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    end, begin = engine.token_to_id("</s>"), engine.token_to_id("<s>")
    plain = engine.encode("the user é").ids
    rows = open_renderer("text", str(path)).render([text("the user é")])
    assert rows.ids.tolist() == [*plain, end]
    assert rows.mask().all()
    engine.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=[("<s>", begin), ("<|im_end|>", engine.token_to_id("<|im_end|>"))]
    )
    engine.save(str(path / "tokenizer.json"))
    renderer = open_renderer("text", str(path))
    rows = renderer.render([text("the user é")])
    assert rows.ids.tolist() == engine.encode("the user é").ids
    assert rows.mask().tolist() == [False, *[True] * (len(rows.ids) - 1)]
    stored = json.loads(json.dumps(renderer.to_json()))
    again = renderer_from_json(stored, renderer.tokenizer, spec=str(path), where="here")
    assert again.render([text("the user é")]).ids.tolist() == rows.ids.tolist()


def test_a_completion_directly_follows_its_prompt():
    renderer = open_renderer("text", "bytes")
    rows = renderer.render([Record([Message("user", "ab"), Message("assistant", "cd")])])
    assert renderer.tokenizer.decode(rows.ids) == "abcd<|EOS|>"
    assert renderer.tokenizer.decode(rows.ids[rows.mask()]) == "cd<|EOS|>"


def space_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Return a tokenizer that adds a space before every text, like the Llama 2 tokenizer."""
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    normalizers = tokenizers.normalizers
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    decoders = tokenizers.decoders
    engine.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", "<s>", "</s>"], max_token_length=6)
    engine.train_from_iterator(["the quick brown fox was the first to answer "] * 9, trainer)
    engine.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    path.mkdir()
    engine.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return engine


TEXTS = st.text("the quickbrownfxa ", max_size=12)


@settings(max_examples=60)
@given(prompt=TEXTS, completion=TEXTS)
def test_a_completion_follows_its_prompt_without_an_added_space(spaced, prompt, completion):
    """As in TRL, a prompt and its completion are encoded as one text."""
    engine, renderer = spaced
    record = Record([*([Message("user", prompt)] if prompt else []), Message("assistant", completion)])
    ledger = Ledger()
    rows = renderer.render(list(renderer.renderable([record])), ledger=ledger)
    whole, before = engine.encode(prompt + completion + "</s>").ids, engine.encode(prompt).ids
    assert rows.ids.tolist() == whole
    if prompt and whole[: len(before)] == before:
        assert rows.mask().tolist() == [False] * len(before) + [True] * (len(whole) - len(before))
    elif prompt:
        # A token that contains the end of the prompt and the start of the completion is not trained on.
        assert not rows.mask()[: len(before) - 1].any()
        assert rows.mask()[-1]
        assert ledger.to_json()["noted"]["range_splits_token"]["tokens"] == 1


@pytest.fixture(scope="module")
def spaced(tmp_path_factory):
    path = tmp_path_factory.mktemp("hf") / "spaced"
    engine = space_tokenizer(path)
    with warnings.catch_warnings():
        # Ignore the warning that a slower library encodes the text.
        warnings.simplefilter("ignore")
        return engine, open_renderer("text", str(path))


def test_a_prompt_and_completion_encoded_as_one_text_can_be_unrolled(spaced):
    record = Record([Message("user", "the quick"), Message("assistant", " fox")], file="a", line=1)
    for renderer in (spaced[1], open_renderer("text", "bytes")):
        options = {"train_on": "assistant", "on_reject": pytest.fail, "ledger": Ledger()}
        rows = render_unrolled(renderer, [*unrolled([record], renderer, **options)], Ledger())
        decode = renderer.tokenizer.decode
        assert decode(rows.ids[rows.mask()]).strip() == "fox" + decode(rows.ids[-1:])
        assert rows.mask().tolist() == renderer.render([record]).mask().tolist()


def test_an_added_space_belongs_to_the_first_character(spaced):
    engine, renderer = spaced
    content = "quick fox"
    rows = renderer.render([text(content, train_ranges=[[0, 5, 0]])])
    tokens = engine.encode(content).tokens
    assert tokens[1].startswith("▁")
    trained = renderer.tokenizer.decode(rows.ids[rows.mask()])
    assert trained.strip() == "fox</s>"
    assert not rows.mask()[:2].any()


def test_names_of_special_tokens_in_a_text_stay_text_and_are_counted(tmp_path):
    renderer = open_renderer("text", str(folder(tmp_path / "model")))
    ledger = Ledger()
    rows = renderer.render([text("a</s>b"), text("<|im_start|>user"), text("plain < text")], ledger=ledger)
    assert renderer.tokenizer.decode(rows[:1].ids) == "a</s>b</s>"
    special = [renderer.tokenizer.token_id(token) for token in ("</s>", "<|im_start|>")]
    assert np.isin(rows.ids, special).sum() == 3
    assert ledger.to_json() == {"noted": {"control_text": {"rows": 2, "tokens": 0, "trained": 0}}}


def test_only_ranges_of_a_text_are_trained():
    renderer = open_renderer("text", "bytes")
    rows = renderer.render(
        [text("Q: a A: b", train_ranges=[[0, 7, 0]]), text("Q: a A: b", weight=0.0, train_ranges=[[7, 9]])]
    )
    decode = renderer.tokenizer.decode
    assert [decode(rows[at : at + 1].ids[rows[at : at + 1].mask()]) for at in (0, 1)] == [" b<|EOS|>", " b"]


def test_texts_need_the_text_format_and_conversations_a_chat_format(template):
    chat = conversation()
    for renderer, record, fault in (
        (
            open_renderer("chatml", "bytes"),
            text("a"),
            "a:1: the record is a single text without turns; use --format",
        ),
        (open_renderer("primer", "bytes"), text("a"), "a:1: the record is a single text without turns"),
        (template, text("a"), "a:1: the record is a single text without turns; use --format text"),
        (open_renderer("text", "bytes"), chat, "a:1: the record is a conversation, which --format text cannot render"),
    ):
        faults: list[RecordError] = []
        assert list(renderer.renderable([record], faults.append)) == []
        assert str(faults[0]).startswith(fault)


def test_a_tokenizer_without_the_end_token_is_rejected(tmp_path):
    path = folder(tmp_path / "model", eos_token=None)
    with pytest.raises(UsageError, match=r"lacks the control tokens <\|endoftext\|>; add them with --add-tokens"):
        open_renderer("text", str(path))
