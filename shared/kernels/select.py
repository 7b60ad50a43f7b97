"""Which kernel serves on this machine: the registry of kernels by name.

Owns what each name means and the choice of "auto". Must not know nodes or leases: a kernel id
travels in both, and the Station refuses a node whose id is not its own.

"auto" is "int16" wherever the native module was built. A pod needs one kernel id for all of its
machines, and each machine must find it alone: "int16" is the fastest that gives the same bits on
every processor, so x86 of any age and ARM share a pod without a setting. A pod whose machines all
have a fast `vdpbf16ps` may be set to "bf16", at every node and at the Station.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal, TypeAlias, get_args

import msgspec

from shared.core.errors import ConfigError
from shared.core.record import RecordOrder
from shared.core.shape import ExpertShape
from shared.kernels.expert import ExpertKernel
from shared.kernels.gpu import make_gpu_kernel
from shared.kernels.reference import ReferenceKernel

KernelName: TypeAlias = Literal["auto", "int16", "bf16", "gpu", "reference"]
KernelThreads: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=64)]
NAMES: Final[tuple[str, ...]] = get_args(KernelName)


def select_kernel(
    shape: ExpertShape,
    name: str = "auto",
    order: RecordOrder = "row-major",
    *,
    threads: int = 1,
    isa: str = "auto",
    cpus: Sequence[int] = (),
    spin_us: int = 0,
) -> ExpertKernel:
    """Make the kernel `name` for records of `order`.

    "int16" and "bf16" are native (see native.py, also for threads, isa, cpus and spin_us, which the
    others have no use for); "gpu" is Triton's, imports torch, and was not run on a GPU yet;
    "reference" is numpy, hundreds of times slower; "auto" is "int16" where the native module was
    built, else "reference", and never "gpu": look at the kernel's name.
    Raises ConfigError for an unknown name, or for a kernel that cannot run here.
    """
    if name not in NAMES:
        raise ConfigError(
            f"kernel {name!r} is not known: use {', '.join(NAMES[:-1])} or {NAMES[-1]}"
        )
    if name == "reference":
        return ReferenceKernel(shape, order)
    if name == "gpu":
        return make_gpu_kernel(shape, order)
    try:
        # the native module may not be built
        from shared.kernels.native import NativeKernel
    except ImportError as error:
        if name == "auto":
            return ReferenceKernel(shape, order)
        raise ConfigError(
            f"kernel {name} needs the native module, which was not built here ({error}): "
            "install a C compiler and run `pip install .` again, or use kernel reference"
        ) from error
    return NativeKernel(
        shape,
        order,
        name="int16" if name == "auto" else name,
        isa=isa,
        threads=threads,
        cpus=cpus,
        spin_us=spin_us,
    )
