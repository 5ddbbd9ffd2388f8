"""The ops of a warp-specialised program. Only the passes of this folder write them.

Their meaning runs on the machine of `machine.py`, which keeps rings and running matmuls. A slot
of a ring is an integer, -1 for none; what lies in it is a view of shared memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.numerics import as_type, bool_, i32
from tessera.tile.builder import rules
from tessera.tile.ir.errors import RuleError
from tessera.tile.ir.numpy_values import convert
from tessera.tile.ir.op_record import OPS, declare
from tessera.tile.ir.types import Scalar, TileType, View
from tessera.tile.ops.packed import codes_in, product_of_parts, stacked

NO_SLOT = -1
INT = Scalar(i32)


# --- roles and tiles --------------------------------------------------------------------------
@declare(rule=lambda types, attrs: Scalar(bool_), run=True, public=False)
def is_producer(m: Any, op: Any) -> Any:
    """Whether this warpgroup fills the rings; the others read them."""
    return np.array([[m.role == "producer"]])


@declare(rule=lambda types, attrs: Scalar(bool_), run=True, public=False)
def is_first(m: Any, op: Any) -> Any:
    """Whether this is the thread of the producer that issues copies."""
    return np.array([[True]])


@declare(rule=lambda types, attrs: Scalar(bool_), run=True, public=False)
def is_dealer(m: Any, op: Any) -> Any:
    """Whether this thread of the producer brings rows into the order of codes; here none has to."""
    return np.array([[False]])


@declare(rule=lambda types, attrs: Scalar(bool_), run=True, public=False)
def is_ahead(m: Any, op: Any) -> Any:
    """Whether this is the thread of the producer that asks L2 for weights; here none has to."""
    return np.array([[False]])


@declare(rule=lambda types, attrs: (), attrs=("registers", "how"), run=True, effect="sync",
         public=False)
def set_registers(m: Any, op: Any, registers: Any = 0, how: Any = "inc") -> Any:
    """Registers of a lane in this role from here on."""


@declare(rule=lambda types, attrs: INT, run=True, public=False, least=lambda least: 0)
def block_number(m: Any, op: Any) -> Any:
    """The number of this persistent block."""
    return np.array([[m.block]], np.int32)


@declare(rule=lambda types, attrs: INT, run=True, public=False, least=lambda least: 0)
def block_count(m: Any, op: Any) -> Any:
    """How many persistent blocks there are; each takes every so many-th tile."""
    return np.array([[m.blocks]], np.int32)


@declare(rule=lambda types, attrs: Scalar(bool_), run=True, public=False)
def own_rows(m: Any, op: Any, start: Any, stop: Any) -> Any:
    """Whether the warpgroup that asks has a row below stop, of a tile whose rows begin at start;
    here, where all of them are one, the tile has."""
    return np.array([[True]])


@declare(rule=lambda types, attrs: INT, attrs=("size", "last"), run=True, public=False)
def row_of_warpgroup(m: Any, op: Any, start: Any, size: Any = 1, last: Any = False) -> Any:
    """The first or last row of the warpgroup that asks, of a tile whose rows begin at start; here,
    where all of them are one, of the tile."""
    return np.reshape(start + np.int32(op.attr["size"] - 1 if op.attr["last"] else 0), (1, 1))


@declare(rule=lambda types, attrs: INT, attrs=("step", "columns"), run=True, public=False)
def own_start(m: Any, op: Any, lo: Any, hi: Any, start: Any, less: Any, step: Any = 1,
              columns: Any = 1) -> Any:
    """Where a loop from lo to hi begins for the warpgroup that asks: with the first iteration that
    has a score which a causal mask leaves it, those being masked where start + row > iteration +
    less + column; here, where all of them are one, at lo."""
    return np.asarray(lo, np.int32).reshape(1, 1)


@declare(rule=lambda types, attrs: INT, run=True, effect="atomic", public=False)
def next_tile(m: Any, op: Any, tile: Any, tiles: Any) -> Any:
    """The number of a tile that no block has taken yet, `tiles` or more when there is none; here,
    of this block's next in turn."""
    return tile + np.int32(m.blocks)


@declare(rule=lambda types, attrs: (), run=True, effect="sync", public=False)
def mail_put(m: Any, op: Any, *numbers: Any) -> Any:
    """Tells the consumers that a tile comes, 1, and where it lies; 0 and any when none does."""
    m.mail.append(tuple(np.array(x, np.int32).reshape(1, 1) for x in numbers))


@declare(rule=lambda types, attrs: (INT,) * attrs["count"], attrs=("count",), run=True,
         effect="sync", public=False, least=lambda least: 0)
def mail_get(m: Any, op: Any, count: Any = 2) -> Any:
    """The next numbers that the producer put."""
    return m.mail.popleft()


@declare(rule=lambda types, attrs: INT, attrs=("parts",), run=True, public=False,
         least=lambda least: 0)
def part_number(m: Any, op: Any, parts: Any = 1) -> Any:
    """The number of this block among those that do a tile together."""
    return np.array([[m.part]], np.int32)


@declare(rule=lambda types, attrs: INT, attrs=("parts",), run=True, public=False,
         least=lambda least: 1)
def part_count(m: Any, op: Any, parts: Any = 1) -> Any:
    """How many blocks do a tile together; here one, whatever the program says."""
    return np.array([[m.parts]], np.int32)


def _order_rule(types: Any, attrs: Any) -> Any:
    many = (INT,) * len(attrs["order"])
    return many if len(many) > 1 else INT


@declare(rule=_order_rule, attrs=("order", "outer", "reversed"), public=False,
         least=lambda least: 0)
def tile_order(tile: Any, raster: Any, *extents: Any, order: Any = (0,), outer: Any = 0,
               reversed: Any = None) -> Any:
    """Coordinates of the tile-th group of a grid, so that groups that share data run together.

    order: grid axes from the slowest to the fastest, with a strip: order[outer] advances `raster`
    at a time; inside a strip the axes after it move slower than it does. The first `outer` axes
    are plainly the slowest. reversed: an axis that runs from its end, or None.
    """
    size = dict(enumerate(extents))
    strip, inner = order[outer], order[outer + 1:]
    below = size[strip] * np.prod([size[a] for a in inner], axis=0, dtype=np.int32)
    at, rest = {}, tile // below
    inside = tile - rest * below
    for axis in order[:outer][::-1]:
        at[axis], rest = rest % size[axis], rest // size[axis]
    many = np.prod([size[a] for a in inner], axis=0, dtype=np.int32)
    start = inside // (raster * many) * raster
    width = np.minimum(size[strip] - start, raster)
    inside = inside - start * many
    at[strip], rest = start + inside % width, inside // width
    for axis in inner[::-1]:
        at[axis], rest = rest % size[axis], rest // size[axis]
    if reversed is not None:
        at[reversed] = size[reversed] - 1 - at[reversed]
    found = [np.asarray(at[a]).reshape(-1, 1) for a in range(len(order))]
    return found if len(found) > 1 else found[0]


# --- rings ------------------------------------------------------------------------------------
def _fill_rule(types: Any, attrs: Any) -> Any:
    for t in types:
        if not isinstance(t, View) or t.space != "global":
            raise RuleError(f"ring_fill copies views of global memory, got {t}")
    if len(types) != len(attrs["loads"]):
        raise RuleError(f"ring_fill of {len(types)} views for {len(attrs['loads'])} loads")
    return ()


@declare(rule=lambda types, attrs: (), attrs=("ring",), run=True, effect="sync", public=False)
def ring_drain(m: Any, op: Any, ring: Any = "") -> Any:
    """Waits until all slots are back, and so until no other block of the cluster will say so: its
    barriers are gone when this one ends."""


@declare(rule=_fill_rule, attrs=("ring", "loads"), run=True, effect="async", public=False)
def ring_fill(m: Any, op: Any, *views: Any, ring: Any = "", loads: Any = ()) -> Any:
    """Waits for the next free slot of a ring and begins the copies of all its loads into it."""
    m.rings.fill(op.attr["ring"], {n: v for n, v in zip(op.attr["loads"], views, strict=True)}, m)


@declare(rule=_fill_rule, attrs=("ring", "loads"), run=True, effect="async", public=False)
def ring_ahead(m: Any, op: Any, *views: Any, ring: Any = "", loads: Any = ()) -> Any:
    """Asks for what these loads of a ring will copy, to be in L2."""


@declare(rule=lambda types, attrs: (), attrs=("ring",), run=True, effect="sync", public=False)
def ring_deal(m: Any, op: Any, ring: Any = "") -> Any:
    """Waits until the next slot of a ring is filled, brings what is dealt into its order, and lets
    those read that wait for the slot."""


@declare(rule=lambda types, attrs: INT, attrs=("ring",), run=True, effect="sync", public=False)
def ring_wait(m: Any, op: Any, ring: Any = "") -> Any:
    """Waits until the next slot of a ring is filled; from here on this role holds it."""
    return np.array([[m.rings.wait(op.attr["ring"], op.where)]], np.int32)


@declare(rule=lambda types, attrs: View(as_type(attrs["dtype"]), attrs["shape"], "shared"),
         attrs=("ring", "load", "dtype", "shape"), run=True, public=False)
def slot_tile(m: Any, op: Any, slot: Any, ring: Any = "", load: Any = "", dtype: Any = None,
              shape: Any = ()) -> Any:
    """What one load put into a slot."""
    return m.rings.tile(op.attr["ring"], int(slot.flat[0]), op.attr["load"])


@declare(rule=lambda types, attrs: (), attrs=("ring",), run=True, effect="sync", public=False)
def ring_release(m: Any, op: Any, slot: Any, ring: Any = "") -> Any:
    """Gives a slot back to the producer; none when it is -1."""
    m.rings.release(op.attr["ring"], int(slot.flat[0]), op.where)


# --- matmuls ---------------------------------------------------------------------------------
def stored_shape(t: View | TileType, major: str, side: str) -> tuple[int, int]:
    """(rows, k) of A or (k, columns) of B as the matmul sees it; t.shape is as stored."""
    flipped = major == ("M" if side == "a" else "K")
    return t.shape[::-1] if flipped else t.shape  # type: ignore[return-value]


def _matmul_rule(types: Any, attrs: Any) -> TileType:
    a, b, *rest = types
    for t in (a, b):
        if not isinstance(t, View | TileType) or isinstance(t, View) and t.space != "shared":
            raise RuleError(f"async_matmul of {a} and {b}: operands are shared memory, or "
                            "registers for the first")
    (m, k), (depth, n) = stored_shape(a, attrs["a_major"], "a"), stored_shape(
        b, attrs["b_major"], "b")
    if k * attrs.get("parts", 1) * attrs.get("pieces", 1) != depth or isinstance(b, TileType):
        raise RuleError(f"async_matmul of {a} ({attrs['a_major']}) and {b} ({attrs['b_major']})")
    made = TileType(attrs["dtype"], (m, n))
    if rest and (rest[0].dtype, rest[0].shape) != (made.dtype, made.shape):
        raise RuleError(f"async_matmul adds {made} to {rest[0]}")
    return made


@declare(rule=_matmul_rule,
         attrs=("a_major", "b_major", "dtype", "parts", "piece", "pieces", "columns", "panel"),
         run=True, effect="async", group=True, public=False, layouts="any")
def async_matmul(m: Any, op: Any, a: Any, b: Any, accumulator: Any = None, a_major: Any = "K",
                 b_major: Any = "M", dtype: Any = None, parts: int = 1, piece: int = 0,
                 pieces: int = 1, columns: bool = False, panel: int = 0) -> Any:
    """accumulator + a @ b by wgmma; the result may be read after a `matmul_wait` for it.

    a_major, b_major: "K" when the contracted axis is contiguous, "M" when the other one is; an
    operand in shared memory is as the tensor has it, [M, K] or [K, M], [N, K] or [K, N].
    parts: a is as many matrices, one below the other, each for its part of the rows of b, of which
    it takes one of several pieces.
    columns: a was read by read_columns, so lanes have other rows (warpgroup_columns).
    panel: a was made by unpack_codes with this attribute, so lanes have the rows that this says.
    """
    x = a.swapaxes(1, 2) if op.attr["a_major"] == "M" else a
    y = b.swapaxes(1, 2) if op.attr["b_major"] == "K" else b
    wide = np.float32 if op.attr["dtype"].kind == "float" else np.int64
    if (pieces := op.attr.get("pieces", 1)) > 1:
        cut = np.split(y, op.attr.get("parts", 1) * pieces, axis=1)
        y = np.concatenate(cut[op.attr["piece"]::pieces], axis=1)
    made = convert(product_of_parts(x.astype(wide), y.astype(wide), op.attr.get("parts", 1)),
                   op.attr["dtype"])
    if accumulator is not None:
        made = (made + accumulator).astype(made.dtype)
    m.rings.issue(made, (a, b), accumulator, op.where)
    return made


def _first(types: Any, attrs: Any) -> Any:
    return types[0]


@declare(rule=_first, attrs=("pending",), run=True, effect="sync", group=True, public=False,
         layouts="same")
def matmul_wait(m: Any, op: Any, x: Any, pending: Any = 0) -> Any:
    """Waits until at most `pending` matmuls run, counted from the last one issued; x passes."""
    m.rings.settle(op.attr["pending"])
    return x


@declare(rule=_first, attrs=("all", "parts"), run=True, effect="sync", group=True, public=False,
         layouts="same")
def sum_across(m: Any, op: Any, x: Any, all: Any = False, parts: Any = 1) -> Any:
    """The sum of what the blocks have that do a tile together, in warpgroups of which has_sums says
    so, or in all; here one has all."""
    return x


@declare(rule=lambda types, attrs: Scalar(bool_), attrs=("all",), run=True, public=False,
         layouts="any")
def has_sums(m: Any, op: Any, x: Any, all: Any = False) -> Any:
    """Whether this warpgroup has the sums of a tile, to store them; all: whether this block has,
    since each may have them. Here the first block has."""
    return np.array([[m.part == 0]])


@declare(rule=lambda types, attrs: (), attrs=("registers",), run=True, effect="sync", public=False,
         layouts="any")
def pin(m: Any, op: Any, x: Any, registers: Any = 8) -> Any:
    """Keeps the computation of x's first registers in front of what follows: the assembler would
    move the next wait over it, and nothing would run beside the matmul any more."""


@declare(rule=lambda types, attrs: (), run=True, effect="sync", public=False)
def turn_begin(m: Any, op: Any) -> Any:
    """The first consumer warpgroup may take the first turn. Here one stands for all of them."""


@declare(rule=lambda types, attrs: (), run=True, effect="sync", public=False)
def turn_take(m: Any, op: Any) -> Any:
    """Waits until it is the turn of this warpgroup to issue matmuls."""


@declare(rule=lambda types, attrs: (), run=True, effect="sync", public=False)
def turn_pass(m: Any, op: Any) -> Any:
    """The next warpgroup may take its turn."""


def _view_tile(types: Any, attrs: Any) -> TileType:
    return TileType(types[0].dtype, types[0].shape)


@declare(rule=_view_tile, run=True, effect="read", group=True, public=False, layouts="any")
def hold_operand(m: Any, op: Any, x: Any) -> Any:
    """A tile of shared memory in registers, in the form of a matmul's first operand."""
    return np.array(x)


@declare(rule=_view_tile, run=True, effect="read", group=True, public=False, layouts="any")
def read_row(m: Any, op: Any, x: Any) -> Any:
    """A row of numbers in shared memory that came with the operands of an iteration."""
    return np.array(x)


@declare(rule=_view_tile, run=True, effect="read", group=True, public=False, layouts="any")
def read_tile(m: Any, op: Any, x: Any) -> Any:
    """A tile of shared memory as numbers in registers, where a matmul's first operand has them that
    is computed of it."""
    return np.array(x)


@declare(rule=lambda types, attrs: TileType(attrs["dtype"], types[0].shape), attrs=("dtype",),
         public=False, layouts="same")
def pack_operand(x: Any, dtype: Any) -> Any:
    """x rounded to a matmul's type, in the form of its first operand: two numbers a register."""
    return convert(x, dtype)


def _codes_rule(types: Any, attrs: Any) -> TileType:
    rows, width = types[0].shape
    parts = attrs["parts"]
    return TileType(attrs["dtype"], (parts * rows, codes_in(width, attrs["codes"]) // (
        parts * attrs["pieces"])))


@declare(rule=_codes_rule, attrs=("parts", "piece", "pieces", "codes", "factor", "dtype",
                                   "laid", "panel"), run=True,
         effect="read", group=True, public=False, layouts="any")
def unpack_codes(m: Any, op: Any, x: Any, beside: Any = None, parts: int = 1, piece: int = 0,
                 pieces: int = 1, codes: Any = None, factor: float = 1.0, dtype: Any = None,
                 laid: bool = False, panel: int = 128) -> Any:
    """The numbers of packed codes in shared memory times `factor`, in the form of a matmul's first
    operand: of each part of their columns a piece, one below the other.

    beside: the second operand, where k has an order in registers that is not that of memory.
    `ring_deal` brings its rows into that order, which no other op sees.  laid: whether codes lie
    as registers have them, which no other op sees either.  panel: bytes of a row in shared memory,
    by which lanes have rows (warpgroup_codes).
    """
    attr = op.attr
    whole = stacked(np.asarray(x), attr["codes"], attr["parts"]) * np.float32(attr["factor"])
    return convert(np.split(whole, attr["pieces"], axis=2)[attr["piece"]], attr["dtype"])


def _columns_rule(types: Any, attrs: Any) -> TileType:
    depth, rows = types[0].shape
    return TileType(types[0].dtype, (rows, depth // attrs["pieces"]))


@declare(rule=_columns_rule, attrs=("piece", "pieces"), run=True, effect="read", group=True,
         public=False, layouts="any")
def read_columns(m: Any, op: Any, x: Any, piece: int = 0, pieces: int = 1) -> Any:
    """A piece of the columns of a tile [K, M] in shared memory transposed, in the form of a
    matmul's first operand."""
    return np.split(np.asarray(x).swapaxes(1, 2), op.attr["pieces"], axis=2)[op.attr["piece"]]


# --- statistics of rows -----------------------------------------------------------------------
def _row_rule(types: Any, attrs: Any) -> TileType:
    t = types[0]
    if not isinstance(t, TileType) or len(t.shape) != 2:
        raise RuleError(f"lane_sum needs a matrix, got {t}")
    return TileType(t.dtype, t.shape[:1])


@declare(rule=_row_rule, attrs=("axis",), public=False, layouts="reduced")
def lane_sum(x: Any, axis: Any = 1) -> Any:
    """The sum of each row, left as one summand in each lane of the four that share the row."""
    return x.sum(axis=2, dtype=x.dtype)


@declare(rule=_first, public=False, layouts="same")
def quad_sum(x: Any) -> Any:
    """Summands of the lanes that share a row -> their sum in each of them."""
    return x


@declare(rule=lambda types, attrs: Scalar(bool_), attrs=("value",), group=True, public=False,
         layouts="any")
def any_differs(x: Any, value: Any = 1.0) -> Any:
    """Whether an element differs from `value`, in the warp that asks: the same for its lanes."""
    return (x != value).any(axis=tuple(range(1, x.ndim))).reshape(-1, 1)


@declare(rule=lambda types, attrs: types[0], run=True, effect="read", public=False)
def ring_load(m: Any, op: Any, view: Any) -> Any:
    """A load that is to go through a ring: only between passes (`roles` replaces it)."""
    raise AssertionError("ring_load stands between passes only")


# --- results ----------------------------------------------------------------------------------
@declare(rule=rules.floats, public=False, layouts="same")
def row_quotient(x: Any, y: Any) -> Any:
    """div_or_zero by a row statistic as a product with its reciprocal, for a result that is rounded
    to 16 bits."""
    return np.where((x == 0) & (y == 0), x.dtype.type(0), x / y)


@declare(rule=lambda types, attrs: (), run=True, effect="write", group=True, public=False,
         layouts="any")
def store_rows(m: Any, op: Any, target: Any, value: Any) -> Any:
    """store_tile of an accumulator in pieces of 16 bytes, after transposes among four lanes."""
    OPS["store_tile"].run(m, op, target, value)  # type: ignore[misc]


@declare(rule=lambda types, attrs: (), run=True, effect="write", group=True, public=False,
         layouts="any")
def store_panels(m: Any, op: Any, target: Any, value: Any) -> Any:
    """store_tile of an accumulator by TMA: each warp puts its rows into shared memory of its own, a
    panel of columns at a time, and does not wait until they left it."""
    OPS["store_tile"].run(m, op, target, value)  # type: ignore[misc]


@declare(rule=lambda types, attrs: (), run=True, effect="sync", public=False)
def panels_read(m: Any, op: Any) -> None:
    """Waits until TMA has read all panels: a block that ends gives its shared memory back."""
