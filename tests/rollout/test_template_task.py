"""Rollouts with a model's own chat template: prompts as transformers renders them, the same targets, whole runs."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from rollout_fixtures import box

from chatmill.errors import UsageError
from chatmill.records import Message, Record
from chatmill.rollout import COORDINATES, Task, open_task, prompt_lists, target_rows, task_prompts
from chatmill.rollout.config import RolloutConfig
from chatmill.rollout.files import GroundTruth, Rollout
from chatmill.rollout.loop import train_rollouts
from chatmill.rollout.task import Health, check_prompts
from chatmill.rows import NO_MESSAGE, Rule
from chatmill.tokenizer import train_bpe
from chatmill.train.chat_model import open_chat_model
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.load_model import open_model

CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou see.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BRACKETS = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
TEMPLATES = {"chatml": (CHATML, "<|im_end|>"), "brackets": (BRACKETS, "</s>"), "thinking": (THINKING, "<|im_end|>")}
CONTROL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
TEXT = f"{{{box(1, 'black cat', 1, 22, 333, 444)}, {box(2, 'a bird', 5, 6, 7, 8)}}} what is here? user assistant"
VOCABULARY = train_bpe([TEXT] * 9, vocab_size=1340, control=[*CONTROL, *COORDINATES])
TRUTH = [{"desc": "cat", "bbox_2d": [1, 2, 300, 400]}, {"desc": "bird", "bbox_2d": [500, 500, 600, 600]}]
CONVERSATIONS = [
    [("user", "what is here?")],
    [("system", "Be brief."), ("user", "what?"), ("assistant", "early"), ("user", "and <|im_end|>?")],
]


def write_folder(folder: Path, name: str) -> Path:
    template, end = TEMPLATES[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(VOCABULARY)
    settings = {"chat_template": template, "eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def truths() -> list[GroundTruth]:
    return [
        GroundTruth(Record([Message(*pair) for pair in pairs], str(n), file="t.jsonl", line=n + 1), TRUTH)
        for n, pairs in enumerate(CONVERSATIONS)
    ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers_and_all_of_them_is_context(tmp_path, name):
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path / "model", name)
    task = open_task(str(folder), None)
    rows = task_prompts(truths(), task)
    rows.check()
    theirs = AutoTokenizer.from_pretrained(folder)
    for ids, pairs in zip(prompt_lists(rows), CONVERSATIONS, strict=True):
        # Text that looks like a control token is text in chatmill, and a token there.
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
def test_targets_are_those_of_a_preset_with_the_same_tokenizer(tmp_path, name, rollout):
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
    """The ids of an answer in which each coordinate is its own token."""
    ids: list[int] = []
    for at, piece in enumerate(re.split(r"(<\|coord_[0-9]+\|>)", text)):
        ids += [task.tokenizer.token_id(piece)] if at % 2 else task.tokenizer.encode(piece)
    return ids


def test_a_folder_without_coordinate_tokens_is_refused_and_fields_need_none(tmp_path):
    folder = write_folder(tmp_path / "model", "chatml")
    (folder / "tokenizer.json").write_bytes(train_bpe([TEXT], vocab_size=300, control=CONTROL))
    with pytest.raises(UsageError, match=r"the vocabulary lacks <\|coord_0\|>; add the coordinate tokens to it"):
        open_task(str(folder), None)
    with pytest.raises(UsageError, match="--add-tokens with --format template"):
        open_task(str(folder), None, add_tokens=True)
    assert open_task(str(folder), None, fields=("name",)).renderer.name == "template"


def test_a_hugging_face_model_is_trained_on_its_own_answers_and_replayed_to_the_bit(tmp_path):
    folder = write_model(tmp_path / "model")
    lines = [
        {"id": number, "messages": [{"role": "user", "content": f"scene {number}"}], "objects": TRUTH[: number % 3]}
        for number in range(5)
    ]
    (tmp_path / "truth.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {
        "truth": str(tmp_path / "truth.jsonl"),
        "init_from_model": str(folder),
        "tokenizer": str(folder),
        "max_iters": 4,
        "rollout_every": 2,
        "batch_size": 3,
        "max_new_tokens": 12,
        "decoding": "sample",
        "learning_rate": 0.01,
        "save_interval": 2,
        "device": "cpu",
    }
    for lora in (None, {"r": 2, "alpha": 4}):
        runs = [tmp_path / f"{name} {lora is None}" for name in ("run", "replayed", "resumed")]
        config = {**settings, "lora": lora}
        result = train_rollouts(RolloutConfig.from_mapping(config), runs[0], quiet=True)
        assert result.step == 4 and result.health.rollouts == 12
        replay = {**config, "replay": str(runs[0] / "rollouts.jsonl")}
        train_rollouts(RolloutConfig.from_mapping(replay), runs[1], quiet=True)
        kept = RolloutConfig.from_mapping({**config, "keep_checkpoints": 9})
        train_rollouts(kept, runs[2], quiet=True)
        train_rollouts(kept, runs[2], resume=str(runs[2] / "step_00000002"), quiet=True)
        first, *others = (weights(run) for run in runs)
        assert first != weights_of_folder(folder)
        assert all(other == first for other in others)
        chat = open_chat_model(runs[0], device="cpu")
        truth = next(iter(truths()))
        assert (
            chat.prompt(truth.record.messages) == prompt_lists(task_prompts([truth], open_task(str(folder), None)))[0]
        )


def write_model(folder: Path) -> Path:
    write_folder(folder, "thinking")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM, Qwen3Config
    torch.manual_seed(0)
    sizes = {"vocab_size": 1400, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    AutoModelForCausalLM.from_config(Qwen3Config(**sizes, **heads)).save_pretrained(folder)
    return folder


def weights(run: Path) -> dict[str, list]:
    return weights_of_folder(model_folder(run))


def weights_of_folder(folder: Path) -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in open_model(folder).state_dict().items()}
