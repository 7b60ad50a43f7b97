"""Host memory that a GPU reads and writes in place, as torch tensors.

Owns registration with the driver and the difference between a GPU and Triton's interpreter. Must
not know records or rings.
"""

from __future__ import annotations

import mmap
import warnings
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import triton

from shared.core.errors import ConfigError, LocalProtocolError

INTERPRETED: Final = bool(triton.knobs.runtime.interpret)  # TRITON_INTERPRET=1 before the import
_MAPPED_PORTABLE: Final = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped
_READ_ONLY: Final = 8  # cudaHostRegisterReadOnly
_ALREADY_REGISTERED: Final = 712  # cudaErrorHostMemoryAlreadyRegistered


def device() -> torch.device:
    """Where buffers of the kernel live: the current GPU, or the CPU under the interpreter."""
    return torch.device("cpu" if INTERPRETED else "cuda")


def tensor_of(array: npt.NDArray[Any]) -> torch.Tensor:
    """A tensor over the same memory, which no GPU can reach yet; dtypes torch knows."""
    with warnings.catch_warnings():
        # a read-only arena is what the kernel wants: it only loads from it
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def shared_with_gpu(array: npt.NDArray[np.uint8]) -> torch.Tensor:
    """A tensor over host memory that the GPU reads, and writes if it is writable, in place.

    uint8, C-contiguous, from the start of a page, because the driver pins whole pages: until the
    process ends or unshare is called. Raises LocalProtocolError for other memory, ConfigError when
    the driver refuses, usually because too little memory may be locked.
    """
    if array.ctypes.data % mmap.PAGESIZE:
        raise LocalProtocolError(
            f"memory at {array.ctypes.data:#x} does not start a page of {mmap.PAGESIZE} bytes, so "
            "it cannot be shared with a GPU: allocate it with mmap"
        )
    tensor = tensor_of(array)
    if not INTERPRETED:
        flags = _MAPPED_PORTABLE | (0 if array.flags.writeable else _READ_ONLY)
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(tensor.data_ptr(), array.nbytes, flags)
        if int(status) not in (0, _ALREADY_REGISTERED):
            raise ConfigError(
                f"{array.nbytes} bytes of host memory cannot be registered with the GPU "
                f"(CUDA error {int(status)}): raise the locked memory limit (LimitMEMLOCK), or "
                "keep the arena in device memory"
            )
    return tensor


def unshare(tensor: torch.Tensor) -> None:
    """Undo shared_with_gpu; no launch that uses the memory may be running."""
    if not INTERPRETED:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(tensor.data_ptr())
