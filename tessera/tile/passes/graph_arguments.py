"""A kernel as a step of a graph: every result is an array that it is given, and a number that is
data is read from memory."""

from __future__ import annotations

from dataclasses import replace

from tessera.dims import Dim
from tessera.numerics import NumericType, as_type
from tessera.tile.ir.ir import Const, Def, Function, Op, Param, SSAValue
from tessera.tile.ir.types import GlobalTensor, Scalar


def with_given_results(function: Function) -> Function:
    """What it returns becomes arguments; it returns nothing."""
    params = tuple(replace(p, role="argument") if p.role == "output" else p
                   for p in function.params)
    return replace(function, params=params, result=("none",))


def with_loaded_numbers(function: Function, names: frozenset[str]) -> Function:
    """The parameters of these names are tensors of one element, which the kernel reads first."""
    params: list[Param] = []
    loads: list[Op] = []
    zero = Const(0, as_type("int32").dtype)
    for p in function.params:
        if p.value.name not in names or not isinstance(p.type, Scalar):
            params.append(p)
            continue
        at = SSAValue(held_in(p.value.name))
        params.append(Param(at, GlobalTensor(NumericType(p.type.dtype), (Dim.of(1),))))
        loads.append(Op("load_element", (at, zero), (Def(p.value, p.type),)))
    return replace(function, params=tuple(params), body=(*loads, *function.body))


def held_in(name: str) -> str:
    """The tensor parameter of a number."""
    return f"{name}_data"


__all__ = ["held_in", "with_given_results", "with_loaded_numbers"]
