"""Rematerialisation: keep a function's inputs, compute its inside again in the backward pass.

The forward pass runs f as one op that keeps nothing of its inside; the backward pass runs f's ops
again just before their derivatives. Griewank and Walther 2000, doi:10.1145/347837.347846.

What is kept passes through the op `saved`: passes join nothing across it, so that the inside is
not computed once for both, and a GPU may have it in host memory meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError, did_you_mean
from ..graph import functions as F
from ..graph import tree
from ..graph.decorator import Decorator
from ..graph.expand import inline
from ..graph.interpret import own_memory
from ..graph.ir import Graph, Node
from ..graph.op import OPS, VIEW, Arg, Aval, GraphOp, Sample, sample
from ..graph.ops.scaled_matmul import SCALED_MATMUL
from ..graph.signature import callable_name
from ..graph.text_values import FUNCTIONS, RECORDS
from ..graph.trace import apply, aval_of, current_builder
from ..lazy_dataclass import dataclass
from ..numerics import as_type
from ..tensor import Tensor
from .batching import batch_graph, stretch
from .forward import push_forward
from .reverse import backward
from .subgraphs import (
    Keeper,
    Packed,
    Result,
    check_inputs,
    close_graph,
    is_float,
    run_graph,
    trace_body,
)
from .transform import need_function, signature_of

Policy = Callable[[Node], bool]


@dataclass(frozen=True)
class SaveOps:
    """Whether a node is one of these ops."""

    names: tuple[str, ...]

    def __call__(self, node: Node) -> bool:
        return node.op.name in self.names


class remat_policies:
    """What `ts.remat` keeps: functions of a graph node that say whether to save its results."""

    @staticmethod
    def save_nothing(node: Node) -> bool:
        """Only the inputs of the function: the least memory."""
        return False

    @staticmethod
    def save_everything(node: Node) -> bool:
        """Every result, as without remat."""
        return True

    @staticmethod
    def save_matmuls(node: Node) -> bool:
        """Results of matrix products, which cost most to compute again."""
        return node.op.name == "matmul" or node.op is SCALED_MATMUL

    @staticmethod
    def save_ops(*names: str) -> Policy:
        """Results of these ops, by their names in the graph. Raises ArgumentError."""
        for name in names:
            if name not in OPS:
                raise ArgumentError(f"no op is named {name!r}", hint=did_you_mean(name, list(OPS)))

        return SaveOps(names)


RECORDS["SaveOps"] = SaveOps
FUNCTIONS |= {f.__qualname__: f for f in (remat_policies.save_nothing,
                                          remat_policies.save_everything,
                                          remat_policies.save_matmuls)}


def _named_policy(policy: Any) -> Policy:
    if policy is None:
        return remat_policies.save_nothing
    if isinstance(policy, str):
        found = getattr(remat_policies, policy, None)
        names = [n for n in vars(remat_policies) if n.startswith("save_") and n != "save_ops"]
        if policy not in names or found is None:
            raise ArgumentError(f"no remat policy is named {policy!r}",
                                hint=did_you_mean(policy, names))
        return found
    if not callable(policy):
        raise ArgumentError(f"a remat policy is a function of a node, got {policy!r}",
                            hint="ts.remat_policies.save_matmuls, or lambda node: ...")
    return policy


def _checkpoint(fn: Callable | None = None, *, policy: Any = None, offload: bool = False) -> Any:
    """f with a backward pass that recomputes f's inside instead of keeping it.

    policy: which results are kept all the same; a name or member of `ts.remat_policies`, or a
    function of a graph node (node.op.name, node.outputs). None keeps only the inputs.
    offload: what is kept lies in host memory between the forward and the backward pass, where the
    function runs on a GPU; copies run beside the kernels. Small values and arguments of the whole
    function stay where they are. With policy="save_everything" nothing is computed again.
    Values and gradients are those of f. Random draws are the same in both runs; io and state
    changes happen once. Costs one more evaluation of f.
    """
    rule = _named_policy(policy)
    if fn is None:
        return Decorator(functools.partial(_checkpoint, policy=rule, offload=offload),
                         "checkpoint(...)")
    need_function(fn, "checkpoint")
    if not isinstance(offload, bool):
        raise ArgumentError(f"offload is True or False, got {offload!r}")

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if current_builder() is None:
            return fn(*args, **kwargs)
        return _record(fn, args, kwargs, rule, "host" if offload else "device")

    call.__signature__ = signature_of(fn)  # type: ignore[attr-defined]
    return call


checkpoint = Decorator(_checkpoint, "checkpoint")
remat = Decorator(_checkpoint, "remat")


def _record(fn: Callable, args: tuple, kwargs: dict, policy: Policy, place: str) -> Any:
    packed, box = Packed([list(args), kwargs], numbers="constants"), list[Result]()

    def body(*tracers: Tensor) -> list[Tensor]:
        a, k = packed.build(tracers)
        box.append(Result(fn(*a, **k)))
        return box[0].tensors

    avals = [aval_of(x) for x in packed.tensors]
    graph, captured = close_graph(trace_body(body, avals, callable_name(fn)))
    out = apply(CHECKPOINT, *packed.tensors, *captured, body=graph, policy=policy, place=place)
    return box[0].build(out)


def _keeper(body: Graph, policy: Policy) -> Keeper:
    return Keeper.of(body, [v for node in body.nodes if node.op.name != "constant" and policy(node)
                            for v in node.outputs])


# --- what is kept --------------------------------------------------------------------------------
SAVED = GraphOp(
    "saved",
    shape=lambda x, place: x,
    ref=lambda x, place: x,
    vjp=lambda g, y, x, place: (g,),
    jvp=lambda ts, y, x, place: ts[0],
    batch=lambda size, batched, x, place: (apply(SAVED, x, place=place), True),
    axes="...->...",
    linear="joint",
    memory=VIEW,
    samples=(sample((2, 3), place="device"), sample((2, 3), place="host")),
    doc="x, as a backward pass will read it: kept until then on the device, or on the host",
)


def _saved(x: Tensor, place: str) -> Tensor:
    return apply(SAVED, x, place=place)


# --- the op --------------------------------------------------------------------------------------
def _ref(*arrays: np.ndarray, body: Graph, policy: Policy, place: str) -> tuple:
    return own_memory(run_graph(body, arrays), arrays)


def _residual(*xs: Tensor, body: Graph, policy: Policy, place: str) -> tuple[tuple, Any]:
    keeper = _keeper(body, policy)
    args = [_saved(x, place) for x in xs]
    outs, kept = keeper.split(apply(CHECKPOINT, *xs, body=keeper.graph, policy=policy, place=place))
    return outs, {"args": args, "kept": tree.map_tree(lambda t: _saved(t, place), kept)}


def _vjp(gs: tuple, ys: tuple, *xs: Tensor, saved: Any, wanted: tuple, body: Graph,
         policy: Policy, place: str) -> tuple:
    tape = _keeper(body, policy).resume(saved["args"], saved["kept"])
    places = [i for i, (w, x) in enumerate(zip(wanted, xs, strict=True)) if w and is_float(x)]
    found = backward(tape, gs, [body.inputs[i] for i in places])
    grads: list[Tensor | None] = [None] * len(xs)
    for i, g in zip(places, found, strict=True):
        grads[i] = g
    return tuple(grads)


def _checkpoint_of(xs: Sequence[Tensor], run: Callable, body: Graph, name: str, **attrs: Any
                   ) -> tuple[Tensor, ...]:
    """A checkpoint around a program derived from the body."""
    avals = [aval_of(x) for x in xs]
    graph, captured = close_graph(trace_body(run, avals, f"{body.name}_{name}"))
    return apply(CHECKPOINT, *xs, *captured, body=graph, **attrs)


def _push(ts: tuple, *xs: Tensor, body: Graph, **attrs: Any) -> tuple[tuple, tuple]:
    moved = [i for i, t in enumerate(ts) if t is not None]
    places: list[int] = []

    def run(*args: Tensor) -> list[Tensor]:
        tangents: list[Tensor | None] = [None] * len(xs)
        for i, t in zip(moved, args[len(xs):], strict=True):
            tangents[i] = t
        outs, touts = push_forward(body, args[: len(xs)], tangents)
        places[:] = [j for j, t in enumerate(touts) if t is not None]
        return [*outs, *(touts[j] for j in places)]  # type: ignore[list-item]

    out = _checkpoint_of([*xs, *(ts[i] for i in moved)], run, body, "jvp", **attrs)
    n = len(body.outputs)
    tangents: list[Tensor | None] = [None] * n
    for j, t in zip(places, out[n:], strict=True):
        tangents[j] = t
    return tuple(out[:n]), tuple(tangents)


def _batch(size: Any, batched: tuple, *xs: Tensor, body: Graph, **attrs: Any) -> tuple:
    def run(*args: Tensor) -> list[Tensor]:
        outs, marks = batch_graph(body, size, args, batched)
        return [stretch(y, size, b) for y, b in zip(outs, marks, strict=True)]

    return _checkpoint_of(xs, run, body, "batch", **attrs), True


def _samples() -> tuple[Sample, ...]:
    f32 = as_type("f32")
    body = trace_body(lambda x, w: [F.sin(F.tanh(x) * w)],
                      [Aval((3,), f32), Aval((), f32)], "body")
    args = (Arg((3,)), Arg(()))
    return tuple(Sample(args, {"body": body, "policy": p, "place": place}) for p, place in (
        (remat_policies.save_nothing, "device"), (remat_policies.save_everything, "host")))


CHECKPOINT = GraphOp(
    "checkpoint",
    shape=lambda *xs, body, policy, place: check_inputs(body, xs),
    ref=_ref,
    vjp=_vjp,
    jvp=lambda ts, y, *xs, **attrs: _push(ts, *xs, **attrs)[1],
    push=_push,
    batch=_batch,
    residual=_residual,
    expand=lambda *xs, body, **attrs: inline(body, xs),
    multi=True,
    graph_attrs=("body",),
    samples=_samples(),
    doc="a graph whose inside is computed again in the backward pass",
)

__all__ = ["CHECKPOINT", "checkpoint", "remat", "remat_policies"]
