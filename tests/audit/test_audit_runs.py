from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import re
import shutil
import threading

import numpy as np
import pytest
from audit_fixtures import SMALL, make_dataset, rechained, run

from chatmill.audit import Audit, AuditError, LogLine, read_log, replay_step, saved_states, verify_log
from chatmill.errors import DataError, UsageError
from chatmill.load import stored_rows
from chatmill.load.digests import blake2b_rows
from chatmill.load.loader import EpisodeLoader
from chatmill.load.read import EpisodeReader
from chatmill.store import files
from chatmill.store.layout import STORED_SPAN


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "chat", train=50)


@pytest.fixture(scope="module")
def documented(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "chat", train=504, val=56)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_dataset(folder / "a", train=20, seed=1)
    make_dataset(folder / "b", train=33, seed=2)
    return folder


def head_of(state):
    return {"the checkpoint": state["audit"]["head"]}


def actions(log):
    return [line.action for line in read_log(log) if isinstance(line, LogLine)]


def test_the_documented_example_reproduces_its_lines(documented, tmp_path):
    audit, _ = run(documented, tmp_path / "logs" / "audit", 127, config={"epoch_shuffle": True})
    load, start = (line.raw.decode().split(" | ", 3) for line in read_log(audit.path)[:2])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", load[0])
    assert load[1:3] == start[1:3] == ["TRAINING", "INFO"]
    assert load[3].startswith(
        "action=dataset_load | epoch_seed=42 | epoch_shuffle=true | num_train_episodes=504 | num_val_episodes=56 | "
        "num_episodes=504 | "
    )
    assert start[3].startswith(
        'action=epoch_start | epoch=0 | seed=42 | first_episode_ids="[173, 274, 489, 72, 305, 76, 475, 140, 469, 498]"'
        " | num_episodes=504 | "
    )
    complete = next(line for line in read_log(audit.path) if line.action == "epoch_complete")
    assert complete.fields == {"epoch": "0", "seed_used": "42", "episodes_seen": "504", "step": "126"}
    assert audit.path.match("logs/audit/audit_*.log")


def test_the_documented_reconstruction_is_the_loaders_order(documented):
    loader = EpisodeLoader(documented, SMALL, tensors=False)
    for epoch in range(2):
        seen = [loader.get_batch().episode_ids[:, 0] for _ in range(126)]
        np.testing.assert_array_equal(np.concatenate(seen), np.random.RandomState(42 + epoch).permutation(504))


def test_dropped_episodes_are_listed_and_the_others_counted(dataset, tmp_path):
    audit, _ = run(dataset, tmp_path, 13, config={"batch_size": 8})
    order = np.random.RandomState(42).permutation(50)
    lines = {line.action: line.fields for line in reversed(read_log(audit.path))}
    assert lines["drop_last"] == {"epoch": "0", "num_episodes": "2", "episode_ids": str(order[48:].tolist())}
    assert lines["epoch_complete"]["episodes_seen"] == "48"


CONFIGS = {
    "epoch": {},
    "stored order": {"epoch_shuffle": False},
    "feistel": {"batch_sampling_mode": "feistel"},
    "random": {"batch_sampling_mode": "random"},
    "last batch kept": {"batch_size": 8, "epoch_drop_last": False},
    "last batch dropped": {"batch_size": 8},
    "packed": {"packing": "bins", "block_size": 120},
    "short episodes skipped": {"episode_min_tokens": 40},
    "all trained": {"use_loss_mask": False},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_an_unchanged_log_verifies(dataset, tmp_path, name):
    audit, states = run(dataset, tmp_path, 31, checkpoints=(10, 31), config=CONFIGS[name], close=False)
    checked = verify_log(audit.path, dataset, heads=head_of(states[31]))
    assert (checked.fault, checked.steps, checked.abandoned, checked.torn, checked.unanchored) == (None, 31, 0, [], 0)


@pytest.mark.parametrize(
    ("mix_by", "packing"),
    [("rows", "none"), ("tokens", "none"), ("trained_tokens", "none"), ("trained_tokens", "bins")],
)
def test_a_mixed_run_logs_what_every_source_contributed(root, tmp_path, mix_by, packing):
    config = {"mix_sft": {"b": 0.75, "a": 0.25}, "mix_by": mix_by, "packing": packing, "block_size": 120}
    audit, states = run(root, tmp_path, 40, checkpoints=(20, 40), config=config)
    assert verify_log(audit.path, root, heads=head_of(states[40])).fault is None
    lines = read_log(audit.path)
    given = [json.loads(line.fields["given"]) for line in lines if line.action == "steps"]
    mixes = [line.fields for line in lines if line.action == "mix"]
    total = {name: sum(each[name] for each in given) for name in "ba"}
    assert mixes[-1]["mix_by"] == mix_by and json.loads(mixes[-1]["requested"]) == {"b": 0.75, "a": 0.25}
    realised = json.loads(mixes[-1]["realised"])
    assert realised == {name: round(total[name] / sum(total.values()), 6) for name in "ba"}
    assert realised["b"] == pytest.approx(0.75, abs=0.03 if packing == "none" else 0.06)
    assert total == counted(root, config, 40)


def counted(root, config, steps):
    loader = EpisodeLoader(root, {**SMALL, **config}, tensors=False)
    stored = {
        source.name: [source.episodes("train").rows([n]) for n in range(len(source.episodes("train")))]
        for source in loader.sources
    }
    episodes = [(name, rows) for name, found in stored.items() for rows in found]
    total = dict.fromkeys(stored, 0)
    for _ in range(steps):
        batch = loader.get_batch()
        for number in batch.episode_ids[batch.episode_ids >= 0].tolist():
            name, rows = episodes[number]
            kept = min(len(rows.ids), config["block_size"] + 1)
            trained = rows.mask()[len(rows.ids) - kept :][1:].sum()
            total[name] += {"rows": 1, "tokens": kept, "trained_tokens": int(trained)}[config["mix_by"]]
    return total


def test_evaluation_is_not_in_the_log(dataset, tmp_path):
    audit = Audit(tmp_path, every=2)
    loader = EpisodeLoader(dataset, SMALL, listener=audit)
    for _ in range(4):
        loader.get_batch()
        loader.get_batch("val")
    list(loader.one_pass("val"))
    audit.close()
    assert actions(audit.path) == ["dataset_load", "epoch_start", "steps", "steps"]
    assert verify_log(audit.path, dataset).steps == 4


def test_a_log_of_an_earlier_version_verifies_and_is_continued(dataset, tmp_path):
    """Earlier versions wrote no row_digest to the dataset_load line and hashed all bytes of a row."""
    audit, states = run(dataset, tmp_path, 20, checkpoints=(20,), every=6)
    loader = EpisodeLoader(dataset, SMALL, tensors=False)
    lines = audit.path.read_bytes().replace(b" | row_digest=sha256", b"").split(b"\n")[:-1]
    for number, line in enumerate(read_log(audit.path)):
        if line.action == "steps":
            steps = range(int(line.fields["first_step"]), int(line.fields["stop_step"]))
            rows = [blake2b_rows(loader.get_batch(), [step], 0).sum(axis=0, dtype=np.uint64) for step in steps]
            digest = np.sum(rows, axis=0, dtype=np.uint64).astype("<u8").tobytes().hex()
            lines[number] = lines[number].replace(line.fields["digest"].encode(), digest.encode())
    audit.path.write_bytes(b"".join(line + b"\n" for line in rechained(lines, 0)))
    head = hashlib.sha256(audit.path.read_bytes().split(b"\n")[-2]).hexdigest()
    assert verify_log(audit.path, dataset, heads={"the checkpoint": head}).steps == 20
    assert replay_step(audit.path, 7, dataset).step.at.step == 7
    states[20]["audit"]["head"] = head
    audit, _ = run(dataset, tmp_path, 30, every=6, saved=states[20])
    checked = verify_log(audit.path, dataset)
    assert (checked.fault, checked.steps) == (None, 30)
    # Without row_digest in the log, verification computes digests of the old kind.
    audit.path.write_bytes(b"".join(line + b"\n" for line in rechained(
        audit.path.read_bytes().replace(b" | row_digest=sha256", b"").split(b"\n")[:-1], 0
    )))  # fmt: skip
    assert ": steps has digest " in verify_log(audit.path, dataset).fault


# Ranks.


@pytest.mark.parametrize("shared", [False, True])
def test_digests_cover_all_ranks_if_they_can_be_reduced(dataset, tmp_path, shared):
    lane = threading.Barrier(2)
    slots: list[np.ndarray] = [np.zeros(0)] * 2

    def reduce_on(rank):
        def reduce(values):
            slots[rank] = values
            lane.wait()
            total = slots[0] + slots[1]
            lane.wait()
            return total

        return reduce

    audits = [Audit(tmp_path, every=3, reduce=reduce_on(rank) if shared else None) for rank in range(2)]

    def train(rank):
        loader = EpisodeLoader(dataset, SMALL, rank=rank, world_size=2, listener=audits[rank])
        for _ in range(20):
            loader.get_batch()
        audits[rank].checkpoint()
        audits[rank].close()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert audits[1].path is None and len(list(tmp_path.iterdir())) == 1
    fields = read_log(audits[0].path)[0].fields
    assert (fields["world_size"], fields["ranks"]) == ("2", "all" if shared else "0")
    assert verify_log(audits[0].path, dataset).steps == 20
    alone, _ = run(dataset, tmp_path / "alone", 20, every=3, checkpoints=(20,))
    digests = [
        [line.fields["digest"] for line in read_log(log) if line.action == "steps"]
        for log in (audits[0].path, alone.path)
    ]
    assert (digests[0] == digests[1]) == shared


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
    """In every second case, all later hashes are recomputed, so that the hash chain is valid."""
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
            # Recomputing the hashes can undo the change.
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
    """The head of the checkpoint is not passed to `verify_log`."""
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


# Resuming.


def test_a_resumed_run_records_the_head_and_abandons_later_lines(dataset, tmp_path):
    audit, states = run(dataset, tmp_path, 18, checkpoints=(8,), every=2)
    before = audit.path.read_bytes()
    audit, later = run(dataset, tmp_path, 24, checkpoints=(24,), every=2, saved=states[8])
    assert audit.path.read_bytes().startswith(before)
    assert len(list(tmp_path.iterdir())) == 1
    lines = read_log(audit.path)
    at = [line.action for line in lines].index("resume")
    left = at - [line.sha256 for line in lines].index(states[8]["audit"]["head"]) - 1
    assert lines[at].fields == {
        "head": states[8]["audit"]["head"], "abandoned": str(left),
        **{name: str(value) for name, value in states[8]["loader"]["cursors"]["train"].items()},
    }  # fmt: skip
    assert lines[at + 1].action == "dataset_load"
    checked = verify_log(audit.path, dataset, heads=head_of(later[24]))
    assert (checked.fault, checked.abandoned, checked.unanchored) == (None, left, 0)


def test_source_contributions_are_summed_across_a_resume(root, tmp_path):
    config = {"mix_sft": {"b": 0.75, "a": 0.25}, "mix_by": "tokens"}
    _, states = run(root, tmp_path, 20, checkpoints=(15,), config=config)
    audit, later = run(root, tmp_path, 30, checkpoints=(30,), config=config, saved=states[15])
    assert verify_log(audit.path, root, heads=head_of(later[30])).fault is None
    assert later[30]["audit"]["given"] == counted(root, {**config, "block_size": 48}, 30)


def test_a_torn_line_is_reported_and_the_log_is_continued(dataset, tmp_path):
    audit, states = run(dataset, tmp_path, 15, checkpoints=(8,), every=2)
    audit.path.write_bytes(audit.path.read_bytes()[:-30])
    last = len(read_log(audit.path))
    checked = verify_log(audit.path, dataset, heads=head_of(states[8]))
    assert (checked.fault, checked.torn) == (None, [last])
    audit, later = run(dataset, tmp_path, 24, checkpoints=(24,), every=2, saved=states[8])
    checked = verify_log(audit.path, dataset, heads=head_of(later[24]))
    assert (checked.fault, checked.torn, checked.unanchored) == (None, [last], 0)
    lines = audit.path.read_bytes().split(b"\n")
    lines[last - 1] = lines[last - 1][:-1]
    audit.path.write_bytes(b"\n".join(lines))
    assert f":{last + 1}: resume has torn_bytes" in verify_log(audit.path, dataset).fault
    lines.insert(3, b"garbage")
    audit.path.write_bytes(b"\n".join(lines))
    assert ":4: is not an audit log line" in verify_log(audit.path, dataset).fault


def test_a_run_with_another_world_size_continues_the_same_log(dataset, tmp_path):
    _, states = run(dataset, tmp_path, 9, checkpoints=(9,), every=2)
    audit, later = run(dataset, tmp_path, 20, checkpoints=(20,), every=2, saved=states[9], world_size=2)
    assert verify_log(audit.path, dataset, heads=head_of(later[20])).fault is None


def test_a_loader_at_another_step_than_its_log_is_refused(dataset, tmp_path):
    _, states = run(dataset, tmp_path, 9, checkpoints=(9,))
    loader = EpisodeLoader(dataset, SMALL, listener=Audit(tmp_path))
    loader.load_state_dict(states[9]["loader"])
    with pytest.raises(AuditError, match="the loader is at step 9, but its audit log is at step 0; pass Audit"):
        loader.get_batch()


@pytest.mark.parametrize("state", [{}, {"log": "../x", "head": "", "cursor": {}, "given": {}}, [], "no"])
def test_a_damaged_audit_state_is_one_error_line(tmp_path, state):
    with pytest.raises(AuditError, match="the audit state is damaged"):
        Audit(tmp_path, state=state)


def test_a_failed_write_stops_the_run_before_the_batch_is_returned(dataset, tmp_path, monkeypatch):
    audit = Audit(tmp_path, every=2)
    loader = EpisodeLoader(dataset, SMALL, listener=audit)
    loader.get_batch()

    def full(self, fd, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.Disk, "write", full)
    for _ in range(2):
        with pytest.raises(AuditError):
            loader.get_batch()
        assert loader.cursor().step == 1


# Replay.


def test_a_replayed_step_equals_the_batch_that_was_returned(dataset, tmp_path):
    config = {"packing": "bins", "block_size": 120}
    audit, states = run(dataset, tmp_path, 8, checkpoints=(5,), config=config, every=3)
    audit, _ = run(dataset, tmp_path, 12, config=config, every=3, saved=states[5])
    loader = EpisodeLoader(dataset, {**SMALL, **config}, tensors=False)
    for step in range(12):
        delivered, replayed = loader.get_batch(), replay_step(audit.path, step)
        assert replayed.step.at.step == step
        assert (replayed.line > actions(audit.path).index("resume")) == (step >= 5)
        for mine, theirs in zip(delivered, replayed.batch, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_a_failed_replay_is_one_error_line(dataset, tmp_path):
    audit, _ = run(dataset, tmp_path / "logs", 12)
    with pytest.raises(UsageError, match="does not contain step 12; expected a step below 12"):
        replay_step(audit.path, 12)
    other = make_dataset(tmp_path / "other", train=50, seed=3)
    with pytest.raises(DataError, match=":3: dataset_load has dataset_sha256"):
        replay_step(audit.path, 0, other)
    with pytest.raises(DataError, match="cannot be read"):
        replay_step(tmp_path / "none.log", 0)


def test_a_missing_or_empty_log_is_one_error_line(dataset, tmp_path):
    with pytest.raises(DataError, match=r"none\.log: cannot be read"):
        verify_log(tmp_path / "none.log", dataset)
    (tmp_path / "empty.log").write_bytes(b"")
    assert (
        verify_log(tmp_path / "empty.log", dataset).fault
        == f"{tmp_path / 'empty.log'}: the file is empty; expected an audit log"
    )


def edited(state, *place, value):
    copied = json.loads(json.dumps(state))
    *outer, last = place
    inner = copied
    for name in outer:
        inner = inner[name]
    inner[last] = value
    return copied


@pytest.fixture(scope="module")
def checkpointed(dataset, tmp_path_factory):
    audit, states = run(dataset, tmp_path_factory.mktemp("logs"), 20, checkpoints=(15,))
    return audit.path, states[15]


CURSOR = ("step", "epoch", "window", "row")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((("audit", "cursor", name), 9999) for name in CURSOR),
        *((("loader", "cursors", "train", name), 9999) for name in CURSOR),
        (("audit", "cursor", "step"), "15"),
        (("audit", "cursor", "step"), 15.0),
        (("audit", "cursor"), None),
        (("audit", "given"), {"a": 3}),
        (("audit", "given"), None),
        (("audit", "more"), 1),
        (("loader", "cursors"), {}),
        (("loader", "cursors"), []),
        (("loader", "dataset_sha256"), "0" * 64),
        (("loader", "config_sha256"), "0" * 64),
        (("loader", "config", "epoch_seed"), 7),
        (("loader", "config"), None),
        (("loader",), 3),
    ],
)
def test_an_edited_state_is_refused(dataset, checkpointed, tmp_path, place, value):
    log, state = checkpointed
    file = tmp_path / "state.json"
    file.write_text(json.dumps(state))
    assert verify_log(log, dataset, states=saved_states(file, log)).fault is None
    file.write_text(json.dumps(edited(state, *place, value=value)))
    fault = verify_log(log, dataset, states=saved_states(file, log)).fault
    assert fault is not None and fault.startswith(f"{file}: ") and fault.endswith("; the checkpoint was changed")
    assert "\n" not in fault


@pytest.mark.parametrize("name", ["row", "step", "epoch", "window"])
def test_a_run_does_not_resume_from_an_edited_cursor(dataset, checkpointed, tmp_path, name):
    log, state = checkpointed
    folder = tmp_path / "logs"
    folder.mkdir()
    shutil.copy(log, folder)
    value = state["audit"]["cursor"][name] + 1
    lie = edited(edited(state, "audit", "cursor", name, value=value), "loader", "cursors", "train", name, value=value)
    with pytest.raises(AuditError, match=r"the checkpoint: audit.cursor is .*, but the log records .*; .* changed"):
        run(dataset, folder, 20, saved=lie)
    assert (folder / log.name).read_bytes() == log.read_bytes()
    run(dataset, folder, 20, saved=state)


def test_source_contributions_in_a_state_are_compared_across_resumes(root, tmp_path):
    config = {"mix_sft": {"a": 1, "b": 1}}
    _, states = run(root, tmp_path, 20, checkpoints=(8, 16), config=config)
    _, later = run(root, tmp_path, 30, checkpoints=(24,), config=config, saved=states[8])
    (log,) = tmp_path.glob("*.log")
    file = tmp_path / "state.json"
    for state in (states[8], later[24]):
        file.write_text(json.dumps(state))
        assert verify_log(log, root, states=saved_states(file, log)).fault is None
    given = {**later[24]["audit"]["given"], "a": later[24]["audit"]["given"]["a"] + 1}
    file.write_text(json.dumps(edited(later[24], "audit", "given", value=given)))
    assert "audit.given is" in verify_log(log, root, states=saved_states(file, log)).fault
    with pytest.raises(AuditError, match=r"audit\.given is"):
        run(root, tmp_path, 30, config=config, saved=edited(later[24], "audit", "given", value=given))


def test_a_log_or_state_that_is_a_fifo_is_one_error_line(dataset, checkpointed, tmp_path):
    log, state = checkpointed
    os.mkfifo(tmp_path / log.name)
    with pytest.raises(DataError, match="it is a FIFO"):
        verify_log(tmp_path / log.name, dataset)
    with pytest.raises(AuditError, match="it is a FIFO"):
        run(dataset, tmp_path, 20, saved=state)
    with pytest.raises(DataError, match="it is a FIFO"):
        saved_states(tmp_path / log.name, log)
