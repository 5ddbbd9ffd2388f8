"""The ruler itself: what it accepts, what it refuses, what it says."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tolerance import EPS, NAMES, TINY, assert_close, tolerance, type_name


def test_eps_and_tiny_are_those_of_numpy_and_ml_dtypes():
    for spelled, name in NAMES.items():
        info = ml_dtypes.finfo(np.dtype(spelled))
        assert EPS[name] == float(info.eps) and TINY[name] == float(info.smallest_normal)


def test_tolerance_grows_with_eps_and_the_square_root_of_n():
    assert tolerance("bf16", 400) == 4 * 2.0**-7 * 20
    assert tolerance(np.float64) == 4 * np.finfo(np.float64).eps
    assert tolerance(np.dtype("int8"), 10) == 0 and type_name(np.float32) == "f32"
    with pytest.raises(KeyError, match="f8"):
        tolerance("f8")


def test_f32_sums_pass_and_bf16_sums_do_not(rng):
    a, b = rng.standard_normal((2, 30, 500))
    exact = a @ b.T
    assert_close(a.astype(np.float32) @ b.astype(np.float32).T, exact, n=500)
    coarse = a.astype(ml_dtypes.bfloat16).astype(np.float64) @ b.T
    assert_close(coarse, exact, "bf16", n=500)
    with pytest.raises(AssertionError, match=r"of 900 elements are off \(f32, n=500"):
        assert_close(coarse, exact, "f32", n=500)


@pytest.mark.parametrize("got, want", [
    ([1.0, np.nan], [1.0, 2.0]), ([1.0, 2.0], [1.0, np.nan]),
    ([np.inf, 0.0], [-np.inf, 0.0]), ([np.inf, 0.0], [3e38, 0.0]), ([0.0, 1.0], [1e-30, 1.0]),
])
def test_a_wrong_nan_infinity_or_zero_is_refused(got, want):
    with pytest.raises(AssertionError, match=r"1 of 2 elements .*\nworst\[[01]\]: got"):
        assert_close(np.array(got, np.float32), np.array(want))


def test_equal_specials_and_empty_arrays_pass():
    assert_close(np.array([np.nan, np.inf, -np.inf, 0.0]), np.array([np.nan, np.inf, -np.inf, 0.0]))
    assert_close(np.zeros((0, 3)), np.zeros((0, 3)), n=5)


def test_what_may_cancel_is_measured_by_what_was_drawn():
    assert_close(np.array([1e-16, 0.0]), np.array([2e-16, 0.0]), "f64", n=9)
    assert_close(np.full(5, 1e-16), np.zeros(5), "f64", n=9)
    for wrong in (np.full(5, 1e-14), np.array([1e-14])):
        with pytest.raises(AssertionError):
            assert_close(wrong, np.zeros(wrong.shape), "f64", n=9)


def test_integers_are_exact_and_shapes_equal():
    assert_close(np.array([2**62 + 1]), np.array([2**62 + 1]))
    with pytest.raises(AssertionError, match="1 of 1 elements"):
        assert_close(np.array([2**62 + 1]), np.array([2**62]))
    with pytest.raises(AssertionError, match="shape"):
        assert_close(np.zeros(3), np.zeros((3, 1)))
