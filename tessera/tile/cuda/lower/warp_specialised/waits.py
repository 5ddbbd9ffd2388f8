"""Waits: a matmul may be read after it is known complete.

Step one says where a matmul must be complete: in front of the first reader of its result, except a
matmul that adds to it, which is in order on the same registers. Step two puts a `matmul_wait`
there, with the number of later matmuls that may still run. A loop that only accumulates waits once
an iteration, behind its last matmul, so that its slots come free. With matmuls in flight and a
computed first operand it waits before that operand is packed, on the registers of the iteration
before: all else that the operand takes is computed while these run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, replace

from tessera.lazy_dataclass import dataclass
from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    READ_IN_PIECES,
    Maker,
    Nodes,
    Table,
    is_op,
    ops_in,
    out,
    reads,
    substituted,
)
from tessera.tile.ir.ir import For, If, Node, Op, Operand, SSAValue, While, regions
from tessera.tile.ir.types import TileType


@dataclass
class _State:
    """running: results of matmuls in the order of issue; loose: complete, but nothing stands
    between them and their readers yet; continued: to which a later matmul adds, on the same
    registers; table: result -> what a wait made of it."""

    running: list[SSAValue] = field(default_factory=list)
    loose: set[SSAValue] = field(default_factory=set)
    continued: set[SSAValue] = field(default_factory=set)
    table: Table = field(default_factory=dict)
    kept: list[Node] = field(default_factory=list)


def place_waits(nodes: Nodes, maker: Maker, in_flight: int = 0, later: bool = False) -> Nodes:
    """The nodes with all waits; markers of `rotate` become waits too. later: there are registers
    for sums that are added up an iteration later."""
    waits = _Waits(maker, in_flight, later)
    state = waits.block(nodes, [])
    waits.need(state, list(state.running))
    return tuple(state.kept)


class _Waits:
    def __init__(self, maker: Maker, in_flight: int, later: bool):
        self.maker, self.in_flight, self.later = maker, in_flight, later

    def block(self, nodes: Nodes, accumulating: list[Op], rolling: bool = False,
              running: Iterable[SSAValue] = ()) -> _State:
        """running: what the iteration before left running, by the names that this one reads."""
        state = _State(list(running))
        for node in nodes:
            if is_op(node, "async_matmul"):
                self.matmul(state, node, node in accumulating)
                if rolling:
                    self.roll(state, node)
                elif node in accumulating and node == accumulating[-1]:
                    self.end_iteration(state, node, len(accumulating))
            elif is_op(node, "matmul_wait"):
                self.marker(state, node)
            elif is_op(node, "pack_operand"):
                # Written while a matmul runs, its registers make the assembler serialise both.
                self.need(state, [*state.running, *_ordered(node)])
                state.kept += substituted((node,), state.table)
            elif isinstance(node, Op):
                self.need(state, _ordered(node))
                state.kept += substituted((node,), state.table)
            else:
                self.nested(state, node)
        return state

    # --- step one: what must be complete here -------------------------------------------------
    def matmul(self, state: _State, op: Op, accumulates: bool) -> None:
        """Issued at once; an operand in registers must be complete, an accumulator not."""
        self.need(state, [x for x in _ordered(op) if x not in op.args[2:]])
        if not accumulates:
            self.need(state, [x for x in _ordered(op) if x in state.loose])
        state.kept += substituted((op,), state.table)
        state.continued |= set(state.running).intersection(op.args[2:])
        state.running.append(out(op))

    def marker(self, state: _State, op: Op) -> None:
        """What was made of matmuls, and is none itself, has waited for them."""
        (x,) = op.args
        self.need(state, [x])  # type: ignore[list-item]
        state.table[out(op)] = _substituted_operand(state, x)

    def end_iteration(self, state: _State, last: Op, many: int) -> None:
        """The wait of a loop that accumulates."""
        result, pending = out(last), self.in_flight * many
        made = self.maker.op("matmul_wait", (result,), result.name, self.maker.type(result),
                             last.where, pending=pending)
        state.kept.append(made)
        state.table[result] = out(made)
        if not pending:
            state.loose |= set(state.running) - {result}
            state.running = []

    def roll(self, state: _State, op: Op) -> None:
        """The wait of a loop whose matmuls follow each other: all but this one are complete, and
        what they read in registers may be made anew."""
        made = self.maker.op("matmul_wait", (out(op),), out(op).name, self.maker.type(out(op)),
                             op.where, pending=1)
        state.kept.append(made)
        state.table[out(op)] = out(made)
        state.running = state.running[-1:]

    # --- step two: the waits ------------------------------------------------------------------
    def need(self, state: _State, values: list[SSAValue]) -> None:
        """Each of the values complete and behind a wait."""
        for value in values:
            if value in state.running:
                at = state.running.index(value)
                state.loose |= set(state.running[:at + 1])
                state.running = state.running[at + 1:]
            if value in state.loose:
                state.loose.remove(value)
                made = self.maker.op("matmul_wait", (value,), value.name, self.maker.type(value),
                                     pending=len(state.running))
                state.kept.append(made)
                state.table[value] = out(made)

    # --- loops and branches -------------------------------------------------------------------
    def nested(self, state: _State, node: Node) -> None:
        matmuls = [p for region in regions(node) for p in ops_in(region, "async_matmul")]
        self.need(state, list(state.running) if matmuls else _ordered(node))
        self.need(state, [v for v in _ordered(node) if v in state.loose])
        (node,) = substituted((node,), state.table)
        if isinstance(node, For):
            self.loop(state, node)
        elif isinstance(node, If):
            then, thens = self.ended(node.then, node.thens)
            orelse, elses = self.ended(node.orelse, node.elses)
            state.kept.append(replace(node, then=then, orelse=orelse, thens=thens, elses=elses))
        else:
            assert isinstance(node, While)
            body, yields = self.ended(node.body, node.yields)
            state.kept.append(replace(node, body=body, yields=yields))

    def ended(self, nodes: Nodes, results: tuple[Operand, ...]
              ) -> tuple[Nodes, tuple[Operand, ...]]:
        """A region that leaves nothing running."""
        state = self.block(nodes, [])
        left = [*state.running, *sorted(state.loose, key=str)]
        self.need(state, [x for x in left if x not in state.continued or x in results])
        return tuple(state.kept), tuple(_substituted_operand(state, x) for x in results)

    def loop(self, state: _State, node: For) -> None:
        accumulating = accumulations(node)
        if self.in_flight and not accumulating and (pieces := succession(node)):
            inner = self.block(node.body, pieces, True)
            yields = tuple(_substituted_operand(inner, x) for x in node.yields)
            state.kept.append(replace(node, body=tuple(inner.kept), yields=yields))
            state.running += [d.value for d in node.carried if d.value == pieces[0].args[2]]
            return
        if self.later and self.in_flight and (parts := parts_of_sums(node)):
            self.sum_later(state, node, *parts)
            return
        if not accumulating:
            body, yields = self.ended(node.body, node.yields)
            state.kept.append(replace(node, body=body, yields=yields))
            return
        names = [next(d.value for d, y in zip(node.carried, node.yields, strict=True)
                      if y == out(p)) for p in accumulating]
        if self.in_flight and any(is_op(n, "pack_operand") for n in node.body):
            inner = self.block(node.body, [], running=names)
        else:
            inner = self.block(node.body, accumulating)
        yields = tuple(_substituted_operand(inner, x) for x in node.yields)
        state.kept.append(replace(node, body=tuple(inner.kept), yields=yields))
        if self.in_flight:
            state.running += names
        else:
            state.loose |= set(names[:-1])

    def sum_later(self, state: _State, node: For, number: int, total: Op) -> None:
        """What an iteration's matmuls made is added behind the first codes of the next one, which
        are unpacked while the last of them run. A wait stands at the end too: up to the next one
        the assembler leaves the registers alone that a matmul reads."""
        (result, part), where = (node.carried[number], total.args[1]), total.where
        assert isinstance(part, SSAValue) and isinstance(result.type, TileType)
        sums, before = (self.maker.define(n, result.type) for n in (result.value.name, part.name))
        first = self.maker.op("full", (), part.name, result.type, where, shape=result.type.shape,
                              value=0.0, dtype=result.type.dtype)
        ended = self.maker.op("matmul_wait", (before.value,), part.name, result.type, where,
                              pending=0)
        added = self.maker.op("add", (sums.value, out(ended)), result.value.name, result.type,
                              where)
        left = self.maker.op("matmul_wait", (part,), part.name, result.type, where, pending=1)
        body: list[Node] = []
        for n in node.body:
            if n is not total:
                body.append(n)
            if is_op(n, *READ_IN_PIECES) and ended not in body:
                body += [ended, added]
        yields = [out(added) if i == number else x for i, x in enumerate(node.yields)]
        carried = [sums if i == number else d for i, d in enumerate(node.carried)]
        last = self.maker.op("matmul_wait", (before.value,), part.name, result.type, where,
                             pending=0)
        state.kept += [first, replace(
            node, body=(*body, left), carried=(*carried, before), inits=(*node.inits, out(first)),
            yields=(*yields, out(left))), last, Op("add", (sums.value, out(last)), (result,), (),
                                                   where)]


def accumulations(loop: For) -> list[Op]:
    """The matmuls of a loop all of whose matmuls only add to what it carries; else none."""
    matmuls = [n for n in loop.body if is_op(n, "async_matmul")]
    inside = ops_in(loop.body, "async_matmul")
    chained = {(d.value, y) for d, y in zip(loop.carried, loop.yields, strict=True)}
    if len(inside) != len(matmuls) or not all(
            len(p.args) == 3 and (p.args[2], out(p)) in chained for p in inside):
        return []
    used = {x for n in loop.body if n not in matmuls for x in reads(n)}
    touched = {v for p in inside for v in (p.args[2], out(p))}
    if used & touched or any(set(p.args[:2]) & touched for p in inside):
        return []
    return inside


def succession(loop: For) -> list[Op]:
    """The matmuls of a loop, several of which each adds to the one before and the first to what the
    loop carries, with operands that are read into registers in pieces; else none."""
    matmuls = [n for n in loop.body if is_op(n, "async_matmul")]
    inside = ops_in(loop.body, "async_matmul")
    if len(inside) < 2 or len(inside) != len(matmuls):
        return []
    sums = [matmuls[0].args[2], *map(out, matmuls)] if len(matmuls[0].args) == 3 else []
    carried = {(d.value, y) for d, y in zip(loop.carried, loop.yields, strict=True)}
    pieces = {out(n) for n in ops_in(loop.body, *READ_IN_PIECES)}
    used = {x for n in loop.body if n not in matmuls for x in reads(n)}
    follow = [p.args[2:] == (x,) and p.args[0] in pieces for p, x in zip(
        matmuls, sums, strict=False)]
    plain = sums and all(follow) and (sums[0], sums[-1]) in carried and not used & set(sums)
    return matmuls if plain else []


def parts_of_sums(loop: For) -> tuple[int, Op] | None:
    """Of a loop whose matmuls make one part of a sum, of operands that are read into registers in
    pieces: which of what it carries the sum is, and the op that adds the part to it."""
    matmuls = [n for n in loop.body if is_op(n, "async_matmul")]
    pieces = {out(n) for n in ops_in(loop.body, *READ_IN_PIECES)}
    if len(matmuls) < 2 or len(matmuls) != len(ops_in(loop.body, "async_matmul")):
        return None
    follow = [p.args[2:] == x and p.args[0] in pieces for p, x in zip(
        matmuls, [(), *((out(m),) for m in matmuls)], strict=False)]
    part = out(matmuls[-1])
    readers = [n for n in loop.body if part in reads(n)]
    if not all(follow) or len(readers) != 1 or not is_op(readers[0], "add"):
        return None
    (total,) = readers
    assert isinstance(total, Op)
    number = [i for i, (d, y) in enumerate(zip(loop.carried, loop.yields, strict=True))
              if total.args == (d.value, part) and y == out(total)]
    used = sum(out(total) in reads(n) or bool(number) and total.args[0] in reads(n)
               for n in loop.body)
    return (number[0], total) if number and used == 1 else None


def _substituted_operand(state: _State, x: Operand) -> Operand:
    return state.table.get(x, x) if isinstance(x, SSAValue) else x


def _ordered(node: Node) -> list[SSAValue]:
    return sorted(reads(node), key=str)
