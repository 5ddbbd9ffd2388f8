"""Short names: passes make x_1_1_2 of a user's x; the whole program gets x, x_1, x_2, ..."""

from __future__ import annotations

import re
from dataclasses import replace

from tessera.tile.cuda.lower.warp_specialised.rewrite import redefined, substituted
from tessera.tile.ir.ir import For, Function, Names, Operand, SSAValue, outs_of, walk

_TAIL = re.compile(r"(_\d+)+$")


def base_name(name: str) -> str:
    return _TAIL.sub("", name) or name


def shorten_names(function: Function) -> Function:
    """The function with its values named anew in the order of their definitions."""
    names = Names(p.value.name for p in function.params)
    table: dict[SSAValue, Operand] = {}
    for node in walk(function.body):
        made = [*outs_of(node), *([node.var] if isinstance(node, For) else [])]
        for d in made:
            table[d.value] = names.fresh(base_name(d.value.name))
    return replace(function, body=substituted(redefined(function.body, table), table))
