"""Which kernel serves on this machine."""

from __future__ import annotations

from shared.core.errors import ConfigError
from shared.core.record import RecordOrder
from shared.core.shape import ExpertShape
from shared.kernels.expert import ExpertKernel
from shared.kernels.reference import ReferenceKernel


def select_kernel(
    shape: ExpertShape, name: str = "auto", order: RecordOrder = "row-major"
) -> ExpertKernel:
    """Make the kernel `name` for records of `order`: "cpu" (native), "reference" (slow) or "auto".

    "auto" is "cpu" where the native module was built, else "reference": look at the kernel's name.
    Raises ConfigError for an unknown name, or for "cpu" without the native module.
    """
    if name not in ("auto", "cpu", "reference"):
        raise ConfigError(f"kernel {name!r} is not known: use auto, cpu or reference")
    if name != "reference":
        try:
            from shared.kernels.cpu import CpuKernel  # the native module may not be built

            return CpuKernel(shape, order)
        except ImportError as error:
            if name == "cpu":
                raise ConfigError(
                    f"kernel cpu needs the native module, which was not built here ({error}): "
                    "install a C compiler and run `pip install .` again, or use kernel reference"
                ) from error
    return ReferenceKernel(shape, order)
