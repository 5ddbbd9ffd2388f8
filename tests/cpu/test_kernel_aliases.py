"""Arguments that share memory: races through them are found, and copies do not part them."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from tessera import Tensor, config, f32, fp4_e2m1, int32
from tessera.errors import ArgumentError
from tessera.tile.ir.errors import RaceError

tile = ts.tile


@ts.kernel
def shift(x: Tensor["N", f32], y: Tensor["N", f32]):
    i = tile.linear_id()
    if i < N - 1:
        y[i + 1] = x[i]


@ts.kernel
def double(x: Tensor["N", f32], y: Tensor["N", f32]):
    i = tile.linear_id()
    if i < N:
        y[i] = 2.0 * x[i]


@ts.kernel
def words(x: Tensor["N", f32], y: Tensor["M", int32]):
    i = tile.linear_id()
    if i < N:
        y[i] = int(x[N - 1 - i])


def floats(n=300):
    return np.arange(n, dtype=np.float32)


def twice():
    x = floats()
    return x, x


def views_by_one():
    x = floats(301)
    return x[:-1], x[1:]


def strided():
    x = floats(600)
    return x[::2], x[::2]


def tensors():
    t = ts.tensor(floats())
    return t, t


def other_type():
    x = floats()
    return x, x.view(np.int32)


@pytest.mark.parametrize("kernel, make", [(shift, twice), (double, views_by_one), (shift, strided),
                                          (shift, tensors), (words, other_type)])
def test_races_through_two_names(kernel, make):
    with config.scope(debug=True):
        args = make()
        if make is strided:  # not the same object: a copy would part them
            with pytest.raises(ArgumentError, match="x and y share memory, x is not contiguous"):
                kernel(*args)
            args = args[:1] * 2
        with pytest.raises(RaceError, match="memory that '[xy]' shares"):
            kernel(*args)
    args = make()
    if make is not strided:
        found = ts.debug.race_check(kernel, *args)
        assert found.findings and found.findings[0].code == "E_RACE"
    fresh = make()
    for a, b in zip(args, fresh, strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))


def apart():
    x = floats(600)
    return x[:300], x[300:]


def interleaved():
    x = floats(600)
    return x[::2], x[1::2]


@pytest.mark.parametrize("kernel, make", [(double, twice), (double, apart), (shift, apart),
                                          (double, interleaved)])
def test_what_is_no_race(kernel, make):
    x, y = make()
    want = y.copy()
    if kernel is double:
        want = 2 * x
    else:
        want[1:] = x[:-1]
    with config.scope(debug=True):
        kernel(x, y)
    assert np.array_equal(y, want)
    assert not ts.debug.race_check(kernel, *make()).findings


def test_reading_one_array_by_two_names_is_none():
    @ts.kernel
    def total(x: Tensor["N", f32], y: Tensor["N", f32], z: Tensor["N", f32]):
        i = tile.linear_id()
        if i < N:
            z[i] = x[i] + y[N - 1 - i]

    x, z = floats(), np.zeros(300, np.float32)
    with config.scope(debug=True):
        total(x, x, z)
        total(x[::-1], x, z)
    assert np.array_equal(z, x[::-1] + x[::-1])


def test_a_packed_tensor_given_twice_is_one():
    @ts.kernel
    def k(x: Tensor["N", fp4_e2m1], y: Tensor["N", fp4_e2m1]):
        x[0:16] = tile.zeros((16,))
        y[16:32] = tile.load(x[0:16]) + 1.0

    t = ts.tensor(np.full(32, 2.0, np.float32), fp4_e2m1)
    k(t, t)
    assert np.array_equal(t.numpy().astype(np.float32), np.repeat([0.0, 1.0], 16))


def test_views_that_a_copy_would_part_are_refused_without_checks_too():
    x = np.zeros((20, 20), np.float32)
    with pytest.raises(ArgumentError, match="the arguments x and y share memory") as caught:
        double(x[0], x[:, 0])
    assert "y.copy()" in str(caught.value)


# --- hints ------------------------------------------------------------------------------------
def test_the_hint_of_a_race_within_one_statement():
    @ts.kernel
    def k(x: Tensor["N", f32]):
        t = tile.local_id()
        if t < 99:
            x[t + 1] = x[t]

    with config.scope(debug=True), pytest.raises(RaceError) as caught:
        k(floats(100))
    assert "loop" not in caught.value.hint
    assert "read into a variable first, then ts.tile.barrier(), then write" in caught.value.hint


def put(s, t):
    s[t] = 1.0


def test_the_hint_of_a_race_with_a_function_above():
    @ts.kernel
    def k(x: Tensor["N", f32]):
        s = tile.alloc_shared((128,), f32)
        t = tile.local_id()
        s[t] = 0.0
        tile.barrier()
        x[t] = s[127 - t]
        put(s, t)

    with config.scope(debug=True), pytest.raises(RaceError) as caught:
        k(np.zeros(128, np.float32))
    assert caught.value.hint == "put ts.tile.barrier() between the two accesses"


def test_read_only_arguments():
    x, y = floats(), floats()
    y.flags.writeable = False
    with pytest.raises(ArgumentError, match=r"double: argument y is read-only \(numpy\), "
                                            "the kernel writes it") as caught:
        double(x, y)
    assert "pass an array that may be written" in str(caught.value)
    double(y, x)
    assert np.array_equal(x, 2 * y)
    z = np.broadcast_to(np.float32(1), 300)
    with pytest.raises(ArgumentError, match="argument y is read-only"):
        double(x, z)
