from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from functools import partial

import pyarrow
import zstandard
from pyarrow import ipc, parquet

from chatmill.records import read_part

COMPRESS = {
    "": bytes,
    ".gz": partial(gzip.compress, mtime=0),
    ".zst": lambda data: zstandard.ZstdCompressor(level=3).compress(data),
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}
CHATS = [
    [{"role": "user", "content": f"question {n} é"}, {"role": "assistant", "content": "yes " * (n % 7)}]
    for n in range(40)
]


def content(kind: str, chats=CHATS) -> bytes:
    out = io.BytesIO()
    rows = [{"messages": chat} for chat in chats]
    if kind == ".json":
        return json.dumps(rows, indent=1).encode()
    if kind == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), out, row_group_size=7)
    elif kind == ".arrow":
        table = pyarrow.Table.from_pylist(rows)
        with ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    else:
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    return out.getvalue()


def said(records) -> list[list[dict]]:
    return [[{"role": each.role, "content": each.content} for each in record.messages] for record in records]


def read_all(parts) -> list:
    return [record for part in parts for record in read_part(part, on_fault=raise_it)]


def raise_it(fault):
    raise fault
