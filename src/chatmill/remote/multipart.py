"""Upload a large file to S3 in parts, so that a failed part can be retried separately."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

PART_BYTES = 16 << 20
"""Minimum size of each part except the last, in bytes. S3 requires at least 5 MiB per part, and allows at most 10,000
parts.
"""
MOST_PARTS = 10_000
WORKERS = 4
"""Maximum number of parts that are in memory and uploaded at the same time."""


def upload_in_parts(path: Path, size: int, call: Callable[..., Any]) -> None:
    """Upload a file; `call(METHOD, **arguments)` sends an S3 request. If a request fails, remove the uploaded parts."""
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
        # Raise the original error even if the abort request also fails.
        with suppress(Exception):
            call("abort_multipart_upload", UploadId=upload)
        raise
