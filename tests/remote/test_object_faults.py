from __future__ import annotations

import importlib
import os
import re
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.errors import UsageError
from chatmill.remote import filesystems, multipart, objects
from chatmill.remote.faults import is_permanent, reason
from chatmill.remote.objects import (
    ExistingObjectError,
    MissingObjectError,
    RemoteError,
    find,
    names_below,
    read,
    upload,
    write,
)
from chatmill.remote.urls import Url, place
from remote.fault_proxy import EVER, Fault, fault_proxy
from remote.servers import Server, forget_connections, s3_environment

DATA = bytes(range(256)) * 100


@pytest.fixture(autouse=True)
def no_delays(monkeypatch):
    monkeypatch.setattr(objects, "FIRST_DELAY", 0.0)


@pytest.fixture(scope="module")
def proxy(s3_server):
    with fault_proxy(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def bucket(s3_server, proxy):
    proxy.fail()
    with s3_server.behind(proxy).in_environment():
        yield s3_server.bucket()
    proxy.fail()


def one_line_of(call, *words, kind=RemoteError):
    with pytest.raises(kind) as raised:
        call()
    text = str(raised.value)
    assert re.fullmatch(r"\w+://[^\n]+: [^\n]+; [^\n]+", text), text
    assert [word for word in words if word not in text] == [], text
    return text


TRANSIENT = [
    Fault("status", status=503, code="SlowDown", times=5),
    Fault("status", status=500, code="InternalError"),
    Fault("reset", after=0, times=2),
    Fault("reset", after=1000),
    Fault("cut", after=1000),
    Fault("lost"),
]


@pytest.mark.parametrize("fault", TRANSIENT, ids=lambda fault: f"{fault.kind}-{fault.code}-{fault.after}")
def test_transient_faults_are_retried(bucket, proxy, fault, tmp_path):
    (tmp_path / "file").write_bytes(DATA)
    proxy.fail(fault)
    write(bucket / "x", DATA)
    proxy.fail(fault)
    assert read(bucket / "x", 100, 20_000) == DATA[100:20_000]
    proxy.fail(fault)
    assert read(bucket / "x") == DATA
    proxy.fail(fault)
    upload(bucket / "y", tmp_path / "file")
    proxy.fail(fault)
    assert names_below(bucket) == [bucket / "x", bucket / "y"]
    proxy.fail()
    assert read(bucket / "y") == DATA


@pytest.mark.parametrize("kind", ["lost", "reset_upload"])
def test_a_conditional_write_with_a_lost_response_succeeds(bucket, proxy, kind):
    proxy.fail(Fault(kind, method="PUT", times=2, after=1))
    write(bucket / "x", b"1", new=True)
    assert read(bucket / "x") == b"1"
    proxy.fail(Fault(kind, method="PUT", times=2, after=1))
    write(bucket / "x", b"2", replaces=find(bucket / "x").version)
    assert read(bucket / "x") == b"2"
    proxy.fail(Fault(kind, method="PUT", times=2, after=1))
    with pytest.raises(ExistingObjectError):
        write(bucket / "x", b"2", new=True)


def test_only_the_failed_part_of_an_upload_is_sent_again(bucket, proxy, tmp_path, monkeypatch):
    monkeypatch.setattr(multipart, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    data = os.urandom((10 << 20) + 1)
    (tmp_path / "file").write_bytes(data)
    proxy.fail(
        Fault("reset_upload", method="PUT", path="partNumber=2", after=100_000, times=2),
        Fault("lost", path="x\\?uploadId", method="POST"),
    )
    proxy.requests()
    upload(bucket / "x", tmp_path / "file")
    parts = [re.search(r"partNumber=(\d)", path)[1] for method, path, _ in proxy.requests() if method == "PUT"]
    assert sorted(parts) == ["1", "2", "2", "2", "3"]
    assert read(bucket / "x") == data
    proxy.fail(Fault("status", status=403, code="AccessDenied", path="partNumber=3"))
    one_line_of(lambda: upload(bucket / "y", tmp_path / "file"), "check the credentials")
    assert names_below(bucket) == [bucket / "x"]
    assert proxy.requests()[-2][0] == "DELETE"


@pytest.mark.parametrize(("store", "count"), [("s3", objects.ATTEMPTS), ("gs", None), ("web", 2 * objects.ATTEMPTS)])
def test_the_libraries_make_one_attempt_each(store, count, request):
    """`find` and `read` send `ATTEMPTS` requests to a failing server; `find` sends twice as many to a web server."""
    server = request.getfixturevalue(f"{store}_server")
    with fault_proxy(server.port) as proxy, server.behind(proxy).in_environment():
        url = Url(f"{proxy.endpoint}/ranges/x") if store == "web" else server.bucket() / "x"
        proxy.requests()
        proxy.fail(Fault("status", status=503, times=EVER))
        one_line_of(lambda: find(url), "cannot be read", "check the name and the network, and try again")
        # gcsfs also looks for a folder of this name, so the number of requests varies.
        assert len(proxy.requests()) == count or store == "gs"
        one_line_of(lambda: read(url, 0, 10), "cannot be read")
        sent = proxy.requests()
        of_read = next(path for _, path, of_range in sent if of_range)
        assert [path for _, path, of_range in sent if of_range == "bytes=0-9"] == [of_read] * objects.ATTEMPTS
        # A request of `find` by gcsfs may arrive late.
        assert len(sent) == objects.ATTEMPTS or store == "gs"


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "AccessDenied", "check the credentials and their permissions"),
        (400, "InvalidArgument", "check the name and the network"),
        (501, "NotImplemented", "check the name and the network"),
    ],
)
def test_permanent_faults_are_reported_immediately(bucket, proxy, status, code, words):
    proxy.requests()
    for call in (lambda: write(bucket / "x", b"1"), lambda: read(bucket / "x", 0, 9), lambda: names_below(bucket)):
        proxy.fail(Fault("status", status=status, code=code))
        one_line_of(call, words)
        assert len(proxy.requests()) == 1


def test_an_object_that_vanishes_or_changes_while_it_is_read_is_one_error_line(bucket, proxy, monkeypatch):
    monkeypatch.setattr(objects, "RANGE_BYTES", 10_000)
    write(bucket / "x", DATA)
    proxy.fail(Fault("status", status=404, code="NoSuchKey", method="GET", skip=1))
    with pytest.raises(MissingObjectError, match=f"^{bucket}/x: no such object; "):
        read(bucket / "x")
    proxy.fail(Fault("short", method="GET", after=500, skip=1))
    one_line_of(lambda: read(bucket / "x"), "changed while it was being read")
    proxy.fail()
    infos = iter([find(bucket / "x"), objects.ObjectInfo(len(DATA), "another")])
    monkeypatch.setattr(objects, "find", lambda url: next(infos))
    one_line_of(lambda: read(bucket / "x"), "changed while it was being read")


def test_a_server_that_never_responds_is_one_error_line(bucket, proxy, monkeypatch):
    monkeypatch.setattr(filesystems, "READ_TIMEOUT", 0.2)
    monkeypatch.setattr(objects, "TIME_LIMIT", 0.0)
    forget_connections()
    proxy.fail(Fault("hang", times=EVER))
    proxy.requests()
    one_line_of(lambda: read(bucket / "x", 0, 10), "imeout", "check the name and the network, and try again")
    assert len(proxy.requests()) == 2
    forget_connections()


def test_an_unreachable_server_is_one_error_line():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    with Server(port, s3_environment(endpoint)).in_environment():
        for call in (
            lambda: find(Url("s3://b/x")),
            lambda: write(Url("s3://b/x"), b""),
            lambda: read(Url("s3://b/x"), 0, 1),
        ):
            one_line_of(call, "Could not connect to the endpoint URL", "check the name and the network")
        one_line_of(lambda: find(Url(f"{endpoint}/x")), "Cannot connect to host", "check the name and the network")


def test_a_missing_bucket_is_distinguished_from_a_missing_object(s3, rclone_server):
    url = Url("s3://no-such-bucket-here/x")
    for server in (s3, rclone_server):
        with server.in_environment():
            for call in (
                lambda: find(url),
                lambda: read(url, 0, 5),
                lambda: write(url, b"1"),
                lambda: names_below(url),
            ):
                one_line_of(call, "the bucket no-such-bucket-here does not exist; create it or check its name")


def test_wrong_and_missing_credentials_are_reported_immediately(rclone_server, monkeypatch):
    url = rclone_server.bucket() / "x"
    for key, secret in (("rclone-test-key", "a-wrong-secret"), ("a-wrong-key", "rclone-test-secret")):
        with Server(0, s3_environment(rclone_server.endpoint, key, secret)).in_environment():
            for call in (
                lambda: find(url),
                lambda: read(url, 0, 5),
                lambda: write(url, b"1"),
                lambda: names_below(url),
            ):
                text = one_line_of(call, "check the credentials and their permissions")
                assert key not in text and secret not in text
    with rclone_server.in_environment():
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        forget_connections()
        one_line_of(lambda: write(url, b"1"), "nable to locate credentials; check the credentials".replace("; ", "); "))


@pytest.mark.parametrize("endpoint", ["https://HOST", "nonsense", "ftp://h/x", "http://me:word@HOST", "me:word@HOST"])
def test_a_wrong_server_address_is_reported_immediately(s3_server, endpoint, monkeypatch):
    host = s3_server.endpoint.partition("://")[2]
    monkeypatch.setattr(objects.time, "sleep", lambda _: pytest.fail("made again"))
    with Server(0, s3_environment(endpoint.replace("HOST", host))).in_environment():
        text = one_line_of(lambda: find(Url("s3://bucket/x")), "check AWS_ENDPOINT_URL: use http:// or https://")
    assert "word@" not in text
    if endpoint == "https://HOST":
        one_line_of(lambda: find(Url(f"https://{host}/x")), "check the address: use http:// or https://")


def test_the_password_for_a_web_server_is_used_and_never_shown(web):
    (web.folder / "secret").write_bytes(DATA)
    address = web.endpoint.replace("//", "//user:pass%20word@")
    assert read(Url(f"{address}/locked/secret")) == DATA
    assert find(Url(f"{address}/locked/secret?x-sig=abc")).size == len(DATA)
    assert find(Url(f"{address}/locked/nothing?x-sig=abc")) is None
    for wrong in (web.endpoint, address.replace("word", "wort")):
        for call in (find, read):
            text = one_line_of(lambda: call(Url(f"{wrong}/locked/secret?x-sig=abc")), "401", "check the credentials")  # noqa: B023
            assert not re.search("pass|wort|user|abc", text)


WORDS = st.text("abcXYZ019-._~%é", min_size=4, max_size=20).filter(lambda word: not word.startswith("shown"))


@given(WORDS, WORDS, WORDS, st.sampled_from(["s3", "gs", "https", "http", "ftp", "az", "hf", "memory", "abfs"]))
def test_secrets_in_a_url_are_never_shown(user, password, signature, scheme):
    secrets = [f"<{user}>", f"<{password}>", f"<{signature}>"]
    address = f"{scheme}://{secrets[0]}:{secrets[1]}@shown-host/shown-name?X-Amz-Signature={secrets[2]}&y=1"
    try:
        url = place(address)
        texts = [str(url), repr(url), str(url / "x"), str(url.parent), url.name, str(objects.missing(url))]
    except UsageError as error:
        texts = [str(error)]
    quoted = (f"error at '{address}'", f"{address}: failed", f'({address}, "x")', f"401, url={address}")
    texts += [reason(OSError(text)) for text in quoted]
    assert [text for text in texts if any(secret in text for secret in secrets)] == []
    assert all("shown" in text for text in texts[-4:])


def test_secrets_in_the_environment_are_never_shown(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    assert (
        reason(OSError("header wJalrXUtnFEMI, Bearer hf_abcdefgh\nsecond line")) == "header …, Bearer …\\nsecond line"
    )


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("https://u:a/b@host/x", "https://…: is not a URL; "),
        ("s3://key:secret@bucket/x", "s3://bucket/x: contains a password; set credentials in the environment"),
        ("s3://b/x?X-Amz-Signature=abc", "s3://b/x: contains a signature; use https://"),
        ("az://c/x?sv=2024&sig=abc", "az://c/x: contains a signature; "),
        ("ftp://u:p@host/x", "ftp://host/x: ftp:// is not supported; "),
    ],
)
def test_urls_with_credentials_that_no_library_accepts_are_refused(name, wrong):
    with pytest.raises(UsageError, match=f"^{re.escape(wrong)}"):
        place(name)
    with pytest.raises(UsageError, match="was converted to a Path"):
        place(Path("https://user:password@host/x"))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("file:///tmp/x#y?z%41.jsonl", Path("/tmp/x#y?zA.jsonl")),
        ("file://localhost/tmp/a%20b", Path("/tmp/a b")),
        ("FILE:///tmp/%FF", Path(os.fsdecode(b"/tmp/\xff"))),
        ("S3://Bucket/X", Url("s3://Bucket/X")),
        ("HTTPS://host/x", Url("https://host/x")),
        ("memory:///x", Url("memory:///x")),
        ("x:/y", Path("x:/y")),
        ("notes:/y", Path("notes:/y")),
    ],
)
def test_a_name_is_parsed_as_a_path_or_a_url(name, meant):
    assert place(name) == meant


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("file://other/x", "file://other/x: is a file on another machine; expected file:///PATH"),
        ("s3:///team/x", "s3:///team/x: has no bucket; expected s3://BUCKET/NAME, with two slashes"),
        ("hf:///datasets/x", "hf:///datasets/x: has no repository; expected hf://REPOSITORY/NAME, with two slashes"),
        ("https:///x?sig=abc", "https:///x: has no host; expected https://HOST/NAME, with two slashes"),
        ("s3:/team/x", "s3:/…: has one slash after the scheme; did you mean s3://team/x?"),
        ("file:/tmp/x", "file:/…: has one slash after the scheme; did you mean file:///tmp/x?"),
        ("HTTPS:/user:pw@host/x?sig=abc", "HTTPS:/…: has one slash after the scheme; did you mean https://host/x?"),
    ],
)
def test_a_malformed_url_is_one_error_line(name, line):
    with pytest.raises(UsageError) as caught:
        place(name)
    assert str(caught.value) == line


def test_the_account_in_an_azure_url_is_not_a_credential():
    assert (
        str(place("abfs://container@account.dfs.core.windows.net/x"))
        == "abfs://container@account.dfs.core.windows.net/x"
    )


LIBRARIES = {
    "s3://b/x": ("s3fs", "s3"),
    "gs://b/x": ("gcsfs", "gs"),
    "az://c/x": ("adlfs", "az"),
    "hf://datasets/o/n/x": ("huggingface_hub", "hub"),
    "https://h/x": ("aiohttp", "http"),
    "memory://b/x": ("fsspec", "remote"),
}


@pytest.mark.parametrize("url", LIBRARIES)
def test_a_missing_library_is_one_error_line_that_names_the_extra(monkeypatch, url):
    module, extra = LIBRARIES[url]
    # fsspec remembers imported file systems and would not import them again.
    monkeypatch.setattr(importlib.import_module("fsspec.registry"), "registry", {})
    for name in [name for name in sys.modules if name.split(".")[0] == module or name == "fsspec.implementations.http"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    text = one_line_of(lambda: find(Url(url)), kind=UsageError)
    assert text == f"{url}: {url.partition(':')[0]}:// needs a library; run pip install 'chatmill[{extra}]'"


def test_settings_of_fsspec_are_used(s3, monkeypatch):
    bucket = s3.bucket()
    write(bucket / "x", b"hello")
    import fsspec.config

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    variables = {"FSSPEC_S3_KEY": "testing", "FSSPEC_S3_SECRET": "testing", "FSSPEC_S3_ENDPOINT_URL": s3.endpoint}
    variables["FSSPEC_S3"] = '{"config_kwargs": {"read_timeout": 7}}'
    monkeypatch.setitem(fsspec.config.conf, "s3", {})
    fsspec.config.set_conf_env(fsspec.config.conf, variables)
    forget_connections()
    assert read(bucket / "x") == b"hello"
    config = filesystems.filesystem(bucket)[0].config_kwargs
    assert (config["read_timeout"], config["connect_timeout"]) == (7, filesystems.CONNECT_TIMEOUT)
    forget_connections()


@pytest.mark.parametrize(
    ("status", "code", "permanent"),
    [
        (400, "RequestTimeout", False),
        (400, "InvalidRequest", True),
        (401, "", True),
        (409, "", False),
        (429, "", False),
        (502, "", False),
    ],
)
def test_errors_are_classified_as_permanent_or_transient(status, code, permanent):
    from botocore.exceptions import ClientError

    error = OSError("x")
    error.__cause__ = ClientError(
        {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject"
    )
    assert is_permanent(error) == permanent
