"""Which pass over a row computes what: levels, kept values, recomputed values.

A row is read in passes. A reduction is known after the pass that runs over its argument, so a
value's level is the number of passes that must have ended before it can be computed: 0 for inputs,
one more than its argument's for a reduction, the greatest of its arguments' for the rest. A full
value needed in a later pass than its own level is recomputed when that is cheaper than storing it,
else kept in a row buffer.
"""

from __future__ import annotations

from ...errors import ArgumentError
from ...lazy_dataclass import dataclass
from ...numerics import DType, find_dtype
from .expressions import cost, parse
from .program import REDUCTIONS, LoopOp, LoopProgram

RECOMPUTE_COST = 6  # f32 additions; above, storing to and loading from L1 is cheaper
ROWS = ("row", "row_count")  # outputs with one number for each row


@dataclass(frozen=True)
class Pass:
    """One loop over the columns. `steps` are full values in order; each is computed or loaded."""

    level: int
    steps: tuple[tuple[int, str], ...]  # (value, 'compute' | 'load')
    keeps: tuple[int, ...]  # values written to their row buffer in this pass
    reductions: tuple[int, ...]  # reduction values accumulated in this pass
    outputs: tuple[int, ...]  # positions of outputs written in this pass
    rows_after: tuple[int, ...]  # row values computed when this pass has ended


@dataclass(frozen=True)
class LoopPasses:
    """The passes of a program for one pattern of inner strides."""

    full: tuple[bool, ...]  # per value: varies along the last axis
    levels: tuple[int, ...]
    rows_before: tuple[int, ...]  # row values known before the first pass
    passes: tuple[Pass, ...]
    kept: dict[int, int]  # value -> row buffer slot


def plan_passes(
    program: LoopProgram, full_inputs: tuple[bool, ...], iota_full: tuple[bool, ...]
) -> LoopPasses:
    """Levels and passes. `full_inputs[i]`: input i varies along the columns; `iota_full` likewise,
    in the order of the program's iota ops."""
    full, levels = _levels(program, full_inputs, iota_full)
    _check_rows(program, full)
    order = range(len(full))
    last = max(
        (levels[a] for v, op in _ops(program) if op.kind in REDUCTIONS for a in op.args), default=0
    )
    last = max(last, *(levels[o.value] for o in program.outputs if o.mode not in ROWS), 0)
    wanted = [_roots(program, full, levels, level) for level in range(last + 1)]
    kept = _values_between_passes(program, full, levels, wanted)
    written: set[int] = set()
    passes = []
    for level, (roots, reductions, outputs) in enumerate(wanted):
        steps, keeps = _pass_steps(program, full, levels, roots, level, kept, written)
        written |= set(keeps)
        after = tuple(v for v in order if not full[v] and levels[v] == level + 1)
        passes.append(Pass(level, steps, keeps, reductions, outputs, after))
    before = tuple(v for v in order if not full[v] and levels[v] == 0)
    return LoopPasses(full, levels, before, tuple(passes), kept)


def _ops(program: LoopProgram) -> list[tuple[int, LoopOp]]:
    first = len(program.inputs)
    return [(first + i, op) for i, op in enumerate(program.ops)]


def _levels(
    program: LoopProgram, full_inputs: tuple[bool, ...], iota_full: tuple[bool, ...]
) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    full, levels = list(full_inputs), [0] * len(full_inputs)
    iotas = iter(iota_full)
    for _, op in _ops(program):
        level = max((levels[a] for a in op.args), default=0)
        if op.kind in REDUCTIONS:
            full.append(False)
            levels.append(level + 1)
        else:
            varies = {"iota": lambda: next(iotas), "random_bits": lambda: True}.get(op.kind)
            full.append(varies() if varies else any(full[a] for a in op.args))
            levels.append(level)
    return tuple(full), tuple(levels)


def _check_rows(program: LoopProgram, full: tuple[bool, ...]) -> None:
    for out in program.outputs:
        if out.mode in ROWS and full[out.value]:
            raise ArgumentError(
                f"a {out.mode!r} output has v{out.value}, which varies along the last axis",
                hint="reduce it first, or use mode 'full'",
            )
    for _, op in _ops(program):
        if op.kind == "random_bits" and any(full[a] for a in op.args):
            raise ArgumentError("the key of random_bits must be two scalars")


def _roots(
    program: LoopProgram, full: tuple[bool, ...], levels: tuple[int, ...], level: int
) -> tuple[set[int], tuple[int, ...], tuple[int, ...]]:
    """Full values a pass must have, its reductions, and its outputs."""
    reductions = tuple(
        v for v, op in _ops(program) if op.kind in REDUCTIONS and levels[op.args[0]] == level
    )
    outputs = tuple(
        i for i, o in enumerate(program.outputs)
        if o.mode not in ROWS and levels[o.value] == level
    )
    ops = dict(_ops(program))
    needed = {ops[v].args[0] for v in reductions} | {program.outputs[i].value for i in outputs}
    return {v for v in needed if full[v]}, reductions, outputs


def own_cost(op: LoopOp) -> int:
    """Work of one op at one element."""
    if op.kind == "map":
        return cost(parse(op.expr))
    return {"round": 8, "random_bits": 30}.get(op.kind, 1)


def _decode_cost(dtype: DType) -> int:
    """f32 additions that take the time of decoding: the upper bits of an f32 or a half are one."""
    if dtype.kind != "float" or dtype.bits != 8:
        return 0
    return 2 if dtype.special == "ieee" and dtype.exp in (5, 8) else 4


def _recompute_cost(program: LoopProgram, full: tuple[bool, ...]) -> list[int]:
    """Work to compute each full value again from memory."""
    costs = [_decode_cost(find_dtype(x.dtype)) for x in program.inputs]
    for v, op in _ops(program):
        own = 0 if op.kind == "random_bits" else own_cost(op)
        costs.append(own + sum(costs[a] for a in set(op.args) if full[a]) if full[v] else 0)
    return costs


def _values_between_passes(
    program: LoopProgram, full: tuple[bool, ...], levels: tuple[int, ...], wanted: list[tuple]
) -> dict[int, int]:
    """Slots of the values kept between passes: expensive ones computed in one pass, used later."""
    costs = _recompute_cost(program, full)
    ops = dict(_ops(program))
    kept: dict[int, int] = {}
    computed: set[int] = set()
    for level, (roots, _, _) in enumerate(wanted):
        stack, seen = list(roots), set()
        while stack:
            v = stack.pop()
            if v in seen or not full[v] or v not in ops:
                continue
            seen.add(v)
            again = v in computed and costs[v] > RECOMPUTE_COST and ops[v].kind != "random_bits"
            if again and levels[v] < level:
                kept.setdefault(v, len(kept))
                continue
            stack.extend(ops[v].args if ops[v].kind != "random_bits" else ())
        computed |= seen
    return kept


def _pass_steps(
    program: LoopProgram, full: tuple[bool, ...], levels: tuple[int, ...], roots: set[int],
    level: int, kept: dict[int, int], written: set[int],
) -> tuple[tuple[tuple[int, str], ...], tuple[int, ...]]:
    """The full values one pass computes or loads, in program order, and those it keeps."""
    ops = dict(_ops(program))
    how: dict[int, str] = {}
    stack = list(roots)
    while stack:
        v = stack.pop()
        if v in how or not full[v]:
            continue
        if v not in ops or v in written:
            how[v] = "load"
            continue
        how[v] = "compute"
        stack.extend(ops[v].args if ops[v].kind != "random_bits" else ())
    keeps = tuple(v for v in sorted(how) if how[v] == "compute" and v in kept)
    return tuple(sorted(how.items())), keeps


def work_per_element(program: LoopProgram) -> int:
    """f32 additions per element, loads and stores included."""
    total = len(program.inputs) + len(program.outputs)
    for op in program.ops:
        total += own_cost(op)
    return total
