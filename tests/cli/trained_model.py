from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

from chatmill.cli.main import main

ESCAPE = "\x1b[31mred\u202e"
TALKS = {
    "words": [("a?", "alpha"), ("b?", "beta"), ("c?", ESCAPE)],
    "sums": [("1+1", "2"), ("2+2", "4")],
}
CONFIG = {
    "batch_size": 5,
    "block_size": 64,
    "use_loss_mask": True,
    "n_layer": 1,
    "n_embd": 48,
    "n_head": 2,
    "n_ffn": 64,
    "max_positions": 64,
    "qk_norm": True,
    "learning_rate": 0.02,
    "warmup_iters": 3,
    "max_iters": 60,
    "eval_interval": 0,
    "log_rows": True,
    "device": "cpu",
    "audit_dir": None,
    "compile": False,
}
PRIMER = ("--format", "primer")


def chatmill(*args: str) -> None:
    said, argv, code = io.StringIO(), sys.argv, None
    sys.argv = ["chatmill", *args]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv = argv
    assert not code, said.getvalue()


def train_small(folder: Path) -> None:
    """Write words.jsonl, sums.jsonl, data/tokenizer.json, data/v1 and checkpoints/small to the current folder."""
    for name, talks in TALKS.items():
        lines = [
            {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
            for ask, answer in talks
        ]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chatmill(
        "tokenizer", "train", "words.jsonl", "sums.jsonl", "--vocab-size", "260", "-o", "data/tokenizer.json", *PRIMER
    )
    chatmill("prepare", "words.jsonl", "sums.jsonl", "-o", "data/v1", *PRIMER, "--tokenizer", "data/tokenizer.json")
    Path("small.json").write_text(json.dumps(CONFIG))
    chatmill("train", "--model_name", "small", "--config_file", "small.json", "--dataset_dir", "data/v1")
