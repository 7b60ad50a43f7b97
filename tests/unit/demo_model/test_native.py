"""The fused training kernels: the same values and gradients as the readable formulas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from services.demo_model import native
from services.demo_model.operations import ReferenceOperations, l2_normalise
from shared.core.errors import ConfigError

REFERENCE = ReferenceOperations()
BETAS = (4.0, 25.0)


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> native.NativeOperations:
    """The kernels, built for this machine."""
    return native.NativeOperations(native.build(tmp_path_factory.mktemp("native")))


def results(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Output of `function`, then its gradients with respect to the floating inputs."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    out = function(*leaves)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    (out * weight).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def distances(got: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """Relative distance of each pair of tensors."""
    return [
        ((a.float() - b.float()).norm() / b.float().norm()).item()
        for a, b in zip(got, wanted, strict=True)
    ]


def test_short_convolution(fused: native.NativeOperations) -> None:
    """Convolution and SiLU; rows shorter than the taps are fine."""
    torch.manual_seed(0)
    for tokens in (2, 21):
        inputs = (torch.randn(3, tokens, 96), torch.randn(4, 96))
        got = results(fused.short_convolution, *inputs)
        assert max(distances(got, results(REFERENCE.short_convolution, *inputs))) < 1e-5


def test_delta_rule(fused: native.NativeOperations) -> None:
    """Recurrence by token against recurrence by chunk, at a length that fills neither."""
    torch.manual_seed(0)
    shape = (2, 45, 3, native.HEAD_WIDTH)
    q, k, v, decay = (torch.randn(shape) for _ in range(4))
    inputs = (q, k, v, decay * 2 - 1, torch.randn(shape[:3]))

    def whole(operations: ReferenceOperations | native.NativeOperations) -> Callable[..., Tensor]:
        return lambda q, k, v, decay, beta: operations.delta_rule(
            l2_normalise(q) / 8,
            l2_normalise(k),
            v,
            -5 * torch.sigmoid(decay),
            torch.sigmoid(beta),
        )

    assert max(distances(results(whole(fused), *inputs), results(whole(REFERENCE), *inputs))) < 1e-5


def test_delta_rule_of_another_width_is_refused(fused: native.NativeOperations) -> None:
    """The kernel is built for one head width; another would read past its rows."""
    x = torch.zeros(1, 4, 2, 32)
    with pytest.raises(ValueError, match="heads of 64"):
        fused.delta_rule(x, x, x, x, torch.zeros(1, 4, 2))


def test_routed_experts(fused: native.NativeOperations) -> None:
    """Weighted rows in bf16, with an expert nobody chose and one that everybody chose."""
    torch.manual_seed(0)
    tokens, experts, latent, width = 50, 16, 32, 48
    ids = 1 + torch.rand(tokens, experts - 2).topk(4, -1).indices
    ids[:, 0] = experts - 1
    weights = torch.rand(tokens, 4)
    z = torch.randn(tokens, latent).bfloat16()
    w13 = (torch.randn(experts, 2 * width, latent) * 0.3).bfloat16()
    w2 = (torch.randn(experts, latent, width) * 0.2).bfloat16()

    def exact(z: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        matrices = (w13.float(), w2.float())
        return REFERENCE.routed(z.float(), ids, weights, matrices, BETAS)

    def quick(z: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return fused.routed(z, ids, weights, (w13, w2), BETAS)

    got, wanted = results(quick, z, weights, w13, w2), results(exact, z, weights, w13, w2)
    assert max(distances(got, wanted)) < 1e-2  # bf16 keeps eight bits
    assert not got[3][0].any()


def test_adamw_matches_torch(tmp_path: Path) -> None:
    """Two steps of the fused optimiser against torch.optim.AdamW."""
    torch.manual_seed(0)
    library = native.build(tmp_path)
    master = torch.randn(1000)
    wanted = master.clone().requires_grad_()
    optimiser = torch.optim.AdamW([wanted], lr=0.01, betas=(0.9, 0.97), eps=1e-8, weight_decay=0.1)
    mean, square, working = torch.zeros(1000), torch.zeros(1000), torch.zeros(1000).bfloat16()
    for step in (1, 2):
        gradient = torch.randn(1000)
        wanted.grad = gradient.clone()
        optimiser.step()
        scalars = native.AdamStep(
            1.0, 0.01, 0.9, 0.97, 1e-8, 0.1, 1 / (1 - 0.9**step), 1 / (1 - 0.97**step)
        )
        buffers = [native.pointer(t) for t in (gradient, master, mean, square, working)]
        library.adamw(*native.sizes(1000), scalars, *buffers)
    torch.testing.assert_close(master, wanted.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(working, master.bfloat16())


def test_loading_leaves_the_process_arithmetic_alone(fused: native.NativeOperations) -> None:
    """Fast mathematics stays inside the library: subnormal numbers survive in this process."""
    assert fused is not None
    smallest = float(np.float32(1e-45))

    assert smallest > 0.0
    assert float(np.float32(smallest) * np.float32(1.0)) > 0.0
    assert 5e-324 * 1.0 > 0.0


def test_no_compiler_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C compiler the error names what to install."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="install gcc"):
        native.build(tmp_path)
