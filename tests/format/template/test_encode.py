from __future__ import annotations

import io
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from template_fixtures import TOOLS, answer, open_template, user
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from chatmill.format.template.certify.certificate import certify
from chatmill.ledger import Ledger
from chatmill.records import Message, Record
from chatmill.rows import Part, Rule

CHATML = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{% generation %}{{- message.content + '<|im_end|>' -}}{% endgeneration %}{{- '\\n' -}}
{%- else -%}{{- message.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
CONTROL = ["<|im_start|>", "<|im_end|>"]


def write(folder: Path, made: Tokenizer, texts: list[str], **options: object) -> str:
    alphabet = pre_tokenizers.ByteLevel.alphabet() if not options else list("▁Habcdefghijklmnopqrstuvwxyz.\n<|>_")
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False, **options)
    )
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    return str(folder)


@pytest.fixture
def greedy(tmp_path) -> str:
    """Return a tokenizer that merges words across newlines: `assistant\nHello` is one token."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return write(tmp_path / "greedy", made, ["assistant\nHello there"] * 9)


@pytest.fixture
def spaced(tmp_path) -> str:
    """Return a tokenizer that adds a space at the start of a text, but not after control tokens."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    return write(tmp_path / "spaced", made, ["the lazy dog. user assistant\nhello"] * 4, special_tokens=["<unk>"])


def opened(folder: str, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return open_template(folder, **options)


def cells(format, record: Record, ledger: Ledger | None = None) -> list[tuple[str, bool]]:
    rows = format.render([record], ledger=ledger)
    rows.check()
    mask = rows.mask()
    return [(format.tokenizer.decode([id]), bool(trained)) for id, trained in zip(rows.ids.tolist(), mask, strict=True)]


TALK = Record([user("Hi"), answer("Hello there")])


def test_a_token_that_spans_the_end_of_the_prompt_is_context_and_is_noted(greedy):
    ledger = Ledger()
    found = cells(opened(greedy), TALK, ledger)
    assert found[-3:] == [("assistant\nHello there", False), ("<|im_end|>", True), ("\n", False)]
    assert {reason: entry.tokens for bucket, reason, entry in ledger if bucket == "noted"} == {"straddling_token": 1}


def test_the_certificate_counts_tokens_that_span_a_boundary(greedy):
    format = opened(greedy)
    found = {finding.name: finding for finding in certify(format)}
    # No probe text of the certificate starts with a word that the tokenizer merges with the header.
    assert (found["borders"].level, found["borders"].details["straddling"]) == ("PASS", 0)
    found = {finding.name: finding for finding in certify(format, [TALK])}
    assert (found["borders"].level, found["borders"].details["of_records"]) == ("WARN", {"straddling": 1, "answers": 1})
    assert found["borders"].text == (
        "the first token of 1 of 1 answers in your records starts in the header and is not trained on"
    )


def test_with_tags_such_a_token_is_trained_as_in_transformers(greedy):
    found = cells(opened(greedy, mask="tags"), TALK)
    assert found[-3:] == [("assistant\nHello there", True), ("<|im_end|>", True), ("\n", False)]


def test_a_tokenizer_that_treats_the_first_section_differently_encodes_the_whole(spaced):
    format = opened(spaced)
    assert not format.encoder.by_sections
    peer = PreTrainedTokenizerFast(tokenizer_file=f"{spaced}/tokenizer.json")
    for record in (TALK, Record([user("the dog"), answer(" lazy <|im_end|> dog."), user("a"), answer("b")])):
        messages = [{"role": m.role, "content": m.content} for m in record.messages]
        right = peer.apply_chat_template(messages, chat_template=CHATML, tokenize=True, return_dict=False)
        for _ in range(3):
            rows = format.render([record])
            rows.check()
            if record is TALK:
                assert rows.ids.tolist() == right
            ends = rows.ids == format.tokenizer.token_id("<|im_end|>")
            assert ends.sum() == len(record.messages)
            trained = "".join(format.tokenizer.decode([id]) for id in rows.ids[rows.mask()].tolist())
            said = "".join(m.content + "<|im_end|>" for m in record.messages if m.role == "assistant")
            assert trained.replace(" ", "") == said.replace(" ", "")


def test_texts_that_a_tokenizer_changes_are_split_by_its_offsets(tmp_path):
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    format = opened(write(tmp_path / "nfc", made, ["the lazy dog"] * 3))
    assert format.encoder.by_sections
    rows = format.render([TALK, Record([user("e\u0301"), answer("e\u0301a")]), TALK])
    rows.check()
    assert [format.tokenizer.decode(rows[n : n + 1].ids[rows[n : n + 1].mask()].tolist()) for n in range(3)] == [
        "Hello there<|im_end|>",
        "éa<|im_end|>",
        "Hello there<|im_end|>",
    ]


def test_a_message_can_have_its_own_weight(greedy):
    format = opened(greedy)
    record = Record(
        [
            user("a"),
            Message("assistant", "b", weight=0.0),
            user("c"),
            Message("assistant", "d", weight=0.5),
            user("e"),
            answer("f"),
        ]
    )
    rows = format.render([record])
    of_answers = rows.spans["part"] == Part.CLOSE
    of_answers &= np.isin(rows.spans["rule"], [Rule.ROLE, Rule.FLAG])
    assert rows.spans["weight"][of_answers].tolist() == [0.0, 0.5, 1.0]
    assert format.render([record], train_on="last").spans["weight"][of_answers].tolist() == [0.0, 0.5, 1.0]
    steps = Record([user("a"), answer("b"), user("c"), answer("d"), answer("e"), Message("assistant", "f", weight=0.0)])
    exchange = format.render([steps], train_on="last-exchange")
    assert np.unique(exchange.spans["message"][exchange.spans["weight"] > 0]).tolist() == [3, 4]
    everyone = format.render([Record([user("a"), answer("b")])], train_on="all")
    assert "a" in format.tokenizer.decode(everyone.ids[everyone.mask()].tolist())


def test_reasoning_and_tools_that_a_template_drops_are_noted(greedy):
    ledger = Ledger()
    record = Record([user("a"), answer("b", "why")], tools=TOOLS)
    opened(greedy).render([record, record, record], ledger=ledger)
    assert {reason: entry.rows for bucket, reason, entry in ledger if bucket == "noted"} == {
        "reasoning_left_out": 3,
        "tools_left_out": 3,
    }


def test_a_text_whose_tokens_cannot_be_located_is_rejected_in_advance(tmp_path):
    # The tokenizer normalizes full-width letters, and has no tokenizer.json that could provide offsets.
    made, model = io.BytesIO(), tmp_path / "sp.model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["Hello full width user assistant dog fox"] * 20),
        model_writer=made,
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        user_defined_symbols=CONTROL,
        hard_vocab_limit=False,
        minloglevel=3,
    )
    model.write_bytes(made.getvalue())
    (tmp_path / "chat.jinja").write_text(CHATML)
    format = opened(str(model), chat_template=str(tmp_path / "chat.jinja"))
    good, odd = Record([user("Hi"), answer("Hello")]), Record([user("Hi"), answer("ｆｕｌｌ ｗｉｄｔｈ")], line=2)
    refused = []
    assert [record.messages for record in format.renderable([good, odd, good], refused.append)] == [good.messages] * 2
    assert [(fault.kind, fault.line) for fault in refused] == [("vague_border", 2)]
    # The newline at the end of the prompt becomes the space that starts the first token of the answer.
    assert [trained for _, trained in cells(format, good)][-2:] == [False, True]
