"""Detect within seconds that a run has lost a rank, and end the other ranks.

Every rank keeps a TCP connection to two ranks, the hubs: rank 0 and another rank, if possible on a different node. When
a process ends for any reason, the operating system closes its connections. TCP keep-alive closes connections to an
unreachable node. Ranks do not need to send messages, so a rank that is slow, compiling, or stopped in a debugger keeps
its connections.

    rank 0 ── rank 1, rank 2, rank 3, …      a hub tells all others which ranks are lost;
    hub b  ── rank 0, rank 1, rank 2, …      the first remaining hub prints one line

When a rank is lost, a signal interrupts the main thread of every other rank. The signal handler raises `LostRankError`.
If the main thread cannot be interrupted, as in a GPU collective, the process ends after a few seconds.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from chatmill.errors import ChatmillError, one_line
from chatmill.train.rank_sockets import keep_alive, listen

if TYPE_CHECKING:
    from torch.distributed import Store

CONNECT_SECONDS = 30
SETTLE_SECONDS = 0.5
"""Ranks that are lost within this time, such as all ranks on a node, are reported in one line."""
GRACE_SECONDS = 5.0
"""Time that the main thread may take to end after it is interrupted."""
FAILED_SECONDS = 5.0
"""Delay before the main thread is interrupted if another rank failed with an error. The delay is needed because this
rank may be about to raise the same error.
"""
WAKE = signal.SIGURG
"""The signal that interrupts the main thread; without a handler, the system ignores this signal."""
MOST_BYTES = 1 << 14
"""Maximum length of a message, in bytes."""
MOST_UNKNOWN = 64
"""Maximum number of open connections that have not sent the secret of the run yet."""
SHOWN_RANKS = 8


class RankError(ChatmillError):
    """An error that is reported by the rank on which it occurs; rank 0 reports the errors that occur on all ranks."""


class LostRankError(RankError):
    """Raised if another rank was killed or failed, or if its node has become unreachable."""

    def __init__(self, text: str, *, reported: bool = False) -> None:
        super().__init__(text)
        self.reported = reported
        """Whether another rank prints the error."""


@dataclass
class _Connection:
    """A connection to another rank; `rank` is None until the other rank has sent the secret of the run."""

    connection: socket.socket
    rank: int | None = None
    host: str = ""
    received: bytes = b""
    has_left: bool = False
    """Whether the other rank has announced that it is exiting, normally or with an error."""


@dataclass
class _Fault:
    """The ranks that were lost, and the error of the first rank that failed."""

    lost: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Lost ranks, each with its host and the reason for the loss."""
    failed: dict[str, Any] | None = None
    """The message from the first rank that failed with an error."""

    def text(self) -> str:
        if not self.lost and self.failed is not None:
            return f"rank {self.failed['failed']} on {self.failed['host']}: {self.failed['text']}"
        ranks, shown = sorted(self.lost), []
        for host in dict.fromkeys(self.lost[rank][0] for rank in ranks):
            there = [rank for rank in ranks if self.lost[rank][0] == host]
            named = ", ".join(map(str, there[:SHOWN_RANKS])) + (", …" if len(there) > SHOWN_RANKS else "")
            shown.append(f"{'ranks' if len(there) > 1 else 'rank'} {named} on {host}")
        how = self.lost[ranks[0]][1]
        return f"{' and '.join(shown)} {'are' if len(ranks) > 1 else 'is'} lost ({how}); continue with --resume auto"


class RankWatch:
    """The connections of this rank to other ranks, watched by a thread until `close` is called."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """Connect to the hubs, whose addresses are in the distributed store; all ranks must create a `RankWatch`."""
        self._rank, self._size, self._host = rank, size, one_line(socket.gethostname(), 64)
        self._lock = threading.RLock()
        self._fault = _Fault()
        self._known, self._known_at = threading.Event(), 0.0
        self._closed = threading.Event()
        self._listener: socket.socket | None = None
        self._peers: list[_Connection] = []
        self._hubs: tuple[int, ...] = (0,)
        self._wakeup, self._wakeup_end = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._watch, name="lost ranks", daemon=True)
        self._main = threading.main_thread().ident if _is_main_thread() else None
        self._previous: dict[signal.Signals, Any] = {}
        if self._main:
            self._previous[WAKE] = signal.signal(WAKE, self._raise)
            self._previous[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._terminate)
        try:
            self._connect(store)
        except BaseException as error:
            self.close(error)
            raise

    # Methods called by the main thread.

    def close(self, error: BaseException | None) -> None:
        """Notify the other ranks that this rank has finished or, if it has failed, send them its error."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        self._restore(WAKE)
        message: dict[str, Any] = {"bye": self._rank}
        if error is not None and not isinstance(error, LostRankError):
            # A `ChatmillError` that is not a `RankError` occurs on all ranks, and only rank 0 prints it.
            silent = isinstance(error, ChatmillError) and not isinstance(error, RankError) and self._rank != 0
            text = one_line(str(error) or type(error).__name__, 1000)
            message = {"failed": self._rank, "host": self._host, "text": text, "silent": silent}
        self._send(message, [peer for peer in self._peers if peer.rank is not None])
        with suppress(OSError):
            self._wakeup_end.send(b"x")
        if self._thread.is_alive():
            self._thread.join(GRACE_SECONDS)
        connections = [peer.connection for peer in self._peers]
        for each in [self._selector, self._wakeup, self._wakeup_end, *connections, self._listener]:
            if each is not None:
                each.close()
        if not self.has_fault:
            self._restore(signal.SIGTERM)

    @property
    def has_fault(self) -> bool:
        return self._known.is_set()

    def explain(self) -> LostRankError | None:
        """Return the error that made a collective fail, or None if no rank is lost."""
        # Wait, because a hub may need a moment to detect the broken connection and notify the other ranks.
        if not self._known.wait(GRACE_SECONDS):
            return None
        time.sleep(SETTLE_SECONDS)
        return self._error()

    # Setting up.

    def _connect(self, store: Store) -> None:
        address = os.environ["MASTER_ADDR"]
        if self._rank == 0:
            port = self._open_listener(address)
            self._token = secrets.token_hex(16)
            beside = os.environ.get("LOCAL_WORLD_SIZE", "")
            self._hubs = (0, int(beside) if beside.isdigit() and 0 < int(beside) < self._size else 1)
            store.set("chatmill/hub 0", json.dumps({"port": port, "token": self._token, "hubs": self._hubs}))
        else:
            hub = json.loads(store.get("chatmill/hub 0"))
            self._token, self._hubs = str(hub["token"]), tuple(map(int, hub["hubs"]))
            connection = self._join(0, address, int(hub["port"]))
            if self._rank == self._hubs[1] and self._size > 2:
                # Listen on the network interface that connects to rank 0.
                here = "127.0.0.1" if connection is None else connection.getsockname()[0]
                store.set("chatmill/hub 1", json.dumps([here, self._open_listener(here)]))
        self._thread.start()
        if self._rank not in self._hubs:
            here, port = json.loads(store.get("chatmill/hub 1"))
            self._join(self._hubs[1], str(here), int(port))

    def _open_listener(self, address: str) -> int:
        self._listener = listen(address, self._size)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return int(self._listener.getsockname()[1])

    def _join(self, hub: int, address: str, port: int) -> socket.socket | None:
        try:
            connection = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
        except OSError as error:
            if hub == 0:
                warnings.warn(
                    f"rank {self._rank} on {self._host} cannot connect to {address}:{port} "
                    f"({error.strerror or error}); if another rank is lost, this rank will wait until its "
                    f"collectives time out",
                    stacklevel=1,
                )
            return None
        keep_alive(connection)
        peer = _Connection(connection, hub, address)
        self._peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._send({"token": self._token, "rank": self._rank, "host": self._host}, [peer])
        return connection

    # Methods called by the watching thread.

    def _watch(self) -> None:
        interrupted = False
        while not self._closed.is_set():
            for key, _ in self._selector.select(0.1 if self.has_fault else None):
                if key.data is not None:
                    self._read(key.data)
                elif key.fileobj is self._listener:
                    self._accept()
            if not self.has_fault:
                continue
            passed = time.monotonic() - self._known_at
            delay = SETTLE_SECONDS if self._fault.lost else FAILED_SECONDS
            if passed > delay and not interrupted:
                interrupted = True
                self._interrupt()
            if passed > delay + GRACE_SECONDS:
                self._end()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if sum(peer.rank is None for peer in self._peers) >= MOST_UNKNOWN:
            connection.close()
            return
        keep_alive(connection)
        peer = _Connection(connection)
        self._peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: _Connection) -> None:
        how = "the process ended"
        try:
            data = peer.connection.recv(MOST_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        except OSError as error:
            data, how = b"", f"the node cannot be reached: {error.strerror or error}"
        peer.received += data
        *lines, peer.received = peer.received.split(b"\n")
        is_right = len(peer.received) <= MOST_BYTES and all(self._take(peer, line) for line in lines)
        if data and is_right:
            return
        self._selector.unregister(peer.connection)
        with self._lock:
            peer.connection.close()
            self._peers.remove(peer)
        if peer.rank is not None and not peer.has_left:
            self._note({"lost": peer.rank, "host": peer.host, "how": how})

    def _take(self, peer: _Connection, line: bytes) -> bool:
        """Handle a message from another rank; return False if the message is invalid or not allowed."""
        try:
            message = json.loads(line)
            if peer.rank is None:
                rank = int(message["rank"])
                if not hmac.compare_digest(str(message["token"]).encode(), self._token.encode()):
                    return False
                if not 0 < rank < self._size or rank in {each.rank for each in self._peers}:
                    return False
                peer.rank, peer.host = rank, one_line(str(message["host"]), 64)
                self._send({"host": self._host}, [peer])
                self._close_listener()
            elif "lost" in message or "failed" in message:
                peer.has_left = peer.has_left or message.get("failed") == peer.rank
                self._note(message)
            elif "bye" in message:
                peer.has_left = True
            else:
                peer.host = one_line(str(message["host"]), 64)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            return False
        return True

    def _close_listener(self) -> None:
        """Close the listening port once every rank is connected."""
        expected = self._size - (1 if self._rank == 0 else 2)
        joined = sum(peer.rank is not None and peer.rank != 0 for peer in self._peers)
        if self._listener is not None and joined >= expected:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _note(self, message: Mapping[str, Any]) -> None:
        """Record that a rank is lost or has failed; if this rank is a hub, notify all other ranks."""
        if "lost" in message:
            rank = int(message["lost"])
            if rank in self._fault.lost or rank == self._rank:
                return
            self._fault.lost[rank] = one_line(str(message["host"]), 64), one_line(str(message["how"]), 200)
        elif self._fault.failed is not None:
            return
        else:
            self._fault.failed = {**message, "host": one_line(str(message["host"]), 64), "text": str(message["text"])}
        if self._rank in self._hubs:
            self._send(message, [peer for peer in self._peers if peer.rank is not None])
        if not self.has_fault:
            self._known_at = time.monotonic()
            self._known.set()

    def _send(self, message: Mapping[str, Any], peers: list[_Connection]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            for peer in peers:
                # Ignore errors: the peer's receive buffer has space for many messages, so sending fails only if the
                # peer has exited.
                with suppress(OSError):
                    peer.connection.send(data)

    # Ending.

    def _error(self) -> LostRankError:
        hubs = [hub for hub in self._hubs if hub not in self._fault.lost]
        reported = bool(hubs) and min(hubs) != self._rank
        if not self._fault.lost and self._fault.failed is not None:
            # The failed rank prints its own error, unless its message is marked "silent"; rank 0 prints silent errors.
            reported = self._rank != 0 or not self._fault.failed.get("silent")
        return LostRankError(self._fault.text(), reported=reported)

    def _raise(self, *_: object) -> NoReturn:
        raise self._error()

    def _terminate(self, number: int, _: object) -> None:
        """Ignore the SIGTERM that torchrun sends after a rank is lost, so that this rank can report the loss first."""
        end = time.monotonic() + SETTLE_SECONDS
        while not self.has_fault and time.monotonic() < end:
            time.sleep(0.02)
        if not self.has_fault or time.monotonic() > self._known_at + FAILED_SECONDS + 2 * GRACE_SECONDS:
            self._restore(signal.SIGTERM)
            signal.raise_signal(number)

    def _restore(self, number: signal.Signals) -> None:
        if number in self._previous:
            signal.signal(number, self._previous.pop(number) or signal.SIG_DFL)

    def _interrupt(self) -> None:
        if self._main is not None and not self._closed.is_set():
            # The signal interrupts system calls such as sleep; its handler runs before the next Python bytecode.
            signal.pthread_kill(self._main, WAKE)

    def _end(self) -> None:
        """Terminate the process, even if the main thread is blocked."""
        with self._lock:
            if self._closed.is_set():
                return
            error = self._error()
            if not error.reported:
                with suppress(OSError, ValueError):
                    print(f"chatmill: {error}", file=sys.stderr, flush=True)
            self._send({"bye": self._rank}, [peer for peer in self._peers if peer.rank is not None])
            os._exit(error.exit_code)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
