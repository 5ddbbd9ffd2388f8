"""A tile from one layout to another: by picking registers, by shuffles, or through shared memory.

A layout is a permutation of index bits, so what a thread needs is decided bit by bit. Where every
thread bit of the old layout is a replica or stays where it was, the thread already has what it
needs. Where only lane bits change, lanes of a warp exchange. Else the elements go through shared
memory, at addresses that are linear in the index bits and conflict-free on both sides. Narrow
elements that one thread has before and another after go together, as many as a word has.
"""

from __future__ import annotations

from math import prod

from tessera.numerics import DType, find_dtype
from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.instruction import kind_bytes
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.cuda.intrinsics.layout_conversion import Route, rounds_of
from tessera.tile.cuda.lower import assign_layouts  # noqa: F401  declares what is emitted here
from tessera.tile.ir.ir import Op
from tessera.tile.ir.register_layout import Bit, RegisterLayout

MOST_SHUFFLES = 16  # more instructions than this, and shared memory is quicker
POOL_BYTES = 32768  # of one round through shared memory
WORD = find_dtype("uint32")


@emits("convert_layout")
def _convert_layout(e: Emitter, op: Op) -> None:
    (x,), (made,) = op.args, op.outs
    before, after, dtype = e.layout(x), e.layout(made.value), e.dtype(x)
    bits = _word_bits(Route(before, after), dtype) if op.attr.get("stored") else ()
    text = e.name(x)
    if bits:
        put = e.use("together", f"use(layout_conversion.together({_named(before, bits, dtype)}))")
        text, dtype = f"{put}({text})", WORD
    text = convert_layout(e, text, before.without(bits), after.without(bits), dtype)
    if bits:
        get = e.use("apart", "use(layout_conversion.apart("
                    f"{_named(after, bits, e.dtype(x))}))")
        text = f"{get}({text})"
    e.define(made, text)


def _word_bits(route: Route, dtype: DType) -> tuple[Bit, ...]:
    """The index bits of elements that share a word on the way: registers on both sides."""
    floats = dtype.kind == "float" and dtype.bits == 8  # held as numbers: no codes of them again
    whole = all(n & n - 1 == 0 for n in route.before.shape)
    if route.kind != "block" or floats or not whole:
        return ()
    return route.shared_registers[:{8: 2, 16: 1}.get(dtype.bits, 0)]


def _named(layout: RegisterLayout, bits: tuple[Bit, ...], dtype: DType) -> str:
    return f"{layout.text!r}, {layout.shape}, {bits}, {dtype.name!r}"


def convert_layout(e: Emitter, text: str, before: RegisterLayout, after: RegisterLayout,
                   dtype: DType) -> str:
    """The fragment `text` of a layout as a fragment of another layout of the same shape."""
    if before == after:
        return text
    route = Route(before, after)
    head = f"{before.text!r}, {after.text!r}, {after.shape}, {kind_of(dtype)!r}"
    if route.kind == "thread" and not route.choices:
        indices = route.indices()
        if indices == tuple(range(before.count)):
            return text
        if all(i is not None for i in indices):
            return f"{e.use('pick', f'use(fragments.pick({indices}))')}({text})"
    shuffles = MOST_SHUFFLES if e.warp_bits else 0
    if route.kind == "thread" or (route.kind == "warp" and route.shuffles <= shuffles):
        make = e.use("exchanged", f"use(layout_conversion.exchanged({head}))")
        return f"{make}({text}, {e.thread})"
    return _through_memory(e, text, route, head, dtype)


def _through_memory(e: Emitter, text: str, route: Route, head: str, dtype: DType) -> str:
    """Rounds of: write, barrier, read."""
    size = kind_bytes(kind_of(dtype))
    rounds = rounds_of(route, size, POOL_BYTES)
    at, used = pool(e, route.bytes(size, rounds))
    owner = e.owner(route.before)
    parts = []
    for step in range(1 << rounds):
        if used or step:
            e.sync()
        put = e.use("put", f"use(layout_conversion.put({head}, {rounds}, {step}, "
                    f"{owner is not None}))")
        e.line(f"{put}({', '.join([text, at, e.thread, *([owner] if owner else [])])})")
        e.sync()
        get = e.use("get", f"use(layout_conversion.get({head}, {rounds}, {step}))")
        parts.append(e.fresh("part"))
        e.line(f"{parts[-1]} = {get}({at}, {e.thread})")
    if len(parts) == 1:
        return parts[0]
    order = route.joined(size, rounds)
    whole = f"{e.use('join', f'use(fragments.join({len(parts)}))')}({', '.join(parts)})"
    return f"{e.use('pick', f'use(fragments.pick({order}))')}({whole})"


def pool(e: Emitter, size: int) -> tuple[str, bool]:
    """(address, whether somebody may still read it) of shared bytes that all exchanges share."""
    if e.pool is None or e.pool[1] < size:
        e.pool = (e.scratch(size), size)
        return e.pool[0], e.loops > 0
    return e.pool[0], True


def through_shared(e: Emitter, text: str, before: RegisterLayout, after: RegisterLayout,
                   dtype: DType) -> str:
    """A reshape: the elements in row-major order, as a fragment of `after` of another shape."""
    free = before.reshaped(after.shape)
    if free is not None:
        order = tuple(before.number[_unflat(_flat(base, after.shape), before.shape)]
                      for base in free.bases)
        if order != tuple(range(before.count)):
            text = f"{e.use('pick', f'use(fragments.pick({order}))')}({text})"
        return convert_layout(e, text, free, after, dtype)
    return _by_rows(e, text, before, after, dtype)


def from_owners(e: Emitter, text: str, layout: RegisterLayout, dtype: DType) -> str:
    """What the first thread of each element has, in all threads that hold it."""
    return _by_rows(e, text, layout, layout, dtype)


def _by_rows(e: Emitter, text: str, before: RegisterLayout, after: RegisterLayout,
             dtype: DType) -> str:
    kind = kind_of(dtype)
    size = kind_bytes(kind)
    at, used = pool(e, size * prod(before.shape))
    if used:
        e.sync()
    owner = e.owner(before)
    put = e.use("put_rows", f"use(layout_conversion.put_rows({before.text!r}, {before.shape}, "
                f"{kind!r}, {owner is not None}))")
    e.line(f"{put}({', '.join([text, at, *indices(e, before), *([owner] if owner else [])])})")
    e.sync()
    get = e.use("get_rows", f"use(layout_conversion.get_rows({after.text!r}, {after.shape}, "
                f"{kind!r}))")
    made = e.fresh("reshaped")
    e.line(f"{made} = {get}({', '.join([at, *indices(e, after)])})")
    return made


def indices(e: Emitter, layout: RegisterLayout) -> list[str]:
    """The thread part of the index along every axis."""
    return [e.index(layout, axis) for axis in range(len(layout.shape))]


def _flat(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    at = 0
    for i, n in zip(index, shape, strict=True):
        at = at * n + i
    return at


def _unflat(at: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    out = []
    for n in reversed(shape):
        out.append(at % n)
        at //= n
    return tuple(reversed(out))


__all__ = ["convert_layout", "from_owners", "indices", "pool", "through_shared"]
