"""Every op of the registry on a mesh: in any layout of its operands it gives what it gives whole.

The samples of the op records are run on a 2 x 3 mesh in one process, forward and reverse in one
compiled program, so that pending sums and moves meet too. Extents of the samples are small: most
do not divide, some are smaller than the number of parts.

A few layouts of each sample are drawn at every run. TESSERA_SLOW=1 tries every block layout, three
odd ones and two pending sums of each operand and cotangent: all combinations of those of the
operands, and with them any two of an operand and a cotangent, or of two cotangents. Samples with
more than `MOST_WHOLE` combinations are those of ring_attention and ring_attention_back, which have
3 and 6 operands of 4 and 5 dimensions: there any two layouts of any two operands meet. Every other
pending sum of every tensor is tried at least once.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest

import tessera as ts
from cpu.test_ops_registry import F32, F64, Draws, outputs, wide_attrs
from mesh.sharding import (
    MESH,
    block_layouts,
    cover,
    deal,
    every_term_layout,
    odd_layouts,
    spread,
    term_layouts,
)
from tessera.graph.ir import Graph
from tessera.graph.op import DIFFERENTIABLE_DRAWS, OPS, GraphOp, Sample
from tessera.graph.trace import apply
from tessera.mesh.layout import Layout, Split
from tessera.mesh.sharding.sharded_graph import ShardedProgram
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
MOST_OF_OP = 24  # of all samples of an op, which one rule partitions: attention has nine
MOST_OF_ELEMENTS = 3  # of ops of one operand that compute each element by itself
TRACED = 2  # of those of a sample; the graph is the same for all, and is partitioned for the others
MOST_WHOLE = 12_000  # combinations of the operands of one sample: about three minutes
SLOW = bool(os.environ.get("TESSERA_SLOW"))


class Case:
    """A sample with its arguments, unsharded results, and cotangents.

    given: the arguments and then the cotangents   options: layouts to try of each
    called: what `compiled` was given
    """

    def __init__(self, op: GraphOp, s: Sample, rng: np.random.Generator):
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
        self.given = [*self.xs, *map(self._like, self.ys if self.places else [])]
        self.want = self.run(*self.given)
        self.options = [self._layouts(x) for x in self.given]
        self._spread: dict[tuple[int, Layout], DistTensor] = {}
        self.called: list[list[DistTensor]] = []

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

    def _layouts(self, x: Tensor) -> list[Layout]:
        found = block_layouts(x.ndim) + odd_layouts(x.ndim, self.rng)
        return found + term_layouts(x.ndim, self.rng) if x.dtype.kind == "float" else found

    def pending(self) -> list[tuple[Layout, ...]]:
        """Layouts of all that is given, in which each has each of its pending sums."""
        terms = [every_term_layout(x.ndim) if x.dtype.kind == "float" else options
                 for x, options in zip(self.given, self.options, strict=True)]
        return deal(terms, max(map(len, terms)), self.rng)

    def spread(self, layouts: tuple[Layout, ...]) -> list[DistTensor]:
        """What is given in these layouts."""
        for key in enumerate(layouts):
            if key not in self._spread:
                self._spread[key] = spread(self.given[key[0]], key[1], self.rng)
        return [self._spread[key] for key in enumerate(layouts)]

    # --- two ways to run it -----------------------------------------------------------------------
    @functools.cached_property
    def jitted(self) -> Any:
        return ts.jit(lambda *a: self.run(*a))

    def compiled(self, args: list[DistTensor]) -> list[DistTensor]:
        """As users do."""
        self.called.append(args)
        return self.jitted(*args)

    @functools.cached_property
    def graph(self) -> Graph:
        """Of `run` on distributed tensors; their layouts are not in it. What was traced for a call
        is there."""
        found = [self.jitted.graph(*args) for args in self.called or map(
            self.spread, deal(self.options, 2, self.rng))]
        assert found[0].hash == found[-1].hash
        return found[0]

    def partitioned(self, args: list[DistTensor]) -> list[DistTensor]:
        """The graph that jit makes, not made anew for each combination of layouts."""
        held = [*args, *(t for _, t in self.graph.captures)]
        return ShardedProgram(self.graph, [t.layout for t in held]).run(args)

    def check(self, layouts: tuple[Layout, ...], run: Callable) -> None:
        where = ", ".join(x.describe() for x in layouts)
        args = self.spread(layouts)
        try:
            got = run(args)
        except Exception as err:
            err.add_note(f"{self.op.name} of {where}")
            raise
        assert len(got) == len(self.want)
        for i, (y, want) in enumerate(zip(got, self.want, strict=True)):
            assert isinstance(y, DistTensor) and y.shape == want.shape and y.type == want.type
            limit = max([self.limit, *(  # terms are added in another order, and rounded
                tolerance(t) for x in args if x.layout.pending and x.dtype.bits > 8
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
def test_layouts_give_what_the_whole_gives(
    op: GraphOp, s: Sample, rng: np.random.Generator
) -> None:
    case = Case(op, s, rng)
    # One rule partitions these, and the layouts of a hundred samples are drawn apart.
    of_elements = op.axes == "...->..." and not op.linear and not op.graph_attrs
    most = MOST_OF_ELEMENTS if of_elements else min(MOST, -(-MOST_OF_OP // len(op.samples)))
    for i, layouts in enumerate(deal(case.options, most, rng)):
        case.check(layouts, case.compiled if i < TRACED else case.partitioned)


@pytest.mark.skipif(not SLOW, reason="half an hour: TESSERA_SLOW=1")
@pytest.mark.parametrize(("op", "s"), CASES if SLOW else CASES[:1])  # skips once, not for each
def test_every_layout_gives_what_the_whole_gives(
        op: GraphOp, s: Sample, rng: np.random.Generator) -> None:
    case = Case(op, s, rng)
    tried = [*cover(case.options, len(case.xs), MOST_WHOLE, rng), *case.pending()]
    for layouts in tried:
        case.check(layouts, case.partitioned)
    print(f"{op.name}: {len(tried)} combinations of {[len(o) for o in case.options]} layouts")


@pytest.mark.parametrize("channels", ["", " @per_channel(0)", " @per_channel(1)"])
def test_codes_of_a_mesh_are_read_with_their_scale(channels: str, rng: np.random.Generator) -> None:
    x = ts.tensor(rng.standard_normal((8, 6)), "f32")
    numeric = f'int8 @scaled("amax"){channels}'
    mesh = ts.dist.mesh(axes=("dp",), shape=(2,))
    spread = ts.dist.distribute(x, ts.ShardSpec(("row",), ("dp",)), mesh=mesh)
    want = ts.cast(x, numeric).numpy()
    for made in (ts.cast(spread, numeric), ts.jit(lambda x: ts.cast(x, numeric))(spread)):
        for got in (made, made.copy(), ts.dequantize(made)):
            np.testing.assert_array_equal(got.numpy(), want)
        np.testing.assert_array_equal(made.local.numpy(), want[:4])


def test_a_report_names_the_argument_of_a_program_on_a_mesh() -> None:
    mesh = ts.dist.mesh(axes=("dp",), shape=(2,))
    bad = np.ones((4, 3), np.float32)
    bad[3, 1] = np.nan
    spread = [ts.dist.distribute(x, ts.ShardSpec(("row",), ("dp",)), mesh=mesh)
              for x in (np.ones_like(bad), bad)]
    with ts.debug.numerics("raise"), pytest.raises(ts.NumericsError) as info:
        ts.jit(lambda p: p["a"] * ts.sum(p["b"] + 1.0))(dict(zip("ab", spread, strict=True)))
    assert "came in with argument p.b\n" in str(info.value) and "rank 1" in str(info.value)


def test_one_dimension_is_narrowed_while_another_is_dealt_out(rng: np.random.Generator) -> None:
    x = ts.tensor(rng.standard_normal((5, 7, 2)).astype(np.float32))
    given = spread(x, Layout(MESH, (Split(("dp",)), Split(), Split())), rng)
    for rows in (Split(("dp",), unit=3), Split(("dp",))):
        for inner in (Split(("tp",), cyclic=1), Split(("tp",), cyclic=2)):
            at = Layout(MESH, (rows, inner, Split()))
            np.testing.assert_array_equal(ts.dist.distribute(given, at).array, x.array)


@pytest.mark.parametrize("dtype", ["fp4_e2m1", "fp6_e3m2", "int4"])
def test_a_cast_to_a_packed_type_deals_out_whole_bytes(dtype: str, rng: np.random.Generator
                                                       ) -> None:
    """Runs of one element, of which a byte has several; back from that, with what has such runs."""
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = ts.cast(x, dtype)
        return y, ts.cast(y, "f32") * x

    for n, axes, run in itertools.product((12, 13), (("dp",), ("dp", "tp")), (1, 2, 3)):
        x = ts.tensor((3 * rng.standard_normal((2, n))).astype(np.float32))
        at = Layout(MESH, (Split(), Split(axes, run)))
        for y, want in zip(ts.jit(fn)(spread(x, at, rng)), fn(x), strict=True):
            assert y.layout.axes_of(1) == axes
            np.testing.assert_array_equal(y.array, want.array, at.describe())


@pytest.mark.parametrize("most", [1, 60, 10**6])
def test_any_two_choices_meet(most: int, rng: np.random.Generator) -> None:
    counts = [int(n) for n in rng.integers(1, 9, 5)]
    rows = cover([range(n) for n in counts], 3, most, rng)
    assert len({row[:3] for row in rows}) == prod(counts[:3]) or prod(counts[:3]) > most
    for i, j in itertools.combinations(range(5), 2):
        assert len({(row[i], row[j]) for row in rows}) == counts[i] * counts[j]


def test_what_is_skipped_is_there() -> None:
    assert SKIPPED.keys() <= OPS.keys()
    assert {op.name for op, _ in (p.values for p in CASES)}.isdisjoint(SKIPPED)


@pytest.mark.parametrize("layout, at", [
    (ts.ShardSpec(("row",), ("dp",)), "[1, 3] ([5, 3] of [8, 6] on the mesh), 1 of 12"),
    (ts.ShardSpec(("col",), ("dp",)), "[5, 1] ([5, 3] of [8, 6] on the mesh), 1 of 16"),
    (ts.dist.Cyclic(("dp",), 1), "[1, 3] ([5, 3] of [8, 6] on the mesh), 1 of 12"),
    (None, "[5, 3], 1 of 48")], ids=["rows", "columns", "dealt", "whole"])
@pytest.mark.parametrize("how", ["op by op", "compiled", "in a loop"])
def test_a_report_says_where_in_the_whole_a_bad_element_lies(layout, at, how):
    """And where in the part of the rank. A loop's ops have layouts of their own."""
    def f(x):
        if how == "in a loop":
            return ts.scan(lambda c, _: (1.0 / c, None), x, None, length=1)[0]
        return 1.0 / x

    values = np.ones((8, 6), np.float32)
    values[5, 3] = 0.0
    x = ts.dist.distribute(values, layout, mesh=ts.dist.mesh(axes="dp", shape=(4,)))
    with ts.debug.numerics("raise"), pytest.raises(ts.NumericsError) as info:
        (f if how == "op by op" else ts.jit(f))(x)
    assert f" at {at} " in str(info.value)
