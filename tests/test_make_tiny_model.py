from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from forked_commands import run_in_shell
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "make_tiny_model.py"
WEIGHTS = "8da1a521a65bf98057b74f8dfbdbb894b7ba17b7d6f006e657a548f25765d5d4"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is it warm in Lima?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Lima"}}}],
    },
    {"role": "tool", "content": "19"},
    {"role": "tool", "content": "dry"},
    {"role": "assistant", "content": "Mild.", "reasoning_content": "19 is mild."},
]
QUESTION = {"role": "user", "content": "Sure?"}


def script(arguments: str, folder: Path) -> tuple[int, str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return run_in_shell(f"python {SCRIPT} {arguments}", folder=folder, environment=os.environ | {"PATH": path})


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    code, out, err = script("model", folder)
    assert (code, out, err) == (0, "model: Qwen3 with 162,688 random weights, 1,000 tokens\n", "")
    return folder / "model"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_arguments_give_the_same_bytes_and_another_seed_gives_other_weights(model, tmp_path):
    assert script("again --seed 0", tmp_path)[0] == 0
    assert script("other --seed 1", tmp_path)[0] == 0
    again, other = contents(tmp_path / "again"), contents(tmp_path / "other")
    assert again == contents(model)
    assert [name for name in sorted(again) if again[name] != other[name]] == ["model.safetensors"]


def test_the_weights_are_the_same_on_every_processor(model):
    # The expected hash was recorded on ARM.
    assert hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest() == WEIGHTS


def test_transformers_opens_it_as_qwen3_in_bfloat16_that_stops_at_the_end_of_a_turn(model):
    opened = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert (opened.config.model_type, opened.dtype) == ("qwen3", torch.bfloat16)
    assert len(tokenizer) == opened.config.vocab_size == 1000
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert opened.generation_config.eos_token_id == ends
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == tuple(ends)
    assert tokenizer.decode(tokenizer("<think>4<|im_end|>").input_ids, skip_special_tokens=True) == "<think>4"
    with torch.no_grad():
        logits = opened(torch.tensor([[1, 2, 3]])).logits
    assert logits.shape == (1, 3, 1000)
    assert logits.isfinite().all()


def test_the_template_writes_tools_calls_results_and_reasoning_after_the_last_user_message(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    text = tokenizer.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.\n\nFunctions you can call:\n"
        '{"type": "function", "function": {"name": "weather"}}\n'
        'Call a function with <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>.<|im_end|>\n'
        "<|im_start|>user\nIs it warm in Lima?<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Lima"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n19\n</tool_response>\n<tool_response>\ndry\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n19 is mild.\n</think>\n\nMild.<|im_end|>\n"
    )
    longer = tokenizer.apply_chat_template([*MESSAGES, QUESTION], tokenize=False, add_generation_prompt=True)
    assert longer.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    assert longer.endswith(
        "<|im_start|>assistant\nMild.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chatmill_certifies_it_with_chat_and_tool_conversations(model):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    data = f"{ROOT}/data/conversations.jsonl {ROOT}/data/tool_conversations.jsonl"
    code, out, _ = run_in_shell(
        f"chatmill certify --tokenizer {model} {data}", folder=model.parent, environment=os.environ | {"PATH": path}
    )
    levels = {line.split()[1]: line.split()[0] for line in out.splitlines()}
    assert code == 0
    assert {name for name, level in levels.items() if level != "PASS"} == {"bos", "history", "reasoning"}
    assert "FAIL" not in levels.values()


def test_the_tokenizer_learns_from_the_given_conversations(tmp_path):
    shared = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "zyzzyva zyzzyva zyzzyva"}]}
    (tmp_path / "mine.jsonl").write_text(json.dumps(shared) + "\n")
    code, out, _ = script("model --data mine.jsonl --hidden-size 32 --layers 1", tmp_path)
    assert code == 0
    assert out.endswith("tokens\n")
    learned = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert learned.tokenize("zyzzyva") == ["zyzzyva"]
    assert len(learned) == AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.vocab_size < 300


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        ("taken", 1, "taken: already exists; remove it or use a new name"),
        ("file", 1, "file: already exists; remove it or use a new name"),
        ("new --data nowhere.jsonl", 1, "nowhere.jsonl: no such file; expected a file, a folder or a glob"),
        ("new --vocab-size 264", 2, "--vocab-size is 264; expected 265 to 1048576"),
        ("new --hidden-size 48", 2, "--hidden-size is 48; expected a multiple of 32"),
        ("new --layers 0", 2, "--layers is 0; expected at least 1"),
        ("new --seed -1", 2, "--seed is -1; expected 0 or more"),
    ],
)
def test_refusals_are_one_line_and_leave_everything_as_it_was(arguments, code, error, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    assert script(arguments, tmp_path) == (code, "", f"make_tiny_model.py: {error}\n")
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        "file",
        "taken",
        "taken/notes.txt",
    ]
    assert (tmp_path / "taken" / "notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"
