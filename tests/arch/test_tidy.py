"""Budgets and bans that no linter knows: sizes, docstrings, unfinished work, unsafe formats."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("shared", "station", "spark_daemon", "services")
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
UNFINISHED = ("TODO", "FIXME", "XXX", "NotImplementedError")
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj"}


def _product_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return sorted(ROOT / name for name in listed if name.split("/")[0] in PACKAGES)


FILES = _product_files()


def test_there_is_something_to_check() -> None:
    """An empty list would make every check below pass."""
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(PACKAGES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_keeps_the_budgets(path: Path) -> None:
    """Short files and functions, a docstring that says what a module owns, no unfinished work."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)

    assert len(text.splitlines()) <= FILE_LINES_MAX
    assert ast.get_docstring(tree), "module docstring is missing"
    assert not [word for word in UNFINISHED if word in text]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES_MAX, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_code_comes_from_data(path: Path) -> None:
    """Case S1: no pickle in any guise, no eval, no torch.load."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & UNSAFE_MODULES
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in UNSAFE_MODULES
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            owner = getattr(getattr(node.func, "value", None), "id", "")
            assert name not in UNSAFE_CALLS or owner not in ("", "socket"), f"call of {name}"
            assert (owner, name) != ("torch", "load")


def test_top_level_is_what_the_user_fixed() -> None:
    """Packages and files have the places that architecture and README promise."""
    for name in (*PACKAGES, "systemd", "tests", "docs"):
        assert (ROOT / name).is_dir(), name
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", ".ci/run"):
        assert (ROOT / name).is_file(), name
