"""Random programs run in every way: op by op, compiled, in a batch, differentiated, in f64.

300 a run. A failure prints its program; `--seed` draws others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tessera as ts
from programs import (
    Program,
    as_f64,
    error_bounds,
    exact_program,
    rounded_program,
    smooth_program,
)
from tessera.graph.cpu import compiled, interpret
from tessera.graph.cpu.program import LoopProgram
from tessera.graph.cuda import CudaProgram
from tessera.numerics import as_type
from tessera.tensor import Tensor

EXACT, ROUNDED, SMOOTH, LOOPED, KERNELS, A_TEST = 144, 72, 72, 12, 48, 12


class Meaning:
    """Stands for a compiled loop: the NumPy meaning of its program, on the strides it is bound to.
    """

    def __init__(self, program: LoopProgram):
        self.program = program

    def bind(self, shape: tuple, in_strides: Any, out_strides: Any) -> Callable:
        shape = tuple(shape) or (1,)

        def placed(a: np.ndarray, strides: tuple, extents: tuple) -> np.ndarray:
            strides = tuple(strides) or (0,) * len(extents)
            plain = a.view(f"u{a.itemsize}")  # NumPy's own types have strides to choose
            return np.lib.stride_tricks.as_strided(
                plain, extents, [s * a.itemsize for s in strides]).view(a.dtype)

        def launch(inputs: Any, outputs: Any) -> None:
            arrays = [placed(a, s, shape) for a, s in zip(inputs, in_strides, strict=True)]
            made = interpret(self.program, arrays, shape)
            for y, out, strides, to in zip(made, outputs, out_strides, self.program.outputs,
                                           strict=True):
                placed(out, strides, y.shape)[...] = y
                assert to.dtype == as_type(out.dtype).dtype.name

        return launch


@pytest.fixture
def loops(monkeypatch: Any) -> Iterator[None]:
    """Groups of any size run as loops, by their meaning: nothing is compiled."""
    monkeypatch.setattr(compiled, "compile_loops", Meaning)
    with ts.config.scope(loop_min_elements=1):
        yield


def programs(rng: np.random.Generator, make: Callable[[Any], Program]) -> Iterator[Program]:
    for seed in rng.integers(0, 2**63, A_TEST):
        made = make(np.random.default_rng(seed))
        print(f"--- program {seed}\n{made}")
        yield made


def parts(count: int) -> Any:
    return pytest.mark.parametrize("part", range(count // A_TEST))


def same(got: Tensor, want: Tensor) -> None:
    """Equal types and values; of zeros the sign is open, where operands were equal."""
    assert got.type == want.type and got.shape == want.shape
    assert got.buffer.dtype == want.buffer.dtype
    np.testing.assert_array_equal(as_f64(got), as_f64(want))


def check_exact(made: Program) -> None:
    want = made(*made.inputs)
    before = [as_f64(x) for x in made.inputs]
    compiled = ts.jit(made.__call__)
    for _ in range(2):  # the second call runs in the memory of the first
        got = compiled(*made.inputs)
        for y, z in zip(got, want, strict=True):
            same(y, z)
        for y in got:  # they are the caller's own: nothing else changes
            if y.size and y.scale is None:
                y[...] = ts.zeros((), y.type)
    for x, held in zip(made.inputs, before, strict=True):
        np.testing.assert_array_equal(as_f64(x), held)
    far = made.run(made.wide_inputs, wide=True)
    for i, y in zip(made.outputs, want, strict=True):
        np.testing.assert_array_equal(as_f64(y), as_f64(far[i]))
    check_batch(made)


def check_batch(made: Program) -> None:
    """Three of each argument at once: what they give one by one. A second element is one of other
    values, where the program gives integers for them too."""
    other = [Tensor(np.flip(x.array).copy() if not x.dtype.packed else x.array, x.type)
             for x in made.inputs]
    try:
        far = made.run([as_wide(x) for x in other], wide=True)
        near = made.run(other)
    except ts.TesseraError:
        far, near = [], []
    exact = bool(far) and all(
        np.isfinite(as_f64(y)).all() and (as_f64(y) == as_f64(z)).all()
        and (np.abs(as_f64(y)) < 2.0**20).all() and (as_f64(y) == np.rint(as_f64(y))).all()
        for y, z in zip(far, near, strict=True))
    rows = [made.inputs, other if exact else made.inputs, made.inputs]
    stacked = [ts.stack(list(xs)) for xs in zip(*rows, strict=True)]
    got = ts.vmap(made.__call__)(*stacked)
    for k, row in enumerate(rows):
        for y, z in zip(got, made(*row), strict=True):
            same(y[k], z)


def as_wide(x: Tensor) -> Tensor:
    return Tensor(as_f64(x), as_type("f64")) if x.dtype.kind == "float" else x


@parts(EXACT)
def test_programs_of_integers(part: int, loops: None, rng: np.random.Generator) -> None:
    for made in programs(rng, exact_program):
        check_exact(made)


@parts(ROUNDED)
def test_programs_of_rounded_numbers(part: int, loops: None, rng: np.random.Generator) -> None:
    for made in programs(rng, rounded_program):
        check_rounded(made)
        rows = [made.inputs, [Tensor(np.flip(x.array).copy(), x.type) for x in made.inputs]]
        stacked = [ts.stack(list(xs)) for xs in zip(*rows, strict=True)]
        got = ts.vmap(made.__call__)(*stacked)
        for k, row in enumerate(rows):
            for y, z in zip(got, made(*row), strict=True):
                same(y[k], z)


@parts(LOOPED)
def test_programs_in_compiled_loops(part: int, rng: np.random.Generator) -> None:
    with ts.config.scope(loop_min_elements=1):
        for made in programs(rng, lambda r: (
                rounded_program if r.random() < 0.5 else exact_program)(r)):
            check_rounded(made)


@parts(KERNELS)
@pytest.mark.parametrize("make", [exact_program, rounded_program])
def test_programs_as_kernels(make: Callable[[Any], Program], part: int,
                             rng: np.random.Generator) -> None:
    """Lowered for a GPU, by the interpreter: what their ops give one by one, bit by bit."""
    for made in programs(rng, make):
        if not made.on_mesh:
            kernels = CudaProgram(ts.jit(made.__call__).graph(*made.inputs), "sm_90a")
            for y, z in zip(kernels.run(made.inputs), made(*made.inputs), strict=True):
                same(Tensor(y, z.type), z)


@pytest.mark.parametrize("numeric", ["bf16", "f16", "fp8_e5m2"])
def test_infinities_of_the_format_itself_saturate(numeric: str) -> None:
    to = as_type(f"{numeric} @saturate")
    x = ts.tensor([np.inf, -np.inf, np.nan, 2.0, -0.0], numeric)
    want = [to.dtype.max, -to.dtype.max, np.nan, 2.0, -0.0]
    for fn in (lambda x: ts.cast(x, to), lambda x: ts.cast(x, to) * 1.0):
        compiled = ts.jit(fn)
        with ts.config.scope(loop_min_elements=1):
            found = [fn(x), compiled(x)]
        found += CudaProgram(compiled.graph(x), "sm_90a").run([x])
        for y in found:
            np.testing.assert_array_equal(np.asarray(as_f64(y) if isinstance(y, Tensor) else y,
                                                     np.float64), want)
    kept = ts.cast(ts.cast(x, to), numeric)  # nothing is left to change
    np.testing.assert_array_equal(as_f64(kept), want)


@pytest.mark.parametrize("numeric", ["tf32", "bf16", "f16", "fp8_e5m2"])
def test_infinities_of_a_narrow_format_saturate_in_f32(numeric: str) -> None:
    x = ts.tensor([np.inf, -np.inf, np.nan, 2.0], numeric)
    fn = ts.jit(lambda x: ts.cast(x, "f32 @saturate"))
    want = np.float32([3.4028235e38, -3.4028235e38, np.nan, 2.0])
    for y in (fn(x), *CudaProgram(fn.graph(x), "sm_90a").run([x])):
        np.testing.assert_array_equal(np.asarray(y), want)


def test_bools_constants_and_sums_kept_in_f64_as_kernels(rng: np.random.Generator) -> None:
    """What random programs found: each once more by itself."""
    b = ts.tensor([True, False, True])
    x = ts.tensor(rng.standard_normal((3, 300)), "f32 @accum(f64)")
    for fn, xs in ((lambda b: (b + b) - 1, (b,)), (lambda b: (b * b) + 1, (b,)),
                   (lambda b: ts.relu(b), (b,)), (lambda x: x @ x.T, (x,)),
                   (lambda x: ts.searchsorted(ts.ones(5), x[0]), (x,)),
                   (lambda x: ts.grad(lambda x: ts.sum(ts.take_along_axis(
                       x, ts.tensor([[1], [0], [-1]]), 1)))(x), (x,)),
                   (lambda x: ts.searchsorted(ts.sort(x[0]), ts.zeros(4)), (x,))):
        want, compiled = fn(*xs), ts.jit(fn)
        same(compiled(*xs), want)
        (y,) = CudaProgram(compiled.graph(*xs), "sm_90a").run([*xs])
        same(Tensor(y, want.type), want)
    assert np.abs(as_f64(x @ x.T) - as_f64(x) @ as_f64(x).T).max() < 2.0**-24 * 700


def check_rounded(made: Program) -> None:
    """Compiled, what its ops give one by one, bit by bit."""
    for y, z in zip(ts.jit(made.__call__)(*made.inputs), made(*made.inputs), strict=True):
        same(y, z)


@parts(SMOOTH)
def test_smooth_programs(part: int, loops: None, rng: np.random.Generator) -> None:
    for made in programs(rng, smooth_program):
        check_values(made, rng)
        check_gradients(made, rng)


def check_values(made: Program, rng: np.random.Generator) -> None:
    far = made.run(made.wide_inputs, wide=True)
    bounds = error_bounds(made, rng, 2.0**-23)
    for run in (made.__call__, ts.jit(made.__call__)):
        for y, i, bound in zip(run(*made.inputs), made.outputs, bounds, strict=True):
            off = np.abs(as_f64(y) - as_f64(far[i]))
            assert (off <= bound).all(), f"output {i}: {np.max(off / np.maximum(bound, 1e-300))}"


def check_gradients(made: Program, rng: np.random.Generator) -> None:
    """In f64: op by op, compiled, and along a direction against central differences."""
    xs = made.wide_inputs
    weights = [rng.standard_normal(y.shape) for y in (made.values[i] for i in made.outputs)]

    def loss(*xs: Any) -> Any:
        values = made.run(xs, wide=True)
        return sum((ts.sum(values[i] * ts.tensor(w, "f64")) for i, w in
                    zip(made.outputs, weights, strict=True)), ts.zeros((), "f64"))

    wrt = tuple(range(len(xs)))
    value, pull = ts.vjp(loss, *xs)
    eager = pull(ts.ones((), "f64"))
    eager = eager if isinstance(eager, tuple) else (eager,)
    compiled = ts.grad(loss, argnums=wrt)(*xs)
    size = max(1.0, *(float(np.abs(as_f64(g)).max(initial=0)) for g in eager))
    for a, b in zip(eager, compiled, strict=True):
        np.testing.assert_allclose(as_f64(b), as_f64(a), rtol=1e-9, atol=1e-10 * size)
    along = [rng.standard_normal(x.shape) for x in xs]
    slope = sum(float(np.sum(as_f64(g) * d)) for g, d in zip(eager, along, strict=True))
    check_slope(loss, xs, along, slope, abs(float(value)) + size)


def check_slope(loss: Callable, xs: list[Tensor], along: list[np.ndarray], slope: float,
                scale: float) -> None:
    """Central differences of two steps: their difference tells how far either is from the slope."""
    def difference(h: float) -> float:
        ahead, behind = (float(loss(*[Tensor(np.asarray(x.array + s * h * d), x.type)
                                      for x, d in zip(xs, along, strict=True)])) for s in (1, -1))
        return (ahead - behind) / (2 * h)

    coarse, fine = difference(2.0**-12), difference(2.0**-13)
    truncation = abs(coarse - fine)  # 3/4 of the coarse one's: that of a third derivative
    rounding = 2.0**-52 * 2.0**13 * scale * 2.0**8
    assert abs(fine - slope) <= 2 * truncation + rounding + 1e-9 * abs(slope), (fine, slope)


def test_what_a_derivative_alone_tells_apart_is_one_value_in_a_graph():
    fn = ts.jit(lambda x: ts.where(x > 0, x, ts.stop_gradient(x)) * 2.0)
    assert fn(ts.tensor([1.0, -1.0])).tolist() == [2.0, -2.0]
    assert "call where" not in fn.inspect_ir("schedule")
