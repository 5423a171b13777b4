from __future__ import annotations

import re

import pytest
from rich.text import Text
from show_fixtures import line, make

from chatmill.show.row_view import preview, row_json, span_views, turns
from chatmill.show.terminal import conversation_lines, conversation_title, token_lines


def plain(shown, number: int) -> list[str]:
    row = shown.row("train", number)
    return [each.plain for each in conversation_lines(row, shown.text, plain=True)]


def test_turns_are_printed_line_by_line_with_trained_text_in_brackets(chats):
    assert (
        conversation_title(chats.row("train", 1), "train", 1).plain
        == "train 1  chat.jsonl:2  42 tokens, 20 trained (48%)"
    )
    assert plain(chats, 1) == [
        "user 0",
        "  <|usr|>Gold?<|eot|>",
        "assistant 1",
        "  <|asst|>[It is Au.<|eot|>]",
        "user 2",
        "  <|usr|>And silver?<|eot|>",
        "assistant 3",
        "  <|asst|>[It is Ag.<|eot|>]",
    ]


def test_brackets_in_the_text_differ_from_those_of_the_mask(chats):
    assert plain(chats, 5) == [
        "user 0",
        r"  <|usr|>\[x\]<|eot|>",
        "assistant 1",
        r"  <|asst|>[y \] z<|eot|>]",
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pack": 60},
        {"max_tokens": 16, "fit": "windows"},
        {"max_tokens": 20, "fit": "blocks", "format": "post-training"},
    ],
)
def test_exactly_the_trained_text_is_in_brackets(tmp_path, options):
    lines = [line(f"question {n} [a]", f"answer {n} ]b[", "so?", "yes\nand no") for n in range(6)]
    shown = make(tmp_path, lines, **options)
    for number in range(len(shown.dataset["train"])):
        row = shown.row("train", number)
        trained = bytes(b for id, on in zip(row.ids, row.mask(), strict=True) if on for b in shown.text.piece(int(id)))
        said = "\n".join(each.removeprefix("  ") for each in plain(shown, number) if each.startswith("  "))
        inside = "".join(re.findall(r"(?<!\\)\[((?:[^\]\[\\]|\\.)*)\]", said, re.DOTALL))
        assert re.sub(r"\\([\[\]])", r"\1", inside).encode() == trained


def test_a_weight_other_than_1_follows_its_bracket(tmp_path):
    weighed = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0.5}]}\n'
    assert plain(make(tmp_path, [weighed]), 0)[2:] == [
        "assistant 1  the message sets its weight",
        "  <|asst|>[a<|eot|>]×0.5",
    ]


def test_a_packed_row_shows_the_boundaries_and_origins_of_its_conversations(tmp_path):
    shown = make(tmp_path, [line("a", "b"), line("c", "d")], pack=20)
    assert plain(shown, 0)[::5] == [
        "── segment 0 of 2: chat.jsonl:1, 6 tokens",
        "── segment 1 of 2: chat.jsonl:2, 6 tokens",
    ]
    assert (
        conversation_title(shown.row("train", 0), "train", 0).plain == "train 0  2 segments  12 tokens, 4 trained (33%)"
    )


def test_messages_that_were_cut_are_named(tmp_path):
    shown = make(tmp_path, [line("one", "two", "three", "four")], max_tokens=13, fit="turns")
    assert plain(shown, 0)[0] == "… messages 0 to 1 are not in this row"
    assert [(turn.message, turn.missing) for turn in turns(shown.row("train", 0), 0)] == [(2, (0, 1)), (3, None)]


def test_blocks_show_injected_copies_cut_turns_and_padding(tmp_path):
    lines = [line("a question", "an answer that is long enough to be cut by the end of its block") for _ in range(3)]
    shown = make(tmp_path, lines, format="post-training", fit="blocks", max_tokens=32)
    said = "\n".join(text for number in range(len(shown.dataset["train"])) for text in plain(shown, number))
    assert "continues a split turn, after an injected copy of its header" in said
    assert "not trained: incomplete here, or follows an unclosed answer" in said
    assert re.search(r"── padding: \d+ tokens", said)


def test_a_target_follows_the_token_it_corrects(rollout_target):
    assert plain(rollout_target, 0) == ["user 0", "  q", "assistant 1", "  1[2→456]"]
    assert [each.plain for each in token_lines(rollout_target.row("train", 0), rollout_target.text)][2] == (
        "   *      2      50   1 assistant slot      matched    2 → 52 4"
    )


def test_tokens_one_by_one(chats):
    assert [each.plain for each in token_lines(chats.row("train", 0), chats.text)] == [
        "          0     261   0 user      open      header     <|usr|>",
        "          1     104   0 user      content   role       h",
        "          2     105   0 user      content   role       i",
        "          3     263   0 user      close     role       <|eot|>",
        "          4     262   1 assistant open      header     <|asst|>",
        "   *      5     121   1 assistant content   role       y",
        "   *      6     111   1 assistant content   role       o",
        "   *      7     263   1 assistant close     role       <|eot|>",
    ]


def test_trained_text_is_bold_in_the_colour_of_its_speaker(chats):
    body = list(conversation_lines(chats.row("train", 0), chats.text, plain=False))[3]
    assert body.plain == "  <|asst|>yo<|eot|>"
    styles = {body.plain[span.start : span.end]: str(span.style) for span in body.spans}
    assert styles == {"<|asst|>": "dim", "yo": "bold green", "<|eot|>": "bold green"}


def test_no_line_of_a_hostile_episode_controls_the_terminal(hostile):
    for number in range(len(hostile.dataset["train"])):
        row = hostile.row("train", number)
        for each in [
            conversation_title(row, "train", number),
            *conversation_lines(row, hostile.text, plain=False),
            *(token_lines(row, hostile.text) if len(row.ids) < 10_000 else []),
            Text(preview(row, hostile.text)),
        ]:
            left = each.plain.replace("\u200d", "").replace("\t", "")
            assert left.isprintable(), ascii(left[:200])


@pytest.mark.parametrize("options", [{}, {"pack": 64}, {"format": "post-training", "fit": "blocks", "max_tokens": 32}])
def test_json_has_the_spans_and_labels_of_the_views(tmp_path, options):
    lines = [line(f"question {n}", f"answer {n}", "so?", "yes\nand no") for n in range(6)]
    shown = make(tmp_path, lines, **options)
    for number in range(len(shown.dataset["train"])):
        row = shown.row("train", number)
        json = row_json(row)
        assert json["spans"] == [span.to_json() for span in span_views(row)]
        labels = [id if span.weight else -100 for span in span_views(row) for id in row.ids[span.start : span.stop]]
        assert json["labels"] == labels


def test_json_has_the_targets_of_a_rollout(rollout_target):
    row = rollout_target.row("train", 0)
    spans, json = list(span_views(row)), row_json(row)
    assert any(span.target is not None for span in spans) and json["spans"] == [span.to_json() for span in spans]
    for span in spans:
        if span.target is not None and span.weight:
            assert set(json["labels"][span.start : span.stop]) == {span.target}
