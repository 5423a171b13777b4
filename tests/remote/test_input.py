from __future__ import annotations

import gzip
import json
import warnings

import pyarrow
import pytest
from pyarrow import parquet

from chatmill.errors import DataError, UsageError
from chatmill.records import expand, plan, read_part, read_records
from chatmill.remote import objects
from chatmill.remote.urls import Url, place
from remote.fault_proxy import EVER, Fault, fault_proxy
from remote.servers import Server

CHATS = [[{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": "é" * n}] for n in range(40)]
LINES = "".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS).encode()


def contents() -> dict[str, bytes]:
    out = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": chat} for chat in CHATS]), out, row_group_size=9)
    return {
        "a.jsonl": LINES,
        "sub/b.jsonl.gz": gzip.compress(LINES),
        "sub/c.parquet": out.getvalue().to_pybytes(),
        "sub/.hidden.jsonl": b"{",
        "notes.md": b"",
    }


def folder_of(server: Server) -> Url:
    if server.scheme in ("hf", "http"):
        assert server.folder is not None
        for name, data in contents().items():
            path = server.folder / "org/chat" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        address = "hf://datasets/org/chat" if server.scheme == "hf" else f"{server.endpoint}/ranges/org/chat"
        url = place(address)
        assert isinstance(url, Url)
        return url
    url = server.bucket() / "chat"
    for name, data in contents().items():
        objects.write(url / name, data)
    return url


def said(records) -> list[list[dict]]:
    return [[{"role": each.role, "content": each.content} for each in record.messages] for record in records]


@pytest.mark.parametrize("store", ["s3", "gs", "hf", "web", "az"])
def test_records_are_read_from_every_store(request, store):
    url = folder_of(request.getfixturevalue(store))
    names = ("a.jsonl", "sub/b.jsonl.gz", "sub/c.parquet")
    assert said(read_records([url / name for name in names])) == CHATS * 3
    for name in (names[0], names[2]):
        [part] = plan([url / name], shape="messages")
        pieces = part.cut(700)
        assert len(pieces) > 1
        assert said(record for piece in pieces for record in read_part(piece, on_fault=pytest.fail)) == CHATS
    if store == "web":
        return
    matches = [str(each).removeprefix(f"{url}/") for each in expand([f"{url}/sub/*", f"{url}/*.jsonl"])]
    assert matches == ["sub/b.jsonl.gz", "sub/c.parquet", "a.jsonl"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert expand([url]) == [url / name for name in names]
    assert str(caught[0].message) == f"{url}: skipped 1 file with other extensions: notes.md"


FAULTS = [
    [Fault("status", status=503, times=2), Fault("reset", after=700, times=2, method="GET", path="chat")],
    [Fault("cut", after=700, times=2, method="GET", path="chat"), Fault("lost", times=1, path="chat")],
    [Fault("short", after=700, times=3, method="GET", path="chat")],
]


def test_broken_reads_are_retried_and_no_record_is_lost(s3_server, monkeypatch):
    monkeypatch.setattr(objects, "FIRST_DELAY", 0.0)
    monkeypatch.setattr("chatmill.records.raw_files.FIRST_BYTES", 1500)
    monkeypatch.setattr("chatmill.records.raw_files.MOST_BYTES", 2500)
    with fault_proxy(s3_server.port) as proxy, s3_server.behind(proxy).in_environment():
        url = folder_of(s3_server)
        for name, faults in zip(("a.jsonl", "sub/b.jsonl.gz", "sub/c.parquet"), FAULTS, strict=True):
            proxy.fail(*faults)
            assert said(read_records([url / name], shape="messages")) == CHATS
        proxy.fail(Fault("status", status=403, code="AccessDenied", times=EVER, skip=8))
        with pytest.raises(objects.RemoteError, match=r"^s3://[^\n]+: [^\n]+; [^\n]+$"):
            list(read_records([url / "a.jsonl"]))


def test_a_missing_file_on_a_web_server_is_one_error_line(web):
    url = f"{web.endpoint}/ranges/none.jsonl"
    with pytest.raises(DataError) as caught:
        read_records([url])
    assert str(caught.value) == f"{url}: no such file (404); check the URL"
    for name in ("*.jsonl", ""):
        with pytest.raises(UsageError, match="files on web servers cannot be listed; pass the URL of each file"):
            read_records([f"{web.endpoint}/ranges/{name}"])
