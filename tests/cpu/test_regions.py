"""Regions beyond their rows: parts, types, other numeric formats, calls inside calls, messages."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera import Region, Tensor, bf16, f32, f64, read, reduce_max, reduce_sum, write
from tolerance import assert_close


@ts.jit
def add(A: Region[read], G: Region[reduce_sum]):
    G[:] += A


@ts.jit
def copy(A: Region[read], Y: Region[write]):
    Y[:] = A


INDEXES = [
    slice(None), ..., 2, -1, slice(1, 3), slice(-2, None), (slice(None), 1), (1, 2),
    (..., slice(1, 4)), (slice(0, 2), slice(2, 5)), slice(None, None, 2), (slice(None), [4, 0, 2]),
    ([0, 3], [1, 2]), slice(3, 1), (slice(None, None, -1), 0), (np.array([True, False] * 2),),
]


class TestParts:
    @pytest.mark.parametrize("index", INDEXES, ids=str)
    def test_writing_a_part_leaves_the_rest(self, rng, index):
        @ts.jit
        def f(v, Y: Region[write]):
            Y[index] = v

        y = rng.standard_normal((4, 5)).astype(np.float32)
        want, v = y.copy(), rng.standard_normal(y[index].shape).astype(np.float32)
        want[index] = v
        f(v, y)
        assert (y == want).all()

    @pytest.mark.parametrize("index", INDEXES, ids=str)
    def test_adding_to_a_part(self, rng, index):
        @ts.jit
        def f(v, G: Region[reduce_sum]):
            G[index] += v

        g = rng.standard_normal((4, 5))
        want, v = g.copy(), rng.standard_normal(g[index].shape)
        want[index] += v
        f(v, g)
        assert (g == want).all()

    @pytest.mark.parametrize("index", INDEXES, ids=str)
    def test_raising_a_part(self, rng, index):
        @ts.jit
        def f(v, G: Region[reduce_max]):
            G[index] = ts.maximum(v, G[index])

        g = rng.standard_normal((4, 5))
        want, v = g.copy(), rng.standard_normal(g[index].shape)
        want[index] = np.maximum(want[index], v)
        f(v, g)
        assert (g == want).all()

    def test_parts_that_together_are_the_whole_may_be_read(self):
        @ts.jit
        def f(x, Y: Region[write]):
            Y[0:2] = x[0:2]
            first = Y[0:2]
            Y[2:] = 7.0
            Y[0] = Y[0] + 1.0
            return ts.sum(Y), first

        y = np.full(4, np.nan, np.float32)
        total, first = f(np.float32([1, 2, 3, 4]), y)
        assert y.tolist() == [2, 2, 7, 7] and total.item() == 18 and first.tolist() == [1, 2]

    def test_values_broadcast_and_may_be_numbers(self):
        @ts.jit
        def f(row, Y: Region[write], G: Region[reduce_sum]):
            Y[:] = row
            G[1:] += 1
            G[:] += row

        y, g = ts.zeros((3, 2)), np.zeros((3, 2), np.int32)
        f(np.int32([4, 5]), y, g)
        assert y.tolist() == [[4, 5]] * 3 and g.tolist() == [[4, 5], [5, 6], [5, 6]]

    def test_a_value_that_does_not_fit(self):
        @ts.jit
        def f(v, Y: Region[write]):
            Y[0:2] = v

        with pytest.raises(ts.ShapeError):
            f(np.zeros(3, np.float32), np.zeros(4, np.float32))

    def test_a_part_that_is_data_is_refused(self):
        @ts.jit
        def f(i, Y: Region[write]):
            Y[i] = 1.0

        with pytest.raises(ts.TraceError, match="must be known when the function is traced"):
            f(np.int64([1]), np.zeros(4, np.float32))

    def test_symbolic_extents(self):
        @ts.jit
        def f(x, G: Region[reduce_sum]):
            G[:, 0:2] += x[:, 0:2]

        graph = f.graph(Tensor["B", 3, f32], Tensor["B", 3, f32])
        assert str(graph.outputs[-1].aval) == "f32[B, 3]"


class TestTypes:
    def test_the_second_item_is_the_type_of_the_tensor(self):
        @ts.jit
        def f(A: Region[read, Tensor["N", bf16]], Y: Region["write", Tensor["N", f32]]):
            Y[:] = A

        a, y = ts.ones((3,), bf16), ts.zeros((3,))
        f(a, y)
        assert y.tolist() == [1, 1, 1]
        with pytest.raises(ts.ShapeError):
            f(a, ts.zeros((4,)))
        with pytest.raises(ts.DTypeError):
            f(a, ts.zeros((3,), bf16))

    def test_a_value_is_rounded_once_to_the_type_of_the_region(self):
        @ts.jit
        def f(x: Tensor["N", bf16], Y: Region[write]):
            Y[:] = x * 1.0078125  # 1 + 2**-7, exact in f32, not in bf16

        y = np.zeros(1, np.float32)
        f(ts.ones((1,), bf16) * 3.0, y)
        assert y[0] == np.float32(3 * 1.0078125)

    @pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp6_e3m2", "fp4_e2m1", "int4", "int8", "f16"])
    def test_narrow_formats_are_updated_in_place(self, dtype):
        g = ts.ones((2, 5), dtype)
        held = g.buffer
        add(ts.ones((2, 5)) if g.dtype.kind == "float" else ts.ones((2, 5), "int8"), g)
        assert ts.cast(g, f32).tolist() == [[2] * 5] * 2 and g.buffer is held

    def test_scaled_tensors_are_quantised_anew(self):
        g = ts.tensor(np.float32([[1, 2], [3, 4]]), ts.int8 @ ts.scaled("amax"))
        add(ts.full((2, 2), 96.0), g)
        np.testing.assert_allclose(g.numpy(), [[97, 98], [99, 100]], atol=0.5)

    def test_the_accumulate_type_is_that_of_the_policy(self):
        @ts.jit
        def f(x, G: Region[reduce_sum]):
            G[:] += x

        wide = ts.zeros((1,), f32 @ ts.accum(f64))
        assert "f64[1] = add(" in str(f.graph(ts.ones((1,)), wide))

    def test_floats_do_not_go_into_integers(self):
        with pytest.raises(ts.DTypeError, match="a f32 cannot be stored"):
            copy(ts.ones((2,)), np.zeros(2, np.int32))

    def test_unknown_privileges(self):
        with pytest.raises(ts.ArgumentError, match="no such privilege") as e:
            Region["raed"]
        assert "read" in e.value.hint
        for bad in (3, (read, 3), (read, Tensor["B"], 1)):
            with pytest.raises(ts.ArgumentError):
                Region[bad]

    def test_a_region_without_a_privilege(self):
        def f(x):
            return x

        f.__annotations__ = {"x": Region}
        with pytest.raises(ts.ArgumentError, match="without a privilege"):
            ts.jit(f)(ts.ones(2))


class TestCalls:
    def test_a_call_in_a_call_passes_its_region_on(self):
        @ts.jit
        def outer(A: Region[read], G: Region[reduce_sum], Y: Region[write]):
            add(A, G)
            copy(A, Y)
            add(A, Y)  # it has been written, so it can be added to
            add(Y, G)

        a, g, y = ts.full((3,), 2.0), ts.ones((3,)), ts.zeros((3,))
        outer(a, g, y)
        assert g.tolist() == [7] * 3 and y.tolist() == [4] * 3

    @pytest.mark.parametrize(("privilege", "inner", "why"), [
        (read, add, "may not|cannot be"), (reduce_sum, copy, "cannot be"),
        (reduce_max, add, "cannot be"), (write, add, "cannot be")])
    def test_a_call_cannot_go_further_than_its_caller(self, privilege, inner, why):
        def f(A, G):
            inner(A, G)

        f.__annotations__ = {"G": Region[privilege]}
        with pytest.raises(ts.PrivilegeError, match=why):
            ts.jit(f)(ts.ones(3), ts.ones(3))

    def test_an_argument_without_a_privilege_cannot_be_passed_on_to_be_written(self):
        with pytest.raises(ts.PrivilegeError, match="may only read") as e:
            ts.jit(lambda a, g: add(a, g))(ts.ones(3), ts.ones(3))
        assert "G: Region[reduce_sum]" in e.value.hint

    def test_a_tensor_from_outside_of_a_trace_cannot_be_written(self):
        g = ts.zeros(3)
        with pytest.raises(ts.TraceError, match="written once, not at each call"):
            ts.jit(lambda a: add(a, g))(ts.ones(3))
        assert g.tolist() == [0, 0, 0]

    def test_a_tensor_made_in_the_trace_is_updated_there(self):
        @ts.jit
        def f(a):
            g = ts.zeros((3,))
            add(a, g)
            add(a, g)
            return g

        assert f(ts.ones(3)).tolist() == [2, 2, 2]

    def test_a_call_that_writes_a_part_leaves_the_rest_unknown(self):
        @ts.jit
        def half(Y: Region[write]):
            Y[0:2] = 1.0

        def f(Y: Region[write]):
            half(Y)
            return ts.sum(Y)

        def g(Y: Region[write]):
            Y[:] = 3.0
            half(Y)
            return ts.sum(Y)

        with pytest.raises(ts.PrivilegeError, match="is read before"):
            ts.jit(f)(ts.zeros(4))
        assert ts.jit(g)(ts.zeros(4)).item() == 8

    def test_a_scaled_tensor_of_a_trace_cannot_be_written(self):
        def f(a):
            add(a, ts.quantize(a, ts.int8 @ ts.scaled("amax")))

        with pytest.raises(ts.DTypeError, match="is a scaled type"):
            ts.jit(f)(ts.ones(3))

    def test_stores_inside_a_body_that_is_traced_on_its_own(self):
        @ts.jit
        def f(xs, G: Region[reduce_sum]):
            def step(c, x):
                G[:] += x
                return c, x

            ts.scan(step, ts.tensor(0.0), xs)

        with pytest.raises(ts.TraceError, match="G is stored into inside a function that is"):
            f(ts.ones((2, 3)), ts.zeros(3))

    def test_reads_inside_a_body_see_what_is_held(self):
        @ts.jit
        def f(xs, Y: Region[write]):
            Y[:] = 2.0
            return ts.scan(lambda c, x: (c + ts.sum(Y) * x, c), ts.tensor(0.0), xs)[0]

        assert f(ts.ones((3,)), ts.zeros(4)).item() == 24.0

    def test_results_may_be_regions(self):
        @ts.jit
        def f(A: Region[read], Y: Region[write]):
            Y[:] = A * 2.0
            return A, Y

        a, y = f(ts.ones(2), ts.zeros(2))
        assert a.tolist() == [1, 1] and y.tolist() == [2, 2]

    def test_what_is_not_stored_into_is_left_alone(self):
        @ts.jit
        def f(x, Y: Region[write], G: Region[reduce_sum]):
            return x + 1.0

        y, g = np.float32([3, 4]), np.float32([5, 6])
        assert f(1.0, y, g).item() == 2 and y.tolist() == [3, 4] and g.tolist() == [5, 6]
        assert f.graph().effects == frozenset()

    def test_traced_once_for_each_signature(self):
        count = []

        @ts.jit
        def f(A: Region[read], G: Region[reduce_sum]):
            count.append(1)
            G[:] += A

        g = np.zeros(2, np.float32)
        for i in range(3):
            f(np.full(2, i, np.float32), g)
        assert len(count) == 1 and g.tolist() == [3, 3] and f.specializations == 1

    def test_under_pure_and_effects(self):
        def f(A: Region[read], G: Region[reduce_sum]):
            G[:] += A

        with pytest.raises(ts.EffectError, match="writes the region G"):
            ts.pure(f)(ts.ones(2), ts.ones(2))
        allowed = ts.effects("state")(f)
        allowed(ts.ones(2), ts.ones(2))
        assert allowed.effects == {"state"}

    @pytest.mark.parametrize("bad", [3.0, True, None, "x"])
    def test_what_cannot_be_updated_in_place(self, bad):
        with pytest.raises((ts.ArgumentError, ts.DTypeError)):
            copy(ts.ones(()), bad) if bad is not None else copy(1.0, 2.0)

    def test_a_read_only_array(self):
        y = np.zeros(3, np.float32)
        y.flags.writeable = False
        with pytest.raises(ts.PrivilegeError, match="read-only"):
            copy(np.ones(3, np.float32), y)

    def test_views_and_transposes_are_written_through(self, rng):
        base = np.zeros((4, 3), np.float32)
        a = rng.standard_normal((3, 2)).astype(np.float32)
        copy(a, base.T[:, 1:3])
        assert (base[1:3] == a.T).all() and not base[[0, 3]].any()

    def test_sentinels_and_observers_see_the_same(self, rng):
        a = rng.standard_normal((3, 4)).astype(np.float32)
        plain, watched = np.zeros((3, 4), np.float32), np.zeros((3, 4), np.float32)
        add(a, plain)
        with ts.debug.numerics("flag"):
            add(a, watched)
        assert (plain == watched).all()

    def test_checkpoint_around_a_call(self, rng):
        def loss(w):
            def f(w):
                g = ts.zeros((3,))
                add(w * w, g)
                return ts.sum(g * w)

            return ts.checkpoint(f)(w)

        w = rng.standard_normal(3).astype(np.float32)
        assert_close(ts.grad(loss)(w).numpy(), 3 * w.astype(np.float64) ** 2, n=3)


def test_low_precision_numpy_arrays(rng):
    g = rng.standard_normal(64).astype(ml_dtypes.bfloat16)
    a = rng.standard_normal(64).astype(np.float32)
    want = (g.astype(np.float32) + a).astype(ml_dtypes.bfloat16)
    add(a, g)
    assert (g == want).all()


def test_results_are_shown_by_inspect_ir():
    add(ts.ones(2), ts.ones(2))
    assert "add(" in add.inspect_ir("graph") and "units=1" in add.inspect_ir("schedule")
