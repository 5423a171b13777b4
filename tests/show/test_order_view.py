from __future__ import annotations

import numpy as np
import pytest
from show_fixtures import line, make

from chatmill.audit import Audit
from chatmill.errors import DataError, UsageError
from chatmill.load.config import LoadConfig
from chatmill.load.loader import EpisodeLoader
from chatmill.load.order import make_order
from chatmill.load.plan import Cursor
from chatmill.show.order_view import OrderView, audit_logs, rows_at, timeline

RUN = {"batch_size": 4, "block_size": 48, "epoch_seed": 42, "use_loss_mask": True}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    rng = np.random.default_rng(2)
    lines = [line(f"q{n}", "a" * int(rng.integers(1, 40))) for n in range(50)]
    return make(tmp_path_factory.mktemp("order"), lines)


def test_a_page_of_the_order_is_the_order(shown):
    right = make_order("epoch", 50, seed=42).block(3, 0, 50).tolist()
    order = OrderView(shown.path, LoadConfig(**RUN))
    page = order.page("train", seed=42, epoch=3, start=10, limit=20)
    assert page == {
        "order": "epoch/1",
        "seed": 42,
        "epoch": 3,
        "length": 50,
        "start": 10,
        "episodes": right[10:30],
    }
    assert order.page("train", seed=42, epoch=3, start=40, limit=20)["episodes"] == right[40:]


def test_the_position_and_neighbours_of_an_episode(shown):
    right = make_order("epoch", 50, seed=7).block(1, 0, 50).tolist()
    order = OrderView(shown.path, LoadConfig())
    for position in (0, 1, 25, 49):
        where = order.find("train", right[position], seed=7, epoch=1)
        assert (where["position"], where["row"], where["shares_row_with"]) == (position, position, [])
        assert where["before"] == right[max(0, position - 3) : position]
        assert where["after"] == right[position + 1 : position + 4]


def test_packed_neighbours_equal_those_in_the_batch(shown):
    config = LoadConfig(**RUN, packing="bins")
    order = OrderView(shown.path, config)
    rows = []
    for step in order.plan("train", 42).steps(Cursor(epoch=2)):
        rows += [step.episodes[a:b].tolist() for a, b in zip(step.first[:-1], step.first[1:], strict=True)]
        if step.ends_epoch:
            break
    assert sorted(episode for row in rows for episode in row) == list(range(50))
    assert max(map(len, rows)) > 1
    for number, row in enumerate(rows):
        for episode in row:
            where = order.find("train", episode, seed=42, epoch=2)
            assert (where["row"], where["shares_row_with"]) == (number, [each for each in row if each != episode])


def test_an_episode_that_is_too_short_is_in_no_epoch(shown):
    order = OrderView(shown.path, LoadConfig(episode_min_tokens=20))
    short = [n for n in range(50) if len(shown.row("train", n).ids) < 20]
    assert short
    with pytest.raises(UsageError, match="is not in any epoch"):
        order.find("train", short[0], seed=1, epoch=0)
    kept = [n for n in range(50) if n not in short]
    right = [kept[at] for at in make_order("epoch", len(kept), seed=1).block(0, 0, len(kept)).tolist()]
    assert order.page("train", seed=1, epoch=0, start=0, limit=50)["episodes"] == right
    assert order.find("train", right[5], seed=1, epoch=0)["position"] == 5


@pytest.fixture(scope="module")
def logged(shown, tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    audit = Audit(folder, every=4)
    loader = EpisodeLoader(shown.path, RUN, listener=audit)
    batches = []
    for step in range(9):
        batches.append(loader.get_batch())
        if step == 5:
            saved = audit.checkpoint(), loader.state_dict()
    loader.close()
    audit.close()
    audit = Audit(folder, every=4, state=saved[0])
    loader = EpisodeLoader(shown.path, RUN, listener=audit)
    loader.load_state_dict(saved[1])
    del batches[6:]
    batches += [loader.get_batch() for _ in range(9)]
    loader.close()
    audit.close()
    return audit_logs([folder])[0], batches


def test_the_rows_of_a_step_equal_those_of_its_batch(shown, logged):
    log, batches = logged
    for step, batch in enumerate(batches):
        logged_step = rows_at(log, step, shown.path)
        assert logged_step["rows"] == [
            [each for each in row if each >= 0] for row in np.asarray(batch.episode_ids).tolist()
        ]
        assert (logged_step["step"], logged_step["split"]) == (step, "train")


def test_a_step_that_was_not_logged_and_another_dataset_are_refused(shown, logged, tmp_path):
    log, _ = logged
    with pytest.raises(UsageError, match="does not contain step 15; expected a step below 15"):
        rows_at(log, 15, shown.path)
    other = make(tmp_path, [line("x", "y") for _ in range(50)])
    with pytest.raises(DataError, match="dataset"):
        rows_at(log, 3, other.path)


def test_the_timeline_has_every_line_and_marks_abandoned_ones(logged):
    lines = timeline(logged[0])
    assert [each["action"] for each in lines[:4]] == ["dataset_load", "epoch_start", "steps", "steps"]
    assert [each["number"] for each in lines] == list(range(1, len(lines) + 1))
    resumed = next(each for each in lines if each["action"] == "resume")
    left = [each for each in lines if each["abandoned"]]
    assert [each["action"] for each in left] == ["steps"]
    assert all(each["number"] < resumed["number"] for each in left)


def test_a_truncated_line_is_shown_as_truncated(logged, tmp_path):
    torn = tmp_path / "torn.log"
    torn.write_bytes(logged[0].read_bytes()[:-20] + b"\x1b[2J\xff")
    last = timeline(torn)[-1]
    assert (last["action"], last["fields"]["why"]) == ("torn", "is truncated")


def test_a_file_that_is_not_a_log_is_a_usage_error(tmp_path):
    for place in (tmp_path, tmp_path / "none.log"):
        with pytest.raises(UsageError, match="is not an audit log"):
            audit_logs([place])
