from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import threading

import numpy as np
import pytest
from audit_fixtures import SMALL, actions, counted, head_of, make_dataset, rechained, run

from chatmill.audit import Audit, AuditError, read_log, replay_step, verify_log
from chatmill.errors import DataError, UsageError
from chatmill.load.digests import blake2b_rows
from chatmill.load.loader import EpisodeLoader
from chatmill.store import files


@pytest.fixture(scope="module")
def documented(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "chat", train=504, val=56)


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
    # If the log has no row_digest, verification computes the digests as earlier versions did.
    audit.path.write_bytes(b"".join(line + b"\n" for line in rechained(
        audit.path.read_bytes().replace(b" | row_digest=sha256", b"").split(b"\n")[:-1], 0
    )))  # fmt: skip
    assert ": steps has digest " in verify_log(audit.path, dataset).fault


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
