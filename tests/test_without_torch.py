"""Reading, rendering and the commands must work where torch is not installed."""

from __future__ import annotations

import subprocess
import sys

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


def test_every_command_runs_without_torch(tmp_path):
    (tmp_path / "chat.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
    )
    (tmp_path / "truth.jsonl").write_text(
        '{"id": 1, "messages": [{"role": "user", "content": "q"}], '
        '"objects": [{"desc": "x", "bbox_2d": [1, 2, 3, 4]}]}\n'
    )
    (tmp_path / "rollouts.jsonl").write_text('{"id": "1", "response_token_ids": [123]}\n')
    for args in (
        ["check", "chat.jsonl"],
        ["rollout", "build", "rollouts.jsonl", "truth.jsonl", "-o", "targets", "--add-tokens"],
        ["render", "chat.jsonl", "--json"],
        ["tokenizer", "train", "chat.jsonl", "--vocab-size", "258", "-o", "t.json"],
        ["tokenizer", "info", "t.json"],
        ["formats"],
    ):
        out = run(f"sys.argv = ['chatmill', *{args!r}]\nfrom chatmill.cli.main import main\nmain()", tmp_path)
        assert out.strip()
