"""Ranges of files on web servers, some of which do not send ranges."""

from __future__ import annotations

from typing import Any

WHOLE_BYTES = 8 << 20
"""A larger file is not read again and again from a server that always sends all of it."""


def read_web(opened: Any, address: str, start: int, stop: int | None) -> bytes:
    """The bytes [start, stop) of a file on a web server; to its end without `stop`."""
    from fsspec.asyn import sync

    content: bytes = sync(opened.loop, _get, opened, address, start, stop)
    return content


async def _get(opened: Any, address: str, start: int, stop: int | None) -> bytes:
    # Compressed answers would have other bytes and other lengths than the file.
    headers = {"Accept-Encoding": "identity"}
    if start or stop is not None:
        headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
    session = await opened.set_session()
    async with session.get(opened.encode_url(address), headers=headers) as answer:
        if answer.status == 416:
            return b""
        answer.raise_for_status()
        if answer.status == 206:
            return bytes(await answer.read())
        if start and (answer.content_length is None or answer.content_length > WHOLE_BYTES):
            raise NotImplementedError("the server sends a file of this size only as a whole")
        return bytes(await answer.read())[start:stop]
