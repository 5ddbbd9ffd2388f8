"""How a thread reaches its elements of a tile in memory: the index, the guards, the rounding."""

from __future__ import annotations

from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.memory_operands import MemoryOperand, limits
from tessera.tile.ir.register_layout import RegisterLayout

PLAIN = ("nearest_even", False)


def rounding_of(place: MemoryOperand) -> tuple[str, bool]:
    """(rounding, saturate) of a store; those of 32 bits and more, and integers, store bits."""
    policy = place.numeric.policy
    rounded = place.dtype.kind == "float" and place.dtype.bits <= 16
    return (policy.rounding, policy.saturate) if rounded else PLAIN


def parts_of(e: Emitter, place: MemoryOperand, layout: RegisterLayout) -> list[str | None]:
    """The thread part of the index, per memory axis."""
    assert place.windows is None, f"{place.name}: windows have no index of their elements"
    parts: list[str | None] = [None] * len(place.extents)
    for axis, memory in enumerate(place.axes):
        parts[memory] = e.index(layout, axis)
    return parts


def guards_of(e: Emitter, place: MemoryOperand, layout: RegisterLayout) -> tuple[tuple[str, ...],
                                                                                 list[str]]:
    """How each axis is guarded, and what the guards compare with."""
    assert place.windows is None, f"{place.name}: windows have no bounds of their own"
    guards, bounds = [], []
    for axis in range(len(layout.shape)):
        found = limits(e, place, layout, axis)
        guards.append(found[0] if found else "")
        if found is None:
            overhang = layout.overhangs(axis)
            if overhang:
                guards[-1] = "left"
                bounds.append(f"i32({layout.shape[axis]} - {e.index(layout, axis)})")
            continue
        if layout.overhangs(axis):
            _overhanging(e, layout, axis, found, bounds)
            continue
        bounds += found[1:]
    return tuple(guards), bounds


def _overhanging(e: Emitter, layout: RegisterLayout, axis: int, found: tuple[str, ...],
                 bounds: list[str]) -> None:
    """The box ends before the registers do, and perhaps the tensor before the box."""
    box = f"i32({layout.shape[axis]} - {e.index(layout, axis)})"
    smaller = e.use("smaller", "use(elementwise.operation('minimum', 'i32'))")
    if found[0] == "left":
        bounds.append(f"{smaller}({found[1]}, {box})")
        return
    # 0 <= start + b < min(extent, offset + box): the end of the box is start + box, by threads
    bounds += [found[1], f"{smaller}({found[2]}, i32({found[1]} + {box}))"]
