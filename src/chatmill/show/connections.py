"""Limit the number of connections to the viewer, and how long each connection may wait for its client.

uvicorn closes idle connections after a response, but waits forever for the rest of a request, and for a client that
does not read the response.
"""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from anyio import to_thread
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 128
"""Maximum number of open connections; if there are more, the connection that has waited longest for its client is
closed.
"""
ACCEPTED_AT_ONCE = 32
"""Number of connections to accept before reading from them; must be below MAX_CONNECTIONS."""
QUEUED = 1024
"""Number of connections that the operating system queues until they are accepted."""
THREADS = 8
"""Number of responses that are computed concurrently."""
CLIENT_SECONDS = 20.0
"""Maximum time in seconds for a client to send a request, or to read enough of a response for writing to resume."""


class LimitedServer(uvicorn.Server):
    """A server that accepts a few connections at a time, while the other connections wait in a queue."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=LimitedConnection,
                backlog=ACCEPTED_AT_ONCE,
                # uvicorn counts each request until it is answered, even if the client has disconnected.
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
    """A connection that is closed if its client is too slow or if too many connections are open."""

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
        # Start the timer once per request, not for every part of the request.
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
        """Stop the timer while a response is computed, because the time limit applies only to the client."""
        if self.cycle is not None and not self.cycle.response_complete and not self.flow.write_paused:
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
