"""Asks a pod for its status."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec

from services.pod.endpoint import PodRefused, check_answer, transport_errors


def fetch_status(client: httpx.Client) -> dict[str, Any]:
    """`GET /k3/status` as the pod said it; PodUnreachable or PodRefused."""
    with transport_errors(str(client.base_url)):
        response = client.get("/k3/status")
        check_answer(response)
    try:
        return msgspec.json.decode(response.content, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise PodRefused(f"{client.base_url} does not answer like a pod: {error}") from error
