"""Parse URLs, and distinguish them from local paths."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from chatmill.errors import UsageError, one_line

EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
    "hf": "hub",
    "http": "http",
    "https": "http",
    "memory": "remote",
}
"""Supported URL schemes, each with the chatmill extra that installs the required library."""
READ_ONLY = ("hf", "http", "https")
"""URL schemes from which chatmill can only read."""
_URL = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_PATH_OF_URL = re.compile(r"([a-z][a-z0-9+.-]+):/(?!/)", re.IGNORECASE)
"""Matches a URL that was converted to a `Path`, but not the local names `c:/x` and `a:b`."""
_SIGNATURE = re.compile(r"\?(?=.*\b(sig|signature|x-amz-signature|x-goog-signature|token)=)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Url:
    """The URL of a remote file or folder; `str(url)` contains no credentials, so it is safe to print and to store."""

    address: str = field(repr=False)
    """The full URL, including any password or signature; pass it only to the library that opens the URL."""

    @property
    def scheme(self) -> str:
        return self.address.partition("://")[0].lower()

    @property
    def name(self) -> str:
        """The last component of the path."""
        return posixpath.basename(str(self).partition("://")[2].rstrip("/"))

    @property
    def parent(self) -> Url:
        return Url(posixpath.dirname(self._path().rstrip("/")) + self._query())

    @property
    def is_folder(self) -> bool:
        """Whether the URL ends with a slash, which marks a folder."""
        return self._path().endswith("/")

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self._path().rstrip('/')}/{name}{self._query()}")

    def __str__(self) -> str:
        """Return the URL without the user name, the password and the query, which may contain a signature."""
        scheme, _, place = self._path().partition("://")
        host, slash, path = place.partition("/")
        user, _, server = host.rpartition("@")
        # In abfs://CONTAINER@ACCOUNT, the part before @ is not a user name.
        shown_host = host if EXTRAS.get(self.scheme) == "az" and ":" not in user else server
        return f"{scheme}://{shown_host}{slash}{path}"

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"

    # Only http(s) URLs have queries; `?` and `#` are ordinary characters in object names.

    def _path(self) -> str:
        return re.split(r"[?#]", self.address, maxsplit=1)[0] if self.scheme in ("http", "https") else self.address

    def _query(self) -> str:
        return self.address[len(self._path()) :]


def without_secrets(text: str) -> str:
    """Return a URL of any scheme without its user name, password and query."""
    return re.sub(r"^([^/]*//)[^/]*@", r"\1", re.split(r"[?#]", text, maxsplit=1)[0])


Place = Path | Url
"""A local path or a URL."""


def place(name: str | Path | Url) -> Place:
    """Parse a local path or a URL; raise `UsageError` for an unsupported scheme.

    To use a local path that looks like a URL, give it as an absolute path.
    """
    if isinstance(name, Url):
        return name
    text = str(name)
    if (match := _PATH_OF_URL.match(text)) and match[1].lower() in {*EXTRAS, "file"}:
        if isinstance(name, Path):
            raise UsageError(f"{match[1]}:/…: is a URL that was converted to a Path; pass the string {match[1]}://…")
        slashes = ":///" if match[1].lower() == "file" else "://"
        meant = one_line(without_secrets(f"{match[1].lower()}{slashes}{text[match.end() :]}"), 1000)
        raise UsageError(f"{match[1]}:/…: has one slash after the scheme; did you mean {meant}?")
    if not (match := _URL.match(text)):
        return Path(name)
    scheme = match[1].lower()
    if scheme == "file":
        # Do not parse `?` and `#`, which are ordinary characters in file names.
        host, slash, path = text[match.end() :].partition("/")
        if host.lower() not in ("", "localhost"):
            raise UsageError(f"{one_line(text, 1000)}: is a file on another machine; expected file:///PATH")
        return Path(unquote(slash + path, errors="surrogateescape"))
    if scheme not in EXTRAS:
        known = ", ".join(f"{each}://" for each in ("s3", "gs", "az", "hf", "https", "file"))
        shown = one_line(without_secrets(text), 1000)
        raise UsageError(f"{shown}: {scheme}:// is not supported; use one of {known}, or a local path")
    if not text[match.end() :].strip("/"):
        raise UsageError(f"{one_line(text, 1000)}: has no name; expected {scheme}://BUCKET/NAME")
    if text.startswith("/", match.end()) and scheme != "memory":
        part = "host" if EXTRAS[scheme] == "http" else "repository" if scheme == "hf" else "bucket"
        shown = one_line(without_secrets(text), 1000)
        raise UsageError(f"{shown}: has no {part}; expected {scheme}://{part.upper()}/NAME, with two slashes")
    url = Url(scheme + text[match.end(1) :])
    _check_credentials(url)
    return url


def _check_credentials(url: Url) -> None:
    """Raise `UsageError` if a URL contains a password or signature that its scheme does not support."""
    host = url.address.partition("://")[2].partition("/")[0]
    if EXTRAS[url.scheme] == "http":
        try:
            urlsplit(url.address).port  # noqa: B018 (reading the property checks the port)
        except ValueError:
            right = "write / and @ in a password as %2F and %40, and the port as a number"
            raise UsageError(f"{url.scheme}://…: is not a URL; {right}") from None
    elif "@" in host and str(url) != url.address:
        raise UsageError(
            f"{one_line(without_secrets(url.address), 1000)}: contains a password; set credentials in the environment"
        )
    elif match := _SIGNATURE.search(url.address):
        shown = one_line(url.address[: match.start()], 1000)
        raise UsageError(f"{shown}: contains a signature; use https://, or set credentials in the environment")
