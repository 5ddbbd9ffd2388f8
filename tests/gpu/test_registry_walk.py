"""Every op of the registry on a GPU: its samples, forward, vjp, jvp and vmap.

The report counts them (see conftest.py): `forward: 400 of 400`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tessera as ts
from cpu.test_cuda_coverage import REFUSED, SAMPLES, WALKS, Walk, flat, refused_by
from cpu.test_ops_registry import Derivable, wide_attrs
from gpu_harness import require_gpu
from tessera.errors import TesseraError
from tessera.graph.op import GraphOp, Sample
from tessera.numerics import as_type
from tolerance import assert_close

require_gpu()
F32, F64 = as_type("f32"), as_type("f64")
FLOATS = (np.float32, np.float64)
SIGNED = {"qr", "svd", "eigh", "eig"}  # the sign of a vector is the library's


def sign_free(mode: str, op: GraphOp, s: Sample, rng: Any) -> Walk:
    """Of the squares of an op's results. Of eigenvalues that come in any order, of their sums."""
    def free(made: Any) -> tuple:
        if op.name == "eig":
            return tuple(ts.sum(y, axis=-1) for y in flat(made)[:2])
        return tuple(ts.square(y) for y in flat(made))

    if mode not in ("vjp", "jvp"):
        walk = WALKS[mode][0](op, s, rng)
        return Walk(lambda *a: free(walk.fn(*a)), walk.xs)
    case = Derivable(op, s, rng)
    fn, n = lambda *a: free(case.fn(*a)), len(case.xs)
    if mode == "vjp":
        return Walk(lambda *a: ts.vjp(fn, *a[:n])[1](a[n:]),
                    [*case.xs, *(case.like(y) for y in fn(*case.xs))])
    return Walk(lambda *a: ts.jvp(fn, a[:n], a[n:]), [*case.xs, *map(case.like, case.xs)])


def oracle(mode: str, op: GraphOp, s: Sample, walk: Walk) -> list[np.ndarray]:
    """In f64 where the op is of f32 and takes that; else what it means in NumPy. Derivatives are
    of f64 anyway."""
    want = walk.expected
    floats = {x.type for x in walk.xs if x.dtype.kind == "float"}
    narrow = floats == {F32} and all(y.dtype in FLOATS for y in want)
    if op.name in SIGNED or mode in ("vjp", "jvp") or not narrow:
        return want
    wide = WALKS[mode][0](op, replace(s, attrs=wide_attrs(s.attrs, F64)), np.random.default_rng(0))
    xs = [ts.Tensor(x.array.astype(np.float64), F64) if x.type == F32 else x for x in walk.xs]
    try:
        return Walk(wide.fn, xs).expected
    except TesseraError:  # its attributes hold graphs, or types, of f32
        return want


@pytest.mark.parametrize(("mode", "op", "s"), SAMPLES)
def test_an_op_computes_what_it_means(mode: str, op: GraphOp, s: Sample, rng: Any) -> None:
    walk = sign_free(mode, op, s, rng) if op.name in SIGNED else WALKS[mode][0](op, s, rng)
    if name := refused_by(walk.graph):
        pytest.skip(f"{name}: {REFUSED[name]}")
    want = oracle(mode, op, s, walk)
    with ts.device("cuda"):
        made = flat(ts.jit(walk.fn)(*(x.to("cuda") for x in walk.xs)))
    assert len(made) == len(want)
    for y, w in zip(made, want, strict=True):
        assert y.device == "cuda:0"
        got = y.array
        assert got.shape == w.shape
        assert_close(got, w, y.dtype.name, n=64)
