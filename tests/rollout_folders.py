from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch

from chatmill.rollout import COORDINATES
from chatmill.tokenizer import train_bpe

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
TEXT = (
    '{"object_1": {"desc": "black cat", "bbox_2d": ["", ""]}, "object_2": {"desc": "a bird", "bbox_2d": ["", ""]}}'
    " what is here? user assistant"
)
VOCABULARY = train_bpe([TEXT] * 9, vocab_size=1340, control=[*CONTROL, *COORDINATES])
TRUTH = [{"desc": "cat", "bbox_2d": [1, 2, 300, 400]}, {"desc": "bird", "bbox_2d": [500, 500, 600, 600]}]


def write_folder(folder: Path, name: str, *, special_coordinates: bool = True) -> Path:
    """Write a tokenizer folder with a chat template, but without a model.

    With `special_coordinates=False`, coordinate tokens are not special, so servers include them in the response text.
    """
    template, end = TEMPLATES[name]
    folder.mkdir(parents=True, exist_ok=True)
    state = json.loads(VOCABULARY)
    for token in state["added_tokens"]:
        token["special"] = special_coordinates or token["content"] not in COORDINATES
    (folder / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False))
    settings = {"chat_template": template, "eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_truth(path: Path) -> None:
    lines = [
        {"id": number, "messages": [{"role": "user", "content": f"scene {number}"}], "objects": TRUTH[: number % 3]}
        for number in range(5)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run_settings(place: Path, model: Path) -> dict:
    return {
        "truth": str(place / "truth.jsonl"),
        "init_from_model": str(model),
        "tokenizer": str(model),
        "max_iters": 4,
        "rollout_every": 2,
        "batch_size": 3,
        "max_new_tokens": 12,
        "decoding": "sample",
        "learning_rate": 0.01,
        "save_interval": 2,
        "device": "cpu",
    }


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
