"""Compiles the GPU kernel for GPUs that are not here, and says what the assembler made of it.

Owns the list of targets and of launches, with the types they are launched with. Needs triton, whose
wheel brings the assembler, and no GPU. Compiling proves types, registers and instructions; it says
nothing about speed, nor that a row is right.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.errors import TritonError

from shared.core.errors import ConfigError
from shared.core.record import RecordLayout
from shared.core.ring_layout import RingShape
from shared.core.shape import K3, ExpertShape
from shared.kernels.gpu.experts import WARPS, expert_layout
from shared.kernels.gpu.kernel import hidden_launch, order_launch, output_launch
from shared.kernels.gpu.ring import ring_constants
from shared.kernels.gpu.serve import serve_launch

# H100/H200, B200/B300, RTX PRO 6000, GB10 (DGX Spark)
CAPABILITIES: Final = (90, 100, 120, 121)
LAUNCHES: Final = {
    "order": order_launch,
    "hidden": hidden_launch,
    "output": output_launch,
    "serve": serve_launch,
}
_ASSEMBLE_S_MAX: Final = 120
_PAIRS: Final = 1024
_RING: Final = RingShape(slots=16, max_tokens=64, max_rows=1024, latent=K3.expert.latent)
_POINTERS: Final = {
    "arena": "*u8",
    "requests": "*u8",
    "replies": "*u8",
    "control": "*i64",
    "state": "*i64",
    "work": "*i32",
    "table": "*i32",
    "echo": "*i32",
    "activations": "*i16",
    "hidden": "*i16",
    "out": "*i16",
}
_NUMBERS: Final = {"n_rows": "i32", "polls_max": "i32", "kernel_id": "i32"}


@dataclass(frozen=True, slots=True)
class Compiled:
    """One launch for one GPU, or why it could not be compiled (then the rest is zero or empty)."""

    launch: str
    capability: int
    refused: str = ""
    registers: int = 0  # of one thread
    spill_bytes: int = 0  # stores and loads of one thread
    stack_bytes: int = 0
    shared_bytes: int = 0  # of one program
    cubin_bytes: int = 0
    ptx: str = ""


def compile_report(
    capabilities: tuple[int, ...] = CAPABILITIES,
    launches: tuple[str, ...] = tuple(LAUNCHES),
    shape: ExpertShape = K3.expert,
) -> list[Compiled]:
    """Compile every launch for every capability at `shape`; ring and pairs as a node would have.

    What the toolchain refuses is an entry that says so. Raises ConfigError for a capability not in
    CAPABILITIES, and under TRITON_INTERPRET=1, where nothing is compiled.
    """
    if triton.knobs.runtime.interpret:
        raise ConfigError("TRITON_INTERPRET is set, which compiles nothing: unset it")
    for capability in capabilities:
        if capability not in CAPABILITIES:  # LLVM aborts the process for a GPU it does not know
            known = ", ".join(map(str, CAPABILITIES))
            raise ConfigError(f"compute capability {capability} is not one of {known}")
    return [_compiled(name, capability, shape) for capability in capabilities for name in launches]


def constants(shape: ExpertShape) -> dict[str, Any]:
    """Every constant of every launch, by name."""
    return {
        "LAYOUT": expert_layout(RecordLayout(shape)),
        "LATENT": shape.latent,
        "WIDTH": shape.width,
        "OPERAND": tl.bfloat16,
        "PAIRS": _PAIRS,
        "RING": ring_constants(_RING),
        "TABLE": (K3.layers, K3.experts),
        "ROW_BLOCK": triton.next_power_of_2(shape.latent),
        "PTX": True,
    }


def _compiled(name: str, capability: int, shape: ExpertShape) -> Compiled:
    launch, values = LAUNCHES[name], constants(shape)
    names: list[str] = launch.arg_names
    types = {**_POINTERS, **_NUMBERS}
    signature = {argument: types.get(argument, "constexpr") for argument in names}
    source = ASTSource(
        launch,
        signature,
        {argument: values[argument] for argument in names if argument not in types},
        # what a launch finds out about its arguments: allocations are 16-byte aligned
        {(names.index(p),): [["tt.divisibility", 16]] for p in names if p in _POINTERS},
    )
    try:
        kernel = triton.compile(
            source, target=GPUTarget("cuda", capability, 32), options={"num_warps": WARPS}
        )
        said = _assemble(kernel.asm["ptx"])
    except (TritonError, RuntimeError, subprocess.SubprocessError, OSError) as error:
        return Compiled(name, capability, refused=f"{type(error).__name__}: {error}"[:500])
    return Compiled(
        name,
        capability,
        registers=_sum_of(r"Used (\d+) registers", said),
        spill_bytes=_sum_of(r"(\d+) bytes spill", said),
        stack_bytes=_sum_of(r"(\d+) bytes stack frame", said),
        shared_bytes=int(kernel.metadata.shared),
        cubin_bytes=len(kernel.asm["cubin"]),
        ptx=kernel.asm["ptx"],
    )


def _assemble(ptx: str) -> str:
    """What ptxas -v says about a kernel."""
    found = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    architecture = found[1] if found else ""
    is_blackwell = int(re.sub(r"\D", "", architecture) or 0) >= 100
    nvidia = triton.knobs.nvidia
    assembler = (nvidia.ptxas_blackwell if is_blackwell else nvidia.ptxas).path
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx, encoding="utf-8")
        return subprocess.run(  # noqa: S603 - the assembler of the triton wheel
            [assembler, "-v", f"--gpu-name={architecture}", source, "-o", Path(folder, "cubin")],
            check=True,
            capture_output=True,
            text=True,
            timeout=_ASSEMBLE_S_MAX,
        ).stderr


def _sum_of(pattern: str, text: str) -> int:
    return sum(int(found) for found in re.findall(pattern, text))
