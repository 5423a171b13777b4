"""What an error of a library means: try again, or tell the user, in one line without credentials."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from chatmill.errors import DataError, one_line


class RemoteError(DataError):
    """An object that cannot be read or written."""


class MissingObjectError(RemoteError):
    """There is no such object."""


class ExistingObjectError(RemoteError):
    """An object that must be new exists, or is not the one that it should replace."""


PERMANENT = (
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    TypeError,
    ValueError,
    AttributeError,
    ImportError,
)
OF_CREDENTIALS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "ClientAuthenticationError",
    "CredentialRetrievalError",
    "DefaultCredentialsError",
    "RefreshError",
    "ProfileNotFound",
    "LocalTokenNotFoundError",
    "GatedRepoError",
)
"""Errors of credentials, by name: the libraries that raise them need not be installed."""
OF_ARGUMENTS = (
    "ParamValidationError",
    "InvalidURL",
    "InvalidUrlClientError",
    "NonHttpUrlClientError",
    "UnknownRegionError",
)
"""Errors of a name or setting, by name."""
OF_ADDRESS = re.compile(
    "WRONG_VERSION_NUMBER|CERTIFICATE_VERIFY_FAILED|^Invalid endpoint|^Custom endpoint .* not a valid URI"
    "|Cannot combine AUTHORIZATION header"
)
"""Errors of the address of a server, by their text: https of a server that has none, no URL, or one with a password."""
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""Environment variables with the address of a server of S3."""
TRANSIENT_STATUS = (408, 409, 425, 429)
"""The statuses below 500 after which the same request may succeed."""
TRANSIENT_CODES = ("RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "SlowDown")
"""Codes of S3 that come with status 400 and may succeed when the request is sent again."""
_SECRET_NAME = re.compile("KEY|SECRET|TOKEN|PASSWORD|SAS|CONNECTION_STRING|CREDENTIAL", re.IGNORECASE)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and the errors that it was made from."""
    while error is not None:
        yield error
        error = error.__cause__


def status_of(error: BaseException) -> int | None:
    """The HTTP status that a server answered with, from whichever library tells it."""
    for each in causes(error):
        answer: Any = getattr(each, "response", None)
        if isinstance(answer, dict):
            return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) or None
        # A body that was cut is an error of aiohttp with status 400, which no server sent.
        own = "code" if type(each).__name__ == "HttpError" else "status"
        names = () if _is_named(each, ("ClientPayloadError", "BadHttpMessage")) else (own, "status_code")
        for holder, name in ((answer, "status_code"), *((each, name) for name in names)):
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and 100 <= value < 600:
                return value
    return 403 if str(error).startswith("Forbidden:") else None


def code_of(error: BaseException) -> str:
    """The code of an error of S3 or Azure, such as NoSuchBucket; empty if there is none."""
    for each in causes(error):
        answer = getattr(each, "response", None)
        if isinstance(answer, dict):
            return str(answer.get("Error", {}).get("Code", ""))
        if code := getattr(each, "error_code", None):
            return str(getattr(code, "value", code))
    return ""


def is_missing(error: BaseException) -> bool:
    """Whether there is no object of this name; a server that cannot be reached or refuses says nothing about that."""
    if not isinstance(error, FileNotFoundError):
        return status_of(error) in (404, 410)
    cause = error.__cause__
    if cause is None or isinstance(cause, FileNotFoundError):
        return True
    # fsspec makes a FileNotFoundError of every failure of a web server.
    status = status_of(cause)
    return status in (404, 410) if status is not None else not isinstance(cause, (OSError, TimeoutError))


def is_missing_bucket(error: BaseException) -> bool:
    """Whether what should hold the object is missing: a bucket, a container or a repository."""
    return code_of(error) in ("NoSuchBucket", "ContainerNotFound") or _has_name(error, ("RepositoryNotFoundError",))


def is_precondition(error: BaseException) -> bool:
    """Whether a conditional write was refused because of what is there."""
    return isinstance(error, FileExistsError) or status_of(error) == 412 or code_of(error) == "ConditionNotMet"


def is_permanent(error: BaseException) -> bool:
    """Whether another attempt would fail in the same way: a name, permission or credential is wrong."""
    if _has_name(error, (*OF_CREDENTIALS, *OF_ARGUMENTS)) or _is_of_address(error):
        return True
    status = status_of(error)
    if status is not None and code_of(error) not in TRANSIENT_CODES:
        return status == 501 or (300 <= status < 500 and status not in TRANSIENT_STATUS)
    return isinstance(error, PERMANENT)


def advice(error: BaseException, *, is_s3: bool = False) -> str:
    """What the user can do."""
    if _is_of_address(error):
        named = next((name for name in ENDPOINTS if is_s3 and name in os.environ), "the address")
        return f"check {named}: http:// or https://, the host and its port, no password, and a certificate for https://"
    if isinstance(error, PermissionError) or status_of(error) in (401, 403) or _has_name(error, OF_CREDENTIALS):
        return "check the credentials, and that they allow this"
    if isinstance(error, NotImplementedError):
        return "download it, and give the local file"
    return "check the name and the network, and try again"


def _is_of_address(error: BaseException) -> bool:
    return any(OF_ADDRESS.search(str(each)) for each in causes(error))


def _has_name(error: BaseException, names: tuple[str, ...]) -> bool:
    return any(_is_named(each, names) for each in causes(error))


def _is_named(error: BaseException, names: tuple[str, ...]) -> bool:
    return any(kind.__name__ in names for kind in type(error).__mro__)


def reason(error: BaseException) -> str:
    """The text of an error on one line, without users and queries of URLs and secrets of the environment."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    text = str(error) or type(error).__name__
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET_NAME.search(name):
            text = text.replace(value, "…")
    text = re.sub(r"(\w+://)[^/\s]*@", r"\1", text)
    # A password in what should be a URL.
    text = re.sub(r"(^|[\s'\"(`])[^\s/@'\"`]+:[^\s/'\"`]*@", r"\1", text)
    return one_line(re.sub(r"(\w+://[^\s?'\"]*)\?[^\s'\"]*", r"\1", text), 200)
