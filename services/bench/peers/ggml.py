"""ggml's NVFP4 kernel, fetched and compiled when a benchmark asks for it.

Owns the download (pip, one pinned source archive), what is taken out of it, the compiler and the
cache. Must not know records or clocks. Everything that can be missing - pip's source, a compiler, a
disk - is a ConfigError, so that the benchmark can say why it went without.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final, Literal, TypeAlias

import shared.native
from shared.core.errors import ConfigError

Variant: TypeAlias = Literal["native", "avx2"]
Say: TypeAlias = Callable[[str], None]

# The archive carries ggml's sources; the project's own is too large to fetch for a benchmark.
PACKAGE: Final = "llama-cpp-python"
VERSION: Final = "0.3.36"
SHA256: Final = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_INSIDE: Final = PurePosixPath(f"llama_cpp_python-{VERSION}/vendor/llama.cpp/ggml")
_SUFFIXES: Final = (".h", ".c", ".cpp")
_FILE_BYTES_MAX: Final = 4 * 2**20
_DOWNLOAD_S: Final = 300
_COMPILE_S: Final = 300

_OUR_SOURCES: Final = (
    Path(__file__).with_name("ggml_loop.c"),
    Path(shared.native.__file__).with_name("pool.c"),
)
_ITS_SOURCES: Final[Mapping[str, tuple[str, ...]]] = {
    "x86_64": ("src/ggml-cpu/arch/x86/quants.c", "src/ggml-cpu/vec.cpp"),
    "aarch64": ("src/ggml-cpu/arch/arm/quants.c", "src/ggml-cpu/vec.cpp"),
}
_ISA_FLAGS: Final[Mapping[Variant, tuple[str, ...]]] = {
    "native": ("-march=native",),
    "avx2": ("-march=x86-64-v3",),
}
# -DNDEBUG as in its release builds. Sections that nothing calls are dropped, and with them what
# they would need of the rest of ggml.
_FLAGS: Final = (
    *("-O3", "-DNDEBUG", "-D_GNU_SOURCE", "-fPIC", "-fvisibility=hidden", "-w"),
    *("-ffunction-sections", "-fdata-sections"),
)


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """$XDG_CACHE_HOME/k3/bench, or ~/.cache/k3/bench; ConfigError without a home."""
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG specification says to ignore a relative one
        try:
            base = Path.home() / ".cache"
        except RuntimeError as error:
            raise ConfigError(
                "this user has no home directory for a cache: set HOME or XDG_CACHE_HOME"
            ) from error
    return base / "k3" / "bench"


def build(cache: Path, variant: Variant, say: Say) -> Path:
    """The shared library of ggml_loop.c over ggml's sources; `say` is told what takes long.

    "native" uses all instructions of this machine, "avx2" none beyond AVX2, FMA and F16C. Cached in
    `cache` under a name that changes with sources, compiler, flags and processor. ConfigError when
    it cannot be had here.
    """
    library, compilers = where(cache, variant), _compilers()
    if library.is_file():
        return library
    try:
        cache.mkdir(parents=True, exist_ok=True)
        sources = _sources(cache, say)
        say(f"ggml: compiling for {variant}")
        with tempfile.TemporaryDirectory(prefix="build-", dir=cache) as scratch:
            built = _compile(sources, compilers, variant, Path(scratch))
            built.replace(library)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or cache}: cannot be written: {error.strerror}"
        ) from error
    return library


def where(cache: Path, variant: Variant) -> Path:
    """The path that `build` returns, whether or not it is there; ConfigError as there."""
    machine = platform.machine()
    if machine not in _ITS_SOURCES or (variant == "avx2" and machine != "x86_64"):
        raise ConfigError(f"ggml {variant} is not for processors of kind {machine}")
    return cache / f"ggml-{VERSION}-{variant}-{_fingerprint(_compilers(), variant)}.so"


def _compilers() -> tuple[str, str]:
    """For C and for C++."""
    return _compiler("cc", "gcc", "clang"), _compiler("c++", "g++", "clang++")


def _compiler(*names: str) -> str:
    for name in names:
        if found := shutil.which(name):
            return found
    raise ConfigError(f"no compiler: none of {', '.join(names)} is on PATH: install gcc and g++")


def _fingerprint(compilers: Sequence[str], variant: Variant) -> str:
    """Names everything that a library depends on."""
    digest = hashlib.sha256(SHA256.encode())
    for compiler in compilers:
        digest.update(_run([compiler, "--version"], "the compiler", _COMPILE_S).encode())
    digest.update(" ".join((*_FLAGS, *_ISA_FLAGS[variant])).encode())
    for source in _OUR_SOURCES:
        digest.update(source.read_bytes())
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.lower().startswith(("flags", "features")):
            digest.update(line.encode())
            break
    return digest.hexdigest()[:16]


def _sources(cache: Path, say: Say) -> Path:
    """ggml's folder of the archive, unpacked in the cache."""
    folder = cache / f"ggml-{VERSION}"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=cache) as scratch:
        say(f"ggml: fetching the sources of {PACKAGE} {VERSION} (77 MB)")
        unpack(_download(Path(scratch)), Path(scratch) / "ggml")
        (Path(scratch) / "ggml").rename(folder)
    return folder


def _download(scratch: Path) -> Path:
    """The pinned archive by pip, from wherever this machine's pip gets its packages."""
    wanted = scratch / "wanted.txt"
    wanted.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n", encoding="ascii")
    _run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"),
            *("--no-deps", "--no-binary", PACKAGE, "--dest", str(scratch), "-r", str(wanted)),
        ],
        f"pip download of {PACKAGE} {VERSION}",
        _DOWNLOAD_S,
    )
    found = list(scratch.glob("*.tar.gz"))
    if len(found) != 1:
        raise ConfigError(f"pip download of {PACKAGE} {VERSION} left no source archive")
    return found[0]


def unpack(archive: Path, folder: Path) -> None:
    """Write the sources of ggml inside `archive` to `folder`: plain files of known kinds only.

    ConfigError for an archive that is damaged, without ggml, or with names that leave the folder.
    """
    try:
        with tarfile.open(archive, "r:gz") as files:
            for member in files:
                path = PurePosixPath(member.name)
                if not (member.isfile() and path.is_relative_to(_INSIDE)):
                    continue
                if ".." in path.parts:
                    raise ConfigError(f"{archive.name}: {member.name} leaves its folder")
                name = path.relative_to(_INSIDE)
                if member.size > _FILE_BYTES_MAX or not _is_needed(name):
                    continue
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                source = files.extractfile(member)
                assert source is not None, "a plain file has contents"
                target.write_bytes(source.read())
    except (tarfile.TarError, EOFError) as error:
        raise ConfigError(f"{archive.name}: not a source archive: {error}") from error
    if not folder.is_dir():
        raise ConfigError(f"{archive.name}: holds no {_INSIDE}")


def _is_needed(name: PurePosixPath) -> bool:
    """Whether a file of ggml's folder is for its CPU part: the others are many times as much."""
    where = name.parts[:-1]
    return name.suffix in _SUFFIXES and (
        where in (("include",), ("src",)) or where[:2] == ("src", "ggml-cpu")
    )


def _compile(sources: Path, compilers: Sequence[str], variant: Variant, scratch: Path) -> Path:
    includes = [sources / "include", sources / "src", sources / "src" / "ggml-cpu"]
    flags = [*_FLAGS, *_ISA_FLAGS[variant], *(f"-I{folder}" for folder in includes)]
    flags.append(f"-I{Path(shared.native.__file__).parent}")
    cc, cxx = compilers
    objects: list[str] = []
    for source in (*(sources / name for name in _ITS_SOURCES[platform.machine()]), *_OUR_SOURCES):
        target = scratch / f"{len(objects)}.o"
        compiler = [cxx, "-std=gnu++17"] if source.suffix == ".cpp" else [cc, "-std=gnu11"]
        _run([*compiler, *flags, "-c", str(source), "-o", str(target)], source.name, _COMPILE_S)
        objects.append(str(target))
    library = scratch / "ggml.so"
    link = ["-shared", "-Wl,--gc-sections", "-Wl,-z,defs", *objects, "-o", str(library)]
    _run([cxx, *link, "-lm", "-lpthread"], "linking", _COMPILE_S)
    return library


def _run(command: Sequence[str], what: str, limit_s: int) -> str:
    """Standard output of a command; ConfigError with the end of what it complained about."""
    environ = {**os.environ, "PIP_NO_INPUT": "1"}
    try:
        done = subprocess.run(  # noqa: S603 - our own command lines
            command, capture_output=True, text=True, check=False, timeout=limit_s, env=environ
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{what} took longer than {limit_s} s") from None
    except OSError as error:
        raise ConfigError(f"{what}: cannot run {command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise ConfigError(f"{what} failed: {lines[-1] if lines else f'status {done.returncode}'}")
    return done.stdout
