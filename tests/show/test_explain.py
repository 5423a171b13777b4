from __future__ import annotations

import json

import pytest
from show_fixtures import line, make

from chatmill.errors import UsageError
from chatmill.rows import Part, Role, Rule
from chatmill.show.dataset import open_view
from chatmill.show.explain import PARTS, ROLES, explain_token, reason_for
from chatmill.show.row_view import NOTES, SpanView
from chatmill.store.reweigh import reweigh_dataset


def test_every_role_part_and_rule_has_a_description():
    assert ROLES.keys() == set(Role)
    assert PARTS.keys() == set(Part)
    for rule in Rule:
        for weight in (0.0, 1.0):
            span = SpanView(0, 1, Role.USER, Part.OPEN, rule, 0, weight, None)
            said = reason_for(span, train_on="assistant")
            assert said and "{" not in said and said[0].islower()
    assert NOTES.keys() <= set(Rule)


def test_the_sentence_names_token_position_message_weight_and_rule(chats):
    said = explain_token(chats, "train", 1, 9)
    assert said.sentence == (
        f'Token 9 of train episode 1, "t" (id 116), the text of assistant message 1, from {said.file}:2, is trained: '
        "train_on assistant selects assistant messages (rule role)."
    )
    assert (said.message, said.role, said.part, said.weight, said.rule, said.line) == (
        1,
        "assistant",
        "content",
        1,
        "role",
        2,
    )
    said = explain_token(chats, "train", 1, 0)
    assert said.sentence.endswith("is context: the loss mask never includes the header of a turn (rule header).")
    said = explain_token(chats, "train", 1, 2)
    assert said.sentence.endswith("is context: train_on assistant does not select user messages (rule role).")


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        ({"max_tokens": 12, "fit": "windows"}, {"role", "header", "earlier_window"}),
        ({"max_tokens": 16, "fit": "blocks", "format": "post-training"}, {"role", "header", "injected"}),
        ({"pack": 40}, {"role", "header"}),
        ({}, {"role", "header", "flag"}),
    ],
)
def test_the_explanation_of_every_token_agrees_with_the_store(tmp_path, options, rules):
    weighed = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0.5}]}
    lines = [line("one two three", "four five six", "seven", "eight nine ten eleven") for _ in range(4)]
    if not options:
        lines.append(json.dumps(weighed) + "\n")
    shown = make(tmp_path, lines, **options)
    seen = set()
    for number in range(len(shown.dataset["train"])):
        row = shown.row("train", number)
        weights, firsts = row.weights().tolist(), set(row.segment_start[:-1].tolist())
        for token, (id, weight) in enumerate(zip(row.ids.tolist(), weights, strict=True)):
            said = explain_token(shown, "train", number, token)
            assert (said.id, said.weight) == (id, weight)
            assert (", is trained" in said.sentence) == (weight > 0)
            assert ("with weight 0.5" in said.sentence) == (weight == 0.5)
            assert ("no batch predicts it" in said.sentence) == (weight > 0 and token in firsts)
            assert said.sentence.count(".") >= 1 and said.sentence.endswith(".")
            assert f"(rule {said.rule})" in said.sentence
            seen.add(said.rule)
    assert rules <= seen


def test_a_target_with_a_different_id_is_named(rollout_target):
    said = explain_token(rollout_target, "train", 0, 2)
    assert (said.id, said.target, said.rule) == (50, 52, "matched")
    assert 'is trained as "4" (id 52): the token belongs to a matched object' in said.sentence


def test_after_reweighing_the_explanation_uses_the_new_train_on(chats, tmp_path):
    reweigh_dataset(chats.path, tmp_path / "last", train_on="last")
    shown = open_view(tmp_path / "last")
    assert (
        "the token is not in the last answer, and train_on last selects only the last answer"
        in explain_token(shown, "train", 1, 9).sentence
    )
    assert (
        "the token is in the last answer, which train_on last selects" in explain_token(shown, "train", 1, 34).sentence
    )
    reweigh_dataset(chats.path, tmp_path / "exchange", train_on="last-exchange")
    shown = open_view(tmp_path / "exchange")
    assert (
        "a user message follows this answer, "
        "and train_on last-exchange selects only answers after the last user message"
        in explain_token(shown, "train", 1, 9).sentence
    )
    trained = (
        "no user message follows this answer, and train_on last-exchange selects answers after the last user message"
    )
    assert trained in explain_token(shown, "train", 1, 34).sentence


@pytest.mark.parametrize(("episode", "token"), [(6, 0), (0, 8), (-1, 0), (0, -1)])
def test_a_token_that_does_not_exist_is_a_usage_error(chats, episode, token):
    with pytest.raises(UsageError, match="expected 0 to"):
        explain_token(chats, "train", episode, token)
