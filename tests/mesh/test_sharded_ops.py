"""Every op of the registry on a mesh: in any layout of its operands it gives what it gives whole.

The samples of the op records are run on a 2 x 3 mesh in one process, forward and reverse in one
compiled program, so that pending sums and moves meet too. Extents of the samples are small: most
do not divide, some are smaller than the number of parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from cpu.test_ops_registry import F32, F64, Draws, outputs, wide_attrs
from mesh.sharding import MESH, block_layouts, odd_layouts, pick, spread, term_layouts
from tessera.graph.op import DIFFERENTIABLE_DRAWS, OPS, Op, Sample
from tessera.graph.trace import apply
from tessera.mesh.layout import Layout
from tessera.mesh.tensor import DistTensor
from tessera.tensor import Tensor
from tolerance import tolerance

SKIPPED = {  # why an op has no layouts
    "rng_key": "has no operand; its key is the same everywhere",
    "along_sequence": "names an axis of a mesh of its own; tests/mesh/test_ring.py",
    "shard": "moves its operand to a layout of a mesh of its own; tests/mesh/test_partition.py",
    "print": "writes to the terminal", "verify_numerics": "writes to the terminal",
    **{name: "is called by hand on the tensors of each rank" for name in (
        "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "permute",
        "replicated", "barrier")},
}
CASES = [pytest.param(op, s, id=f"{op.name}-{i}") for op in OPS.values()
         if op.name not in SKIPPED for i, s in enumerate(op.samples) if s.args]
MOST = 8  # layouts of all operands of one sample that are tried


class Case:
    """A sample with its arguments, unsharded results, and cotangents."""

    def __init__(self, op: Op, s: Sample, rng: np.random.Generator):
        self.op, self.rng = op, rng
        floating = [i for i, a in enumerate(s.args)
                    if a.diff and a.draw in DIFFERENTIABLE_DRAWS]
        self.places = floating if op.differentiable and op.vjp else []
        fixed = bool(op.graph_attrs) or not self.places
        self.attrs = s.attrs if fixed else wide_attrs(s.attrs, F64)
        self.limit = 2e-5 if fixed else 1e-10
        draws = Draws(rng, F32 if fixed else F64)
        self.xs = [draws(a) for a in s.args]
        self.ys = self._forward(*self.xs)
        self.cotangents = [self._like(y) for y in self.ys] if self.places else []
        self.want = self.run(*self.xs, *self.cotangents)

    def _forward(self, *xs: Tensor) -> list[Tensor]:
        return outputs(self.op, apply(self.op, *xs, **self.attrs))

    def _like(self, y: Tensor) -> Tensor:
        """A cotangent; that of integers is not read."""
        return Tensor(np.asarray(self.rng.standard_normal(y.shape), y.dtype.numpy), y.type)

    def run(self, *args: Any) -> list[Tensor]:
        """The results, and the gradient of every differentiable argument."""
        xs, cotangents = args[:len(self.xs)], args[len(self.xs):]
        if not self.places:
            return self._forward(*xs)

        def fn(*moving: Any) -> list[Tensor]:
            full = list(xs)
            for i, x in zip(self.places, moving, strict=True):
                full[i] = x
            return self._forward(*full)

        ys, pull = ts.vjp(fn, *(xs[i] for i in self.places))
        found = pull(list(cotangents))
        return [*ys, *(found if len(self.places) > 1 else (found,))]

    def layouts(self, x: Tensor, terms: bool = True) -> list[Layout]:
        found = block_layouts(x.ndim) + odd_layouts(x.ndim, self.rng)
        return found + term_layouts(x.ndim, self.rng) if terms and x.dtype.kind == "float" \
            else found

    def check(self, layouts: tuple[Layout, ...]) -> None:
        args = [spread(x, at, self.rng) for x, at in zip(self.xs, layouts, strict=True)]
        spare = [self.layouts(g, terms=False) for g in self.cotangents]
        after = [at[self.rng.integers(len(at))] for at in spare]
        given = [spread(g, at, self.rng) for g, at in zip(self.cotangents, after, strict=True)]
        where = ", ".join(x.describe() for x in (*layouts, *after))
        try:
            got = ts.jit(lambda *a: self.run(*a))(*args, *given)
        except Exception as err:
            err.add_note(f"{self.op.name} of {where}")
            raise
        assert len(got) == len(self.want)
        for i, (y, want) in enumerate(zip(got, self.want, strict=True)):
            assert isinstance(y, DistTensor) and y.shape == want.shape and y.type == want.type
            limit = max([self.limit, *(  # terms are added in another order, and rounded
                tolerance(t) for x, at in zip(self.xs, layouts, strict=True) if at.pending
                for t in (x.dtype, want.dtype))])
            compare(y, want, limit, f"result {i} of {self.op.name} of {where}")
        for i, g in zip(self.places, got[len(self.ys):], strict=bool(self.places)):
            assert g.layout == layouts[i].settled(), f"gradient {i} of {where}"


def compare(y: DistTensor, want: Tensor, limit: float, what: str) -> None:
    """All parts together are the whole, and where ranks hold the same, they hold the same bits."""
    got, meant = y.array, want.array
    if want.dtype.kind != "float":
        np.testing.assert_array_equal(got, meant, what)
    else:
        got, meant = got.astype(np.float64), meant.astype(np.float64)
        scale = float(np.max(np.abs(meant[np.isfinite(meant)]), initial=1.0))
        np.testing.assert_allclose(got, meant, rtol=limit, atol=limit * scale, err_msg=what)
    for axis in y.layout.repeated:
        for group in MESH.groups(axis):
            for r in group[1:]:
                np.testing.assert_array_equal(y.held[group[0]].array, y.held[r].array, what)


@pytest.mark.parametrize(("op", "s"), CASES)
def test_every_layout_gives_what_the_whole_gives(
        op: Op, s: Sample, rng: np.random.Generator) -> None:
    case = Case(op, s, rng)
    for layouts in pick([case.layouts(x) for x in case.xs], MOST, rng):
        case.check(layouts)


def test_what_is_skipped_is_there() -> None:
    assert SKIPPED.keys() <= OPS.keys()
    assert {op.name for op, _ in (p.values for p in CASES)}.isdisjoint(SKIPPED)
