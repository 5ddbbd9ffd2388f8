"""How many groups a cluster of a kernel has."""

from __future__ import annotations

from tessera.tile.ir.errors import KernelError
from tessera.tile.ir.ir import Function, Op, walk
from tessera.tile.ir.op_record import OPS


def cluster_ops(function: Function) -> list[Op]:
    """The ops for which the groups of a cluster meet."""
    return [n for n in walk(function.body) if isinstance(n, Op)
            and OPS[n.name].family == "cluster" and n.attr["groups"] > 1]


def cluster_of(function: Function) -> int:
    """The groups of a cluster: 1 where none meet. Raises KernelError where ops disagree."""
    ops = cluster_ops(function)
    sizes = {n.attr["groups"] for n in ops}
    if len(sizes) > 1:
        raise KernelError(f"clusters of {' and '.join(map(str, sorted(sizes)))} groups in one "
                          "kernel", where=ops[-1].where, hint="a launch has clusters of one size")
    return sizes.pop() if sizes else 1


__all__ = ["cluster_of", "cluster_ops"]
