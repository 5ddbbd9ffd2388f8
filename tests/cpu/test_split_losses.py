"""Losses of long rows, as those of parts of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.passes import split_losses
from tolerance import assert_close

N = 2 * split_losses.PART


def losses(x: Any, labels: Any, reduction: str = "none") -> Any:
    return ts.cross_entropy(ts.cast(x, "f32"), labels, reduction=reduction)


def kinds(fn: Any, *xs: Any) -> list[str]:
    return [g.kind for g in CudaProgram(ts.jit(fn).graph(*xs), "sm_90a").plan.groups]


@pytest.mark.parametrize("wide", [True, False])
def test_losses(wide: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with parts of nothing but -inf, with one number far above, and labels outside."""
    monkeypatch.setattr(split_losses, "LEAST", N)
    monkeypatch.setattr(split_losses, "FEWEST", 0)
    x = 3 * rng.standard_normal((6, N)).astype(np.float32)
    x[1, :N // 2], x[2, N - 1], x[3] = -np.inf, 3e4, -np.inf
    given = ts.cast(ts.tensor(x), "bf16"), ts.tensor(np.array([N, N - 1, 3, 5, N // 2, -1]),
                                                     "int64" if wide else "int32")
    program = CudaProgram(ts.jit(losses).graph(*given), "sm_90a")
    assert [g.kind for g in program.plan.groups] == ["rows", "launch"]
    with ts.config.scope(debug=True):
        (value,) = program.run(list(given))
    x64, labels = np.asarray(given[0], np.float64), np.asarray(given[1])
    top = x64.max(1)
    with np.errstate(invalid="ignore"):
        want = np.log(np.exp(x64 - top[:, None]).sum(1)) + top - x64[
            np.arange(6), np.clip(labels, 0, N - 1)]
    got, there, size = np.asarray(value, np.float64), [1, 2, 4], np.abs(want) + np.abs(top)
    assert np.isnan(got[[0, 3, 5]]).all()
    assert_close(got[there], want[there], "f32", n=N, scale=size[there])


def test_of_which_rows() -> None:
    """Long ones, of which there are many, of 16 bits, and of which nothing else is wanted."""
    M, C, label = 512, 1 << 17, ts.Tensor[512, "int32"]
    x, mean = ts.Tensor[M, C, "bf16"], lambda x, y: losses(x, y, "mean")
    assert kinds(mean, x, label) == ["rows", "launch", "rows"]
    few = ts.Tensor[16, C, "bf16"], ts.Tensor[16, "int32"]
    assert "launch" not in kinds(mean, *few)
    for other in (ts.Tensor[M, C + 8, "bf16"], ts.Tensor[M, C, "f32"]):
        assert "launch" not in kinds(mean, other, label)
    assert "launch" not in kinds(lambda x, y: mean(x * x, y), x, label)

    def gradient(x: Any, y: Any) -> Any:
        value, pull = ts.vjp(lambda x: mean(x, y), x)
        return value, pull(ts.ones(()))

    assert "launch" not in kinds(gradient, x, label)
