from __future__ import annotations

import io
import json
import math
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.errors import DataError
from chatmill.train.plot import HEIGHT, MOST, WIDTH, loss_plot
from chatmill.train.progress import TrainProgress
from chatmill.train.run_dir import MetricsLog, read_metrics, rewind


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_moves_in_a_terminal_and_ends_with_a_line():
    screen = Terminal()
    progress = TrainProgress(0, 4, every=1, stream=screen)
    for step in (1, 2, 4):
        progress.step(step, loss=2.0, seconds=0.5, tokens=1000, trained=250)
        progress._shown = 0.0001
    progress.say("step 4: val loss 1.0000")
    progress.close()
    bars = screen.getvalue().split("\r\x1b[K")
    assert bars[1] == ("[======                  ] step 1/4  loss 2.0000  2k tokens/s  500 trained/s  0:00:02 left")
    assert bars[3].startswith("[========================] step 4/4")
    assert bars[4] == "step 4: val loss 1.0000\n\n"


def test_the_remaining_time_follows_the_speed():
    told = io.StringIO()
    progress = TrainProgress(10, 7210, every=1, stream=told)
    progress.step(11, loss=None, seconds=2.0, tokens=3.5e6, trained=20)
    assert told.getvalue() == "step 11/7,210  loss -  1.75M tokens/s  10 trained/s  3:59:58 left\n"


def points(picture: str) -> list[list[tuple[float, float]]]:
    root = ElementTree.fromstring(picture)
    lines = [part.attrib["points"] for part in root if part.tag.endswith("polyline")]
    return [[tuple(map(float, pair.split(","))) for pair in line.split()] for line in lines]


def test_the_plot_covers_all_steps_and_falls_with_the_loss():
    metrics = [{"step": step, "loss": 8.0 - step} for step in range(1, 8)] + [{"step": 7, "val_loss": 4.0}]
    train, val = points(loss_plot(metrics, title="a < b"))
    assert [x for x, _ in train] == sorted(x for x, _ in train)
    assert [y for _, y in train] == sorted(y for _, y in train)
    assert val == [(train[-1][0], train[3][1])]
    assert "a &lt; b" in loss_plot(metrics, title="a < b")


losses = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True, width=32))


@given(st.lists(losses, max_size=40), st.lists(losses, max_size=5))
def test_any_losses_are_plotted_within_the_frame(train, val):
    metrics = [{"step": step, "loss": loss} for step, loss in enumerate(train)]
    metrics += [{"step": step, "val_loss": loss} for step, loss in enumerate(val) if loss is not None]
    for curve in points(loss_plot(metrics, title="x")):
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in curve)


def test_a_long_curve_is_averaged():
    metrics = [{"step": step, "loss": float(step % 2)} for step in range(4 * MOST)]
    (curve,) = points(loss_plot(metrics, title="x"))
    assert len(curve) == MOST
    assert len({y for _, y in curve}) == 1


def test_rewind_removes_later_and_incomplete_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    journal = MetricsLog(path)
    for step in (1, 2, 2, 3):
        journal.add({"step": step, "loss": math.pi})
    journal.close()
    with path.open("a") as file:
        file.write('{"step": 4')
    rewind(path, 2)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 2]
    assert json.loads(path.read_text().splitlines()[0]) == {"step": 1, "loss": math.pi}
    rewind(tmp_path / "none", 2)
    path.write_text("not json\n")
    with pytest.raises(DataError, match="is damaged"):
        read_metrics(tmp_path)
