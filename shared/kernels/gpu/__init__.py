"""The GPU kernel: Triton reads NVFP4 records in place and computes all pairs of a dispatch.

Not yet run on a GPU: checked in Triton's interpreter and compiled for four GPUs, that is all.
Owns the way in that does not import torch: CPU nodes never import the other modules of this folder.
"""

from __future__ import annotations

import importlib
from typing import Any, Final, cast

from shared.core.errors import ConfigError
from shared.core.record import RecordOrder
from shared.core.ring_layout import RingShape
from shared.core.shape import ExpertShape
from shared.kernels.expert import ExpertKernel

_EXPERTS: Final = "shared.kernels.gpu.experts"
_RING: Final = "shared.kernels.gpu.ring"


def make_gpu_kernel(shape: ExpertShape, order: RecordOrder = "row-major") -> ExpertKernel:
    """The kernel "gpu" for records of this shape.

    Raises ConfigError where torch, triton or a GPU is missing, naming the remedy, and
    LocalProtocolError for an order other than row-major.
    """
    experts = _load(_EXPERTS)
    if (missing := experts.why_unavailable()) is not None:
        raise ConfigError(f"kernel gpu cannot run here: {missing}, or use kernel int16")
    return cast(ExpertKernel, experts.GpuKernel(shape, order))


def gpu_available() -> bool:
    """Whether make_gpu_kernel would find torch, triton and a GPU. Slow: it imports torch."""
    try:
        return _load(_EXPERTS).why_unavailable() is None
    except ConfigError:
        return False


def make_gpu_ring(kernel: ExpertKernel, shape: RingShape, **parts: Any) -> Any:
    """A GpuRing (module `ring`, with its `parts` and errors): `kernel` as one launch for a ring."""
    return _load(_RING).GpuRing(kernel, shape, **parts)


def _load(module: str) -> Any:
    # by name, so that importing this package, as CPU nodes do, can never load torch
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"kernel gpu needs torch and triton ({error}): run `pip install 'k3-pod[gpu]'`, "
            "or use kernel int16"
        ) from error
