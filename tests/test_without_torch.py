from __future__ import annotations

import json
import subprocess
import sys

import typer

from chatmill.cli.app import app_of

BLOCK = "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"


def run(code: str, cwd) -> str:
    done = subprocess.run([sys.executable, "-c", BLOCK + code], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_block_blocks(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", BLOCK + "import torch"], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 1


def test_records_are_rendered_and_packed_without_torch(tmp_path):
    out = run(
        """
import chatmill
from chatmill.tokenizer import open_tokenizer
from chatmill.format import load_format
tokenizer = open_tokenizer("bytes", control=load_format("ngpt").tokens)
chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
ids = chatmill.serialize_chat_to_ids(chat, tokenizer=tokenizer, default_system_text="s")
special = {f"{key}_id": id for key, id in tokenizer.special_token_ids().items()}
mask = chatmill.sft_loss_mask_for_ids(ids, **special)
print(chatmill.pack_sft_ids_and_mask(ids, mask, S=10, pad_id=0, **special))
""",
        tmp_path,
    )
    expected = ([256, 115, 259, 257, 113, 259, 258, 97, 259, 0], [False] * 7 + [True, True, False])
    assert out == f"{expected}\n"


CHAT = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
TRUTH = (
    '{"id": 1, "messages": [{"role": "user", "content": "q"}], "objects": [{"desc": "x", "bbox_2d": [1, 2, 3, 4]}]}\n'
)
TREE = (
    '{"message_id": "1", "message_tree_id": "1", "parent_id": null, "text": "q", "role": "prompter"}\n'
    '{"message_id": "2", "message_tree_id": "1", "parent_id": "1", "text": "a", "role": "assistant"}\n'
)
DOLLY = '{"instruction": "q", "context": "", "response": "a", "category": "open_qa"}\n'
RUNS = {
    "check": "check chat.jsonl",
    "render": "render chat.jsonl --json",
    "formats": "formats",
    "tokenizer train": "tokenizer train chat.jsonl --vocab-size 258 -o t.json",
    "tokenizer info": "tokenizer info t.json",
    "certify": "certify --tokenizer t.json --chat-template plain.jinja",
    "recipe snippet": "recipe snippet oasst",
    "recipe check": "recipe check recipe.toml",
    "import axolotl": "import axolotl config.yml -o imported",
    "import llamafactory": "import llamafactory dataset_info.json -o imported2",
    "import trl": "import trl sft.yaml -o imported3",
    "prepare": "prepare chat.jsonl -o d",
    "verify": "verify d",
    "reweigh": "reweigh d -o d2 --train-on all",
    "removed": "removed d",
    "clean": "clean d --dry-run",
    "diff": "diff d d2",
    "order": "order d",
    "show": "show d 0",
    "explain": "explain d 0:0",
    "stats": "stats d",
    "report": "report d",
    "view": "view --help",
    "doctor": "doctor",
    "build-sft-primer": "build-sft-primer --primer-jsonl primer.jsonl",
    "build-sft-oasst1": "build-sft-oasst1 --input tree.jsonl",
    "build-sft-dolly15k": "build-sft-dolly15k --input dolly.jsonl",
    "export transcripts": "export transcripts chat.jsonl -o chat.txt --context-length 64",
    "export parquet": "export parquet d -o table.parquet",
    "audit verify": "audit verify audit.log --dataset d",
    "audit replay": "audit replay audit.log --dataset d --step 0",
    "rollout build": "rollout build rollouts.jsonl truth.jsonl -o targets --add-tokens",
    "rollout answers": "rollout answers truth.jsonl -o answers --add-tokens",
    "rollout keys": "rollout keys",
}
"""Arguments of each command, in an order in which each command finds its inputs."""
NEEDS_TORCH = {
    "train": "train --model_name m",
    "chat": "chat model --prompt q",
    "merge": "merge model -o merged",
    "eval": "eval model d",
    "rows": "rows checkpoints/run --step 1",
    "compare": "compare chat.jsonl t.json --chat-template plain.jinja",
    "rollout train": "rollout train config.json -o run",
}


def command_names():
    for name, command in typer.main.get_command(app_of()).commands.items():
        yield from (f"{name} {below}" for below in command.commands) if hasattr(command, "commands") else (name,)


def test_every_command_runs_without_torch_or_says_what_to_install(tmp_path):
    assert set(command_names()) == {*RUNS, *NEEDS_TORCH}
    for name, text in {
        "chat.jsonl": CHAT,
        "truth.jsonl": TRUTH,
        "rollouts.jsonl": '{"id": "1", "response_token_ids": [123]}\n',
        "primer.jsonl": CHAT,
        "tree.jsonl": TREE,
        "dolly.jsonl": DOLLY,
        "plain.jinja": "{% for message in messages %}{{ message.content }}{% endfor %}",
        "recipe.toml": '[[source]]\ninputs = ["chat.jsonl"]\n',
        "config.json": "{}",
        "config.yml": "{base_model: model, learning_rate: 1, datasets: [{path: chat.jsonl, type: chat_template}]}",
        "dataset_info.json": '{"chat": {"file_name": "chat.jsonl", "formatting": "sharegpt"}}',
        "sft.yaml": "{model_name_or_path: model, dataset_name: chat.jsonl}",
        "model/config.json": '{"model_type": "llama"}',
        # A valid file without tensors: eight bytes with the size of the header, and the header `{}`.
        "model/model.safetensors": "\2\0\0\0\0\0\0\0{}",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    out = run(
        f"""
import contextlib, io, json
from pathlib import Path
from chatmill.cli.main import main
from chatmill.audit import Audit
from chatmill.load.loader import EpisodeLoader
ends = {{}}
for name, line in {RUNS | NEEDS_TORCH!r}.items():
    if name == "audit verify":
        audit = Audit(Path("logs"))
        loader = EpisodeLoader("d", {{"batch_size": 1, "block_size": 8}}, listener=audit)
        loader.get_batch()
        loader.close()
        audit.close()
        audit.path.rename("audit.log")
    sys.argv = ["chatmill", *line.split()]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            ends[name] = [end.code or 0, bool(out.getvalue()), err.getvalue()]
print(json.dumps(ends))
""",
        tmp_path,
    )
    ends = json.loads(out)
    # `certify` fails because the template writes no end of turn, and `doctor` because it needs torch.
    assert {name: ends[name][:2] for name in RUNS} == {
        name: [int(name in ("certify", "doctor")), True] for name in RUNS
    }
    missing = "chatmill: torch is not installed; run pip install 'chatmill[train]'\n"
    assert {name: ends[name] for name in NEEDS_TORCH} == {name: [2, False, missing] for name in NEEDS_TORCH}
