"""Pytest fixtures that run object stores on this machine: one server per test process, and a new bucket per test.

The fixture `s3` (moto) sets the environment variables that a user would set, so that URLs work in chatmill and in the
processes that a test starts. Fixtures with a wider scope than one test use `s3_server` and `server.in_environment()`.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import process_watch
import pytest

from chatmill.remote import filesystems
from chatmill.remote.urls import Url
from remote.fault_proxy import Proxy

PROGRAMS = Path(__file__).parent / "server_programs.py"
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
RCLONE_KEY, RCLONE_SECRET = "rclone-test-key", "rclone-test-secret"
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The public default key from Azurite's documentation."""
_numbers = itertools.count()


@contextmanager
def started(program: str, *words: str) -> Iterator[int]:
    command = [sys.executable, str(PROGRAMS), program, *words]
    environment = {name: value for name, value in os.environ.items() if name not in {*PROXIES, process_watch.MARK}}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as server:
        process_watch.SERVERS.add(server.pid)
        try:
            assert server.stdout is not None
            yield int(server.stdout.readline())
        finally:
            # Close stdin, so that the server process stops the programs that it started. If the server process were
            # killed, the programs would keep running.
            assert server.stdin is not None
            server.stdin.close()
            try:
                server.wait(timeout=20)
            finally:
                server.kill()
            process_watch.SERVERS.discard(server.pid)


def forget_connections() -> None:
    """Clear fsspec's cache, because cached file systems keep the environment variables they were created with."""
    _settings[-1] = None
    if "fsspec" not in sys.modules:
        return
    from fsspec import AbstractFileSystem

    filesystems._kept.clear()
    kinds = [AbstractFileSystem]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
        kind.clear_instance_cache()


def _forget_connections_of_others(server: Server) -> None:
    """Drop connections to other servers; keep connections to this server, because reconnecting takes 0.25 seconds."""
    if _settings[-1] != server:
        forget_connections()
    _settings[-1] = server


_settings: list[Server | None] = [None]
"""The server for which the cached file systems of fsspec were created."""
SETTINGS = ("AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR_HOST", "HF_", "FSSPEC_")
"""Prefixes of the environment variables that name servers and credentials."""


@dataclass(frozen=True)
class Server:
    port: int
    environment: Mapping[str, str]
    scheme: str = "s3"
    folder: Path | None = None
    """The folder that contains the objects as files, if the server has one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The fsspec configuration, for libraries that ignore environment variables."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def bucket(self) -> Url:
        name = f"bucket-{os.getpid()}-{next(_numbers)}"
        if self.scheme == "gs":
            body, headers = json.dumps({"name": name}).encode(), {"Content-Type": "application/json"}
            address = f"{self.endpoint}/storage/v1/b?project=test"
            urllib.request.urlopen(urllib.request.Request(address, body, headers)).close()
        elif self.folder is None and self.scheme == "s3":
            urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")).close()
        else:
            with self.in_environment():
                filesystems.filesystem(Url(f"{self.scheme}://{name}"))[0].mkdir(name)
        return Url(f"{self.scheme}://{name}")

    def behind(self, proxy: Proxy) -> Server:
        """Return the same server behind a proxy: `with s3.behind(proxy).in_environment(): ...`."""

        def through(value: str) -> str:
            return value.replace(self.endpoint, proxy.endpoint)

        return replace(self, environment={name: through(value) for name, value in self.environment.items()})

    @contextmanager
    def in_environment(self) -> Iterator[Server]:
        """Set the environment variables of this server, and unset those of all other servers."""
        with pytest.MonkeyPatch.context() as patch:
            for name in list(os.environ):
                if name.startswith(SETTINGS) or name in PROXIES:
                    patch.delenv(name)
            for name, value in self.environment.items():
                patch.setenv(name, value)
            if self.options:
                import fsspec

                patch.setitem(fsspec.config.conf, self.scheme, dict(self.options))
            if self.scheme == "hf":
                import huggingface_hub.constants

                constants, endpoint = huggingface_hub.constants, self.environment["HF_ENDPOINT"]
                # huggingface_hub reads the environment only when it is imported.
                template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
                patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
                patch.setattr(constants, "ENDPOINT", endpoint)
            outer = _settings[-1]
            _forget_connections_of_others(self)
            yield self
        if outer is not None:
            _forget_connections_of_others(outer)


def s3_environment(endpoint: str, key: str = "testing", secret: str = "testing") -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Server]:
    with started("moto") as port:
        yield Server(port, s3_environment(f"http://127.0.0.1:{port}"))


@pytest.fixture
def s3(s3_server: Server) -> Iterator[Server]:
    """Set the environment so that URLs of moto's S3 server work: `s3.bucket() / "chat.jsonl"`."""
    with s3_server.in_environment():
        yield s3_server


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run `rclone serve s3`, which checks credentials; its objects are files in `folder`."""
    folder = tmp_path_factory.mktemp("rclone")
    with started("rclone", str(folder), RCLONE_KEY, RCLONE_SECRET) as port:
        yield Server(port, s3_environment(f"http://127.0.0.1:{port}", RCLONE_KEY, RCLONE_SECRET), folder=folder)


@pytest.fixture
def rclone(rclone_server: Server) -> Iterator[Server]:
    with rclone_server.in_environment():
        yield rclone_server


@pytest.fixture(scope="session")
def gs_server() -> Iterator[Server]:
    with started("gcs") as port:
        environment = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}", "FSSPEC_GS_TOKEN": "anon"}
        yield Server(port, environment, "gs", options={"token": "anon"})


@pytest.fixture
def gs(gs_server: Server) -> Iterator[Server]:
    with gs_server.in_environment():
        yield gs_server


@pytest.fixture(scope="session")
def hf_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hub")
    with started("hub", str(folder)) as port:
        environment = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_testing"}
        yield Server(port, environment, "hf", folder)


@pytest.fixture
def hf(hf_server: Server) -> Iterator[Server]:
    """Return the Hub server, which serves `hf.folder / "org/name/chat.jsonl"` as hf://datasets/org/name/chat.jsonl."""
    with hf_server.in_environment():
        yield hf_server


@pytest.fixture(scope="session")
def web_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("web")
    with started("web", str(folder)) as port:
        yield Server(port, {}, "http", folder)


@pytest.fixture
def web(web_server: Server) -> Iterator[Server]:
    """Return a web server that serves `web.folder / NAME` at the paths listed in `server_programs.web`."""
    with web_server.in_environment():
        yield web_server


@pytest.fixture(scope="session")
def az_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run Azurite, Microsoft's Azure Blob Storage emulator, if it is installed (`npm install -g azurite`)."""
    if (program := shutil.which("azurite-blob")) is None:
        pytest.skip("azurite-blob is not installed")
    with started("azurite", program, str(tmp_path_factory.mktemp("azurite"))) as port:
        address = f"BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1"
        account = f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={AZURITE_KEY};{address};"
        yield Server(port, {"AZURE_STORAGE_CONNECTION_STRING": account}, "az")


@pytest.fixture
def az(az_server: Server) -> Iterator[Server]:
    with az_server.in_environment():
        yield az_server
