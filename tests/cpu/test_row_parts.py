"""Rows of which only numbers are kept, a part in the registers of each warp."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from lowered_functions import lowered
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.kernels.generate_kernels import source_of
from tolerance import assert_close

N = 4096


def in_parts(program: CudaProgram) -> bool:
    return dict(program.plan.groups[0].attrs).get("parts", False)


def losses(x: Any, labels: Any) -> Any:
    return ts.cross_entropy(ts.cast(x, "f32"), labels, reduction="none")


def logits(rng: np.random.Generator, n: int) -> np.ndarray:
    """Parts of nothing but -inf, far below the rest, and one element far above."""
    x = 3 * rng.standard_normal((7, n)).astype(np.float32)
    x[1, :n // 4] = -np.inf
    x[2, 1024:] = -np.inf
    x[3] -= 1e4
    x[4, 5] = 3e4
    x[5, n - 1024:] -= 500
    return x


def test_losses(rng: np.random.Generator) -> None:
    x, label = ts.cast(ts.tensor(logits(rng, N)), "bf16"), np.array(
        [N, N - 1, 3, 0, 5, N // 2, -1], np.int32)
    program = lowered(losses, x, ts.tensor(label))
    assert in_parts(program)
    with ts.config.scope(debug=True):
        (value,) = program.run([x, ts.tensor(label)])
    x64 = np.asarray(x, np.float64)
    top = x64.max(1)
    want = np.log(np.exp(x64 - top[:, None]).sum(1)) + top - x64[
        np.arange(7), np.clip(label, 0, N - 1)]
    assert np.isnan(np.asarray(value)[[0, 6]]).all()  # labels outside
    assert_close(np.asarray(value, np.float64)[1:6], want[1:6], "f32", n=N,
                 scale=np.abs(want[1:6]) + np.abs(top[1:6]))


def test_logarithms_of_sums_alone(rng: np.random.Generator) -> None:
    x = ts.cast(ts.tensor(logits(rng, N)), "f16")

    def logarithms(x: Any) -> Any:
        x = ts.cast(x, "f32")
        top = ts.max(x, axis=-1, keepdims=True)
        return ts.log(ts.sum(ts.exp(x - top), axis=-1, keepdims=True)) + top

    program = lowered(logarithms, x)
    assert in_parts(program)
    (value,) = program.run([x])
    x64 = np.asarray(x, np.float64)
    top = x64.max(1)
    want = np.log(np.exp(x64 - top[:, None]).sum(1)) + top
    assert_close(np.asarray(value, np.float64)[:, 0], want, "f32", n=N, scale=1 + np.abs(top))


def test_no_number_and_infinity(rng: np.random.Generator) -> None:
    """As where rows are held: NaN, for rows of -inf too."""
    x = rng.standard_normal((4, N)).astype(np.float32)
    x[0], x[1, 7], x[2, 3097] = -np.inf, np.inf, np.nan
    given = ts.cast(ts.tensor(x), "bf16"), ts.tensor(np.arange(4), "int32")
    program = lowered(losses, *given)
    assert in_parts(program)
    (value,) = program.run(list(given))
    assert np.isnan(np.asarray(value)).tolist() == [True, True, True, False]


def test_a_warp_waits_for_no_other_before_the_end() -> None:
    text = source_of(lowered(losses, *given(N)).plan.groups[0]).text
    lines = text.splitlines()
    own = [i for i, line in enumerate(lines) if "= tile.row_" in line and "None" not in line]
    across = [i for i, line in enumerate(lines) if "[None, :])" in line]
    assert len(own) == len(across) == 2 and max(own) < min(across)
    assert "alloc_shared" not in text and "tile.gather" not in text


def given(n: int, dtype: str = "bf16") -> tuple[ts.Tensor, ts.Tensor]:
    return ts.Tensor[512, n, dtype], ts.Tensor[512, "int32"]


@pytest.mark.parametrize("fn, n, dtype", [
    (lambda x, y: ts.softmax(ts.cast(x, "f32"), -1), N, "bf16"),  # rows are written
    (lambda x, y: ts.sum(ts.cast(x, "f32") - ts.max(ts.cast(x, "f32"), -1, keepdims=True), -1),
     N, "bf16"),
    (lambda x, y: ts.cross_entropy(ts.cast(x, "f32"), ts.where(y > 3, y, 3), reduction="none"),
     N, "bf16"),
    (losses, 8192, "bf16"), (losses, 4000, "bf16"),
    (lambda x, y: ts.cross_entropy(x, y, reduction="none"), N, "f32"),
], ids=["rows", "no powers", "labels of a loop", "longer", "shorter", "f32"])
def test_other_rows_have_other_forms(fn: Any, n: int, dtype: str) -> None:
    assert not in_parts(lowered(fn, *given(n, dtype)))
