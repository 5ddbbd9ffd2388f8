"""The machine code of a graph for a GPU that is not here: for files that start without compiling.

What a launch has to have compiled depends on where its arrays lie. Here they lie where allocators
put them: every buffer at whole 256 bytes, temporaries in their block as planned. What a call has
otherwise, such as an argument that begins at an odd element, is compiled when it comes. Blocks of
products depend on the card too, so the graph is lowered for each card that is known of the target,
and strips of rows that clusters share for each number of clusters that chips run at one time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....kernels.cards import known_cards, planning_for
from ....kernels.routine import ForeignArray
from ....kernels.row_blocks import ASKED, CLUSTER_COUNTS
from ....runtime.cache import CacheEntry
from ....runtime.target import Target
from ....tile.launch.compile_images import WantedImage, compile_images
from ....tile.launch.machine_code import IMAGES, compiling_for, to_entry
from ...ir import Graph
from ...schedule.ir import ALIGN_BYTES, aligned
from .batch_launch import BatchLaunch
from .compile_program import groups_wanted
from .node_kernels import NodeLaunch
from .run import CudaProgram, GroupLaunch


def compile_ahead(graph: Graph, target: Target) -> dict[str, CacheEntry]:
    """The machine code of all launches of a graph, by portable key. Needs no GPU.

    Raises UnsupportedTargetError where something has no kernel, and without the compilers.
    """
    with compiling_for(target):
        wanted = list[WantedImage]()
        for card in known_cards(target):
            with planning_for(card):
                program = CudaProgram(graph, target, on_host=())
                wanted += wanted_ahead(program)
            for clusters in CLUSTER_COUNTS if _in_clusters(program) else ():
                with planning_for(replace(card, clusters=clusters)):
                    wanted += wanted_ahead(CudaProgram(graph, target, on_host=()))
        compile_images(wanted)
        found = {}
        for w in wanted:
            entry = IMAGES.read(w.request.key(w.function))
            found[w.request.portable_key(w.function)] = entry or to_entry(
                w.loaded[w.key].compiled)
    return found


def _in_clusters(program: CudaProgram) -> bool:
    """Whether it has strips of which there are as many as clusters that run at one time."""
    return any(g.kind == "strips" and dict(g.attrs).get("cluster") in ASKED
               for g in program.plan.groups) or any(map(_in_clusters, program.inner))


def wanted_ahead(program: CudaProgram) -> Iterator[WantedImage]:
    """What a first call of a program has to have compiled, the iterations of its loops too."""
    memory = _addresses(program)

    def pointer(name: str) -> int:
        return memory[program.base(name)]

    def arguments(launch: GroupLaunch) -> list[ForeignArray]:
        types = {b.name: b.type.dtype for b in program.plan.buffers}
        return [ForeignArray(pointer(n) + at * types[n].numpy.itemsize, shape, types[n], 0, None)
                for (n, shape), at in zip(launch.arguments, launch.offsets, strict=True)]

    alone = list[tuple[GroupLaunch, list[ForeignArray]]]()
    for run in program.runs():
        steps = program.steps[run.start:run.stop]
        groups = [s for s in steps if isinstance(s, GroupLaunch)]
        if len(run) > 1:
            yield BatchLaunch(groups, [arguments(g) for g in groups], 0).wanted()
        else:
            alone += [(g, arguments(g)) for g in groups]
        yield from (s.wanted(pointer, 0) for s in steps if isinstance(s, NodeLaunch))
    yield from groups_wanted(alone)
    for inner in program.inner:
        yield from wanted_ahead(inner)


def _addresses(program: CudaProgram) -> dict[str, int]:
    """Of each buffer that owns memory; no two meet but as the plan says."""
    end = ALIGN_BYTES + -(-program.plan.temporary_bytes // ALIGN_BYTES) * ALIGN_BYTES
    found: dict[str, int] = {}
    for b in program.plan.buffers:
        if b.kind == "temporary":
            found[b.name] = ALIGN_BYTES + b.offset
        elif b.kind != "view":
            found[b.name], end = end, end + aligned(b)
    return found


__all__ = ["compile_ahead", "wanted_ahead"]
