"""Matmuls with packed weights: bytes go to shared memory as they lie, warps share the sum over k.

    for k: acc = dot(cast(load(weights)), load(x).T, acc)         few columns

becomes a loop that carries one matrix for each part of an iteration's k, and their sum behind it:

    for k: parts = matmul_codes(load(bytes of weights), load(x).T, parts)
    acc = acc + factor * sum_parts(parts)

A warp has all rows of its part of k, so each code is read and unpacked once, straight into the form
of the tensor cores, and each number of x is read once. Codes are placed bit by bit into f16 without
their exponents' bias; `factor` makes up for that, once. Tile IR in, Tile IR out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.lazy_dataclass import dataclass
from tessera.numerics import DType, as_type, decode, encode, f32, i32, row_bytes, unpack
from tessera.numerics.packed_order import order_of
from tessera.runtime.generations import Generation
from tessera.tile.cuda.intrinsics.matmul import STEP_BYTES
from tessera.tile.cuda.intrinsics.matmul_codes import UNIT, factor_of, target_of
from tessera.tile.ir.ir import (
    Const,
    Def,
    For,
    Function,
    Names,
    Node,
    Op,
    Operand,
    Param,
    SSAValue,
    definitions,
    operands,
    uses,
    walk,
    with_regions,
)
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import GlobalTensor, Scalar, TileType, View
from tessera.tile.passes.integer_facts import Knowledge

ROWS, COLUMNS = 16, 8  # of a tensor core's block
MOST_COLUMNS = 64  # more are better off with wgmma, whose sums are not in parts
STACKED = 2  # warpgroups
STACKED_COLUMNS = {"fp4_e2m1": 32}  # of 16 bits, for which they pay: of other codes 16
PIECES, EACH = 2, 4  # the fewest of a warpgroup's codes; instructions of each of more pieces
CHUNK_BITS = 128  # of what a lane reads at once
PLAIN_COLUMNS = {4: 32, 6: 16}  # of codes beside fp8, from which on they have memory's order
PLAIN_HALVES = 32  # the same beside 16 bits
PLAIN_OWN = {4: 32, 6: 64}  # and where each warpgroup has rows of its own
GROUP = 4  # codes that end with a byte, whatever their bits


@dataclass(frozen=True)
class CodesMatmul:
    """A loop's only matmul, of packed weights.

    load, view: of the weights.  casts: the ops that are not needed any more.  b: the second
    operand.  number: of the value that the loop carries and the matmul adds to.
    """

    op: Op
    load: Op
    view: Op
    casts: tuple[Op, ...]
    b: SSAValue
    number: int


def multiply_codes(function: Function, warps: int, generation: Generation,
                   divisible: frozenset[str], overlapping: bool = False) -> Function:
    """The function with such loops in that form.

    warps: of the group; 0: threads are no warps.  divisible: extents known to be so by 16.
    overlapping: parameters may be the same memory, so that any store may change the weights.
    """
    if warps < 1 or warps & (warps - 1) or generation.warp_matmul.step_bytes != STEP_BYTES:
        return function
    packed = any(isinstance(p.type, GlobalTensor) and p.type.dtype.packed for p in function.params)
    return _Pass(function, warps, generation, divisible, overlapping).run() if packed else function


def stack_codes(function: Function, generation: Generation, divisible: frozenset[str],
                overlapping: bool = False) -> Function:
    """The same for warpgroups, of which each has all rows of its part of k, and whose tensor cores
    read x where it lies: for many columns, of which mma.sync reads each from shared memory in each
    warp. The sums of all parts are one matrix."""
    if generation.warpgroup_matmul is None:
        return function
    stacked = _Stacked(function, STACKED, generation, divisible, overlapping)
    made = stacked.run()
    return made if stacked.bytes else function


def laid_parameter(function: Function) -> Param | None:
    """A parameter whose codes may not lie in rows, and that is read as if they did, if there is
    one: bytes are those of matmuls that know of it."""
    known, read = dict(function.constants), uses(function.body)
    as_rows = {x for n in walk(function.body) for x in operands(n) if not isinstance(n, Op) or (
        n.name != "packed_bytes"
        and (OPS[n.name].writes or any(d.value in read for d in n.outs)))}
    for p in function.params:
        if p.value in as_rows and isinstance(p.type, GlobalTensor) and (
                p.type.numeric.policy.packed_for is not None):
            last = str(p.type.dims[-1]) if p.type.dims else "1"
            columns = int(last) if last.isdigit() else known.get(last)
            if columns is None or columns % UNIT == 0:
                return p
    return None


class _Pass:
    name, first = "matmul_codes", False  # whether codes are loaded before the other operand

    def __init__(self, function: Function, warps: int, generation: Generation,
                 divisible: frozenset[str], overlapping: bool):
        self.function, self.warps, self.generation = function, warps, generation
        self.types, self.names = definitions(function), Names.of(function)
        self.uses, self.known = uses(function.body), Knowledge(function, divisible)
        self.made = {d.value: n for n in walk(function.body) if isinstance(n, Op) for d in n.outs}
        self.overlapping = overlapping
        self.bytes: dict[SSAValue, SSAValue] = {}  # of tensors
        self.head: list[Node] = []

    def run(self) -> Function:
        body = self.block(self.function.body)
        return replace(self.function, body=(*self.head, *body))

    def block(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        out: list[Node] = []
        for node in nodes:
            node = with_regions(node, self.block)
            found = self.found(node) if isinstance(node, For) else None
            if found is None:
                out.append(node)
            else:
                assert isinstance(node, For)
                self.rewrite(node, found, out)
        return tuple(out)

    # --- finding ------------------------------------------------------------------------------
    def found(self, node: For) -> CodesMatmul | None:
        matmuls = [n for n in node.body if isinstance(n, Op) and n.name == "matmul"]
        if len(matmuls) != 1 or node.over != "serial" or len(matmuls[0].args) != 3:
            return None
        (op,) = matmuls
        a, b, sums = op.args
        casts: list[Op] = []
        while (cast := self.once(a, "convert")) is not None:
            casts.append(cast)
            a = cast.args[0]
        load, turned = self.once(a, "load_tile"), self.once(b, "transpose")
        other = turned and self.once(turned.args[0], "load_tile")
        if load is None or not other or not self.whole(other):
            return None
        number = [i for i, (d, y) in enumerate(zip(node.carried, node.yields, strict=True))
                  if d.value == sums and y == op.outs[0].value]
        inside = [x for n in walk(node.body) for x in operands(n) if x == sums]
        view = self.whole(load)
        if view is None or len(number) != 1 or len(inside) != 1:
            return None
        assert isinstance(b, SSAValue)
        found = CodesMatmul(op, load, view, tuple(casts), b, number[0])
        kinds = [self.types[c.outs[0].value].dtype for c in casts]
        whole = self.lies(view) and all(holds(t, self.tensor(view).dtype) for t in kinds)
        return found if whole and self.fits(found) else None

    def once(self, x: Operand, name: str) -> Op | None:
        """The op of that name that makes x for one reader alone."""
        made = self.made.get(x) if isinstance(x, SSAValue) else None
        return made if made is not None and made.name == name and self.uses[x] == 1 else None  # type: ignore

    def whole(self, load: Op) -> Op | None:
        """The view that a load reads where that is a box of rows of a tensor, with zeros beyond
        its ends."""
        view = self.made.get(load.args[0])  # type: ignore[arg-type]
        plain = view is not None and view.name == "view" and load.attr["fill"] == 0
        if not plain or view is None or not isinstance(self.types[view.args[0]], GlobalTensor):  # type: ignore
            return None
        return view if len(load.outs[0].type.shape) == 2 else None  # type: ignore[union-attr]

    def lies(self, view: Op) -> bool:
        """Whether boxes begin at whole bytes of rows of known length that nothing writes."""
        tensor = self.tensor(view)
        kept, rank = view.attr["kept"], len(tensor.dims)
        if not tensor.dtype.packed or self.columns(tensor) is None or kept != (rank - 2, rank - 1):
            return False
        written = {self.root(n.args[0]) for n in walk(self.function.body)
                   if isinstance(n, Op) and OPS[n.name].writes}
        return self.known.divisor(view.args[-1]) % GROUP == 0 and view.args[0] not in written \
            and not (written and self.overlapping)

    def tensor(self, view: Op) -> GlobalTensor:
        found = self.types[view.args[0]]  # type: ignore[index]
        assert isinstance(found, GlobalTensor)
        return found

    def columns(self, tensor: GlobalTensor) -> int | None:
        text = str(tensor.dims[-1])
        found = text if text.isdigit() else dict(self.function.constants).get(text)
        return None if found is None else int(found)

    def root(self, x: Operand) -> Operand:
        while isinstance(x, SSAValue) and x in self.made and self.made[x].args:
            x = self.made[x].args[0]
        return x

    def order(self, found: CodesMatmul) -> str:
        """Beside what its codes lie as registers have them, "" where they lie in rows."""
        tensor = self.tensor(found.view)
        return order_of(tensor.numeric, (self.columns(tensor),))

    def fits(self, found: CodesMatmul) -> bool:
        """Whether there are instructions, and each warp gets whole blocks."""
        x, sums, attr = self.types[found.b], found.op.outs[0].type, found.op.attr
        assert isinstance(x, TileType) and isinstance(sums, TileType)
        narrow = x.dtype.bits == 8 and x.dtype.name not in self.generation.converts
        if target_of(x.dtype) not in self.generation.warp_matmul.formats or narrow:
            return False
        rows, columns, depth = *sums.shape, x.shape[0]
        if any(n & (n - 1) for n in (rows, columns, depth)) or depth < UNIT:
            return False
        beside = self.warps // self.parts(depth, rows)  # warps that share a part have rows each
        return rows >= ROWS * beside and COLUMNS <= columns <= MOST_COLUMNS and \
            sums.dtype is f32 and attr["precision"] is None

    def target(self, x: DType) -> str:
        """The format in which codes are multiplied."""
        return target_of(x)

    def parts(self, depth: int, rows: int) -> int:
        """Into how many an iteration's k is cut: one for each warp where there is enough."""
        return min(self.warps, depth // UNIT)

    # --- rewriting ----------------------------------------------------------------------------
    def rewrite(self, node: For, found: CodesMatmul, out: list[Node]) -> None:
        op, i = found.op, found.number
        kind, x, codes = op.outs[0].type, self.types[found.b], self.tensor(found.view).dtype
        assert isinstance(kind, TileType) and isinstance(x, TileType)
        factor = factor_of(codes, self.target(x.dtype))
        many = TileType(f32, self.shape(self.parts(x.shape[0], kind.shape[0]), *kind.shape))
        first = self.op(out, "full", (), many, op, shape=many.shape, value=0.0, dtype=f32)
        sums, made = (Def(self.names.fresh("parts"), many) for _ in range(2))
        body: list[Node] = []
        for n in node.body:
            if n is (found.load if self.first else op):
                a = self.load_bytes(body, found, codes)
            if n is op:
                body.append(Op(self.name, (a, found.b, sums.value), (made,), attributes(
                    codes=codes, factor=1 / factor, **self.more(found)), op.where))
            elif n is not found.load and n not in found.casts:
                body.append(n)
        out.append(replace(node, carried=put(node.carried, i, sums), body=tuple(body),
                           inits=put(node.inits, i, first), yields=put(node.yields, i, made.value)))
        total = self.total(sums, kind, out, op)
        if factor != 1:
            total = self.op(out, "mul", (total, Const(factor, f32)), kind, op)
        out.append(Op("add", (total, node.inits[i]), (node.carried[i],), (), op.where))

    def more(self, found: CodesMatmul) -> dict[str, Any]:
        """Attributes of the matmul beside those."""
        return {}

    def shape(self, parts: int, rows: int, columns: int) -> tuple[int, ...]:
        """Of the sums."""
        return parts, rows, columns

    def total(self, sums: Def, kind: TileType, out: list[Node], at: Op) -> Operand:
        """Of all parts."""
        return self.op(out, "sum_parts", (sums.value,), kind, at)

    def load_bytes(self, out: list[Node], found: CodesMatmul, codes: DType) -> SSAValue:
        """The box of the weights as the bytes that it lies in."""
        view, load = found.view, found.load
        *first, column = view.args[1:]
        groups, scalar = GROUP * codes.bits // 8, Scalar(i32)
        at = self.op(out, "floordiv", (column, Const(GROUP, i32)), scalar, load)
        at = self.op(out, "mul", (at, Const(groups, i32)), scalar, load)
        *outer, width = view.attr["box"]
        box, raw = (*outer, row_bytes(width, codes)), as_type("uint8")
        shape = (load.outs[0].type.shape[0], box[-1])  # type: ignore[union-attr]
        place = self.op(out, "view", (self.bytes_of(view), *first, at), View(raw, shape), load,
                        box=box, kept=view.attr["kept"])
        return self.op(out, "load_tile", (place,), TileType(raw.dtype, shape), load,
                       **load.attr)

    def bytes_of(self, view: Op) -> SSAValue:
        tensor = view.args[0]
        assert isinstance(tensor, SSAValue)
        if tensor not in self.bytes:
            t = self.tensor(view)
            columns = self.columns(t)
            assert columns is not None
            kind = GlobalTensor(as_type("uint8"), (*t.dims[:-1], row_bytes(columns, t.dtype)))
            self.bytes[tensor] = self.op(self.head, "packed_bytes", (tensor,), kind, view,
                                         columns=columns)
        return self.bytes[tensor]

    def op(self, out: list[Node], name: str, args: Iterable[Operand], kind: Any, at: Op,
           **attrs: Any) -> SSAValue:
        made = Def(self.names.fresh(name), kind)
        out.append(Op(name, tuple(args), (made,), attributes(**attrs), at.where))
        return made.value


class _Stacked(_Pass):
    name, first = "matmul_codes_stacked", True  # blocks side by side share the other one

    def fits(self, found: CodesMatmul) -> bool:
        x, sums = self.types[found.b], found.op.outs[0].type
        assert isinstance(x, TileType) and isinstance(sums, TileType)
        form = self.generation.warpgroup_matmul
        assert form is not None
        (rows, columns), codes = sums.shape, self.tensor(found.view).dtype
        if rows not in (form.rows, self.warps * form.rows) or not super().fits(found):
            return False
        if order := self.order(found):
            least = self.parts(x.shape[0], rows) * PIECES * UNIT
            return x.dtype.name == order and x.shape[0] % least == 0 and \
                self.known.divisor(found.view.args[-1]) % UNIT == 0
        piece = x.shape[0] // (self.parts(x.shape[0], rows) * PIECES)
        if x.dtype.bits == 8:
            return x.dtype.name == "fp8_e4m3" and codes.kind == "float" and bool(
                piece and piece % UNIT == 0)
        fewest = STACKED_COLUMNS.get(codes.name, 16) if rows == form.rows else COLUMNS
        return x.dtype.bits == 16 and columns >= fewest and piece > 0 and (
            piece * codes.bits % CHUNK_BITS == 0)

    def target(self, x: DType) -> str:
        return x.name

    def more(self, found: CodesMatmul) -> dict[str, Any]:
        return {"laid": bool(self.order(found))}

    def parts(self, depth: int, rows: int) -> int:
        """One for each warpgroup, or one where each has rows of its own."""
        assert self.generation.warpgroup_matmul is not None
        return self.warps * self.generation.warpgroup_matmul.rows // rows

    def shape(self, parts: int, rows: int, columns: int) -> tuple[int, ...]:
        return parts * rows, columns

    def total(self, sums: Def, kind: TileType, out: list[Node], at: Op) -> Operand:
        parts = sums.type.shape[0] // kind.shape[0]  # type: ignore[union-attr]
        if parts == 1:
            return sums.value
        many = (parts, *kind.shape)
        matrices = self.op(out, "reshape", (sums.value,), TileType(f32, many), at, shape=many)
        return self.op(out, "sum_parts", (matrices,), kind, at)


def is_dealt(x: DType, codes: DType, parts: int, depth: int, columns: int) -> bool:
    """Whether warpgroups multiply codes in the order of k in which lanes read them, into which the
    other operand is brought. With many columns shared memory has no time for that."""
    halves = PLAIN_OWN[codes.bits] if parts == 1 else PLAIN_HALVES
    most = PLAIN_COLUMNS[codes.bits] if x.bits == 8 else halves
    return codes.kind == "float" and columns < most and depth % (parts * PIECES * UNIT) == 0


@functools.cache
def holds(wide: DType, codes: DType) -> bool:
    """Whether every number of a packed type is one of another type."""
    every = unpack(np.arange(256, dtype=np.uint8).repeat(3), codes, 768 * 8 // codes.bits)
    numbers = np.asarray(decode(every, codes), np.float64)
    return bool((np.asarray(decode(encode(numbers, wide), wide), np.float64) == numbers).all())


def attributes(**attrs: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(attrs.items()))


def put(values: tuple, at: int, x: Any) -> tuple:
    return (*values[:at], x, *values[at + 1:])


__all__ = ["is_dealt", "laid_parameter", "multiply_codes", "stack_codes"]
