"""Functions whose graphs know the extents of other ranks' tensors.

Where all_gather, all_to_all or permute is called by hand, a graph holds what the other ranks
brought when it was traced. So when such a function is called again, ranks tell each other what
they were given: if that has changed on one of them, all find or make another trace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from tessera import hooks
from tessera.graph.ir import Graph, subgraphs
from tessera.tensor import Tensor

from ..device_mesh import Mesh
from ..ranks.group import make_group
from ..ranks.ledger import agree, call
from .record import COLLECTIVES

Members = tuple[Mesh | None, tuple[str, ...] | None]  # a mesh, and axes of it


def groups(graph: Graph) -> tuple[Members, ...]:
    """Whose extents a graph holds, in the order of its nodes."""
    found: dict[Members, None] = {}
    for node in graph.nodes:
        which = COLLECTIVES.get(node.op.name)
        if which is not None and which.knows_extents:
            found[node.attrs["mesh"], node.attrs["axis"]] = None
        for inner in subgraphs(node):
            found.update(dict.fromkeys(groups(inner)))
    return tuple(found)


def extents(known: Sequence[Members], leaves: Sequence[Tensor], name: str) -> tuple:
    """What the members of those groups call a function with, as something to compare."""
    given = repr([(tuple(x.shape), str(x.type)) for x in leaves])
    digest = hashlib.blake2b(given.encode(), digest_size=16).digest()
    mine = tuple(int.from_bytes(half, "little", signed=True) for half in (digest[:8], digest[8:]))
    found = []
    for mesh, axes in known:
        group = make_group(mesh, axes)
        found.append(tuple(agree(group, call(group, f"call of {name}", mine, None, {}), (0, 1))))
    return tuple(found)


class _Together:
    """What the graph layer calls."""

    groups = staticmethod(groups)
    extents = staticmethod(extents)


hooks.together.fill(_Together())
