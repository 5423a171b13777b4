"""TCP sockets between ranks, which close soon after a node becomes unreachable."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

UNREACHABLE_SECONDS = 15
"""Time in seconds after which a node that does not respond is considered lost."""


def listen(address: str, size: int) -> socket.socket:
    """Create a socket that listens on this address or, if the node does not have the address, on all interfaces."""
    for family, _, _, _, where in _addresses(address):
        with suppress(OSError):
            return _bound(family, where[0], size)
    return _bound(socket.AF_INET, "", size)


def _addresses(address: str) -> list[Any]:
    try:
        known = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    # Skip loopback addresses: a host name may resolve to 127.0.1.1, which other nodes cannot reach.
    local = ("127.", "::1")
    is_local = address.startswith((*local, "localhost"))
    return [each for each in known if is_local or not str(each[4][0]).startswith(local)]


def _bound(family: int, address: str, size: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(size)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def keep_alive(connection: socket.socket) -> None:
    """Configure a connection to close if the other node does not respond for `UNREACHABLE_SECONDS`."""
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {
        "TCP_KEEPIDLE": UNREACHABLE_SECONDS // 3,
        "TCP_KEEPALIVE": UNREACHABLE_SECONDS // 3,  # macOS name of TCP_KEEPIDLE
        "TCP_KEEPINTVL": UNREACHABLE_SECONDS // 6 or 1,
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": 1000 * UNREACHABLE_SECONDS,
        "TCP_NODELAY": 1,
    }.items():
        if hasattr(socket, name):
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
