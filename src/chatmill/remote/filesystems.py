"""The filesystem of fsspec that opens a URL, with time limits, and without retries and remembered listings.

chatmill makes its own attempts (`chatmill.remote.objects`). Those of the libraries would multiply with them, and take
minutes where a server cannot be reached.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from chatmill.errors import UsageError, one_line
from chatmill.remote.urls import EXTRAS, Url

CONNECT_TIMEOUT = 5.0
"""Seconds in which a server must accept a connection."""
READ_TIMEOUT = 10.0
"""Seconds in which a server must send the next bytes."""
CONNECTIONS = 32
"""Requests that a process makes at once to an S3 server."""
_kept: dict[int, Any] = {}
"""The filesystems that were opened. fsspec lets go of them in a forked process; closing their connections there would
take the sockets out of the parent's event loop, which then waits for its answers in vain."""


def shown(url: Url) -> str:
    """A URL safe to print on one line."""
    return one_line(str(url), 1000)


def filesystem(url: Url) -> tuple[Any, str]:
    """The filesystem of a URL in this process, and its path there; `UsageError` if the library is missing.

    It is asked for at each call, never kept: fsspec keeps one for each process, and one that was made before a fork
    cannot be used after it.
    """
    extra = EXTRAS[url.scheme]
    # With it, gcsfs opens channels of gRPC, which cannot be used after a fork, and asks for the kind of each bucket.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        import fsspec

        kind = fsspec.get_filesystem_class(url.scheme)
        options = _options(extra, fsspec.config.conf.get(url.scheme, {}))
    except ImportError:
        raise UsageError(f"{shown(url)}: {url.scheme}:// needs a library; pip install 'chatmill[{extra}]'") from None
    if extra == "az":
        # abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/NAME names the account.
        options |= kind._get_kwargs_from_urls(url.address)
    _quiet_loggers()
    opened = kind(**options)
    if opened.async_impl:
        _kept[id(opened)] = opened
    _make_one_attempt(extra, opened)
    # Not `fsspec.core.url_to_fs`, which takes `::` in a name for several URLs.
    return opened, kind._strip_protocol(url.address)


def _options(extra: str, configured: dict[str, Any]) -> dict[str, Any]:
    """What chatmill sets, where the user's configuration of fsspec sets nothing."""
    if extra == "s3":
        given: dict[str, Any] = {
            "connect_timeout": CONNECT_TIMEOUT,
            "read_timeout": READ_TIMEOUT,
            "max_pool_connections": CONNECTIONS,
        }
        # Real S3 sends no checksum of a range; servers that send the one of the whole object would never be read.
        given["response_checksum_validation"] = "when_required"
        config = {"retries": {"total_max_attempts": 1}, **given, **configured.get("config_kwargs", {})}
        return {"use_listings_cache": False, "config_kwargs": config}
    if extra == "gs":
        return {"use_listings_cache": False, "requests_timeout": configured.get("requests_timeout", _web_timeout())}
    if extra == "az":
        limits = {"connection_timeout": int(CONNECT_TIMEOUT), "read_timeout": int(READ_TIMEOUT)}
        return {
            "use_listings_cache": False,
            **limits,
            **{name: configured[name] for name in limits if name in configured},
        }
    if extra == "http":
        # Proxies and passwords come from the environment and from ~/.netrc, as for other programs.
        client = {"timeout": _web_timeout(), "trust_env": True, **configured.get("client_kwargs", {})}
        return {"client_kwargs": client}
    return {}


def _web_timeout() -> Any:
    import aiohttp

    return aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=READ_TIMEOUT)


def _make_one_attempt(extra: str, opened: Any) -> None:
    """Turn off the retries of a library that has no option for it; a test counts the requests."""
    if extra == "s3":
        opened.retries = 1
    elif extra == "gs" and hasattr(type(opened)._request, "__wrapped__"):
        opened._request = functools.partial(type(opened)._request.__wrapped__, opened)
    elif extra == "az":
        for policy in opened.service_client._pipeline._impl_policies:
            if hasattr(policy, "total_retries"):
                policy.total_retries = 0


@functools.cache
def _quiet_loggers() -> None:
    """What a library logs about errors, some of it tracebacks, is not printed unless the program set up logging."""
    for name in ("fsspec", "s3fs", "gcsfs", "azure", "adlfs", "aiobotocore", "botocore", "asyncio"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
