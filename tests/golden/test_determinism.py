"""`ts.determinism` and fast maths: what is compiled, what stands in the IR, what stays as it is."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from emulator import compare
from kernels.build import build
from ptx_harness import require_compiler
from tessera.errors import CompileError
from tessera.runtime.target import parse_target
from tessera.tile.cuda.compile import compile_function
from tessera.tile.cuda.intrinsics.fast_math import FAST
from tessera.tile.cuda.ptx_text import opcode_counts
from tessera.tile.ir.parsing import parse_ir
from tessera.tile.ir.printing import print_ir
from tessera.tile.launch.machine_code import CompileRequest
from tile_gpu import facts_of, prepare

require_compiler()
pytestmark = pytest.mark.row("CORE-19")
N = 300
# op -> (source, opcode of the approximation, an opcode that only the exact form has)
OPS = {
    "exp": ("tile.exp(x)", "ex2.approx.ftz.f32", "fma.rn.f32"),
    "log": ("tile.log(x)", "lg2.approx.ftz.f32", "fma.rn.f32"),
    "log2": ("tile.log2(x)", "lg2.approx.ftz.f32", "fma.rn.f32"),
    "sin": ("tile.sin(x)", "sin.approx.ftz.f32", "fma.rn.f32"),
    "cos": ("tile.cos(x)", "cos.approx.ftz.f32", "fma.rn.f32"),
    "tan": ("tile.tan(x)", "div.approx.ftz.f32", "fma.rn.f32"),
    "tanh": ("tile.tanh(x)", "tanh.approx.f32", "fma.rn.f32"),
    "sqrt": ("tile.sqrt(x)", "sqrt.approx.ftz.f32", "sqrt.rn.f32"),
    "rsqrt": ("tile.rsqrt(x)", "rsqrt.approx.ftz.f32", "rsqrt.approx.f32"),
    "sigmoid": ("tile.sigmoid(x)", "ex2.approx.ftz.f32", "fma.rn.f32"),
    "div": ("x / y", "div.approx.ftz.f32", "div.rn.f32"),
}
SAME = ["x + y", "x * y", "tile.erf(x)", "tile.erfc(x)", "tile.expm1(x)", "tile.log1p(x)", "x ** y",
        "tile.atan2(x, y)", "x // y", "tile.maximum(x, y)"]


def kernel(text: str, dtype: str = "f32", **options):
    made = build(f"""@kernel
def k(X: Tensor["n", {dtype}], Y: Tensor["n", {dtype}], Z: Tensor["n", {dtype}]):
    i = tile.linear_id()
    if i < n:
        x, y = X[i], Y[i]
        Z[i] = {text}
""")["k"]
    return ts.kernel(made.fn, **options) if options else made


def arrays(rng, dtype="f32"):
    return [ts.tensor(rng.uniform(0.1, 3.0, N).astype(np.float32), dtype) for _ in range(3)]


def compiled(k, args):
    bound, function, _, lanes, _, schedule = prepare(k, args, {}, None, None)
    return compile_function(function, lanes, schedule=schedule, target="sm_90a",
                            facts=facts_of(function, bound))


def opcodes(k, args) -> set[str]:
    return set(opcode_counts(compiled(k, args).built.ptx))


def test_every_fast_op_is_listed_here():
    assert FAST.keys() - {"exp_sub", "div_or_zero"} == OPS.keys()


@pytest.mark.parametrize("name", OPS)
def test_what_is_approximated(name, rng):
    text, fast, exact = OPS[name]
    args = arrays(rng)
    by_default, asked = opcodes(kernel(text), args), opcodes(kernel(text, fast_math=True), args)
    with ts.determinism("fast"):
        assert opcodes(kernel(text), args) == asked
    assert fast in asked and exact not in asked, asked
    assert exact in by_default and (fast not in by_default or name in ("exp", "sigmoid"))


@pytest.mark.parametrize("name", OPS)
def test_it_computes_the_same_function(name, rng):
    """In emulated instructions, of which approximations are exact: what is left is their use."""
    args = arrays(rng)
    args[0][...] = np.concatenate([[0.0, np.inf, 1e-30], args[0].numpy()[3:]]).astype(np.float32)
    with np.errstate(all="ignore"):
        compare(kernel(OPS[name][0], fast_math=True), *args, lanes=128, rtol=2e-6, lockstep=False)


def test_softmax_and_masked_exponentials(rng):
    """Of -inf and of 0 / 0, as the exact forms have them."""
    made = build("""@kernel
def k(X: Tensor["m", 64, f32], Z: Tensor["m", 64, f32]):
    m = tile.group_id(0)
    x = tile.load(X[m:m+1, :])
    e = tile.exp(x - tile.row_max(x))
    Z[m:m+1, :] = e / tile.row_sum(e)
""")["k"]
    x = rng.standard_normal((3, 64)).astype(np.float32)
    x[1, 5:] = -np.inf
    k = ts.kernel(made.fn, fast_math=True)
    with np.errstate(all="ignore"):
        found = compare(k, ts.tensor(x), ts.zeros((3, 64)), groups=3, rtol=2e-6)
    assert "fast_math.operation('exp_sub')" in found.emitted.source


@pytest.mark.parametrize("text", SAME)
def test_what_stays_as_it_is(text, rng):
    args = arrays(rng)
    exact, fast = (compiled(kernel(text, **o), args) for o in ({}, {"fast_math": True}))
    assert fast.source == exact.source


def test_other_types_stay_as_they_are(rng):
    args = arrays(rng, "f64")
    exact, fast = (compiled(kernel("tile.exp(x) / y", "f64", **o), args)
                   for o in ({}, {"fast_math": True}))
    assert fast.source == exact.source


def test_the_mode_stands_in_the_ir_and_in_every_key(rng):
    k, args = kernel("tile.exp(x)"), arrays(rng)
    functions = {}
    for mode in ("default", "fast", "strict"):
        with ts.determinism(mode):
            functions[mode] = k.lower(*args)
    assert len(k.specializations) == 3
    assert [f.modes for f in functions.values()] == [(), ("fast_math",), ("ordered",)]
    request = CompileRequest(128, k.schedule, parse_target("sm_90a"))
    for key in (lambda f: f.content_hash, request.key, request.portable_key):
        assert len({key(f) for f in functions.values()}) == 3
    text = print_ir(functions["fast"])
    assert "  modes fast_math\n" in text and "modes" not in print_ir(functions["default"])
    assert parse_ir(text) == functions["fast"]
    asked = kernel("tile.exp(x)", fast_math=True).lower(*args)
    assert asked.content_hash == functions["fast"].content_hash
    assert k.lower(*args) is functions["default"]


def test_the_interpreter_is_the_same_in_every_mode(rng):
    k, found = kernel("tile.tanh(x) / tile.log(y)"), []
    x, y, _ = arrays(rng)
    for mode in ("default", "fast", "strict"):
        with ts.determinism(mode):
            z = ts.zeros(N)
            k(x, y, z)
            found.append(z.numpy().tobytes())
    assert len(set(found)) == 1


def test_a_schedule_keeps_what_the_kernel_asks_for(rng):
    k = kernel("tile.exp(x)", fast_math=True).with_schedule(ts.Schedule(warps=2))
    assert k.lower(*arrays(rng)).modes == ("fast_math",)


def test_whole_array_kernels_have_modes():
    k = ts.kernel.auto(build("""@kernel
def k(X: Tensor["m", "n", f32]) -> Tensor["m", "n", f32]:
    return tile.exp(X)
""")["k"].fn)
    with ts.determinism("fast"):
        assert k.lower(np.ones((32, 64), np.float32)).modes == ("fast_math",)
    assert k.lower(np.ones((32, 64), np.float32)).modes == ()


def test_compiled_functions_are_traced_for_each_mode(rng):
    f, x = ts.jit(lambda x: ts.exp(x)), ts.ones(4)
    f(x)
    with ts.determinism("fast"):
        f(x)
        f(x)
    f(x)
    assert f.specializations == 2


def test_a_call_holds_and_a_block_ends():
    ts.determinism("fast")
    assert ts.config.get("determinism") == "fast"
    with ts.determinism("strict"):
        assert ts.config.get("determinism") == "strict"
    ts.determinism("default")
    assert ts.config.get("determinism") == "default"
    with pytest.raises(ts.ArgumentError, match=r"determinism='quick' is not accepted"):
        ts.determinism("quick")


@pytest.mark.parametrize("text", ["tile.atomic_add(Z, 0, X[tile.linear_id()])",
                                  "tile.atomic_add(Z[0:16], tile.load(X[0:16]))"])
def test_strict_refuses_sums_that_have_no_order(text, rng):
    source = """@kernel
def k(X: Tensor["n", {0}], Z: Tensor["n", {0}]):
    {1}
"""
    k, args = build(source.format("f32", text))["k"], [np.zeros(64, np.float32)] * 2
    compiled(k, args)
    with ts.determinism("strict"):
        with pytest.raises(CompileError, match="atomic_add of f32: the order of the sum") as info:
            compiled(k, args)
        assert "atomic_add" in info.value.where.text
        compiled(build(source.format("i32", text))["k"], [np.zeros(64, np.int32)] * 2)
        compiled(build(source.format("f32", text.replace("add", "max")))["k"], args)
