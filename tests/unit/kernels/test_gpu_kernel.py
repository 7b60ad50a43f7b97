"""The GPU kernel without a GPU: interpreted in a child process, and compiled for four GPUs.

Not run on a GPU. The interpreter shows arithmetic, masks and the order of stores in one thread; it
cannot show a GPU's memory model, concurrency or speed.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.core.errors import ConfigError

pytest.importorskip("triton", reason="the GPU kernel needs triton: pip install '.[gpu]'")

ROOT = Path(__file__).resolve().parents[3]
CHECKS = Path(__file__).with_name("gpu_checks.py")
EXPERTS = ROOT / "shared/kernels/gpu/experts.py"
REGISTERS_OF_PROCESSOR = 65_536
THREADS = 64

compiles = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 compiles nothing"
)


@pytest.mark.timeout(180)
def test_checks_pass_in_the_interpreter() -> None:
    """All of gpu_checks, in a new process: Triton decides at its import whether it interprets."""
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert " passed" in child.stdout
    assert "skipped" not in child.stdout


@compiles
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("launch", "capability", "programs"),
    [("serve", 121, 4), ("hidden", 100, 6), ("output", 120, 6), ("order", 90, 6)],
)
def test_every_launch_compiles_at_the_size_of_k3(
    launch: str, capability: int, programs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No spills, as many programs in a multiprocessor as we launch, and the instructions we mean.

    Each launch for one GPU; compile_report() does all.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from shared.kernels.gpu.compile import compile_report

    (built,) = compile_report((capability,), (launch,))
    if built.refused:
        pytest.skip(f"the toolchain refuses {capability}: {built.refused}")
    per_thread = -(-built.registers // 8) * 8
    assert built.spill_bytes == 0
    assert 0 < per_thread * THREADS * programs <= REGISTERS_OF_PROCESSOR
    assert built.cubin_bytes > 0
    assert ".ftz" not in built.ptx, "subnormal scales must keep their value"
    if launch != "order":
        assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in built.ptx
    if launch == "serve":
        assert "ld.acquire.sys.global.b64" in built.ptx
        assert "st.release.sys.global.b64" in built.ptx
        assert "atom.global.gpu.acq_rel.add" in built.ptx


@compiles
def test_what_cannot_be_compiled_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing assembler is an entry with the reason; an unknown GPU would abort the compiler."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from shared.kernels.gpu.compile import compile_report

    monkeypatch.setenv("TRITON_PTXAS_PATH", str(assembler_that_fails(tmp_path)))
    (built,) = compile_report((90,), ("order",))
    assert "out of registers today" in built.refused
    assert built.cubin_bytes == 0
    with pytest.raises(ConfigError, match="999 is not one of 90, 100, 120, 121"):
        compile_report((999,), ("order",))


def assembler_that_fails(folder: Path) -> Path:
    """A ptxas that tells its version and nothing else."""
    script = folder / "ptxas"
    script.write_text(
        '#!/bin/sh\ncase "$1" in --version) echo "release 12.9, V12.9.86";;'
        ' *) echo "out of registers today" >&2; exit 1;; esac\n',
        encoding="utf-8",
    )
    script.chmod(0o755)
    return script


def test_a_launch_can_be_captured() -> None:
    """GpuKernel.launch has no branch, loop or call but its three launches, so it cannot wait."""
    tree = ast.parse(EXPERTS.read_text(encoding="utf-8"))
    (launch,) = (node for node in ast.walk(tree) if getattr(node, "name", "") == "launch")
    branches = (ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.With, ast.comprehension)
    assert not [node for node in ast.walk(launch) if isinstance(node, branches)]
    calls = [node.func for node in ast.walk(launch) if isinstance(node, ast.Call)]
    named = [call.value if isinstance(call, ast.Subscript) else call for call in calls]
    assert [ast.unparse(call) for call in named if ast.unparse(call) != "len"] == [
        "order_launch",
        "hidden_launch",
        "output_launch",
    ]


def test_only_the_kernel_itself_loads_torch_and_triton() -> None:
    """What a CPU node imports and "auto" do not; without a GPU, or triton, it says the remedy."""
    code = (
        "import sys\n"
        "from shared.core.errors import ConfigError\n"
        "from shared.core.shape import ExpertShape\n"
        "from shared.kernels.gpu import gpu_available\n"
        "from shared.kernels.select import select_kernel\n"
        "assert select_kernel(ExpertShape(32, 32)).name != 'gpu'\n"
        "assert not {'torch', 'triton'} & set(sys.modules)\n"
        "def refuse():\n"
        "    assert not gpu_available()\n"
        "    try: select_kernel(ExpertShape(32, 32), 'gpu')\n"
        "    except ConfigError as error: print(error)\n"
        "sys.modules['triton'] = None\n"
        "refuse()\n"
        "del sys.modules['triton']\n"
        "refuse()\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    said = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.splitlines()
    assert len(said) == 2
    assert "needs torch and triton" in said[0]
    assert "torch finds no CUDA GPU" in said[1]
    assert all("use kernel int16" in line for line in said)
