"""Upload a large file to S3 in parts, each of which is tried again by itself."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

PART_BYTES = 16 << 20
"""Bytes of a part; the last may be smaller. S3 takes at most 10,000 parts, each of at least 5 MB."""
MOST_PARTS = 10_000
WORKERS = 4
"""Parts that are in memory and on their way at once."""


def upload_in_parts(path: Path, size: int, call: Callable[..., Any]) -> None:
    """Upload a file by `call(METHOD, **arguments)`; on failure nothing is left at the server, as far as it answers."""
    upload = call("create_multipart_upload")["UploadId"]
    length = max(PART_BYTES, -(-size // MOST_PARTS))

    def send(number: int) -> dict[str, Any]:
        with path.open("rb") as file:
            file.seek(number * length)
            body = file.read(length)
        tag = call("upload_part", UploadId=upload, PartNumber=number + 1, Body=body)["ETag"]
        return {"PartNumber": number + 1, "ETag": tag}

    try:
        with ThreadPoolExecutor(WORKERS) as pool:
            futures = [pool.submit(send, number) for number in range(-(-size // length))]
            try:
                parts = [future.result() for future in futures]
            finally:
                for future in futures:
                    future.cancel()
        call("complete_multipart_upload", UploadId=upload, MultipartUpload={"Parts": parts})
    except BaseException:
        # The first error is the one to tell.
        with suppress(Exception):
            call("abort_multipart_upload", UploadId=upload)
        raise
