from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command

from chatmill.audit import Audit
from chatmill.cli.app import app_of
from chatmill.load import EpisodeLoader

IDS = [70000, 2, 3, 70001, 5, 6]
COMMANDS = [
    ["verify", "d"],
    ["show", "d", "1", "--decode"],
    ["show", "d"],
    ["explain", "d", "0:1"],
    ["stats", "d"],
    ["report", "d", "-o", "report.html"],
    ["order", "d"],
    ["diff", "d", "d"],
    ["export", "parquet", "d", "-o", "out"],
]


@pytest.fixture
def store(run):
    Path("d/train").mkdir(parents=True)
    np.array(IDS, np.uint32).tofile("d/train/tokens.bin")
    np.array([[2, 2], [0, 2]], np.uint64).tofile("d/train/episodes.idx")
    return run


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command))
def test_a_command_refuses_an_unknown_type_and_accepts_the_flag(store, command):
    code, out, err = store(*command)
    said = (out + err).strip()
    assert code == 1 and "\n" not in said
    assert said.endswith("set token_dtype in the config, or pass --token-dtype")
    code, out, _ = store(*command, "--token-dtype", "uint32", *(["--overwrite"] if "-o" in command else []))
    assert code == 0
    if command == ["show", "d", "1", "--decode"]:
        assert "70000" in out
    assert store(*command, "--token-dtype", "uint8")[0] == 2


def test_verify_reports_how_many_tokens_no_episode_covers(store):
    line = "train: 2 episodes, 6 tokens, 4 trained, 1 shard, 2 tokens in no episode\n"
    assert store("verify", "d", "--full", "--token-dtype", "uint32")[1].endswith(line)
    found = json.loads(store("verify", "d", "--json", "--token-dtype", "uint16")[1])
    counts = {"episodes": 2, "tokens": 12, "trained": 4, "shards": 1, "uncovered": 8, "shared": 0}
    assert (found["ok"], found["splits"]) == (True, {"train": counts})
    np.array([[0, 5], [4, 2]], np.uint64).tofile("d/train/episodes.idx")
    np.zeros(6, np.float32).tofile("d/train/mask_weighted.bin")
    out = store("verify", "d", "--token-dtype", "uint32")[1]
    counts = "1 shard, 0 tokens in no episode, 1 in more than one"
    assert out.endswith(f"{counts}\nfiles not read: train/mask_weighted.bin\n")
    found = json.loads(store("verify", "d", "--json", "--token-dtype", "uint16")[1])
    assert found["unread"] == ["train/mask_weighted.bin"]


def test_an_audit_log_stores_the_type_and_is_verified_with_it(store):
    audit = Audit("logs", every=1)
    settings = {"batch_size": 1, "block_size": 2, "pad_token_id": 0, "token_dtype": "uint32"}
    loader = EpisodeLoader("d", settings, listener=audit)
    loader.get_batch()
    audit.close()
    loader.close()
    assert store("audit", "verify", str(audit.path))[0] == 0
    code, out, _ = store("audit", "replay", str(audit.path), "--step", "0", "--json")
    assert code == 0 and json.loads(out)["rows"][0]["ids"] in ([3, 70001], [70000, 2])


def test_all_commands_that_open_a_dataset_accept_token_dtype():
    """Commands without `--token-dtype` accept only chatmill's own datasets, or read the dtype from an audit log."""
    without = set()
    for name, command in get_command(app_of()).commands.items():  # type: ignore[attr-defined]
        for of, each in getattr(command, "commands", {"": command}).items():
            options = {parameter.name for parameter in each.params}
            takes_a_dataset = options & {"dataset", "dataset_dir"} or {"one", "other"} <= options
            if takes_a_dataset and "token_dtype" not in options:
                without.add(f"{name} {of}".strip())
    assert without == {"audit replay", "audit verify", "clean", "removed", "reweigh"}
