from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from template_fixtures import own_format

from chatmill.format.template.certify.observe import Observations
from chatmill.format.template.probes import PROBES, TURNS

CHATML = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.reasoning_content -%}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n' -}}{%- endif -%}
{{- message.content -}}
{%- for call in message.tool_calls -%}{{- '<tool_call>' + call.function | tojson + '</tool_call>' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
INST = """{{- bos_token -}}{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{- ' ' + m.content + eos_token -}}
{%- else -%}{{- '[INST] ' + m.content + ' [/INST]' -}}{%- endif -%}
{%- endfor -%}"""


def with_mask(rows, mask):
    spans = rows.spans.take(np.repeat(np.arange(len(rows.spans)), rows.spans["length"]))
    spans["length"], spans["weight"] = 1, mask
    return replace(rows, spans=spans, first_span=np.array([0, len(spans)]))


def runs(mask) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


@pytest.mark.parametrize("source", [CHATML, INST])
@pytest.mark.parametrize("stops", [True, False])
def test_an_answer_that_is_off_by_one_token_at_either_end_is_found_in_every_shape(tmp_path, source, stops):
    format = own_format(tmp_path, source)
    ends = (format.encoder.ids["<|im_end|>" if source == CHATML else "</s>"],)
    object.__setattr__(format.folder, "stops", ends if stops else None)
    seen = Observations(format, None, "")
    assert len(seen.good) > 15
    for id, probe in seen.good.items():
        assert not any(answer.faults for answer in probe.answers), id
        assert all(seen.is_ended(answer) for answer in probe.answers), id
        mask = probe.rows.mask()
        for start, stop in runs(mask):
            for place in (start - 1, start, stop - 1, stop):
                if 0 <= place < len(mask):
                    moved = mask.copy()
                    moved[place] = not moved[place]
                    # A token that is added to the mask gets the message index of the adjacent trained token.
                    rows = with_mask(probe.rows, moved)
                    rows.spans["message"][place] = probe.rows.per_token(probe.rows.spans["message"])[
                        min(max(place, start), stop - 1)
                    ]
                    text = seen.text_of(probe.record)
                    answers = seen.check.answers(probe.record, rows, text)
                    caught = any(answer.faults or not seen.is_ended(answer) for answer in answers)
                    assert caught or len(answers) != len(probe.answers), (id, place, probe.text)


def test_a_header_or_a_word_of_another_message_inside_an_answer_is_found(tmp_path):
    seen = Observations(own_format(tmp_path, CHATML), None, "")
    probe = seen.good[TURNS.id]
    mask = probe.rows.mask()
    (_, first), (second, _) = runs(mask)[:2]
    message = probe.rows.per_token(probe.rows.spans["message"])
    text = seen.text_of(TURNS)
    for stop in range(first + 1, second + 1):
        moved = mask.copy()
        moved[first:stop] = True
        rows = with_mask(probe.rows, moved)
        rows.spans["message"] = np.where((np.arange(len(mask)) >= first) & (np.arange(len(mask)) < stop), 1, message)
        answer = seen.check.answers(TURNS, rows, text)[0]
        assert answer.faults or not seen.is_ended(answer)
        if "Second" in answer.text:
            assert any('"second" from message 2 (user)' in fault for fault in answer.faults)
        if "<|im_start|>user" in answer.text:
            assert any("header" in fault or "ends a turn" in fault for fault in answer.faults)


def test_every_shape_has_a_unique_name_and_unique_words():
    assert len({probe.id for probe in PROBES}) == len(PROBES) == 24
    for probe in PROBES:
        if probe.id not in ("equal texts", "role words as content"):
            words = [message.content.split()[-1] for message in probe.messages if message.content.strip()]
            assert len(set(words)) == len(words), probe.id
