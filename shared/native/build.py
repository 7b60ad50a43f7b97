"""cffi build script of the extension module `shared._native`.

Owns the compiler flags and the list of sources. The headers are the single declaration of every
function: cffi reads the prototypes from them and the C compiler checks them again. Must not know
what the functions are for.

    python setup.py build_ext --inplace        # development build; `pip install` does the same
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cffi import FFI

_HERE: Final = Path(__file__).resolve().parent
_UNITS: Final = ("bell", "pool", "rows")
_BACKENDS: Final = (
    "bf16_avx512",
    "int16_avx512",
    "int16_avxvnni",
    "int16_avx2",
    "int16_neon",
    "int16_portable",
)
# No -march: each back end names the instructions it uses, so the module runs on any machine of its
# architecture. Contraction would fuse a*b+c only where there is FMA, and a row's bits must not
# depend on that; the dot product asks for its FMA by name. No -ffast-math: NaN has to survive.
_FLAGS: Final = [
    "-O3",
    "-std=gnu11",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",  # about passing wide vectors between files, which never happens here
]


def _declarations(unit: str) -> str:
    """Prototypes of a header; cffi has no preprocessor, so directives are left out."""
    lines = (_HERE / f"{unit}.h").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


ffi = FFI()
for _unit in _UNITS:
    ffi.cdef(_declarations(_unit))
ffi.set_source(
    "shared._native",
    "\n".join(f'#include "{unit}.h"' for unit in _UNITS),
    # setuptools wants paths relative to the folder of setup.py
    sources=[f"shared/native/{unit}.c" for unit in (*_UNITS, *_BACKENDS)],
    include_dirs=["shared/native"],
    depends=[f"shared/native/{header.name}" for header in sorted(_HERE.glob("*.h"))],
    extra_compile_args=_FLAGS,
    libraries=["m", "pthread"],  # fmaf where there is no such instruction; the pool
)
