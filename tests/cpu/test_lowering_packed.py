"""Types of less than a byte in graphs for GPUs: arguments, results, casts, moves, products and the
user's kernels, with the bits of ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
import tessera.numerics as tn
from fake_gpu import Copies
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowered_functions import kinds, lowered
from tessera import Tensor, config, f32
from tessera.errors import DTypeError, PolicyError, UnsupportedTargetError
from tessera.graph.cuda import CudaProgram, text_of
from tessera.graph.cuda.passes.packed_values import PACK, UNPACK
from tessera.graph.cuda.program.device import DeviceExecutable
from tessera.graph.op import OPS
from tessera.graph.trace import apply
from tessera.numerics import packed_order
from tessera.runtime import arrays
from tessera.runtime.target import parse_target
from tessera.tile.cuda.compile import emit_kernel
from tessera.tile.cuda.emit.emitter import ArgumentFacts
from tessera.tile.launch.resident import Resident

FLOATS = {"fp4_e2m1": ml_dtypes.float4_e2m1fn, "fp6_e2m3": ml_dtypes.float6_e2m3fn,
          "fp6_e3m2": ml_dtypes.float6_e3m2fn}
KINDS = [*FLOATS, "int4"]
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 0.25, 0.75, -0.0625, 0.03125, 7.25,
           -30.0, 1e9, 2.5, -3.5]


def drawn(rng, n=140):
    return np.concatenate([rng.standard_normal(n) * 2.0 ** rng.integers(-6, 6, n), SPECIAL]
                          ).astype(np.float32)


def every(kind, shape):
    """All codes of a type, again and again."""
    d = tn.find_dtype(kind)
    codes = np.arange(np.prod(shape)) % (1 << d.bits)
    return Tensor(codes.astype(np.uint8).view(d.numpy).reshape(shape), ts.numerics.as_type(kind))


def bits(x):
    return np.asarray(x).view(np.uint8) & 0x3F if np.asarray(x).dtype.itemsize == 1 else x


def run(f, *xs):
    graph = ts.jit(f).graph(*xs)
    return CudaProgram(graph).run([x.array for x in xs])


@pytest.mark.parametrize("kind", FLOATS)
def test_casts_are_those_of_ml_dtypes(kind, rng):
    x = drawn(rng)
    (got,) = run(lambda x: ts.cast(x, kind), ts.tensor(x))
    with np.errstate(all="ignore"):
        want = x.astype(FLOATS[kind])
    assert got.dtype == FLOATS[kind] and np.array_equal(bits(got), bits(want))
    codes = every(kind, (5, 77))
    (back,) = run(lambda x: ts.cast(x, "f32"), codes)
    want = codes.array.astype(np.float32)
    assert np.array_equal(back.view(np.uint32), want.view(np.uint32))
    (half,) = run(lambda x: ts.cast(x, "bf16"), codes)
    assert np.array_equal(half.view(np.uint16), want.astype(ml_dtypes.bfloat16).view(np.uint16))


@pytest.mark.parametrize("kind", ["int4", "fp4_e3m0", "fp4_e2m1 @saturate",
                                  'fp6_e3m2 @rounding("toward_zero")'])
def test_casts_are_those_of_the_codec(kind, rng):
    t, x = ts.numerics.as_type(kind), drawn(rng)
    x = x if t.dtype.kind == "float" else x[np.isfinite(x)]
    for source in ("f32", "f64", "f16", "int32"):
        y = ts.cast(ts.tensor(x), source)
        (got,) = run(lambda x: ts.cast(x, kind), y)
        want = tn.encode(y.array, t.dtype, rounding=t.policy.rounding, saturate=t.policy.saturate)
        assert np.array_equal(bits(got), bits(want)), source
    (back,) = run(lambda x: ts.cast(x, "f32"), every(kind.split()[0], (3, 33)))
    want = tn.decode(every(kind.split()[0], (3, 33)).array, t.dtype)
    assert np.array_equal(back, want) and np.array_equal(np.signbit(back), np.signbit(want))


def test_between_packed_types(rng):
    for a in KINDS:
        for b in KINDS:
            x = every(a, (7, 9))
            (got,) = run(lambda x: ts.cast(x, b), x)  # noqa: B023
            assert np.array_equal(bits(got), bits(ts.cast(x, b).array)), (a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 7), (2, 3, 4), (0, 3), (2, 0)], ids=str)
def test_arguments_and_results_of_any_extents(kind, shape):
    x = every(kind, shape)
    got = run(lambda x: (x, ts.reshape(x, (-1,)), ts.cast(ts.cast(x, "f32"), kind)), x)
    for y, want in zip(got, (x.array, x.array.reshape(-1), x.array), strict=True):
        assert y.shape == want.shape and np.array_equal(bits(y), bits(want))


def test_codes_in_two_shapes_are_two_results(rng):
    """What is packed once and seen as two tensors."""
    for shape in ((4, 8), (4, 0)):
        x = ts.tensor(rng.standard_normal(shape), "bf16")
        got = run(lambda x: (ts.expand_dims(c := ts.cast(x, "fp6_e3m2"), 0), c), x)
        assert [y.shape for y in got] == [(1, *shape), shape]


MOVES = {
    "transpose": lambda x: ts.transpose(x), "row": lambda x: x[1],
    "slice": lambda x: x[:, 1::2], "flip": lambda x: ts.flip(x),
    "joined": lambda x: ts.concatenate([x, ts.full((1, 7), 1, x.type), x[:2]]),
    "taken": lambda x: ts.take(x, ts.tensor([2, 0, 2])), "padded": lambda x: ts.pad(x, 1),
    "split": lambda x: ts.split(x, [3, 4], 1), "sorted": lambda x: ts.sort(x),
    "repeated": lambda x: ts.broadcast_to(x, (2, 3, 7)), "rolled": lambda x: ts.roll(x, 2, 1),
    "argmax": lambda x: ts.argmax(x, 0), "max": lambda x: ts.max(x, 1),
    "sum": lambda x: ts.sum(x, 0), "doubled": lambda x: x + x, "relu": lambda x: ts.relu(x),
    "where": lambda x: ts.where(x > 1, x, ts.zeros_like(x)), "triangle": lambda x: ts.tril(x),
}


@pytest.mark.parametrize("kind", ["fp4_e2m1", "fp6_e3m2", "int4"])
@pytest.mark.parametrize("name", MOVES)
def test_moves_and_arithmetic(name, kind):
    x = every(kind, (3, 7))
    got, want = run(MOVES[name], x), ts.jit(MOVES[name])(x)
    for a, b in zip(got, want if isinstance(want, tuple | list) else [want], strict=True):
        assert a.dtype == b.array.dtype and np.array_equal(bits(a), bits(b.array))


@pytest.mark.parametrize("kind", ["fp4_e2m1", "fp6_e2m3", "int4"])
def test_random_rounding(kind, rng):
    x = ts.tensor(drawn(rng)[np.isfinite(drawn(rng))])
    f = ts.jit(lambda x: ts.cast(x, f"{kind} @stochastic_round"))
    ts.random.seed(5)
    want = [f(x).array for _ in range(2)]
    program = CudaProgram(f.graph(x))
    ts.random.seed(5)
    for w in want:
        assert np.array_equal(bits(program.run([x.array])[0]), bits(w))


# --- products -----------------------------------------------------------------------------------
@pytest.mark.parametrize(("a", "b", "form"), [
    ("fp4_e2m1", "fp4_e2m1", "bf16"), ("fp6_e3m2", "fp6_e3m2", "bf16"), ("int4", "int4", "int8"),
    ("fp4_e2m1", "bf16", "bf16"), ("fp4_e2m1", "fp6_e2m3", "bf16")])
def test_products_are_of_tensor_cores(a, b, form):
    x, y = every(a, (64, 96)), ts.cast(every(b, (96, 32)), b) if b != "bf16" else ts.cast(
        every("fp6_e3m2", (96, 32)), "bf16")
    graph = ts.jit(lambda x, y: ts.cast(x, "f32") @ ts.cast(y, "f32") if form == "bf16" else
                   x @ y).graph(x, y)
    text = text_of("schedule", graph, "sm_90a")
    assert f"operands of {form}" in text
    want = x.array.astype(np.float64) @ y.array.astype(np.float64)
    (got,) = CudaProgram(graph).run([x.array, y.array])
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=1e-6)
    assert "mma" in text_of("ptx", graph, "sm_90a")


def test_quantized_weights_and_their_gradient(rng):
    w = ts.tensor(rng.standard_normal((32, 16)).astype(np.float32))
    x = ts.tensor(rng.standard_normal((8, 32)).astype(np.float32))

    def loss(x, w):
        q = ts.quantize(w, 'int4 @scaled("amax")')
        return ts.sum((x @ ts.dequantize(q)) ** 2)

    f = ts.jit(ts.value_and_grad(loss))
    value, slope = CudaProgram(f.graph(x, w)).run([x.array, w.array])
    want = f(x, w)
    np.testing.assert_allclose(value, want[0].numpy(), rtol=1e-5)
    np.testing.assert_allclose(slope, want[1].numpy(), rtol=1e-4, atol=1e-4)


# --- kernels --------------------------------------------------------------------------------------
@ts.kernel
def halved(x: Tensor["M", "N", ts.fp4_e2m1], y: Tensor["M", "N", ts.fp6_e3m2]):
    t = ts.tile.load(x[tile_m:tile_m + 4, tile_n:tile_n + 16])
    y[tile_m:tile_m + 4, tile_n:tile_n + 16] = ts.tile.cast(t, f32) * 0.5


def into(x):
    y = ts.zeros(x.shape, "fp6_e3m2")
    halved(x, y)
    return y


def test_kernels_take_packed_tensors():
    x = every("fp4_e2m1", (3, 7))
    f = ts.jit(lambda x: into(ts.transpose(x)))
    (got,) = CudaProgram(f.graph(x)).run([x.array])
    assert np.array_equal(bits(got), bits(f(x).array))
    (rows,) = CudaProgram(ts.jit(ts.vmap(into)).graph(ts.stack([x, x]))).run(
        [np.stack([x.array, x.array])])
    assert np.array_equal(bits(rows[1]), bits(into(x).array))
    assert "halved" in text_of("ptx", f.graph(x), "sm_90a")


def test_what_a_kernel_does_not_write_keeps_its_codes():
    @ts.kernel
    def first_row(x: Tensor["M", "N", ts.int4], y: Tensor["M", "N", ts.int4]):
        y[0:1, 0:16] = ts.tile.load(x[0:1, 0:16])

    def f(x, y):
        y = ts.flip(y)
        z = ts.full(x.shape, 3, "int4")
        first_row(x, y)
        first_row(x, z)
        return y, z

    x, y = every("int4", (3, 5)), every("int4", (5, 3))
    y = ts.reshape(y, (3, 5))
    for got, want in zip(run(f, x, y), ts.jit(f)(x, y), strict=True):
        assert np.array_equal(bits(got), bits(want.array))


def test_arithmetic_on_codes_is_refused():
    """Public functions widen first."""
    x = every("fp4_e2m1", (3, 7))
    graph = ts.jit(lambda x: apply(OPS["add"], x, x)).graph(x)
    with pytest.raises(ts.UnsupportedTargetError, match="add.* no type of less than a byte"):
        CudaProgram(graph)


# --- where they lie -----------------------------------------------------------------------------
def test_packed_tensors_on_a_gpu_are_read_and_written_where_they_lie(gpu, driver, monkeypatch):
    x = every("fp6_e2m3", (3, 7))
    f = ts.jit(lambda x: ts.cast(ts.cast(x, "f32") * 2.0, "fp4_e2m1"))
    executable = DeviceExecutable(f.graph(x))
    there = x.to("cuda")
    executable.tensors([there])
    copies = Copies(driver, monkeypatch)
    (made,) = executable.tensors([there])
    assert isinstance(made, Resident) and made.memory.nbytes == 12
    assert copies.to_device == copies.to_host == 0
    assert np.array_equal(bits(made.array), bits(f(x).array))


# --- matmuls of few rows --------------------------------------------------------------------------
def values(x):
    return np.asarray(tn.decode(x.array, x.dtype), np.float64)


@pytest.mark.parametrize("wide", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_read_packed_weights_as_they_lie(kind, wide, rng):
    """One launch of the library's kernel, which rounds too: no weight is made bf16 in memory."""
    w = every(kind, (40, 96))
    x = rng.standard_normal((5, 96)).astype(np.float32)
    x = ts.tensor(x, "bf16" if wide == "f32" else wide)
    want = values(x) @ values(w).T
    scale = np.abs(values(x)) @ np.abs(values(w)).T
    for f in (lambda x, w: ts.cast(x, wide) @ ts.cast(w, wide).T,
              lambda x, w: ts.cast(x, wide) @ ts.cast(ts.transpose(w), wide)):
        made = lowered(f, x, w)
        assert kinds(made) == ["launch"]
        (y,) = made.run([x.array, w.array])
        eps = 2.0 ** -{"bf16": 8, "f16": 11, "f32": 23}[wide]
        assert (np.abs(y.astype(np.float64) - want) <= eps * np.abs(want) + 2e-6 * scale).all()


@pytest.mark.parametrize("scaled, steps", [
    ('int4 @scaled("amax") @per_channel(0)', ["launch"]),
    ('fp4_e2m1 @scaled("amax") @per_channel(0)', ["launch"]),
    ('fp6_e3m2 @scaled("amax")', ["move", "launch"])])
def test_scales_of_rows_are_the_kernels(scaled, steps, rng):
    w = ts.tensor(rng.standard_normal((40, 96)).astype(np.float32), scaled)
    x = ts.tensor(rng.standard_normal((5, 96)).astype(np.float32), "bf16")
    made = lowered(lambda x, w: x @ w.T, x, w)
    assert kinds(made) == steps
    (y,) = made.run([x.array, w.array, np.asarray(w.scale.array)])
    want = values(x) @ w.numpy().astype(np.float64).T
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


def test_other_matmuls_with_packed_weights(rng):
    """More rows, weights along whose rows nothing is summed, a product that is read twice, and
    casts that round."""
    w, x = every("fp6_e2m3", (48, 96)), ts.tensor(rng.standard_normal((65, 96)), "bf16")
    few = x[:8]

    def is_read_twice(x, w):
        y = ts.cast(x, "f32") @ ts.cast(w, "f32").T
        return ts.cast(y, "bf16"), y

    for f, args, launches in (
            (lambda x, w: x @ ts.cast(w, "bf16").T, (x, w), False),
            (lambda x, w: x @ ts.cast(w, "bf16").T, (few, w), True),
            (lambda x, w: x[:, :48] @ ts.cast(w, "bf16"), (few, w), False),
            (lambda x, w: x @ ts.cast(ts.cast(w, "fp8_e5m2"), "bf16").T, (few, w), False),
            (lambda x, w: x @ ts.cast(ts.cast(w, "fp4_e2m1"), "bf16").T, (few, w), False),
            (is_read_twice, (few, w), True)):
        made = lowered(f, *args)
        assert ("launch" in kinds(made)) == launches
        got, want = made.run([a.array for a in args]), ts.jit(f)(*args)
        for y, z in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
            np.testing.assert_allclose(y.astype(np.float64), values(z), rtol=2e-2, atol=2e-1)


# --- codes in the order of the product that reads them --------------------------------------------
LAID = [(kind, beside) for kind in ("fp4_e2m1", "fp6_e2m3") for beside in ("bf16", "fp8_e4m3")]


@pytest.mark.parametrize("kind, beside", LAID)
def test_bits_of_a_unit_lie_where_registers_have_them(kind, beside, rng):
    """Each bit has one place, rows come back, and graphs find codes and make bytes there. Where
    registers have them is compared in test_stacked_codes and test_dealt_codes."""
    numeric = ts.numerics.as_type(f"{kind} @packed_for({beside})")
    bits = numeric.dtype.bits
    assert sorted(packed_order.places(numeric.dtype, beside)) == list(range(64 * bits))
    rows = rng.integers(0, 256, (3, 40 * bits), dtype=np.uint8)
    there = packed_order.from_rows(rows, numeric, (3, 320))
    assert not np.array_equal(there, rows)
    np.testing.assert_array_equal(packed_order.in_rows(there, numeric, (3, 320)), rows)
    codes = tn.unpack(rows, numeric.dtype, 320).view(np.uint8) & ((1 << bits) - 1)
    for op, given, want in ((UNPACK, there, codes), (PACK, codes, there)):
        made = op.ref(given, bits=bits, shape=want.shape, beside=beside)
        np.testing.assert_array_equal(made, want)
    for shape in ((3, 319), (3, 32), ()):
        assert packed_order.from_rows(rows, numeric, shape) is rows


def test_types_without_another_order_are_refused():
    assert str(ts.fp6_e2m3 @ ts.packed_for("bf16")) == "fp6_e2m3 @packed_for(bf16)"
    for make in (lambda: ts.int4 @ ts.packed_for(ts.bf16),
                 lambda: tn.parse("int4 @packed_for(bf16)")):
        with pytest.raises(PolicyError, match=r"int4 @packed_for\(bf16\): its codes have one order"
                           "(?s:.)*fp4_e2m1, fp6_e2m3"):
            make()
    with pytest.raises(PolicyError, match=r"@packed_for\(f32\) is no order(?s:.)*bf16, fp8_e4m3"):
        ts.packed_for("f32")


@pytest.mark.parametrize("kind, beside", [LAID[0], LAID[3]])
def test_codes_of_another_order_are_the_same_numbers(kind, beside, rng):
    """Products, moves and casts of weights that lie as products read them have the bits of those of
    rows; only the product of few rows of that type reads them as they lie."""
    text, other = f"{kind} @packed_for({beside})", {"bf16": "f16", "fp8_e4m3": "bf16"}[beside]
    w = rng.standard_normal((80, 512)).astype(np.float32)
    x = ts.tensor(rng.standard_normal((5, 512)), beside)
    laid, plain = ts.tensor(w, text), ts.tensor(w, kind)

    def product(x, w):
        return ts.cast(ts.cast(x, "f32") @ ts.cast(w, "f32").T, "bf16")

    for f, steps in (
            (product, ["launch"]),
            (lambda x, w: ts.cast(x, other) @ ts.cast(w, other).T, None),
            (lambda x, w: ts.cast(x[:, :128], other) @ ts.cast(w[:, 64:192], other).T, None),
            (lambda x, w: w[3:9, 64:], None), (lambda x, w: ts.reshape(w, (16, 2560)), None),
            (lambda x, w: ts.cast(w[::2, 1:], "f32"), None), (lambda x, w: ts.cast(w, kind), None),
            (lambda x, w: ts.cast(ts.cast(x, "f32"), text), None), (lambda x, w: w, [])):
        made = lowered(f, x, laid)
        (got,), (want,) = made.run([x.array, laid.array]), run(f, x, plain)
        assert steps is None or kinds(made) == steps
        if steps == ["launch"]:
            np.testing.assert_allclose(got.astype(np.float64), values(x) @ values(plain).T,
                                       rtol=2.0**-8, atol=1e-2)
        else:
            assert steps is not None or "launch" not in kinds(made)
            np.testing.assert_array_equal(bits(got), bits(want))
    with config.scope(debug=True):
        assert "launch" not in kinds(lowered(product, x, laid))


def test_what_lies_in_another_order_is_read_and_written_in_rows(gpu, driver, rng):
    """Its bytes are those of its order there, and of rows for whoever asks."""
    w = rng.standard_normal((6, 128)).astype(np.float32)
    x = ts.tensor(w, "fp4_e2m1 @packed_for(bf16)")
    there, rows = x.to("cuda"), ts.as_bytes(x).array
    raw = np.empty_like(rows)
    there.storage.read(raw)
    np.testing.assert_array_equal(raw, packed_order.from_rows(rows, x.type, x.shape))
    assert not np.array_equal(raw, rows)
    np.testing.assert_array_equal(there.buffer, rows)
    x[2, 5:70] = there[2, 5:70] = 1.5
    for y in (there, there.copy(), there.to("cpu"), ts.jit(lambda x: x)(there), there[0:6]):
        assert y.type == x.type
        np.testing.assert_array_equal(y.numpy(), x.numpy())
    plain = ts.cast(there, "fp4_e2m1")
    np.testing.assert_array_equal(ts.as_bytes(plain).numpy(), ts.as_bytes(x).array)
    with pytest.raises(DTypeError, match=r"as_bytes of fp4_e2m1 @packed_for\(bf16\)\[6, 128\] on a "
                       "GPU, where its codes do not lie in rows"):
        ts.as_bytes(there)
    with pytest.raises(DTypeError, match="from_bytes"):
        ts.from_bytes(ts.as_bytes(plain), x.type, x.shape)


@ts.kernel
def doubled(W: Tensor["N", "K"], Y: Tensor["N", "K", f32], BN=8, BK=64):
    w = ts.tile.load(W[tile_n:tile_n+BN, tile_k:tile_k+BK])  # noqa: F821
    Y[tile_n:tile_n+BN, tile_k:tile_k+BK] = ts.tile.cast(w, f32) * 2  # noqa: F821


@ts.kernel
def once(X: Tensor["M", "K"], W: Tensor["N", "K"], V: Tensor["N", "K"], D: Tensor["M", "N", f32]):
    """A product that reads W as it lies, and one row of V."""
    acc = ts.tile.zeros((64, 64))
    depth = min(512, K)  # noqa: F821
    for k in range(0, K, depth):  # noqa: F821
        w = ts.tile.cast(ts.tile.load(W[0:64, k:k+depth]), X.dtype)
        acc = ts.tile.dot(w, ts.tile.load(X[0:64, k:k+depth]).T, acc)
    v = ts.tile.cast(ts.tile.load(V[0, 0:64]), f32)
    D[0:64, 0:64] = acc.T + v[None, :]


def test_kernels_that_read_rows_are_not_compiled_for_another_order():
    w, y = ts.zeros((6, 128), "fp4_e2m1 @packed_for(bf16)"), ts.zeros((6, 128))
    doubled.lower(w, y)
    with pytest.raises(UnsupportedTargetError, match=r"W is fp4_e2m1 @packed_for\(bf16\): its "
                       "codes lie as products of up to 64 rows of bf16 read them(?s:.)*ts.cast"):
        doubled.inspect_ir("target", target="sm_90a")
    doubled.lower(ts.zeros((6, 128), "fp4_e2m1"), y)
    assert doubled.inspect_ir("target", target="sm_90a")
    x, w = ts.zeros((64, 512), "bf16"), ts.zeros((64, 512), "fp4_e2m1 @packed_for(bf16)")
    once.lower(x, w, w, ts.zeros((64, 64)))
    with pytest.raises(UnsupportedTargetError, match="V is fp4_e2m1(?s:.)*it is read as rows"):
        once.inspect_ir("target", target="sm_90a")
    function = once.lower(x, w, ts.cast(w, "fp4_e2m1"), ts.zeros((64, 64)))
    assert "as they lie" in once.inspect_ir("target", target="sm_90a")
    with pytest.raises(UnsupportedTargetError, match="W is(?s:.)*accesses are checked"):
        emit_kernel(function, 128, parse_target("sm_90a"), ArgumentFacts(), checked=True)


def test_calls_of_kernels_tell_orders_apart(gpu, rng):
    w, host = ts.tensor(rng.standard_normal((6, 128)), "fp4_e2m1"), ts.zeros((6, 128))
    laid, y = ts.cast(w, "fp4_e2m1 @packed_for(bf16)"), host.to("cuda")
    doubled(w.to("cuda"), y)
    np.testing.assert_array_equal(y.numpy(), 2 * w.numpy().astype(np.float32))
    there = laid.to("cuda")
    assert doubled.bind((there, y), {}).types["W"].numeric == laid.type
    facts = [tuple(eval(fact.format("x"), {"x": x}) for fact in arrays.face_of(type(there)).facts)
             for x in (there, w.to("cuda"))]
    assert facts[0] != facts[1]
    with config.scope(device="cuda"), pytest.raises(
            DTypeError, match="on the host, where its codes lie in rows"):
        doubled(laid, host)
