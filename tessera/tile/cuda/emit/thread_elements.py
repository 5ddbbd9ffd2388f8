"""One element for each thread: loads and stores of tensors, shared buffers and arrays of a thread.

What all lanes do alike is written once per group, by its first thread. In checked builds an index
out of range is reported and its access left out; otherwise indices are trusted.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tessera.numerics import DType
from tessera.tile.cuda.emit.emitter import Emitter, intrinsic
from tessera.tile.cuda.emit.memory_operands import FAR, MemoryOperand, bytes_of, place_of
from tessera.tile.cuda.emit.random import rounding_word
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.emit.reports import report
from tessera.tile.cuda.emit.sentinels import watch_element
from tessera.tile.cuda.intrinsics.casts import same_register
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.cuda.intrinsics.narrow_floats import has_instructions
from tessera.tile.cuda.intrinsics.swizzle import Panel, stage_bytes
from tessera.tile.ir.ir import Const, Op, Operand, SSAValue
from tessera.tile.ir.types import is_lane


# --- who takes part -------------------------------------------------------------------------------
def once_per_group(e: Emitter, *operands: Operand) -> bool:
    """Whether all lanes would do the same, so that one does it."""
    return not e.divergent and not any(is_lane(e.type(x)) for x in operands)


def first_lane(e: Emitter) -> str:
    """Whether this is the first thread of its group."""
    return e.once("first_lane", f"i32({e.thread} == 0)")


def conditions(e: Emitter, *texts: str | None) -> str | None:
    """All of them, as one expression; None when there are none."""
    given = [t for t in texts if t is not None]
    if len(given) < 2:
        return given[0] if given else None
    both = e.use("both", "use(thread_elements.both())")
    return f"{both}({given[0]}, {conditions(e, *given[1:])})"


# --- bounds ---------------------------------------------------------------------------------------
def guard(e: Emitter, place: MemoryOperand, index: tuple[Operand, ...]) -> str | None:
    """In checked builds: a condition that the indices lie inside; where not, it is reported."""
    if not e.checked:
        return None
    tests = [_tested(e, place, axis, x) for axis, x in enumerate(index)]
    if place.stage is not None:
        tests.append(_stage_tested(e, place))
    return conditions(e, *tests)


def checked(e: Emitter, place: MemoryOperand) -> MemoryOperand:
    """In checked builds: a tile's place with 0 for an index or stage outside, which is reported.

    A box may reach over the ends of its memory, so only indices that choose a row are looked at.
    """
    if not e.checked:
        return place
    offsets = tuple(x if axis in place.axes else _or_zero(e, x, _tested(e, place, axis, x))
                    for axis, x in enumerate(place.offsets))
    stage = place.stage
    if stage is not None:
        stage = _or_zero(e, stage, _stage_tested(e, place))
    return replace(place, offsets=offsets, stage=stage)


def _or_zero(e: Emitter, x: Operand, ok: str | None) -> Operand:
    """x where it is inside; None: it surely is."""
    if ok is None:
        return x
    made = SSAValue(e.fresh("index"))
    e.types[made], e.spelled[made] = e.type(x), made.name
    e.line(f"{made.name} = {kind_of(e.dtype(x))}({e.name(x)} * {ok})")
    return made


def _tested(e: Emitter, place: MemoryOperand, axis: int, x: Operand) -> str | None:
    size = place.extents[axis]
    if isinstance(x, Const) and isinstance(size, int) and 0 <= x.value < size:
        return None
    return _inside(e, f"index {{}} is outside of '{place.name}': axis {axis} has extent {{}}",
                   x, str(size))


def _stage_tested(e: Emitter, place: MemoryOperand) -> str | None:
    assert place.buffer is not None and place.stage is not None
    stages = place.buffer.stages
    if isinstance(place.stage, Const) and 0 <= place.stage.value < stages:
        return None
    return _inside(e, f"stage {{}} of '{place.name}', which has {{}}", place.stage, str(stages))


def pair_guard(e: Emitter, op: Op, place: MemoryOperand, index: tuple[Operand, ...]) -> str | None:
    """As guard, of two elements from an even one on."""
    ok = guard(e, place, index)
    if not e.checked:
        return ok
    at, axis = index[-1], len(index) - 1
    size, even = str(place.extents[axis]), e.fresh("even")
    e.line(f"{even} = i32({wide(e, at)} & 1 == 0)")
    report(e, f"{even} == 0", f"{op.name} of '{place.name}' from an odd element on", "bounds", [],
           lanes=not once_per_group(e, at))
    message = f"index {{}} is outside of '{place.name}': axis {axis} has extent {{}}"
    return conditions(e, ok, even, _inside(e, message, at, size, 1))


def _inside(e: Emitter, message: str, x: Operand, size: str, more: int = 0) -> str:
    """Whether x + more is below size."""
    ok, at = e.fresh("inside"), wide(e, x) + (f" + {more}" if more else "")
    e.line(f"{ok} = {e.use('inside', 'use(thread_elements.inside(1))')}({at}, i64({size}))")
    report(e, f"{ok} == 0", message, "bounds", [(at, "i64"), (f"i64({size})", "i64")],
           lanes=not once_per_group(e, x))
    return ok


# --- addresses ------------------------------------------------------------------------------------
def wide(e: Emitter, x: Operand) -> str:
    """An index in 64 bits."""
    text = f"i64({e.name(x)})"
    unsigned = e.dtype(x).kind == "uint" and e.dtype(x).bits == 32
    return f"({text} & 0xFFFFFFFF)" if unsigned else text


def narrow(e: Emitter, x: Operand) -> str:
    """An index in 32 bits."""
    return e.name(x) if kind_of(e.dtype(x)) == "i32" else f"i32({e.name(x)})"


def split_constant(e: Emitter, x: Operand) -> tuple[Operand, int]:
    """(y, n) of an index y + n, as far as n is known now."""
    total = 0
    while isinstance(x, SSAValue) and e.dtype(x).kind == "int" and e.dtype(x).bits == 32:
        op = e.made_by.get(x)
        if op is None or op.name not in ("add", "sub") or not isinstance(op.args[1], Const):
            break
        n = int(op.args[1].value)
        x, total = op.args[0], total + (n if op.name == "add" else -n)
    return x, total


def flat(e: Emitter, extents: tuple[str | int, ...], index: tuple[Operand, ...]) -> str:
    """Row-major number of an element, 64 bits. What is known now of the last index is added last:
    instructions have room for it beside an address, of which neighbours then need one."""
    n = 0
    if index:
        last, n = split_constant(e, index[-1])
        index = (*index[:-1], last)
    return _row_major(e, extents, index) + (f" + {n}" if n else "")


def _row_major(e: Emitter, extents: tuple[str | int, ...], index: tuple[Operand, ...]) -> str:
    text = ""
    for n, x in zip(extents, index, strict=True):
        if text:
            text = f"({text}) * {n}"
            text += "" if is_zero(x) else f" + {wide(e, x)}"
        elif not is_zero(x):
            text = wide(e, x)
    return text or "i64(0)"


def is_zero(x: Operand) -> bool:
    return isinstance(x, Const) and x.value == 0


def flat32(e: Emitter, extents: tuple[int, ...], index: tuple[Operand, ...]) -> str:
    """As flat, of a buffer: 32 bits, without the i32() around it."""
    text = ""
    for n, x in zip(extents, index, strict=True):
        text = f"({text}) * {n} + {narrow(e, x)}" if text else narrow(e, x)
    return text or "0"


def row_bytes(e: Emitter, place: MemoryOperand) -> str:
    """Bytes of a row of a packed tensor (numerics.row_bytes)."""
    n, six = place.extents[-1], place.dtype.bits == 6
    if isinstance(n, int):
        return str((n + 3) // 4 * 3 if six else (n + 1) // 2)
    return e.once("row_bytes", f"(i64({n}) + 3 >> 2) * 3" if six else f"i64({n}) + 1 >> 1")


def stage_base(e: Emitter, place: MemoryOperand) -> str:
    """Address of the first byte of a buffer's stage."""
    assert place.buffer is not None
    if place.stage is None:
        return place.base
    return f"{place.base} + {narrow(e, place.stage)} * {stage_bytes(place.buffer)}"


def address(e: Emitter, place: MemoryOperand, index: tuple[Operand, ...]) -> str:
    """The arguments that say where: an address; of packed types that of the row and the element."""
    dtype = place.dtype
    if place.buffer is not None:
        return _shared(e, place, index)
    if dtype.packed:
        row = flat(e, place.extents[:-1], index[:-1])
        start = place.base if row == "i64(0)" else f"{place.base} + ({row}) * {row_bytes(e, place)}"
        return f"{start}, {narrow(e, index[-1])}"
    return f"{place.base} + {bytes_of(dtype, flat(e, place.extents, index))}"


def _shared(e: Emitter, place: MemoryOperand, index: tuple[Operand, ...]) -> str:
    buffer = place.buffer
    assert buffer is not None
    base = stage_base(e, place)
    if buffer.dtype.packed:  # a row of codes is a row of bytes; a swizzle has nothing to permute
        row = flat32(e, buffer.shape[:-1], index[:-1])
        return f"i32({base} + ({row}) * {row_bytes(e, place)}), {narrow(e, index[-1])}"
    if buffer.swizzle is None:
        return f"i32({base} + {bytes_of(place.dtype, flat32(e, buffer.shape, index))})"
    make = e.use("swizzled_element", f"use(thread_elements.swizzled({Panel.of(buffer).text}))")
    row = flat32(e, buffer.shape[:-1], index[:-1])
    element = f"{make}(i32({row}), {narrow(e, index[-1])})"
    return f"i32({base} + {bytes_of(place.dtype, element)})"


# --- the ops --------------------------------------------------------------------------------------
@emits("load_element")
def _load(e: Emitter, op: Op) -> None:
    (made,), place, index = op.outs, place_of(e, op.args[0]), op.args[1:]
    ok = guard(e, place, index)
    if place.space == "register":
        e.define(made, f"{_array(e, place, 'read')}({_array_index(e, place, index, ok)})")
        return
    name = "thread_elements.load_packed" if place.dtype.packed else "thread_elements.load"
    call = e.use(f"load_{place.name}", intrinsic(name, place.space, place.dtype.name,
                                                 guarded=ok is not None,
                                                 hardware=hardware(e, place.dtype)))
    e.define(made, f"{call}({address(e, place, index)}{_last(ok)})")
    watch_element(e, place, address(e, place, index), made.value, ok, "load")


@emits("store_element")
def _store(e: Emitter, op: Op) -> None:
    target, value, *rest = op.args
    place, index = place_of(e, target), tuple(rest)
    ok = guard(e, place, index)
    if place.space == "register":
        x = rounded(e, value, place.dtype)
        where = _array_index(e, place, index, ok)
        if ok is None:
            e.line(f"{_array(e, place, 'write')}({where}, {x})")
            return
        with e.block(f"if {ok} != 0"):
            e.line(f"{_array(e, place, 'write')}({where}, {x})")
        return
    if once_per_group(e, value, *index, *(() if place.rank is None else (place.rank,))):
        ok = conditions(e, first_lane(e), ok)
    at = flat(e, place.extents, index) if place.dtype.packed else address(e, place, index)
    watch_element(e, place, at, value, ok)
    if place.space == FAR and "words" in e.memo:
        send = e.use("send_word", intrinsic("clusters.send_word", place.dtype.name))
        e.line(f"{send}({at}, {e.name(value)}, {place.base}_counts, {ok or 'i32(1)'})")
        return
    options, random = rounding(e, place, index)
    name = "thread_elements.store_packed" if place.dtype.packed else "thread_elements.store"
    call = e.use(f"store_{place.name}", intrinsic(name, place.space, place.dtype.name,
                                                  guarded=ok is not None, **options))
    e.line(f"{call}({address(e, place, index)}, {e.name(value)}{random}{_last(ok)})")


def _last(condition: str | None) -> str:
    return "" if condition is None else f", {condition}"


def hardware(e: Emitter, dtype: DType) -> bool:
    """Whether the target's instructions convert this type."""
    return has_instructions(dtype, e.generation)


def rounding(e: Emitter, place: MemoryOperand, index: tuple[Operand, ...]) -> tuple[dict, str]:
    """(options of the intrinsic that rounds as the tensor's policy says, its random word)."""
    policy, dtype = place.numeric.policy, place.dtype
    if place.buffer is not None or dtype.kind != "float" or dtype.bits >= 32:
        return {}, ""
    options = {"hardware": hardware(e, dtype), "saturate": policy.saturate}
    if policy.rounding == "nearest_even":
        return options, ""
    options["rounding"] = policy.rounding  # type: ignore[assignment]
    if policy.rounding != "stochastic":
        return options, ""
    return options, f", {rounding_word(e, flat(e, place.extents, index))}"


def rounded(e: Emitter, value: Operand, dtype: DType) -> str:
    """A number as one of another type, in a register."""
    if same_register(e.dtype(value), dtype):
        return e.name(value)
    make = e.use(f"to_{dtype}", f"use(casts.cast({e.dtype(value).name!r}, {dtype.name!r}, "
                 "'nearest_even', False))")
    return f"{make}({e.name(value)})"


def _array(e: Emitter, place: MemoryOperand, how: str) -> str:
    assert place.buffer is not None
    return e.use(f"{how}_{place.name}", f"use(thread_elements.{how}({place.base!r}, "
                 f"{kind_of(place.dtype)!r}, {prod(place.buffer.shape)}))")


def _array_index(e: Emitter, place: MemoryOperand, index: tuple[Operand, ...],
                 ok: str | None) -> str:
    """The element; the first one where an index is out of range."""
    assert place.buffer is not None
    at = flat32(e, place.buffer.shape, index)
    return f"i32({at})" if ok is None else f"i32(({at}) * {ok})"
