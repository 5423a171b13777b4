from __future__ import annotations

import json
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "data"
TRAIN, HELD_OUT = ("desk_chat", "desk_tools"), ("desk_chat_heldout", "desk_tools_heldout")
ANSWERS = ("assistant", "assistant_toolcall")
CARELESS = {"role": "assistant", "content": "Next, please!", "weight": 0}


def conversations(names: tuple[str, ...]) -> list[list[dict]]:
    lines = [line for name in names for line in (DATA / f"{name}.jsonl").read_text("utf-8").splitlines()]
    return [json.loads(line)["messages"] for line in lines]


def questions(names: tuple[str, ...]) -> set[str]:
    return {
        message["content"] for messages in conversations(names) for message in messages if message["role"] == "user"
    }


def answers(names: tuple[str, ...]) -> list[str]:
    trained = [
        message
        for messages in conversations(names)
        for message in messages
        if message["role"] in ANSWERS and message.get("weight") != 0
    ]
    return [message.get("content") or json.dumps(message["arguments"]) for message in trained]


def test_there_are_enough_held_out_questions():
    assert len(answers(HELD_OUT)) >= 200


def test_no_held_out_question_occurs_in_training():
    assert questions(HELD_OUT) & questions(TRAIN) == set()


def test_every_held_out_answer_is_taught_in_training():
    assert set(answers(HELD_OUT)) <= set(answers(TRAIN))


def test_two_of_three_training_answers_follow_a_careless_reply_and_no_held_out_answer_does():
    replies = [message for messages in conversations(TRAIN) for message in messages if message.get("weight") == 0]
    assert all(reply == CARELESS for reply in replies)
    assert 0.62 < len(replies) / len(answers(TRAIN)) < 0.71
    assert CARELESS["content"] not in answers(TRAIN) + answers(HELD_OUT)
    assert all("weight" not in message for messages in conversations(HELD_OUT) for message in messages)


def test_a_careless_reply_is_followed_by_a_complaint_and_the_answer():
    for messages in conversations(TRAIN):
        for at, message in enumerate(messages):
            if message == CARELESS:
                complaint, answer = messages[at + 1 : at + 3]
                assert complaint["content"] in ("Please answer.", "Be polite.")
                assert answer["role"] in ANSWERS and answer.get("weight") != 0
