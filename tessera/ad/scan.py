"""Loops of known length as one op: scan, and what is made of it.

    scan: (c, x_0..x_{T-1}) -> (c_T, y_0..y_{T-1}),   c_{t+1}, y_t = f(c_t, x_t)

Reverse mode keeps the carries c_t and walks the loop backwards, recomputing each iteration:

    c'_t, x'_t, w' += vjp(f at c_t, x_t, w)(c'_{t+1}, y'_t)

so memory is that of the carries, and the gradients of closed-over w are summed in the compute type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from .. import hooks
from ..graph import functions as F
from ..graph import tree
from ..graph.host_loop import HostLoop
from ..graph.interpret import own_memory
from ..graph.ir import Graph
from ..graph.iterations import iterating
from ..graph.op import Arg, Aval, GraphOp, Sample
from ..graph.operand import literal
from ..graph.trace import apply, aval_of, evaluate
from ..lazy_dataclass import dataclass
from ..numerics import as_type
from ..tensor import Tensor
from .batching import batch_graph, stretch
from .forward import push_forward
from .reverse import backward, materialize
from .split_loops import split_of
from .subgraphs import (
    Keeper,
    check_inputs,
    close_graph,
    is_float,
    run_iteration,
    tangent_aval,
    trace_body,
    zero_tangent,
)

INDEX = Aval((), as_type("int64"))


@dataclass(frozen=True)
class Loop:
    """The attributes of a scan, and its inputs and outputs by role.

    body: (index, carries, elements, constants) -> (carries, results)
    """

    body: Graph
    n_carry: int
    n_xs: int
    length: Any
    reverse: bool

    @property
    def attrs(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def split(self, inputs: Sequence) -> tuple[list, list, list]:
        """(carries, sequences, constants)"""
        a, b = self.n_carry, self.n_carry + self.n_xs
        return list(inputs[:a]), list(inputs[a:b]), list(inputs[b:])

    def run(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return apply(SCAN, *inputs, **self.attrs)


def element(x: Aval | Tensor) -> Aval:
    """The type of one element of a sequence."""
    return Aval(tuple(x.shape[1:]), x.type)


def scan_graph(step: Callable, carry: Sequence[Tensor], xs: Sequence[Tensor],
               consts: Sequence[Tensor], length: Any, reverse: bool, name: str
               ) -> tuple[Loop, list[Tensor]]:
    """A loop of step(index, *carry, *elements, *consts) -> [*carry, *results], and its inputs."""
    avals = [*map(aval_of, carry), *map(element, xs), *map(aval_of, consts)]
    graph, captured = close_graph(trace_body(step, [INDEX, *avals], name, index=0))
    loop = Loop(graph, len(carry), len(xs), length, reverse)
    return loop, [*carry, *xs, *consts, *captured]


def run_scan(step: Callable, carry: Sequence[Tensor], xs: Sequence[Tensor], length: int, name: str
             ) -> tuple[Tensor, ...]:
    """What a loop of step(index, *carry, *elements) -> [*carry, *results] gives."""
    loop, inputs = scan_graph(step, carry, xs, [], length, False, name)
    return loop.run(inputs)


hooks.scan.fill(run_scan)


def _shape(*xs: Aval, **attrs: Any) -> tuple[Aval, ...]:
    loop = Loop(**attrs)
    carry, seqs, consts = loop.split(xs)
    outs = check_inputs(loop.body, (INDEX, *carry, *map(element, seqs), *consts))
    stacked = (Aval((loop.length, *y.shape), y.type) for y in outs[loop.n_carry:])
    return (*outs[: loop.n_carry], *stacked)


def _ref(*arrays: np.ndarray, **attrs: Any) -> tuple[np.ndarray, ...]:
    loop = Loop(**attrs)
    carry, seqs, consts = loop.split(arrays)
    length = int(loop.length)
    results = [
        np.empty((length, *v.aval.shape), v.aval.dtype.numpy)
        for v in loop.body.outputs[loop.n_carry:]
    ]
    order = range(length - 1, -1, -1) if loop.reverse else range(length)
    with iterating("scan", loop.body, loop.n_carry, length) as begin:
        for i in order:
            begin(i)
            given = [*(s[i, ...] for s in seqs), *consts]
            out = run_iteration(loop.body, i, carry, given, first=i == order[0])
            carry = out[: loop.n_carry]
            for kept, y in zip(results, out[loop.n_carry:], strict=True):
                kept[i] = y
    return (*own_memory(carry, arrays), *results)


# --- reverse mode -----------------------------------------------------------------------------
def _keeper(loop: Loop) -> Keeper:
    return Keeper.of(loop.body, loop.body.inputs[1: 1 + loop.n_carry])


def _residual(*xs: Tensor, **attrs: Any) -> tuple[tuple, Any]:
    """The scan with its carries at the start of each iteration as further results."""
    loop = Loop(**attrs)
    keeper = _keeper(loop)
    return keeper.split(replace(loop, body=keeper.graph).run(xs))


@dataclass(frozen=True)
class _Reversal:
    """Which inputs of a scan get cotangents, by position within their role."""

    carry: list[int]
    xs: list[int]
    consts: list[int]
    results: list[int]  # results that have a cotangent


def _vjp(gs: tuple, ys: tuple, *inputs: Tensor, saved: Any, wanted: tuple, **attrs: Any) -> tuple:
    loop = Loop(**attrs)
    kept, structure = tree.flatten(saved)
    n, m = loop.n_carry, loop.n_xs
    carry, seqs, consts = loop.split(inputs)
    _, want_xs, want_consts = loop.split([w and is_float(x) for w, x in
                                          zip(wanted, inputs, strict=True)])
    part = _Reversal(
        [i for i in range(n) if is_float(carry[i])], _true(want_xs), _true(want_consts),
        [j for j, g in enumerate(gs[n:]) if g is not None],
    )
    back, operands = scan_graph(
        _reversed_step(loop, part, structure, len(kept)),
        [*(materialize(gs[i], carry[i]) for i in part.carry),
         *(zero_tangent(consts[k]) for k in part.consts)],
        [*kept, *seqs, *(gs[n + j] for j in part.results)],
        consts, loop.length, not loop.reverse, f"{loop.body.name}_vjp",
    )
    out = iter(back.run(operands))
    grads: list[Tensor | None] = [None] * len(inputs)
    for base, places in ((0, part.carry), (n + m, part.consts), (n, part.xs)):
        for p in places:
            grads[base + p] = next(out)
    return tuple(grads)


def _true(flags: Sequence[bool]) -> list[int]:
    return [i for i, flag in enumerate(flags) if flag]


def _reversed_step(loop: Loop, part: _Reversal, structure: tree.TreeDef, n_kept: int) -> Callable:
    """(index, c'_{t+1}, w', kept, x_t, y'_t, w) -> (c'_t, w' + dw, x'_t)"""
    body, n, m = loop.body, loop.n_carry, loop.n_xs
    inputs, keeper = body.inputs, _keeper(loop)
    wrt = [inputs[1 + i] for i in part.carry]
    wrt += [inputs[1 + n + m + k] for k in part.consts]
    wrt += [inputs[1 + n + j] for j in part.xs]

    def step(index: Tensor, *args: Tensor) -> list[Tensor]:
        it = iter(args)
        dc, sums, kept, x, dy = (
            list(islice(it, k))
            for k in (len(part.carry), len(part.consts), n_kept, m, len(part.results))
        )
        again = tree.unflatten(structure, kept)
        tape = keeper.resume([index, *again["values"][:n], *x, *it], again)
        cts: list[Tensor | None] = [None] * len(body.outputs)
        for i, g in zip((*part.carry, *(n + j for j in part.results)), (*dc, *dy), strict=True):
            cts[i] = g
        found = [g if g is not None else zero_tangent(v.aval)
                 for g, v in zip(backward(tape, cts, wrt), wrt, strict=True)]
        a, b = len(dc), len(dc) + len(sums)
        return [*found[:a], *(s + g for s, g in zip(sums, found[a:b], strict=True)), *found[b:]]

    return step


# --- forward mode -----------------------------------------------------------------------------
def _push(ts: tuple, *inputs: Tensor, **attrs: Any) -> tuple[tuple, tuple]:
    """Values and tangents in one loop over (carry, tangent) pairs."""
    loop = Loop(**attrs)
    n, m = loop.n_carry, loop.n_xs
    carry, seqs, consts = loop.split(inputs)
    moved = [i for i, c in enumerate(carry) if is_float(c)]
    t_xs = [i for i in range(m) if ts[n + i] is not None]
    t_consts = [i for i in range(len(consts)) if ts[n + m + i] is not None]
    tangent_results: list[int] = []

    def step(index: Tensor, *args: Tensor) -> list[Tensor]:
        it = iter(args)
        c, dc, x, dx, w = (
            list(islice(it, k)) for k in (n, len(moved), m, len(t_xs), len(consts))
        )
        tangents: list[Tensor | None] = [None] * (1 + n + m + len(consts))
        places = [*(1 + i for i in moved), *(1 + n + i for i in t_xs),
                  *(1 + n + m + i for i in t_consts)]
        for p, t in zip(places, (*dc, *dx, *it), strict=True):
            tangents[p] = t
        outs, touts = push_forward(loop.body, [index, *c, *x, *w], tangents)
        tangent_results[:] = [j for j, t in enumerate(touts[n:]) if t is not None]
        return [*outs[:n], *(materialize(touts[i], outs[i]) for i in moved), *outs[n:],
                *(touts[n + j] for j in tangent_results)]  # type: ignore[list-item]

    joint, operands = scan_graph(
        step,
        [*carry, *(materialize(ts[i], carry[i]) for i in moved)],
        [*seqs, *(ts[n + i] for i in t_xs)],
        [*consts, *(ts[n + m + i] for i in t_consts)],
        loop.length, loop.reverse, f"{loop.body.name}_jvp",
    )
    it = iter(joint.run(operands))
    n_ys = len(loop.body.outputs) - n
    c, dc, y, dy = (list(islice(it, k)) for k in (n, len(moved), n_ys, len(tangent_results)))
    tangents: list[Tensor | None] = [None] * (n + n_ys)
    for p, t in zip((*moved, *(n + j for j in tangent_results)), (*dc, *dy), strict=True):
        tangents[p] = t
    return (*c, *y), tuple(tangents)


# --- batching ---------------------------------------------------------------------------------
def carry_flags(n: int, first: Sequence[bool], flags_of: Callable[[list[bool]], Sequence[bool]]
                ) -> list[bool]:
    """Which carries are batched: those that are at first, or become so in an iteration."""
    flags = list(first)
    while True:
        after = flags_of(flags)[:n]
        joined = [a or b for a, b in zip(flags, after, strict=True)]
        if joined == flags:
            return flags
        flags = joined


def with_batch(avals: Sequence[Aval], flags: Sequence[bool], size: Any) -> list[Aval]:
    return [Aval((size, *a.shape), a.type) if f else a for a, f in zip(avals, flags, strict=True)]


def _batch(size: Any, batched: tuple, *inputs: Tensor, **attrs: Any) -> tuple:
    loop = Loop(**attrs)
    n = loop.n_carry
    carry, seqs, consts = loop.split(inputs)
    first, x_flags, w_flags = loop.split(batched)
    seqs = [F.moveaxis(s, 0, 1) if b else s for s, b in zip(seqs, x_flags, strict=True)]
    marks: list[bool] = []

    def step_for(flags: list[bool]) -> Callable:
        def step(index: Tensor, *args: Tensor) -> list[Tensor]:
            outs, found = batch_graph(loop.body, size, [index, *args],
                                      [False, *flags, *x_flags, *w_flags])
            marks[:] = found
            full = [stretch(y, size, have) if want else y
                    for y, have, want in zip(outs[:n], found, flags, strict=False)]
            return [*full, *outs[n:]]

        return step

    def flags_of(flags: list[bool]) -> list[bool]:
        plain = [v.aval for v in loop.body.inputs[1:]]
        trace_body(step_for(flags), [INDEX, *with_batch(plain, [*flags, *x_flags, *w_flags], size)],
                   loop.body.name, index=0)
        return marks

    flags = carry_flags(n, first, flags_of)
    full = [stretch(c, size, have) if want else c
            for c, have, want in zip(carry, first, flags, strict=True)]
    whole, operands = scan_graph(step_for(flags), full, seqs, consts, loop.length, loop.reverse,
                                 loop.body.name)
    out = whole.run(operands)
    y_flags = marks[n:]
    ys = [F.moveaxis(y, 1, 0) if b else y for y, b in zip(out[n:], y_flags, strict=True)]
    return (*out[:n], *ys), (*flags, *y_flags)


def _sample() -> tuple[Sample, ...]:
    """c, y = tanh(w x + c), c * x over three x."""
    f32 = as_type("f32")

    def step(i: Tensor, c: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
        return [F.tanh(w * x + c), c * x]

    vector = Aval((2,), f32)
    body = trace_body(step, [INDEX, vector, vector, Aval((), f32)], "step", index=0)
    args = (Arg((2,)), Arg((3, 2)), Arg(()))
    return tuple(Sample(args, Loop(body, 1, 1, 3, backwards).attrs) for backwards in (False, True))


def _unroll(*xs: Tensor, **attrs: Any) -> tuple[Tensor, ...]:
    """The body again and again, its results stacked."""
    loop = Loop(**attrs)
    carry, seqs, consts = loop.split(xs)
    length = int(loop.length)
    rows: list[list[Tensor]] = [[]] * length
    for i in range(length - 1, -1, -1) if loop.reverse else range(length):
        index = literal(i, INDEX.type)
        made = evaluate(loop.body, [index, *carry, *(s[i] for s in seqs), *consts])
        carry, rows[i] = made[:loop.n_carry], made[loop.n_carry:]
    outs = loop.body.outputs[loop.n_carry:]
    if not length:
        return (*carry, *(F.zeros((0, *v.aval.shape), v.aval.type) for v in outs))
    return (*carry, *(F.stack([row[j] for row in rows]) for j in range(len(outs))))


def _repeats(**attrs: Any) -> HostLoop:
    loop = Loop(**attrs)
    return HostLoop(loop.body, loop.n_carry, loop.n_xs, int(loop.length), loop.reverse)


SCAN = GraphOp(
    "scan",
    shape=_shape,
    ref=_ref,
    unroll=_unroll,
    repeats=_repeats,
    splits=lambda **attrs: split_of(Loop(**attrs)),
    vjp=_vjp,
    jvp=lambda ts, y, *xs, **attrs: _push(ts, *xs, **attrs)[1],
    push=_push,
    batch=_batch,
    residual=_residual,
    multi=True,
    graph_attrs=("body",),
    samples=_sample(),
    doc="a loop of known length that carries values and stacks results",
)

__all__ = ["INDEX", "SCAN", "Loop", "carry_flags", "element", "scan_graph", "tangent_aval",
           "with_batch"]
