from __future__ import annotations

import hashlib
import random
import re
import shutil

import numpy as np
import pytest
from audit_fixtures import actions, head_of, make_dataset, rechained, run

from chatmill.audit import read_log, verify_log
from chatmill.load import stored_rows
from chatmill.load.read import EpisodeReader
from chatmill.store.layout import STORED_SPAN


def test_a_reader_that_swaps_two_episodes_is_detected(dataset, tmp_path, monkeypatch):
    """The loader still reports the expected episode ids, so only the digest reveals the swap."""
    real = EpisodeReader.locate

    def swapping(self, episodes):
        swapped = np.where(episodes == 7, 31, np.where(episodes == 31, 7, episodes))
        return real(self, swapped)

    monkeypatch.setattr(EpisodeReader, "locate", swapping)
    audit, states = run(dataset, tmp_path, 12, checkpoints=(12,), every=1)
    monkeypatch.undo()
    fault = verify_log(audit.path, dataset, heads=head_of(states[12])).fault
    order = np.random.RandomState(42).permutation(50)
    step = min(np.flatnonzero(np.isin(order, [7, 31]))) // 4
    assert re.fullmatch(
        rf"{re.escape(str(audit.path))}:{step + 3}: steps has digest [0-9a-f]{{32}}; expected [0-9a-f]{{32}}",
        fault,
    )


def test_a_changed_dataset_is_detected(dataset, tmp_path):
    audit, _ = run(dataset, tmp_path / "logs", 12)
    other = make_dataset(tmp_path / "other", train=50, seed=3)
    assert ":1: dataset_load has dataset_sha256 " in verify_log(audit.path, other).fault
    smaller = make_dataset(tmp_path / "smaller", train=49)
    assert ":1: dataset_load has num_train_episodes 50; expected 49" in verify_log(audit.path, smaller).fault


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_change_of_data_files_under_the_same_metadata_is_detected(dataset, tmp_path, split):
    audit, _ = run(dataset, tmp_path / "logs", 25)
    changed = tmp_path / "changed"
    shutil.copytree(dataset, changed)
    tokens = changed / split / "shard_00000" / "tokens.bin"
    raw = bytearray(tokens.read_bytes())
    raw[-20] ^= 1
    tokens.write_bytes(raw)
    fault = verify_log(audit.path, changed).fault
    # The file hash detects changes in rows that were not used.
    assert re.search(r":\d+: steps has digest " if split == "train" else r"val/shard_00000/tokens\.bin: ", fault)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("change", ["a token", "a label", "a weight"])
def test_training_on_changed_files_is_detected_after_they_are_restored(
    dataset, tmp_path, monkeypatch, change, compiled
):
    changed = tmp_path / "changed"
    shutil.copytree(dataset, changed)
    shard = changed / "train" / "shard_00000"
    path = shard / ("tokens.bin" if change == "a token" else "spans.bin")
    right = path.read_bytes()
    if change == "a token":
        path.write_bytes(right[:-20] + bytes([right[-20] ^ 1]) + right[-19:])
    else:
        spans = np.frombuffer(right, dtype=STORED_SPAN).copy()
        spans["weight"][np.flatnonzero(spans["weight"])[-1]] = 0 if change == "a label" else 0.5
        path.write_bytes(spans.tobytes())
    if not compiled:
        monkeypatch.setattr(stored_rows, "_batch", None)
    audit, _ = run(changed, tmp_path / "logs", 25)
    path.write_bytes(right)
    assert re.search(r":\d+: steps has digest ", verify_log(audit.path, changed).fault)


def test_300_manipulations_are_all_detected(dataset, tmp_path):
    """In every second case, all later hashes are recomputed, so that the hash chain stays valid."""
    config = {"batch_size": 8}
    audit, states = run(dataset, tmp_path, 9, checkpoints=(4,), config=config, every=2)
    audit, states = run(dataset, tmp_path, 15, checkpoints=(9, 15), config=config, every=2, saved=states[4])
    log, heads = audit.path, head_of(states[15])
    lines = log.read_bytes().split(b"\n")[:-1]
    assert set(actions(log)) == {
        "dataset_load", "epoch_start", "steps", "drop_last", "epoch_complete", "checkpoint", "resume"
    }  # fmt: skip
    assert verify_log(log, dataset, heads=heads).fault is None
    rng, found = random.Random(5), {}
    for number in range(300):
        kind = ("change", "field", "insert", "remove", "reorder", "cut")[number // 2 % 6]
        changed = lines
        while changed == lines:
            # Repeat until the lines differ, because recomputing the hashes can undo the change.
            changed, first = tampered(lines, kind, rng)
            changed = rechained(changed, first) if number % 2 else changed
        log.write_bytes(b"".join(line + b"\n" for line in changed))
        checked = verify_log(log, dataset, heads=heads)
        assert checked.fault is not None or (kind == "insert" and checked.unanchored), (kind, number, first)
        found[kind] = found.get(kind, 0) + 1
    assert sum(found.values()) == 300 and len(found) == 6


def tampered(lines, kind, rng):
    at = rng.randrange(len(lines))
    changed = list(lines)
    if kind == "change":
        place = rng.randrange(len(lines[at]))
        byte = bytes([rng.choice([b for b in range(32, 127) if b != lines[at][place]])])
        changed[at] = lines[at][:place] + byte + lines[at][place + 1 :]
    elif kind == "field":
        digits = [m.span() for m in re.finditer(rb"(?<==)\d+(?= \|)", lines[at])] or [(0, 4)]
        start, stop = rng.choice(digits)
        value = int(lines[at][start:stop]) + rng.choice([-1, 1, 7])
        changed[at] = lines[at][:start] + str(max(value, 0) if value else 3).encode() + lines[at][stop:]
    elif kind == "insert":
        changed.insert(at, rng.choice(lines))
    elif kind == "remove":
        del changed[at]
    elif kind == "reorder":
        at = rng.randrange(len(lines) - 1)
        other = rng.randrange(at + 1, len(lines))
        changed[at], changed[other] = lines[other], lines[at]
    else:
        del changed[at:]
    return changed, at


def swap(old, new):
    return lambda line: [re.sub(old, new, line)]


FORGERIES = [
    (
        "dataset_load",
        swap(rb" \| split", rb" | extra=1 | split"),
        ":1: dataset_load has the unexpected field extra",
    ),
    ("dataset_load", swap(rb" \| num_skipped=0", b""), ":1: dataset_load has no num_skipped"),
    (
        "dataset_load",
        swap(rb"digest_steps=5", b"digest_steps=x"),
        ":1: dataset_load has digest_steps x; expected an integer",
    ),
    (
        "dataset_load",
        swap(rb"row_digest=sha256", b"row_digest=nothing"),
        ":1: dataset_load has row_digest nothing; expected sha256",
    ),
    ("dataset_load", swap(rb" \| row_digest=sha256", b""), ":3: steps has digest "),
    (
        "dataset_load",
        swap(rb"world_size=1", b"world_size=1000"),
        ":1: dataset_load has world_size 1000; expected a divisor of batch_size 8",
    ),
    ("dataset_load", swap(rb'config="(?:[^"\\]|\\.)*"', b"config=1"), ":1: config cannot be read"),
    ("dataset_load", lambda line: [], ":1: has action epoch_start; expected dataset_load"),
    ("dataset_load", lambda line: [line, line], ":2: has action dataset_load, which cannot occur here"),
    ("epoch_start", lambda line: [], ":2: covers steps of epoch 0, which has no epoch_start line"),
    ("epoch_start", lambda line: [line, line], ":3: starts epoch 0 in the middle of epoch 0"),
    ("steps", lambda line: [], ":3: covers steps 5 to 6; expected at most 5 steps, starting at 0"),
    ("steps", lambda line: [line, line], ":4: covers steps 0 to 5; expected at most 5 steps, starting at 5"),
    ("steps", swap(rb"stop_step=5", b"stop_step=6"), ":3: covers steps 0 to 6; expected at most 5 steps, starting at"),
    ("steps", swap(rb"stop_step=5", b"stop_step=4"), ":3: steps has digest "),
    ("steps", swap(rb"row=0", b"row=8"), ":3: steps has row 8; expected 0"),
    ("drop_last", lambda line: [], ":5: has action epoch_complete; expected drop_last"),
    ("drop_last", swap(rb'episode_ids="\[', rb'episode_ids="[1, '), ":5: drop_last has episode_ids "),
    ("epoch_complete", lambda line: [], ":6: has action epoch_start; expected epoch_complete"),
    ("epoch_complete", swap(rb"seen=48", b"seen=50"), ":6: epoch_complete has episodes_seen 50; expected 48"),
    ("checkpoint", swap(rb"step=9", b"step=8"), ":9: checkpoint has step 8; expected 9"),
    ("checkpoint", swap(rb"action=checkpoint", b"action=coffee"), ":9: has action coffee, which cannot occur here"),
    ("checkpoint", lambda line: [], ":10: resumes from "),
    ("resume", swap(rb"abandoned=1", b"abandoned=2"), ":11: resume has abandoned 2; expected 1"),
    ("resume", lambda line: [], ":11: has action dataset_load, which cannot occur here"),
]


@pytest.mark.parametrize("number", range(len(FORGERIES)))
def test_a_forged_log_with_a_valid_hash_chain_is_detected(dataset, tmp_path, number):
    """`verify_log` detects the forgery even without the hash that the checkpoint stores."""
    action, forge, said = FORGERIES[number]
    _, states = run(dataset, tmp_path, 11, checkpoints=(9,), config={"batch_size": 8})
    audit, _ = run(dataset, tmp_path, 12, config={"batch_size": 8}, saved=states[9])
    lines = audit.path.read_bytes().split(b"\n")[:-1]
    at = actions(audit.path).index(action)
    forged = rechained([*lines[:at], *forge(lines[at]), *lines[at + 1 :]], at)
    head = states[9]["audit"]["head"].encode()
    for number, line in enumerate(forged):
        if b"action=checkpoint" in line and number < len(forged) - 1:
            head, old = hashlib.sha256(line).hexdigest().encode(), head
            forged = rechained([each.replace(b"head=" + old, b"head=" + head) for each in forged], number + 1)
    audit.path.write_bytes(b"".join(line + b"\n" for line in forged))
    assert f"{audit.path}{said}" in verify_log(audit.path, dataset).fault


def test_bytes_after_the_last_line_are_torn_only_without_a_line_break(dataset, tmp_path):
    audit, _ = run(dataset, tmp_path, 12)
    whole = audit.path.read_bytes()
    count = len(read_log(audit.path))
    audit.path.write_bytes(whole + b"2026")
    assert verify_log(audit.path, dataset).torn == [count + 1]
    audit.path.write_bytes(whole + b"2026\n")
    assert f":{count + 1}: is not an audit log line" in verify_log(audit.path, dataset).fault


def test_truncation_is_detected_up_to_the_last_head_and_later_lines_are_unanchored(dataset, tmp_path):
    audit, states = run(dataset, tmp_path, 20, checkpoints=(10,), every=2)
    raw = audit.path.read_bytes()
    lines = raw.split(b"\n")[:-1]
    at = actions(audit.path).index("checkpoint")
    assert verify_log(audit.path, dataset, heads=head_of(states[10])).unanchored == len(lines) - at - 1
    assert verify_log(audit.path, dataset).unanchored == len(lines)
    for kept in range(len(lines)):
        audit.path.write_bytes(b"".join(line + b"\n" for line in lines[:kept]))
        checked = verify_log(audit.path, dataset, heads=head_of(states[10]))
        assert (checked.fault is None) == (kept > at)
        if 0 < kept <= at:
            assert "that the checkpoint records; lines were changed or removed" in checked.fault
