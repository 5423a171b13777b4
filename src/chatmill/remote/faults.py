"""Classify errors from storage libraries as transient or permanent, and describe them without credentials."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from chatmill.errors import DataError, one_line


class RemoteError(DataError):
    """Raised if an object cannot be read or written."""


class MissingObjectError(RemoteError):
    """Raised if a requested object does not exist."""


class ExistingObjectError(RemoteError):
    """Raised by a conditional write if the object already exists or has a different version."""


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
"""Class names of credential errors; the classes are not imported, because their libraries may not be installed."""
OF_ARGUMENTS = (
    "ParamValidationError",
    "InvalidURL",
    "InvalidUrlClientError",
    "NonHttpUrlClientError",
    "UnknownRegionError",
)
"""Class names of errors caused by an invalid object name or setting."""
OF_ADDRESS = re.compile(
    "WRONG_VERSION_NUMBER|CERTIFICATE_VERIFY_FAILED|^Invalid endpoint|^Custom endpoint .* not a valid URI"
    "|Cannot combine AUTHORIZATION header"
)
"""Matches errors caused by a wrong address, such as https to a server without TLS, or a URL with a password."""
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""Environment variables that set the address of an S3 server."""
TRANSIENT_STATUS = (408, 409, 425, 429)
"""HTTP statuses below 500 after which a retry may succeed."""
TRANSIENT_CODES = ("RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "SlowDown")
"""Codes of S3 errors with status 400 after which a retry may succeed."""
_SECRET_NAME = re.compile("KEY|SECRET|TOKEN|PASSWORD|SAS|CONNECTION_STRING|CREDENTIAL", re.IGNORECASE)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, its `__cause__`, the cause of that exception, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an exception from a storage library, or None if the exception has no status."""
    for each in causes(error):
        answer: Any = getattr(each, "response", None)
        if isinstance(answer, dict):
            return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) or None
        # aiohttp reports a truncated body as status 400, although the server did not send this status.
        own = "code" if type(each).__name__ == "HttpError" else "status"
        names = () if _is_named(each, ("ClientPayloadError", "BadHttpMessage")) else (own, "status_code")
        for holder, name in ((answer, "status_code"), *((each, name) for name in names)):
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and 100 <= value < 600:
                return value
    return 403 if str(error).startswith("Forbidden:") else None


def code_of(error: BaseException) -> str:
    """Return the error code of an S3 or Azure exception, such as NoSuchBucket, or an empty string if it has none."""
    for each in causes(error):
        answer = getattr(each, "response", None)
        if isinstance(answer, dict):
            return str(answer.get("Error", {}).get("Code", ""))
        if code := getattr(each, "error_code", None):
            return str(getattr(code, "value", code))
    return ""


def is_missing(error: BaseException) -> bool:
    """Return whether an error means that the object does not exist."""
    if not isinstance(error, FileNotFoundError):
        return status_of(error) in (404, 410)
    cause = error.__cause__
    if cause is None or isinstance(cause, FileNotFoundError):
        return True
    # fsspec converts every error from a web server to FileNotFoundError, so check the cause instead.
    status = status_of(cause)
    return status in (404, 410) if status is not None else not isinstance(cause, (OSError, TimeoutError))


def is_missing_bucket(error: BaseException) -> bool:
    """Return whether an error means that the object's bucket, container or repository does not exist."""
    return code_of(error) in ("NoSuchBucket", "ContainerNotFound") or _has_name(error, ("RepositoryNotFoundError",))


def is_precondition(error: BaseException) -> bool:
    """Return whether an error means that the precondition of a conditional write failed."""
    return isinstance(error, FileExistsError) or status_of(error) == 412 or code_of(error) == "ConditionNotMet"


def is_permanent(error: BaseException) -> bool:
    """Return whether a retry would fail with the same error, for example because a name or credential is wrong."""
    if _has_name(error, (*OF_CREDENTIALS, *OF_ARGUMENTS)) or _is_of_address(error):
        return True
    status = status_of(error)
    if status is not None and code_of(error) not in TRANSIENT_CODES:
        return status == 501 or (300 <= status < 500 and status not in TRANSIENT_STATUS)
    return isinstance(error, PERMANENT)


def advice(error: BaseException, *, is_s3: bool = False) -> str:
    if _is_of_address(error):
        named = next((name for name in ENDPOINTS if is_s3 and name in os.environ), "the address")
        return f"check {named}: use http:// or https:// with a valid certificate, a host and port, and no password"
    if isinstance(error, PermissionError) or status_of(error) in (401, 403) or _has_name(error, OF_CREDENTIALS):
        return "check the credentials and their permissions"
    if isinstance(error, NotImplementedError):
        return "download the file, and use the local copy"
    return "check the name and the network, and try again"


def _is_of_address(error: BaseException) -> bool:
    return any(OF_ADDRESS.search(str(each)) for each in causes(error))


def _has_name(error: BaseException, names: tuple[str, ...]) -> bool:
    return any(_is_named(each, names) for each in causes(error))


def _is_named(error: BaseException, names: tuple[str, ...]) -> bool:
    return any(kind.__name__ in names for kind in type(error).__mro__)


def reason(error: BaseException) -> str:
    """Return the message of an exception on one line, without secrets from URLs and environment variables."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    text = str(error) or type(error).__name__
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET_NAME.search(name):
            text = text.replace(value, "…")
    text = re.sub(r"(\w+://)[^/\s]*@", r"\1", text)
    # Remove a password from text that resembles a URL but lacks a scheme.
    text = re.sub(r"(^|[\s'\"(`])[^\s/@'\"`]+:[^\s/'\"`]*@", r"\1", text)
    return one_line(re.sub(r"(\w+://[^\s?'\"]*)\?[^\s'\"]*", r"\1", text), 200)
