"""What is sent one after the other is sent together: one kernel of NCCL's in place of many.

    a, b = blocks(x), blocks(y)            # parameters of a layer, gathered for its use
    a, b = blocks(x, y)

A message costs some microseconds before its first byte, and a layer has a dozen parameters, most of
them small. The passes of a mesh put next to each other what is sent at one time
(mesh/sharding/collective_order.py).
"""

from __future__ import annotations

from dataclasses import replace

from ...ir import Graph, Node, Value


def merge_exchanges(graph: Graph) -> Graph:
    """Collectives with nothing but views between them, of one op and the same ranks, as one."""
    out: list[Node] = []
    run: list[Node] = []
    behind: list[Node] = []  # views of what the run brings
    brought = set[Value]()

    def close() -> None:
        out.extend([_merged_exchange(run)] if run else [])
        out.extend(behind)
        run.clear()
        behind.clear()
        brought.clear()

    for node in graph.nodes:
        reads = not brought.isdisjoint(node.inputs)
        if node.op.view:
            (behind if reads else out).append(node)
            brought.update(node.outputs if reads else ())
            continue
        sends = node.op.exchange is not None and node.op.exchange.joins
        if reads or not sends or run and _key(node) != _key(run[0]):
            close()
        if sends:
            run.append(node)
            brought.update(node.outputs)
        else:
            out.append(node)
    close()
    return replace(graph, nodes=tuple(out))


def _key(node: Node) -> tuple:
    return node.op, sorted((k, str(v)) for k, v in node.attrs.items() if k != "what")


def _merged_exchange(run: list[Node]) -> Node:
    first = run[0]
    if len(run) == 1:
        return first
    what = f"{first.attrs['what']}, and {len(run) - 1} more"
    return replace(first, inputs=tuple(v for n in run for v in n.inputs),
                   outputs=tuple(v for n in run for v in n.outputs),
                   attrs=first.attrs | {"what": what})


__all__ = ["merge_exchanges"]
