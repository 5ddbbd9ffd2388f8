"""One bad element, in every way to run the line that makes it: the same op, line and counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts

pytestmark = pytest.mark.usefixtures("no_findings")
SCALED = 'fp8_e4m3 @scaled("amax")'
# A line, the element that makes it go wrong, the op, and what is counted: bad elements of its
# result, what a cast lost.
CASES: dict[str, tuple[Callable, float, str, dict[str, int]]] = {
    "log": (lambda x: ts.log(x), -1.0, "log", {"nan": 1}),
    "exp": (lambda x: ts.exp(x * 30.0), 3.0, "exp", {"inf": 1}),
    "div": (lambda x: 1.0 / x, 0.0, "div", {"inf": 1}),
    "0 inf": (lambda x: (x - 1.0) * np.inf, 2.0, "mul", {"nan": 23}),
    "f16": (lambda x: ts.cast(x, "f16"), 1e6, "cast", {"inf": 1, "overflow": 1}),
    "bf16": (lambda x: ts.cast(x, "bf16"), 3.4e38, "cast", {"inf": 1, "overflow": 1}),
    "e4m3": (lambda x: ts.cast(x, "fp8_e4m3"), 1e4, "cast", {"nan": 1, "overflow": 1}),
    "matmul": (lambda x: ts.cast(x, "f16") @ ts.full((4, 3), 6e4, "f16"), 2.0, "cast",
               {"inf": 18, "overflow": 18}),
    "saturated": (lambda x: ts.cast(x, "fp8_e4m3 @saturate"), 1e4, "", {"overflow": 1}),
    "fp4": (lambda x: ts.cast(x, "fp4_e2m1"), 100.0, "", {"overflow": 1}),
    "int8": (lambda x: ts.cast(x, "int8"), 1000.0, "", {"overflow": 1}),
    "scaled": (lambda x: ts.quantize(x, SCALED, scale=1.0), 1e4, "", {"overflow": 1}),
    "to zero": (lambda x: ts.cast(x, "fp8_e4m3"), 1e-10, "", {"underflow": 1}),
    "nan to 0": (lambda x: ts.cast(ts.sqrt(x), "fp4_e2m1"), -1.0, "sqrt", {"nan": 2}),
}
MESH = ts.dist.mesh(axes=("dp",), shape=(2,))


def spread(x: ts.Tensor) -> ts.Tensor:
    return ts.dist.distribute(x, ts.ShardSpec(("row",), ("dp",)), mesh=MESH)


def in_loops(f: Callable) -> Callable:
    def run(x: ts.Tensor) -> Any:
        with ts.config.scope(loop_min_elements=0):
            return ts.jit(f)(x)

    return run


WAYS: dict[str, Callable[[Callable], Callable]] = {
    "op by op": lambda f: f, "compiled": ts.jit, "in loops": in_loops,
    "batched": lambda f: lambda x: ts.vmap(f)(ts.stack([ts.ones(x.shape), x])),
    "in a scan": lambda f: lambda x: ts.scan(lambda c, _: (f(x), None), ts.zeros(()), None,
                                             length=1)[0],
    "on a mesh, op by op": lambda f: lambda x: f(spread(x)),
    "on a mesh": lambda f: lambda x: ts.jit(f)(spread(x)),
}
GRADIENTS = {"gradient": ts.grad, "compiled": lambda f: ts.jit(ts.grad(f)),
             "checkpoint": lambda f: ts.grad(ts.checkpoint(f))}


def total(case: Callable) -> Callable:
    return lambda x: ts.sum(ts.square(ts.cast(case(x), "f32")))


def spoiled(value: float) -> ts.Tensor:
    x = np.ones((6, 4), np.float32)
    x[4, 2] = value
    return ts.tensor(x)


def found(f: Callable, x: ts.Tensor) -> ts.debug.Flags:
    with ts.debug.numerics("flag"):
        f(x)
        return ts.debug.flags()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_every_way_counts_and_blames_alike(name: str, way: str) -> None:
    line, value, op, counts = CASES[name]
    run, x = WAYS[way](total(line)), spoiled(value)
    if way == "batched":  # beside a row of ones
        counts = {"0 inf": {"nan": 47}, "matmul": {"inf": 36, "overflow": 36}}.get(name, counts)
    flags = found(run, x)
    assert {k: n for k in ("nan", "inf", "overflow", "underflow")
            if (n := getattr(flags, k))} == counts
    if not op:  # a cast that keeps within its format is no finding
        assert flags.first is None
        with ts.debug.numerics("raise"):
            run(x)
        return
    assert flags.first.op == op and flags.first.where.line == line.__code__.co_firstlineno
    assert list(flags.counts)[0][1] == str(flags.first.where)
    with ts.debug.numerics("raise"), pytest.raises(ts.NumericsError) as info:
        run(x)
    assert info.value.where == flags.first.where


@pytest.mark.parametrize("way", GRADIENTS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2]])
def test_the_forward_line_is_blamed_in_gradients(name: str, way: str) -> None:
    line, value, op, _ = CASES[name]
    first = found(GRADIENTS[way](total(line)), spoiled(value)).first
    assert first.op == op and first.where.line == line.__code__.co_firstlineno


def test_two_calls_of_one_op_on_a_mesh_have_a_line_each() -> None:
    first, second = (lambda x: ts.log(x),
                     lambda x: ts.log(x))
    for line in (first, second):
        flags = found(lambda x, f=line: f(spread(x)), spoiled(-1.0))
        assert flags.first.where.line == line.__code__.co_firstlineno
