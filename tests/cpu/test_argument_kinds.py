"""Arguments of the wrong kind are errors of the user's line, in whichever function."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.argument_kinds import fits

WRONG = {int: ({"a": 1}, "x", None), float: ({"a": 1}, "x"), str: ({"a": 1}, np.ones(3)),
         bool: (np.ones(3),)}


@pytest.mark.parametrize("value, kind, right", [
    (3, int, True), (np.int64(3), int, True), (ts.tensor(3), int, True), (2.5, int, False),
    (True, bool, True), (1, float, True), (np.float32(1), float, True), ("1", float, False),
    (np.ones(2), float, False), (ts.ones(2), bool, False), ("a", str, True), (("a",), str, False),
    (None, int | None, True), ("a", int | None, False), ((1, 2), Sequence[int], True),
    ((1, "a"), Sequence[int], False), ("ab", Sequence[str], False), (5, Sequence[Any], False),
    ((1, 2), int | Sequence[int], True), (np.arange(2), Sequence[int], True),
    (len, Callable, True), (5, Callable[[int], int], False), ({}, dict[str, int], True),
    (object(), Any, True), (object(), typing.TypeVar("T"), True), (ts.sym("B"), int, True),
    ((1, "a"), tuple[int, str], True), ((1, 2), tuple[int, str], False),
    ((1, 2, 3), tuple[int, ...], True), ((1, "a"), tuple[int, ...], False),
    ("a", typing.Literal["b"], True), (3, inspect.Parameter.empty, True),
])
def test_what_fits_an_annotation(value, kind, right):
    assert fits(value, kind) is right


def wrong_calls() -> Iterator[tuple[str, Callable, list, dict]]:
    """Each public function with one argument of the wrong kind, the others tensors."""
    for name in sorted(ts.__all__):
        fn = getattr(ts, name)
        if not inspect.isfunction(fn):
            continue
        for p in inspect.signature(fn).parameters.values():
            for value in WRONG.get({"int": int, "float": float, "str": str, "bool": bool}.get(
                    p.annotation), ()):
                needed = [q for q in inspect.signature(fn).parameters.values()
                          if q.default is q.empty and q.kind is q.POSITIONAL_OR_KEYWORD]
                args = [value if q.name == p.name else ts.ones((2, 3)) for q in needed]
                yield name, fn, args, {} if p in needed else {p.name: value}


def test_every_function_answers_with_the_line():
    calls, refused = list(wrong_calls()), 0
    for name, fn, args, kwargs in calls:
        try:
            fn(*args, **kwargs)
        except ts.TesseraError as error:
            assert error.where is not None and "fn(*args" in error.where.text, name
            refused += 1
    assert len(calls) > 150 and refused > 0.7 * len(calls)  # truth and unused words pass


def test_the_text():
    with pytest.raises(ts.ArgumentError) as caught:
        ts.elu(ts.ones(3), alpha={"a": 1})
    assert caught.value.message == "ts.elu: alpha takes float, got the dict {'a': 1}"
    assert caught.value.hint == "ts.elu(x, alpha=1.0)"
    with pytest.raises(ts.ArgumentError, match="ts.diag: offset takes int, got None"):
        ts.diag(ts.ones(3), None)
    with pytest.raises(ts.ArgumentError, match="a sequence of names is expected, got None"):
        ts.ShardSpec("dp", None)
    with pytest.raises(ts.ArgumentError, match="got the values themselves"):
        ts.dist.tensor(np.ones((4, 2)), ts.ShardSpec("row", "dp"), ts.dist.mesh(
            axes=("dp",), shape=(2,)))


def test_what_a_function_of_the_user_raises_stays():
    def own(x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        ts.vmap(own)(ts.ones(3))
    assert not isinstance(caught.value, ts.TesseraError)


def test_a_shape_may_be_an_array_and_an_axis_may_not():
    assert ts.zeros(np.array([2, 3])).shape == (2, 3) and ts.ones(range(1, 3)).shape == (1, 2)
    with pytest.raises(ts.ArgumentError, match="axis must be an integer"):
        ts.cumsum(ts.ones((2, 3)), axis=np.ones(3))
    assert np.isnan(ts.var(ts.ones(1), ddof=1).item())  # 0 / 0, as NumPy
