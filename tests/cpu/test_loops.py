"""Compiled CPU loops against the NumPy interpreter of the same programs."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import ArgumentError, ShapeError
from tessera.graph.cpu import LoopInput, LoopOp, LoopOutput, LoopProgram, compile_loops, interpret
from tessera.graph.cpu.interpret import philox_words
from tessera.graph.cpu.layout import element_strides
from tessera.graph.schedule.loop_dtypes import numpy_of, register_of
from tolerance import assert_close

FLOATS = ("f64", "f32", "bf16", "f16", "fp8_e4m3", "fp8_e5m2")
INTS = ("int64", "uint64", "int32", "uint32", "int16", "uint16", "int8", "uint8")


def op(kind: str, args: tuple[int, ...], dtype: str = "f32", expr: str = "", value=None) -> LoopOp:
    return LoopOp(kind, args, dtype, expr, value)


def softmax_program(dtype: str = "f32", out: str = "f32") -> LoopProgram:
    return LoopProgram(
        (LoopInput(dtype),),
        (op("reduce_max", (0,)), op("map", (0, 1), expr="exp({0} - {1})"),
         op("reduce_sum", (2,)), op("map", (2, 3), expr="{0} / {1}")),
        (LoopOutput(4, out),),
    )


def rms_norm_gradient_program() -> LoopProgram:
    """dx, dweight and 1/rms of y = x / rms(x) * weight, for a row length given as a scalar."""
    return LoopProgram(
        (LoopInput("f32"), LoopInput("f32"), LoopInput("f32"), LoopInput("f32")),  # x w g 1/C
        (
            op("map", (0,), expr="{0} * {0}"), op("reduce_sum", (4,)),
            op("map", (5, 3), expr="rsqrt({0} * {1} + 1e-6)"),
            op("map", (1, 2), expr="{0} * {1}"), op("map", (7, 0), expr="{0} * {1}"),
            op("reduce_sum", (8,)), op("map", (9, 6, 3), expr="{0} * {1} * {1} * {2}"),
            op("map", (7, 0, 6, 10), expr="({0} - {1} * {3}) * {2}"),
            op("map", (2, 0, 6), expr="{0} * {1} * {2}"),
        ),
        (LoopOutput(11, "f32"), LoopOutput(12, "f32", "column_sum"), LoopOutput(6, "f32", "row")),
    )


def cross_entropy_program() -> LoopProgram:
    """Loss per row and dlogits of cross entropy with integer labels [R, 1]."""
    return LoopProgram(
        (LoopInput("bf16"), LoopInput("int32")),
        (
            op("reduce_max", (0,)), op("map", (0, 2), expr="exp({0} - {1})"),
            op("reduce_sum", (3,)), op("iota", (), "i32", value=-1),
            op("map", (5, 1), "bool_", "{0} == {1}"),
            op("map", (6, 0), expr="{1} if {0} else 0.0"), op("reduce_sum", (7,)),
            op("map", (4, 2, 8), expr="log({0}) + {1} - {2}"),
            op("map", (3, 4, 6), expr="{0} / {1} - (1.0 if {2} else 0.0)"),
        ),
        (LoopOutput(9, "f32", "row"), LoopOutput(10, "bf16")),
    )


def check(program: LoopProgram, arrays, shape=None, rtol=2e-6, atol=1e-6) -> None:
    """Compiled equals interpreted: exactly for integers, within the tolerance for floats."""
    got, want = compile_loops(program)(*arrays, shape=shape), interpret(program, arrays, shape)
    for g, w, out in zip(got, want, program.outputs, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape
        if register_of(out.dtype) in ("f32", "f64"):
            unit = {"bf16": 2**-7, "f16": 2**-10, "fp8_e4m3": 2**-3, "fp8_e5m2": 2**-2}
            r = max(rtol, unit.get(out.dtype, 0) * 1.01)
            np.testing.assert_allclose(g.astype(float), w.astype(float), rtol=r, atol=atol)
        else:
            np.testing.assert_array_equal(g, w)


def random_array(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    kind = numpy_of(dtype)
    if dtype == "bool_":
        return rng.random(shape) < 0.5
    if dtype in FLOATS:
        return rng.normal(size=shape).astype(np.float32).astype(kind)
    low = -100 if dtype[0] == "i" else 0
    return rng.integers(low, 100, shape).astype(kind)


# ---- memory types -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "f16", "fp8_e4m3", "fp8_e5m2"])
def test_every_code_decodes_as_ml_dtypes(dtype: str) -> None:
    kind = numpy_of(dtype)
    codes = np.arange(2 ** (8 * kind.itemsize), dtype=f"u{kind.itemsize}").view(kind)
    program = LoopProgram(
        (LoopInput(dtype),), (op("map", (0,), expr="{0}"),), (LoopOutput(1, "f32"),)
    )
    np.testing.assert_array_equal(compile_loops(program)(codes)[0], codes.astype(np.float32))


@pytest.mark.parametrize("dtype", ["bf16", "f16", "fp8_e4m3", "fp8_e5m2"])
def test_encode_is_bit_identical_to_astype(dtype: str, rng: np.random.Generator) -> None:
    kind = numpy_of(dtype)
    raw = rng.integers(0, 2**32, 1 << 18, dtype=np.uint32)
    codes = np.arange(2 ** (8 * kind.itemsize), dtype=f"u{kind.itemsize}").view(kind)
    exact = codes.astype(np.float32).view(np.uint32)
    near = (exact[:, None] + np.arange(-2, 3, dtype=np.int64)).astype(np.uint32).ravel()
    shift = {"bf16": 16, "f16": 13, "fp8_e4m3": 20, "fp8_e5m2": 21}[dtype]
    ties = (exact + np.uint32(1 << (shift - 1))).astype(np.uint32)
    x = np.concatenate([raw, near, ties, ties + np.uint32(1), ties - np.uint32(1)]).view(np.float32)
    with np.errstate(all="ignore"):
        want = x.astype(kind)
        back = want.astype(np.float32)
    program = LoopProgram(
        (LoopInput("f32"),), (op("round", (0,), dtype),),
        (LoopOutput(0, dtype), LoopOutput(1, "f32")),
    )
    got, rounded = compile_loops(program)(x)
    code = f"u{kind.itemsize}"
    np.testing.assert_array_equal(got.view(code), want.view(code))
    np.testing.assert_array_equal(rounded, back)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS, "bool_"])
def test_copy_through_registers_keeps_every_type(dtype: str, rng: np.random.Generator) -> None:
    raw = rng.integers(0, 256, 8 * 1001, dtype=np.uint8)
    x = (raw[:1001] < 128) if dtype == "bool_" else raw.view(numpy_of(dtype))[:1001]
    program = LoopProgram((LoopInput(dtype),), (), (LoopOutput(0, dtype),))
    (got,) = compile_loops(program)(x)
    if dtype in FLOATS:  # a NaN loses its payload, as in ml_dtypes
        with np.errstate(invalid="ignore"):
            got, x = got.astype(np.float64), x.astype(np.float64)
    np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize(
    "source, target",
    list(itertools.product(("f64", "f32", "int64", "int32", "uint32", "bool_"), repeat=2)),
)
def test_register_casts(source: str, target: str, rng: np.random.Generator) -> None:
    x = random_array(rng, source, (257,))
    if target == "uint32" and source != "bool_":
        x = np.abs(x)
    register = register_of(target)
    program = LoopProgram(
        (LoopInput(source),), (op("map", (0,), register, "{0}"),), (LoopOutput(1, target),)
    )
    check(program, [x])


# ---- shapes and strides -----------------------------------------------------------------------

SHAPES = [(1,), (7,), (5, 1), (1, 1), (3, 4, 5), (2, 3, 4, 33), (4, 257), (1000, 3), (2, 4099),
          (9001,), (0,), (0, 4), (3, 0), (2, 0, 5)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "make", [softmax_program, rms_norm_gradient_program, cross_entropy_program]
)
def test_row_programs_on_all_shapes(make, shape, rng: np.random.Generator) -> None:
    program = make()
    x = random_array(rng, program.inputs[0].dtype, shape)
    rest = []
    if make is rms_norm_gradient_program:
        rest = [random_array(rng, "f32", shape[-1:]), random_array(rng, "f32", shape),
                np.float32(1 / max(shape[-1], 1)).reshape(())]
    elif make is cross_entropy_program:
        rest = [rng.integers(0, max(shape[-1], 1), (*shape[:-1], 1)).astype(np.int32)]
    check(program, [x, *rest], shape, rtol=2e-5, atol=2e-5)


def views(rng: np.random.Generator, dtype: str) -> list[np.ndarray]:
    """Strided and broadcast views that broadcast to [2, 3, 5, 8]."""
    return [
        random_array(rng, dtype, (2, 3, 5, 8)), random_array(rng, dtype, (8,)),
        random_array(rng, dtype, (5, 1)), random_array(rng, dtype, ()),
        random_array(rng, dtype, (1, 1, 5, 8)), random_array(rng, dtype, (2, 1, 1, 8)),
        random_array(rng, dtype, (8, 5, 3, 2)).T,
        random_array(rng, dtype, (2, 3, 8, 5)).swapaxes(2, 3),
        random_array(rng, dtype, (4, 3, 10, 16))[::2, ::-1, 1::2, ::2],
        random_array(rng, dtype, (2, 3, 5, 1)),
    ]


@pytest.mark.parametrize("pair", list(itertools.combinations(range(10), 2)))
def test_strided_and_broadcast_views(pair: tuple[int, int], rng: np.random.Generator) -> None:
    a, b = (views(rng, "f32")[k] for k in pair)
    flat = LoopProgram(
        (LoopInput("f32"),) * 2, (op("map", (0, 1), expr="{0} * {1} + 1.0"),),
        (LoopOutput(2, "f32"),),
    )
    rows = LoopProgram(
        (LoopInput("f32"),) * 2,
        (op("map", (0, 1), expr="{0} * {1}"), op("reduce_sum", (2,)),
         op("map", (2, 3), expr="{0} - {1}")),
        (LoopOutput(4, "f32"), LoopOutput(3, "f32", "row"), LoopOutput(2, "f32", "column_sum")),
    )
    check(flat, [a, b], (2, 3, 5, 8))
    check(rows, [a, b], (2, 3, 5, 8), atol=3e-5)


@pytest.mark.parametrize("shape", [(96, 64), (3, 64, 128), (17, 96), (50, 70)])
def test_transposes_are_tiled_right(shape, rng: np.random.Generator) -> None:
    program = LoopProgram(
        (LoopInput("f32"),) * 2, (op("map", (0, 1), expr="{0} - {1}"),), (LoopOutput(2, "f32"),)
    )
    a = random_array(rng, "f32", shape)
    b = random_array(rng, "f32", (*shape[:-2], shape[-1], shape[-2])).swapaxes(-1, -2)
    np.testing.assert_array_equal(compile_loops(program)(a, b)[0], a - b)


def test_outputs_may_be_strided(rng: np.random.Generator) -> None:
    x = random_array(rng, "f32", (6, 40))
    out = np.full((40, 12), np.nan, np.float32).T[::2]
    kernel = compile_loops(softmax_program())
    kernel.bind(x.shape, [element_strides(x)], [element_strides(out)])([x], [out])
    np.testing.assert_allclose(out, interpret(softmax_program(), [x])[0], rtol=1e-6)


# ---- special values ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind, reference", [("reduce_max", np.max), ("reduce_min", np.min),
                                             ("reduce_sum", np.sum)])
def test_reductions_propagate_nan_and_infinity(kind, reference, rng: np.random.Generator) -> None:
    x = rng.normal(size=(8, 300)).astype(np.float32)
    x[1, 150], x[2, 299], x[3, 0], x[5, 3], x[5, 4] = np.nan, np.inf, -np.inf, np.inf, -np.inf
    x[6, :], x[7, :] = -np.inf, np.inf
    program = LoopProgram((LoopInput("f32"),), (op(kind, (0,)),), (LoopOutput(1, "f32", "row"),))
    with np.errstate(all="ignore"):
        want = reference(x.astype(np.float64), axis=-1, keepdims=True)
    assert_close(compile_loops(program)(x)[0], want, "f32", n=300, scale=300**0.5)


def test_long_sums_are_accurate(rng: np.random.Generator) -> None:
    x = rng.random((2, 1 << 20)).astype(np.float32)
    program = LoopProgram(
        (LoopInput("f32"),), (op("reduce_sum", (0,)),), (LoopOutput(1, "f32", "row"),)
    )
    want = x.astype(np.float64).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(compile_loops(program)(x)[0], want, rtol=3e-7)


def test_arithmetic_is_that_of_numpy_bit_for_bit(rng: np.random.Generator) -> None:
    """No contraction and no reassociation outside sums: fusing ops changes no value."""
    a, b, c = (random_array(rng, "f32", (4097,)) for _ in range(3))
    program = LoopProgram(
        (LoopInput("f32"),) * 3,
        (op("map", (0, 1, 2), expr="({0} * {1} + {2}) - {2} / ({0} + 0.1) + {1} * {1}"),),
        (LoopOutput(3, "f32"),),
    )
    want = (a * b + c) - c / (a + np.float32(0.1)) + b * b
    np.testing.assert_array_equal(compile_loops(program)(a, b, c)[0], want)


# ---- random bits, iota ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1,), (3, 5), (7, 1), (9, 4099), (30001,), (2, 3, 6)])
def test_random_bits_are_philox_words(shape, rng: np.random.Generator) -> None:
    key = rng.integers(0, 2**32, 2, dtype=np.uint32)
    program = LoopProgram(
        (LoopInput("uint32"),) * 2, (op("random_bits", (0, 1), "u32"),), (LoopOutput(2, "uint32"),)
    )
    got = compile_loops(program)(key[0].reshape(()), key[1].reshape(()), shape=shape)[0]
    np.testing.assert_array_equal(got.ravel(), philox_words(key, got.size))


def test_philox_words_are_those_of_numerics(rng: np.random.Generator) -> None:
    from tessera.numerics import random_bits

    key = rng.integers(0, 2**32, 2, dtype=np.uint32)
    np.testing.assert_array_equal(philox_words(key, 1003), random_bits(key, 1003))


def test_dropout_on_rows_of_a_reduction(rng: np.random.Generator) -> None:
    program = LoopProgram(
        (LoopInput("f32"), LoopInput("uint32"), LoopInput("uint32")),
        (op("random_bits", (1, 2), "u32"), op("map", (3,), "bool_", "{0} < 2147483648"),
         op("map", (0, 4), expr="{0} * 2.0 if {1} else 0.0"), op("reduce_sum", (5,)),
         op("map", (5, 6), expr="{0} / {1}")),
        (LoopOutput(7, "f32"), LoopOutput(4, "bool_")),
    )
    key = rng.integers(0, 2**32, 2, dtype=np.uint32)
    x = rng.random((13, 77)).astype(np.float32)
    check(program, [x, key[0].reshape(()), key[1].reshape(())], x.shape, rtol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_iota_counts_along_its_axis(axis: int) -> None:
    program = LoopProgram((), (op("iota", (), "i32", value=axis),), (LoopOutput(0, "int32"),))
    check(program, [], (4, 5, 6))


# ---- random programs --------------------------------------------------------------------------

FLOAT_EXPRESSIONS = ["{0} + {1}", "{0} - {1}", "{0} * {1}", "maximum({0}, {1})", "-{0}", "abs({0})",
                     "{0} * 0.5 + 1", "tanh({0})", "exp(-abs({0}))", "{0} if {0} > {1} else {1}",
                     "sigmoid({0}) * {1}", "sqrt(abs({0}) + 1)", "2.0"]


@st.composite
def programs(draw) -> tuple[LoopProgram, tuple[int, ...], list[tuple[int, ...]]]:
    """A random float program with reductions, and shapes of its inputs."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    shape = (*shape[:-1], draw(st.sampled_from([1, 2, 15, 16, 17, 64, 130])))
    count = draw(st.integers(1, 3))
    inputs = [draw(st.sampled_from(["f32", "bf16", "f16", "f64"])) for _ in range(count)]
    shapes = []
    for _ in range(count):
        extents = tuple(n if draw(st.integers(0, 3)) else 1 for n in shape)
        shapes.append(extents[draw(st.sampled_from([0, len(shape) - 1])):])
    ops: list[LoopOp] = []
    for _ in range(draw(st.integers(1, 8))):
        have = count + len(ops)
        kinds = ["map"] * 5 + ["reduce_sum", "reduce_max", "reduce_min", "round"]
        kind = draw(st.sampled_from(kinds))
        a, b = draw(st.integers(0, have - 1)), draw(st.integers(0, have - 1))
        if kind == "map":
            ops.append(op("map", (a, b), expr=draw(st.sampled_from(FLOAT_EXPRESSIONS))))
        else:
            ops.append(op(kind, (a,), "bf16" if kind == "round" else "f32"))
    last = count + len(ops) - 1
    outputs = [LoopOutput(last, "f32")]
    reduced = [count + i for i, o in enumerate(ops) if o.kind.startswith("reduce")]
    outputs += [LoopOutput(v, "f32", "row") for v in reduced[:2]]
    if draw(st.booleans()):
        outputs.append(LoopOutput(draw(st.integers(0, last)), "f32", "column_sum"))
    return LoopProgram(tuple(map(LoopInput, inputs)), tuple(ops), tuple(outputs)), shape, shapes


@given(programs(), st.integers(0, 2**32 - 1))
def test_random_programs(case, seed: int) -> None:
    program, shape, shapes = case
    rng = np.random.default_rng(seed)
    arrays = [random_array(rng, x.dtype, s) for x, s in zip(program.inputs, shapes, strict=True)]
    # A bf16 rounding may fall on either side when its argument differs in the last place.
    rounds = any(o.kind == "round" for o in program.ops)
    with np.errstate(all="ignore"):
        want = interpret(program, arrays, shape)
        got = compile_loops(program)(*arrays, shape=shape)
    for g, w in zip(got, want, strict=True):
        scale = np.max(np.abs(w), initial=1.0, where=np.isfinite(w))
        np.testing.assert_allclose(g, w, rtol=1e-2 if rounds else 2e-4,
                                   atol=(2e-2 if rounds else 2e-5) * scale)


INT_EXPRESSIONS = ["{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} & {1}", "{0} ^ {1}", "{0} << 3",
                   "{0} >> 2", "maximum({0}, {1})", "{0} // {1}", "{0} % {1}", "~{0}",
                   "{0} if {0} < {1} else 7"]


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint32", "int16", "int8", "uint8"])
@pytest.mark.parametrize("expr", INT_EXPRESSIONS)
def test_integer_expressions_wrap_as_numpy(dtype, expr, rng: np.random.Generator) -> None:
    register = register_of(dtype)
    bounds = np.iinfo(numpy_of(dtype))
    a, b = (rng.integers(bounds.min, bounds.max, 999, dtype=numpy_of(dtype)) for _ in range(2))
    program = LoopProgram(
        (LoopInput(dtype),) * 2, (op("map", (0, 1), register, expr),), (LoopOutput(2, dtype),)
    )
    check(program, [a, b])


@pytest.mark.parametrize("register", ["i64", "i32", "u32", "bool_"])
def test_integer_reductions(register: str, rng: np.random.Generator) -> None:
    memory = {"i64": "int64", "i32": "int32", "u32": "uint32"}.get(register, "bool_")
    x = random_array(rng, memory, (5, 67))
    kinds = ("reduce_sum", "reduce_max", "reduce_min")
    rows = tuple(LoopOutput(1 + i, memory, "row") for i in range(3))
    program = LoopProgram(
        (LoopInput(memory),), tuple(op(k, (0,), register) for k in kinds),
        (*rows, LoopOutput(0, "int64", "column_sum")),
    )
    check(program, [x])


# ---- errors, text, laziness -------------------------------------------------------------------


def test_ill_formed_programs_say_what_is_wrong() -> None:
    x = (LoopInput("f32"),)
    with pytest.raises(ArgumentError, match="reads value 3"):
        LoopProgram(x, (op("map", (3,), expr="{0}"),), (LoopOutput(0, "f32"),))
    with pytest.raises(ArgumentError, match="unknown memory type"):
        LoopProgram((LoopInput("float32"),), (), (LoopOutput(0, "f32"),))
    with pytest.raises(ArgumentError, match="needs an output"):
        LoopProgram(x, (), ())
    for expr, text in (("foo({0})", "unknown function"), ("{0}.real", "not allowed"),
                       ("exp({0}, {0})", "takes 1"), ("{0} +", "invalid syntax")):
        program = LoopProgram(x, (op("map", (0,), expr=expr),), (LoopOutput(1, "f32"),))
        with pytest.raises(ArgumentError, match=text):
            compile_loops(program)
    program = LoopProgram(x, (), (LoopOutput(0, "f32", "row"),))
    with pytest.raises(ArgumentError, match="varies along the last axis"):
        compile_loops(program).bind((4, 4), [(4, 1)], [(1, 0)])
    with pytest.raises(ShapeError, match="strides"):
        compile_loops(program).bind((4, 4), [(1,)], [(1, 0)])


def test_equal_programs_share_a_kernel_and_print_the_same() -> None:
    assert compile_loops(softmax_program()) is compile_loops(softmax_program())
    assert str(softmax_program()).splitlines()[2] == "v2 = map f32 exp(v0 - v1)"
    assert "exp_f32(v0 - v1)" in compile_loops(softmax_program()).source


def test_softmax_source() -> None:
    """One pass for each reduction level; the exponential is computed once and kept."""
    source = compile_loops(softmax_program()).source
    assert source.count("# pass") == 3 and source.count("exp_f32") == 1
    assert "store_f32_keep0(keep0, j, v2)" in source and "v2 = load_f32_keep0(keep0, j)" in source


def test_numba_and_llvmlite_are_imported_lazily() -> None:
    names = "[m for m in ('numba', 'llvmlite') if m in sys.modules]"
    text = f"import sys, tessera.graph.cpu; print({names})"
    got = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert got.stdout.strip() == "[]"
