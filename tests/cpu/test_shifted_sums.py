"""Sums about means in one pass: about the mean of a sample, then put right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from lowered_functions import lowered
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.kernels import column_passes, long_strips, strips
from tessera.graph.cuda.kernels.generate_kernels import source_of
from tessera.graph.cuda.kernels.shifted_sums import SAMPLE
from tolerance import assert_close

N = 5120


def rows(rng: np.random.Generator, how: str, dtype: str = "bf16", n: int = N) -> ts.Tensor:
    """Alike; far from zero; with an element of the sample as far out as the rest of a row allows;
    all the same."""
    x = rng.standard_normal((4, n)).astype(np.float32)
    if how == "far":
        x = 300 + 8 * x
    elif how == "outlier":
        x[:, 3] = 1e4
    elif how == "same":
        x[:] = x[:, :1]
    return ts.cast(ts.tensor(x), dtype)


def text_of(program: CudaProgram) -> str:
    return source_of(program.plan.groups[0]).text


def norm64(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = 1 / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    return (x - x.mean(1, keepdims=True)) * scale, scale


@pytest.mark.parametrize("how", ["alike", "far", "outlier", "same"])
def test_layer_norm(how: str, rng: np.random.Generator) -> None:
    x = ts.reshape(rows(rng, how, n=14 * 65536), (56, 65536))
    w, b = (ts.cast(ts.tensor(rng.standard_normal(65536).astype(np.float32)), "bf16")
            for _ in range(2))
    program = lowered(ts.layernorm, x, w, b)
    assert (program.plan.groups[0].kind, "_p1" in text_of(program)) == ("strips", False)
    (y,) = program.run([x, w, b])
    x64, w64, b64 = (np.asarray(t, np.float64) for t in (x, w, b))
    assert_close(np.asarray(y, np.float64), norm64(x64)[0] * w64 + b64, "bf16", n=4,
                 scale=np.abs(norm64(x64)[0] * w64) + np.abs(b64))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128 columns, rows of more than 512 are shared by the groups of clusters."""
    for module, values in ((long_strips, {"BLOCK": 128, "WARPS": 2, "SHARED": 256}),
                           (strips, {"LEAST": 256, "WIDE": 256, "LARGE": 1})):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


def gradients(x: Any, w: Any, dy: Any) -> Any:
    dx, dw, _ = ts.vjp(ts.layernorm, x, w, w)[1](dy)
    return ts.cast(dx, "bf16"), dw


@pytest.mark.parametrize("how", ["alike", "far", "outlier"])
@pytest.mark.parametrize("n, groups", [(768, 2), (3072, 8)])
def test_gradients_of_strips(how: str, n: int, groups: int, small: None, rng: np.random.Generator
                             ) -> None:
    """A sample is asked for a row ahead."""
    x = ts.reshape(rows(rng, how, n=n * 64), (256, n))
    dy, w = (ts.cast(ts.tensor(rng.standard_normal(s).astype(np.float32)), "bf16")
             for s in ((256, n), (n,)))
    program = lowered(gradients, x, w, dy)
    group, text = program.plan.groups[0], text_of(program)
    assert (group.kind, group.attr("cluster")) == ("strips", groups)
    assert "_p1" not in text and f"0:{SAMPLE}" in text
    with ts.config.scope(debug=True):
        dx, _ = program.run([x, w, dy])
    x64, w64, d64 = (np.asarray(t, np.float64) for t in (x, w, dy))
    h, scale = norm64(x64)
    g = d64 * w64
    want = scale * (g - g.mean(1, keepdims=True) - h * (g * h).mean(1, keepdims=True))
    assert_close(np.asarray(dx, np.float64), want, "bf16", n=8, scale=scale * (np.abs(g) + 1))


def test_groups_of_a_cluster_exchange_all_sums_at_once() -> None:
    x, w = ts.Tensor[256, 131072, "bf16"], ts.Tensor[131072, "bf16"]
    text = text_of(lowered(lambda x, w, b, dy: ts.vjp(ts.layernorm, x, w, b)[1](dy), x, w, w, x))
    lines = [i for i, line in enumerate(text.splitlines()) if "tile.cluster_sum(" in line]
    assert len(lines) == 4 and lines == list(range(lines[0], lines[0] + 4))


@pytest.mark.parametrize("dtype, shifted", [("bf16", True), ("f16", True), ("f32", False)])
@pytest.mark.parametrize("centred", [
    lambda x, m: x - m, lambda x, m: x + -m], ids=["minus", "plus minus"])
def test_however_it_is_spelled(centred: Any, dtype: str, shifted: bool, small: None,
                               rng: np.random.Generator) -> None:
    """Of f32 sums are about the mean itself, to their last places."""
    x = ts.reshape(rows(rng, "far" if shifted else "alike", dtype, 768 * 64), (256, 768))
    g = ts.cast(ts.tensor(rng.standard_normal((256, 768)).astype(np.float32)), dtype)

    def scaled(x: Any, g: Any) -> Any:
        x, g = ts.cast(x, "f32"), ts.cast(g, "f32")
        c = centred(x, ts.mean(x, axis=1, keepdims=True))
        y = g * (c * ts.rsqrt(ts.mean(c * c, axis=1, keepdims=True)))
        return y + ts.mean(c * g, axis=1, keepdims=True), ts.sum(y, axis=0)

    program = lowered(scaled, x, g)
    text = text_of(program)
    assert program.plan.groups[0].kind == "strips"
    assert (f"0:{SAMPLE}" in text) == shifted and ("_p1" in text) == (not shifted)
    made, total = program.run([x, g])
    x64, g64 = (np.asarray(t, np.float64) for t in (x, g))
    d = x64 - x64.mean(1, keepdims=True)
    y = g64 * d / np.sqrt((d * d).mean(1, keepdims=True))
    assert_close(made, y + (d * g64).mean(1, keepdims=True), "f32", n=768,
                 scale=np.abs(y) + np.abs(d * g64).mean(1, keepdims=True) + 1e-2 * np.abs(x64))
    assert_close(total, y.sum(0), "f32", n=768, scale=np.abs(y).sum(0) + np.abs(x64).sum(0))


def test_sums_about_other_numbers_stay(small: None) -> None:
    def fn(x: Any) -> Any:
        x = ts.cast(x, "f32")
        c = x - ts.max(x, axis=1, keepdims=True)
        y = c * ts.mean(c * c, axis=1, keepdims=True)
        return y, ts.sum(y, axis=0)

    assert f"0:{SAMPLE}" not in text_of(lowered(fn, ts.Tensor[256, 768, "bf16"]))


@pytest.mark.parametrize("rows", [1024, 1100])
def test_variances_of_columns_take_one_pass(rows: int, monkeypatch: pytest.MonkeyPatch,
                                            rng: np.random.Generator) -> None:
    """About a sample of each column, which is far from 0."""
    monkeypatch.setattr(column_passes, "GROUPS", 2)
    x = ts.tensor(30.0 + rng.standard_normal((4, rows, 64)).astype(np.float32), "bf16")
    program = lowered(lambda x: ts.var(ts.cast(x, "f32"), axis=1), x)
    (group,) = (g for g in program.plan.groups if g.kind == "columns")
    assert dict(group.attrs)["once"] and source_of(group).text.count("for ") == 1
    (got,) = program.run([x])
    assert_close(got, np.asarray(x, np.float64).var(1), "f32", n=4 * rows)
