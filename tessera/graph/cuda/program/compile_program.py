"""The machine code of a whole program, before its first call launches anything.

What a launch has to have compiled depends on where its arrays lie: on alignment, and on whether
they share memory. So it is asked for with the memory of the first call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from .... import config
from ....kernels.routine import ForeignArray
from ....numerics import stored_bytes
from ....runtime.arrays import overlap
from ....runtime.cache import CacheEntry, DiskCache, content_name
from ....runtime.target import Target
from ....tile.launch.compile_images import WantedImage, at_line, compile_images
from ....tile.launch.machine_code import fingerprint
from ....tile.launch.precompile import wanted_image
from ....tile.launch.repeated_call import ALIGNMENT_BYTES
from ...ir import Graph
from .batch_launch import BatchLaunch
from .node_kernels import NodeLaunch
from .run import GroupLaunch

PROGRAMS = DiskCache("programs")
GIVEN: set[tuple[str, str]] = set()  # graph and target of programs whose code a file brought
FEW = 8  # nodes: a graph of fewer has a kernel or two


class CompiledBefore:
    """Whether some process compiled all kernels of a graph: then they are on the disk, or a file
    brought them. Otherwise the processes that compile start now, while the graph is lowered."""

    def __init__(self, graph: Graph, target: Target, donated: Sequence[int]):
        self._graph, self._target, self._donated = graph, target, donated
        self._kept = True
        brought = (graph.hash, str(target)) in GIVEN
        if len(graph.nodes) >= FEW and config.compile_processes > 1 and not brought:
            self._kept = PROGRAMS.read(self._name) is not None
        if not self._kept:
            from ....tile.cuda import compile_processes

            compile_processes.start()

    @cached_property
    def _name(self) -> str:
        settings = f"{self._target} {self._donated} {config.numerics} {config.debug} " \
            f"{config.determinism}"
        return content_name(self._graph.hash, settings, fingerprint())

    def keep(self) -> None:
        """They are on the disk now."""
        if not self._kept:
            PROGRAMS.write(self._name, CacheEntry({"graph": self._graph.name}))
            self._kept = True


def compile_launches(calls: Sequence[tuple[GroupLaunch, Sequence[ForeignArray]]],
                     batches: Sequence[BatchLaunch], nodes: Sequence[NodeLaunch],
                     pointer: Callable[[str], int], index: int) -> None:
    """Compiles, side by side, what these calls, batches and nodes on a GPU will launch. pointer:
    where a buffer lies in the call under way."""
    compile_images(itertools.chain((n.wanted(pointer, index) for n in nodes),
                                   (b.wanted() for b in batches), groups_wanted(calls)))


def groups_wanted(calls: Sequence[tuple[GroupLaunch, Sequence[ForeignArray]]]
                  ) -> Iterator[WantedImage]:
    """What these calls have to have compiled."""
    seen = set()
    for launch, arrays in calls:
        kernel, where = launch.shared, launch.group.where
        forms = tuple((a.shape, a.pointer % ALIGNMENT_BYTES) for a in arrays)
        shared = frozenset(overlap([(a.pointer, stored_bytes(a.shape, a.dtype)) for a in arrays]))
        if (id(kernel), forms, shared) not in seen:
            seen.add((id(kernel), forms, shared))
            with at_line(where):
                found = wanted_image(kernel, kernel.bind(tuple(arrays), {}))
            yield replace(found, where=where)


__all__ = ["GIVEN", "CompiledBefore", "compile_launches", "groups_wanted"]
