"""What a group of a compiled graph, or an op that runs at once, computes and moves on the host."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ..dims import size_of
from ..errors import SourceLine
from ..graph.op import Aval, GraphOp
from ..graph.schedule.build_schedule import node_flops
from ..graph.schedule.groups import FusionGroup
from ..graph.schedule.work import LaunchWork, part_of
from ..graph.trace import aval_of


def group_work(group: FusionGroup) -> LaunchWork:
    """A fused loop or a library call. Loops read their inputs and write their results once."""
    avals = [v.aval for v in group.inputs], [v.aval for v in group.outputs]
    flops = sum(map(node_flops, group.nodes))
    part = part_of(group.where)
    if group.call is not None:
        op = group.call.op
        return _work(op.name, _sort(op), part, group.where, *avals, flops)
    names = list(dict.fromkeys(n.op.name for n in group.nodes))
    name = " ".join(["loop", *(names[:4] if len(names) > 5 else names)])
    reduces = any(n.op.reduction for n in group.nodes)
    last = part_of(group.nodes[-1].where)
    sort = "optimizer" if last == "optimizer" else "reduction" if reduces else "elementwise"
    return _work(name, sort, last if last == "optimizer" else part, group.where, *avals, flops)


def op_work(op: GraphOp, args: Sequence[Any], attrs: dict[str, Any], made: Sequence[Any],
            where: SourceLine | None) -> LaunchWork:
    """An op that ran at once."""
    ins, outs = [aval_of(a) for a in args], [aval_of(a) for a in made]
    rule = op.operations
    shapes = [a.shape for a in ins], [a.shape for a in outs]
    flops = float(sum(map(prod, shapes[1]))) if rule is None else rule(*shapes, **attrs)
    return _work(op.name, _sort(op), "eager", where, ins, outs, flops)


def _sort(op: GraphOp) -> str:
    if op.matmul or "attention" in op.name:
        return "matmul" if op.matmul else "attention"
    if op.view or op.operations is not None and not op.reduction and op.flops is None:
        return "move"
    return "reduction" if op.reduction else "elementwise" if op.loop else "library"


def _work(name: str, sort: str, part: str, where: SourceLine | None, ins: Sequence[Aval],
          outs: Sequence[Aval], flops: float) -> LaunchWork:
    shapes = f"{' '.join(map(str, ins))} -> {' '.join(map(str, outs))}"
    return LaunchWork(name, sort, part, where, shapes, _bytes(ins), _bytes(outs), flops)


def _bytes(avals: Sequence[Aval]) -> int:
    return sum(int(size_of(a.shape)) * a.dtype.numpy.itemsize for a in avals)


__all__ = ["group_work", "op_work"]
