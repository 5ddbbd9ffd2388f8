"""Reductions over the groups of a cluster.

A cluster is so many groups that follow each other in the launch. They run at one time, so that each
can hold a part of what is reduced, and exchange what they found.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.tile.builder import edge_rules
from tessera.tile.builder.op_tracer import OpTracer
from tessera.tile.ir.errors import DivergenceError, KernelError, RuleError
from tessera.tile.ir.op_record import declare
from tessera.tile.ir.types import TileType

KINDS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
SIZES = (1, 2, 4, 8)  # more groups are not portable between GPUs
NAMES = {f"cluster_{kind}": f"reduce_{kind}" for kind in KINDS}  # of what each group does alone


def _rule(types: Any, attrs: dict[str, Any]) -> TileType:
    if not isinstance(types[0], TileType):
        raise RuleError(f"a cluster reduces tiles, got {types[0]}",
                        "of each group's rows: ts.tile.row_sum(x)")
    if attrs["groups"] not in SIZES:
        raise RuleError(f"a cluster of {attrs['groups']} groups: there are {SIZES}")
    return types[0]


def _require_whole(m: Any, op: Any, groups: int) -> None:
    together = m.active_groups().reshape(-1, groups) if m.count % groups == 0 else None
    if together is None:
        raise KernelError(f"{op.name} needs all groups of a cluster at one time, but groups of "
                          "this kernel wait for others in loops", where=op.where)
    if (together.any(axis=1) & ~together.all(axis=1)).any():
        raise DivergenceError(f"{op.name} needs all {groups} groups of a cluster, but some are "
                              "elsewhere", where=op.where,
                              hint="move it out of the branch that depends on the group")


def _reduction(kind: str, word: str) -> None:
    def meaning(m: Any, op: Any, x: Any, groups: Any = 2) -> Any:
        many = op.attr["groups"]
        _require_whole(m, op, many)
        whole = np.broadcast_to(x, (m.count, *x.shape[1:])).reshape(-1, many, *x.shape[1:])
        made = KINDS[kind].reduce(whole, axis=1, dtype=x.dtype)
        return np.repeat(made, many, axis=0)

    def lower(t: OpTracer, x: Any, groups: Any) -> Any:
        return t.ir.emit(f"cluster_{kind}", [t.ir.value_of(x)],
                         groups=t.ir.constant_int(groups, "groups"))

    meaning.__doc__ = f"The {word} of a tile over the `groups` groups of a cluster, in all of them."
    declare(rule=_rule, attrs=("groups",), run=True, group=True, name=f"cluster_{kind}",
            lower=lower, layouts="same", edges=edge_rules.same)(meaning)


for _kind, _word in (("sum", "sum"), ("max", "largest"), ("min", "smallest"),
                     ("prod", "product")):
    _reduction(_kind, _word)


__all__ = ["NAMES", "SIZES"]
