"""The element of a row that a label chooses is read where it lies, where a group has one row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from lowered_functions import lowered
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.kernels.generate_kernels import source_of
from tessera.graph.cuda.passes import long_rows
from tolerance import assert_close


def texts(program: CudaProgram) -> str:
    return "\n".join(source_of(x.group).text for x in program.launches)


def loss_and_gradient(x: ts.Tensor, y: ts.Tensor) -> Any:
    value, back = ts.vjp(lambda x: ts.cross_entropy(ts.cast(x, "f32"), y, reduction="none"), x)
    return value, back(ts.ones(value.shape))


@pytest.mark.parametrize("n", [  # four rows and two, in passes, a part behind; in a cluster
    700, 1024, 2048, 4096, 5001, 131072])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_labels_of_rows(n: int, dtype: str, monkeypatch: pytest.MonkeyPatch,
                             rng: np.random.Generator) -> None:
    """The first and the last column, some between, and labels outside, whose loss is NaN."""
    monkeypatch.setattr(long_rows, "MOST_PARTS", 1)  # as where there are many rows
    x = ts.cast(ts.tensor(rng.standard_normal((6, n)).astype(np.float32)), dtype)
    label = np.array([0, n - 1, n // 2, 77, n, -1])
    program = lowered(loss_and_gradient, x, ts.tensor(label))
    assert "tile.gather(" in texts(program) and "tile.where(v" in texts(program)
    value, dx = map(np.asarray, program.run([x, ts.tensor(label)]))
    e = np.asarray(x).astype(np.float64)
    m = e.max(1, keepdims=True)
    total = np.exp(e - m).sum(1, keepdims=True)
    some = np.arange(4), label[:4]
    assert_close(value[:4], (m + np.log(total))[:4, 0] - e[some], "f32", n=n)
    assert np.isnan(value[4:]).all()
    want = np.exp(e - m) / total
    want[some] -= 1
    assert_close(dx.astype(np.float64)[:4], want[:4], dtype, n=n)


def test_a_sum_of_what_is_chosen_otherwise_is_a_sum(rng: np.random.Generator) -> None:
    """Columns below a number; one column of two factors; short rows, of which a group has several.
    """
    x, y = (ts.tensor(rng.standard_normal((5, 4500)).astype(np.float32)) for _ in range(2))
    label = ts.tensor(rng.integers(0, 4500, (5, 1)), "int32")

    def picked(a: Any, same: Any) -> Any:
        return ts.sum(ts.where(same(ts.arange(a.shape[-1], dtype="int32")), a, 0.0), -1)

    for fn in (lambda x, y, i: picked(x, lambda c: c <= i),
               lambda x, y, i: picked(x * y, lambda c: c == i),
               lambda x, y, i: picked(x[:, :64] * 1.0, lambda c: c == i % 64)):
        assert "tile.gather(" not in texts(lowered(fn, x, y, label))
    program = lowered(lambda x, y, i: picked(x, lambda c: c == i), x, y, label)
    assert "tile.gather(" in texts(program)
    want = np.asarray(x)[np.arange(5), np.asarray(label)[:, 0]]
    assert np.array_equal(np.asarray(program.run([x, y, label])[0]), want)


@pytest.mark.parametrize("columns, rows", [(512, 4), (1024, 4), (2048, 1)])
def test_a_warp_holds_a_row_of_which_two_statistics_alone_are_kept(columns: int, rows: int) -> None:
    """Where 16 elements a lane take two warps. What is written along the row, or one statistic, has
    its blocks as ever."""
    x, label = ts.Tensor[4096, columns, "f32"], ts.Tensor[4096, "int32"]

    def blocks(fn: Any, *types: Any) -> tuple[int, int]:
        s = CudaProgram(ts.jit(fn).graph(*types), "sm_90a").launches[0].group.schedule
        return s.m, s.warps

    other = max(1, 2048 // columns), 4
    assert blocks(ts.cross_entropy, x, label) == (rows, 4)
    assert blocks(loss_and_gradient, x, label) == blocks(lambda x: ts.sum(x, -1), x) == other


@pytest.mark.parametrize("n", [1000, 5001])
def test_labels_that_lie_in_a_part_of_rows(n: int, rng: np.random.Generator) -> None:
    """Tokens are the labels of those before them: the rows of a sequence are an axis of their own,
    which the grid counts, and the axis of the columns was told as if it were in the view."""
    tokens = ts.tensor(rng.integers(0, n, (3, 6)))
    x = ts.tensor(rng.standard_normal((3, 5, n)).astype(np.float32))
    fn = ts.jit(lambda x, t: loss_and_gradient(x, t[:, 1:]))
    program = CudaProgram(fn.graph(x, tokens), "sm_90a")
    assert "tile.gather(" in texts(program)
    for got, want in zip(program.run([x, tokens]), fn(x, tokens), strict=True):
        assert_close(np.asarray(got), np.asarray(want).astype(np.float64), "f32", n=n)
