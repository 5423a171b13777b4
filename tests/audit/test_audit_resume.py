from __future__ import annotations

import json
import os
import shutil

import pytest
from audit_fixtures import SMALL, counted, head_of, run

from chatmill.audit import Audit, AuditError, read_log, saved_states, verify_log
from chatmill.errors import DataError
from chatmill.load.loader import EpisodeLoader


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
