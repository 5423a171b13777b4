from __future__ import annotations

import http.client
from urllib.parse import quote

import pytest

from remote.fault_proxy import Fault, fault_proxy

DATA = bytes(range(256)) * 1000


@pytest.fixture(scope="module")
def proxy(s3_server):
    with fault_proxy(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def ask(proxy, s3_server):
    proxy.fail()
    bucket = s3_server.bucket().address.removeprefix("s3://")

    def ask(method: str, name: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", proxy.port)
        try:
            connection.request(method, f"/{bucket}/{quote(name)}", body, {"Authorization": "AWS testing:", **headers})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    assert ask("PUT", "x", DATA)[0] == 200
    proxy.requests()
    return ask


def test_requests_without_a_fault_are_forwarded_and_counted(ask, proxy):
    assert ask("GET", "x") == (200, DATA)
    assert ask("GET", "x", Range="bytes=10-19") == (206, DATA[10:20])
    assert ask("HEAD", "x") == (200, b"")
    assert [(method, span) for method, _, span in proxy.requests()] == [
        ("GET", ""),
        ("GET", "bytes=10-19"),
        ("HEAD", ""),
    ]
    assert proxy.requests() == []


def test_a_throttled_response_is_complete(ask, proxy):
    proxy.throttle(20e6)
    assert ask("GET", "x") == (200, DATA)
    proxy.throttle()


def test_a_fault_applies_to_a_number_of_requests_of_one_method_and_path(ask, proxy):
    proxy.fail(Fault("status", times=2, skip=1, method="GET", path="x$"))
    assert ask("PUT", "y", b"1")[0] == 200
    assert [ask("GET", name)[0] for name in "yxxyxx"] == [200, 200, 503, 200, 503, 200]


def test_responses_are_broken_at_the_given_byte(ask, proxy):
    proxy.fail(Fault("short", after=1000))
    assert ask("GET", "x") == (200, DATA[:1000])
    proxy.fail(Fault("corrupt", after=1000))
    assert ask("GET", "x") == (200, DATA[:1000] + bytes([DATA[1000] ^ 1]) + DATA[1001:])
    proxy.fail(Fault("cut", after=1000))
    with pytest.raises(http.client.IncompleteRead):
        ask("GET", "x")
    proxy.fail(Fault("reset", after=1000))
    with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
        ask("GET", "x")


def test_the_server_performs_a_request_with_a_lost_response_but_not_a_reset_upload(ask, proxy):
    proxy.fail(Fault("lost", method="PUT"))
    with pytest.raises(ConnectionError):
        ask("PUT", "done", b"1")
    assert ask("GET", "done") == (200, b"1")
    proxy.fail(Fault("reset_upload", method="PUT", after=100))
    with pytest.raises(ConnectionError):
        ask("PUT", "undone", DATA)
    assert ask("GET", "undone")[0] == 404
