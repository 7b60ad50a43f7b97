"""The native kernels built otherwise: under sanitisers, without this machine's flags, for ARM.

Each build runs the same cases through `tests/support/rows_driver.c` and must give the rows of the
installed module, by every instruction set that it can run.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from shared.core.record import RecordLayout, RecordOrder
from shared.core.shape import ExpertShape
from shared.kernels.native import NativeKernel
from tests.support.expert_records import activations

ROOT = Path(__file__).parents[3]
NATIVE = ROOT / "shared" / "native"
SOURCES = [
    ROOT / "tests" / "support" / "rows_driver.c",
    NATIVE / "rows.c",
    NATIVE / "pool.c",
    *sorted(NATIVE.glob("*_*.c")),
]
pytestmark = pytest.mark.timeout(180)  # sanitised builds take 10 s of a quiet processor

FLAGS = ["-std=gnu11", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi", "-Werror"]
SANITISED = ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def build(compiler: str, flags: list[str], out: Path) -> Path:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    command = [compiler, *FLAGS, *flags, f"-I{NATIVE}", *map(str, SOURCES), "-o", str(out)]
    done = subprocess.run(
        [*command, "-lm", "-pthread"], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    return out


def case(
    shape: ExpertShape, order: RecordOrder, tokens: int, threads: int, seed: int
) -> tuple[bytes, np.ndarray]:
    """A case for the driver and its rows by the installed module.

    The records are random bytes, so that scales are often damaged, and lie end to end in the case:
    unaligned, and a sanitiser sees a read behind the last one.
    """
    rng = np.random.default_rng(seed)
    layout = RecordLayout(shape, order)
    arena = rng.integers(0, 256 if seed % 2 else 0x7F, (2, layout.stride_bytes), np.uint8)
    for field in layout.fields:
        if field.dtype == "F32":
            arena[:, field.offset : field.offset + 4] = np.frombuffer(struct.pack("<f", 0.01), "u1")
        elif field.dtype == "F8_E4M3" and seed % 3:
            arena[:, field.offset : field.offset + field.length] &= 0x3F
    z = activations(tokens, shape.latent, seed)
    bank_rows = rng.integers(-1, 2, 2 * tokens).astype(np.int32)
    which = rng.integers(0, tokens, 2 * tokens).astype(np.int32)
    rows = np.empty((2 * tokens, shape.latent), np.uint16)
    NativeKernel(shape, order, isa="portable").rows(arena, bank_rows, which, z, rows)
    offset = {field.name: field.offset for field in layout.fields}
    places = [
        offset[f"{matrix}.{tensor}"]
        for tensor in ("weight", "weight_scale", "weight_scale_2")
        for matrix in ("w1", "w3", "w2")
    ]
    head = (shape.latent, shape.width, order != "row-major", layout.record_bytes, *places)
    numbers = struct.pack("<17q", *head, len(arena), len(bank_rows), tokens, threads)
    packed = arena[:, : layout.record_bytes]
    data = b"".join(part.tobytes() for part in (packed, bank_rows, which, z))
    return numbers + data, rows


def run(command: list[str], forms: set[str]) -> None:
    """Run the driver on all cases; `forms` are instruction sets that must have been among it."""
    cases = [
        case(ExpertShape(*sizes), order, tokens, threads, seed)
        for seed, (sizes, order, tokens, threads) in enumerate(
            [
                ((16, 16), "row-major", 1, 1),
                ((48, 208), "row-major", 3, 1),
                ((272, 144), "row-major", 8, 2),
                ((400, 512), "row-major", 5, 3),
                ((128, 128), "interleaved-4", 1, 1),
                ((256, 384), "interleaved-4", 7, 2),
                ((512, 256), "interleaved-4", 40, 3),
            ]
        )
    ]
    done = subprocess.run(
        command, input=b"".join(data for data, _ in cases), capture_output=True, timeout=50
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b"".join(rows.tobytes() for _, rows in cases)
    assert forms <= set(done.stderr.decode().split())


def test_address_and_undefined_sanitisers(tmp_path: Path) -> None:
    """Whatever a record holds, no byte outside an array is touched and nothing is undefined."""
    run([str(build("cc", SANITISED, tmp_path / "driver"))], {"portable"})


def test_thread_sanitiser(tmp_path: Path) -> None:
    """The pool's threads and the caller never race."""
    run([str(build("cc", ["-O0", "-fsanitize=thread"], tmp_path / "driver"))], {"portable"})


def test_arm_gives_the_same_rows(tmp_path: Path) -> None:
    """Built for ARM and run under qemu: NEON and plain C give the bits of this machine."""
    qemu = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if qemu is None:
        pytest.skip("qemu-user-static is not installed")
    driver = build("aarch64-linux-gnu-gcc", ["-O2", "-static"], tmp_path / "driver")
    run([qemu, str(driver)], {"neon", "portable"})
