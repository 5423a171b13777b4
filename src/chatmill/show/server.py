"""The viewer's server: this machine alone, reading alone. Needs the extra `view`."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chatmill.errors import ChatmillError, UsageError
from chatmill.show.viewer import PAGE, Viewer, filter_from

HOST = "127.0.0.1"
FIRST_PAGE = 0.5
"""Seconds that the first page has for itself, before the index is begun."""
NAMES = {"127.0.0.1", "localhost", "[::1]"}
"""What a browser on this machine calls it. Any other name in a request is a page of a stranger that was made to
lead here; through a tunnel the port may be another one."""
HEADERS = {
    # Nothing is loaded from elsewhere, no script stands in the page, and no page may hold this one.
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
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def serve(viewer: Viewer, *, port: int, ready: Callable[[str], None]) -> None:
    """Answer on this machine until it is stopped; `ready` is told the address as soon as it can be opened."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, port))
        except OSError as error:
            raise UsageError(
                f"port {port} cannot be used ({error.strerror}); leave --port out, and one is found"
            ) from None
        listening.listen(128)
        config = uvicorn.Config(
            application(viewer), log_level="warning", access_log=False, lifespan="off", server_header=False, ws="none"
        )
        server = _ViewerServer(config, lambda: ready(f"http://{HOST}:{listening.getsockname()[1]}/"))
        viewer.builder.start(pause=FIRST_PAGE)
        try:
            server.run(sockets=[listening])
        finally:
            viewer.builder.close()


class _ViewerServer(uvicorn.Server):
    """Uvicorn, which tells when it answers."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


def application(viewer: Viewer) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """The page and the questions it may ask."""
    files = _page_files()

    def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            raise HTTPException(404, "no such file")
        return Response(files[name], media_type=KINDS[Path(name).suffix])

    def answer(question: Callable[[Request], dict[str, Any]]) -> Callable[[Request], Response]:
        def respond(request: Request) -> Response:
            try:
                return _json(question(request))
            except ChatmillError as error:
                return _json({"error": str(error)}, 400)

        return respond

    # Starlette runs plain functions in threads of their own, so that a long answer holds up no other one.
    questions: dict[str, Callable[[Request], dict[str, Any]]] = {
        "/api/about": lambda asked: viewer.about(),
        "/api/progress": lambda asked: viewer.progress(),
        "/api/{split}/episodes": lambda asked: _episodes(viewer, asked),
        "/api/{split}/episode/{number:int}": lambda asked: viewer.episode(
            *_episode(asked), _number(asked, "start", 0), _text(asked, "q")
        ),
        "/api/{split}/episode/{number:int}/token/{token:int}": lambda asked: viewer.explain(
            *_episode(asked), asked.path_params["token"]
        ),
        "/api/{split}/episode/{number:int}/record/{segment:int}": lambda asked: viewer.record(
            *_episode(asked), asked.path_params["segment"]
        ),
        "/api/{split}/episode/{number:int}/order": lambda asked: viewer.whereabouts(
            *_episode(asked), _number(asked, "seed", 1337), _number(asked, "epoch", 0)
        ),
        "/api/{split}/order": lambda asked: viewer.order(
            _split(asked), _number(asked, "seed", 1337), _number(asked, "epoch", 0), _number(asked, "start", 0)
        ),
        "/api/audit/{log:int}": lambda asked: viewer.audit(asked.path_params["log"], _number(asked, "start", 0)),
        "/api/audit/{log:int}/step/{step:int}": lambda asked: viewer.step(
            asked.path_params["log"], asked.path_params["step"]
        ),
    }
    routes = [Route("/", page), Route("/page/{name}", page)]
    routes += [Route(path, answer(question)) for path, question in questions.items()]
    return guarded(Starlette(routes=routes))


def guarded(app: Any) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """Refuse what no page of ours would ask, and forbid a browser all that ours does not need."""

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        refusal = _refusal(scope)
        await (app if refusal is None else refusal)(scope, receive, with_headers)

    return respond


def _refusal(scope: Scope) -> Response | None:
    headers: Mapping[bytes, bytes] = dict(scope.get("headers", ()))
    name, _, port = headers.get(b"host", b"").decode("latin-1").rpartition(":")
    host = name if port.isdigit() else headers.get(b"host", b"").decode("latin-1")
    if host.lower() not in NAMES:
        return _json({"error": "this viewer answers to 127.0.0.1 and localhost alone"}, 421)
    if scope["method"] not in ("GET", "HEAD"):
        return _json({"error": "nothing can be changed here"}, 405)
    if scope["path"].startswith("/api/") and headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        return _json({"error": "another page may not ask"}, 403)
    return None


def _page_files() -> dict[str, bytes]:
    """The files of the page, all of them small, from the package."""
    folder = resources.files("chatmill.show") / "page"
    return {file.name: file.read_bytes() for file in folder.iterdir() if Path(file.name).suffix in KINDS}


def _json(value: Mapping[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


# What requests ask for.


def _episodes(viewer: Viewer, asked: Request) -> dict[str, Any]:
    split, asked_for = _split(asked), asked.query_params
    wanted = filter_from(
        roles=asked_for.getlist("role"),
        rules=asked_for.getlist("rule"),
        source=_text(asked, "source"),
        sources=viewer.sources(split),
        least=_bound(asked, "least", int),
        most=_bound(asked, "most", int),
        share_from=_bound(asked, "share_from", float),
        share_to=_bound(asked, "share_to", float),
    )
    return viewer.episodes(split, wanted, _text(asked, "q"), _number(asked, "start", 0), _number(asked, "limit", PAGE))


def _split(asked: Request) -> str:
    return str(asked.path_params["split"])


def _episode(asked: Request) -> tuple[str, int]:
    return _split(asked), int(asked.path_params["number"])


def _text(asked: Request, name: str) -> str:
    return asked.query_params.get(name, "")[:1000]


def _number(asked: Request, name: str, default: int) -> int:
    found = _bound(asked, name, int)
    return default if found is None else int(found)


def _bound(asked: Request, name: str, kind: type[int] | type[float]) -> Any:
    text = asked.query_params.get(name, "")
    if not text:
        return None
    try:
        value = kind(text)
        if not -(2**62) < value < 2**62:
            raise ValueError
    except (ValueError, OverflowError):
        raise UsageError(f"{name} is not a number") from None
    return value
