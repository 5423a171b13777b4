from __future__ import annotations

import json
import random

import numpy as np
import pytest
import tokenizers
from range_oracle import expected_weights, pairs_of_bytes, random_ranges, random_text

from chatmill.errors import RecordError
from chatmill.format import PRESETS, TurnRenderer, load_format
from chatmill.ledger import Ledger
from chatmill.records import Message, Record, ToolCall
from chatmill.rows import Part, Rule
from chatmill.tokenizer import open_tokenizer, train_bpe


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "tokenizer.json"
    path.write_bytes(pairs_of_bytes())
    return path


@pytest.fixture(scope="module")
def renderers(tokenizer_file):
    formats = [load_format(name) for name in PRESETS]
    return [TurnRenderer(f, open_tokenizer(tokenizer_file, control=f.tokens, add_tokens=True)) for f in formats]


def test_every_token_has_the_weight_of_its_characters_in_every_preset(renderers, tokenizer_file):
    engine = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    rng = random.Random(7)
    total = 0
    for round in range(160):
        renderer = renderers[round % len(renderers)]
        text, flag = random_text(rng), rng.choice([None, None, 0, 0.25, 1])
        ranges, train_on = random_ranges(rng, len(text)), rng.choice(["assistant", "last", "all", "last-exchange"])
        later = [Message("user", "more"), Message("assistant", "no")] * rng.randrange(2)
        plain, ranged = (
            Record([Message("user", "q"), Message("assistant", text, weight=flag, train_ranges=each), *later])
            for each in ((), ranges)
        )
        before, ledger = renderer.render([plain], train_on=train_on), Ledger()
        rows = renderer.render([plain, ranged, plain], train_on=train_on, ledger=ledger)
        rows.check()
        after = rows[1:2]
        assert after.ids.tolist() == before.ids.tolist()
        (content,) = np.flatnonzero((before.spans["message"] == 1) & (before.spans["part"] == Part.CONTENT))
        start, stop = before.span_start[content], before.span_start[content + 1]
        encoding = engine.encode(text, add_special_tokens=False)
        assert encoding.ids == before.ids[start:stop].tolist()
        own = float(before.spans["weight"][content])
        expected, split = expected_weights(encoding.offsets, len(text), ranges, own, flag is not None)
        wanted = before.weights()
        wanted[start:stop] = expected
        np.testing.assert_array_equal(after.weights(), wanted)
        for other in (rows[:1], rows[2:]):
            assert other.spans.tolist() == before.spans.tolist()
        noted = ledger.to_json().get("noted", {}).get("range_splits_token", {"tokens": 0})
        assert noted["tokens"] == split
        total += split
    assert total > 50


def test_reweighing_changes_only_tokens_that_no_range_decides(renderers):
    text = "The answer is 4"
    record = Record([Message("user", "q"), Message("assistant", text, train_ranges=[[0, 3, 0], [4, 10, 1]])])
    for renderer in renderers:
        for one in ("assistant", "last", "all"):
            for other in ("assistant", "last", "all"):
                rows = renderer.render([record], train_on=one).reweigh(other)
                assert rows.spans.tolist() == renderer.render([record], train_on=other).spans.tolist()


def told(record: Record, **options) -> list[tuple[str, float, str]]:
    format = load_format("chatml")
    renderer = TurnRenderer(format, open_tokenizer("bytes", control=format.tokens))
    rows = renderer.render([record], **options)
    spans = zip(rows.spans, rows.span_start, rows.span_start[1:], strict=False)
    return [
        (renderer.tokenizer.decode(rows.ids[a:b]), float(span["weight"]), Rule(span["rule"]).name)
        for span, a, b in spans
        if span["message"] == 1
    ]


def test_the_rest_of_a_message_and_its_end_follow_their_own_rule():
    ranged = Message("assistant", "añ 😀 yes", train_ranges=[[6, 8, 2], [1, 4, 0]])
    header = ("<|im_start|>assistant\n", 0.0, "HEADER")
    record = Record([Message("user", "q"), ranged])
    assert told(record) == [
        header,
        ("a", 1.0, "ROLE"),
        ("ñ 😀", 0.0, "RANGE"),
        (" y", 1.0, "ROLE"),
        ("es", 2.0, "RANGE"),
        ("<|im_end|>", 1.0, "ROLE"),
        ("\n", 0.0, "HEADER"),
    ]
    flagged = Message("assistant", "añ 😀 yes", train=False, train_ranges=[[4, 7, True]])
    assert told(Record([Message("user", "q"), flagged])) == [
        header,
        ("añ 😀", 0.0, "FLAG"),
        (" ye", 1.0, "RANGE"),
        ("s", 0.0, "FLAG"),
        ("<|im_end|>", 0.0, "FLAG"),
        ("\n", 0.0, "HEADER"),
    ]


def test_ranges_count_from_the_content_after_reasoning_and_before_calls():
    call = ToolCall("add", "{}")
    message = Message("assistant", "say it", reasoning="é hm", tool_calls=[call], train_ranges=[[0, 3, 0]])
    parts = told(Record([Message("user", "q"), message]))
    assert ("say", 0.0, "RANGE") in parts and (" it", 1.0, "ROLE") in parts
    assert [text for text, weight, _ in parts if weight == 0] == ["<|im_start|>assistant\n", "say", "\n"]


def test_a_tokenizer_that_changes_the_text_is_rejected_only_for_ranges(tmp_path):
    texts = ["the quick brown fox"] * 4
    content = json.loads(train_bpe(texts, vocab_size=300, control=["<|im_start|>", "<|im_end|>"]))
    content["normalizer"] = {"type": "NFC"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    format = load_format("chatml")
    renderer = TurnRenderer(format, open_tokenizer(tmp_path / "tokenizer.json", control=format.tokens))
    ranges = [[0, 1, 0]]
    kept, composed = (
        Record([Message("assistant", t, train_ranges=ranges)], file="f", line=3) for t in ("abc", "e\u0301x")
    )
    assert renderer.render([kept]).weights().tolist().count(0) >= 2
    with pytest.raises(
        RecordError, match="f:3: message 0 has train_ranges, but the tokenizer changes the text"
    ) as raised:
        renderer.render([kept, composed])
    assert raised.value.kind == "vague_range"
    renderer.render([Record([Message("assistant", "e\u0301x")])])
