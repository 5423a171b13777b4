"""Published chat templates: each mask must match an independent oracle, or the conversation is listed as rejected.

The templates are in ../shared/data/templates; without them, only the oracle itself is tested. `make templates` tests
all conversations with all templates. This file tests every second template with a sixth of the conversations.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from published_conversations import CONVERSATIONS, conversation
from published_oracle import judge
from published_reference import Reference, write_folder
from published_trial import EXCUSED, NAMES, TokenBytes, compare, refusals, try_template

from chatmill.format import TemplateOptions, open_renderer
from chatmill.rows import rows_from_mask

FOLDER = Path(__file__).resolve().parents[4] / "shared" / "data" / "templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
TABLE = Path(__file__).with_name("published_refusals.txt")
needs_templates = pytest.mark.skipif(not TEMPLATES, reason="needs ../shared/data/templates")

CHATML = """{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
TOKENS = {
    "bos": "<s>",
    "eos": "</s>",
    "control": ["<|im_start|>", "<|im_end|>"],
    "soft": ["<think>", "</think>"],
    "stops": ["<|im_end|>"],
    "ends": ["<|im_end|>", "</s>"],
}


def listed() -> dict[tuple[str, str], tuple[str, str]]:
    out = {}
    for line in TABLE.read_text("utf-8").splitlines():
        reason, names = line.split(": ")
        template, verdict, kind = reason.split(" ")
        out |= {(template, name): (verdict, kind) for name in names.split(" ")}
    return out


@needs_templates
@pytest.mark.parametrize("template", TEMPLATES[::2])
def test_a_published_template_is_trained_exactly_or_rejected_as_listed(template, tmp_path):
    number = TEMPLATES.index(template) // 2
    names = [name for at, name in enumerate(CONVERSATIONS) if (at + number) % 6 == 0]
    tokens = json.loads((FOLDER / "tokens.json").read_text("utf-8"))[template]
    source = (FOLDER / f"{template}.jinja").read_text("utf-8")
    outcomes = dict(try_template(source, tokens, tmp_path, names))
    assert list(outcomes) == names
    wrong = {name: outcome for name, outcome in outcomes.items() if outcome.verdict in ("wrong", "ids")}
    assert not wrong
    expected = {name: reason for (of, name), reason in listed().items() if of == template and name in names}
    assert {name: outcome[:2] for name, outcome in outcomes.items() if outcome.verdict != "exact"} == expected


def test_the_table_lists_no_wrong_result_and_95_percent_are_exact():
    table = listed()
    templates = {template for template, _ in table}
    verdicts = [verdict for verdict, _ in table.values()]
    assert not {"wrong", "ids"} & {*verdicts}
    excused = sum(verdict in EXCUSED for verdict in verdicts)
    # If the template files are missing, count only the templates in the table. All results of other
    # templates are exact, so omitting these templates only lowers the share of exact results.
    total = len(NAMES) * max(len(TEMPLATES), len(templates))
    assert (total - len(verdicts)) / (total - excused) >= 0.95


@pytest.fixture
def chatml(tmp_path):
    write_folder(tmp_path, CHATML, TOKENS, generation_config=True)
    return tmp_path


def trained_by(chatml, name, change):
    renderer = open_renderer("template", str(chatml), template=TemplateOptions())
    reference, tokens = Reference(chatml, CHATML, TOKENS), TokenBytes(chatml)
    messages = conversation(name, TOKENS)

    def render(records):
        rows = renderer.render(records)
        ids, mask = rows.ids.copy(), rows.mask().copy()
        change(ids, mask, lambda token: int(ids[0]) if token is None else renderer.tokenizer.control_ids[token])
        return rows_from_mask(ids, mask, [len(ids)])

    return compare(reference, tokens, SimpleNamespace(render=render), messages, judge(reference, messages))


def test_the_oracle_agrees_with_correct_results(chatml):
    for name in ("turns", "system", "two_assistants", "assistant_first", "empty", "blank", "control_text", "equal"):
        assert trained_by(chatml, name, lambda *_: None).verdict == "exact"


def first(mask):
    return int(np.flatnonzero(mask)[0])


def last(mask):
    return int(np.flatnonzero(mask)[-1])


def test_the_oracle_finds_an_error_of_one_token_header_or_end(chatml):
    def late(ids, mask, id):
        mask[first(mask)] = False

    def early(ids, mask, id):
        mask[first(mask) - 1] = True

    def with_header(ids, mask, id):
        start = first(mask)
        mask[ids[:start].tolist().index(id("<|im_start|>"), start - 10 if start > 10 else 0) : start] = True

    def without_end(ids, mask, id):
        mask[last(mask)] = False

    def past_the_end(ids, mask, id):
        mask[last(mask) + 1] = True

    def other_ids(ids, mask, id):
        at = int(np.flatnonzero(mask)[0])
        ids[at] = ids[at + 1]

    for change in (late, early, with_header, without_end, past_the_end, other_ids):
        assert trained_by(chatml, "turns", change).verdict == "wrong", change.__name__


def test_the_oracle_requires_an_end_and_the_tokens_of_transformers(tmp_path):
    without_end = CHATML.replace("<|im_end|>", "")
    assert dict(try_template(without_end, TOKENS, tmp_path / "a", ["one_turn"]))["one_turn"].verdict in (
        "wrong",
        "no_end",
    )
    outcomes = dict(try_template(CHATML, TOKENS, tmp_path / "b", ["think_in_content", "unclosed_think"]))
    assert {outcome.verdict for outcome in outcomes.values()} == {"exact"}
    assert refusals({"chatml": outcomes}) == []
