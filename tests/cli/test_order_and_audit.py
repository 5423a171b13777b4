from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from chatmill.audit import Audit
from chatmill.load.loader import EpisodeLoader

DATA = Path(__file__).resolve().parents[2] / "data"
LETTERS = "ABCDEFGHIJKL"
CONFIG = {"batch_size": 4, "block_size": 64, "epoch_seed": 42, "use_loss_mask": True}


@pytest.fixture
def dataset(run):
    assert run("prepare", str(DATA / "conversations.jsonl"), "-o", "ds", "--workers", "1")[0] == 0
    return Path("ds")


@pytest.fixture
def log(dataset):
    audit = Audit("logs/audit", every=4)
    loader = EpisodeLoader(dataset, CONFIG, listener=audit)
    for step in range(1, 13):
        loader.get_batch()
        if step == 8:
            Path("checkpoint").mkdir()
            state = {"loader": loader.state_dict(), "audit": audit.checkpoint()}
            Path("checkpoint/state.json").write_text(json.dumps(state))
    audit.close()
    assert audit.path is not None
    return audit.path


def test_order_prints_the_first_episodes_and_finds_one(run, dataset):
    count = EpisodeLoader(dataset, CONFIG).plan("train").num_episodes
    expected = np.random.RandomState(42 + 3).permutation(count).tolist()
    code, out, err = run("order", "ds", "--seed", "42", "--epoch", "3", "--first", "5")
    assert (code, err) == (0, "")
    assert out == f"epoch/1, seed 42, epoch 3: {count} episodes in train\n{' '.join(map(str, expected[:5]))}\n"
    code, out, _ = run("order", "ds", "--seed", "42", "--epoch", "3", "--find", str(expected[7]), "--json")
    assert code == 0 and json.loads(out) == {
        "order": "epoch/1",
        "seed": 42,
        "epoch": 3,
        "split": "train",
        "num_episodes": count,
        "num_skipped": 0,
        "episode": expected[7],
        "position": 7,
    }


def test_order_counts_only_episodes_that_are_long_enough(run, dataset):
    lengths = EpisodeLoader(dataset, CONFIG).sources[0].episodes("train").lengths
    long = np.flatnonzero(lengths >= 120)
    Path("config.json").write_text(json.dumps({"episode_min_tokens": 120, "epoch_seed": 7}))
    code, out, _ = run("order", "ds", "--config", "config.json", "--first", "1000000", "--json")
    found = json.loads(out)
    assert code == 0 and found["episodes"] == long[np.random.RandomState(7).permutation(len(long))].tolist()
    assert (found["num_episodes"], found["num_skipped"]) == (len(long), len(lengths) - len(long))
    last = found["episodes"][-1]
    assert f"is at position {len(long) - 1}\n" in run("order", "ds", "--config", "config.json", "--find", str(last))[1]
    short = str(np.flatnonzero(lengths < 120)[0])
    code, _, err = run("order", "ds", "--config", "config.json", "--find", short)
    reason = "because it has fewer than 120 tokens (episode_min_tokens)"
    assert code == 2 and f"episode {short} is not in any epoch, {reason}" in err


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--mode", "shuffled"], 'batch_sampling_mode is "shuffled"'),
        (["--seed", "-1"], "epoch_seed is -1"),
        (["--find", "100000"], "no episode 100000 in train; expected 0 to "),
        (["--mode", "random", "--find", "1"], "samples with replacement"),
        (["--mode", "random", "--epoch", "1"], 'the order "random" has no epochs'),
        (["--split", "test"], "has no split test"),
    ],
)
def test_invalid_arguments_of_order_are_reported_in_one_line(run, dataset, args, line):
    code, out, err = run("order", "ds", *args)
    assert code in (1, 2) and out == ""
    assert line in err and len(err.splitlines()) == 1


def test_verify_prints_ok_and_the_unanchored_lines(run, log):
    code, out, err = run("audit", "verify", str(log), "--dataset", "ds", "--checkpoint", "checkpoint")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"OK: {log}, 6 lines; recomputed the rows of 12 steps",
        "not covered by a checkpoint or --head: 1 line at the end of the log",
    ]
    code, out, _ = run("audit", "verify", str(log))
    assert code == 0 and out.splitlines()[1].startswith("no --checkpoint or --head was given")
    head = json.loads(Path("checkpoint/state.json").read_text())["audit"]["head"]
    code, out, _ = run("audit", "verify", str(log), "--head", head, "--json")
    assert json.loads(out) == {
        "ok": True,
        "fault": None,
        "lines": 6,
        "steps": 12,
        "abandoned": 0,
        "torn": [],
        "unanchored": 1,
    }


def test_verify_names_the_first_line_that_differs(run, log):
    log.write_text(log.read_text().replace("seed=42 | first", "seed=43 | first"))
    code, out, _ = run("audit", "verify", str(log), "--dataset", "ds")
    assert (code, out) == (1, f"{log}:2: epoch_start has seed 43; expected 42\n")
    code, out, _ = run("audit", "verify", str(log), "--dataset", "ds", "--json")
    assert code == 1 and json.loads(out)["ok"] is False


def test_verify_detects_a_truncated_log_with_its_checkpoint(run, log):
    log.write_bytes(b"\n".join(log.read_bytes().split(b"\n")[:3]) + b"\n")
    code, out, _ = run("audit", "verify", str(log), "--dataset", "ds", "--checkpoint", "checkpoint/state.json")
    assert code == 1
    assert "that checkpoint/state.json records; lines were changed or removed" in out
    other = log.rename(log.with_name("audit_other.log"))
    code, _, err = run("audit", "verify", str(other), "--checkpoint", "checkpoint")
    assert code == 1 and err == (
        "chatmill: checkpoint: does not mention audit_other.log; expected a checkpoint of the run that wrote this log\n"
    )


def test_replay_shows_rows_with_text_ids_and_mask(run, log, dataset):
    loader = EpisodeLoader(dataset, CONFIG, tensors=False)
    batches = [loader.get_batch() for _ in range(6)]
    code, out, err = run("audit", "replay", str(log), "--step", "5", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "") and (found["step"], found["epoch"], found["line"]) == (5, 0, 4)
    for number, row in enumerate(found["rows"]):
        batch = batches[5]
        assert row["episodes"] == [batch.episode_ids[number][0]]
        kept = int((batch.segments[number] == 0).sum())
        assert row["ids"][:kept] == batch.x[number][:kept].tolist()
        assert row["mask"][1:] == batch.loss_mask[number].astype(int).tolist()[: len(row["mask"]) - 1]
        assert row["origins"][0].rpartition(":")[2].isdigit()
    code, out, _ = run("audit", "replay", str(log), "--step", "5")
    lines = out.splitlines()
    assert lines[0] == f"step 5, epoch 0: 4 rows, which match the digest in {log}:4"
    assert sum(line.startswith("row ") for line in lines) == 4
    assert any(line.startswith("  * ") and "<|im_end|>" in line for line in lines)


@pytest.mark.parametrize(("block_size", "most"), [(200, 6), (100, 4)])
def test_replay_names_the_line_of_each_conversation_of_a_packed_row(run, block_size, most):
    """If a packed row is longer than `block_size`, it is truncated at its start and loses its first conversations."""
    said = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": 9 * c}]} for c in LETTERS]
    Path("chat.jsonl").write_text("".join(json.dumps(each) + "\n" for each in said))
    assert run("prepare", "chat.jsonl", "-o", "packed", "--pack", "200", "--workers", "1")[0] == 0
    audit = Audit("logs", every=2)
    loader = EpisodeLoader("packed", {**CONFIG, "batch_size": 1, "block_size": block_size}, listener=audit)
    for _ in range(2):
        loader.get_batch()
    audit.close()
    code, out, _ = run("audit", "replay", str(audit.path), "--step", "1", "--json")
    (row,) = json.loads(out)["rows"]
    shown = [
        {chr(id) for id, of in zip(row["ids"], row["segments"], strict=True) if of == each and 65 <= id <= 90}
        for each in range(len(row["episodes"]))
    ]
    assert code == 0 and len(shown) == most
    assert row["origins"] == [f"chat.jsonl:{LETTERS.index(letter) + 1}" for (letter,) in shown]


def test_replay_shows_ids_if_the_tokenizer_is_unknown(run, dataset):
    """The dataset has no metadata, as if another program had written it."""
    for name in ("dataset_metadata.json", "tokenizer_state.json", "spans.bin", "origins.bin"):
        for extra in Path("ds").rglob(name):
            extra.unlink()
    audit = Audit("logs", every=2)
    loader = EpisodeLoader("ds", {**CONFIG, "pad_token_id": 0}, listener=audit)
    for _ in range(2):
        loader.get_batch()
    audit.close()
    code, out, _ = run("audit", "replay", str(audit.path), "--step", "1")
    assert code == 0
    assert out.splitlines()[-1] == "the tokenizer is unknown, so token ids are shown; pass --tokenizer to show text"
    assert run("audit", "verify", str(audit.path))[0] == 0


def test_a_missing_step_is_reported_in_one_line(run, log):
    code, out, err = run("audit", "replay", str(log), "--step", "12")
    assert (code, out, err) == (2, "", f"chatmill: {log}: does not contain step 12; expected a step below 12\n")
    code, _, err = run("audit", "verify", "none.log", "--dataset", "ds")
    assert code == 1 and err.startswith("chatmill: none.log: cannot be read (No such file or directory)")
