"""Read byte ranges of files on web servers, even if a server does not support range requests."""

from __future__ import annotations

from typing import Any

WHOLE_BYTES = 8 << 20
"""Maximum size of a file to read in ranges if the server ignores ranges and always sends the whole file."""


def read_web(opened: Any, address: str, start: int, stop: int | None) -> bytes:
    """Return the bytes [start, stop) of a file on a web server; without `stop`, read to the end."""
    from fsspec.asyn import sync

    content: bytes = sync(opened.loop, _get, opened, address, start, stop)
    return content


async def _get(opened: Any, address: str, start: int, stop: int | None) -> bytes:
    # Request an uncompressed response, so that byte ranges refer to the bytes of the file.
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
            raise NotImplementedError(
                "the server does not support range requests, and the file is too large to read repeatedly"
            )
        return bytes(await answer.read())[start:stop]
