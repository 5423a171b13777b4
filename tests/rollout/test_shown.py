from __future__ import annotations

from chatmill.format import load_format
from chatmill.rollout.target import build_answer, build_target
from chatmill.rollout.vocabulary import COORDINATES
from chatmill.show.terminal import span_lines
from chatmill.tokenizer import open_tokenizer


def test_every_part_of_a_target_has_its_own_line_and_colour():
    format = load_format("chatml")
    tokenizer = open_tokenizer("bytes", control=format.tokens, besides=COORDINATES, add_tokens=True)
    answer = build_answer([{"desc": "a", "bbox_2d": [1, 2, 300, 400]}], tokenizer=tokenizer).ids.tolist()
    truth = [{"desc": "a", "bbox_2d": [5, 2, 300, 400]}, {"desc": "b", "poly": [0, 0, 1, 0, 1, 1]}]
    rows = build_target(answer, truth, tokenizer=tokenizer, train_values=False).rows
    lines = list(span_lines(rows, 0, tokenizer))
    text = [line.plain for line in lines]
    assert text[:4] == [
        '        0 assistant prefix    rollout    {"object_1": {"desc": "a", "bbox_2d": ["',
        "     *  0 assistant slot      matched    <|coord_1|> → <|coord_5|>",
        '        0 assistant prefix    rollout    ", "',
        "     *  0 assistant slot      matched    <|coord_2|> → <|coord_2|>",
    ]
    assert text[9:13] == [
        '     *  0 assistant structure missed     , "object_2": {"desc": "',
        "        0 assistant value     values_off b",
        '     *  0 assistant structure missed     ", "poly": [["',
        "     *  0 assistant coord     missed     <|coord_0|>",
    ]
    assert text[-2:] == [
        "     *  0 assistant brace     missed     }",
        "     *  0 assistant eos       missed     <|im_end|>",
    ]
    styles = [str(line.spans[0].style) for line in lines]
    assert styles[:2] == ["dim blue", "bold yellow"]
    assert styles[9:13] == ["bold green", "dim bright_green", "bold green", "bold magenta"]
    assert styles[-2:] == ["bold green", "bold green"]
