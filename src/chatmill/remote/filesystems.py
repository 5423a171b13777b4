"""Open the fsspec filesystem for a URL, with timeouts but without retries or cached listings.

chatmill retries requests itself (`chatmill.remote.objects`). Retries in the storage libraries would multiply the number
of attempts, and take minutes if a server is unreachable.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from chatmill.errors import UsageError, one_line
from chatmill.remote.urls import EXTRAS, Url

CONNECT_TIMEOUT = 5.0
"""Maximum time in seconds until a server accepts a connection."""
READ_TIMEOUT = 10.0
"""Maximum time in seconds until a server sends the next bytes."""
CONNECTIONS = 32
"""Maximum number of concurrent connections from a process to an S3 server."""
_kept: dict[int, Any] = {}
"""Filesystems that are never closed, because a forked process must not close connections that its parent still uses."""


def shown(url: Url) -> str:
    """Return a URL as text that is safe to print on one line."""
    return one_line(str(url), 1000)


def filesystem(url: Url) -> tuple[Any, str]:
    """Return the fsspec filesystem for a URL and the path in the filesystem.

    Raise `UsageError` if a required library is missing. Call this function for every request, because a forked process
    cannot use the filesystem of its parent. fsspec caches one filesystem per process.
    """
    extra = EXTRAS[url.scheme]
    # Keep gcsfs from requesting the type of each bucket and from opening gRPC channels, which break after a fork.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        import fsspec

        kind = fsspec.get_filesystem_class(url.scheme)
        options = _options(extra, fsspec.config.conf.get(url.scheme, {}))
    except ImportError:
        raise UsageError(
            f"{shown(url)}: {url.scheme}:// needs a library; run pip install 'chatmill[{extra}]'"
        ) from None
    if extra == "az":
        # Take the account from URLs such as abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/NAME.
        options |= kind._get_kwargs_from_urls(url.address)
    _quiet_loggers()
    opened = kind(**options)
    if opened.async_impl:
        _kept[id(opened)] = opened
    _make_one_attempt(extra, opened)
    # `fsspec.core.url_to_fs` would interpret `::` in a name as several URLs.
    return opened, kind._strip_protocol(url.address)


def _options(extra: str, configured: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a filesystem; values in `configured`, the user's fsspec configuration, take precedence."""
    if extra == "s3":
        given: dict[str, Any] = {
            "connect_timeout": CONNECT_TIMEOUT,
            "read_timeout": READ_TIMEOUT,
            "max_pool_connections": CONNECTIONS,
        }
        # Do not validate checksums of byte ranges: some servers send the checksum of the whole object instead.
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
        # Read proxies from the environment and passwords from ~/.netrc.
        client = {"timeout": _web_timeout(), "trust_env": True, **configured.get("client_kwargs", {})}
        return {"client_kwargs": client}
    return {}


def _web_timeout() -> Any:
    import aiohttp

    return aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=READ_TIMEOUT)


def _make_one_attempt(extra: str, opened: Any) -> None:
    """Disable retries in storage libraries that offer no option to disable them."""
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
    """Hide errors that storage libraries log, unless the program has configured logging."""
    for name in ("fsspec", "s3fs", "gcsfs", "azure", "adlfs", "aiobotocore", "botocore", "asyncio"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
