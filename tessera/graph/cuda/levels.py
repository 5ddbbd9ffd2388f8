"""Schedule, Tile and Target level of a graph function, each line with the op that it came from.

Nothing here needs a GPU. The Target's source needs no compiler either; PTX and machine code do.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ... import config
from ...lazy_dataclass import dataclass
from ...runtime.device import device, has_gpu
from ...runtime.target import DEFAULT_TARGET, Target, parse_target
from ...tile.ir.printing import print_ir
from ...tile.launch.compile_images import WantedImage, compile_images
from ...tile.launch.machine_code import image_for
from ..ir import Graph
from .kernels.kernel_text import Origin, mark
from .launch_forms import emitted_of, request_of
from .launch_plan import LaunchPlan, annotated, plan_of
from .program.node_kernels import NodeLaunch
from .program.run import CudaProgram, GroupLaunch

_programs: weakref.WeakKeyDictionary[Graph, dict[tuple[Any, ...], CudaProgram]] = \
    weakref.WeakKeyDictionary()  # by target and the settings that choose kernels


def program_of(graph: Graph, target: str | None = None) -> CudaProgram:
    """The lowered graph, kept as long as the graph. Raises UnsupportedTargetError."""
    made, at = _programs.setdefault(graph, {}), target_named(target)
    key = at, config.determinism, config.numerics, config.debug
    if key not in made:
        made[key] = CudaProgram(graph, at)
    return made[key]


@dataclass(frozen=True)
class LevelLine:
    """A line of a level. ops: ids of the graph's ops that it does; at: the group's name."""

    text: str
    ops: tuple[str, ...] = ()
    at: str = ""


def target_named(target: str | None) -> Target:
    """The target asked for; else this machine's GPU, else sm_90a."""
    if target is not None and target != "cuda":
        return parse_target(target)
    return device().target if has_gpu() else parse_target(DEFAULT_TARGET)


# --- schedule ---------------------------------------------------------------------------------
def schedule_lines(program: CudaProgram) -> list[LevelLine]:
    """The Schedule IR with what each launch computes and moves, and how; a line of a group belongs
    to the step that it shows."""
    return [LevelLine(line.text, line.ops, line.at) for line in annotated(program)]


# --- tile -------------------------------------------------------------------------------------
def tile_lines(program: CudaProgram) -> list[LevelLine]:
    """The Tile IR of each group's kernel."""
    out: list[LevelLine] = []
    for launch in program.launches:
        out.append(LevelLine(f"// {launch.group.name}: {' '.join(launch.group.ops)}"))
        for text in print_ir(launch.kernel.function()).splitlines():
            out.append(_linked(launch, text, "//"))
    return out


_LINK = re.compile(r"  // (.*):(\d+)$")


def _linked(launch: GroupLaunch | NodeLaunch, text: str, comment: str) -> LevelLine:
    found = _LINK.search(text)
    if found is None:
        return LevelLine(text, at=launch.group.name)
    origin = origin_of(launch, found[1], int(found[2]))
    return LevelLine(f"{text[:found.start()]}  {comment} {_launch_title(launch, origin)}".rstrip(),
                     origin.ops, launch.group.name)


def origin_of(launch: GroupLaunch | NodeLaunch, file: str, line: int) -> Origin:
    """The ops that a line of a kernel does: of the library's own lines those of the anchor; of
    lines that say where the group works, all of the group's."""
    if file != launch.source.file:
        anchor = launch.group.steps[0]
        return Origin(anchor.ops, anchor.where)
    return launch.source.origins.get(line) or Origin(launch.group.ops, None)


def _launch_title(launch: GroupLaunch | NodeLaunch, origin: Origin) -> str:
    if origin.where is None and origin.ops == launch.group.ops:
        return launch.group.name
    return mark(origin.ops, origin.where)


# --- target -----------------------------------------------------------------------------------
def target_lines(program: CudaProgram) -> list[LevelLine]:
    """The emitted Numba-CUDA source of each group, below what was decided."""
    out: list[LevelLine] = []
    for launch in program.launches:
        emitted = emitted_of(launch, program.target)
        name = launch.group.name
        out.append(LevelLine(f"# {name}: {' '.join(launch.group.ops)}"))
        out += [LevelLine(f"# {note}", at=name) for note in emitted.notes]
        for i, text in enumerate(emitted.source.rstrip("\n").splitlines(), 1):
            out.append(_emitted_line(launch, text, emitted.lines.get(i)))
    return out


def _emitted_line(launch: GroupLaunch | NodeLaunch, text: str,
                  at: tuple[str, int] | None) -> LevelLine:
    if at is None:
        return LevelLine(text, at=launch.group.name)
    origin = origin_of(launch, *at)
    bare = text.split(f"  # {at[1]}: ")[0]
    return LevelLine(f"{bare}  # {_launch_title(launch, origin)}".rstrip(), origin.ops,
                     launch.group.name)


def ptx_lines(program: CudaProgram) -> list[LevelLine]:
    """The PTX of each group. Raises UnsupportedTargetError without the compiler."""
    return list(_compiled(program, lambda c: c.built.ptx))


def sass_lines(program: CudaProgram) -> list[LevelLine]:
    """The machine code of each group. Raises UnsupportedTargetError without the compiler."""
    return list(_compiled(program, lambda c: c.built.sass()))


def _compiled(program: CudaProgram, read: Callable[[Any], str]) -> Iterator[LevelLine]:
    compile_images(WantedImage(launch.kernel.function(), request_of(launch, program.target), {})
                   for launch in program.launches)
    for launch in program.launches:
        made = compiled_of(launch, program.target)
        name = launch.group.name
        yield LevelLine(f"// {name}: {' '.join(launch.group.ops)}")
        for text in read(made).rstrip("\n").splitlines():
            yield LevelLine(text, at=name)


def compiled_of(launch: GroupLaunch | NodeLaunch, target: Target) -> Any:
    """The compiler's own record of a group's kernel."""
    return image_for(launch.kernel.function(), request_of(launch, target)).compiled


LEVELS: dict[str, Callable[[CudaProgram], list[LevelLine]]] = {
    "schedule": schedule_lines, "tile": tile_lines, "target": target_lines, "ptx": ptx_lines,
    "sass": sass_lines,
}


def text_of(level: str, graph: Graph, target: str | None = None) -> str:
    """The text of one level of a graph, lowered for GPUs."""
    return "\n".join(line.text for line in LEVELS[level](program_of(graph, target)))


def launches_of(graph: Graph, target: str | None = None) -> LaunchPlan:
    """Every launch of a graph, lowered for GPUs: form, reason, work."""
    return plan_of(program_of(graph, target))


__all__ = ["LEVELS", "LevelLine", "compiled_of", "launches_of", "program_of", "target_named",
           "text_of"]
