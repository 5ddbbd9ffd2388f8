"""Places: what a view or buffer is when code is written that reads or writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tessera.lazy_dataclass import dataclass
from tessera.numerics import DType, NumericType, i32
from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.intrinsics.swizzle import ALIGNMENT, stage_bytes
from tessera.tile.ir.ir import Const, Op, Operand, SSAValue
from tessera.tile.ir.register_layout import RegisterLayout
from tessera.tile.ir.types import Buffer, GlobalTensor
from tessera.tile.ops.windows import Windows
from tessera.tile.passes.integer_facts import divisor_of

ZERO = Const(0, i32)
FAR = "shared::cluster"  # space of what lies in another group's shared memory


@dataclass(frozen=True)
class MemoryOperand:
    """A box of a tensor or buffer. extents: of the whole memory, numbers or variables.

    texts: the extents as written, for what is known about them. axes: the memory axis of each axis
    of the box. base: the address expression; stage_bytes and stage choose a part of a buffer.
    windows: of unfolded images, of which the offsets are a place and a column.  rank: of the group
    of a cluster whose memory it is.
    """

    space: str
    name: str
    numeric: NumericType
    extents: tuple[str | int, ...]
    texts: tuple[str, ...]
    offsets: tuple[Operand, ...]
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    base: str
    buffer: Buffer | None = None
    stage: Operand | None = None
    windows: Windows | None = None
    rank: Operand | None = None

    @property
    def dtype(self) -> DType:
        return self.numeric.dtype

    def stride(self, axis: int) -> list[str | int]:
        """Factors of the distance of neighbours along a memory axis, in elements."""
        return list(self.extents[axis + 1:])


def place_of(e: Emitter, x: Operand) -> MemoryOperand:
    """The place that a tensor, buffer or view stands for."""
    assert isinstance(x, SSAValue)
    if x not in e.places:
        e.places[x] = _whole_tensor(e, x)
    return e.places[x]  # type: ignore[return-value]


def _whole_tensor(e: Emitter, x: SSAValue) -> MemoryOperand:
    t = e.types[x]
    assert isinstance(t, GlobalTensor), f"{x} is {t} and has no place"
    rank = len(t.dims)
    return MemoryOperand("global", x.name, t.numeric, tuple(e.extent(d) for d in t.dims),
                         tuple(map(str, t.dims)), (ZERO,) * rank, tuple(range(rank)),
                         (0,) * rank, e.param("tensor", x.name, "i64"))


@emits("allocate")
def _allocate(e: Emitter, op: Op) -> None:
    (made,) = op.outs
    t = made.type
    assert isinstance(t, Buffer)
    rank = len(t.shape)
    base = e.scratch(t.stages * stage_bytes(t), max(t.alignment, ALIGNMENT)) \
        if t.space == "shared" else e.spelled[made.value]
    if t.space == "register":
        # Private to each thread: named by its value, made where it is first used.
        e.note(f"{made.value.name}: {prod(t.shape)} numbers in each thread")
    e.places[made.value] = MemoryOperand(t.space, made.value.name, t.numeric, t.shape,
                                         tuple(map(str, t.shape)), (ZERO,) * rank,
                                         tuple(range(rank)),
                                         t.shape, base, t)


@emits("stage")
def _stage(e: Emitter, op: Op) -> None:
    place = place_of(e, op.args[0])
    e.places[op.outs[0].value] = replace(place, stage=op.args[1])


@emits("view")
def _view(e: Emitter, op: Op) -> None:
    source, attr = place_of(e, op.args[0]), op.attr
    kept = tuple(attr["kept"])
    e.places[op.outs[0].value] = replace(
        source, offsets=tuple(op.args[1:]), axes=kept, shape=tuple(attr["box"][a] for a in kept))


@emits("windows")
def _windows(e: Emitter, op: Op) -> None:
    """For warpgroups that specialise; elsewhere pixels are gathered (lower/gather_windows.py)."""
    source, attr = place_of(e, op.args[0]), op.attr
    e.places[op.outs[0].value] = replace(source, offsets=tuple(op.args[1:]),
                                         shape=(attr["rows"], attr["columns"]),
                                         windows=Windows.of(attr))


@emits("flattened")
def _flattened(e: Emitter, op: Op) -> None:
    (made,) = op.outs
    assert isinstance(made.type, GlobalTensor)
    e.places[made.value] = replace(
        place_of(e, op.args[0]), extents=tuple(map(e.extent, made.type.dims)),
        texts=tuple(map(str, made.type.dims)), offsets=(ZERO,), axes=(0,), shape=(0,))


@emits("view_transpose")
def _view_transpose(e: Emitter, op: Op) -> None:
    place = place_of(e, op.args[0])
    e.places[op.outs[0].value] = replace(place, axes=place.axes[::-1], shape=place.shape[::-1])


# --- addresses ----------------------------------------------------------------------------------
def product(factors: Sequence[str | int], wide: bool = True) -> str:
    """The product of extents as an expression; 64 bits when wide."""
    number = prod(f for f in factors if isinstance(f, int))
    names = [f for f in factors if isinstance(f, str)]
    if not names:
        return f"i64({number})" if wide else f"i32({number})"
    text = " * ".join([f"i64({names[0]})" if wide else names[0], *names[1:]])
    return text if number == 1 else f"{text} * {number}"


def element_offset(e: Emitter, place: MemoryOperand, parts: Sequence[str | None]) -> str:
    """Number of the element at the view's offsets plus `parts` (one per memory axis), 64 bits."""
    text = ""
    for axis, (offset, part) in enumerate(zip(place.offsets, parts, strict=True)):
        terms = [] if isinstance(offset, Const) and offset.value == 0 else [e.name(offset)]
        terms += [part] if part not in (None, "i32(0)") else []
        index = " + ".join(terms)
        if text:
            text = f"({text}) * {place.extents[axis]}" + (f" + {index}" if index else "")
        elif index:
            text = f"i64({index})"
    return text or "i64(0)"


def split_address(e: Emitter, place: MemoryOperand, parts: Sequence[str | None]) -> str | None:
    """The same as a number of 64 bits that threads share, and one of 32 of their own: a loop then
    keeps fewer registers for addresses. None where rows may be too far apart for 32 bits."""
    first = next((i for i, part in enumerate(parts) if part not in (None, "i32(0)")), None)
    inner = () if first is None else place.extents[first + 1:]
    if first is None or not all(str(n).isdigit() for n in inner) or first not in place.axes:
        return None
    rows = place.shape[place.axes.index(first)]
    if rows * prod(map(int, inner)) > 1 << 30:
        return None
    own = str(parts[first])
    for extent, part in zip(inner, parts[first + 1:], strict=True):
        own = f"({own}) * {extent}" + (f" + {part}" if part else "")
    return f"{element_offset(e, place, [None] * len(parts))} + i64(i32({own}))"


def bytes_of(dtype: DType, elements: str) -> str:
    """A count of elements as bytes."""
    return elements if dtype.bits == 8 else f"({elements}) * {dtype.bits // 8}"


def access_width(e: Emitter, place: MemoryOperand, layout: RegisterLayout) -> tuple[int, int]:
    """(axis of the tile, elements): how many neighbours one access may move, surely aligned.

    The tile's axis along which memory is contiguous, -1 where none is; the width is limited by what
    the thread holds, 16 bytes, the alignment of the tensor, its rows and the offset, and the ends
    of tensor and box.
    """
    last = len(place.extents) - 1
    if last not in place.axes:
        return -1, 1
    axis = place.axes.index(last)
    width = min(layout.run(axis), max(1, 128 // place.dtype.bits))
    if place.space == "global" and place.name not in e.facts.aligned:
        return axis, 1
    known = min(e.known.divisor(place.offsets[last]), e.known.extent(place.texts[last])
                if place.space == "global" else divisor_of(int(place.extents[last])))
    return axis, min(width, known, divisor_of(place.shape[axis]))


def requested_width(e: Emitter, place: MemoryOperand, layout: RegisterLayout,
                    vector: int | None) -> tuple[int, int]:
    """As access_width, where the user (vector=) or the schedule asks for a width; where it is not
    to be had, a note says why."""
    axis, width = access_width(e, place, layout)
    wanted = vector or e.vector
    if wanted is None or wanted == width:
        return axis, width
    if width < wanted:
        why = f"{place.dtype.bits * wanted // 8} bytes are more than an access moves" \
            if place.dtype.bits * wanted > 128 else "its rows are not contiguous" if axis < 0 \
            else f"its tile has {layout.run(axis)} in a lane" if layout.run(axis) < wanted \
            else "no more are surely aligned"
        e.note(f"{place.name}: {width} neighbours at once where {wanted} are asked for: {why}")
    return axis, min(width, wanted)


def limits(e: Emitter, place: MemoryOperand, layout: RegisterLayout,
           axis: int) -> tuple[str, ...] | None:
    """What decides whether base b along a tile axis lies in the tensor, as expressions of 32 bits;
    None: all surely do.

    ('left', n): where b < n.   ('at', start, extent): where 0 <= start + b < extent.
    """
    memory = place.axes[axis]
    offset, extent = place.offsets[memory], place.extents[memory]
    natural = e.known.natural(offset)
    if natural and isinstance(extent, int) and isinstance(offset, Const):
        if int(offset.value) + layout.reach(axis) <= extent:
            return None
    part = e.index(layout, axis)
    start = f"{e.name(offset)} + {part}" if part != "i32(0)" else e.name(offset)
    if is_wide(e, extent):
        near = e.use("near", "use(tiles.near())")
        left = f"{near}(i64({extent} - ({start})))"
        if natural:
            return "left", left
        # start cut to +-NEAR, and what then is left above it: b stays on the same side of both ends
        return "at", f"{near}(i64({start}))", f"i32({near}(i64({start})) + {left})"
    if natural:
        return "left", f"i32({extent} - ({start}))"
    return "at", f"i32({start})", f"i32({extent})"


def is_wide(e: Emitter, extent: str | int) -> bool:
    """Whether an extent, or a distance to its end, may not fit 32 bits."""
    return extent >= 1 << 31 if isinstance(extent, int) else extent in e.wide_extents
