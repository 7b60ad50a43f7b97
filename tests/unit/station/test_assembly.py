"""The Station's parts, built from settings and a synthetic checkpoint on disk."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

import numpy as np
import structlog

from services.synth.sizes import SynthSizes
from services.synth.writer import write
from shared.core import placement as placements
from shared.core.placement import balanced
from shared.kernels.codecs import bf16_bits
from shared.kernels.native import NativeKernel
from station.assembly import Core, build_core
from station.config import StationConfig
from station.model.checkpoint import Checkpoint

SIZES = SynthSizes(layers=2, experts=4, top_k=2, latent=256, width=384)


def core_of(root: Path, threads: int) -> Core:
    """All experts in the Station's own tier."""
    settings = StationConfig(
        checkpoint=str(root / "model"),
        placement=str(root / "placement.json"),
        kernel_threads=threads,
    )
    return build_core(settings, structlog.get_logger())


def test_kernel_threads_reach_the_stations_kernel(tmp_path: Path) -> None:
    """Its own tier computes the same rows with three threads as with one."""
    write(tmp_path / "model", SIZES, 1)
    vocabulary = [f"{b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)]
    (tmp_path / "model" / "tiktoken.model").write_text("".join(vocabulary))
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        shape = checkpoint.config.shape
        placement = balanced(checkpoint.digest, shape, [("hbm", "hbm", 1.0)])
    (tmp_path / "placement.json").write_bytes(placements.encode(placement))
    z = bf16_bits(np.random.default_rng(1).normal(size=(3, SIZES.latent)))
    experts, tokens = np.arange(4), np.array([0, 1, 2, 0])
    found = []
    for threads in (1, 3):
        core = core_of(tmp_path, threads)
        assert isinstance(core.kernel, NativeKernel)
        assert core.kernel.threads == threads
        found.append(core.places.local[0].rows(1, experts, tokens, z))
        core.fabric.close()
        core.checkpoint.close()
    assert found[0].any(axis=1).all()
    assert np.array_equal(*found)
