"""A function traced for one signature: its graph, what runs it, how its result is put together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from .. import hooks
from ..tensor import Tensor
from ..tile.launch.placement import gpu_number
from . import tree
from .captured_names import CapturedNames
from .devices import place_typed
from .execute import Executable
from .ir import Graph
from .op import GraphOp
from .pause_collection import collection_paused
from .placed_leaves import Picker, picker
from .regions.call import RegionCall, Update
from .signature import join_scales, type_of
from .steady_step import SteadyRun
from .tree_code import unflattener


def executor(graph: Graph, target: str, capture: bool | None = None, donated: Sequence[int] = (),
             offloaded: Sequence[int] = ()) -> Any:
    """What runs a graph. capture: see jit. donated: inputs whose memory results may take;
    offloaded: on the host."""
    if target == "cpu":
        return Executable(graph)
    from .cuda.program.device import DeviceExecutable  # loads what compiles kernels

    return DeviceExecutable(graph, gpu_number(target), bool(capture), donated, offloaded,
                            graphs=capture is None)


class _OnGpu:
    """What is computed at once on a GPU, graph/cuda/program/eager.py: loaded where there is one."""

    @functools.cached_property
    def run_op(self) -> Callable[[GraphOp, Sequence[Tensor], dict[str, Any]], Any]:
        from .cuda.program.eager import run_op

        return run_op

    @functools.cached_property
    def call(self) -> Callable[[str, Callable, tuple, dict[str, Any]], Any]:
        from .cuda.program.eager import call

        return call


hooks.on_gpu.fill(_OnGpu())


class TracedSignature:
    """One traced signature: the graph, how results are rebuilt, the executable when needed.

    `params` are the names of the arguments that are ts.params. `updates` are the regions that the
    graph's last outputs are written back into. `layouts`: how each input and then each capture
    lies on a mesh, None when no tensor is distributed.
    """

    def __init__(self, graph: Graph, out_tree: tree.TreeDef, rebuild: Sequence[Any],
                 target: str, arguments: dict[str, Any], updates: Sequence[Update] = (),
                 layouts: tuple | None = None, capture: bool | None = None,
                 donated: Sequence[int] = (), offloaded: Sequence[int] = (),
                 leaf_names: Sequence[str] = (), roots: Sequence[Any] = (),
                 read: Sequence[Tensor] = ()):
        """roots: the function and other objects through which it may have read what it did. read:
        tensors whose values are constants of the trace."""
        self.read = read
        self.captured = CapturedNames(roots, [*(t for _, t in graph.captures), *read]) or None
        self.leaf_names = tuple(leaf_names)  # "params.layers.0.up", by input
        graph.kept["argument_names"] = self.leaf_names
        self.graph, self.out_tree, self.rebuild, self.target = graph, out_tree, rebuild, target
        self.updates, self.layouts, self.capture = updates, layouts, capture
        self.donated, self.offloaded = tuple(donated), tuple(offloaded)
        self.pick_donated = picker(self.donated)
        self.typed_places = any(v.aval.type.policy.device for v in graph.outputs)
        self.used = 0  # when it was called last; see kept_traces.py
        leaves, self.in_tree = tree.flatten(arguments)
        self.leaf_types = [type_of(x) for x in leaves]
        self.params = frozenset(n for n, x in arguments.items()
                                if isinstance(x, Tensor) and x.is_param)

    @functools.cached_property
    def _put_together(self) -> Callable[[Sequence[Any]], Any]:
        return unflattener(self.out_tree)

    @functools.cached_property
    def _plain(self) -> bool:
        """Whether the leaves of the result are the graph's outputs."""
        return all(how in ("tensor", "param") for how in self.rebuild)

    @functools.cached_property
    def _params_out(self) -> Picker:
        return picker([i for i, how in enumerate(self.rebuild) if how == "param"])

    @property
    def types(self) -> dict[str, Any]:
        """The arguments it was traced for, tensors as tensor types."""
        return tree.unflatten(self.in_tree, self.leaf_types)

    @functools.cached_property
    def executable(self) -> Any:
        return executor(self.graph, self.target, self.capture, self.donated, self.offloaded)

    @functools.cached_property
    def program(self) -> Any:
        """The graph on the mesh of its distributed tensors."""
        assert self.layouts is not None
        return hooks.distributed.get().program(self.graph, self.layouts, self.donated,
                                               self.leaf_names)

    def run(self, leaves: Sequence[Tensor], call: RegionCall | None = None,
            parts: Sequence[Tensor] | None = None) -> Any:
        """The result of the compiled graph on these tensors; `call` has its regions. parts: what
        they are made of, where somebody has looked."""
        if not hooks.runs:
            return self.result(self._tensors(leaves, parts), call)
        with ExitStack() as stack:
            shown = [stack.enter_context(observe(self.graph)) for observe in hooks.runs]
            flat = self._tensors(leaves, parts)
            for show in shown:
                show(flat)
        return self.result(flat, call)

    def _tensors(self, leaves: Sequence[Tensor], parts: Sequence[Tensor] | None) -> list[Tensor]:
        if self.layouts is not None:
            return self.program.run(leaves, parts)
        call = self.executable.tensors if "executable" in vars(self) else self._first
        made = call(leaves)
        return list(map(place_typed, made)) if self.typed_places else made

    def steady(self, results: Sequence[Any]) -> SteadyRun | None:
        """What runs calls whose donated arguments are these leaves of the last result; None where
        they need not be, or where a result is more than what the program gives."""
        if not self._plain or self.updates or self.typed_places or (
                self.target == "cpu" and self.layouts is None):
            return None
        runs = self.executable if self.layouts is None else self.program
        found: SteadyRun | None = runs.steady(results)
        return found

    def _first(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """A call, with all that is made for it."""
        if self.target == "cpu":
            return self.executable.tensors(leaves)
        with collection_paused():
            return self.executable.tensors(leaves)

    def result(self, flat: Sequence[Tensor], call: RegionCall | None = None) -> Any:
        if self._plain:
            for y in self._params_out(flat):
                y.is_param = True
            leaves: Sequence[Any] = flat[:len(self.rebuild)] if self.updates else flat
        else:
            leaves = join_scales(flat, self.rebuild)
        out = self._put_together(leaves)
        if call is None:
            return out
        return call.finish(self.updates, flat[len(flat) - len(self.updates):], out)


__all__ = ["TracedSignature", "executor"]
