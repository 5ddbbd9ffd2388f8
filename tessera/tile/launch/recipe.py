"""A recipe is everything about a launch that types, shapes, constants and alignment decide.

    recipe.run(stream, values, objects)

`values` are what still differs from call to call, in the order of the signature: pointers of the
arrays, and numbers. `objects` are the arguments themselves, for kernels that return one. Running
allocates nothing but results and waits for nothing but numbers, so it may be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from math import prod
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, user_line
from tessera.lazy_dataclass import dataclass
from tessera.numerics import DType, NumericType
from tessera.numerics.random_state import next_launch
from tessera.runtime import flags
from tessera.runtime.arrays import Array, dense_strides, overlap, stream_of
from tessera.runtime.buffer import lasts
from tessera.runtime.counter_words import counter_words
from tessera.runtime.device import check, device, driver
from tessera.runtime.replays import Replays
from tessera.runtime.tensormap import ImageWindows, rewritten, tensor_map
from tessera.runtime.timing import is_capturing
from tessera.tile.interpreter.arguments import Bound
from tessera.tile.interpreter.launch import extent
from tessera.tile.ir.types import GlobalTensor
from tessera.tile.launch.machine_code import Image, Slot
from tessera.tile.launch.results import NAN_BYTE, WAITED_FOR, Maker, maker, numbers
from tessera.tile.launch.sentinels import LaunchSentinels, RunAgain
from tessera.tile.passes.random_draws import draws

MOST_BLOCKS = 2**31 - 1  # CUDA C++ Programming Guide, table of compute capabilities, x of a grid
KNOWN = 1024  # values of launches of one recipe whose descriptors are known
FOUND = frozenset({"map", "counter"})  # parameters that follow from pointers and stream
QUICK_KINDS = frozenset({"tensor", "scalar", "dim", "axis", "groups"}) | FOUND


@dataclass
class PendingLaunch:
    """One launch while its parameters are gathered."""

    stream: int
    values: Sequence[Any]
    outputs: dict[str, Any]
    pinned: bool = False  # captured in a graph: what it points to must stay
    key: tuple[int, int] = (0, 0)  # by which it draws
    replays: Replays | None = None  # of a captured launch that draws


Source = Callable[[PendingLaunch], Any]


@dataclass(frozen=True)
class LaunchTarget:
    """Where and how large: the device, the extents of the grid, and the library of the arrays."""

    index: int
    grid: tuple[int, ...]
    library: str
    debug: bool = False
    numerics: str = "off"


class Recipe:
    """One way to launch one image. varying: the parameters whose values are passed to `run`.

    quick: (stream, *values) -> None, when the values are the parameters and there is nothing to do
    but launch; then the call returns returned(objects), where there are any. words[0]: a kernel
    reported, and `run` raises it.

    The code may rely on arrays that lie apart, of which it writes one. arrays: their names; spans:
    their bytes in order; written: which it writes; reach: at distances from this on they surely do,
    0 when it does not matter.  apart: pointers that were seen to.  shared: arrays that may share
    memory with others.  twins: for others that do, by these.
    """

    spans: tuple[int, ...] = ()
    written: tuple[bool, ...] = ()
    reach = 0
    apart: tuple[int, ...] = ()
    arrays: tuple[str, ...] = ()

    def __init__(self, image: Image, bound: Bound, target: LaunchTarget, varying: tuple[str, ...],
                 objects: tuple[str, ...], run_again: RunAgain | None = None):
        self.image, self.target, self.device = image, target, target.index
        self.shared = image.request.shared
        self.twins: dict[frozenset[str], Recipe] = {}
        self.current = stream_of(target.library)
        self.words = flags.error_flags(target.index).words
        self._kind, self._results = image.function.result[0], image.function.result[1:]
        self.returns = [objects.index(n) for n in self._results] if self._kind == "param" else []
        self._makers: dict[str, Maker] = {}
        self._known: dict[tuple, list[Any]] = {}  # parameters by values
        self._seen = 0
        self._numbers = numbers(target.index)
        self._numerics = self._declare_outputs(bound)
        self._sources: list[Source] = []
        kinds = {s.kind for s in image.slots}
        self._waits = target.debug and "claim" in kinds
        self._prints = "lines" in kinds
        self._sentinels = LaunchSentinels(
            image, bound, self.device, target.numerics == "raise", objects, run_again
        ) if "sentinels" in kinds else None
        self._pins = bool(kinds & {"map", "counter", "replays"})
        self._kernel, self._draws = bound.kernel, draws(image.function)
        self._start = self._prepare(bound, varying)
        plain = self._start and not (self._sources or self._waits or self._prints)
        self.quick = self._start if plain and self._kind in ("none", "param") else None
        if self._start and kinds & FOUND and kinds <= QUICK_KINDS and self._kind in ("none",
                                                                                     "param"):
            self.quick = self._with_found

    # --- writing it -----------------------------------------------------------------------------
    def _declare_outputs(self, bound: Bound) -> dict[str, NumericType]:
        found: dict[str, NumericType] = {}
        for p in self.image.function.params:
            if p.role == "output":
                assert isinstance(p.type, GlobalTensor)
                if self._kind == "tensor":
                    shape = tuple(extent(str(d), bound) for d in p.type.dims)
                    self._makers[p.value.name] = maker(self.target.library, shape, p.type.numeric,
                                                       self.device)
                found[p.value.name] = p.type.numeric
        return found

    def _prepare(self, bound: Bound, varying: tuple[str, ...]) -> Callable[..., None] | None:
        """The prepared launch, and the sources of its values; None when there are no groups."""
        groups = prod(self.target.grid)
        if not groups:
            return None
        fixed: dict[int, float] = {}
        given: list[int] = []
        plain: dict[int, int] = {}  # parameter -> which of the varying values it is
        sources: list[Source] = []
        for i, slot in enumerate(self.image.slots):
            if slot.kind in ("tensor", "scalar") and slot.name in varying:
                plain[i] = varying.index(slot.name)
                given.append(i)
                sources.append(_value(plain[i]))
            elif slot.kind in SOURCES:
                given.append(i)
                sources.append(SOURCES[slot.kind](self, slot, bound, varying))
            else:
                fixed[i] = as_signed(FIXED[slot.kind](self, slot, bound), slot.abi)
        if sorted(plain.values()) == list(range(len(varying))) and len(plain) == len(given):
            given.sort(key=plain.__getitem__)  # the values go straight into the parameters
        else:
            self._sources = sources
        return self.image.code.prepare((self._blocks(groups),), fixed, given, device=self.device)

    def _blocks(self, groups: int) -> int:
        blocks = groups
        form, spare, strip, beside = (*self.image.grid.split("-"), "", "", "")[:4]
        if form == "persistent":
            together = self.image.code.cluster[0]
            free = device(self.device).multiprocessors - int(spare or 0)
            most = max(free * int(beside or 1) // together, 1)
            if together > 1:  # one more than run at once would begin when the others are done
                most = min(most, self.image.code.on(self.device).clusters)
                if strip == "each":
                    return min(groups, most) * together
                side_by_side = self.target.grid[int(strip)]  # a cluster may be over their end
                groups = groups // side_by_side * -(-side_by_side // together) * together
            blocks = min(groups // together, most) * together
        elif form == "clusters":
            blocks = groups * self.image.code.cluster[0]
        if blocks > MOST_BLOCKS:
            raise ArgumentError(f"{self.image.function.name}: {blocks} groups, a launch has at "
                                f"most {MOST_BLOCKS}", hint="give each group more to do",
                                where=user_line())
        return blocks

    def at(self, pointers: Sequence[int]) -> Recipe | None:
        """The recipe for arrays that begin there; None: there is none yet."""
        shared = frozenset(self.arrays[i] for i in overlap(
            list(zip(pointers, self.spans, strict=True)), self.written))
        if not shared <= self.shared:
            return self.twins.get(shared)
        self.apart = tuple(pointers)
        return self

    # --- running it -----------------------------------------------------------------------------
    def run(self, stream: int, values: Sequence[Any], objects: Sequence[Any],
            foreign: bool = False, key: tuple[int, int] | None = None) -> Any:
        """Any launch. foreign: the stream is not the current one of the arrays' library. key: by
        which it draws, else that of the kernel's next launch."""
        flags.error_flags(self.device).check()
        looked = self._sentinels if self._sentinels and self._sentinels.waits() else None
        captured = (self._waits or self._prints or self._pins or self._kind == "scalar"
                    or looked is not None) and self._is_captured(stream)
        call = PendingLaunch(stream, values, self._outputs(stream, foreign, captured), captured)
        if self._draws:
            call.key = key or next_launch(self._kernel or self.image.function.name)
            call.replays = Replays(self.device) if captured else None
        looked = None if captured else looked
        kept = looked.before(objects) if looked else {}
        if self._start is not None:
            given = [source(call) for source in self._sources] if self._sources else values
            self._start(stream, *given)
        if call.replays is not None:
            call.replays.advance(stream)
        if self._kind == "scalar" or (not captured and (self._waits or self._prints or looked or (
                self._kind == "tensor" and self.target.library in WAITED_FOR))):
            self.wait(stream)
        if looked is not None:
            looked.after(objects, kept, call.key)
        return self._result(call, objects)

    def _with_found(self, *call: Any) -> None:
        """A launch (stream, *values) of which only descriptors and a counter have to be found:
        those of the same call are known, until slots are written anew. The default stream is never
        captured."""
        assert self._start is not None
        stream = call[0]
        pinned = stream != 0 and is_capturing(stream)
        if self._seen != (now := rewritten(self.device)) or len(self._known) >= KNOWN:
            self._known.clear()
            self._seen = now
        given = None if pinned else self._known.get(call)
        if given is None:
            pending = PendingLaunch(stream, call[1:], {}, pinned)
            given = [source(pending) for source in self._sources]
            if not pinned:
                self._known[call] = given
        self._start(stream, *given)

    def _is_captured(self, stream: int) -> bool:
        captured = is_capturing(stream)
        if captured and self._kind == "scalar":
            raise ArgumentError(
                f"{self.image.function.name} returns a number, which is read back: it cannot be "
                "captured in a graph", hint="let it write the number into a tensor",
                where=user_line())
        return captured

    def _outputs(self, stream: int, foreign: bool, captured: bool) -> dict[str, Any]:
        if self._kind == "scalar":
            return {name: self._numbers.take() for name in self._results}
        made = {name: make(stream if foreign else None) for name, make in self._makers.items()}
        for name, output in made.items():
            if self._start is None:
                output.fill(0, stream)
            elif self.target.debug and self._numerics[name].dtype.kind == "float":
                output.fill(NAN_BYTE, stream)
        return made

    def wait(self, stream: int) -> None:
        """Wait for the stream; then raise what was reported and print what was printed."""
        with device(self.device).current():
            check(driver().cuStreamSynchronize(stream), f"run {self.image.function.name}")
        flags.error_flags(self.device).check()
        if self._prints:
            for line in flags.printed_lines(self.device).take():
                print(line)

    def _result(self, call: PendingLaunch, objects: Sequence[Any]) -> Any:
        if self._kind not in ("scalar", "tensor"):
            return self.returned(objects)
        found = tuple(self._numbers.give(call.outputs[n], self._numerics[n].dtype)
                      if self._kind == "scalar" else call.outputs[n].array for n in self._results)
        return found[0] if len(found) == 1 else found

    def returned(self, objects: Sequence[Any]) -> Any:
        """The arguments that the kernel returns: one bare, several as a tuple, or None."""
        found = tuple(objects[i] for i in self.returns)
        return found[0] if len(found) == 1 else found or None


# --- parameters that a recipe decides ----------------------------------------------------------
def as_signed(value: Any, abi: str) -> Any:
    """Unsigned words as the signed ones of the parameter."""
    if abi[0] == "f":
        return float(value)
    bits = int(abi[1:])
    value = int(value)
    return value - (1 << bits) if value >= 1 << (bits - 1) else value


def _extent(recipe: Recipe, slot: Slot, bound: Bound) -> int:
    """A product of extents is held in 32 bits; one that has a name in as many as it needs."""
    size = extent(slot.name, bound)
    if slot.abi == "i32" and size >= 2**31:
        raise ArgumentError(f"{recipe.image.function.name}: the extent {slot.name} = {size} does "
                            "not fit 32 bits", where=user_line(),
                            hint="give it a name of its own in the annotation")
    return size


Fixed = Callable[[Recipe, Slot, Bound], Any]
FIXED: dict[str, Fixed] = {
    "dim": _extent,
    "scalar": lambda r, s, b: np.asarray(b.values[s.name]).item(),
    "axis": lambda r, s, b: r.target.grid[s.axis] if s.axis < len(r.target.grid) else 1,
    "groups": lambda r, s, b: prod(r.target.grid),
    "claim": lambda r, s, b: flags.error_flags(r.device).claim,
    "report": lambda r, s, b: flags.error_flags(r.device).report,
    "count": lambda r, s, b: flags.printed_lines(r.device).count,
    "lines": lambda r, s, b: flags.printed_lines(r.device).lines,
    "kernel": lambda r, s, b: r.image.key,
}


# --- and those that each launch decides --------------------------------------------------------
def _value(i: int) -> Source:
    return lambda call: call.values[i]


def _output(recipe: Recipe, slot: Slot, bound: Bound, varying: tuple[str, ...]) -> Source:
    return lambda call: call.outputs[slot.name].pointer


def _map(recipe: Recipe, slot: Slot, bound: Bound, varying: tuple[str, ...]) -> Source:
    """The descriptor for boxes of a tensor. Rows of 128, 64 or 32 bytes are swizzled as wide."""
    dtype, shape = _layout_of(recipe.image, slot.name, bound)
    strides, index, windows = dense_strides(shape), recipe.device, None
    if slot.windows:
        image, first, last, stride, (row, pixel) = slot.windows
        windows = ImageWindows(first, last, stride)  # type: ignore[arg-type]
        strides = image[0] * row, row, pixel, 1
        shape = (prod(shape) // strides[0], *image)
    row = slot.box[-1] * dtype.numpy.itemsize
    swizzle = row if row in (32, 64, 128) else 0
    at = varying.index(slot.name) if slot.name in varying else None
    if 0 in shape:  # there is nothing to describe, and no iteration of a loop that would ask for it
        return lambda call: 0

    def find(call: PendingLaunch) -> int:
        pointer = call.outputs[slot.name].pointer if at is None else call.values[at]
        array = Array(pointer, shape, strides, dtype, index, "", None)
        return tensor_map(array, slot.name, box=slot.box, swizzle_bytes=swizzle,
                          pinned=call.pinned, windows=windows)

    return find


def _layout_of(image: Image, name: str, bound: Bound) -> tuple[DType, tuple[int, ...]]:
    (kind,) = [p.type for p in image.function.params if p.value.name == name]
    assert isinstance(kind, GlobalTensor)
    return kind.dtype, tuple(extent(str(d), bound) for d in kind.dims)


def _seed(recipe: Recipe, slot: Slot, bound: Bound, varying: tuple[str, ...]) -> Source:
    """A word of the launch's key: the same that the interpreter takes."""
    return lambda call: as_signed(call.key[slot.axis], slot.abi)


def _replays(recipe: Recipe, slot: Slot, bound: Bound, varying: tuple[str, ...]) -> Source:
    return lambda call: call.replays.pointer if call.replays else 0


@dataclass
class Counters:
    """The words with which the launches of one recipe count: one for each stream of launches, which
    run one after another.

    What is recorded on a stream of ours runs on the default one, so it is such a stream too. The
    graph of somebody else may be replayed at any time and beside others: each of its launches has
    a word of its own.
    """

    index: int
    words: dict[int, int] = field(default_factory=dict)

    def take(self, call: PendingLaunch) -> int:
        if call.pinned and not lasts(call.stream):
            return counter_words(self.index).new()
        word = self.words.get(call.stream)
        if word is None:
            word = self.words[call.stream] = counter_words(self.index).new()
        return word


def _sentinels(recipe: Recipe, slot: Slot, bound: Bound, varying: tuple[str, ...]) -> Source:
    assert recipe._sentinels is not None
    sentinels = recipe._sentinels
    return lambda call: sentinels.words()


def _counter(recipe: Recipe, slot: Slot, bound: Bound, varying: tuple[str, ...]) -> Source:
    return Counters(recipe.device).take


SOURCES: Mapping[str, Callable[[Recipe, Slot, Bound, tuple[str, ...]], Source]] = {
    "tensor": _output, "map": _map, "seed": _seed, "replays": _replays, "counter": _counter,
    "sentinels": _sentinels}
