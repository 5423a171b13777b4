"""The viewer's HTTP server.

The server is read-only, and accepts connections only from this machine. The server requires the packages of
`chatmill[view]`.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chatmill.errors import ChatmillError, UsageError, system_fault
from chatmill.show.connections import QUEUED, LimitedServer
from chatmill.show.viewer import PAGE, Viewer

HOST = "127.0.0.1"
INDEX_DELAY = 0.5
"""Delay in seconds before the index is built, so that the first page loads quickly."""
HOST_NAMES = {"127.0.0.1", "localhost", "[::1]"}
"""Accepted host names. Any port is accepted, because a tunnel may use another port.

A request with any other host name may be a DNS rebinding attack.
"""
HEADERS = {
    # Forbid external resources and inline scripts, and do not let other sites embed the page.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MAX_QUERY = 1000
"""Maximum length of a text parameter in characters."""
FILTERS = {"role": list, "rule": list, "source": "", "least": int, "most": int, "share_from": float, "share_to": float}
"""Query parameters that filter episodes, with their types or defaults."""
NUMBER = re.compile(r"[-+]?[0-9.]{1,18}(e[-+]?[0-9]{1,3})?", re.IGNORECASE)
"""Matches numbers in a query. Unlike Python's `int`, this pattern rejects very long numbers, `1_0` and non-ASCII
digits.
"""
Endpoint = Callable[[Request], Response]


class Index(IntegerConvertor):
    """A Starlette converter for URL path parameters: integers of at most 18 digits."""

    regex = "[0-9]{1,18}"


register_url_convertor("index", Index())


def serve(viewer: Viewer, *, port: int, ready: Callable[[str], None]) -> None:
    """Run the viewer's server until it is interrupted; call `ready` with the URL as soon as the server accepts
    connections.
    """
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, port))
        except OSError as error:
            raise UsageError(
                f"port {port} cannot be used ({error.strerror}); omit --port to use any free port"
            ) from None
        server = LimitedServer(application(viewer))
        listening.listen(QUEUED)
        # From here on, the operating system queues connections until the server accepts them.
        ready(f"http://{HOST}:{listening.getsockname()[1]}/")
        viewer.builder.start(delay=INDEX_DELAY)
        try:
            server.run(sockets=[listening])
        finally:
            viewer.builder.close()


def application(viewer: Viewer) -> ASGIApp:
    folder = resources.files("chatmill.show") / "page"
    files = {file.name: file.read_bytes() for file in folder.iterdir() if Path(file.name).suffix in MEDIA_TYPES}

    def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            raise HTTPException(404, "no such file")
        return Response(files[name], media_type=MEDIA_TYPES[Path(name).suffix])

    api: dict[str, Endpoint] = {
        "/api/about": _call(viewer.about),
        "/api/progress": _call(viewer.progress),
        "/api/{split}/episodes": _call(viewer.episodes, **FILTERS, q="", sort="", start=0, limit=PAGE),
        "/api/{split}/episode/{number:index}": _call(viewer.episode, start=0, q=""),
        "/api/{split}/episode/{number:index}/token/{token:index}": _call(viewer.explain),
        "/api/{split}/episode/{number:index}/record/{segment:index}": _call(viewer.record),
        "/api/{split}/episode/{number:index}/lines": _call(viewer.lines),
        "/api/{split}/episode/{number:index}/near": _call(viewer.near),
        "/api/{split}/episode/{number:index}/order": _call(viewer.whereabouts, seed=1337, epoch=0),
        "/api/{split}/order": _call(viewer.order, seed=1337, epoch=0, start=0),
        "/api/audit/{log:index}": _call(viewer.audit, start=0),
        "/api/audit/{log:index}/step/{step:index}": _call(viewer.step),
    }
    routes = [Route(path, endpoint) for path, endpoint in {"/": page, "/page/{name}": page, **api}.items()]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    return _guarded(app)


def _guarded(app: ASGIApp) -> ASGIApp:
    """Wrap an ASGI app: reject requests with a wrong host, method or origin, and add `HEADERS` to all responses."""
    headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        await (_refusal(Request(scope)) or app)(scope, receive, send_with_headers)

    return guarded


def _refusal(request: Request) -> Response | None:
    host = request.headers.get("host", "")
    name, _, port = host.rpartition(":")
    if (name if port.isdigit() else host).lower() not in HOST_NAMES:
        return _json({"error": "wrong host name; expected 127.0.0.1 or localhost"}, 421)
    if request.method not in ("GET", "HEAD"):
        return _json({"error": "the viewer is read-only; use GET or HEAD"}, 405)
    origin = request.headers.get("origin")
    is_foreign = request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin") or (
        origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower())
    )
    if is_foreign and request.scope["path"].startswith("/api/"):
        return _json({"error": "requests from other sites are refused"}, 403)
    return None


def _json(value: Mapping[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _call(method: Callable[..., dict[str, Any]], **parameters: Any) -> Endpoint:
    """Return an endpoint that calls `method` with the path and query parameters of a request.

    `parameters` maps each query parameter to its default value, or to its type if it has no default value.
    """

    # Starlette runs this function in a thread, because it is not a coroutine, so a slow response does not delay other
    # responses.
    def endpoint(request: Request) -> Response:
        try:
            query = {name: _parameter(request, name, default) for name, default in parameters.items()}
            return _json(method(**request.path_params, **query))
        except ChatmillError as error:
            return _json({"error": str(error)}, 400)
        except OSError as error:
            # The dataset or a record file was removed or replaced.
            return _json({"error": system_fault(error)}, 500)

    return endpoint


def _parameter(request: Request, name: str, default: Any) -> Any:
    if default is list:
        return request.query_params.getlist(name)
    text = request.query_params.get(name, "")
    if isinstance(default, str):
        return text[:MAX_QUERY]
    kind, default = (default, None) if isinstance(default, type) else (type(default), default)
    if not text:
        return default
    try:
        if not NUMBER.fullmatch(text):
            raise ValueError
        value = kind(text)
        if not -(2**62) < value < 2**62:
            raise ValueError
    except (ValueError, OverflowError):
        raise UsageError(f"{name} is not a number") from None
    return value
