"""What higher floors do for lower ones: every place where a call goes up, with its type.

    hooks.cast.get()(x, numeric)           a Hook has one filler; get() raises when there is none
    for observe in hooks.eager_ops: ...    Hooks has as many as were added, in that order

Imports only point down, so a lower floor calls what is written here and a higher one fills it where
it is defined: `hooks.cast.fill(cast_to)`, `hooks.exits.append(observe)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from .errors import TesseraError
from .lazy_dataclass import dataclass

if TYPE_CHECKING:  # types alone: this module stands below those that it speaks of
    import numpy as np

    from .errors import SourceLine
    from .graph.cpu.compiled import CompiledGraph
    from .graph.inspected_function import InspectedFunction
    from .graph.ir import Graph, Node, Value
    from .graph.jit import JitFunction
    from .graph.op import GraphOp
    from .graph.regions.call import Use
    from .graph.schedule.groups import FusionGroup
    from .graph.traced_signature import TracedSignature
    from .kernels.routine import Routine
    from .mesh.collectives.record import Collective
    from .mesh.device_mesh import Mesh
    from .numerics import CastCounts, DType, NumericType
    from .runtime.copy_times import StepEvent
    from .runtime.device import Device
    from .runtime.sentinel_words import BadElements
    from .tensor import Tensor
    from .tile.cuda.emit.emitter import Emitter
    from .tile.interpreter.arguments import Bound
    from .tile.interpreter.blame import Blame
    from .tile.interpreter.launch import Config
    from .tile.interpreter.memory import Memory
    from .tile.ir.ir import Function as TileFunction
    from .tile.ir.ir import SSAValue
    from .tile.kernel.kernel import Kernel

T = TypeVar("T")


class Hook(Generic[T]):
    """One thing that a higher floor does. `filler`: the module that does it."""

    def __init__(self, name: str, filler: str):
        self.name, self.filler = name, filler
        self._does: T | None = None

    def fill(self, does: T) -> None:
        """Raises TesseraError when it is filled already."""
        if self._does is not None:
            raise TesseraError(f"hook {self.name!r} is filled twice: {self._does!r} and {does!r}",
                               hint="a Hook has one filler; Hooks is a list of several")
        self._does = does

    def get(self) -> T:
        """What it was filled with. Raises TesseraError while it is empty."""
        if self._does is None:
            raise TesseraError(f"nothing fills the hook {self.name!r}: tessera.{self.filler} does, "
                               "and has not been imported", hint="import tessera")
        return self._does


class Hooks(list[T]):
    """Several of a kind, called in the order in which they were added; often there are none."""


# --- the graph asks its own ops -----------------------------------------------------------------
class Cast(Protocol):
    """x as another type, rounded as its policy says."""

    def __call__(self, x: Tensor, numeric: NumericType, /) -> Tensor: ...


class NextKey(Protocol):
    """The next key of the random stream, of the trace that is open or of the program."""

    def __call__(self) -> Tensor: ...


class PlaceNew(Protocol):
    """A tensor that was just made, where the setting `device` wants it."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


class Adopt(Protocol):
    """An array that another library has on a GPU as a tensor there; anything else as it is."""

    def __call__(self, value: Any, name: str, /) -> Any: ...


class OnGpu(Protocol):
    """What is computed at once of tensors on a GPU, or where the setting `device` names one."""

    def run_op(self, op: GraphOp, args: Sequence[Tensor], attrs: dict[str, Any], /) -> Any:
        """One op."""

    def call(self, name: str, fn: Callable, args: tuple, kwargs: dict[str, Any], /) -> Any:
        """A function of ops."""


adopt: Hook[Adopt] = Hook("adopt", "tile.launch.resident")
place_new: Hook[PlaceNew] = Hook("place_new", "graph.devices")
assign: Hook[Callable[[Any, Any, Any], bool]] = Hook("assign", "graph.assignment")  # x[i] = y
read_part: Hook[Callable[[Any, Any], Any]] = Hook("read_part", "graph.assignment")  # x[i]
can_place: Hook[Callable[[str], bool]] = Hook("can_place", "graph.devices")  # a device of a type
on_gpu: Hook[OnGpu] = Hook("on_gpu", "graph.traced_signature")
cast: Hook[Cast] = Hook("cast", "graph.ops.convert")
next_key: Hook[NextKey] = Hook("next_key", "graph.ops.random")
as_tensor: Hook[Callable[[Any], Tensor]] = Hook("as_tensor", "tensor")
constant: Hook[GraphOp] = Hook("constant", "graph.ops.create")  # the op of a number in a graph


# --- kernels ask the graph ---------------------------------------------------------------------
class GraphKernels(Protocol):
    """Kernels in graphs."""

    def call(self, kernel: Kernel, config: Config, arguments: dict[str, Any],
             explicit: frozenset[str], /) -> Any:
        """A call while a function is traced, or of distributed tensors."""

    def vjp_rule(self, kernel: Kernel, fwd: Callable, bwd: Callable, /) -> Any:
        """A rule that `call` runs such a kernel by."""

    def jvp_rule(self, kernel: Kernel, rule: Callable, /) -> Any:
        """The same in forward mode."""

    def routine(self, routine: Routine, options: dict[str, Any], args: tuple,
                kwargs: dict[str, Any], /) -> Any:
        """A call of a library routine there. options: of the launch that the call chose."""


# (line and text of a failed assert) -> what the op raises that the graph made the kernel for
failed_asserts: Hooks[Callable[[SourceLine | None, str], TesseraError | None]] = Hooks()
# (step, carries, sequences, length, name) -> (carries, results): a scan, see ad/scan.py
scan: Hook[Callable[..., tuple[Tensor, ...]]] = Hook("scan", "ad.scan")
# (graph, inputs, cotangent of its result) -> those of its inputs, None of what has none
pull_back: Hook[Callable[[Graph, Sequence[Tensor], Tensor], list[Tensor | None]]] = Hook(
    "pull_back", "ad.reverse")
graph_kernels: Hook[GraphKernels] = Hook("graph_kernels", "ad.graph_kernels")


# --- the graph asks the mesh --------------------------------------------------------------------
class DistributedProgram(Protocol):
    """A graph whose tensors lie on a mesh, ready to run."""

    def run(self, leaves: Sequence[Tensor], /) -> list[Tensor]: ...


class Distributed(Protocol):
    """Runs ops and graphs of distributed tensors."""

    def run_op(self, op: GraphOp, args: Sequence[Tensor], attrs: dict[str, Any], /) -> Any: ...

    def program(self, graph: Graph, layouts: tuple, donated: Sequence[int],
                names: Sequence[str], /
                ) -> DistributedProgram: ...


class Extents(Protocol):
    """Extents that ranks of a group must know of each other when they trace together."""

    def groups(self, graph: Graph, /) -> tuple:
        """The groups of ranks whose extents a trace of this graph knows."""

    def extents(self, known: tuple, leaves: Sequence[Tensor], name: str, /) -> Any:
        """What the ranks of these groups call `name` with now."""


class Surrounding(Protocol):
    """What a trace depends on beside its arguments; hashable."""

    def __call__(self) -> Any: ...


class Seed(Protocol):
    """The cotangent with which the gradient of a loss begins: 1/n for one that n ranks hold."""

    def __call__(self, graph: Graph, loss: Value, /) -> float: ...


class Align(Protocol):
    """A cotangent as x lies on its mesh."""

    def __call__(self, g: Tensor, x: Tensor, /) -> Tensor: ...


class Shard(Protocol):
    """x laid out on a mesh."""

    def __call__(self, x: Tensor, layout: Any, /) -> Tensor: ...


distributed: Hook[Distributed] = Hook("distributed", "mesh.sharding.sharded_graph")
together: Hook[Extents] = Hook("together", "mesh.collectives.rank_extents")
surroundings: Hooks[Surrounding] = Hooks()
seed: Hook[Seed] = Hook("seed", "mesh.collectives.replicated")
align: Hook[Align] = Hook("align", "mesh.sharding.constraints")
shard: Hook[Shard] = Hook("shard", "mesh.sharding.constraints")


# --- meshes ask what is made of them ------------------------------------------------------------
class ShardNamed(Protocol):
    """`mesh.shard(x, which, dims=)`."""

    def __call__(self, where: Mesh, x: Any, which: Any, dims: Sequence[str] | None, /) -> Any: ...


class BackendOf(Protocol):
    """`mesh.backend`."""

    def __call__(self, mesh: Mesh, /) -> str: ...


class GlobalView(Protocol):
    """What a collective called on a whole, distributed value becomes."""

    def __call__(self, which: Collective, x: Tensor, axis: Any, mesh: Mesh | None, /,
                 **attrs: Any) -> Tensor: ...


class StepTimes(Protocol):
    """How long the model of the planner says that a step takes, in microseconds."""

    def matmul_us(self, flops: float, dtype: DType, mesh: Mesh, /) -> float: ...

    def collective_us(self, op: str, nbytes: float, mesh: Mesh, axes: Sequence[str], /
                      ) -> float: ...


step_times: Hook[StepTimes] = Hook("step_times", "planning.public")
shard_named: Hook[ShardNamed] = Hook("shard_named", "mesh.logical_names")
backend_of: Hook[BackendOf] = Hook("backend_of", "mesh")
global_view: Hook[GlobalView] = Hook("global_view", "mesh.sharding.constraints")


# --- debug looks on -----------------------------------------------------------------------------
class EagerObserver(Protocol):
    """Shown an op that has run at once: its operands, attributes and results."""

    def __call__(self, op: GraphOp, args: tuple, attrs: dict, made: tuple, /) -> None: ...


class TimedOpObserver(Protocol):
    """Shown an op that has run at once on the host, and when (ns of time.perf_counter_ns)."""

    def __call__(self, op: GraphOp, args: tuple, attrs: dict, made: tuple, begin: int, end: int, /
                 ) -> None: ...


class TimedGroupObserver(Protocol):
    """Shown a group of a compiled graph that has run on the host, and when."""

    def __call__(self, program: CompiledGraph, group: FusionGroup, begin: int, end: int, /
                 ) -> None: ...


class TimedStepObserver(Protocol):
    """Shown a launch, copy or library call of a compiled function on a GPU, and when it ran."""

    def __call__(self, event: StepEvent, /) -> None: ...


class NodeObserver(Protocol):
    """Shown a node of a graph that runs op by op, with the arrays that went in and came out."""

    def __call__(self, node: Node, inputs: tuple, made: tuple, /) -> None: ...


@dataclass(frozen=True)
class Sentinel:
    """Who looks for bad values: shown each node when a graph runs op by op, and what a cast lost
    when it does not.

    later: asked during a call whose values are looked at when it has ended; gives a context that is
    this call's once more, and counts what reaches the results of the graph.
    enters: shown a node that holds graphs before it runs.
    carried: shown what a loop's body takes over as its carries from the iteration before, as what
    the body's inputs and outputs, from the second iteration on.
    doubts: whether one of these values holds what may still count.
    """

    observe: NodeObserver
    lost: Callable[[Node, CastCounts], None]
    later: Callable[[Graph], Callable[[], AbstractContextManager[None]]]
    enters: Callable[[Node], None]
    carried: Callable[[Sequence[Value], Sequence[Value]], None]
    doubts: Callable[[Sequence[Value]], bool]


class SendingObserver(Protocol):
    """Shown a collective before it runs: what leaves for other ranks is looked at here. operands:
    what stands for each of its arrays."""

    def __call__(self, op: GraphOp, where: SourceLine | None, operands: Sequence[Any],
                 arrays: Sequence[np.ndarray], /) -> None: ...


class TracedArgument(Protocol):
    """Shown an argument of a function that is traced, and the tracer that stands for it."""

    def __call__(self, leaf: Tensor, tracer: Tensor, /) -> None: ...


class ExitObserver(Protocol):
    """Shown what a graph, or a public function that ran op by op, has given."""

    def __call__(self, out: Any, /) -> None: ...


class RunObserver(Protocol):
    """A context in which a graph runs; it gives a function that is shown the results."""

    def __call__(self, graph: Graph, /
                 ) -> AbstractContextManager[Callable[[list[Tensor]], None]]: ...


class RegionObserver(Protocol):
    """Shown each call of a function with regions: what it used, and its result."""

    def __call__(self, function: str, uses: list[Use], result: Any, /) -> None: ...


class Gradient(Protocol):
    """The gradient of a compiled function at the signature of one of its traces."""

    def __call__(self, fn: InspectedFunction, traced: TracedSignature, /) -> TracedSignature: ...


class CompiledObserver(Protocol):
    """Told each graph function that was traced and each kernel that was compiled."""

    def __call__(self, fn: JitFunction | Kernel, /) -> None: ...


class KernelRun(Protocol):
    """A context around a run of a kernel by the interpreter."""

    def __call__(self, name: str, /) -> AbstractContextManager[Any]: ...


class KernelSentinel(Protocol):
    """A context around a run of a kernel by the interpreter that says whose bad values are to be
    followed, or None; at its end it looks at what was written. outputs: what the kernel returns.
    again: runs the same launch on other arguments, and gives what it returns."""

    def __call__(self, function: TileFunction, bound: Bound, outputs: dict[str, Memory],
                 again: Callable[[Bound], Any], /) -> AbstractContextManager[Blame | None]: ...


class BadElementsObserver(Protocol):
    """Told what launches on GPUs have counted. again: runs the launch under the interpreter, with
    its sentinels, and says whether what it wrote was bad; None: it cannot be run again."""

    def __call__(self, found: Sequence[BadElements], again: Callable[[], bool] | None, /
                 ) -> None: ...


eager_ops: Hooks[EagerObserver] = Hooks()
timed_ops: Hooks[TimedOpObserver] = Hooks()
timed_groups: Hooks[TimedGroupObserver] = Hooks()
timed_steps: Hooks[TimedStepObserver] = Hooks()
nodes: Hooks[NodeObserver] = Hooks()
sentinels: Hooks[Sentinel] = Hooks()
sending: Hooks[SendingObserver] = Hooks()
exits: Hooks[ExitObserver] = Hooks()
traced_arguments: Hooks[TracedArgument] = Hooks()
runs: Hooks[RunObserver] = Hooks()
compiled: Hooks[CompiledObserver] = Hooks()
kernel_runs: Hooks[KernelRun] = Hooks()
kernel_sentinels: Hooks[KernelSentinel] = Hooks()
bad_elements: Hooks[BadElementsObserver] = Hooks()
region_calls: Hooks[RegionObserver] = Hooks()
gradient: Hook[Gradient] = Hook("gradient", "debug.inspect")


# --- emission for GPUs --------------------------------------------------------------------------
class MeetingReader(Protocol):
    """Takes results for which the warps of a group have met, by their expressions, and says which
    it has taken: who sends them to the groups of a cluster puts them together alone."""

    def __call__(self, e: Emitter, results: dict[SSAValue, str], /) -> set[SSAValue]: ...


behind_meetings: Hooks[MeetingReader] = Hooks()


# --- the runtime --------------------------------------------------------------------------------
class Synchronised(Protocol):
    """Told the number of a device that was waited for: what its kernels reported shows now."""

    def __call__(self, index: int, /) -> None: ...


class Reported(Protocol):
    """Told the number of a device on which a kernel failed, and is done, before that is raised. It
    raises what came first, of which the failure is a consequence."""

    def __call__(self, index: int, /) -> None: ...


class Trimmed(Protocol):
    """Told a device before the pools give memory back: who keeps some that is not needed frees it.
    """

    def __call__(self, on: Device, /) -> None: ...


class CopyObserver(Protocol):
    """Opened around each copy beside the kernels of a device."""

    def __call__(self, name: str, index: int, stream: int, /) -> AbstractContextManager[None]: ...


synchronised: Hooks[Synchronised] = Hooks()
trimmed: Hooks[Trimmed] = Hooks()
copies: Hooks[CopyObserver] = Hooks()
reported: Hooks[Reported] = Hooks()
