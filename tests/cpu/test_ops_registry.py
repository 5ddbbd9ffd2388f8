"""Every op of the registry, present and future, against itself: its samples drive its rules.

The record's parts must agree: the shape rule with the NumPy meaning, the compiled graph with the
NumPy meaning, forward mode with finite differences, reverse mode with forward mode, the batching
rule with a loop, second derivatives with differences of first ones, the index letters with the
shapes. What an op computes is checked against oracles in test_ops_<family>.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.dims import Dim
from tessera.errors import ArgumentError, TesseraError
from tessera.graph.element import evaluate
from tessera.graph.ir import Graph
from tessera.graph.op import DIFFERENTIABLE_DRAWS, OPS, Arg, Aval, GraphOp, NoRule, Sample, infer
from tessera.graph.trace import apply
from tessera.numerics import DType, NumericType, as_type, encode
from tessera.tensor import Tensor
from tolerance import assert_close

F32, F64, BATCH = as_type("f32"), as_type("f64"), 3



def cases_of(ops: Iterable[GraphOp]) -> list:
    """What is tested of ops: each with each of its samples."""
    return [pytest.param(op, s, id=f"{op.name}-{i}") for op in ops
            for i, s in enumerate(op.samples)]


CASES = cases_of(OPS.values())


def _derivable(op: GraphOp, s: Sample) -> bool:
    return op.differentiable and any(a.diff and _floating(a) for a in s.args)


def _floating(arg: Arg) -> bool:
    return arg.draw in DIFFERENTIABLE_DRAWS


DERIVABLE = [p for p in CASES if _derivable(*p.values)]
SMOOTH = [p for p in DERIVABLE if p.values[0].smooth]
BATCHABLE = [p for p in CASES if p.values[1].args and p.values[0].batch is not None]


# --- drawing arguments ------------------------------------------------------------------------
class Draws:
    """Random arguments. `apart` and `distinct` values differ by at least 1/8 in a whole sample, and
    from 0 by 1/16."""

    def __init__(self, rng: np.random.Generator, numeric: NumericType = F32):
        self.rng, self.numeric = rng, numeric
        self.pool = iter(rng.permutation(1024))

    def __call__(self, arg: Arg) -> Tensor:
        kind, _, detail = arg.draw.partition(":")
        if kind == "type":
            t = as_type(detail)
            return Tensor(np.asarray(encode(self._floats("normal", arg.shape), t.dtype)), t)
        if kind in ("index", "int"):
            low, high = (0, int(detail)) if kind == "index" else (-5, 6)
            return Tensor(self.rng.integers(low, high, arg.shape, np.int64), as_type("int64"))
        if kind == "onto":
            places = self.rng.permutation(math.prod(arg.shape)).reshape(arg.shape) % int(detail)
            return Tensor(places.astype(np.int64), as_type("int64"))
        if kind == "offsets":
            inner = self.rng.integers(0, int(detail) + 1, (*arg.shape[:-1], arg.shape[-1] - 2))
            ends = [(0, 0)] * (len(arg.shape) - 1) + [(1, 1)]
            made = np.pad(np.sort(inner, -1), ends)
            made[..., -1] = int(detail)
            return Tensor(made.astype(np.int64), as_type("int64"))
        if kind == "bool":
            return Tensor(self.rng.integers(0, 2, arg.shape).astype(bool), as_type("bool_"))
        if kind == "key":
            return Tensor(self.rng.integers(0, 2**32, arg.shape, np.uint32), as_type("uint32"))
        return Tensor(self._floats(kind, arg.shape).astype(self.numeric.dtype.numpy), self.numeric)

    def _floats(self, kind: str, shape: tuple) -> np.ndarray:
        if kind == "positive":
            return self.rng.uniform(0.5, 2.0, shape)
        if kind == "unit":
            return self.rng.uniform(-0.9, 0.9, shape)
        if kind in ("distinct", "apart"):
            k = np.array(list(itertools.islice(self.pool, math.prod(shape))), float).reshape(shape)
            return (k % 32 * 0.125 + k // 32 * 4 + 0.3125 - 64.0)
        if kind in ("spd", "wellconditioned", "dominant"):
            return self._matrices(kind, shape)
        if kind == "off_integers":  # where the poles of gamma and its kin are
            return self.rng.integers(-3, 3, shape) + self.rng.uniform(0.1, 0.9, shape)
        values = self.rng.standard_normal(shape)
        if kind == "sorted":
            return np.sort(values, axis=-1)
        assert kind == "normal", kind
        return values


    def _matrices(self, kind: str, shape: tuple) -> np.ndarray:
        *lead, m, n = shape
        k = min(m, n)
        if kind == "dominant":
            sign = self.rng.choice([-1, 1], (*lead, 1, n))
            diagonal = sign * self.rng.uniform(1, 2, (*lead, 1, n))
            return self.rng.uniform(-0.5, 0.5, shape) / n + np.eye(n) * diagonal
        u = np.linalg.qr(self.rng.standard_normal((*lead, m, k)))[0]
        v = u if kind == "spd" else np.linalg.qr(self.rng.standard_normal((*lead, n, k)))[0]
        values = 1 + 0.75 * np.arange(k) + self.rng.uniform(0, 0.25, (*lead, 1, k))
        return (u * values) @ np.swapaxes(v, -1, -2)


def wide_attrs(attrs: dict[str, Any], numeric: NumericType) -> dict[str, Any]:
    """Attributes of an f32 sample for arguments of another type: f32 in them is replaced."""
    def swap(value: Any) -> Any:
        if isinstance(value, DType):
            return numeric.dtype if value is F32.dtype else value
        if isinstance(value, NumericType) and value.dtype is F32.dtype:
            return NumericType(numeric.dtype, value.policy)
        return value

    return {k: swap(v) for k, v in attrs.items()}


WATCHED = [p for p in CASES if not p.values[0].graph_attrs and not p.values[0].effects
           and p.values[0].name != "cofactor"]  # LAPACK's SVD does not return for NaN


@pytest.mark.parametrize("op, s", WATCHED)
def test_what_an_op_may_drop_is_in_its_record(
    op: GraphOp, s: Sample, rng: np.random.Generator
) -> None:
    """A sum or product shows every bad operand, unless the record says that it may drop it."""
    xs = [Draws(rng)(a).array for a in s.args]
    for k, x in enumerate(xs):
        if x.dtype.kind != "f" or not op.carries(k):
            continue
        for i, bad in itertools.product(range(x.size), (np.nan, np.inf, -np.inf)):
            y = x.copy()
            y.flat[i] = bad
            with np.errstate(all="ignore"):
                made = outputs(op, op.ref(*xs[:k], y, *xs[k + 1:], **s.attrs))
            shown = any(not np.isfinite(np.asarray(m)).all() for m in made)
            assert shown, f"operand {k} with {bad} at {i} gives {made}"


def test_records_name_operands_that_exist() -> None:
    for op in OPS.values():
        most = max((len(s.args) for s in op.samples), default=8)
        assert all(0 <= i < most for i in op.drops + op.drops_inf + op.shows), op.name
        assert not set(op.drops) & set(op.drops_inf), op.name


def outputs(op: GraphOp, made: Any) -> list[Any]:
    return list(made) if op.multi else [made]


def refuses(op: GraphOp, place: int, arg: Arg) -> bool:
    """Operands that vmap must leave whole: one key for the batch."""
    return arg.draw == "key"


# --- the record -------------------------------------------------------------------------------
@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_record_is_complete(op: GraphOp) -> None:
    if op.name.startswith("mesh_"):  # of the graph of one rank: its attributes are layouts on a
        assert op.doc and not op.differentiable  # mesh; tests/mesh runs them
        return
    assert op.samples, "an op without samples is an op without tests"
    assert op.doc or hasattr(np, op.name) or hasattr(math, op.name), "say what it computes"
    if op.differentiable:
        need = "a rule, one of smaller ops, a reason for none, or differentiable=False"
        assert op.vjp or op.no_vjp or op.expand or op.derives, need
        assert op.jvp or op.no_jvp or op.expand or op.derives, need
    if any(s.args for s in op.samples) and not op.effects:
        assert op.batch or op.expand, "vmap needs a rule, or one of smaller ops"


def test_a_rule_and_a_reason_why_there_is_none_exclude_each_other() -> None:
    for rules in ({"vjp": abs, "no_vjp": NoRule("so", "do")},
                  {"jvp": abs, "no_jvp": NoRule("so", "do")}):
        with pytest.raises(ArgumentError, match="'both' has a rule and a reason"):
            GraphOp("both", shape=abs, ref=abs, **rules)
    assert "both" not in OPS
    loop = OPS["while_loop"]
    assert loop.vjp is None and loop.no_vjp is not None and loop.jvp is not None


# --- shapes -----------------------------------------------------------------------------------
@pytest.mark.row("RT-02")
@pytest.mark.parametrize(("op", "s"), CASES)
def test_shape_rule_is_what_the_op_returns(
    op: GraphOp, s: Sample, rng: np.random.Generator
) -> None:
    xs = [Draws(rng)(a) for a in s.args]
    avals = infer(op, tuple(Aval(x.shape, x.type) for x in xs), s.attrs)
    made = outputs(op, op.ref(*[x.array for x in xs], **s.attrs))
    assert len(made) == len(avals)
    for array, aval in zip(made, avals, strict=True):
        assert np.shape(array) == tuple(aval.shape)
        assert np.asarray(array).dtype == aval.dtype.numpy


@pytest.mark.parametrize(("op", "s"), CASES)
def test_memory_is_where_the_record_says(op: GraphOp, s: Sample, rng: np.random.Generator) -> None:
    """The memory plan reuses an operand's buffer unless the op says that its result lies there."""
    xs = [Draws(rng)(a) for a in s.args]
    before = [x.array.copy() for x in xs]
    assert_lies(op, s.attrs, xs)
    for x, held in zip(xs, before, strict=True):
        np.testing.assert_array_equal(x.array, held)


def assert_lies(op: GraphOp, attrs: dict[str, Any], xs: list[Tensor]) -> None:
    made = outputs(op, op.ref(*[x.array for x in xs], **attrs))
    viewed = op.lies(attrs).kind == "view"
    for i, y in enumerate(made):
        for x in xs[1 if viewed else 0:]:
            assert not np.shares_memory(y, x.array), f"{op.name} is a view, or needs a copy"
        for other in made[:i]:
            assert not np.shares_memory(y, other), f"two results of {op.name} in one buffer"
    if op.lies(attrs).kind == "donated":
        assert op.out and len(made) == 1, "what is donated comes as out="


POLICIES = ["f32", "f64", "bf16", "f16", "fp8_e4m3", "int8", "int32", "int64", "uint8", "bool_",
            "f32 @accum(f32)", "bf16 @saturate", 'f32 @rounding("toward_zero")',
            "f32 @stochastic_round", "bf16 @accum(f32)", "f32 @loss_scale(8.0)"]


@pytest.mark.parametrize("to", POLICIES)
def test_casts_lie_where_their_attributes_say(to: str, rng: np.random.Generator) -> None:
    """Of every pair of types: between policies of one storage the elements are the operand's,
    where infinities may stay."""
    for source in POLICIES:
        x = Draws(rng)(Arg((3, 4), f"type:{source}"))
        attrs = {"source": x.type, "to": as_type(to)}
        assert_lies(OPS["cast"], attrs, [x])
        kept = x.dtype is as_type(to).dtype and (to == source or not to.endswith("@saturate"))
        assert (OPS["cast"].lies(attrs).kind == "view") == kept


@pytest.mark.parametrize(("op", "s"), CASES)
def test_results_are_the_callers_own(op: GraphOp, s: Sample, rng: np.random.Generator) -> None:
    """What a compiled function gives lies neither in an argument nor in another result; that holds
    node by node too, where values are looked at."""
    if op.effects:
        pytest.skip("its results are given once")
    xs = [Draws(rng)(a) for a in s.args]
    held = [x.array.copy() for x in xs]
    for mode in ("off", "flag"):
        with ts.config.scope(numerics=mode):
            made = ts.jit(lambda *a: (*outputs(op, apply(op, *a, **s.attrs)), *a))(*xs)
        for i, y in enumerate(made):
            for other in (*xs, *made[:i]):
                assert not np.shares_memory(y.array, other.array)
            if y.array.size:
                y[...] = np.zeros((), y.dtype.numpy)
    for x, before in zip(xs, held, strict=True):
        np.testing.assert_array_equal(x.array, before)


def _symbolic(shape: tuple, known: set[int]) -> tuple:
    """Each known extent above 1 as a name: equal extents get one name."""
    return tuple(Dim.of(f"N{n}") if n > 1 and n in known else n for n in shape)


@pytest.mark.parametrize(("op", "s"), [p for p in CASES if p.values[1].args])
def test_shape_rule_with_symbolic_extents(op: GraphOp, s: Sample, rng: np.random.Generator) -> None:
    """Names in, names out; with sizes for the names the concrete result. A rule may refuse names,
    with an error of ours: never a crash, never a wrong shape."""
    xs = [Draws(rng)(a) for a in s.args]
    keep = {i for i, a in enumerate(s.args) if a.draw == "key"}
    concrete = infer(op, tuple(Aval(x.shape, x.type) for x in xs), s.attrs)
    known = {n for x in xs for n in x.shape}
    attrs = {k: _symbolic(v, known) if k == "shape" else v for k, v in s.attrs.items()}
    avals = tuple(
        Aval(x.shape if i in keep else _symbolic(x.shape, known), x.type)
        for i, x in enumerate(xs)
    )
    try:
        found = infer(op, avals, attrs)
    except TesseraError:
        assert op.name not in ANY_EXTENT
        return
    sizes = {f"N{n}": n for n in known}
    for got, want in zip(found, concrete, strict=True):
        bound = tuple(d.bind(sizes) if isinstance(d, Dim) else d for d in got.shape)
        assert bound == tuple(want.shape)
        assert got.type == want.type


ANY_EXTENT = frozenset(  # ops that must take symbolic extents on every sample
    op.name for op in OPS.values() if isinstance(op.axes, str)
) | {
    "transpose", "broadcast_to", "flip", "concatenate", "matmul", "reduce_sum",
    "reduce_max", "cumsum",
}


@pytest.mark.parametrize(("op", "s"), [p for p in CASES if p.values[0].element is not None])
def test_an_element_is_what_the_op_gives(op: GraphOp, s: Sample, rng: np.random.Generator) -> None:
    xs = [Draws(rng)(a) for a in s.args]
    arrays = [x.array for x in xs]
    (aval,) = infer(op, tuple(Aval(x.shape, x.type) for x in xs), s.attrs)
    assert op.element is not None
    made = evaluate(op.element(*(Aval(x.shape, x.type) for x in xs), **s.attrs), aval.shape, arrays)
    assert_close(made, op.ref(*arrays, **s.attrs), dtype=aval.dtype.name, n=8)


# --- eager and compiled -----------------------------------------------------------------------
@pytest.mark.parametrize(("op", "s"), CASES)
def test_compiled_equals_eager(op: GraphOp, s: Sample, rng: np.random.Generator) -> None:
    xs = [Draws(rng)(a) for a in s.args]
    if "random" in op.effects:
        ts.random.seed(7)
        ts.random.next_step()
    eager = outputs(op, apply(op, *xs, **s.attrs))
    ts.random.seed(7)
    assert ts.config.poison, "what nothing should read is NaN in these walks"
    compiled = ts.jit(lambda *a: tuple(outputs(op, apply(op, *a, **s.attrs))))(*xs)
    for got, want in zip(compiled, eager, strict=True):
        assert got.type == want.type
        assert_close(got.array, want.array, dtype=want.dtype, n=8)


# Ops with a loop template, a few at a time: each group is one compiled loop.
LOOPS = [op for op in OPS.values() if op.loop is not None]
GROUPS = [LOOPS[i:i + 10] for i in range(0, len(LOOPS), 10)]


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: f"{g[0].name}..{g[-1].name}")
def test_compiled_loops_equal_eager(group: list[GraphOp], rng: np.random.Generator) -> None:
    """The loop templates: the same samples in an extent that is worth compiling."""
    draws, calls = Draws(rng), []
    for op in group:
        s = op.samples[0]
        calls.append((op, [draws(Arg((3, 31), a.draw)) for a in s.args], s.attrs))
    flat = [x for _, xs, _ in calls for x in xs]

    def run(*xs: Tensor) -> tuple[Tensor, ...]:
        it = iter(xs)
        return tuple(apply(op, *[next(it) for _ in held], **attrs) for op, held, attrs in calls)

    with ts.config.scope(loop_min_elements=1):
        compiled = ts.jit(run)(*flat)
    for (op, _, _), got, want in zip(calls, compiled, run(*flat), strict=True):
        assert got.type == want.type, op.name
        assert_close(got.array, want.array, dtype=want.dtype, n=2, scale=1e-3)


# --- derivatives ------------------------------------------------------------------------------
class Derivable:
    """A sample as a function of its differentiable arguments, in f64 (f32 when it holds graphs,
    whose types are fixed)."""

    def __init__(self, op: GraphOp, s: Sample, rng: np.random.Generator):
        fixed = any(isinstance(v, Graph) for v in s.attrs.values()) or bool(op.graph_attrs)
        self.numeric = F32 if fixed else F64
        self.step, self.limit = (2.0**-7, 5e-3) if fixed else (1e-6, 1e-6)
        draws = Draws(rng, self.numeric)
        self.op, self.rng = op, rng
        self.attrs = s.attrs if fixed else wide_attrs(s.attrs, F64)
        self.all = [draws(a) for a in s.args]
        self.places = [i for i, a in enumerate(s.args) if a.diff and _floating(a)]

    @property
    def xs(self) -> list[Tensor]:
        return [self.all[i] for i in self.places]

    def fn(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """The floating outputs."""
        full = list(self.all)
        for i, x in zip(self.places, xs, strict=True):
            full[i] = x
        made = outputs(self.op, apply(self.op, *full, **self.attrs))
        return tuple(y for y in made if y.dtype.kind == "float")

    def like(self, x: Tensor) -> Tensor:
        a = self.rng.standard_normal(x.shape)
        return Tensor(np.asarray(a, x.dtype.numpy), x.type)

    def moved(self, ts_: list[Tensor], by: float) -> list[Tensor]:
        return [
            Tensor(np.asarray(x.array + by * t.array, x.dtype.numpy), x.type)
            for x, t in zip(self.xs, ts_, strict=True)
        ]

    def difference(self, fn: Callable, tangents: list[Tensor]) -> list[np.ndarray]:
        """Central differences of a function of the arguments that returns tensors: of two steps, so
        that the third derivative, which a step of f32 is too long for, drops out."""
        def slope(step: float) -> list[np.ndarray]:
            ahead, behind = fn(*self.moved(tangents, step)), fn(*self.moved(tangents, -step))
            return [(a.array - b.array).astype(np.float64) / (2 * step)
                    for a, b in zip(ahead, behind, strict=True)]

        return [(4 * one - two) / 3
                for one, two in zip(slope(self.step), slope(2 * self.step), strict=True)]

    def assert_near(self, got: Any, want: Any) -> None:
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        scale = np.max(np.abs(want), initial=1.0)
        np.testing.assert_allclose(got, want, rtol=self.limit, atol=self.limit * scale)


def _directions(case: Derivable) -> list[list[Tensor]]:
    """One direction in all arguments, and one in each alone."""
    zero = [Tensor(np.zeros_like(x.array), x.type) for x in case.xs]
    every = [case.like(x) for x in case.xs]
    if len(every) == 1:
        return [every]
    alone = [[*zero[:i], every[i], *zero[i + 1:]] for i in range(len(every))]
    return [every, *alone]


@pytest.mark.parametrize(("op", "s"), DERIVABLE)
def test_jvp_is_the_finite_difference(op: GraphOp, s: Sample, rng: np.random.Generator) -> None:
    case = Derivable(op, s, rng)
    for direction in _directions(case):
        ys, out = ts.jvp(case.fn, tuple(case.xs), tuple(direction))
        for y, t, want in zip(ys, out, case.difference(case.fn, direction), strict=True):
            assert t.shape == y.shape and t.type.dtype is y.type.dtype
            case.assert_near(t.array, want)


@pytest.mark.parametrize(("op", "s"), DERIVABLE)
def test_jvp_of_each_argument_alone(op: GraphOp, s: Sample, rng: np.random.Generator) -> None:
    """The other tangents are None then, not zeros: the sum of the parts is the whole."""
    case = Derivable(op, s, rng)
    direction = [case.like(x) for x in case.xs]
    whole = ts.jvp(case.fn, tuple(case.xs), tuple(direction))[1]
    total = [np.zeros(y.shape) for y in whole]
    for i, x in enumerate(case.xs):
        def one(v: Tensor, i: int = i) -> tuple[Tensor, ...]:
            return case.fn(*case.xs[:i], v, *case.xs[i + 1:])

        for k, t in enumerate(ts.jvp(one, (x,), (direction[i],))[1]):
            total[k] = total[k] + t.array
    for got, want in zip(whole, total, strict=True):
        case.assert_near(got.array, want)


@pytest.mark.parametrize(("op", "s"), DERIVABLE)
def test_vjp_is_the_adjoint_of_jvp(op: GraphOp, s: Sample, rng: np.random.Generator) -> None:
    case = Derivable(op, s, rng)
    direction = [case.like(x) for x in case.xs]
    ys, out = ts.jvp(case.fn, tuple(case.xs), tuple(direction))
    cotangents = tuple(case.like(y) for y in ys)
    pulled = ts.vjp(case.fn, *case.xs)[1](cotangents)
    pulled = pulled if isinstance(pulled, tuple) else (pulled,)
    for x, g in zip(case.xs, pulled, strict=True):
        assert g.shape == x.shape and g.dtype is x.dtype
    forward = sum(float(np.vdot(g.array, t.array)) for g, t in zip(cotangents, out, strict=True))
    reverse = sum(float(np.vdot(g.array, t.array)) for g, t in zip(pulled, direction, strict=True))
    case.assert_near(reverse, forward)


@pytest.mark.parametrize(("op", "s"), SMOOTH)
def test_second_derivatives(op: GraphOp, s: Sample, rng: np.random.Generator) -> None:
    """Forward over reverse and reverse over reverse, against differences of the gradient."""
    case = Derivable(op, s, rng)
    weights = [case.like(y) for y in case.fn(*case.xs)]

    def loss(*xs: Tensor) -> Tensor:
        terms = [ts.sum(w * y) for w, y in zip(weights, case.fn(*xs), strict=True)]
        return sum(terms[1:], start=terms[0])

    def gradient(*xs: Tensor) -> tuple[Tensor, ...]:
        return ts.grad(lambda held: loss(*held)).rule(xs)

    direction = [case.like(x) for x in case.xs]
    want = case.difference(gradient, direction)
    forward = ts.jvp(gradient, tuple(case.xs), tuple(direction))[1]
    reverse = ts.vjp(gradient, *case.xs)[1](tuple(direction))
    reverse = reverse if isinstance(reverse, tuple) else (reverse,)
    for f, r, w in zip(forward, reverse, want, strict=True):
        case.assert_near(f.array, w)
        case.assert_near(r.array, w)


# --- batching ---------------------------------------------------------------------------------
@pytest.mark.parametrize(("op", "s"), BATCHABLE)
def test_vmap_is_a_loop(op: GraphOp, s: Sample, rng: np.random.Generator) -> None:
    draws = Draws(rng)
    may = [i for i, a in enumerate(s.args) if not refuses(op, i, a)]
    for count in range(1, len(may) + 1):
        for batched in itertools.combinations(may, count):
            _check_batch(op, s, draws, batched)


def _check_batch(op: GraphOp, s: Sample, draws: Draws, batched: tuple[int, ...]) -> None:
    slices = [[draws(a) for _ in range(BATCH if i in batched else 1)]
              for i, a in enumerate(s.args)]
    stacked = [
        Tensor(np.stack([x.array for x in xs]), xs[0].type) if i in batched else xs[0]
        for i, xs in enumerate(slices)
    ]
    axes = tuple(0 if i in batched else None for i in range(len(s.args)))
    fn = lambda *xs: tuple(outputs(op, apply(op, *xs, **s.attrs)))  # noqa: E731
    got = ts.vmap(fn, in_axes=axes).rule(*stacked)
    rows = [fn(*[xs[b if i in batched else 0] for i, xs in enumerate(slices)])
            for b in range(BATCH)]
    for k, y in enumerate(got):
        want = np.stack([row[k].array for row in rows])
        assert y.array.shape == want.shape, f"batched operands {batched}"
        assert y.type == rows[0][k].type
        assert_close(y.array, want, dtype=y.dtype, n=8)


# --- index letters ----------------------------------------------------------------------------
def _letters_of(op: GraphOp, s: Sample, avals: tuple[Aval, ...]) -> tuple[list[str], list[str]]:
    text = op.axes(*avals, **s.attrs) if callable(op.axes) else op.axes
    left, right = text.split("->")
    return (left.split(",") if s.args else []), right.split(",")


def _bind_letters(spec: str, shape: tuple, sizes: dict[str, set[int]]) -> tuple:
    """Collect the extents of the letters of one operand; returns the shape of its ellipsis."""
    head, dots, tail = spec.partition("...")
    if dots:
        assert len(head) + len(tail) <= len(shape), f"{spec} for shape {shape}"
        named = [*zip(head, shape, strict=False),
                 *zip(tail, shape[len(shape) - len(tail):], strict=True)]
        rest = shape[len(head): len(shape) - len(tail)]
    else:
        assert len(head) == len(shape), f"{spec} for shape {shape}"
        named, rest = list(zip(head, shape, strict=True)), ()
    for letter, extent in named:
        if letter == "1":
            assert extent == 1
        elif letter != "_":  # an axis that stays whole on every shard
            sizes.setdefault(letter, set()).add(extent)
    return rest


@pytest.mark.parametrize(("op", "s"), [p for p in CASES if p.values[0].axes is not None])
def test_index_letters_fit_the_shapes(op: GraphOp, s: Sample, rng: np.random.Generator) -> None:
    xs = [Draws(rng)(a) for a in s.args]
    avals = tuple(Aval(x.shape, x.type) for x in xs)
    outs = infer(op, avals, s.attrs)
    left, right = _letters_of(op, s, avals)
    assert len(left) == len(avals) and len(right) == len(outs)
    sizes: dict[str, set[int]] = {}
    rests = [_bind_letters(spec, a.shape, sizes) for spec, a in zip(left, avals, strict=True)]
    given = set(sizes)
    for spec, aval in zip(right, outs, strict=True):
        rest = _bind_letters(spec, aval.shape, sizes)
        if "..." in spec and s.args:
            assert rest == np.broadcast_shapes(*rests)
    heads = {"h"} if op.name.startswith("attention") else set()  # one of keys for some of queries
    assert all(max(n) % min(n) == 0 if letter in heads else len(n) == 1
               for letter, n in sizes.items()), sizes
    if s.args and "shape" not in s.attrs:  # whose extents the result has of its own
        assert set(sizes) == given, "a letter of the result that no operand has"


# --- NaN, empty -------------------------------------------------------------------------------
ELEMENTWISE = [op for op in OPS.values() if op.loop is not None]
HIDES_NAN = {"where"}  # a NaN that is not chosen does not show


def _elementwise_floats(op: GraphOp, shape: tuple, rng: np.random.Generator) -> list[Tensor]:
    s = op.samples[0]
    return [Draws(rng)(Arg(shape, a.draw)) for a in s.args]


@pytest.mark.parametrize("op", ELEMENTWISE, ids=lambda op: op.name)
def test_elementwise_of_nothing_is_nothing(op: GraphOp, rng: np.random.Generator) -> None:
    xs = _elementwise_floats(op, (0, 3), rng)
    out = apply(op, *xs, **op.samples[0].attrs)
    assert out.array.shape == (0, 3) and out.array.dtype == out.dtype.numpy


@pytest.mark.parametrize("op", ELEMENTWISE, ids=lambda op: op.name)
def test_nan_propagates_elementwise(op: GraphOp, rng: np.random.Generator) -> None:
    for place, arg in enumerate(op.samples[0].args):
        xs = _elementwise_floats(op, (5,), rng)
        if not _floating(arg) or op.name in HIDES_NAN:
            continue
        xs[place].array[2] = np.nan
        out = apply(op, *xs, **op.samples[0].attrs)
        if out.dtype.kind == "float":
            assert np.isnan(out.array[2])
            assert not np.isnan(np.delete(out.array, 2)).any()
