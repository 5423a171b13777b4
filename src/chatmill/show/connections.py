"""Limits on the viewer's connections: how many there are, and how long each may wait for its client.

uvicorn closes a connection that is idle after an answer, but waits for ever for the rest of a request, and for a client
that does not read its answer.
"""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from anyio import to_thread
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 128
"""One more ends the connection that has waited longest for a request."""
ACCEPTED_AT_ONCE = 32
"""Connections accepted before those accepted earlier are read: few enough that none is ended before it is read."""
QUEUED = 1024
"""Connections that the system keeps until they are accepted."""
THREADS = 8
"""Answers that are computed at a time."""
CLIENT_SECONDS = 20.0
"""How long a client may take to send a request, the next request, or to read enough of an answer."""


class LimitedServer(uvicorn.Server):
    """A server that accepts a few connections at a time, and lets many more wait."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=LimitedConnection,
                backlog=ACCEPTED_AT_ONCE,
                # Of requests: those whose client is gone count until they are answered.
                limit_concurrency=2 * MAX_CONNECTIONS,
                log_level="error",
                access_log=False,
                lifespan="off",
                server_header=False,
                ws="none",
            )
        )
        self.config.load()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        to_thread.current_default_thread_limiter().total_tokens = THREADS
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(QUEUED)


class LimitedConnection(H11Protocol):
    """A connection that is ended when its client takes too long, or when there are too many."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_client()
        alive = [each for each in self.connections if isinstance(each, LimitedConnection) and each.is_open]
        if len(alive) > MAX_CONNECTIONS:
            waiting = [each for each in alive if each._deadline is not None]
            min(waiting, key=lambda each: each._deadline.when() if each._deadline else 0.0).transport.abort()

    @property
    def is_open(self) -> bool:
        return not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._stop_waiting_if_answering()

    def on_response_complete(self) -> None:
        # Parts of the next request do not extend the time for all of it.
        self._wait_for_client()
        super().on_response_complete()
        self._stop_waiting_if_answering()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_client()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting_if_answering()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_client(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(CLIENT_SECONDS, self.transport.abort)

    def _stop_waiting_if_answering(self) -> None:
        """Computing an answer may take its time."""
        if self.cycle is not None and not self.cycle.response_complete and not self.flow.write_paused:
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
