"""Every family of functions on every type, in every way to run it: one meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from lowered_functions import lowered
from numeric_cases import FAMILIES, FLOATS, INTEGERS, check_meaning, check_same, defined, operands

MESH = ts.dist.mesh(axes=("dp",), shape=(3,))


def in_loops(fn: Callable, *xs: ts.Tensor) -> Any:
    with ts.config.scope(loop_min_elements=0):
        return ts.jit(fn)(*xs)


def node_by_node(fn: Callable, *xs: ts.Tensor) -> Any:
    with ts.config.scope(loop_min_elements=10**9):
        return ts.jit(fn)(*xs)


def batched(fn: Callable, *xs: ts.Tensor) -> Any:
    return [y[1] for y in ts.jit(ts.vmap(fn))(*(ts.stack([ts.flip(x), x]) for x in xs))]


def on_a_mesh(fn: Callable, *xs: ts.Tensor) -> Any:
    rows = ts.ShardSpec(("row",), ("dp",))
    return ts.jit(fn)(*(ts.dist.distribute(x, rows, mesh=MESH) for x in xs))


WAYS = {"in loops": in_loops, "node by node": node_by_node, "batched": batched,
        "on a mesh": on_a_mesh}


@pytest.mark.parametrize("kind", FLOATS + INTEGERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_meaning(family: str, kind: str, rng: np.random.Generator) -> None:
    given, cases = operands(family, kind, rng), FAMILIES[family]
    want = defined(family, given)
    for name, y in want.items():
        check_meaning(name, cases[name][1], given, y)

    def every(*xs: ts.Tensor) -> list[ts.Tensor]:
        return [cases[name][0](*xs) for name in want]

    for way, run in WAYS.items():
        for (name, y), got in zip(want.items(), run(every, *given), strict=True):
            assert got.type == y.type, (way, name)
            check_same(name, given, got.array, y, signs=way != "on a mesh")  # where 0 is added


@pytest.mark.parametrize("kind", FLOATS + INTEGERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_mean_the_same(family: str, kind: str, rng: np.random.Generator) -> None:
    """Of programs for GPUs, under the interpreter."""
    given, cases = operands(family, kind, rng), FAMILIES[family]
    want = defined(family, given)
    made = lowered(lambda *xs: [cases[name][0](*xs) for name in want], *given)
    for (name, y), got in zip(want.items(), made.run([x.array for x in given]), strict=True):
        check_same(name, given, got, y)
