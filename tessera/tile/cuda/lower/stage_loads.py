"""Loads that feed matmuls become copies to shared memory, under way while matmuls run.

A tile that is loaded and only multiplied needs no registers: it is copied to shared memory and read
there by the matmul. In a serial loop whose addresses can be computed ahead, the copies of later
iterations run while this one multiplies: a ring of `stages` buffers,

    copies of iterations 0 .. stages - 2                                  (each one commit group)
    for each iteration:
        wait until this iteration's copies have arrived, barrier
        the body, reading this iteration's buffer; in the midst of its first matmul,
            copies of the iteration `stages` - 1 ahead, into the buffer that the last iteration read

with one barrier an iteration. The tensor cores are busy while the copies are issued: the matmul is
cut in two along k around them. Where an iteration has one matmul, `carry` also reads its operands
ahead, and spreads the copies. Other such loads get a buffer of their own. Tile IR in, Tile IR out:
the interpreter runs the result, and its race detector checks the barriers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from tessera.errors import SourceLine
from tessera.lazy_dataclass import dataclass
from tessera.numerics import DType, as_type, bool_, i32
from tessera.runtime.generations import Generation
from tessera.tile.cuda.intrinsics.matmul import STEP_BYTES
from tessera.tile.cuda.intrinsics.thread_matmul import STEP as THREAD_STEP
from tessera.tile.cuda.lower.carry_fragments import Carrier, plan
from tessera.tile.cuda.lower.choose_matmul_unit import format_of
from tessera.tile.cuda.lower.find_staged_loads import Feed, find_feeds
from tessera.tile.cuda.lower.next_iteration import Ahead
from tessera.tile.ir.ir import (
    Const,
    Def,
    For,
    Function,
    If,
    Names,
    Node,
    Op,
    Operand,
    SSAValue,
    While,
    definitions,
    walk,
    with_regions,
)
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import Buffer, Scalar, TileType, View

ALIGNMENT = 128
COUNT = Scalar(i32)
TRUTH = Scalar(bool_)


@dataclass(frozen=True)
class Room:
    """shared_bytes: of a group, at most.  stages: asked for, or None.

    groups: how many groups should find room on a multiprocessor; fewer rather than one stage.
    resident: how many must, as a schedule says: loads of computed operands stay loads rather.
    warps: whether groups are whole warps, whose matmuls mma.sync does.
    """

    shared_bytes: int
    stages: int | None = None
    groups: int = 1
    warps: bool = False
    resident: int = 1

    def has(self, feeds: list[Feed], generation: Generation) -> bool:
        """Whether buffers of these leave room for the resident groups."""
        taken = sum(f.bytes * (self.stages or 1 if f.ahead else 1) for f in feeds)
        return self.resident == 1 or taken <= generation.room_of(self.resident)


def stage_matmul_loads(function: Function, generation: Generation, room: Room,
                       overlapping: bool = False,
                       divisible: frozenset[str] = frozenset()) -> Function:
    """The function with its matmuls' loads staged.

    overlapping: parameters may be the same memory, so that any store may change what is loaded.
    divisible: extents that are multiples of 16.
    """
    feeds = find_feeds(function, generation, overlapping, divisible)
    if not room.has(feeds, generation):
        feeds = [f for f in feeds if not f.computed]
    if not feeds:
        return function
    return _Stager(function, feeds, generation, room).run()


def ring_stages(function: Function) -> int:
    """Stages of the rings that this pass made; 1 where there are none."""
    made = [n.attr for n in walk(function.body) if isinstance(n, Op) and n.name == "allocate"]
    return max((a["stages"] for a in made if a["alignment"] == ALIGNMENT), default=1)


class _Stager:
    def __init__(self, function: Function, feeds: list[Feed], generation: Generation, room: Room):
        self.function, self.room, self.generation = function, room, generation
        self.names, self.types = Names.of(function), definitions(function)
        self.feeds = {f.value: f for f in feeds}
        self.buffers: list[Node] = []
        self.where: SourceLine | None = None
        self.staged: dict[SSAValue, Buffer] = {}  # places that matmuls read
        self.made: dict[SSAValue, Any] = {}  # types of what this pass defines
        self.carrier: Carrier | None = None  # does the matmul of the ring around
        self.midst: Callable[[list[Node]], None] | None = None  # to do amid the next matmul
        self.coming: set[SSAValue] = set()  # tiles whose copies nobody has waited for
        self.transposed: dict[SSAValue, SSAValue] = {}  # transposed tile -> tile
        self.ready: dict[SSAValue, tuple[SSAValue, bool]] = {}  # tile -> (place, transposed)
        self.read_there: dict[SSAValue, SSAValue] = {}  # tile of a computed operand -> place
        self.loops = 0
        self.stages = self.choose(feeds)

    def choose(self, feeds: list[Feed]) -> int:
        """Stages of all rings: as asked, else as many as there is room for."""
        if self.room.stages is not None:
            return self.room.stages
        taken = self.function.shared_bytes
        ring = sum(f.bytes for f in feeds if f.ahead)
        alone = sum(f.bytes for f in feeds if not f.ahead)
        most = self.generation.ring_stages
        for groups in (self.room.groups, 1):
            left = self.room.shared_bytes // groups - taken - alone
            if left >= 2 * ring:
                break
        return max(1, min(most, left // max(1, ring)))

    def run(self) -> Function:
        body = self.block(self.function.body)
        return replace(self.function, body=(*self.buffers, *body))

    # --- making ops ---------------------------------------------------------------------------
    def op(self, out: list[Node], name: str, args: Iterable[Operand], hint: str, type: Any,
           **attrs: Any) -> SSAValue:
        made = Def(self.names.fresh(hint), type)
        self.made[made.value] = type
        out.append(Op(name, tuple(args), (made,), tuple(sorted(attrs.items())), self.where))
        return made.value

    def act(self, out: list[Node], name: str, *args: Operand, **attrs: Any) -> None:
        out.append(Op(name, args, (), tuple(sorted(attrs.items())), self.where))

    def buffer(self, feed: Feed, stages: int) -> SSAValue:
        made = self.types_of(feed, stages)
        return self.op(self.buffers, "allocate", (), f"{feed.tensor.name}_shared", made,
                       dtype=feed.dtype, shape=feed.shape, space="shared", stages=stages,
                       swizzle=feed.swizzle, alignment=ALIGNMENT)

    # --- walking ------------------------------------------------------------------------------
    def block(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        out: list[Node] = []
        for i, node in enumerate(nodes):
            self.where = node.where
            if not isinstance(node, Op):
                self.arrive(out)
            if isinstance(node, Op):
                self.statement(node, nodes[i + 1:], out)
            else:
                self.nested(node, out)
        return tuple(out)

    def nested(self, node: For | While | If, out: list[Node]) -> None:
        """What stands inside of a node does not interrupt its matmuls for copies around it."""
        midst, self.midst = self.midst, None
        carrier, self.carrier = self.carrier, None
        if isinstance(node, If):
            out.append(with_regions(node, self.block))
        elif isinstance(node, For) and (ring := self.ring_of(node)):
            self.ring(node, ring, out)
        else:
            self.loops += 1
            out.append(with_regions(node, self.block))
            self.loops -= 1
        self.midst, self.carrier = midst, carrier

    def statement(self, op: Op, after: tuple[Node, ...], out: list[Node]) -> None:
        made = op.outs[0].value if op.outs else None
        if made in self.read_there:
            assert made is not None
            out.append(replace(op, args=(self.read_there[made],)))
        elif made in self.feeds and not self.feeds[made].computed:
            assert made is not None
            self.alone(self.feeds[made], after, out)
        elif op.name == "transpose" and op.args[0] in self.ready:
            place, turned = self.ready[op.args[0]]
            self.ready[made] = (place, not turned)  # type: ignore[index]
            if op.args[0] in self.read_there:
                out.append(op)  # registers hold it as well
                self.read_there[made] = place  # type: ignore[index]
            self.transposed[made] = op.args[0]  # type: ignore[index]
        elif OPS[op.name].multiplies:
            self.arrive(out, op.args)
            if self.carrier is not None and op is self.carrier.plan.op:
                self.carrier.matmul(out)
            else:
                self.matmul(op, out)
        else:
            out.append(op)

    def matmul(self, op: Op, out: list[Node]) -> None:
        """A matmul that reads its places; the first of a ring's iteration with copies in its
        midst."""
        midst, self.midst = self.midst, None
        at = self.cut(op) if midst else 0
        if midst and op.name == "matmul_codes":  # few columns: copies first, they take longer
            midst(out)
            midst = None
        if not at:
            out.append(replace(op, args=tuple(self.read(x, out) for x in op.args)))
        else:
            a, b, *acc = op.args
            (made,), K = op.outs, self.types[a].shape[1]  # type: ignore[index,union-attr]
            first = Def(self.names.fresh(made.value.name), made.type)
            parts = (self.read(a, out, 1, 0, at), self.read(b, out, 0, 0, at))
            out.append(replace(op, args=(*parts, *acc), outs=(first,)))
        if midst:
            midst(out)
        if at:
            parts = (self.read(a, out, 1, at, K - at), self.read(b, out, 0, at, K - at))
            out.append(replace(op, args=(*parts, first.value)))

    def cut(self, op: Op) -> int:
        """Where to cut the matmul along k; 0: nowhere."""
        a, b = op.args[:2]
        if op.name != "matmul" or a not in self.ready or b not in self.ready:
            return 0
        x, y = self.types[a], self.types[b]
        assert isinstance(x, TileType) and isinstance(y, TileType)
        half, rest = divmod(x.shape[1], 2)
        if format_of(x.dtype, y.dtype, op.attr, self.generation) is None:
            across = all(self.staged[self.ready[v][0]].swizzle is None for v in (a, b))
            whole = across and half % THREAD_STEP == 0  # of others halves took 3 % longer
        else:
            whole = half * x.dtype.bits % (8 * STEP_BYTES) == 0 and op.attr["dtype"].bits >= 32
        return half if whole and not rest else 0

    def read(self, x: Operand, out: list[Node], axis: int = 0, start: int = 0,
             count: int = 0) -> Operand:
        """An operand of a matmul: the place that holds it, or `count` of it along an axis."""
        if not isinstance(x, SSAValue) or x not in self.ready:
            return x
        place, turned = self.ready[x]
        t: Buffer | View = self.staged[place]
        if count:
            return self.part(out, place, t.dtype, t.shape, turned, axis, start, count)
        return self.upright(out, place, t, turned)

    def part(self, out: list[Node], place: SSAValue, dtype: DType, shape: tuple[int, ...],
             turned: bool, axis: int, start: int, count: int) -> SSAValue:
        """`count` of a place along an axis of the operand that it is."""
        axis = 1 - axis if turned else axis
        box = tuple(count if i == axis else n for i, n in enumerate(shape))
        offsets = tuple(Const(start if i == axis else 0, i32) for i in (0, 1))
        t = View(as_type(dtype), box, "shared")
        made = self.op(out, "view", (place, *offsets), place.name, t, box=box, kept=(0, 1))
        return self.upright(out, made, t, turned)

    def upright(self, out: list[Node], place: SSAValue, t: Buffer | View, turned: bool) -> SSAValue:
        if not turned:
            return place
        return self.op(out, "view_transpose", (place,), place.name,
                       View(t.numeric, t.shape[::-1], "shared"))

    # --- a buffer of its own ------------------------------------------------------------------
    def alone(self, feed: Feed, after: tuple[Node, ...], out: list[Node]) -> None:
        """One buffer. What reads it first waits, or a ring that comes before that."""
        place = self.buffer(feed, 1)
        if self.loops and not self.coming:
            self.act(out, "barrier")  # the iteration before may still be read
        self.act(out, "cp_async", place, feed.view)
        self.act(out, "cp_commit_group")
        self.hold(feed, place)
        if not self.read_in_ring(feed, after):
            self.coming.add(feed.value)

    def arrive(self, out: list[Node], readers: tuple[Operand, ...] | None = None) -> None:
        """Waits for copies under way that these operands (None: anything) may read."""
        if self.coming and (readers is None or any(self.origin(x) in self.coming
                                                   for x in readers)):
            self.act(out, "cp_wait_group", pending=0)
            self.act(out, "barrier")
            self.coming.clear()

    def origin(self, x: Operand) -> SSAValue | None:
        """The tile that an operand is, or is the transpose of."""
        while isinstance(x, SSAValue) and x in self.transposed:
            x = self.transposed[x]
        return x if isinstance(x, SSAValue) else None

    def hold(self, feed: Feed, place: SSAValue) -> None:
        if feed.computed:
            self.read_there[feed.value] = place
        if not feed.multiplied:
            return
        self.ready[feed.value] = (place, feed.turned)
        self.staged[place] = self.types_of(feed)

    def read_in_ring(self, feed: Feed, after: tuple[Node, ...]) -> bool:
        """Whether only a ring of the same block reads it: that one's first wait is for it too."""
        rings = [n for n in after if isinstance(n, For) and self.ring_of(n)]
        return bool(rings) and all(any(user in loop_users(r) for r in rings)
                                   for user in feed.users)

    # --- rings --------------------------------------------------------------------------------
    def ring_of(self, node: For) -> list[Feed]:
        """The loads of a loop's own body that can be made ahead."""
        if self.stages < 2:
            return []
        return [self.feeds[n.outs[0].value] for n in node.body
                if isinstance(n, Op) and n.outs and n.outs[0].value in self.feeds
                and self.feeds[n.outs[0].value].ahead]

    def ring(self, node: For, feeds: list[Feed], out: list[Node]) -> None:
        found = plan(self, node, feeds) if self.room.warps else None
        if found is not None:
            Carrier(self, node, feeds, found).run(out)
        else:
            self.plain_ring(node, feeds, out)
        if self.loops:  # the next prologue writes what may still be read, or written: with zeros
            if found is not None:
                self.act(out, "cp_wait_group", pending=0)
            self.act(out, "barrier")

    def plain_ring(self, node: For, feeds: list[Feed], out: list[Node]) -> None:
        """Copies amid the iteration's first matmul, whatever the loop does with what they bring."""
        buffers = {f.value: self.buffer(f, self.stages) for f in feeds}
        for iteration in range(self.stages - 1):
            at = self.moved(out, node.lo, node.step, iteration)
            self.copies(out, node, feeds, buffers, at, Const(iteration, i32))
        slot, put = (self.counter(hint) for hint in ("slot", "free"))
        body: list[Node] = []
        self.act(body, "cp_wait_group", pending=self.stages - 2)
        self.act(body, "barrier")
        for f in feeds:
            self.hold(f, self.op(body, "stage", (buffers[f.value], slot.value),
                                 f.tensor.name, self.types_of(f)))

        def ahead(out: list[Node]) -> None:
            at = self.moved(out, node.var.value, node.step, self.stages - 1)
            self.copies(out, node, feeds, buffers, at, put.value)

        self.midst = ahead
        self.rest(node, feeds, body)
        if self.midst is not None:  # its matmuls all stand deeper
            ahead(body)
        self.midst = None
        yields = [self.following(body, d.value) for d in (slot, put)]
        out.append(replace(
            node, carried=(*node.carried, slot, put), body=tuple(body),
            inits=(*node.inits, Const(0, i32), Const(self.stages - 1, i32)),
            yields=(*node.yields, *yields)))

    def types_of(self, feed: Feed, stages: int = 1) -> Buffer:
        return Buffer(feed.dtype, feed.shape, "shared", stages, feed.swizzle, ALIGNMENT)

    def rest(self, node: For, feeds: list[Feed], body: list[Node]) -> None:
        """What the loop does besides its staged loads."""
        mine = {f.value for f in feeds if not f.computed}
        left = tuple(n for n in node.body
                     if not (isinstance(n, Op) and n.outs and n.outs[0].value in mine))
        self.loops += 1
        body += self.block(left)
        self.loops -= 1

    def copies(self, out: list[Node], node: For, feeds: list[Feed],
               buffers: dict[SSAValue, SSAValue],
               at: Operand, slot: Operand) -> None:
        """The copies of the iteration whose loop variable is `at`, if there is such an
        iteration."""
        then: list[Node] = []
        inside = self.inside(out, at, node)
        self.copy_iteration(then, node, feeds, buffers, at, slot)
        out.append(If(inside, tuple(then), (), (), (), (), self.where))
        self.act(out, "cp_commit_group")

    def copy_iteration(self, out: list[Node], node: For, feeds: list[Feed],
                       buffers: dict[SSAValue, SSAValue],
                       at: Operand, slot: Operand, inside: SSAValue | None = None) -> None:
        """inside: whether there is such an iteration; None: there is."""
        ahead = Ahead(node, at, self.names)
        for f in feeds:
            target = self.op(out, "stage", (buffers[f.value], slot), f.tensor.name,
                             self.types_of(f))
            source = ahead.copy(f.view, out)
            if inside is None:
                self.act(out, "cp_async", target, source)
            else:
                self.act(out, "cp_async_if", target, source, inside)

    def inside(self, out: list[Node], at: Operand, node: For) -> SSAValue:
        """Whether the loop has an iteration with that value of its variable."""
        return self.op(out, "lt", (at, node.hi), "more", TRUTH)

    def counter(self, hint: str) -> Def:
        return Def(self.names.fresh(hint), COUNT)

    def moved(self, out: list[Node], x: Operand, step: Operand, iterations: int) -> Operand:
        """x + iterations * step"""
        assert isinstance(step, Const)
        by = int(step.value) * iterations
        if by == 0:
            return x
        if isinstance(x, Const):
            return Const(int(x.value) + by, x.dtype)
        return self.op(out, "add", (x, Const(by, step.dtype)), "later", Scalar(step.dtype))

    def following(self, out: list[Node], slot: SSAValue) -> SSAValue:
        """The next buffer of the ring."""
        more = self.op(out, "add", (slot, Const(1, i32)), slot.name, COUNT)
        last = self.op(out, "eq", (more, Const(self.stages, i32)), "around", TRUTH)
        return self.op(out, "where", (last, Const(0, i32), more), slot.name, COUNT)


def loop_users(node: For) -> set[int]:
    return {id(n) for n in walk(node.body)}


__all__ = ["Room", "ring_stages", "stage_matmul_loads"]
