"""Slots are linear: what a ring_wait gives is released exactly once on every path."""

from __future__ import annotations

from tessera.tile.cuda.lower.warp_specialised.ops import NO_SLOT
from tessera.tile.cuda.lower.warp_specialised.rewrite import Nodes
from tessera.tile.ir.errors import TileIRError
from tessera.tile.ir.ir import Const, For, If, Node, Op, Operand, SSAValue, While


def check_slots(nodes: Nodes) -> None:
    """Raises TileIRError at a slot that is lost, released twice or used after its release."""
    held = _block(nodes, frozenset())
    if held:
        raise TileIRError(f"slots are never released: {_text(held)}")


def _text(slots: frozenset[SSAValue]) -> str:
    return ", ".join(sorted(map(str, slots)))


def _block(nodes: Nodes, held: frozenset[SSAValue]) -> frozenset[SSAValue]:
    for node in nodes:
        if isinstance(node, Op):
            held = _op(node, held)
        elif isinstance(node, If):
            held = _if(node, held)
        else:
            held = _loop(node, held)
    return held


def _op(op: Op, held: frozenset[SSAValue]) -> frozenset[SSAValue]:
    if op.name == "ring_wait":
        return held | {op.outs[0].value}
    if op.name not in ("ring_release", "slot_tile"):
        return held
    slot = op.args[0]
    if isinstance(slot, Const) and slot.value == NO_SLOT and op.name == "ring_release":
        return held
    if slot not in held:
        raise TileIRError(f"{op.name} of {slot}, which is not held here", where=op.where)
    return held - {slot} if op.name == "ring_release" else held


def _if(node: If, held: frozenset[SSAValue]) -> frozenset[SSAValue]:
    then, orelse = _block(node.then, held), _block(node.orelse, held)
    if then != orelse:
        raise TileIRError(f"only one branch leaves slots {_text(then ^ orelse)} held",
                          where=node.where)
    return then


def _loop(node: For | While, held: frozenset[SSAValue]) -> frozenset[SSAValue]:
    """A slot that is carried in (or -1) is held as the carried name, in each iteration and
    after."""
    carried = {d.value: (i, y) for d, i, y in zip(
        node.carried, node.inits, node.yields, strict=True)}
    body = _regions(node)
    slots = {v: pair for v, pair in carried.items() if _released(v, body) or pair[0] in held}
    held = held - {i for i, _ in slots.values() if isinstance(i, SSAValue)}
    for v, (init, _) in slots.items():
        if not _is_slot(init):
            raise TileIRError(f"{v} begins as {init}, which is no slot", where=node.where)
    inside = held | set(slots)
    after = _block(body, inside) - {y for _, y in slots.values() if isinstance(y, SSAValue)}
    if after != held:
        raise TileIRError(f"an iteration changes what is held: {_text(after ^ held)}",
                          where=node.where)
    return held | set(slots)


def _regions(node: Node) -> Nodes:
    return node.body if isinstance(node, For) else (*node.test, *node.body)  # type: ignore[union-attr]


def _released(v: SSAValue, body: Nodes) -> bool:
    return any(isinstance(n, Op) and n.name == "ring_release" and v in n.args for n in body)


def _is_slot(x: Operand) -> bool:
    return isinstance(x, SSAValue) or x.value == NO_SLOT
