"""What a tile kernel computes, in ops of the graph: its derivative where no rule was given.

The kernel's IR is run once on values of the graph, all groups side by side: a tile of a kernel with
a grid of two axes is a tensor [groups, groups, *tile]. Numbers that follow from the launch alone
(numbers of groups and lanes, extents, bounds of loops, masks at edges) are NumPy's, by the meaning
that the interpreter has of them; what follows from a tensor's elements is recorded. A load becomes
a slice or a reshape where blocks lie one behind the other, else a gather; a store its inverse.

Memory of a group or of its lanes is a tensor too, with the axes of the grid in front. What has no
derivative here is refused, with the kernel's line: atomics, other groups' values, conditions and
places that depend on elements (but `tile.gather`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ...errors import GradError, SourceLine
from ...numerics import f32
from ...tensor import Tensor, as_tensor
from ...tile.interpreter.machine import Machine, masked
from ...tile.interpreter.memory import MemoryBox
from ...tile.ir.ir import Def, For, If, Node, Op, Operand, SSAValue, While
from ...tile.ir.numpy_values import constant
from ...tile.ir.op_record import OPS
from ...tile.ir.types import Scalar, TileType
from .. import functions as F
from .kernel_accesses import ACCESSES, load_recorded
from .kernel_blocks import (
    BlockedTile,
    Group,
    compared_blocks,
    is_recorded,
    map_blocks,
    products_of,
    with_full,
)
from .kernel_loop_accesses import COPIES, LoopAccesses, NotSideBySide, covers
from .kernel_loops import side_by_side
from .kernel_masks import known_tensor
from .kernel_memory import GroupMemory, TensorMemory, held_in
from .kernel_places import as_dtype, as_numeric, elements, overhangs, take_blocks, where_else
from .tile_meanings import MASKED, MEANINGS, SHAPED, WHOLE, RecordedOp, kept_places

if TYPE_CHECKING:
    from ...tile.interpreter.arguments import Bound
    from ...tile.interpreter.launch import Specialisation

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
LARGE = 4096  # elements above which a comparison of places is computed where it is read
MOST_ADDRESSES = 1 << 24  # of single elements that are listed for all iterations of a loop
MOST_STEPS = 4096  # ops that are recorded, of loops that are written out too
IGNORED = ("prefetch_box", "discard_box", "arrive", "launch_dependents", "grid_dependency_wait",
           "barrier", "cp_commit_group", "cp_wait_group")


def meaning(name: str, work: Specialisation, bound: Bound, tensors: dict[str, Tensor]
            ) -> dict[str, Tensor]:
    """What a launch leaves in every tensor, by parameter.

    work: what is launched; every result is an argument of it. bound: extents and plain numbers.
    tensors: by parameter. Raises GradError where an op cannot be told in the graph's.
    """
    memory = {n: TensorMemory(n, x) for n, x in tensors.items()}
    env: dict[Any, Any] = {}
    for p in work.function.params:
        key = p.value.name
        if key in memory:
            env[p.value] = MemoryBox.whole(memory[key])
        elif p.role == "dim":
            assert isinstance(p.type, Scalar)
            env[p.value] = constant(bound.sizes[key], p.type.dtype)
        else:
            env[p.value] = bound.values[key]
    if prod(work.grid):
        with np.errstate(all="ignore"):  # what lies beside a mask may overflow, as in a launch
            KernelRecorder(name, work.grid, work.lanes, env).run(work.function.body)
    return {key: m.value for key, m in memory.items()}


class KernelRecorder(Machine):
    """The interpreter with values of the graph: a number is [*grid, lanes|1], a tile [*grid,
    *tile], where an axis of the grid has extent 1 if all groups along it have the same."""

    def __init__(self, name: str, grid: tuple[int, ...], lanes: int, env: dict[Any, Any]):
        super().__init__(np.arange(prod(grid)), lanes, grid, env)
        self.name, self.grid, self.steps = name, grid, 0
        self.when: Tensor | None = None  # where branches that depend on elements are taken
        self.guards: list[LoopAccesses] = []  # of the loops around, see kernel_loops.py

    # --- nodes --------------------------------------------------------------------------------
    def op(self, op: Op) -> None:
        record = OPS[op.name]
        if record.effect == "report" or op.name in IGNORED:
            return
        args = [self.get(a) for a in op.args]
        if op.name in ACCESSES:
            if self.guards:
                args = self.noted(op, args)
            made = ACCESSES[op.name](self, op, *args)
        elif record.effect in ("pure", "sync") and not any(map(is_recorded, args)):
            if not self.grows(op, args):
                super().op(op)
                return
            x, y = (self.over_grid(np.asarray(a)) for a in args)
            kind = op.outs[0].type
            assert isinstance(kind, TileType)
            made = self.compared(op.name, x, y, kind.shape)
        elif op.name == "view":
            made = self.box_at(op, *args)
        elif op.name in MEANINGS:
            made = self.computed(op, [self.operand(a) for a in args])
        else:
            self.refuse(f"{op.name} has no derivative of its own")
        for i, out in enumerate(op.outs):
            self.env[out.value] = made[i] if isinstance(made, tuple) else made
        self.steps += 1
        if self.steps > MOST_STEPS:
            self.refuse(f"its loops are {MOST_STEPS} steps and more")

    def get(self, x: Any) -> Any:
        found = super().get(x)
        if found is None:
            self.refuse("it uses what an atomic found, which depends on who was first")
        return found

    def valued(self, op: Op, args: list[Any]) -> Any:
        """What an op gives of these values."""
        args = [self.operand(a) for a in args]
        if any(map(is_recorded, args)):
            return self.computed(op, args)
        return self.pure(OPS[op.name].numpy, op, args)

    def applied(self, name: str, kind: Any, *args: Any) -> Any:
        """What an op by its name gives, in a type."""
        return self.valued(Op(name, (), (Def(SSAValue("applied"), kind),)), list(args))

    def noted(self, op: Op, args: list[Any]) -> list[Any]:
        """The operands of an access, once the loops around know of it."""
        effect = op.attr.get("kind", "write") if OPS[op.name].effect == "atomic" else OPS[
            op.name].effect
        modes = ("write", "read") if op.name in COPIES else (effect,)
        index = [a for a in args if not isinstance(a, MemoryBox | Tensor | BlockedTile)]
        for i, (mode, place) in enumerate(zip(modes, args, strict=False)):
            if isinstance(place, MemoryBox):
                for guard in self.guards:
                    place = guard.note(place, mode, index if mode in ("read", "write") else (),
                                       covers(op, place, args, self.lanes))
                args = [*args[:i], place, *args[i + 1:]]
        return args

    def computed(self, op: Op, args: list[Any]) -> Tensor | BlockedTile:
        """What an op gives where one of its operands follows from elements."""
        return self.whole_op(op, args) or self.pure_op(op, args)

    def whole_op(self, op: Op, args: list[Any]) -> BlockedTile | None:
        """An op of blocks that need not be taken apart; None where they must."""
        kind, made = op.outs[0].type, None
        if any(isinstance(a, Tensor | MemoryBox) for a in args):
            return None
        if not any(isinstance(a, BlockedTile) for a in args):
            return None
        shape = kind.shape if isinstance(kind, TileType) else ()
        known = [a if isinstance(a, BlockedTile) else self.over_grid(np.asarray(a)) for a in args]
        if op.name in WHOLE:
            made = WHOLE[op.name](op, known, shape)
        elif op.name in MASKED:
            fill = op.attr.get("fill", -np.inf)
            made = map_blocks(lambda mask, x: where_else(mask, x, fill),
                              (kept_places(self, op), known[0]), shape)
        elif op.name not in SHAPED:
            step = RecordedOp(self, op, kind)
            made = map_blocks(lambda *xs: MEANINGS[op.name](step, *xs), known, shape)
            made = replace(made, products=products_of(op.name, known))
        if made is None:
            return None
        held = made.mapped(lambda x: self.held(op, x))
        return replace(held, products=made.products, summed=made.summed)

    def grows(self, op: Op, args: list[Any]) -> bool:
        """Whether an op of what is known gives far more elements than it takes, so that it is
        better computed where it is read."""
        kind = op.outs[0].type if op.outs else None
        if op.name not in COMPARISONS or not isinstance(kind, TileType):
            return False
        arrays = [self.over_grid(np.asarray(a)) for a in args]
        if len({a.ndim for a in arrays}) > 1:
            return False
        made = prod(np.broadcast_shapes(*(a.shape for a in arrays)))
        return made > LARGE and made > 4 * sum(a.size for a in arrays)

    def compared(self, name: str, x: np.ndarray, y: np.ndarray, shape: tuple[int, ...]
                 ) -> BlockedTile | np.ndarray:
        """A comparison of numbers that are known, [*grid, *tile]: an array where it is small."""
        if prod(np.broadcast_shapes(x.shape, y.shape)) <= LARGE:
            return getattr(operator, name)(x, y)
        return compared_blocks(getattr(operator, name), x, y, self.grid, shape)

    def pure_op(self, op: Op, args: list[Any]) -> Tensor:
        """An op without memory, in the type that its rule gave."""
        kind = op.outs[0].type
        rank = len(kind.shape) if isinstance(kind, TileType) and op.name not in SHAPED else None
        recorded = [self.recorded(x, rank) for x in args]
        return self.held(op, MEANINGS[op.name](RecordedOp(self, op, kind), *recorded))

    @staticmethod
    def held(op: Op, value: Tensor) -> Tensor:
        """What an op gave, in the type of its result; in f32 that of a type of 8 bits or less,
        which registers hold wider: only a cast rounds to it."""
        dtype = op.outs[0].type.dtype
        narrow = dtype.kind == "float" and dtype.bits <= 8 and op.name != "convert"
        return as_dtype(value, f32 if narrow else dtype)

    def operand(self, x: Any) -> Any:
        """What an op reads that takes memory too."""
        if isinstance(x, MemoryBox):
            for guard in self.guards:
                x = guard.note(x, "read", ())
            return self.load_box(x, 0)
        return x

    def box_at(self, op: Op, source: MemoryBox, *offsets: Any) -> MemoryBox:
        """A box at numbers of which some depend on elements."""
        at = tuple(self.recorded(o, None) if is_recorded(o) else o for o in offsets)
        return MemoryBox(source.memory, at, op.attr["box"], op.attr["kept"], source.stage)

    def recorded(self, x: Any, rank: int | None) -> Tensor:
        """A value as a tensor of the graph; a number beside tiles of a rank has that rank."""
        n = len(self.grid)
        if isinstance(x, BlockedTile):
            x = x.apart()
        if not isinstance(x, Tensor):
            x = known_tensor(self.over_grid(np.asarray(x)))
        if rank is not None and x.ndim == n + 1 and rank != 1 and x.shape[n] == 1:
            x = F.reshape(x, (*x.shape[:n], *(1,) * rank))
        return x

    def over_grid(self, x: np.ndarray) -> np.ndarray:
        """[1|G, rest] as [*grid, rest], with extent 1 along axes where all groups have the same."""
        lead = (1,) * len(self.grid) if x.shape[0] == 1 else self.grid
        x = x.reshape(*lead, *x.shape[1:])
        for axis, n in enumerate(lead):
            first = np.take(x, [0], axis)
            if n > 1 and np.array_equal(np.broadcast_to(first, x.shape), x, equal_nan=False):
                x = first
        return x

    def if_(self, node: If) -> None:
        cond = self.get(node.cond)
        if not is_recorded(cond):
            super().if_(node)
            return
        cond = self.recorded(cond, None)
        outer, sides = self.when, []  # both are computed, and each writes where it is taken
        for on, body, values in ((cond, node.then, node.thens), (~cond, node.orelse, node.elses)):
            self.when = on if outer is None else outer & on
            sides.append(self.side(on, body, values))
        self.when = outer
        for made, then, orelse in zip(node.outs, *sides, strict=True):
            self.env[made.value] = self.choose(cond, then, orelse)

    def side(self, on: Any, body: Sequence[Node], values: Sequence[Operand]) -> list[Any]:
        if not is_recorded(on) and (on.shape[-1] == 1 or on.all()):
            return super().side(on, body, values)
        outer, self.env = self.env, BranchValues(self, on)
        self.run(body)
        made = [outer[v] if isinstance(v, SSAValue) and v in self.env.read else self.get(v)
                for v in values]
        self.env = outer
        return made

    def apart_from_others(self, value: Any, on: Any) -> Any:
        """A value as lanes read it in a branch. Those that do not come there compute with it too,
        and 0 times a derivative that is infinite would be NaN: they have no share in its own."""
        whole = value.tensor if isinstance(value, BlockedTile) else value
        if not isinstance(whole, Tensor) or whole.dtype.kind != "float":
            return value
        if isinstance(value, BlockedTile):
            return self.choose(on, value, value.mapped(F.stop_gradient))
        return self.choose(on, value, F.stop_gradient(value))

    def read_here(self, value: Any) -> Any:
        """What is read from memory where a branch is taken."""
        if self.mask is not None and self.mask.shape[-1] > 1:
            value = self.apart_from_others(value, self.mask)
        return value if self.when is None else self.apart_from_others(value, self.when)

    def for_(self, node: For) -> None:
        if any(is_recorded(self.get(x)) for x in (node.lo, node.hi, node.step)):
            self.refuse("the bounds of a loop depend on elements")
        if not side_by_side(self, node):
            super().for_(node)

    def while_(self, node: While) -> None:
        """A loop whose end follows from the launch alone."""
        outer, apart = self.mask, self.apart
        self.bind(node.carried, [self.get(i) for i in node.inits], node.inits)
        on = np.ones((1, 1), bool)
        while True:
            self.run(node.test)
            cond = self.get(node.cond)
            if is_recorded(cond):
                self.where = node.where or self.where
                self.refuse("a loop ends by its values, at a while or a break")
            on = on & cond
            self.apart = apart + (on.shape[1] > 1)
            self.mask = masked(outer, on)
            if not self.anyone():
                break
            self.run(node.body)
            self.end_iteration(node.carried, node.yields, on)
        self.mask, self.apart = outer, apart

    def choose(self, cond: Any, x: Any, y: Any) -> Any:
        if x is y or not any(map(is_recorded, (cond, x, y))):
            return super().choose(cond, x, y)
        blocks = [v for v in (x, y) if isinstance(v, BlockedTile)]
        if blocks and not isinstance(cond, Tensor) and not any(
                isinstance(v, Tensor | MemoryBox) for v in (x, y)) and (
                isinstance(cond, BlockedTile) or cond.shape[1] == 1):
            known = [v if isinstance(v, BlockedTile) else self.over_grid(np.asarray(v))
                     for v in (cond, x, y)]
            made = map_blocks(F.where, known, blocks[0].shape)
            return made.mapped(lambda v: as_dtype(v, blocks[0].tensor.dtype))
        x, y, mask = (self.recorded(v, None) for v in (x, y, cond))
        if mask.shape[-1] == 1:
            rank = max(x.ndim, y.ndim) - len(self.grid)
            mask = F.reshape(mask, (*mask.shape[:-1], *(1,) * rank))
        return as_dtype(F.where(mask, x, y), x.dtype)

    def taken(self, value: Tensor, otherwise: Callable[[], Any]) -> Tensor:
        """What is written in branches that depend on elements."""
        return value if self.when is None else self.choose(self.when, value, otherwise())

    def spread(self, type: Any, value: Any) -> Any:
        return value if is_recorded(value) else super().spread(type, value)

    def refuse(self, why: str, hint: str = "") -> NoReturn:
        raise underivable(self.name, self.where, why, hint)

    # --- loops --------------------------------------------------------------------------------
    def widened(self, count: int) -> KernelRecorder:
        """A machine for all iterations of a loop, along a last axis of its grid."""
        made = KernelRecorder(self.name, (*self.grid, count), self.lanes, {})
        made.groups, made.axes = np.repeat(self.groups, count, 0), self.axes
        made.env = _Lifted(self, count)
        made.mask = None if self.mask is None else self.lifted(self.mask, count)
        made.when = None if self.when is None else self.lifted(self.when, count)
        made.where, made.steps = self.where, self.steps
        made.guards = [*self.guards, LoopAccesses(made, len(self.grid))]
        return made

    def lifted(self, x: Any, count: int) -> Any:
        """A value from outside of a loop, for all its iterations."""
        if isinstance(x, BlockedTile):
            return x.relabelled(x.form, x.shape, (*self.grid, count))
        if isinstance(x, Tensor):
            return F.expand_dims(x, len(self.grid))
        if isinstance(x, MemoryBox):
            peer = x.peer and (self.lifted(x.peer[0], count), x.peer[1])
            return replace(x, offsets=tuple(self.lifted(o, count) for o in x.offsets),
                           stage=self.lifted(x.stage, count), peer=peer)
        alike = not isinstance(x, np.ndarray) or x.shape[0] == 1
        return x if alike else np.repeat(x, count, 0)

    def narrowed(self, x: Any, t: int, count: int) -> Any:
        """What is known of all iterations of a loop, of one."""
        return x if len(x) == 1 else x.reshape(-1, count, *x.shape[1:])[:, t]

    # --- memory -------------------------------------------------------------------------------
    def whole(self, place: MemoryBox) -> MemoryBox:
        """A box of a group's own memory as one of the tensor that holds all groups'."""
        own = place.memory
        if not isinstance(own, GroupMemory):
            return place
        if place.peer is not None or own.copies > 1:
            self.refuse("a box of other groups' or lanes' memory")
        front = (*self.numbers(own), 0, place.stage)
        return MemoryBox(own.all, (*front, *place.offsets), (*(1,) * len(front), *place.box),
                         tuple(a + len(front) for a in place.kept))

    def element(self, place: MemoryBox, index: tuple[Any, ...]) -> tuple[TensorMemory,
                                                                         list[np.ndarray]]:
        """The tensor that holds an element of each lane, and where: [1|G, 1|lanes] by axis."""
        for i in index:
            self.blocks(i)  # none that depends on elements
        at = [np.asarray(i, np.int64).reshape(np.shape(i) or (1, 1)) for i in index]
        own = place.memory
        if isinstance(own, GroupMemory) and own.copies > 1:
            lane = self.lane_ids().astype(np.int64)
            return own.all, [*self.numbers(own), lane, np.atleast_2d(place.stage), *at]
        box = self.whole(place)
        front = box.offsets[:len(box.offsets) - len(at)]
        return held_in(box), [*map(np.atleast_2d, front), *at]

    def numbers(self, own: GroupMemory) -> list[np.ndarray]:
        """The group's number along each axis of the grid that memory of groups has."""
        every = np.arange(self.count)[:, None]
        return [every // prod(self.grid[k + 1:]) % g for k, g in enumerate(own.grid)]

    def active_elements(self, held: TensorMemory, at: list[np.ndarray], value: Tensor
                        ) -> tuple[np.ndarray, np.ndarray]:
        """[G, lanes] addresses, and who takes part and has an element there."""
        address: Any = sum(i * step for i, step in zip(at, held.strides, strict=True))
        on = self.active(np.broadcast_shapes(address.shape, (self.count, value.shape[-1])))
        for i, n in zip(at, held.shape, strict=True):
            on = on & (i >= 0) & (i < n)
        return np.broadcast_to(address, on.shape), on

    def blocks(self, offset: Any) -> np.ndarray:
        """An offset over the grid: [1|g0, 1|g1, ..., 1|lanes]."""
        if is_recorded(offset):
            self.refuse("a place in memory depends on elements", "what is read there can be: "
                        "tile.gather, or a load of a box; and tile.scatter writes")
        return self.over_grid(np.asarray(offset, np.int64).reshape(np.shape(offset) or (1, 1)))

    def load_box(self, place: MemoryBox, fill: Any) -> Tensor | BlockedTile:
        """A box of each group."""
        if any(map(is_recorded, place.offsets)):
            return load_recorded(self, place, fill)
        place = self.whole(place)
        held, n = held_in(place), len(self.grid)
        offsets = [self.blocks(o)[..., 0] for o in place.offsets]
        used = [[k for k in range(n) if o.shape[k] > 1] for o in offsets]
        if len({k for ks in used for k in ks}) < sum(map(len, used)):
            return self.load_flat(place, fill)
        starts = [o.reshape([o.shape[k] for k in ks]) for o, ks in zip(offsets, used, strict=True)]
        shown, form = tuple(place.box[a] for a in place.kept), form_of(place, used)
        value = elements(held.value)  # as it is now

        def boxes(short: bool) -> BlockedTile:
            x = value
            for axis, at in enumerate(starts):
                if not (short and overhangs(at, place.box[axis], held.shape[axis])):
                    x = take_blocks(x, axis, at, place.box[axis], fill)
            return BlockedTile(x, form, shown, self.grid)

        return with_full(boxes(True), lambda: boxes(False))

    def load_flat(self, place: MemoryBox, fill: Any) -> Tensor:
        """As load_box, each element by its address."""
        self.require_few(prod(place.box))
        address, inside = place.addresses(self.groups)
        x = F.take(F.flatten(elements(held_in(place).value)), as_tensor(self.over_grid(address)))
        if inside.all():
            return x
        return where_else(self.over_grid(inside), x, fill)

    def require_few(self, each: int) -> None:
        """Addresses of single elements are listed: not of all iterations of a loop if they are
        many."""
        if self.guards and each * self.count > MOST_ADDRESSES:
            raise NotSideBySide

    def store(self, held: TensorMemory, address: np.ndarray, on: np.ndarray, value: Tensor,
              mode: str = "set") -> None:
        """address, on: [G, *box], who writes where, or adds; value: [*grid, *box]."""
        if not on.any():
            return
        value = F.broadcast_to(value, (*self.grid, *address.shape[1:]))
        flat = F.take(F.flatten(value), as_tensor(np.flatnonzero(on)))
        kept = F.flatten(held.value)
        where = address[on].astype(np.int64)
        if self.guards and mode == "set" and len(np.unique(where)) < len(where):
            raise NotSideBySide  # the last iteration's would have to stay
        ids = as_tensor(where)
        put = F.scatter(kept, ids, as_numeric(flat, held.numeric), mode=mode)
        held.value = F.reshape(put, held.shape)

    def covers(self, place: MemoryBox) -> list[list[int]] | None:
        """The axes of the grid whose blocks lie one behind the other along each axis of a tensor,
        where the groups write all of it, each its part; None where that is not so."""
        if self.mask is not None:
            return None
        found: list[list[int]] = []
        for axis, (offset, box) in enumerate(zip(place.offsets, place.box, strict=True)):
            starts = self.blocks(offset)[..., 0]
            at = starts.reshape(-1, 1) + np.arange(box)
            if at.size < place.memory.shape[axis] or not np.array_equal(
                    at.ravel(), np.arange(at.size)):
                return None
            found.append([k for k in range(len(self.grid)) if starts.shape[k] > 1])
        used = sorted(k for ks in found for k in ks)
        return found if used == [k for k, g in enumerate(self.grid) if g > 1] else None

    def store_box(self, place: MemoryBox, value: Any) -> None:
        place = self.whole(place)
        by_axis = self.covers(place)
        if isinstance(value, BlockedTile) and by_axis is not None and self.when is None:
            self.store_whole(place, by_axis, value)
            return
        n, shown = len(self.grid), tuple(place.box[a] for a in place.kept)
        value = self.recorded(value, None)
        if value.ndim == n + 1 and len(shown) != 1:  # one number everywhere
            value = F.reshape(value, (*value.shape[:n], *(1,) * len(shown)))
        value = self.taken(value, lambda: as_dtype(self.recorded(
            self.load_box(place, 0), None), value.dtype))
        value = F.broadcast_to(value, (*self.grid, *shown))
        if by_axis is None:
            self.require_few(prod(shown))
            address, inside = place.addresses(self.groups)
            on = inside & self.active_groups().reshape((-1,) + (1,) * (address.ndim - 1))
            self.store(held_in(place), address, on, value)
        else:
            self.join(place, by_axis, value)

    def store_whole(self, place: MemoryBox, by_axis: list[list[int]], value: BlockedTile) -> None:
        """A block that was never cut, where the groups write all of a tensor."""
        shown = tuple(place.box[a] for a in place.kept)
        form = form_of(place, by_axis)
        value = value.relabelled(value.form, shown, value.grid)
        held = held_in(place)
        whole = value.filled(form)
        if any(n < m for n, m in zip(whole.shape, held.shape, strict=True)):
            whole = value.whole().filled(form)
        self.keep(held, whole)

    def join(self, place: MemoryBox, by_axis: list[list[int]], value: Tensor) -> None:
        """[*grid, *box], where the groups write all of a tensor, each its part."""
        n = len(self.grid)
        where = {a: n + i for i, a in enumerate(place.kept)}
        order: list[int] = []
        sizes: list[int] = []
        for axis, ks in enumerate(by_axis):
            order += [*ks, *([where[axis]] if axis in where else [])]
            sizes.append(prod(self.grid[k] for k in ks) * place.box[axis])
        rest = [k for k in range(n) if k not in order]  # of extent 1
        joined = F.reshape(F.transpose(value, tuple([*rest, *order])), tuple(sizes))
        self.keep(held_in(place), joined)

    @staticmethod
    def keep(held: TensorMemory, value: Tensor) -> None:
        """A tensor is written whole, and beyond its end."""
        whole = held.value.shape
        cut = value if value.shape == whole else value[tuple(slice(0, s) for s in whole)]
        held.value = as_numeric(cut, held.numeric)


class _Lifted(dict):
    """Values from outside of a loop, each for all iterations when it is first read."""

    def __init__(self, machine: KernelRecorder, count: int):
        super().__init__()
        self.machine, self.count = machine, count

    def __missing__(self, key: Any) -> Any:
        self[key] = made = self.machine.lifted(self.machine.env[key], self.count)
        return made


class BranchValues(dict):
    """Values from outside of a branch, each as those read it who come there."""

    def __init__(self, machine: KernelRecorder, on: Any):
        super().__init__()
        self.machine, self.outer, self.on = machine, machine.env, on
        self.read: set[Any] = set()

    def __missing__(self, key: Any) -> Any:
        self[key] = made = self.machine.apart_from_others(self.outer[key], self.on)
        self.read.add(key)
        return made


def form_of(place: MemoryBox, by_axis: list[list[int]]) -> tuple[Group, ...]:
    """What each axis of a tensor counts: axes of the grid by axis, then that of the tile."""
    return tuple((*(~k for k in ks), *(i for i, a in enumerate(place.kept) if a == axis))
                 for axis, ks in enumerate(by_axis))


def underivable(name: str, where: SourceLine | None, why: str, hint: str = "") -> GradError:
    """The error of a kernel whose derivative must be given."""
    rules = (f"{name}.defvjp(fwd, bwd): fwd(*args) -> (value, saved), bwd(saved, g) -> cotangents; "
             f"or {name}.defjvp(rule), which serves both modes; ts.stop_gradient where none is "
             "meant")
    return GradError(f"kernel {name} has no rule for its derivative, and none follows from its "
                     f"body: {why}", where=where, hint=f"{hint}; {rules}" if hint else rules)


__all__ = ["meaning", "underivable"]
