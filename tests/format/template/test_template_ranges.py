from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from range_oracle import expected_weights, random_ranges, random_text
from template_fixtures import open_template, own_format, trl_format, trl_tokenizer, write_tokenizer

from chatmill.errors import RecordError
from chatmill.format.template.renderer import TemplateRenderer
from chatmill.ledger import Ledger
from chatmill.prepare.unroll import render_unrolled, unrolled
from chatmill.records import Message, Record
from chatmill.rows import Rows, Rule

PUBLISHED = Path(__file__).resolve().parents[4] / "shared" / "data" / "templates"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chatml(tmp_path: Path, content: str) -> TemplateRenderer:
    return own_format(tmp_path, CHATML.replace("CONTENT", content))


def conversation(text: str, ranges: object, flag: float | None = None) -> Record:
    answer = Message("assistant", text, weight=flag, train_ranges=ranges)
    return Record([Message("user", "Question?"), answer], file="chat.jsonl", line=4)


def check_weights(renderer: TemplateRenderer, engine: tokenizers.Tokenizer, rng: random.Random, text: str) -> int:
    flag, train_on = rng.choice([None, None, 0, 0.25]), rng.choice(["assistant", "last", "all"])
    ranges = random_ranges(rng, len(text))
    plain, ranged = conversation(text, (), flag), conversation(text, ranges, flag)
    before, ledger = renderer.render([plain], train_on=train_on), Ledger()
    rows = renderer.render([plain, ranged], train_on=train_on, ledger=ledger)
    rows.check()
    after = rows[1:2]
    assert rows[:1].spans.tolist() == before.spans.tolist()
    assert after.ids.tolist() == before.ids.tolist()
    written = renderer.text(plain)
    (start,) = [at for at in range(len(written)) if written.startswith(text.strip(), at)]
    begin = start - (len(text) - len(text.lstrip())) * (not written.startswith(text, start))
    if not written.startswith(text, begin):
        # The template removes whitespace around the text.
        ranges = [[max(a, start - begin), min(b, start - begin + len(text.strip())), w] for a, b, w in ranges]
    moved = [[begin + a, begin + b, weight] for a, b, weight in ranges if a < b]
    encoding = engine.encode(written, add_special_tokens=False)
    assert encoding.ids == after.ids.tolist()
    wanted, split = before.weights(), 0
    rule = before.per_token(before.spans["rule"])
    for at, (offsets, own) in enumerate(zip(encoding.offsets, before.weights().tolist(), strict=True)):
        if rule[at] in (Rule.ROLE, Rule.FLAG):
            (weight,), is_split = expected_weights([offsets], len(written), moved, own, flag is not None)
            wanted[at], split = weight, split + is_split
    np.testing.assert_array_equal(after.weights(), wanted)
    noted = ledger.to_json().get("noted", {}).get("range_splits_token", {"tokens": 0})
    assert noted["tokens"] == split
    return split


def plain_text(rng: random.Random) -> str:
    """Return a random text that occurs in no template and contains no control tokens."""
    return f"{random_text(rng)}ZZ{random_text(rng)}".replace("<|", "<")


@pytest.mark.parametrize("name", ["qwen3", "gptoss"])
def test_every_token_has_the_weight_of_its_characters_in_published_templates(name):
    renderer = trl_format(name)
    engine = tokenizers.Tokenizer.from_file(str(trl_tokenizer() / "tokenizer.json"))
    rng = random.Random(name)
    assert sum(check_weights(renderer, engine, rng, plain_text(rng)) for _ in range(10)) > 0


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the shared templates are missing")
@pytest.mark.parametrize("name", ["axolotl-phi_4", "llamacpp-Qwen-QwQ-32B"])
def test_every_token_has_the_weight_of_its_characters_in_shared_templates(name, tmp_path):
    renderer = own_format(tmp_path, (PUBLISHED / f"{name}.jinja").read_text("utf-8"))
    engine = tokenizers.Tokenizer.from_file(str(tmp_path / "own" / "tokenizer.json"))
    rng = random.Random(name)
    for _ in range(5):
        check_weights(renderer, engine, rng, plain_text(rng))


def parts(renderer: TemplateRenderer, rows: Rows) -> list[tuple[str, float, str]]:
    spans = zip(rows.spans, rows.span_start, rows.span_start[1:], strict=False)
    return [
        (renderer.tokenizer.decode(rows.ids[a:b]), float(span["weight"]), Rule(span["rule"]).name)
        for span, a, b in spans
        if span["message"] == 1 and span["rule"] != Rule.HEADER
    ]


def test_trimmed_text_has_no_tokens_and_shifts_the_rest(tmp_path):
    renderer = chatml(tmp_path, "m.content | trim")
    rows = renderer.render([conversation("\n  😀 YES \n", [[0, 4, 0], [8, 10, 0]])])
    assert parts(renderer, rows) == [("😀", 0.0, "RANGE"), (" YES", 1.0, "ROLE"), ("<|im_end|>", 1.0, "ROLE")]


def test_content_that_is_rendered_twice_has_its_ranges_twice(tmp_path):
    renderer = chatml(tmp_path, "m.content ~ (' / ' ~ m.content if m.role == 'assistant' else '')")
    rows = renderer.render([conversation("A B", [[0, 1, 0]])])
    assert parts(renderer, rows) == [
        ("A", 0.0, "RANGE"),
        (" B / ", 1.0, "ROLE"),
        ("A", 0.0, "RANGE"),
        (" B", 1.0, "ROLE"),
        ("<|im_end|>", 1.0, "ROLE"),
    ]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("m.content.replace(' ', '_')", "the chat template drops character 1 of the content"),
        ("m.content | upper", "the chat template changes the content"),
        ("m.content | replace('q', 'y')", None),
    ],
)
def test_a_character_that_the_template_replaces_is_rejected_if_it_is_in_a_range(tmp_path, content, fault):
    renderer = chatml(tmp_path, content)
    record = conversation("a x z", [[0, 3, 0]])
    if fault is None:
        assert [text for text, weight, _ in parts(renderer, renderer.render([record])) if not weight][-1] == "a x"
        return
    refused: list[RecordError] = []
    (kept,) = renderer.renderable([record, conversation("a x z", ())], refused.append)
    assert kept.messages[1].train_ranges == ()
    assert str(refused[0]).startswith(f"chat.jsonl:4: message 1 has train_ranges, but {fault}; remove train_ranges")
    assert refused[0].kind == "vague_range"


def test_a_text_that_json_escapes_is_rejected_for_ranges(tmp_path):
    renderer = chatml(tmp_path, "m.content | tojson")
    with pytest.raises(RecordError, match="message 1 has train_ranges, but the chat template changes the content"):
        renderer.render([conversation('say "x"', [[0, 3, 0]])])


def test_a_text_token_in_a_range_counts_as_one_token(tmp_path):
    source = CHATML.replace("CONTENT", "m.content")
    folder = write_tokenizer(tmp_path / "own", ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<think>", "</think>"])
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = "think" not in token["content"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(source)
    text = "<think>Q</think> YES"
    for text_tokens, split in (("as-transformers", 1), ("never", 0)):
        renderer, ledger = open_template(str(folder), text_tokens=text_tokens), Ledger()
        rows = renderer.render([conversation(text, [[0, 12, 0]])], ledger=ledger)
        untrained = [part for part, weight, _ in parts(renderer, rows) if not weight]
        assert ("".join(untrained) == "<think>Q</think>") == bool(split)
        noted = ledger.to_json()["noted"].get("range_splits_token", {"tokens": 0})
        assert noted["tokens"] >= split


def test_a_row_that_is_encoded_as_a_whole_has_the_same_weights(tmp_path):
    # A normalizer may change the bytes of a text, so only `tokenizers` knows the offsets of the tokens.
    folder = write_tokenizer(tmp_path / "own", ["<|im_start|>", "<|im_end|>", "<s>", "</s>"])
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "NFC"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(CHATML.replace("CONTENT", "m.content"))
    renderer = open_template(str(folder))
    engine = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = random.Random(5)
    assert sum(check_weights(renderer, engine, rng, plain_text(rng) + "e\u0301x") for _ in range(10)) > 0


def test_unrolled_rows_train_ranges_in_the_row_of_their_answer(tmp_path):
    renderer = chatml(tmp_path, "m.content | trim")
    turns = [Message("user", "Q"), Message("assistant", " XX YY", train_ranges=[[0, 3, 0]])]
    (made,) = unrolled([Record([*turns, *turns])], renderer, train_on="assistant", on_reject=raise_it, ledger=Ledger())
    rows = render_unrolled(renderer, [made], Ledger())
    assert [renderer.tokenizer.decode(one.ids[one.mask()]) for one in (rows[:1], rows[1:])] == [" YY<|im_end|>"] * 2
    assert {rule for _, _, rule in parts(renderer, rows[1:])} == {"EARLIER_ROW"}


def raise_it(fault: RecordError) -> None:
    raise fault
