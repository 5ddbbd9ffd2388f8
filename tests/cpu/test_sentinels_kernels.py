"""Sentinels of kernels: what is found under the interpreter, where, and what is no finding."""

from __future__ import annotations

import inspect
import threading

import numpy as np
import pytest

import tessera as ts
from tessera import Tensor, f16, f32, fp8_e4m3, hooks, saturate, stdlib

tile = ts.tile
MODES = pytest.mark.parametrize("debug", [False, True], ids=["plain", "checked"])


pytestmark = pytest.mark.usefixtures("no_findings")


@ts.kernel
def logs(x: Tensor["N", f32], y: Tensor["N", f32]):
    t = tile.load(x[0:16])
    y[0:16] = tile.log(t) * 2.0  # bad


@ts.kernel
def differences(x: Tensor["N", f32], y: Tensor["N", f32]):
    u = tile.log(tile.load(x[0:16]))  # bad
    s = u * 1.0
    y[0:16] = s - s


@ts.kernel
def overflows(a: Tensor["M", "N", f32]) -> Tensor["M", "N", f32]:
    t = tile.load(a[tile_m:tile_m + 4, 0:N])  # noqa: F821
    return tile.exp(t * 1000.0)  # bad


@ts.kernel
def through_memory(x: Tensor["N", f32], y: Tensor["N", f32]):
    held = tile.alloc_shared((16,), f32)
    held[0:16] = tile.sqrt(tile.load(x[0:16]))  # bad
    tile.barrier()
    total = tile.full((16,), 0.0, f32)
    for _ in range(0, 3):
        total = total + tile.load(held[0:16])
    y[0:16] = total


@ts.kernel
def masked(x: Tensor["N", f32], y: Tensor["N", f32]):
    t = tile.load(x[0:16])
    scores = tile.where(t > 0.0, t, -float("inf"))
    p = tile.exp(scores - tile.full((16,), 3.0, f32))
    y[0:16] = tile.where(t > 0.0, tile.log(t) + p, 0.0)


@ts.kernel
def largest(a: Tensor["M", "N", f32]) -> Tensor["M", f32]:
    m = tile.full((4,), -float("inf"))
    for k in range(0, N, 4):  # noqa: F821
        m = tile.maximum(m, tile.row_max(tile.load(a[tile_m:tile_m + 4, k:k + 4])))  # noqa: F821
    return m


@ts.kernel
def products(a: Tensor["M", "N", f32]) -> Tensor["M", "M", f32]:
    acc = tile.zeros((4, 4))
    for k in range(0, N, 4):  # noqa: F821
        rows = tile.load(a[tile_m:tile_m + 4, k:k + 4])  # noqa: F821
        acc = tile.dot(rows, rows.T, acc)  # bad
    return acc


@ts.kernel
def shared_products(a: Tensor["M", "N", f32]) -> Tensor["M", "M", f32]:
    held = tile.alloc_shared((4, 8), f32)
    held[0:4, 0:8] = tile.load(a[0:4, 0:8])
    tile.barrier()
    return tile.dot(held, tile.transpose(held))  # bad


@ts.kernel
def weights(a: Tensor["M", "N", f32]) -> Tensor["M", "N", f32]:
    m = tile.full((4,), -float("inf"))
    s = tile.load(a[tile_m:tile_m + 4, 0:N])  # noqa: F821
    s = s * s  # bad
    m = tile.maximum(m, tile.row_max(s))
    return tile.exp(s - m[:, None])


@ts.kernel
def returns_half(a: Tensor["M", "N", f32]) -> Tensor["M", "N", f16]:
    t = tile.load(a[tile_m:tile_m + 4, 0:N])  # noqa: F821
    return t * 2.0  # bad


@ts.kernel
def stores_half(a: Tensor["M", "N", f32], y: Tensor["M", "N", f16]):
    t = tile.load(a[tile_m:tile_m + 4, 0:N])  # noqa: F821
    y[tile_m:tile_m + 4, 0:N] = tile.where(t < 0.0, -float("inf"), t * 2.0)  # noqa: F821  # bad


@ts.kernel
def stores_elements(a: Tensor["M", "N", f32], y: Tensor["M", "N", f16]):
    i = tile.linear_id()
    if i < M:  # noqa: F821
        y[i, 0] = 2.0 * a[i, 0]  # bad


@ts.kernel
def returns_fp8(a: Tensor["M", "N", f32]) -> Tensor["M", "N", fp8_e4m3]:
    return tile.load(a[tile_m:tile_m + 4, 0:N]) * 2.0  # noqa: F821  # bad


@ts.kernel
def returns_saturated(a: Tensor["M", "N", f32]) -> Tensor["M", "N", fp8_e4m3 @ saturate]:
    return tile.load(a[tile_m:tile_m + 4, 0:N]) * 2.0  # noqa: F821


def bad_line(kernel) -> int:
    lines, first = inspect.getsourcelines(kernel.fn)
    return first + next(i for i, line in enumerate(lines) if "# bad" in line)


def call(kernel, value: float) -> np.ndarray:
    x = np.full(16, 2.0, np.float32)
    x[5] = value
    y = np.zeros(16, np.float32)
    kernel(x, y)
    return y


@pytest.mark.parametrize("kernel, value, op, kind", [
    (logs, -1.0, "log", "nan"), (logs, 0.0, "log", "-inf"), (differences, 0.0, "log", "-inf"),
    (through_memory, -4.0, "sqrt", "nan")])
def test_raise_names_kernel_op_line_and_operands(kernel, value, op, kind):
    with ts.debug.numerics("raise"), pytest.raises(ts.NumericsError) as info:
        call(kernel, value)
    text = str(info.value)
    assert f"{op} in kernel {kernel.__name__}: {kind} in f32[16] of group 0 at [5]" in text
    assert f"there {value:.6g}" in text
    assert info.value.where.file == __file__ and info.value.where.line == bad_line(kernel)
    assert np.isfinite(call(kernel, 2.0)).all()


def test_checked_builds_raise_at_the_op():
    with ts.config.scope(debug=True, numerics="raise"), pytest.raises(ts.NumericsError) as info:
        call(logs, -1.0)
    assert info.value.where.line == bad_line(logs)


@MODES
def test_flag_counts_infinities_of_what_a_kernel_returns(debug):
    a = ts.tensor([[1.0, 0.0], [2.0, -1.0], [0.0, 0.0], [0.0, 0.0]])
    with ts.config.scope(debug=debug, numerics="flag"):
        y = overflows(a)
        found = ts.debug.flags()
        assert np.isinf(y.numpy()).sum() == 2
    assert (found.inf, found.nan) == (2, 0)
    assert [op for op, _ in found.counts] == ["exp in kernel overflows"]
    assert found.first.origin and found.first.where.line == bad_line(overflows)


@MODES
@pytest.mark.parametrize("kernel, op, kind", [
    (returns_half, "store_tile", "inf"), (stores_half, "store_tile", "inf"),
    (stores_elements, "store_element", "inf"), (returns_fp8, "store_tile", "nan")])
def test_a_store_beyond_the_range_of_the_type_is_a_finding(kernel, op, kind, debug):
    a = ts.tensor([[1.0], [40000.0], [-3.0], [2.0]])  # twice as much is beyond f16 and fp8
    given = [a, ts.zeros((4, 1), f16)][:len(inspect.signature(kernel.fn).parameters)]
    with ts.config.scope(debug=debug, numerics="flag"):
        kernel(*given)
        found = ts.debug.flags()
    assert [name for name, _ in found.counts] == [f"{op} in kernel {kernel.__name__}"]
    assert (found.inf, found.nan) == ((1, 0) if kind == "inf" else (0, 1))
    assert found.first.origin and found.first.where.line == bad_line(kernel)
    assert "there 80000" in str(found)
    given[0] = ts.tensor([[1.0], [100.0], [-3.0], [2.0]])  # the -inf of stores_half is deliberate
    with ts.config.scope(debug=debug, numerics="raise"):
        kernel(*given)


@MODES
@pytest.mark.parametrize("kernel", [products, shared_products])
def test_an_overflow_of_a_matmul_is_a_finding(kernel, debug):
    a = ts.ones((4, 8))
    with ts.config.scope(debug=debug, numerics="raise"):
        assert kernel(a).tolist() == [[8.0] * 4] * 4
        with pytest.raises(ts.NumericsError, match=f"matmul in kernel {kernel.__name__}") as info:
            kernel(a * 1e20)
    assert info.value.where.line == bad_line(kernel)
    given = ts.where(ts.eye(4, 8) > 0, ts.inf, a)  # an infinity in the data is none of the kernel's
    with ts.config.scope(debug=debug, numerics="raise"):
        assert ts.all(ts.isinf(ts.max(kernel(given), axis=1)))


def test_a_store_that_saturates_is_no_finding():
    with ts.debug.numerics("raise"):
        assert returns_saturated(ts.full((4, 1), 1e6)).tolist() == [[448.0]] * 4


def test_what_a_kernel_made_is_not_said_to_have_come_in():
    with ts.debug.numerics("flag"):
        y = ts.tensor(call(logs, -1.0))
        ts.sum(y * 2.0)
        found = ts.debug.flags()
    assert [op for op, _ in found.counts] == ["log in kernel logs"]


def test_a_kernel_inside_of_a_function_is_counted_once():
    """The call is run again to find what is bad, and the kernel with it."""
    def f(x):
        y = ts.zeros(4)
        logs(x * 1.0, y)
        return ts.sum(y)

    with ts.debug.numerics("flag"):
        ts.debug.flags()
        ts.jit(f)(ts.tensor([1.0, -2.0, 3.0, 4.0]))
        flags = ts.debug.flags()
    assert (flags.nan, flags.inf) == (1, 0) and flags.first.op == "log in kernel logs"


def test_what_came_in_with_the_data_is_said_so():
    with ts.debug.numerics("flag"):
        call(logs, float("nan"))
        found = ts.debug.flags()
        assert [op for op, _ in found.counts] == ["data into kernel logs"] and found.nan == 1
        call(logs, float("inf"))
        assert not ts.debug.flags()


def test_masks_and_values_that_stay_inside_are_no_finding():
    """-inf that was written down, and the log of a negative number that `where` does not choose."""
    with ts.debug.numerics("raise"):
        y = call(masked, -3.0)
    assert y[5] == 0 and np.isfinite(y).all()


@MODES
def test_an_infinity_that_fills_a_tile_is_deliberate(debug):
    with ts.config.scope(debug=debug, numerics="raise"):
        assert largest(ts.full((4, 8), -ts.inf)).tolist() == [-ts.inf] * 4
        assert weights(ts.ones((4, 8))).tolist() == [[1.0] * 8] * 4
    with ts.debug.numerics("raise"):
        with pytest.raises(ts.NumericsError, match="mul in kernel weights") as info:
            weights(ts.full((4, 8), 1e30))  # inf - inf: not of the -inf that the maximum began with
    assert info.value.where.line == bad_line(weights)


def test_attention_of_the_library_with_masked_rows(rng):
    q, k, v = (ts.tensor(rng.standard_normal((1, 1, 40, 32)).astype(np.float32)) for _ in range(3))
    with ts.debug.numerics("raise"):
        out = stdlib.flash_attention_2(q, k, v, causal=True)
    assert np.isfinite(np.asarray(out)).all()


def test_off_follows_nothing():
    call(logs, -1.0)
    assert not ts.debug.flags()
    ts.config.set(numerics="off")
    call(logs, -1.0)
    assert not hooks.kernel_sentinels


def test_blocks_of_two_threads_overlap():
    """The one that ends first takes nothing from the other, and nothing stays on."""
    inside, leave, seen = threading.Event(), threading.Event(), []

    def first():
        with ts.debug.numerics("flag"):
            inside.set()
            leave.wait(10)

    def second():
        inside.wait(10)
        with ts.debug.numerics("raise"):
            leave.set()
            one.join()
            seen.append(ts.config.numerics)

    one, two = threading.Thread(target=first), threading.Thread(target=second)
    two.start()
    one.start()
    two.join()
    assert seen == ["raise"] and ts.config.numerics == "off" and not ts.config.chosen("numerics")


@ts.kernel
def roots(x: Tensor["M", "N", f32]) -> Tensor["M", "N", f32]:
    return tile.sqrt(tile.load(x[tile_m:tile_m + 4, tile_n:tile_n + 4]) - 1.0)  # noqa: F821


@ts.kernel
def sums_of_roots(x: Tensor["M", "N", f32], y: Tensor["M", f32]):
    y[tile_m:tile_m + 4] = tile.row_sum(  # noqa: F821
        tile.sqrt(tile.load(x[tile_m:tile_m + 4, 0:4]) - 1.0))  # noqa: F821


@ts.kernel
def spaced(y: Tensor["N", f32]):
    y[0:8] = tile.sqrt(2.5 - tile.arange(8))


def test_what_lies_beyond_an_edge_is_not_counted():
    """Nor is it the first bad element: of -1 there the root is NaN too."""
    x = np.full((3, 2), 4.0, np.float32)
    x[1, 1] = 0.0
    calls = {"of 6": (lambda: roots(x), "[1, 1], 1"),
             "of 6 ": (lambda: sums_of_roots(x, np.zeros(3, np.float32)), "[1, 1], 1"),
             "of 5": (lambda: spaced(np.zeros(5, np.float32)), "[3], 2")}
    for size, (call, at) in calls.items():
        with ts.debug.numerics("raise"), pytest.raises(ts.NumericsError) as e:
            call()
        assert f"at {at} {size.strip()} elements" in str(e.value)


def test_the_finding_of_a_kernel_names_the_function_that_launched_it():
    x = ts.tensor([[4.0, 0.0]])
    step = ts.jit(lambda x: roots(x) * 2.0, name="step")
    with ts.debug.numerics("raise"):
        with pytest.raises(ts.NumericsError, match="in step, call"):
            step(x)
        with pytest.raises(ts.NumericsError, match="outside compiled functions"):
            roots(x)
