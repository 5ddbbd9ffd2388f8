"""Sentinels of kernels under the interpreter: a NaN or infinity in what a call wrote, with the op
and the line of the kernel that made it.

What is used counts, as everywhere: bad values that stay inside of a kernel, of masked elements say,
are no finding. What was bad in an operand before, and infinities that the kernel wrote down, are
none either; a NaN that only came through is said to have come in with the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from ..dims import show_shape
from ..errors import user_line
from ..graph.ops.random import get_state
from ..numerics import as_type, decode, dtype_of_numpy
from ..tensor import Tensor
from ..tile.interpreter.arguments import Bound
from ..tile.interpreter.blame import Blame, BlamedOp
from ..tile.interpreter.memory import Memory
from ..tile.ir.ir import Function
from .findings import BadValue, SavedCall, describe_operand, describe_operands


def kind_of(memory: Memory) -> str | None:
    """The worse of what a tensor's elements hold: "nan", "inf", or None."""
    dtype = memory.numeric.dtype
    if dtype.kind != "float" or dtype.special == "none":
        return None
    values = decode(memory.flat, dtype)
    if np.isfinite(values).all():
        return None
    return "nan" if np.isnan(values).any() else "inf"


@contextmanager
def follow(function: Function, bound: Bound, outputs: dict[str, Memory], count: Any,
           graph: str | None, run: int, again: Callable[[Bound], Any]) -> Iterator[Blame]:
    """Around a run: what it wrote is looked at when it has ended. count(BadValue): a finding.
    graph: the compiled function that launched it."""
    given = {n: m for n, m in bound.values.items() if isinstance(m, Memory)}
    saved = _saved(function, bound, given, again)
    before = {n: kind_of(m) for n, m in given.items()}
    unwritten = [m for m in given.values() if not m.written]
    blame = Blame()
    yield blame
    written = {**{n: m for n, m in given.items() if m.written and m in unwritten}, **outputs}
    for name, memory in written.items():
        kind = kind_of(memory)
        if kind is None:
            continue
        source = blame.by.get(memory)
        if source is not None:
            count(replace(_bad_result(function, source, graph, run), saved=saved))
            return
        if kind == "nan" and "nan" in before.values() and before.get(name) != "nan":
            brought = tuple(f"its {n}" for n, k in before.items() if k == "nan")
            count(replace(_came_in(function, memory, given, graph, run),
                          saved=saved, sources=brought))
            return


def _saved(function: Function, bound: Bound, given: dict[str, Memory],
           again: Callable[[Bound], Any]) -> SavedCall:
    """A launch with copies of its tensors, as they are before it."""
    def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        memories = {n: Memory(n, t.shape, t.type, t.array.reshape(-1).copy())
                    for n, t in inputs.items()}
        out = again(replace(bound, values={**bound.values, **memories}, storage={}))
        made = {n: Tensor(m.flat.reshape(m.shape), m.numeric) for n, m in memories.items()
                if m.written}
        if function.result[0] == "tensor":
            every = out if isinstance(out, tuple) else (out,)
            made |= {n: x if isinstance(x, Tensor) else Tensor(x, as_type(x.dtype))
                     for n, x in zip(function.result[1:], every, strict=True)}
        return made

    tensors = {n: Tensor(m.flat.reshape(m.shape).copy(), m.numeric) for n, m in given.items()}
    return SavedCall(f"kernel {function.name}", tensors, run)


def _bad_result(function: Function, source: BlamedOp, graph: str | None, run: int) -> BadValue:
    """A finding of what an op of the kernel made."""
    op = source.op
    mask = np.isnan(source.value) if source.kind == "nan" else np.isinf(source.value)
    if source.exists is not None and (mask & source.exists).any():
        mask, size = mask & source.exists, int(source.exists.sum())
    else:
        size = mask.size
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))
    group = int(source.groups[at[0]]) if len(source.groups) > at[0] else 0
    args = [_tile(a, at[0]) for a in source.args if isinstance(a, np.ndarray)]
    shape = source.value.shape[1:]
    return BadValue(
        op=f"{op.name} in kernel {function.name}", where=op.where or user_line(),
        kind=source.kind, value=float(source.value[at]), index=at[1:], count=int(mask.sum()),
        size=size, result=f"{source.dtype}{show_shape(shape)} of group {group}",
        operands=describe_operands([(a, _dtype(a)) for a in args], at[1:], shape), origin=True,
        graph=graph, run=run, step=get_state().step)


def _tile(a: np.ndarray, group: int) -> np.ndarray:
    """What one group holds of a value [1|G, ...]."""
    return a[group if a.shape[0] > 1 else 0]


def _dtype(a: np.ndarray) -> Any:
    return dtype_of_numpy(a.dtype)


def _came_in(function: Function, memory: Memory, given: dict[str, Memory], graph: str | None,
             run: int) -> BadValue:
    values = decode(memory.flat, memory.numeric.dtype).reshape(memory.shape)
    mask = np.isnan(values)
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))
    operands = tuple(
        describe_operand(n, m.flat.reshape(m.shape), m.numeric.dtype, index, mask.shape)
        for n, m in given.items() if m is not memory)
    return BadValue(
        op=f"kernel {function.name}", where=user_line(), kind="nan", value=float("nan"),
        index=index, count=int(mask.sum()), size=mask.size,
        result=f"{memory.numeric.dtype}{show_shape(mask.shape)}",
        operands=operands, origin=False, graph=graph,
        run=run, step=get_state().step)


__all__ = ["follow"]
