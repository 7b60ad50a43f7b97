"""Every error a person or a peer can meet, with its stable code, exit status and HTTP status.

Owns the tree and the codes. A code is the journald field, the HTTP error type and the first word an
operator searches for, so it never changes meaning. Messages say what, where and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

EXIT_FAILED = 1
EXIT_TEMPFAIL = 75  # EX_TEMPFAIL of sysexits.h; systemd tries again later
EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h; systemd does not retry it (RestartPreventExitStatus)


class MeshError(Exception):
    """Base of all errors this project raises on purpose."""

    code: ClassVar[str] = "internal_error"
    exit_status: ClassVar[int] = EXIT_FAILED
    http_status: int = 500


class ConfigError(MeshError):
    """Settings or files that can never work until a person changes them."""

    code = "config_invalid"
    exit_status = EXIT_CONFIG


class CheckpointError(ConfigError):
    """A checkpoint that is missing, damaged, foreign or of an unknown architecture."""

    code = "checkpoint_invalid"


class BankError(ConfigError):
    """A bank file that is missing, damaged or foreign."""

    code = "bank_invalid"


class PlacementError(ConfigError):
    """A placement that is malformed or does not fit the model or the nodes."""

    code = "placement_invalid"


class TraceError(ConfigError):
    """A routing trace that is missing, empty, damaged, foreign or of another model."""

    code = "trace_invalid"


class PodError(ConfigError):
    """A pod description that is malformed, or a pod that cannot hold the model or its power."""

    code = "pod_invalid"


class DigestMismatch(ConfigError):
    """Two parts of the pod were made from different models or placements."""

    code = "digest_mismatch"


class KeyRefused(ConfigError):
    """A key that is missing, unreadable or not on the allow-list."""

    code = "key_refused"


class AddressInUse(ConfigError):
    """A listening address that another process holds."""

    code = "address_in_use"


class MemoryFloorReached(MeshError):
    """Loading a bank would leave the machine too little memory; later there may be more."""

    code = "memory_floor"
    exit_status = EXIT_TEMPFAIL

    def __init__(
        self, what: str, *, available_bytes: int, floor_bytes: int, missing_bytes: int
    ) -> None:
        """`what` names the load; `missing_bytes` is what has to be freed before it can go on."""
        super().__init__(
            f"{what}: only {available_bytes} bytes of memory are available and {floor_bytes} must "
            f"stay free: {missing_bytes} are missing: free memory, give this node fewer experts, "
            "or lower memory_floor_bytes"
        )
        self.available_bytes = available_bytes
        self.floor_bytes = floor_bytes
        self.missing_bytes = missing_bytes


class LocalProtocolError(MeshError):
    """This process broke its own rules; always a bug here."""

    code = "local_protocol_error"


class RemoteProtocolError(MeshError):
    """A peer sent bytes we refuse; the frame is dropped and counted."""

    code = "remote_protocol_error"


class LayerFailed(MeshError):
    """A layer that cannot be completed; ends its request and names the culprit."""

    code = "layer_failed"
    http_status = 502

    def __init__(
        self, message: str, *, node: str, layer: int, experts: Sequence[int], elapsed_us: int
    ) -> None:
        """`experts` are the ids still unaccounted; `elapsed_us` is counted from the dispatch."""
        listed = ", ".join(map(str, experts))
        super().__init__(
            f"{message} (node {node}, layer {layer}, experts [{listed}], after {elapsed_us} us)"
        )
        self.node = node
        self.layer = layer
        self.experts = tuple(experts)
        self.elapsed_us = elapsed_us


class DeadlineExceeded(LayerFailed):
    """A node did not answer within the layer's deadline."""

    code = "layer_deadline_exceeded"
    http_status = 504


class RowCorrupt(LayerFailed):
    """A node answered with rows that fail verification or are not finite."""

    code = "row_corrupt"


class NodeLost(LayerFailed):
    """A node went away while it held a layer's experts."""

    code = "node_lost"
    http_status = 503


class Refused(LayerFailed):
    """A node answered that it will not compute a pair."""

    code = "rows_refused"


class RequestError(MeshError):
    """A request that cannot be served as asked; `param` names the field."""

    code = "invalid_request_error"
    http_status = 400

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        error_code: str | None = None,
        http_status: int = 400,
    ) -> None:
        """`error_code` is the OpenAI `code` field, e.g. `context_length_exceeded`."""
        super().__init__(message)
        self.param = param
        self.error_code = error_code
        self.http_status = http_status


class RequestRefused(RequestError):
    """The pod is full or not ready; the client may try again after `retry_after_s`."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        """Always answered before the first byte of a stream."""
        super().__init__(message, error_code="overloaded", http_status=503)
        self.retry_after_s = retry_after_s
