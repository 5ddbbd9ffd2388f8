"""Releases: a slot goes back when everything that reads it is complete.

Matmuls read their slots until a wait covers them, everything else until it is done. A slot that an
iteration leaves to a running matmul is carried, and released in the next iteration. A slot that a
loop takes in or yields belongs to the loop from there on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import field, replace

from tessera.lazy_dataclass import dataclass
from tessera.tile.cuda.lower.warp_specialised.ops import NO_SLOT
from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    INT,
    Maker,
    Nodes,
    is_op,
    number,
    out,
    reads,
)
from tessera.tile.ir.ir import For, If, Node, Op, Operand, SSAValue, While, with_regions

Running = list[list[SSAValue]]  # the slots that each running matmul reads, in the order of issue


@dataclass
class _State:
    running: Running
    left: Counter[SSAValue] = field(default_factory=Counter)  # readers of a slot that are not done
    ring: dict[SSAValue, str] = field(default_factory=dict)
    kept: list[Node] = field(default_factory=list)


def place_releases(nodes: Nodes, maker: Maker) -> Nodes:
    """The nodes with a ring_release for each ring_wait."""
    return tuple(_Releases(maker).block(nodes, [], {}).kept)


class _Releases:
    def __init__(self, maker: Maker):
        self.maker = maker

    def block(self, nodes: Nodes, running: Running, rings: dict[SSAValue, str],
              yielded: tuple[Operand, ...] = ()) -> _State:
        """running: what runs from before, and the rings of its slots. yielded: what leaves."""
        slot_of = {out(n): n.args[0] for n in nodes
                   if is_op(n, "slot_tile")}
        state = _State([list(x) for x in running], ring=dict(rings))
        state.ring |= {out(n): n.attr["ring"] for n in nodes
                       if is_op(n, "ring_wait")}
        state.ring |= {n.args[0]: n.attr["ring"] for n in nodes  # type: ignore[misc]
                       if is_op(n, "slot_tile")}
        handed = {*yielded, *(x for n in nodes if isinstance(n, For) for x in n.inits)}
        state.left.update(slot for slot in state.ring if slot in handed)
        for node in nodes:
            state.left.update(self.slots(node, slot_of))
        for slots in state.running:
            state.left.update(slots)
        for node in nodes:
            self.step(state, node, self.slots(node, slot_of))
        return state

    @staticmethod
    def slots(node: Node, slot_of: dict[SSAValue, Operand]) -> list[SSAValue]:
        """The slots of this block that a node reads."""
        if is_op(node, "slot_tile"):
            return []
        found = [slot_of[v] for v in sorted(reads(node), key=str) if v in slot_of]
        return list(dict.fromkeys(found))  # type: ignore[arg-type]

    def step(self, state: _State, node: Node, slots: list[SSAValue]) -> None:
        if is_op(node, "async_matmul"):
            state.kept.append(node)
            state.running.append(slots)
        elif is_op(node, "matmul_wait"):
            state.kept.append(node)
            pending = node.attr["pending"]
            done = state.running[:len(state.running) - pending]
            state.running = state.running[len(state.running) - pending:]
            self.finish(state, [s for part in done for s in part])
        elif isinstance(node, Op):
            state.kept.append(node)
            self.finish(state, slots)
        else:
            self.nested(state, node, slots)

    def finish(self, state: _State, slots: list[SSAValue]) -> None:
        for slot in slots:
            state.left[slot] -= 1
            if not state.left[slot]:
                state.kept.append(self.maker.op("ring_release", (slot,), ring=state.ring[slot]))

    def nested(self, state: _State, node: Node, slots: list[SSAValue]) -> None:
        if isinstance(node, If | While):
            state.kept.append(with_regions(node, lambda inner: tuple(
                self.block(inner, [], {}).kept)))
            self.finish(state, slots)
            return
        assert isinstance(node, For)
        node, behind, rings = self.loop(node)
        state.kept.append(node)
        state.ring |= rings
        if behind:  # what was read inside may still be: until the next wait
            behind[-1] = [*behind[-1], *slots]
            state.left.update(s for part in behind for s in part if s in rings)
            state.running += behind
        else:
            self.finish(state, slots)

    def loop(self, node: For) -> tuple[For, Running, dict[SSAValue, str]]:
        """(the loop, what runs after it, the rings of its carried slots)."""
        once = self.block(node.body, [], {}, node.yields)
        if not once.running:
            return replace(node, body=tuple(once.kept)), [], {}
        held = [s for part in once.running for s in part if once.left[s]]
        carry = {s: self.maker.define(s.name, INT) for s in dict.fromkeys(held)}
        rings = {carry[s].value: once.ring[s] for s in carry}
        before = [[carry[s].value for s in part if s in carry] for part in once.running]
        again = self.block(node.body, before, rings, node.yields)
        new = replace(node, body=tuple(again.kept),
                      carried=(*node.carried, *carry.values()),
                      inits=(*node.inits, *(number(NO_SLOT) for _ in carry)),
                      yields=(*node.yields, *carry))
        return new, before, rings
