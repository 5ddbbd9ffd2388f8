"""The quickest calls of a short program: its operands lie on the GPU in memory of ours, its results
are new, and every launch is known by where these lie. Nothing is told to the program, whose steps
stay as the last other call left them; what is not so goes that way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .... import config, hooks
from ....numerics import stored_bytes
from ....runtime.arrays import HOST
from ....runtime.buffer import buffers_of
from ....runtime.flags import error_flags
from ....tile.launch.resident import Resident
from ...placed_leaves import OURS, read_storage
from .placed_launch import PlacedLaunch

if TYPE_CHECKING:
    from .device import DeviceExecutable
    from .workspace import Workspace

class QuickCalls:
    """Those of a program with this memory. May be used while the executable has it, see `hold`."""

    def __init__(self, executable: DeviceExecutable, space: Workspace,
                 launches: Sequence[tuple[PlacedLaunch, Sequence[int]]],
                 beyond: tuple[int, ...], parts: Sequence[tuple[int, int]]):
        """launches: each with the numbers of its pointers among those of the operands, of the
        results, of what the call draws, of parts of these, and those beyond, which are the same in
        all calls.  parts: which of the first, and the byte at which one begins."""
        self.executable, self.space, self.device = executable, space, space.device
        self.beyond, self.parts = beyond, parts
        self.drawn = [*space.drawn.places] if space.program.lowered.drawn else []
        self.sizes = [stored_bytes(r.buffer.shape, r.buffer.type.dtype) for r in space.results]
        self.results = [(r.buffer.shape, r.buffer.type) for r in space.results]
        self.on = _written(self, launches, len(space.program.lowered.inputs))

    @staticmethod
    def of(executable: DeviceExecutable) -> QuickCalls | None:
        """None of a program that does anything but launch kernels on these."""
        space = executable._workspace
        calls = None if space is None else space.repeated
        if space is None or calls is None or space.watched or space.alone:
            return None
        draws = space.drawn
        if calls.drawn and not (calls.by_rows and all(n in draws.places for n in draws.names)):
            return None
        # What a function of ops captures from the host are constants that it makes: they stay.
        if any(x.place != HOST or name not in space.own for name, x in calls.captures):
            return None
        if executable._node_kernels or executable.copies.copies or calls.over or calls.given or \
                calls.copied or not all(type(step) is PlacedLaunch for step in space.steps):
            return None
        names = [*space.program.lowered.inputs, *(r.base for r in space.results),
                 *(draws.places if calls.drawn else ())]
        if len({*names}) != len(names):
            return None
        at = {id(place): (names.index(base), begin) for base, places in space.arrays.items()
              if base in names for place, begin in places}
        beyond: list[int] = []
        parts = list(dict.fromkeys(p for p in at.values() if p[1]))
        found = []
        for launch in space.steps:
            assert type(launch) is PlacedLaunch
            if not launch.by_pointers:
                return None
            numbers = []
            for place in launch.places:
                which = at.get(id(place))
                if which is None:  # a temporary, a constant
                    numbers.append(len(names) + len(parts) + len(beyond))
                    beyond.append(place.pointer)
                else:
                    numbers.append(len(names) + parts.index(which) if which[1] else which[0])
            found.append((launch, numbers))
        return QuickCalls(executable, space, found, tuple(beyond), parts)

    def hold(self) -> bool:
        """Whether the settings are those of these calls."""
        return config.numerics == "off" and not (
            hooks.timed_steps or config.nvtx or config.debug) and \
            self.executable._workspace is self.space

    def run(self, operands: Sequence[Any]) -> Sequence[Resident] | None:
        """The results; None where nothing has run."""
        memories = [x._storage if type(x) is Resident else None for x in operands]
        if not OURS.issuperset(map(type, memories)):
            if None in memories:
                return None
            memories = read_storage(operands)
            if not OURS.issuperset(map(type, memories)):
                return None
        return self.on(memories)


_RUN = """\
def quick(scope):
    {names} = scope

    def run(memories):
        if words[0]:
            return None
        {operands} = memories
{lines}
        return ({results})
    return run
"""


def _written(calls: QuickCalls, launches: Sequence[tuple[PlacedLaunch, Sequence[int]]],
             inputs: int) -> Callable[[Sequence[Any]], Sequence[Resident] | None]:
    """A function of the memories of the operands, with no loop over what a program has few of: in
    loops they took twice the time. Nothing here needs the device's context: memory is made in it, a
    launch that is refused in another is made again in it (LoadedKernel.again), and to ask for the
    current one each time takes a tenth of a call."""
    results, on = range(len(calls.results)), calls.device
    drawn = [f"d{i}" for i in range(len(calls.drawn))]
    names = [*(f"m{i}.pointer" for i in range(inputs)), *(f"r{j}.pointer" for j in results), *drawn,
             *(f"part{k}" for k in range(len(calls.parts))), *map(str, calls.beyond)]
    scope: dict[str, Any] = {
        "words": error_flags(on.index).words, "new": Resident.__new__, "Resident": Resident,
        "lock": calls.executable._lock, "draw": functools.partial(calls.space.draw, True)}
    own = dict(zip(drawn, calls.space.drawn.own, strict=False))  # as good as where they will lie
    made = [f"r{j} = make{j}()" for j in results]
    found: list[str] = []
    launched: list[str] = []
    tensors: list[str] = []
    for k, (i, begin) in enumerate(calls.parts):
        (launched if names[i] in drawn else found).append(f"part{k} = {names[i]} + {begin}")
        if names[i] in drawn:
            own[f"part{k}"] = own[names[i]] + begin
    for n, (launch, numbers) in enumerate(launches):
        scope[f"known{n}"] = launch.known
        given = "".join(f"{names[i]}, " for i in numbers)
        told = "".join(f"{names[i]}, " for k, i in enumerate(numbers) if k not in launch.alike)
        scope[f"learn{n}"] = launch.learn
        alike = "".join(f"{own.get(names[i], names[i])}, " for i in numbers)
        found += [f"start{n} = known{n}(({told}))", f"if start{n} is None:", "    with lock:",
                  f"        start{n} = learn{n}(({alike}), ({told}))",
                  f"if start{n}.quick is None:", "    return None"]
        launched.append(f"start{n}.quick(0, {given})")
    if drawn:  # behind all that may send the call another way: it takes a step
        launched = [f"{', '.join(drawn)}, = draw()", *launched]
    if len(launches) > 1 or drawn:  # they must not mix with those of others
        launched = ["with lock:", *("    " + line for line in launched)]
    for j in results:
        scope[f"make{j}"] = buffers_of(calls.sizes[j], on)
        scope[f"shape{j}"], scope[f"type{j}"] = calls.results[j]
        tensors += [f"y{j} = new(Resident)", f"y{j}._shape = shape{j}", f"y{j}.type = type{j}",
                    f"y{j}._storage = r{j}", f"y{j}._is_param = False",
                    f"y{j}._scale = y{j}._name = y{j}.narrow = y{j}.origin = None"]

    lines = [*made, *found, *launched, *tensors]
    text = _RUN.format(
        names=", ".join(scope) + ",", operands="".join(f"m{i}, " for i in range(inputs)) or "()",
        lines="\n".join(" " * 8 + line for line in lines),
        results="".join(f"y{j}, " for j in results))
    return _compiled(text)(tuple(scope.values()))


@functools.lru_cache(256)
def _compiled(text: str) -> Callable[[tuple], Callable[[Sequence[Any]], Any]]:
    scope: dict[str, Any] = {}
    exec(compile(text, "<a quick call>", "exec"), scope)
    return scope["quick"]


__all__ = ["QuickCalls"]
