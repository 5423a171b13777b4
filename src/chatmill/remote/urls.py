"""URLs as users give them, and the rule that tells them from local paths."""

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
"""The schemes that are read, each with the extra of chatmill that installs its library."""
READ_ONLY = ("hf", "http", "https")
"""The schemes whose objects chatmill does not write."""
_URL = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_PATH_OF_URL = re.compile(r"([a-z][a-z0-9+.-]+):/(?!/)", re.IGNORECASE)
"""What `Path` makes of a URL. `c:/x` and `a:b` are local names."""
_SIGNATURE = re.compile(r"\?(?=.*\b(sig|signature|x-amz-signature|x-goog-signature|token)=)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Url:
    """The URL of an object, or of a folder of objects; `str` of it is safe to print and to store."""

    address: str = field(repr=False)
    """All of it, also a password or a signature in it: for the library that opens it alone."""

    @property
    def scheme(self) -> str:
        return self.address.partition("://")[0].lower()

    @property
    def name(self) -> str:
        """The last part of its path."""
        return posixpath.basename(str(self).partition("://")[2].rstrip("/"))

    @property
    def parent(self) -> Url:
        return Url(posixpath.dirname(self._path().rstrip("/")) + self._query())

    @property
    def is_folder(self) -> bool:
        """Whether it ends with a slash, and so can only be a folder."""
        return self._path().endswith("/")

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self._path().rstrip('/')}/{name}{self._query()}")

    def __str__(self) -> str:
        """Without user, password and query, which may be a signature."""
        scheme, _, place = self._path().partition("://")
        host, slash, path = place.partition("/")
        user, _, server = host.rpartition("@")
        # abfs://CONTAINER@ACCOUNT has no user.
        shown_host = host if EXTRAS.get(self.scheme) == "az" and ":" not in user else server
        return f"{scheme}://{shown_host}{slash}{path}"

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"

    # Only web servers have queries: `?` and `#` are plain characters in the name of an object.

    def _path(self) -> str:
        return re.split(r"[?#]", self.address, maxsplit=1)[0] if self.scheme in ("http", "https") else self.address

    def _query(self) -> str:
        return self.address[len(self._path()) :]


def without_secrets(text: str) -> str:
    """A URL of any scheme without user, password and query."""
    return re.sub(r"^([^/]*//)[^/]*@", r"\1", re.split(r"[?#]", text, maxsplit=1)[0])


Place = Path | Url
"""Where something is: on this machine, or at a URL."""


def place(name: str | Path | Url) -> Place:
    """The local path or the URL that a user gave; `UsageError` for a scheme that is not read.

    Give a local path that looks like a URL as an absolute path.
    """
    if isinstance(name, Url):
        return name
    text = str(name)
    if (match := _PATH_OF_URL.match(text)) and match[1].lower() in {*EXTRAS, "file"}:
        if isinstance(name, Path):
            raise UsageError(f"{match[1]}:/…: a URL that was made a Path; give it as text, {match[1]}://…")
        slashes = ":///" if match[1].lower() == "file" else "://"
        meant = one_line(without_secrets(f"{match[1].lower()}{slashes}{text[match.end() :]}"), 1000)
        raise UsageError(f"{match[1]}:/…: has one slash after the scheme; did you mean {meant}?")
    if not (match := _URL.match(text)):
        return Path(name)
    scheme = match[1].lower()
    if scheme == "file":
        # `?` and `#` are plain characters in the name of a file.
        host, slash, path = text[match.end() :].partition("/")
        if host.lower() not in ("", "localhost"):
            raise UsageError(f"{one_line(text, 1000)}: a file of another machine; give file:///PATH")
        return Path(unquote(slash + path, errors="surrogateescape"))
    if scheme not in EXTRAS:
        known = ", ".join(f"{each}://" for each in ("s3", "gs", "az", "hf", "https", "file"))
        shown = one_line(without_secrets(text), 1000)
        raise UsageError(f"{shown}: {scheme}:// is not supported; use one of {known}, or a local path")
    if not text[match.end() :].strip("/"):
        raise UsageError(f"{one_line(text, 1000)}: names nothing; give {scheme}://BUCKET/NAME")
    if text.startswith("/", match.end()) and scheme != "memory":
        part = "host" if EXTRAS[scheme] == "http" else "repository" if scheme == "hf" else "bucket"
        shown = one_line(without_secrets(text), 1000)
        raise UsageError(f"{shown}: names no {part}; give {scheme}://{part.upper()}/NAME, with two slashes")
    url = Url(scheme + text[match.end(1) :])
    _check_credentials(url)
    return url


def _check_credentials(url: Url) -> None:
    """`UsageError` for a password or signature where the scheme has none: it would be part of a name, and be shown."""
    host = url.address.partition("://")[2].partition("/")[0]
    if EXTRAS[url.scheme] == "http":
        try:
            urlsplit(url.address).port  # noqa: B018 (it is checked when it is read)
        except ValueError:
            right = "write / and @ of a password as %2F and %40, and the port as a number"
            raise UsageError(f"{url.scheme}://…: is not a URL; {right}") from None
    elif "@" in host and str(url) != url.address:
        raise UsageError(f"{one_line(without_secrets(url.address), 1000)}: has a password; give it by the environment")
    elif match := _SIGNATURE.search(url.address):
        shown = one_line(url.address[: match.start()], 1000)
        raise UsageError(f"{shown}: has a signature; give it as https://, or the credentials by the environment")
