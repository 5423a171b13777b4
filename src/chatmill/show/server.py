"""The viewer's HTTP server. It listens on this machine only and changes nothing. Needs the extra `view`."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chatmill.errors import ChatmillError, UsageError
from chatmill.show.viewer import PAGE, Viewer

HOST = "127.0.0.1"
INDEX_DELAY = 0.5
"""Seconds before the index is built, so that the first page loads undisturbed."""
HOST_NAMES = {"127.0.0.1", "localhost", "[::1]"}
"""Host names of requests that are answered, on any port, as a tunnel may use another. A request for any other name
comes from a page of another site whose name was made to resolve to this machine (DNS rebinding)."""
HEADERS = {
    # Nothing is loaded from elsewhere, there are no inline scripts, and no other page may embed this one.
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
"""Characters of a text in a query."""
FILTERS = {"role": list, "rule": list, "source": "", "least": int, "most": int, "share_from": float, "share_to": float}
"""Parameters of a query that filter episodes: their types, or their defaults."""
Endpoint = Callable[[Request], Response]


def serve(viewer: Viewer, *, port: int, ready: Callable[[str], None]) -> None:
    """Serve until interrupted; `ready` is called with the address as soon as it can be opened."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, port))
        except OSError as error:
            raise UsageError(
                f"port {port} cannot be used ({error.strerror}); leave --port out, and one is found"
            ) from None
        config = uvicorn.Config(
            application(viewer), log_level="warning", access_log=False, lifespan="off", server_header=False, ws="none"
        )
        config.load()
        listening.listen(128)
        # Connections from now on wait until the server accepts them.
        ready(f"http://{HOST}:{listening.getsockname()[1]}/")
        viewer.builder.start(delay=INDEX_DELAY)
        try:
            uvicorn.Server(config).run(sockets=[listening])
        finally:
            viewer.builder.close()


def application(viewer: Viewer) -> BaseHTTPMiddleware:
    """The page and the JSON API that it uses."""
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
        "/api/{split}/episodes": _call(viewer.episodes, **FILTERS, q="", start=0, limit=PAGE),
        "/api/{split}/episode/{number:int}": _call(viewer.episode, start=0, q=""),
        "/api/{split}/episode/{number:int}/token/{token:int}": _call(viewer.explain),
        "/api/{split}/episode/{number:int}/record/{segment:int}": _call(viewer.record),
        "/api/{split}/episode/{number:int}/order": _call(viewer.whereabouts, seed=1337, epoch=0),
        "/api/{split}/order": _call(viewer.order, seed=1337, epoch=0, start=0),
        "/api/audit/{log:int}": _call(viewer.audit, start=0),
        "/api/audit/{log:int}/step/{step:int}": _call(viewer.step),
    }
    routes = [Route(path, endpoint) for path, endpoint in {"/": page, "/page/{name}": page, **api}.items()]
    return BaseHTTPMiddleware(Starlette(routes=routes), dispatch=_guard)


async def _guard(request: Request, respond: Callable[[Request], Awaitable[Response]]) -> Response:
    """Refuse what the page never requests, and forbid the browser everything that the page does not need."""
    response = _refusal(request) or await respond(request)
    response.headers.update(HEADERS)
    return response


def _refusal(request: Request) -> Response | None:
    host = request.headers.get("host", "")
    name, _, port = host.rpartition(":")
    if (name if port.isdigit() else host).lower() not in HOST_NAMES:
        return _json({"error": "this viewer answers to 127.0.0.1 and localhost alone"}, 421)
    if request.method not in ("GET", "HEAD"):
        return _json({"error": "nothing can be changed here"}, 405)
    is_foreign = request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    if is_foreign and request.scope["path"].startswith("/api/"):
        return _json({"error": "another page may not ask"}, 403)
    return None


def _json(value: Mapping[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _call(method: Callable[..., dict[str, Any]], **parameters: Any) -> Endpoint:
    """Call a method with the parameters of the path and of the query; for these a default is given, or a type."""

    # Not a coroutine: Starlette then runs it in a thread, so that a slow answer does not delay others.
    def endpoint(request: Request) -> Response:
        try:
            query = {name: _parameter(request, name, default) for name, default in parameters.items()}
            return _json(method(**request.path_params, **query))
        except ChatmillError as error:
            return _json({"error": str(error)}, 400)

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
        value = kind(text)
        if not -(2**62) < value < 2**62:
            raise ValueError
    except (ValueError, OverflowError):
        raise UsageError(f"{name} is not a number") from None
    return value
