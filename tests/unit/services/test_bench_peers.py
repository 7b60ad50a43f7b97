"""The peers of `k3 bench kernel`: their arithmetic is right, and what is missing is said."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from services.bench.kernel_bench import KernelBench
from services.bench.kernel_records import (
    error_of,
    expected_rows,
    synthetic_activations,
    synthetic_record,
)
from services.bench.peers import ggml
from services.bench.peers.ggml_rows import GgmlRows, converted, stride_bytes
from services.bench.peers.torch_rows import TorchRows
from shared.core.errors import ConfigError
from shared.core.record import RecordLayout
from shared.core.shape import K3, ExpertShape
from shared.kernels.codecs import bf16_float, nvfp4_decode
from tests.support.expert_records import tensor

SHAPE = ExpertShape(latent=192, width=128)
INSIDE = f"llama_cpp_python-{ggml.VERSION}/vendor/llama.cpp/ggml"


def test_a_converted_record_holds_the_same_weights() -> None:
    """Blocks of 64 taken apart as ggml does: low nibbles are the first half of each 16."""
    record = synthetic_record(SHAPE, 1)
    layout = RecordLayout(SHAPE)
    blocks = converted(record, SHAPE)
    count = SHAPE.width * SHAPE.latent // 64
    first = blocks[: 36 * count].reshape(count, 36)
    groups = first[:, 4:].reshape(count, 4, 8)
    codes = np.concatenate([groups & 15, groups >> 4], axis=2).reshape(SHAPE.width, SHAPE.latent)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    scale = first[:, :4].reshape(SHAPE.width, SHAPE.latent // 16)
    found = nvfp4_decode(packed, np.ascontiguousarray(scale), np.float32(1))

    weight = tensor(layout, record, "w1.weight").reshape(SHAPE.width, -1)
    scales = tensor(layout, record, "w1.weight_scale").reshape(SHAPE.width, -1)
    assert np.array_equal(found, nvfp4_decode(weight, scales, np.float32(1)))
    names = [f"{matrix}.weight_scale_2" for matrix in ("w1", "w3", "w2")]
    wanted = np.concatenate([tensor(layout, record, name) for name in names])
    assert np.array_equal(blocks[108 * count : 108 * count + 12], wanted)
    assert stride_bytes(K3.expert) == RecordLayout(K3.expert).stride_bytes


@pytest.mark.parametrize("variant", ["native", "avx2"])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_ggml_are_those_of_its_definition(variant: ggml.Variant, threads: int) -> None:
    """W4A8 with SiLU, several experts and more tokens than one of its blocks."""
    try:
        library = ggml.where(ggml.default_cache_dir(os.environ), variant)
    except ConfigError as error:
        pytest.skip(str(error))
    if not library.is_file():
        pytest.skip("ggml was not fetched here: run `k3 bench kernel --peer ggml` first")
    records = [synthetic_record(SHAPE, seed) for seed in range(3)]
    arena = np.stack([converted(record, SHAPE) for record in records])
    x = bf16_float(synthetic_activations(19, SHAPE.latent, 7))
    peer = GgmlRows(library, SHAPE, threads)
    try:
        for which in ([0], [2, 0, 1]):
            rows = peer.rows(arena, np.array(which, np.int32), x)
            for expert, row in zip(which, rows, strict=True):
                expected = expected_rows(records[expert], SHAPE, x.astype(np.float64), "silu")
                error = error_of(row, expected)
                assert 1e-3 < error.relative_rms < 3e-2
                assert error.cosine > 0.9995
    finally:
        peer.close()


def test_rows_of_torch_are_those_of_the_definition() -> None:
    """In bf16, so within 2 percent."""
    record = synthetic_record(SHAPE, 2)
    layout = RecordLayout(SHAPE)
    arena = np.zeros((2, layout.stride_bytes), np.uint8)
    arena[1, : layout.record_bytes] = record
    z = synthetic_activations(3, SHAPE.latent, 8)
    rows = TorchRows(SHAPE, 1).rows(arena, np.array([1], np.int32), z)
    expected = expected_rows(record, SHAPE, bf16_float(z).astype(np.float64))
    assert error_of(rows[0].float().numpy(), expected).relative_rms < 2e-2


def archive_of(path: Path, names: dict[str, tarfile.TarInfo | bytes]) -> Path:
    """An archive with these members."""
    with tarfile.open(path, "w:gz") as files:
        for name, member in names.items():
            info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(name)
            data = b"" if isinstance(member, tarfile.TarInfo) else member
            info.size = len(data)
            files.addfile(info, io.BytesIO(data))
    return path


def test_only_sources_of_its_cpu_part_leave_the_archive(tmp_path: Path) -> None:
    """Neither links nor other parts nor programs."""
    link = tarfile.TarInfo(f"{INSIDE}/src/link.h")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    members: dict[str, tarfile.TarInfo | bytes] = {
        f"{INSIDE}/include/ggml.h": b"1",
        f"{INSIDE}/src/ggml-cpu/arch/x86/quants.c": b"2",
        f"{INSIDE}/src/ggml-cuda/mmq.h": b"3",
        f"{INSIDE}/src/setup.py": b"4",
        "llama_cpp_python-0.3.36/setup.c": b"5",
        "link": link,
    }
    ggml.unpack(archive_of(tmp_path / "a.tar.gz", members), tmp_path / "out")
    found = [path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*.*")]
    assert sorted(map(str, found)) == ["include/ggml.h", "src/ggml-cpu/arch/x86/quants.c"]


def test_a_damaged_or_hostile_archive_is_refused(tmp_path: Path) -> None:
    """Names that leave the folder, no ggml inside, not an archive."""
    hostile = archive_of(tmp_path / "b.tar.gz", {f"{INSIDE}/src/../../../../x.c": b"1"})
    with pytest.raises(ConfigError, match="leaves its folder"):
        ggml.unpack(hostile, tmp_path / "out")
    with pytest.raises(ConfigError, match="holds no"):
        ggml.unpack(archive_of(tmp_path / "c.tar.gz", {"x.c": b"1"}), tmp_path / "out2")
    (tmp_path / "d.tar.gz").write_bytes(hostile.read_bytes()[:40])
    with pytest.raises(ConfigError, match="not a source archive"):
        ggml.unpack(tmp_path / "d.tar.gz", tmp_path / "out3")
    assert not (tmp_path / "x.c").exists()


def test_without_a_source_or_a_compiler_the_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are reasons under `skipped`, not failures; nothing half-made stays in the cache."""
    bench = KernelBench(
        arena_bytes=30_000_000,
        rounds=1,
        tokens=(1,),
        threads=(2,),
        backends=("int16_portable",),
        peers=("ggml",),
        cache_dir=tmp_path / "cache",
        shape=SHAPE,
        cache_bytes=10**6,
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    if shutil.which("cc") and shutil.which("c++"):
        skipped = bench.run().skipped
        assert "pip download of llama-cpp-python 0.3.36 failed" in skipped["kernel.ggml"]
        assert skipped["kernel.t1.threads2.vs_ggml"] == skipped["kernel.ggml"]
        assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    skipped = bench.run().skipped
    assert "install gcc and g++" in skipped["kernel.ggml"]


def test_the_cache_is_where_the_xdg_specification_says(tmp_path: Path) -> None:
    """A relative XDG_CACHE_HOME is ignored."""
    assert ggml.default_cache_dir({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "k3" / "bench"
    assert ggml.default_cache_dir({"XDG_CACHE_HOME": "x"}) == Path.home() / ".cache/k3/bench"
