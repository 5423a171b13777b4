"""Run prepare, train, eval and chat in sequence, with a 24-layer model and early stopping."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from chatmill.train.run_dir import read_metrics

torch.set_num_threads(1)
KEYS = {
    "use_loss_mask": True,
    "n_layer": 24,
    "n_embd": 16,
    "n_head": 2,
    "n_ffn": 16,
    "max_positions": 64,
    "batch_size": 2,
    "block_size": 32,
    "learning_rate": 0.03,
    "warmup_iters": 1,
    "lr_schedule": "constant",
    "weight_decay": 0.0,
    "epochs": 3,
    "eval_interval": 2,
    "save_interval": 5,
    "keep_checkpoints": 1,
    "early_stop_patience": 2,
    "eval_samples": 0,
    "device": "cpu",
}


def talks(count: int, answer: str) -> str:
    messages = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": answer}] for n in range(count)]
    return "".join(json.dumps({"messages": each}) + "\n" for each in messages)


def test_a_run_that_overfits_stops_and_its_best_checkpoint_is_used(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("keys.json").write_text(json.dumps(KEYS))
    # The answers in val differ from those in train, so the model soon overfits.
    Path("train.jsonl").write_text(talks(16, "yes yes"))
    Path("val.jsonl").write_text(talks(2, "no, never"))
    data = ["--shape", "messages", "--val-file", "val.jsonl", "--workers", "1"]
    assert run("prepare", "train.jsonl", "-o", "data", *data)[0] == 0

    train = ["train", "--model_name", "deep", "--config_file", "keys.json", "--dataset_dir", "data", "--json"]
    code, out, err = run(*train)
    result = json.loads(out)
    losses = {line["step"]: line["val_loss"] for line in read_metrics(Path("checkpoints/deep")) if "val_loss" in line}
    steps = sorted(losses)
    best = min(steps, key=losses.__getitem__)
    # 3 epochs of 16 conversations in batches of 2 are 24 steps. The best loss was two evaluations before the last one.
    assert code == 0 and result["total"] == 24
    assert steps[0] < best == steps[-3] < result["step"] == steps[-1] < 24
    assert losses[steps[0]] > losses[best] < min(losses[step] for step in steps[-2:])
    assert result["finished"] and "has not fallen below" in result["stopped_early"]
    assert f"early stopping at step {steps[-1]}: {result['stopped_early']}" in err
    assert (result["best_step"], result["best_val_loss"]) == (best, losses[best])
    assert result["best_checkpoint"] == f"checkpoints/deep/step_{best:08d}"
    kept = sorted(path.name for path in Path("checkpoints/deep").glob("step_*"))
    assert kept == [f"step_{step:08d}" for step in (best, steps[-1])]

    scores = {}
    for name in ("checkpoints/deep/best", "checkpoints/deep"):
        code, out, _ = run("eval", name, "data", "--json", "--max-tokens", "4")
        scores[name] = json.loads(out)["loss"]
        assert code == 0
    assert abs(scores["checkpoints/deep/best"] - losses[best]) < 1e-4
    assert abs(scores["checkpoints/deep"] - losses[steps[-1]]) < 1e-4
    assert run("chat", "checkpoints/deep/best", "--prompt", "1?", "--max-tokens", "4")[0] == 0

    code, out, err = run(*train, "--resume", "auto")
    assert (code, json.loads(out)["step"]) == (0, steps[-1])
    assert "the run is already finished: it stopped early" in err
    code, out, _ = run(*train, "--resume", "auto", "--early_stop_patience", "3")
    longer = json.loads(out)
    assert (code, longer["step"], longer["best_step"]) == (0, steps[-1] + 2, best)
