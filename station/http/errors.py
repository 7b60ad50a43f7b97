"""Errors as OpenAI clients expect them: `{"error": {"message", "type", "param", "code"}}`.

Owns the mapping from our error tree to status, headers and body. Every response that is not a
success is made here, so no path can leak a stack trace or an HTML page.
"""

from __future__ import annotations

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from shared.core.errors import MeshError, RequestError, RequestRefused


def error_payload(error: MeshError) -> dict[str, object]:
    """The JSON object of `error`. `type` is the class's stable code, `code` the finer one."""
    param, code = None, error.code
    if isinstance(error, RequestError):
        param, code = error.param, error.error_code or error.code
    return {"error": {"message": str(error), "type": error.code, "param": param, "code": code}}


def error_response(error: MeshError) -> Response:
    """The HTTP response of `error`, with Retry-After or WWW-Authenticate where they belong."""
    headers: dict[str, str] = {}
    if isinstance(error, RequestRefused):
        headers["retry-after"] = str(error.retry_after_s)
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.http_status in (408, 413):
        headers["connection"] = "close"  # part of the body may still be on its way
    return json_response(error_payload(error), status=error.http_status, headers=headers)


def json_response(
    payload: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """`payload` as JSON; msgspec never writes NaN or Infinity."""
    return Response(
        msgspec.json.encode(payload), status, headers=headers, media_type="application/json"
    )


def handle_mesh_error(_request: Request, error: Exception) -> Response:
    """Starlette handler of our own errors."""
    if not isinstance(error, MeshError):  # starlette's handler type is wider than its registration
        raise TypeError("registered for MeshError only") from error
    return error_response(error)


def handle_http_exception(request: Request, error: Exception) -> Response:
    """Starlette handler of 404 and 405, in the same shape as every other error."""
    if not isinstance(error, HTTPException):
        raise TypeError("registered for HTTPException only") from error
    path = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        refusal = RequestError(
            f"{path}: method not allowed here", error_code="method_not_allowed", http_status=405
        )
    else:
        refusal = RequestError(
            f"{path}: no such endpoint; the chat endpoint is POST /v1/chat/completions",
            error_code="not_found",
            http_status=error.status_code,
        )
    response = error_response(refusal)
    response.headers.update(error.headers or {})  # Allow on a 405
    return response


def handle_unexpected(_request: Request, _error: Exception) -> Response:
    """Starlette handler of bugs: the trace goes to the log, the client gets one sentence."""
    return error_response(MeshError("internal error; the server's log has the details"))
