"""The routes."""

from __future__ import annotations

from collections.abc import Callable

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from ingress.catalogue import shown
from ingress.chat import parse_chat
from ingress.completions import parse_completions
from ingress.edge import Edge
from ingress.gateway import Gateway
from ingress.serve import Endpoint

Readiness = Callable[[], list[str]]
"""what is missing before calls can be served; empty = ready"""


def build_app(
    gateway: Gateway, readiness: Readiness, refresh_metrics: Callable[[], None], new_id: Callable[[], str]
) -> ASGIApp:
    """The whole HTTP surface. `refresh_metrics` sets the gauges that are read when scraped."""

    async def health(request: Request) -> Response:
        request.state.route = "/health"
        return _json({"status": "ok"})

    async def readyz(request: Request) -> Response:
        request.state.route = "/readyz"
        missing = ["this process is shutting down"] if gateway.draining else readiness()
        return _json({"status": "unready" if missing else "ready", "missing": missing}, 503 if missing else 200)

    async def metrics(request: Request) -> Response:
        request.state.route = "/metrics"
        refresh_metrics()
        return Response(gateway.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(request: Request) -> Response:
        request.state.route = "/v1/models"
        credential = gateway.authenticate(request.headers)
        return _json({"object": "list", "data": [shown(model) for model in gateway.models(credential)]})

    async def model(request: Request) -> Response:
        request.state.route = "/v1/models/{id}"
        credential = gateway.authenticate(request.headers)
        return _json(shown(gateway.model(request.path_params["name"], credential)))

    router = Router(
        routes=[
            Route("/health", health),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            _post("/v1/chat/completions", Endpoint(gateway, parse_chat, "/v1/chat/completions")),
            _post("/v1/completions", Endpoint(gateway, parse_completions, "/v1/completions")),
        ],
        redirect_slashes=False,
    )
    return Edge(router, gateway.metrics, new_id, lambda: gateway.draining)


def _post(path: str, endpoint: Endpoint) -> Route:
    return Route(path, endpoint, methods=["POST"])


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
