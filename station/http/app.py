"""The application: routes, authorisation and error handlers in one place."""

from __future__ import annotations

import hmac

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from shared.core.errors import MeshError, RequestError
from station.backend import ChatBackend
from station.http.chat import ChatParts, ChatRoute
from station.http.errors import (
    error_response,
    handle_http_exception,
    handle_mesh_error,
    handle_unexpected,
    json_response,
)
from station.http.metrics import CONTENT_TYPE, prometheus_text
from station.http.routing import RoutingParts, RoutingRoute

_OPEN_PATHS = frozenset({"/livez", "/readyz"})  # probes carry no secrets


def build_app(
    parts: ChatParts, *, token: str | None = None, routing: RoutingParts | None = None
) -> Starlette:
    """The ASGI application. With `token`, all but the probes need `Authorization: Bearer`; with
    `routing`, recorders may listen to what tokens choose.
    """
    views = _Views(parts)
    recorders = (
        [] if routing is None else [Route("/k3/routing", RoutingRoute(routing), methods=["GET"])]
    )
    return Starlette(
        routes=[
            Route("/v1/chat/completions", ChatRoute(parts), methods=["POST"]),
            Route("/v1/models", views.models),
            Route("/livez", views.livez),
            Route("/readyz", views.readyz),
            Route("/metrics", views.metrics),
            Route("/k3/status", views.status),
            *recorders,
        ],
        middleware=[] if token is None else [Middleware(_BearerGate, token=token)],
        exception_handlers={
            MeshError: handle_mesh_error,
            HTTPException: handle_http_exception,
            Exception: handle_unexpected,
        },
    )


class _Views:
    """The small read-only routes."""

    def __init__(self, parts: ChatParts) -> None:
        self._backend: ChatBackend = parts.backend
        self._counters = parts.counters

    async def models(self, _request: Request) -> Response:
        """The one model this server has loaded."""
        model = {
            "id": self._backend.model_name,
            "object": "model",
            "created": self._backend.created_s,
            "owned_by": "k3-pod",
        }
        return json_response({"object": "list", "data": [model]})

    async def livez(self, _request: Request) -> Response:
        """200 while work makes progress, else 503."""
        return _probe(*self._backend.liveness())

    async def readyz(self, _request: Request) -> Response:
        """200 while new requests can be served, else 503."""
        return _probe(*self._backend.readiness())

    async def metrics(self, _request: Request) -> Response:
        """Prometheus text."""
        families = [*self._backend.metrics(), *self._counters.metrics()]
        return Response(prometheus_text(families), media_type=CONTENT_TYPE)

    async def status(self, _request: Request) -> Response:
        """What `k3 status --json` prints."""
        return json_response(self._backend.status())


def _probe(ok: bool, reason: str) -> Response:
    return json_response({"ok": ok, "reason": reason}, status=200 if ok else 503)


class _BearerGate:
    """Refuses requests without the token before any route sees them."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        error = RequestError(
            "missing or wrong token; send 'Authorization: Bearer TOKEN'",
            error_code="invalid_api_key",
            http_status=401,
        )
        await error_response(error)(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        given = Headers(scope=scope).get("authorization", "").encode("latin-1")
        return hmac.compare_digest(given, self._expected)
