"""The fused kernels of native.c as torch functions with gradients.

Owns building the C file with the host's compiler, loading it, and the forward and backward passes
around it. The formulas live in operations.py; tests hold the two together. Experts run as two
batched bf16 products over equal compartments: on a CPU with AMX that costs less than one product
per expert, in spite of the padding.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from shared.core.errors import ConfigError

HEAD_WIDTH = 64
"""WIDTH in native.c."""
_SPAN = 16
_ROOM_STEP = 32
"""Compartments grow in steps of this many rows: few distinct shapes keep the prepared matrix
kernels reusable.
"""


class AdamStep(ctypes.Structure):
    """The scalars of one AdamW step; layout of the C struct of the same name."""

    _fields_ = tuple(
        (name, ctypes.c_float)
        for name in (
            "clip",
            "rate",
            "momentum",
            "memory",
            "eps",
            "decay",
            "momentum_correction",
            "memory_correction",
        )
    )


def build(directory: Path) -> ctypes.CDLL:
    """Compile native.c into `directory` and load it. Raises ConfigError without a C compiler, or
    when it refuses the file.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise ConfigError(
            "training needs a C compiler and found neither cc nor gcc on PATH: install gcc"
        )
    source, target = Path(__file__).with_name("native.c"), directory / "native.so"
    compiled = directory / "native.o"
    flags = ("-O3", "-march=native", "-ffast-math", "-fPIC", "-std=gnu11")
    # linked on its own and without -ffast-math: with it gcc adds start-up code that turns off
    # subnormal numbers in the whole process that loads the library
    for command in (
        [compiler, *flags, "-c", str(source), "-o", str(compiled)],
        [compiler, "-shared", str(compiled), "-o", str(target), "-lm"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - ours
        if done.returncode != 0:
            raise ConfigError(f"{compiler} could not build {source}: {done.stderr.strip()}")
    library = ctypes.CDLL(str(target))
    library.gradient_mean.restype = ctypes.c_double
    return library


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    """The address of a contiguous tensor."""
    if not tensor.is_contiguous():
        raise ValueError(f"a fused kernel needs a contiguous tensor, got strides {tensor.stride()}")
    return ctypes.c_void_p(tensor.data_ptr())


def sizes(*values: int) -> list[ctypes.c_int64]:
    """Integers as the kernels take them."""
    return [ctypes.c_int64(value) for value in values]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor, library: ctypes.CDLL) -> Tensor:
        x, taps = x.float().contiguous(), taps.contiguous()
        mixed, out = torch.empty_like(x), torch.empty_like(x)
        shape = sizes(*x.shape, taps.shape[0])
        library.convolution_forward(*shape, pointer(x), pointer(taps), pointer(mixed), pointer(out))
        ctx.save_for_backward(x, taps, mixed)
        ctx.library = library
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None]:
        x, taps, mixed = ctx.saved_tensors
        dout = dout.contiguous()
        scratch, dx, dtaps = torch.empty_like(x), torch.empty_like(x), torch.empty_like(taps)
        buffers = [pointer(t) for t in (x, taps, mixed, dout, scratch, dx, dtaps)]
        ctx.library.convolution_backward(*sizes(*x.shape, taps.shape[0]), *buffers)
        return dx, dtaps, None


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        library: ctypes.CDLL,
    ) -> Tensor:
        inputs = [x.contiguous() for x in (q, k, v, log_decay, beta)]
        rows, tokens, heads, width = q.shape
        out = torch.empty(q.shape)
        states = torch.empty(rows, heads, -(-tokens // _SPAN), width, width)
        buffers = [pointer(t) for t in (*inputs, out, states)]
        library.delta_rule_forward(*sizes(rows, tokens, heads), *buffers)
        ctx.save_for_backward(*inputs, states)
        ctx.library = library
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, states = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in inputs]
        buffers = [pointer(t) for t in (*inputs, states, dout.contiguous(), *gradients)]
        ctx.library.delta_rule_backward(*sizes(*inputs[0].shape[:3]), *buffers)
        return (*gradients, None)


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        ids: Tensor,
        weights: Tensor,
        w13: Tensor,
        w2: Tensor,
        betas: tuple[float, float],
        library: ctypes.CDLL,
    ) -> Tensor:
        (tokens, slots), (count, latent, inner) = ids.shape, w2.shape
        z, ids, weights = z.contiguous(), ids.contiguous(), weights.contiguous()
        loads = torch.bincount(ids.reshape(-1), minlength=count)
        room = -(-int(loads.max()) // _ROOM_STEP) * _ROOM_STEP
        places, following = torch.empty_like(ids), torch.empty_like(loads)
        library.expert_places(
            *sizes(tokens * slots, count, room), pointer(ids), pointer(following), pointer(places)
        )
        x = torch.empty(count, room, latent, dtype=torch.bfloat16)
        layout = sizes(tokens, slots, latent, count, room)
        library.expert_spread(*layout, pointer(loads), pointer(places), pointer(z), pointer(x))
        fused = torch.bmm(x, w13.mT)
        hidden = torch.empty(count, room, inner, dtype=torch.bfloat16)
        scales = [ctypes.c_float(beta) for beta in betas]
        library.expert_situ(
            *sizes(count, room, inner), *scales, pointer(loads), pointer(fused), pointer(hidden)
        )
        rows = torch.bmm(hidden, w2.mT)
        out = torch.empty(tokens, latent)
        library.expert_combine(
            *sizes(tokens, slots, latent),
            pointer(places),
            pointer(rows),
            pointer(weights),
            pointer(out),
        )
        ctx.save_for_backward(weights, w13, w2, loads, places, x, fused, hidden, rows)
        ctx.scales, ctx.library = scales, library
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        weights, w13, w2, loads, places, x, fused, hidden, rows = ctx.saved_tensors
        library, dout = ctx.library, dout.contiguous()
        (tokens, slots), (count, room, latent) = weights.shape, x.shape
        layout = sizes(tokens, slots, latent, count, room)
        drows, dweights = torch.empty_like(rows), torch.empty_like(weights)
        buffers = [pointer(t) for t in (loads, places, rows, weights, dout, drows, dweights)]
        library.expert_combine_backward(*layout, *buffers)
        dhidden, dw2 = torch.bmm(drows, w2), torch.bmm(drows.mT, hidden)
        dfused = torch.empty_like(fused)
        buffers = [pointer(t) for t in (loads, fused, dhidden, dfused)]
        library.expert_situ_backward(*sizes(count, room, hidden.shape[-1]), *ctx.scales, *buffers)
        dx, dw13 = torch.bmm(dfused, w13), torch.bmm(dfused.mT, x)
        dz = torch.empty(tokens, latent, dtype=torch.bfloat16)
        library.expert_gather(
            *sizes(tokens, slots, latent), pointer(places), pointer(dx), pointer(dz)
        )
        return dz, None, dweights, dw13, dw2, None, None


def _apply(function: Any, *arguments: object) -> Tensor:
    return cast(Tensor, function.apply(*arguments))


_disable: Callable[..., Callable[..., Tensor]] = torch.compiler.disable
_eager = _disable(_apply)
"""A fused function, outside whatever region is being compiled around it."""


class NativeOperations:
    """The fused form of `Operations`: float32 attention parts, bf16 experts. Built around a library
    from `build`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def short_convolution(self, x: Tensor, taps: Tensor) -> Tensor:
        """See `Operations`."""
        return _eager(_Convolution, x, taps, self._library)

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
    ) -> Tensor:
        """See `Operations`; heads must be 64 wide."""
        if q.shape[-1] != HEAD_WIDTH or v.shape[-1] != HEAD_WIDTH:
            raise ValueError(f"the fused delta rule has heads of {HEAD_WIDTH}, got {q.shape[-1]}")
        return _eager(_DeltaRule, q, k, v, log_decay, beta, self._library)

    def routed(
        self,
        z: Tensor,
        ids: Tensor,
        weights: Tensor,
        matrices: tuple[Tensor, Tensor],
        betas: tuple[float, float],
    ) -> Tensor:
        """See `Operations`; z and the matrices in bf16."""
        return _eager(_Routed, z, ids, weights, *matrices, betas, self._library)
