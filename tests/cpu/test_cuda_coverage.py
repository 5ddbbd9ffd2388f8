"""Every op of the registry on GPUs: its samples, forward, vjp, jvp and vmap, lowered for sm_90a.

No GPU is needed: kernels run under the interpreter, and are compared with the op's NumPy meaning.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import tessera as ts
from cpu.test_ops_registry import (
    BATCH,
    BATCHABLE,
    CASES,
    DERIVABLE,
    Derivable,
    Draws,
    outputs,
    refuses,
)
from guide_tables import ours
from tessera.errors import UnsupportedTargetError
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.lower import lower
from tessera.graph.ir import Graph
from tessera.graph.op import OPS, GraphOp, Sample
from tessera.graph.trace import apply
from tessera.numerics import as_type, find_dtype
from tessera.runtime.target import parse_target
from tolerance import assert_close

TARGET = parse_target("sm_90a")

# What has no lowering yet, and why. An op leaves this table when it has one; none may join it.
MESH = "of a mesh: the programs of its ranks run it"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("barrier", "along_sequence", "constrain", "lie_as", "replicated",
                     "ring_attention", "ring_attention_back", "shard", "shard_like", "zero_split"),
                    MESH),
}


# --- graphs of a sample -------------------------------------------------------------------------
class Walk(NamedTuple):
    """A function of a sample, and its arguments."""

    fn: Callable[..., Any]
    xs: list

    @property
    def graph(self) -> Graph:
        """A function of no arguments is called once, and traced by that."""
        made = ts.jit(self.fn)
        if not self.xs:
            made()
        return made.graph(*self.xs)

    @property
    def expected(self) -> list[np.ndarray]:
        """Op by op, in NumPy."""
        return [y.array for y in flat(self.fn(*self.xs))]


def flat(made: Any) -> list:
    return [y for part in made for y in flat(part)] if isinstance(made, tuple) else [made]


def _forward(op: GraphOp, s: Sample, rng: np.random.Generator) -> Walk:
    xs = [Draws(rng)(a) for a in s.args]
    return Walk(lambda *a: tuple(outputs(op, apply(op, *a, **s.attrs))), xs)


def _vjp(op: GraphOp, s: Sample, rng: np.random.Generator) -> Walk:
    case = Derivable(op, s, rng)
    cotangents = [case.like(y) for y in case.fn(*case.xs)]
    n = len(case.xs)
    xs = [*case.xs, *cotangents]
    return Walk(lambda *a: ts.vjp(case.fn, *a[:n])[1](a[n:]), xs)


def _jvp(op: GraphOp, s: Sample, rng: np.random.Generator) -> Walk:
    case = Derivable(op, s, rng)
    n = len(case.xs)
    xs = [*case.xs, *(case.like(x) for x in case.xs)]
    return Walk(lambda *a: ts.jvp(case.fn, a[:n], a[n:]), xs)


def _vmap(op: GraphOp, s: Sample, rng: np.random.Generator) -> Walk:
    """Every operand with a batch axis but keys, of which there is one for all."""
    draws = Draws(rng)
    single = [refuses(op, i, a) for i, a in enumerate(s.args)]
    rows = [[draws(a)] if one else [draws(a) for _ in range(BATCH)]
            for a, one in zip(s.args, single, strict=True)]
    xs = [r[0] if one else ts.Tensor(np.stack([x.array for x in r]), r[0].type)
          for r, one in zip(rows, single, strict=True)]
    fn = lambda *a: tuple(outputs(op, apply(op, *a, **s.attrs)))  # noqa: E731
    axes = tuple(None if one else 0 for one in single)
    return Walk(lambda *a: ts.vmap(fn, in_axes=axes)(*a), xs)


WALKS = {"forward": (_forward, CASES), "vjp": (_vjp, DERIVABLE), "jvp": (_jvp, DERIVABLE),
         "vmap": (_vmap, [p for p in BATCHABLE if not all(a.draw == "key"
                                                          for a in p.values[1].args)])}


# --- what is lowered ----------------------------------------------------------------------------
def refused_by(graph: Graph) -> str:
    """The name of the op that has no form for GPUs; "" of a graph that is lowered."""
    try:
        lower(graph, TARGET)
    except UnsupportedTargetError as error:
        return refused_in(error)
    return ""


def refused_in(error: UnsupportedTargetError) -> str:
    return re.match(r"\w+", error.message)[0]  # type: ignore[index]


def is_run(op: GraphOp) -> bool:
    """Whether its samples are lowered and run below, one in a test."""
    return op.name not in REFUSED and not op.effects - {"movement", "state"}


@pytest.mark.parametrize("mode", WALKS)
def test_every_op_is_lowered(mode: str, rng: np.random.Generator) -> None:
    """Those that are not run below. An op that is refused is in the table."""
    build, cases = WALKS[mode]
    found = [(op, s, refused_by(build(op, s, rng).graph)) for op, s in (p.values for p in cases)
             if ours(op.shape) and not is_run(op)]
    wrong = [f"{op.name} {s.attrs}: {name}" for op, s, name in found if name not in {"", *REFUSED}]
    assert not wrong, "\n".join(wrong)


def test_the_table_holds_what_is_refused_alone(rng: np.random.Generator) -> None:
    """What has a form now leaves the table. The ops of the table come first: no more are looked at
    than show that each is refused."""
    cases = [(build, *p.values) for build, cases in WALKS.values() for p in cases
             if ours(p.values[0].shape)]
    left = set(REFUSED)
    for build, op, s in sorted(cases, key=lambda case: case[1].name not in REFUSED):
        if not left:
            return
        left.discard(refused_by(build(op, s, rng).graph))
    assert not left, "these have a form now: take them out of the table"


# --- what it computes ---------------------------------------------------------------------------
SAMPLES = [pytest.param(mode, *p.values, id=f"{mode}-{p.id}")
           for mode, (_, cases) in WALKS.items() for p in cases
           if ours(p.values[0].shape) and is_run(p.values[0])]


@pytest.mark.parametrize(("mode", "op", "s"), SAMPLES)
def test_kernels_compute_what_the_op_means(mode: str, op: GraphOp, s: Sample, rng: Any) -> None:
    """The generated kernels under the interpreter, on memory filled with NaN first. Derivatives are
    those of f64."""
    walk = WALKS[mode][0](op, s, rng)
    graph = walk.graph
    try:
        program = CudaProgram(graph, TARGET)
    except UnsupportedTargetError as error:
        name = refused_in(error)
        pytest.skip(f"{name}: {REFUSED[name]}")
    made = program.run([x.array for x in walk.xs])
    want = walk.expected
    assert len(made) == len(want)
    for got, w, v in zip(made, want, graph.outputs, strict=True):
        assert got.dtype == w.dtype and got.shape == w.shape
        assert_close(got, w, v.aval.dtype.name, n=64)


@pytest.mark.parametrize("kind", ["int8", "int64", "uint8", "uint32"])
@pytest.mark.parametrize("fn", [ts.sign, ts.abs, lambda x: x // 3, lambda x: x % 3, lambda x: x**2,
                                lambda x: ts.max(x, (0, 1)), lambda x: ts.prod(x, 0), ts.sqrt],
                         ids="sign abs // % square max prod sqrt".split())
def test_integers(kind: str, fn: Any, rng: Any) -> None:
    low = 0 if kind[0] == "u" else -5
    x = ts.cast(ts.tensor(rng.integers(low, 6, (3, 4)) if fn is not ts.sqrt else
                          rng.integers(0, 6, (3, 4))), kind)
    (got,), want = CudaProgram(ts.jit(fn).graph(x), TARGET).run([x.array]), fn(x).array
    assert got.dtype == want.dtype
    assert_close(got, want, want.dtype, n=1)


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2", "bf16", "f16", "f32"])
@pytest.mark.parametrize("name", ["isfinite", "isnan", "isinf"])
def test_predicates_of_every_code(kind: str, name: str, rng: Any) -> None:
    """Of the op itself, on the type as it is stored: some have no infinity to compare with."""
    d = find_dtype(kind)
    codes = np.arange(1 << min(d.bits, 16)).astype(d.code_type) << max(0, d.bits - 16)
    x = ts.Tensor(codes.astype(d.code_type).view(d.numpy), as_type(kind))
    graph = ts.jit(lambda x: apply(OPS[name], x)).graph(x)
    (got,) = CudaProgram(graph, TARGET).run([x.array])
    with np.errstate(invalid="ignore"):
        want = getattr(np, name)(x.array.astype(np.float32))
    assert np.array_equal(got, want)
