"""Graph functions compiled for a GPU, and how their calls go."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from .... import config
from ....runtime.buffer import DeviceBuffer
from ....runtime.device import device
from ....tensor import Tensor
from ....tile.ir.modes import FUSED_BACKWARD
from ....tile.launch.resident import offload
from ...donation import alone
from ...ir import Graph, Node
from ...pause_collection import collection_paused
from ...placed_leaves import OURS, PlacedLeaves
from ...schedule.offload import placed_on_host
from ...steady_step import SteadyRun
from ..launch_plan import annotated
from ..passes.narrow_copies import RESIDENT, CopyKeeper, copies_of
from .collective_steps import sent_places
from .compile_program import CompiledBefore
from .graph_limits import has_few_launches, launch_count, no_node_for, why_no_graph
from .loop_steps import LoopStep
from .placed_graphs import PlacedGraphs
from .repeated_calls import RepeatedCalls
from .run import CudaProgram
from .steady_calls import SteadyCalls
from .watched import run_watched
from .workspace import Workspace


class DeviceExecutable:
    """A graph compiled for a GPU: `tensors(leaves) -> tensors`, results in new memory there.

    Kernels read arguments and captured tensors that lie on the GPU where they are, and write into
    the memory of the results: nothing is copied. Arguments on the host are copied to the GPU at
    each call, captured tensors there once, and again when they were written. With `capture` they
    are copied to and from memory that does not change. One call runs at a time, behind what was
    launched before; nothing waits for it but what reads a result on the host. Raises
    UnsupportedTargetError at an op without a kernel.
    """

    def __init__(self, graph: Graph, index: int = 0, capture: bool = False,
                 donated: Sequence[int] = (), on_host: Sequence[int] = (), graphs: bool = False):
        self.graph, self.device, self._capture = graph, device(index), capture
        self.donated = tuple(donated)  # inputs whose memory results may take
        self.on_host = tuple(on_host)  # inputs that lie on the host until they are used
        with collection_paused():
            self.before = CompiledBefore(graph, self.device.target, self.donated)
            self.program = CudaProgram(graph, self.device.target, self.donated,
                                       None if capture else self.on_host)
        self._given_up = len(self.donated)  # before the copies
        copies = self.program.lowered.copies
        self.copies = CopyKeeper(copies, partial(DeviceExecutable, index=index))
        self.donated += tuple(range(len(graph.inputs), len(graph.inputs) + len(copies)))
        kernels = self.program.node_kernels
        self._node_kernels = [*{(k.call.kernel, k.changes): k for k in kernels}.values()]
        self._why = why_no_graph(self.program) or next(filter(None, (
            no_node_for(s) for s in self.program.steps if isinstance(s, LoopStep))), "")
        self._repeats = not capture and not self._why
        if not self._why and has_few_launches(self.program):
            count = launch_count(self.program)
            self._why = f"it is {('no launch', 'one launch', 'two launches')[count]}"
        self._graphs = graphs and not capture and not self._why
        self._workspace: Workspace | None = None
        self.block: DeviceBuffer | None = None  # of temporaries, where ranks reach it
        self._lock = threading.Lock()

    @property
    def compiled(self) -> DeviceExecutable:
        return self

    def describe(self) -> str:
        """The Schedule IR, with what each launch computes and moves, and how."""
        return "\n".join(line.text for line in annotated(self.program))

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Host arrays in and out."""
        leaves = [Tensor(a, v.aval.type) for a, v in zip(arrays, self.graph.inputs, strict=True)]
        return [y.array for y in self.tensors(leaves)]

    def tensors(self, leaves: Sequence[Tensor], blamed: Graph | None = None,
                ours: bool = False) -> list[Tensor]:
        """blamed: the graph whose lines a sentinel names, where it is not this one's. ours: nobody
        else has the donated leaves, so they may be results, as the copies that it keeps may."""
        for kernel in self._node_kernels:
            kernel.require_unchanged()
        with self._lock:
            space = self._space()
            first = not space.compiled
            whole = self._with_copies(leaves) if self.copies.copies else leaves
            results = run_watched(blamed or self.graph, space, whole) if space.watched \
                else space.run(whole, len(whole) if ours else len(self.copies.copies))
            if self.copies.copies:
                results = self.copies.kept(results)
            if first:
                self.before.keep()
            for i in placed_on_host(self.graph) if self._capture else ():
                offload(results[i])
            if self._capture and space.recorded is None:
                space.record()  # when all kernels are loaded
            return results

    def _with_copies(self, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        copies = self.copies.taken(leaves)
        return leaves.add(copies) if type(leaves) is PlacedLeaves else [*leaves, *copies]

    def steady(self, results: Sequence[Any]) -> SteadyRun | None:
        """What runs calls whose donated arguments are these results of the last one, or lie where
        they do; None where results take no argument's place, or somebody has their memory."""
        with self._lock:
            space, count = self._space(), len(self.graph.inputs)
            if space.repeated is None or not RESIDENT.issuperset(map(type, results)):
                return None
            moved = space.repeated.moved_arguments()[:len(results)]
            kept = {i: y._storage for y, i in zip(results, moved, strict=True) if i is not None}
            held = self.copies.beside(results) if self.copies.copies else []
            copies = None if held is None else copies_of(held)
            if not kept or held is None or copies is None or not OURS.issuperset(
                    map(type, kept.values())):
                return None
            ours = alone([*kept.values()], 2)  # the tensors have them, and `kept`
            kept |= {count + k: copy.storage for k, copy in enumerate(copies)}
            calls = SteadyCalls.of(space.repeated, kept) if ours else None
        return None if calls is None else SteadyRun(moved, partial(self._again, calls, held))

    def _again(self, calls: SteadyCalls, held: Sequence[Any], leaves: Sequence[Tensor]
               ) -> list[Any] | None:
        """A call as SteadyRun.run. held: what has the copies that it reads."""
        for kernel in self._node_kernels:
            kernel.require_unchanged()
        with self._lock:
            space = self._space()
            if space.repeated is not calls.calls or (held and copies_of(held) is None):
                return None
            return space.again(calls, leaves)

    @property
    def sent_places(self) -> tuple[str, list[Node], set[Node]]:
        """Where in its temporaries lies what it sends, what does, and what has all there."""
        return sent_places(self.program.steps, self.program.plan)

    def _space(self) -> Workspace:
        """The memory for calls as the settings are now."""
        space = self._workspace
        watched = config.numerics != "off"
        alone = bool(config.debug)  # what checks its accesses has a launch of its own
        if space is None or space.watched is not watched or space.alone is not alone:
            donated = () if watched else self.donated  # a failing call is run again
            program = self._looked_into if watched or alone else self.program
            space = self._workspace = Workspace(program, self.device, self._capture, watched,
                                                donated, alone, self.block)
        if space.repeated is None and space.ran and self._repeats:
            space.repeated = RepeatedCalls(space, self._graphs)
        return space

    @cached_property
    def _looked_into(self) -> CudaProgram:
        """The program while stores are watched or accesses checked: lowered under these settings
        where it has a kernel that is slow then, see attention_kernels.py."""
        if not any(FUSED_BACKWARD in k.call.kernel.modes for k in self.program.node_kernels):
            return self.program
        with collection_paused():
            return CudaProgram(self.graph, self.device.target, self.donated[:self._given_up],
                               None if self._capture else self.on_host)

    @property
    def no_graph(self) -> str:
        """Why calls are not launched as CUDA graphs, "" where they are, or will be."""
        if self._why or config.cuda_graphs:
            made = self._made_graphs
            return self._why or (made.stopped if made else "")
        return "the setting cuda_graphs"

    @property
    def _made_graphs(self) -> PlacedGraphs | None:
        repeated = self._workspace.repeated if self._workspace else None
        return repeated.graphs if repeated else None

    @property
    def captured(self) -> str:
        """What the next call launches at once, "" when it does so kernel by kernel."""
        space = self._workspace
        made = self._made_graphs
        if space is None or (space.recorded is None and not (made and made.graphs)):
            return ""
        copies = len(self.program.plan.transfers)
        kernels = launch_count(self.program, not space.alone) - copies
        return f"{kernels} kernels" + (f" and {copies} copies" if copies else "")


__all__ = ["DeviceExecutable"]
