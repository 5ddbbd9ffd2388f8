"""Matmuls of tiles: by tensor cores where they keep the precision, else by multiply-adds."""

from __future__ import annotations

from tessera.numerics import DType, f32, f64, find_dtype
from tessera.tile.cuda.emit.elementwise import full
from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.matmul_operands import Operand_, Stores, operand_of, reader
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.emit.shared_tiles import spot_of, width_of_run
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.cuda.intrinsics.matmul import STEP_BYTES, STORED, bytes_of, taken
from tessera.tile.cuda.intrinsics.thread_matmul import STEP
from tessera.tile.cuda.lower.choose_matmul_unit import format_of
from tessera.tile.ir.ir import Op
from tessera.tile.ir.register_layout import WARP_BITS, RegisterLayout
from tessera.tile.ir.types import TileType


@emits("matmul")
def _matmul(e: Emitter, op: Op) -> None:
    (made,) = op.outs
    assert isinstance(made.type, TileType)
    kinds = unit_of(e, op)
    if op.attr.get("taken"):
        assert kinds is not None, "operands were taken for tensor cores"
        text = of_taken(e, op, kinds)
    else:
        text = by_tensor_cores(e, op, kinds) if kinds else by_threads(e, op)
    e.define(made, rounded(e, text, made.type.dtype))


@emits("take_operand")
def _take_operand(e: Emitter, op: Op) -> None:
    """One step of k of an operand, for the matmul that has these accumulators."""
    place, accumulator = op.args
    (made,), side, kind = op.outs, op.attr["side"], op.attr["format"]
    result = e.layout(accumulator)
    assert isinstance(made.type, TileType) and is_accumulator(result), \
        f"{accumulator}: {result.text}"
    stores: Stores = []
    operand = operand_of(e, place, side, result, find_dtype(STORED[kind]), stores)
    K = made.type.shape[operand.axis]
    how, args = reader(e, operand, kind, result, K, kind == "tf32" and made.type.dtype is f32)
    assert not stores and K * bytes_of(kind) == STEP_BYTES
    e.note(f"{side} from {how[0]}, a step of k before its matmuls")
    make = e.use(f"take_{side}", f"use(matmul.take({side!r}, {kind!r}, {result.text!r}, "
                                 f"{result.shape}, {how}))")
    e.define(made, f"{make}({', '.join(args)})")


def of_taken(e: Emitter, op: Op, kinds: tuple[str, str]) -> str:
    """The matmuls of one step of k, whose fragments are registers already."""
    x, y, acc = op.args
    result, K = e.layout(op.outs[0].value), e.type(x).shape[1]  # type: ignore[union-attr]
    e.matmul_forms["mma"] = None
    e.note(f"matmul {result.shape[0]}x{result.shape[1]}x{K} by mma.sync {kinds[0]}")
    text = (f"use(matmul.matmul({kinds}, {result.text!r}, {result.shape}, {K}, "
            f"{taken(result, 'A')}, {taken(result, 'B')}, False))")
    return f"{e.use('dot', text)}({e.name(acc)}, {e.name(x)}, {e.name(y)})"


def unit_of(e: Emitter, op: Op) -> tuple[str, str] | None:
    """The formats in which mma multiplies on this target; None: threads do it."""
    a, b = (e.dtype(x) for x in op.args[:2])
    kinds = format_of(a, b, op.attr, e.generation)
    return kinds if e.lanes % 32 == 0 and is_accumulator(e.layout(op.outs[0].value)) else None


def is_accumulator(layout: RegisterLayout) -> bool:
    """Whether lanes hold m16n8 blocks."""
    lanes = ((1, 1), (1, 2), (0, 0), (0, 1), (0, 2))
    return layout.threads[:WARP_BITS] == lanes and {(1, 0), (0, 3)} <= set(layout.registers)


def rounded(e: Emitter, text: str, dtype: DType) -> str:
    """Sums are made in f32, f64, i32 or i64; the result's type may be narrower."""
    if dtype.bits >= 32 and dtype.name != "tf32":
        return text
    source = "f32" if dtype.kind == "float" else "int32"
    make = e.use(f"to_{dtype.name}", f"use(casts.cast({source!r}, {dtype.name!r}))")
    return f"{make}({text})"


def prepare(e: Emitter, stores: Stores) -> None:
    """Writes operands to shared memory, between barriers. One since the iteration began stands
    behind the matmul of the iteration before."""
    if not stores:
        return
    if e.loops and not e.met:
        e.sync()
    for store in stores:
        store()
    e.sync()


# --- tensor cores ---------------------------------------------------------------------------------
def by_tensor_cores(e: Emitter, op: Op, kinds: tuple[str, str]) -> str:
    """One intrinsic: fragments and matmuls of the whole block."""
    x, y, *acc = op.args
    result, K = e.layout(op.outs[0].value), e.type(x).shape[1]  # type: ignore[union-attr]
    stores: Stores = []
    half = kinds[0] in ("bf16", "f16")
    a = operand_of(e, x, "A", result, find_dtype(STORED[kinds[0]]), stores, registers=half)
    b = operand_of(e, y, "B", result, find_dtype(STORED[kinds[1]]), stores)
    prepare(e, stores)
    tf32 = kinds[0] == "tf32"
    readers, args = [], [e.name(acc[0])] if acc else []
    for operand, kind, given in ((a, kinds[0], x), (b, kinds[1], y)):
        how, expressions = reader(e, operand, kind, result, K,
                                  tf32 and e.dtype(given).name == "f32")
        readers.append(how)
        args += expressions
    unit = e.generation.warp_matmul
    small = unit.step_bytes < STEP_BYTES
    longest = f", {unit.longest_sum}" if kinds[0] in unit.short_sums else ""
    e.matmul_forms["mma"] = None
    e.note(f"matmul {result.shape[0]}x{result.shape[1]}x{K} by mma.sync {kinds[0]}: "
           f"A from {readers[0][0]}, B from {readers[1][0]}")
    text = (f"use(matmul.matmul({kinds}, {result.text!r}, {result.shape}, {K}, {readers[0]}, "
            f"{readers[1]}, {not acc}, {small}{longest}))")
    return f"{e.use('dot', text)}({', '.join(args)})"


# --- threads --------------------------------------------------------------------------------------
def by_threads(e: Emitter, op: Op) -> str:
    """A loop over k: a few elements of A and B, multiplied into all sums of the thread."""
    x, y, *acc = op.args
    (made,) = op.outs
    assert isinstance(made.type, TileType)
    result, K = e.layout(made.value), e.type(x).shape[1]  # type: ignore[union-attr]
    stores: Stores = []
    operands = [operand_of(e, given, side, result, shared_type(e.dtype(given)), stores)
                for given, side in ((x, "A"), (y, "B"))]
    prepare(e, stores)
    tf32 = op.attr["precision"] == "tf32"
    kind = sums_in(made.type.dtype)
    step = step_of(K, STEP // 2 if any(x.deep() for x in operands) else STEP)
    total, k = e.fresh("sums"), e.fresh("k")
    e.line(f"{total} = {e.name(acc[0]) if acc else full(e, made.type, f'{kind}(0)')}")
    specs, args = [], []
    for operand, given in zip(operands, (x, y), strict=True):
        spec, place = element_source(e, operand, result, k, step)
        specs.append((*spec, e.dtype(given).kind == "uint", tf32))
        args += place
    make = e.use("multiply_add", f"use(thread_matmul.matmul({kind!r}, {result.text!r}, "
                 f"{result.shape}, {step}, {specs[0]}, {specs[1]}))")
    e.matmul_forms["threads"] = None
    e.note(f"matmul {result.shape[0]}x{result.shape[1]}x{K} by threads in {kind}")
    e.line(f"{k} = i32(0)")
    with e.block(f"while {k} < {K}"):
        e.line(f"{total} = {make}({total}, {', '.join(args)})")
        e.line(f"{k} = i32({k} + {step})")
    return total


def shared_type(dtype: DType) -> DType:
    """The type in which a tile goes through shared memory for threads."""
    narrow = dtype.kind == "float" and dtype.bits <= 8 or dtype.packed
    if not narrow:
        return dtype
    return find_dtype("f16" if dtype.kind == "float" else "int8")


def sums_in(dtype: DType) -> str:
    return "f64" if dtype is f64 else kind_of(dtype)


def step_of(K: int, most: int) -> int:
    """Elements of k that are multiplied at once: they divide K."""
    return min(most, K & -K) if K else 1


def element_source(e: Emitter, x: Operand_, result: RegisterLayout, k: str,
                   step: int) -> tuple[tuple, list[str]]:
    """(panel, deep, zeros, clamped, width), and base, row, column at k."""
    place = x.place
    assert place is not None
    axis = 0 if x.side == "A" else 1
    parts: list[str | None] = [None] * len(place.extents)
    parts[place.axes[x.axis]], parts[place.axes[1 - x.axis]] = k, e.index(result, axis)
    mask = ~(step - 1) if x.deep() else \
        sum(1 << bit[1] for bit in result.threads if bit and bit[0] == axis)
    spot = spot_of(e, place, parts, mask)
    run = step if x.deep() else result.run(axis)
    clamped = result.overhangs(axis)
    width = 1 if clamped else width_of_run(e, place, spot, run)
    panel = (spot.panel.rows, spot.panel.columns, spot.panel.dtype, spot.panel.swizzle)
    return (panel, x.deep(), spot.zeros, clamped, width), spot.place

