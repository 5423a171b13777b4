from __future__ import annotations

import re

import numpy as np
import pytest
from rollout_fixtures import box
from rollout_folders import CONTROL, TEMPLATES, TEXT, TRUTH, write_folder

from chatmill.errors import UsageError
from chatmill.records import Message, Record
from chatmill.rollout import Task, open_task, prompt_lists, target_rows, task_prompts
from chatmill.rollout.files import GroundTruth, Rollout
from chatmill.rollout.task import Health, check_prompts
from chatmill.rows import NO_MESSAGE, Rule
from chatmill.tokenizer import train_bpe

CONVERSATIONS = [
    [("user", "what is here?")],
    [("system", "Be brief."), ("user", "what?"), ("assistant", "early"), ("user", "and <|im_end|>?")],
]


def truths() -> list[GroundTruth]:
    return [
        GroundTruth(Record([Message(*pair) for pair in pairs], str(n), file="t.jsonl", line=n + 1), TRUTH)
        for n, pairs in enumerate(CONVERSATIONS)
    ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_equal_those_of_transformers_and_are_context(tmp_path, name):
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path / "model", name)
    task = open_task(str(folder), None)
    rows = task_prompts(truths(), task)
    rows.check()
    theirs = AutoTokenizer.from_pretrained(folder)
    for ids, pairs in zip(prompt_lists(rows), CONVERSATIONS, strict=True):
        # chatmill encodes text that looks like a control token as text; transformers encodes it as the token.
        messages = [{"role": role, "content": text.replace("<|im_end|>", "")} for role, text in pairs]
        wanted = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        shown = task.tokenizer.decode(ids).replace("and <|im_end|>?", "and ?")
        assert shown == theirs.decode(wanted)
        if "<|im_end|>" not in pairs[-1][1]:
            assert ids == wanted
    assert not rows.mask().any() and set(rows.spans["rule"].tolist()) == {int(Rule.PROMPT)}
    assert task.tokenizer.decode([task.eos_id]) == TEMPLATES[name][1]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "rollout",
    [
        "",
        "nothing",
        "{",
        f"{{{box(1, 'cat', 3, 4, 310, 390)}}}",
        f'{{{box(2, "cat", 3, 4, 310, 390)}, {box(9, "dog", 5, 5, 4, 4)}, "object_3": {{"desc": "b',
    ],
)
def test_targets_equal_those_of_a_preset_with_the_same_tokenizer(tmp_path, name, rollout):
    task = open_task(str(write_folder(tmp_path / "model", name)), None)
    preset = open_task(str(tmp_path / "model"), "chatml")
    ids = encode(rollout, task)
    pairs = [(truth, Rollout(truth.record.id or "", ids, [], 0, 0)) for truth in truths()]
    of_rows = []
    for each in (task, preset):
        rows = target_rows(pairs, each, Health())
        rows.check()
        prompts = prompt_lists(task_prompts(truths(), each))
        check_prompts(rows, prompts)
        answers = []
        for number, prompt in enumerate(prompts):
            row = rows[number : number + 1]
            messages = row.per_token(row.spans["message"])
            known = [message for message in dict.fromkeys(messages.tolist()) if message != NO_MESSAGE]
            assert known == list(range(len(CONVERSATIONS[number]) + 1))
            answer = row.ids[len(prompt) :].tolist()
            assert answer[-1] == each.eos_id
            labels = np.where(row.weights() > 0, row.targets(), -1)[len(prompt) :].tolist()
            answers.append((answer[:-1], labels[:-1], labels[-1] == each.eos_id))
        of_rows.append(answers)
    assert of_rows[0] == of_rows[1]


def encode(text: str, task: Task) -> list[int]:
    ids: list[int] = []
    for at, piece in enumerate(re.split(r"(<\|coord_[0-9]+\|>)", text)):
        ids += [task.tokenizer.token_id(piece)] if at % 2 else task.tokenizer.encode(piece)
    return ids


def test_a_folder_without_coordinate_tokens_is_refused_unless_the_schema_has_none(tmp_path):
    folder = write_folder(tmp_path / "model", "chatml")
    (folder / "tokenizer.json").write_bytes(train_bpe([TEXT], vocab_size=300, control=CONTROL))
    with pytest.raises(UsageError, match=r"the vocabulary lacks <\|coord_0\|>; add the coordinate tokens"):
        open_task(str(folder), None)
    with pytest.raises(UsageError, match="--add-tokens with --format template"):
        open_task(str(folder), None, add_tokens=True)
    assert open_task(str(folder), None, fields=("name",)).renderer.name == "template"
