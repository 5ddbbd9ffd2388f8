"""What a compiled function tells of itself: its graph, the text of each level, launches, effects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import hooks
from ..errors import ArgumentError
from ..tensor import TensorType
from . import tree
from .inspect_levels import launch_plan, level_text, need_level
from .ir import Graph
from .kept_traces import Signatures
from .signature import Static
from .traced_signature import TracedSignature

if TYPE_CHECKING:
    from .cuda.launch_plan import LaunchPlan


class InspectedFunction:
    """Of a function with traced signatures: what `ts.jit` makes adds the calls."""

    name: str
    fn: Callable
    target: str | None
    capture_graph: bool | None
    _last: TracedSignature | None
    _cache: Signatures

    def traced(self, *args: Any, **kwargs: Any) -> TracedSignature:
        """The traced signature of these arguments (tensors, arrays or tensor types)."""
        raise NotImplementedError

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """The Graph IR for these arguments; of the last call when there are none."""
        if args or kwargs:
            return self.traced(*args, **kwargs).graph
        return self._last_traced().graph

    def _last_traced(self) -> TracedSignature:
        if self._last is None:
            raise ArgumentError(f"{self.name} has not been called yet",
                                hint=f"{self.name}.graph(x, ...) traces it for these arguments")
        return self._last

    def inspect_ir(self, level: str = "graph", *args: Any, backward: bool = False,
                   target: str | None = None, **kwargs: Any) -> str:
        """The text of one level for these arguments; of the last call when there are none.

        backward=True: that of the function's gradient. target="sm_90a": as it is lowered for that
        GPU, which need not be here; the schedule then says of each launch in which form it runs,
        why, and what it computes and moves. Raises ArgumentError for an unknown level, and
        UnsupportedTargetError below the schedule where an op has no kernel for GPUs.
        """
        need_level(level)
        return level_text(level, self._inspected(args, kwargs, backward), target)

    def schedule(self, *args: Any, backward: bool = False, target: str | None = None,
                 **kwargs: Any) -> LaunchPlan:
        """Every launch of the function on a GPU: its form (wgmma, mma, threads, copy, a library)
        and why, bytes, operations, line. Of the last call when there are no arguments.

        target: as in inspect_ir, by default this machine's GPU, else sm_90a. Raises
        UnsupportedTargetError where an op has no kernel.
        """
        return launch_plan(self._inspected(args, kwargs, backward).graph, target)

    def _inspected(self, args: tuple, kwargs: dict[str, Any], backward: bool) -> TracedSignature:
        traced = self.traced(*args, **kwargs) if args or kwargs else self._last_traced()
        return hooks.gradient.get()(self, traced) if backward else traced

    def infer(self, *args: Any, **kwargs: Any) -> Any:
        """Result types without running: `f.infer(Tensor["B", 8, f32])`; symbols flow through."""
        traced = self.traced(*args, **kwargs)
        values = iter(traced.graph.outputs)
        leaves: list[Any] = []
        for how in traced.rebuild:
            if isinstance(how, Static):
                leaves.append(how.value)
                continue
            aval = next(values).aval
            leaves.append(TensorType(aval.shape, aval.type))
            if how == "scaled":
                next(values)
        return tree.unflatten(traced.out_tree, leaves)

    @property
    def effects(self) -> frozenset[str]:
        """The effects of the last traced graph: random, io, state, movement, collective. Writing
        into a region is state."""
        traced = self._last_traced()
        return traced.graph.effects | ({"state"} if traced.updates else frozenset())

    @property
    def plan(self) -> Any:
        """The collectives of the last call on distributed tensors, in order: op, axes, bytes, why,
        line. Empty when there are none."""
        traced = self._last_traced()
        return () if traced.layouts is None else traced.program.plan

    @property
    def capture(self) -> str:
        """Whether calls are launched as a CUDA graph, and if not, why."""
        if self.capture_graph is False:
            return "off"
        target = self._last.target if self._last is not None else self.target
        spread = self._last is not None and self._last.layouts is not None
        if target == "cpu" and not spread:
            return "off: the target cpu launches nothing that could be captured"
        if self._last is None:
            return "on: from the second call of a signature"
        executable = self._last.program.on_gpu if spread else self._last.executable
        if executable is None:
            return "off: its tensors are distributed over hosts"
        if self.capture_graph is None and executable.no_graph:
            return f"off: {executable.no_graph}"
        what = executable.captured
        return f"on: {what} in one launch" if what else "on: from the second call of a signature"

    @property
    def specializations(self) -> int:
        """How many signatures have been traced and are kept: 256 at most, those used last."""
        return len(self._cache.kept)
