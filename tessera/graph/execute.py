"""Running a graph: simplify, fuse, plan memory once; then a straight line of steps per call.

A step is a compiled loop, a library call (BLAS, NumPy) or a view (cpu/compiled.py). With observers
present the graph runs node by node instead, each node's NumPy meaning in the user's order
(interpret.py). With sentinels on the steps look at what they make, and a call in which something
was seen is run again node by node (run_with_sentinels.py).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from .. import config, hooks
from ..numerics.random_state import next_step
from ..tensor import Tensor
from .cpu.compiled import CompiledGraph
from .interpret import interpret
from .ir import Graph
from .run_with_sentinels import Watched, run_watched
from .simplify import simplify


class Executable:
    """A compiled graph: `run(arrays) -> arrays`, in the order of its inputs and outputs.

    Compiled at the first call that needs it. Safe to call from several threads: each call in
    flight has a workspace of its own.
    """

    def __init__(self, graph: Graph, repeats: int = 1, donated: Sequence[int] = ()):
        """repeats: how often a call of the user's runs it, as the body of loops. donated: inputs
        whose memory results may take."""
        self.graph, self.repeats, self.donated = graph, repeats, tuple(donated)
        self.random = "random" in graph.effects
        self.watchable = graph.effects <= {"random"}  # may be run twice
        self._compiled: CompiledGraph | None = None
        self._watched: Watched | None = None
        self._lock = threading.Lock()

    @property
    def compiled(self) -> CompiledGraph:
        if self._compiled is None:
            with self._lock:
                if self._compiled is None:
                    self._compiled = CompiledGraph(simplify(self.graph), self.repeats,
                                                   self.donated)
        return self._compiled

    @property
    def overwritten(self) -> frozenset[int]:
        """The donated inputs that a run writes over."""
        steps = self.donated and config.numerics == "off" and not hooks.nodes
        return self.compiled.overwritten if steps else frozenset()

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        if self.random:
            next_step()
        if config.numerics == "off" and not hooks.nodes:
            return self.compiled.run(arrays)
        if hooks.nodes or not self.watchable:
            return interpret(self.graph, arrays)
        return run_watched(self.graph, lambda: self.watched, arrays)

    @property
    def watched(self) -> Watched:
        """The steps with sentinels on."""
        if self._watched is None:
            with self._lock:
                if self._watched is None:
                    self._watched = Watched(simplify(self.graph), self.repeats)
        return self._watched

    def tensors(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        out = self.run([x.array for x in leaves])
        return [Tensor(a, v.aval.type) for a, v in zip(out, self.graph.outputs, strict=True)]
