"""Reductions of few and long rows, as those of parts of them."""

from __future__ import annotations

from typing import Any

import pytest

import tessera as ts
from lowered_functions import both_ways
from tessera.graph.cuda import CudaProgram
from tolerance import assert_close

PRIME = 700_003  # no divisor gives parts


def groups(fn: Any, *args: Any) -> list[tuple[str, tuple[int, ...]]]:
    """The kind of each launch, and the extents of the first value that it reads."""
    program = CudaProgram(ts.jit(fn).graph(*args), "sm_90a")
    return [(launch.group.kind, launch.arguments[0][1]) for launch in program.launches]


@pytest.mark.parametrize("shape, axis", [((PRIME,), 0), ((1, PRIME), 1), ((PRIME, 1), 0)],
                         ids=str)
@pytest.mark.parametrize("op", [ts.sum, ts.mean, ts.max], ids=lambda f: f.__name__)
def test_rows_of_any_length_are_read_by_many_groups(op, shape, axis):
    found = groups(lambda x: op(x, axis=axis), ts.zeros(shape, "f32"))
    assert ("rows", (256, 2720)) in found, found
    assert len(found) == 3 and all(kind == "rows" for kind, _ in found)


@pytest.mark.parametrize("length", [PRIME, 1 << 20])
def test_parts_take_along_what_makes_their_elements(length):
    x, y = ts.zeros((length,), "f32"), ts.zeros((length,), "bf16")
    found = groups(lambda x, y: ts.sum(ts.cast(y, "f32") * x + 1.0), x, y)
    assert {kind for kind, _ in found} == {"rows"}


@pytest.mark.parametrize("shape", [(PRIME,), (2, 200_003), (100_003, 1)], ids=str)
def test_parts_of_any_length_give_the_whole(shape, rng):
    x = rng.standard_normal(shape).astype("f4")
    b = rng.standard_normal((*shape[:-1], 1)).astype("f4")
    axis = 0 if shape[-1] == 1 else -1

    def f(x: Any, b: Any) -> tuple:
        return (ts.sum(x * x + b, axis=axis), ts.max(x, axis=axis), ts.var(x * b, axis=axis),
                ts.logsumexp(x, axis=axis), ts.min(x), ts.any(x > 3.0, axis=axis))

    got, want = both_ways(f, x, b)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, n=max(shape))
