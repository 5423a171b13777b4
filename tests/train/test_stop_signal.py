from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from child_processes import start_child

from chatmill.errors import ChatmillError
from chatmill.train import stop_signal
from chatmill.train.stop_signal import stop_on_signal


def test_a_run_that_finishes_no_step_after_a_signal_ends_with_one_line(tmp_path):
    def stuck() -> None:
        stop_signal.STEP_SECONDS = 0.3
        with stop_on_signal():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1000)

    child = start_child(stuck, variables={"RANK": "3"}, output=tmp_path)
    child.join()
    assert child.exitcode == 1
    assert (tmp_path / "err").read_text() == (
        "chatmill: rank 3: no step finished within 0.005 minutes after SIGTERM, so the run ends without another "
        "checkpoint; continue with --resume auto\n"
    )


def test_steps_without_a_signal_and_saves_have_no_time_limit(monkeypatch):
    def watchers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "stop request"]

    earlier = watchers()
    monkeypatch.setattr(stop_signal, "STEP_SECONDS", 0.0)
    with stop_on_signal() as request:
        (watcher,) = (thread for thread in watchers() if thread not in earlier)
        time.sleep(0.3)
        monkeypatch.setattr(stop_signal, "STEP_SECONDS", 600.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert request.by == "SIGTERM"
        assert watcher.is_alive()
        request.finished_step()
        watcher.join(60)
        assert not watcher.is_alive()


def test_a_signal_that_torchrun_forwards_again_is_ignored(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")

    def interrupted_later() -> None:
        with stop_on_signal() as request:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            assert request.by == "SIGINT"
            monkeypatch.setattr(stop_signal, "SAME_SECONDS", 0.0)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)

    with pytest.raises(KeyboardInterrupt):
        interrupted_later()


def test_a_compiler_ended_by_the_same_signal_is_a_one_line_error():
    class InductorError(RuntimeError):
        __module__ = "torch._inductor.exc"

    def compile_under(*numbers: signal.Signals) -> None:
        with stop_on_signal():
            for number in numbers:
                os.kill(os.getpid(), number)
                time.sleep(0.01)
            raise InductorError("C++ compile error")

    with pytest.raises(ChatmillError, match=r"^SIGTERM also ended processes that compile the model"):
        compile_under(signal.SIGTERM)
    with pytest.raises(InductorError):
        compile_under()
