from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from child_processes import start_child

from chatmill.cli.guard import guarded
from chatmill.errors import UsageError
from chatmill.train.command import errors_of_first_rank
from chatmill.train.lost_ranks import RankWatch

PATIENCE = 120
"""Time limit of a process in seconds, much longer than needed."""


def wait_for(path: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def meet(count: int) -> list[dict[str, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**common, "RANK": str(rank)} for rank in range(count)]


def wait_in_a_collective(world):
    world.sums([1.0])


def compute(world):
    number = 1
    while True:
        number = number * 3 % 1_000_003


def sleep(world):
    time.sleep(10 * PATIENCE)


def wait_where_no_signal_reaches(world):
    """Block in C without the GIL, like a collective operation on GPUs."""
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def fail(world):
    raise UsageError("this rank cannot continue")


def one_rank(folder: Path, rank: int, work) -> None:
    from chatmill.train import rank_sockets
    from chatmill.train.process_group import init_world

    rank_sockets.UNREACHABLE_SECONDS = 3

    def command() -> None:
        with errors_of_first_rank(), init_world("cpu") as world:
            assert world.sums([rank]) == [sum(range(world.size))]
            (folder / f"joined-{rank}").touch()
            work(world)

    guarded(command)


class Ranks:
    def __init__(self, folder: Path, *works) -> None:
        self.folder, self.children = folder, []
        for rank, (work, variables) in enumerate(zip(works, meet(len(works)), strict=True)):
            (folder / str(rank)).mkdir()
            one = functools.partial(one_rank, folder, rank, work)
            self.children.append(start_child(one, variables=variables, output=folder / str(rank)))
        for rank in range(len(works)):
            wait_for(folder / f"joined-{rank}")

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.children[rank].pid, number)

    def ended(self) -> list[int | None]:
        for child in self.children:
            child.join(PATIENCE)
        codes = [child.exitcode for child in self.children]
        for child in self.children:
            child.kill()
            child.join()
        return codes

    def lines(self) -> list[tuple[int, str]]:
        files = [(rank, self.folder / str(rank) / "err") for rank in range(len(self.children))]
        return [(rank, line) for rank, file in files for line in file.read_text().splitlines()]


HOST = re.escape(socket.gethostname())
LOST = r"chatmill: rank {} on " + HOST + r" is lost \(the process ended\); continue with --resume auto"


def test_a_suspended_rank_is_waited_for_and_a_killed_rank_ends_all_ranks(tmp_path):
    def after_all(work):
        def gather_then_work(world):
            world.sums([1.0])
            work(world)

        return gather_then_work

    def victim(world):
        wait_for(tmp_path / "go")
        world.sums([1.0])
        (tmp_path / "went on").touch()
        sleep(world)

    ranks = Ranks(tmp_path, after_all(compute), after_all(wait_in_a_collective), after_all(sleep), victim)
    ranks.send(3, signal.SIGSTOP)
    # The pause is longer than `UNREACHABLE_SECONDS`, the limit for nodes that do not respond.
    time.sleep(5)
    (tmp_path / "go").touch()
    assert [child.exitcode for child in ranks.children] == [None] * 4
    ranks.send(3, signal.SIGCONT)
    wait_for(tmp_path / "went on")
    ranks.send(3, signal.SIGKILL)
    for rank in range(3):
        # When one rank has ended, torchrun sends SIGTERM to the other ranks.
        ranks.send(rank, signal.SIGTERM)
    assert ranks.ended() == [1, 1, 1, -signal.SIGKILL]
    [(speaker, line)] = ranks.lines()
    assert speaker == 0
    assert re.fullmatch(LOST.format(3), line)


def test_another_rank_reports_the_loss_of_rank_0_and_blocked_processes_end(tmp_path):
    ranks = Ranks(tmp_path, sleep, wait_where_no_signal_reaches, wait_in_a_collective, sleep)
    ranks.send(0, signal.SIGKILL)
    assert ranks.ended() == [-signal.SIGKILL, 1, 1, 1]
    [(speaker, line)] = ranks.lines()
    assert speaker == 1
    assert re.fullmatch(LOST.format(0), line)


def test_an_error_that_one_rank_leaves_to_rank_0_is_printed_and_ends_all_ranks(tmp_path):
    ranks = Ranks(tmp_path, sleep, fail, wait_in_a_collective)
    assert ranks.ended() == [1, 2, 1]
    [(speaker, line)] = ranks.lines()
    assert speaker == 0
    assert re.fullmatch(f"chatmill: rank 1 on {HOST}: this rank cannot continue", line)


class Keys(dict):
    set = dict.__setitem__
    get = dict.__getitem__


STRANGERS = [
    b"\n",
    b"[]\n",
    b"null\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b'{"token": "", "rank": 1, "host": "h"}\n',
    b'{"token": "0123456789abcdef0123456789abcdef", "rank": 1, "host": "h"}\n',
    b'{"token": "x", "rank": 1e999, "host": "h"}\n',
    b'{"lost": 0, "host": "h", "how": "x"}\n',
    b'{"bye": 1}\n',
    b"[" * 9999 + b"\n",
    b"x" * 40_000,
]


def test_only_ranks_of_the_run_can_connect_and_the_port_closes_after_the_last(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store, handlers = Keys(), [signal.getsignal(number) for number in (signal.SIGURG, signal.SIGTERM)]
    first = RankWatch(store, 0, 2)
    port = json.loads(store["chatmill/hub 0"])["port"]
    for data in STRANGERS:
        with socket.create_connection(("127.0.0.1", port)) as stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(data)
            assert stranger.recv(1) == b""
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(10)]
    second = RankWatch(store, 1, 2)
    end = time.monotonic() + PATIENCE
    while first._listener is not None and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    for each in silent:
        each.close()
    second.close(None)
    while first._peers and time.monotonic() < end:
        time.sleep(0.01)
    assert (first.has_fault, second.has_fault, first._peers) == (False, False, [])
    first.close(None)
    assert [signal.getsignal(number) for number in (signal.SIGURG, signal.SIGTERM)] == handlers


def test_a_rank_that_cannot_connect_prints_a_warning_and_continues(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        hub = {"port": closed.getsockname()[1], "token": "x", "hubs": [0, 1]}
    with pytest.warns(UserWarning, match=r"^rank 1 on \S+ cannot connect to 127.0.0.1:\d+ \(Connection refused\)"):
        watch = RankWatch(Keys({"chatmill/hub 0": json.dumps(hub)}), 1, 2)
    assert not watch.has_fault
    watch.close(None)
