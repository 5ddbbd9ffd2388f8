"""Matmuls become asynchronous, with operands as the tensors have them.

A transpose of a load is no work: it only says which axis of the operand is contiguous. What an
operand loads goes through a ring (`ring_load`); a computed first operand stays in registers. A row
of numbers that each iteration loads beside operands comes with them (`read_row`). So does a row
behind the matmuls, such as a bias: it is there when the sums are.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from tessera.numerics import DType
from tessera.runtime.generations import WarpgroupMatmul
from tessera.tile.cuda.lower.multiply_codes import EACH, PIECES, is_dealt
from tessera.tile.cuda.lower.warp_specialised.computed import loads_behind, loads_beside
from tessera.tile.cuda.lower.warp_specialised.defaults import consumers
from tessera.tile.cuda.lower.warp_specialised.program import PipelineKnobs, Refused
from tessera.tile.cuda.lower.warp_specialised.qualify import (
    MATMULS,
    STORES,
    SharedOperand,
    check_formats,
    check_operand,
    check_shape,
    comes_as_row,
    comes_as_tile,
    tensors_of,
)
from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    Maker,
    Nodes,
    is_op,
    is_part,
    made_by,
    map_blocks,
    ops_in,
    out,
    reads,
)
from tessera.tile.cuda.lower.warp_specialised.roles import loads_ahead
from tessera.tile.cuda.lower.warp_specialised.shorten_names import base_name
from tessera.tile.ir.ir import For, Function, Node, Op, SSAValue, defining_ops, walk
from tessera.tile.ir.ir import Operand as Argument
from tessera.tile.ir.register_layout import CODE_ROWS
from tessera.tile.ir.types import GlobalTensor, TileType, View
from tessera.tile.passes.integer_facts import Knowledge

SLOTS = 2  # of operands that leave room for tiles that meet the results
UNNAMED = "t"  # what the frontend calls a value without a name


def place_operands(function: Function, maker: Maker, known: Knowledge, aligned: frozenset[str],
                   form: WarpgroupMatmul, pipeline: PipelineKnobs, room_bytes: int) -> Function:
    """matmul -> async_matmul, load_tile of operands -> ring_load. Raises Refused.

    Where sums have few bits in the tensor cores, as those of fp8, blocks of them are added outside,
    in f32, unless pipeline.fast_sums. room_bytes: of shared memory.
    """
    placing = _Placing(function, maker, known, aligned, form, pipeline.fast_sums)
    placing.bring_late(function, pipeline, room_bytes)
    return replace(function, body=map_blocks(placing.sunk(function.body), placing.block))


class _Placing:
    def __init__(self, function: Function, maker: Maker, known: Knowledge,
                 aligned: frozenset[str], form: WarpgroupMatmul, fast_sums: bool):
        self.maker, self.known, self.aligned = maker, known, aligned
        self.form, self.fast_sums = form, fast_sums
        self.made = defining_ops(function.body)
        self.rings: dict[SSAValue, Op] = {}  # load -> ring_load
        self.rows: set[SSAValue] = set()  # loads of rows beside those of operands
        self.tiles: set[SSAValue] = set()  # loads of which a first operand is computed
        self.written = tensors_of(function, *STORES)
        for matmul in ops_in(function.body, *MATMULS):
            self.find(matmul)
        self.find_tiles(function)
        for loop in walk(function.body):
            if isinstance(loop, For):
                self.find_rows(loop)
        self.late = self.find_late_rows(function)
        self.rows |= self.late

    def find(self, matmul: Op) -> None:
        for side, x in zip("ab", matmul.args[:2], strict=True):
            load, _ = self.source(x)
            if load is not None:
                self.bring(load)
            elif side == "b":
                raise Refused("the second operand of a matmul is computed; it must be loaded")

    def bring(self, load: Op) -> None:
        if out(load) not in self.rings:
            self.rings[out(load)] = self.maker.op(
                "ring_load", load.args, self.label(load), self.maker.type(out(load)), load.where)

    def find_tiles(self, function: Function) -> None:
        """Of what first operands are computed in loops; and, where there is such, what loops beside
        read of the same rows."""
        inside = {out(n) for loop in walk(function.body) if isinstance(loop, For)
                  for n in ops_in(loop.body, "load_tile")}
        computed = [m.args[0] for m in ops_in(function.body, "matmul")
                    if self.source(m.args[0])[0] is None]
        ahead = {out(n) for n in loads_ahead(function, self.maker)} if computed else set()
        found = [n for x in computed for n in loads_behind(x, self.made, self.maker) or ()
                 if out(n) in inside & ahead and self.is_tile(n)]
        rows = {n.outs[0].type.shape[0] for n in found}  # type: ignore[union-attr]
        beside = [n for m in rows for n in loads_beside(function, m)
                  if out(n) in ahead and self.is_tile(n)]
        for load in (*found, *beside):
            self.bring(load)
            self.tiles.add(out(load))

    def is_tile(self, load: Op) -> bool:
        tile = self.maker.type(out(load))
        view = self.made.get(load.args[0])
        if not is_part(view) or not isinstance(tile, TileType) or view.args[0] in self.written:
            return False
        operand = self.shared(load, view, "a", "K")
        return operand is not None and comes_as_tile(operand, load, view, self.known, self.aligned,
                                                     self.form)

    def label(self, load: Op) -> str:
        """The user's name of a load, or that of its tensor in small letters."""
        name = base_name(out(load).name)
        view = self.made.get(load.args[0])
        if name != UNNAMED or view is None or not isinstance(view.args[0], SSAValue):
            return name
        return view.args[0].name.lower()

    def source(self, x: Argument) -> tuple[Op | None, bool]:
        """(the load behind an operand, whether it is transposed)."""
        op = self.made.get(x)
        flipped = is_op(op, "transpose")
        if flipped:
            op = self.made.get(op.args[0])  # type: ignore[union-attr]
        if op is not None and op.name == "load_tile":
            view = self.maker.type(op.args[0])
            if isinstance(view, View) and view.space == "global":
                return op, flipped
        return None, flipped

    def find_rows(self, loop: For) -> None:
        loads = [n for n in loop.body if is_op(n, "load_tile")]
        if any(out(n) in self.rings for n in loads):
            self.rows |= {out(n) for n in loads if out(n) not in self.rings
                          and self.is_row(n)}

    def find_late_rows(self, function: Function) -> set[SSAValue]:
        """Rows that are loaded outside of loops. Kernels in which a matmul feeds another have no
        registers for what a ring takes, and read theirs once in many iterations."""
        matmuls = ops_in(function.body, *MATMULS)
        if not all(self.source(x)[0] for n in matmuls for x in n.args[:2]):
            return set()
        written = {self.tensor(n) for n in walk(function.body) if is_op(n, *STORES)}
        return {out(n) for n in function.body if is_op(n, "load_tile")
                and out(n) not in self.rings and self.is_row(n) and self.tensor(n) not in written}

    def bring_late(self, function: Function, pipeline: PipelineKnobs, room_bytes: int) -> None:
        """Tiles of the results' extents that are loaded outside of loops, such as a residual, where
        operands are loaded too, each consumer has one block of rows, and two slots of operands have
        room beside."""
        matmuls = ops_in(function.body, *MATMULS)
        shapes = {d.type.shape for n in matmuls for d in n.outs}  # type: ignore[union-attr]
        whole = all(m == self.form.rows * consumers(m, self.form, pipeline) for m, _ in shapes)
        if not whole or pipeline.divided > 1 or pipeline.resident > 1 or not all(
                self.source(x)[0] for n in matmuls for x in n.args[:2]):
            return
        left = room_bytes - SLOTS * sum(map(self.bytes, self.rings.values()))
        for load in function.body:
            if is_op(load, "load_tile") and out(load) not in self.rings and (
                    load.outs[0].type.shape in shapes) and (  # type: ignore[union-attr]
                    self.is_tile(load)) and (left := left - self.bytes(load)) >= 0:
                self.bring(load)
                self.tiles.add(out(load))
                self.late.add(out(load))

    def bytes(self, load: Op) -> int:
        tile = self.maker.type(out(load))
        assert isinstance(tile, TileType)
        return prod(tile.shape) * tile.dtype.bits // 8

    def tensor(self, op: Op) -> Argument:
        view = self.made.get(op.args[0])
        return view.args[0] if view is not None else op.args[0]

    def sunk(self, nodes: Nodes) -> Nodes:
        """Late rows, and what only reshapes or casts them, in front of their first reader: written
        early they would come before the operands, and the next tile's wait for this one's end."""
        kept: list[Node] = []
        held: list[Node] = []
        for node in nodes:
            below = {v for n in held for v in made_by(n)}
            light = is_op(node, "expand_dims", "convert") and reads(node) <= below
            if light and below or is_op(node, "load_tile") and out(node) in self.late:
                held.append(node)
                continue
            if reads(node) & below:
                kept, held = [*kept, *held], []
            kept.append(node)
        return (*kept, *held)

    def is_row(self, load: Op) -> bool:
        view = self.made.get(load.args[0])
        if not is_op(view, "view") or not isinstance(view.args[0], SSAValue):
            return False
        tensor, tile = self.maker.type(view.args[0]), self.maker.type(out(load))
        return isinstance(tensor, GlobalTensor) and isinstance(tile, TileType) and comes_as_row(
            tensor, tile, load, view, self.known, self.aligned, self.form)

    def block(self, nodes: Nodes) -> list[Node]:
        placed: list[Node] = []
        for node in nodes:
            if is_op(node, "matmul"):
                placed += self.matmul(node)
                continue
            if is_op(node, "matmul_codes_stacked"):
                placed += self.matmul_codes(node)
                continue
            if is_op(node, "load_tile") and out(node) in self.rows:
                made = self.maker.op("ring_load", node.args, self.label(node),
                                     self.maker.type(out(node)), node.where)
                placed += [made, Op("read_row", (out(made),), node.outs, (), node.where)]
                continue
            if is_op(node, "load_tile") and out(node) in self.tiles:
                ring = self.rings[out(node)]
                placed += [ring, Op("read_tile", (out(ring),), node.outs, (), node.where)]
                continue
            placed.append(node)
            if is_op(node, "load_tile") and out(node) in self.rings:
                placed.append(self.rings[out(node)])
        return placed

    def matmul(self, op: Op) -> list[Node]:
        a, b, *rest = op.args
        types = [self.maker.type(x) for x in (a, b)]
        if not all(isinstance(t, TileType) for t in types):
            raise Refused("a matmul reads shared memory that the kernel manages itself")
        check_formats(op, self.form, *types)
        (m, k), (_, n) = (t.shape for t in types)  # type: ignore[union-attr]
        check_shape((m, n), k, types[0].dtype.bits, self.form)
        right, b_major = self.loaded(b, "b")
        load, flipped = self.source(a)
        if load is not None and flipped and self.form.operands[types[0].dtype.name].by_columns:
            return self.matmul_columns(op, k, right, b_major)
        before: list[Node] = []
        if load is not None:
            left, a_major = self.loaded(a, "a")
        else:
            left, a_major = self.packed(a, op, before), "K"
        attrs = (("a_major", a_major), ("b_major", b_major), ("dtype", op.attr["dtype"]))
        made = op.outs[0]
        if not rest or not self.form.operands[types[0].dtype.name].short_sums or self.fast_sums:
            return [*before, Op("async_matmul", (left, right, *rest), (made,), attrs, op.where)]
        part = self.maker.define(made.value.name, made.type)
        return [*before, Op("async_matmul", (left, right), (part,), attrs, op.where),
                Op("add", (*rest, part.value), (made,), (), op.where)]

    def matmul_columns(self, op: Op, depth: int, right: SSAValue, b_major: str) -> list[Node]:
        """The first operand is read by its columns, a piece of them while the matmul of the one
        before runs."""
        a, _, *before = op.args
        if depth * self.maker.type(a).dtype.bits % (8 * PIECES * self.form.step_bytes):
            raise Refused(f"a matmul sums over {depth}, which is no two steps")
        left, made = self.loaded(a, "a")[0], op.outs[0]
        placed: list[Node] = []
        for piece in range(PIECES):
            columns = self.maker.op("read_columns", (left,), "columns", where=op.where,
                                    piece=piece, pieces=PIECES)
            result = made if piece == PIECES - 1 else self.maker.define(made.value.name, made.type)
            attrs = {"a_major": "K", "b_major": b_major, "dtype": op.attr["dtype"],
                     "columns": True, "piece": piece, "pieces": PIECES}
            placed += [columns, Op("async_matmul", (out(columns), right, *before), (result,),
                                   tuple(sorted(attrs.items())), op.where)]
            before = [result.value]
        return placed

    def matmul_codes(self, op: Op) -> list[Node]:
        """Codes come as bytes, and become the first operand in registers, a piece of them while
        the matmul of the one before runs."""
        a, b, sums = op.args
        x, made = self.maker.type(b), op.outs[0]
        assert isinstance(x, TileType) and isinstance(made.type, TileType)
        load, right = self.loaded(a, "a", x.dtype)[0], self.loaded(b, "b")[0]
        parts = made.type.shape[0] // self.maker.type(a).shape[0]  # type: ignore[union-attr]
        placed: list[Node] = []
        laid = op.attr["laid"]
        dealt = not laid and is_dealt(x.dtype, op.attr["codes"], parts, *x.shape)
        beside = (right,) if dealt else ()
        row_bytes = x.shape[0] * op.attr["codes"].bits // 8
        panel = next(n for n in CODE_ROWS if row_bytes % n == 0)
        steps = x.shape[0] // parts * x.dtype.bits // (8 * self.form.step_bytes)
        pieces = max(PIECES, steps // EACH)
        short = self.form.operands[x.dtype.name].short_sums and not self.fast_sums
        last = self.maker.define(made.value.name, made.type) if short else made
        before: tuple[Any, ...] = () if short else (sums,)
        for piece in range(pieces):
            of: dict[str, Any] = {"parts": parts, "piece": piece, "pieces": pieces, "panel": panel}
            codes = self.maker.op("unpack_codes", (load, *beside), "codes",
                                  where=op.where, dtype=x.dtype, codes=op.attr["codes"],
                                  factor=op.attr["factor"], laid=laid, **of)
            result = last if piece == pieces - 1 else self.maker.define(made.value.name, made.type)
            attrs = {"a_major": "K", "b_major": "K", "dtype": made.type.dtype, **of}
            placed += [codes, Op("async_matmul", (out(codes), right, *before), (result,),
                                 tuple(sorted(attrs.items())), op.where)]
            before = (result.value,)
        return [*placed, Op("add", (sums, *before), (made,), (), op.where)] if short else placed

    def loaded(self, x: Argument, side: str, dtype: DType | None = None) -> tuple[SSAValue, str]:
        """The ring_load of an operand, and which axis of it is contiguous. dtype: that is
        multiplied, where it is another."""
        load, flipped = self.source(x)
        assert load is not None
        major = ("M" if flipped else "K") if side == "a" else ("K" if flipped else "M")
        view = self.made[load.args[0]]
        operand = self.shared(load, view, side, major, dtype)
        if operand is None:
            raise Refused(f"{view.name} of an operand")
        check_operand(operand, load, view, self.known, self.aligned, self.form)
        return out(self.rings[out(load)]), major

    def shared(self, load: Op, view: Op, side: str, major: str, dtype: DType | None = None
               ) -> SharedOperand | None:
        """What a load brings to shared memory; None where that is no part of a tensor."""
        tensor = self.maker.type(view.args[0])
        if not is_part(view) or not isinstance(tensor, GlobalTensor):
            return None
        stored = self.maker.type(out(load))
        assert isinstance(stored, TileType) and isinstance(view.args[0], SSAValue)
        source = self.made.get(view.args[0])  # the bytes of a packed tensor are its own
        owner = source.args[0] if source is not None else view.args[0]
        assert isinstance(owner, SSAValue)
        return SharedOperand(side, major, stored.shape, tensor, owner.name,  # type: ignore
                             dtype or tensor.dtype)

    def packed(self, x: Argument, op: Op, before: list[Node]) -> SSAValue:
        """A computed first operand in registers, rounded once."""
        type = self.maker.type(x)
        if not self.form.operands[type.dtype.name].packs:
            raise Refused(f"a computed operand of {type.dtype}; 16-bit floats stay in registers")
        x = self.unrounded(x, before)
        hint = x.name if isinstance(x, SSAValue) else "x"
        pack = self.maker.op("pack_operand", (x,), hint, where=op.where, dtype=type.dtype)
        before.append(pack)
        return out(pack)

    def unrounded(self, x: Argument, before: list[Node]) -> Argument:
        """The f32 tile that x is the rounding of, for packing rounds once more; else x. Zeros
        outside of a tensor are zeros before and after."""
        made = self.made.get(x)
        if is_op(made, "edge_mask") and made.attr["fill"] == 0:
            source = self.unrounded(made.args[0], before)
            if source == made.args[0]:
                return x
            mask = self.maker.op("edge_mask", (source, *made.args[1:]), made.outs[0].value.name,
                                 where=made.where, **made.attr)
            before.append(mask)
            return out(mask)
        rounded = made is not None and made.name == "convert" and (
            made.attr.get("rounding", "nearest_even") == "nearest_even"
            and not made.attr.get("saturate", False))
        if rounded and self.maker.type(made.args[0]).dtype.name == "f32":  # type: ignore[union-attr]
            return made.args[0]  # type: ignore[union-attr]
        return x


__all__ = ["place_operands"]
