"""The transforms a user calls: grad, value_and_grad, vjp, jvp, autodiff.

Each traces its function, transforms the graph and evaluates the result. Inside another trace the
evaluation is inlined there; outside it is compiled once per signature, as `ts.jit` would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import hooks
from ..dims import show_shape
from ..errors import ArgumentError, GradError, ShapeError
from ..graph import functions as F
from ..graph import tree
from ..graph.decorator import Decorator
from ..graph.ir import Graph
from ..graph.operand import compute_type, convert
from ..graph.signature import callable_name
from ..graph.simplify import merge_common
from ..graph.trace import current_builder
from ..numerics import as_type
from ..tensor import Tensor, as_tensor
from .chosen_arguments import choose_arguments, held_integers, marks_of, moving_tensors
from .forward import push_forward
from .reverse import backward, forward, is_differentiable, materialize, tape_snapshot
from .subgraphs import Packed, Result
from .transform import (
    Transform,
    bind_slots,
    call_slots,
    need_function,
    signature_of,
    trace_flat,
)


# --- grad -------------------------------------------------------------------------------------
def grad(fn: Callable, argnums: int | Sequence[int] | None = None, *, wrt: Any = None,
         has_aux: bool = False) -> Transform:
    """The gradient of a scalar function.

    Which arguments: `argnums=` (positions, negative ones from the last positional argument of the
    call) or `wrt=` (names) if given; else those that are
    `ts.param`s (or hold some); else argument 0, or, where that is plain, distributed tensors
    among the others. One gradient comes bare, several as a tuple in signature order; a tuple of
    positions or names gives a tuple in its order. An argument that is a dict or list gives one like
    it, and one of a registered class too, with its integers as they are. Of an argument that holds
    `ts.param`s these alone are differentiated: its gradient has None for its other leaves, such as
    running statistics and counters. A leaf that was one in an earlier call is warned of.
    Gradients are f32 (f64 for f64). `has_aux`: fn returns (loss, aux), and so does the transform:
    (gradient, aux). Raises GradError when the loss is not a float scalar, and when argument 0 would
    be taken though another was a param in an earlier call: arithmetic (w - lr * g) loses the mark.
    """
    need_function(fn, "grad")
    both = value_and_grad(fn, argnums, wrt=wrt, has_aux=has_aux)

    def rule(*args: Any, **kwargs: Any) -> Any:
        value, grads = both.rule(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return Transform(fn, rule, "grad")


def value_and_grad(fn: Callable, argnums: int | Sequence[int] | None = None, *, wrt: Any = None,
                   has_aux: bool = False) -> Transform:
    """(loss, gradient) in one pass; with `has_aux` ((loss, aux), gradient). See `ts.grad`."""
    need_function(fn, "value_and_grad")
    signature, name, marked = signature_of(fn), callable_name(fn), marks_of(fn)

    def rule(*args: Any, **kwargs: Any) -> Any:
        slots = bind_slots(signature, args, kwargs, name)
        left = () if argnums is None else (
            signature.parameters.keys() - signature.bind(*args, **kwargs).arguments)
        chosen, bare = choose_arguments(slots, signature, argnums, wrt, name, marked, left)
        packed = Packed({n: slots[n] for n in chosen})
        moves = moving_tensors(packed, name, marked, argnums is None and wrt is None)

        def call(values: dict[str, Any]) -> Any:
            positional, named = call_slots(signature, slots | values)
            return fn(*positional, **named)

        graph, result = _recorded(call, packed, name)
        tape = forward(graph, packed.tensors)
        out = result.build(tape.outputs)
        loss = _loss_of(out, name, has_aux)
        start = hooks.seed.get()(graph, graph.outputs[0])
        one = F.full((), start, compute_type(loss.type))
        wanted = [v for v, on in zip(graph.inputs, moves, strict=True) if on]
        found = iter(backward(tape, [one] + [None] * (len(tape.outputs) - 1), wanted))
        beside = held_integers(packed)
        grads = [materialize(next(found), x) if on else held
                 for x, on, held in zip(packed.tensors, moves, beside, strict=True)]
        per_arg = list(packed.replaced(grads).values())
        return out, per_arg[0] if bare else tuple(per_arg)

    return Transform(fn, rule, "value_and_grad")


def _loss_of(out: Any, name: str, has_aux: bool) -> Tensor:
    """The scalar that is differentiated. Raises GradError unless it is a float scalar."""
    loss = out
    if has_aux:
        if not (isinstance(out, tuple) and len(out) == 2):
            raise GradError(f"{name} must return (loss, aux) with has_aux=True, it returns "
                            f"{type(out).__name__}")
        loss = out[0]
    if not isinstance(loss, Tensor):
        raise GradError(f"{name} must return one scalar, it returns {type(loss).__name__}",
                        hint="return (loss, aux) with has_aux=True" if not has_aux else None)
    if loss.ndim or loss.dtype.kind != "float" or loss.scale is not None:
        raise GradError(f"{name} must return a float scalar, it returns "
                        f"{loss.type}{show_shape(loss.shape)}",
                        hint="reduce it with ts.sum or ts.mean, or use ts.vjp or ts.jacrev")
    return loss


# --- vjp, jvp ---------------------------------------------------------------------------------
def _recorded(call: Callable, packed: Packed, name: str) -> tuple[Graph, Result]:
    """The graph that reverse mode goes through. What is computed twice is one value in it: it has
    one cotangent, which a cast rounds once, behind the sum."""
    graph, result = trace_flat(call, packed, name)
    return merge_common(graph), result


def _primals(primals: Sequence[Any]) -> list[Any]:
    """Python integers given as primals are numbers to differentiate: f32, as Python floats are."""
    return [convert(as_tensor(p), as_type("f32"))
            if isinstance(p, int) and not isinstance(p, bool) else p for p in primals]


def vjp(fn: Callable, *primals: Any) -> tuple[Any, Callable]:
    """(fn(*primals), pullback): pullback(cotangent) gives one cotangent per primal.

    The cotangent has the structure and shapes of the value. A single primal gives a bare
    cotangent; integer and bool tensors have None. The pullback may be called several times; it
    reads what was there when vjp was called, also after assignments to tensors (what is written
    through NumPy arrays that share their memory is not seen).
    f(x) = x*x + 2x at 3: (15, g -> 8 g).
    """
    need_function(fn, "vjp", ["primal"] * len(primals))
    packed = Packed(_primals(primals))
    packed.need_unscaled("vjp: primal")
    graph, result = _recorded(lambda args: fn(*args), packed, callable_name(fn))
    if not result.plain:
        raise GradError(f"{callable_name(fn)} must return tensors, it returns {result.treedef} "
                        "with other objects in it")
    made = forward(graph, packed.tensors)
    tape = made if current_builder() is not None else tape_snapshot(made)

    def pullback(cotangent: Any) -> Any:
        given = tree.leaves_like(cotangent, result.treedef, "the cotangent")
        cts = [_matching(as_tensor(g), y, "cotangent") if is_differentiable(y) else None
               for g, y in zip(given, tape.outputs, strict=True)]
        found = backward(tape, cts, graph.inputs)
        full = [materialize(g, x) if is_differentiable(x) else None
                for g, x in zip(found, packed.tensors, strict=True)]
        out = packed.replaced(full)
        return out[0] if len(primals) == 1 else tuple(out)

    return result.build(made.outputs), pullback


def _matching(t: Tensor, like: Tensor, what: str) -> Tensor:
    if tuple(t.shape) != tuple(like.shape):
        raise ShapeError(f"the {what} has shape {show_shape(t.shape)}, its value "
                         f"{show_shape(like.shape)}")
    return convert(t, compute_type(like.type))


def jvp(fn: Callable, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """(fn(*primals), directional derivative along tangents). Forward mode, one pass.

    Tangents have the structure and shapes of the primals; those of integers and bools are not
    read. The derivative of an integer or bool result is None. Raises GradError, ShapeError.
    """
    need_function(fn, "jvp")
    if not isinstance(primals, tuple | list) or not isinstance(tangents, tuple | list):
        raise ArgumentError("jvp takes tuples: ts.jvp(f, (x,), (t,))")
    packed = Packed(_primals(primals))
    packed.need_unscaled("jvp: primal")
    leaves = tree.leaves_like(list(tangents), packed.treedef, "tangents:")
    given = [leaves[i] for i in packed.places]
    graph, result = trace_flat(lambda args: fn(*args), packed, callable_name(fn))
    ts = [
        _matching(as_tensor(t), x, "tangent") if is_differentiable(x) else None
        for t, x in zip(given, packed.tensors, strict=True)
    ]
    outs, out_ts = push_forward(graph, packed.tensors, ts)
    return result.build(outs), _tangent_of(result, outs, out_ts)


def _tangent_of(result: Result, outs: Sequence[Tensor], ts: Sequence[Tensor | None]) -> Any:
    """Tangents in the structure of the result; None where a leaf has none."""
    it = iter(zip(outs, ts, strict=True))
    leaves: list[Any] = []
    for how in result.rebuild:
        y, t = next(it) if how in ("tensor", "param", "scaled") else (None, None)
        if how == "scaled":
            next(it)
        plain = y is not None and how != "scaled" and is_differentiable(y)
        leaves.append(materialize(t, y) if plain and y is not None else None)
    return tree.unflatten(result.treedef, leaves)


# --- autodiff ---------------------------------------------------------------------------------
class Differentiable:
    """A function marked for differentiation: f(x) is its value; f.grad, f.value_and_grad."""

    def __init__(self, fn: Callable):
        need_function(fn, "autodiff")
        self.fn = fn
        self.__name__ = callable_name(fn)
        self.__doc__, self.__wrapped__ = fn.__doc__, fn
        self.__signature__ = signature_of(fn)
        self.__annotations__ = getattr(fn, "__annotations__", {})
        self.grad, self.value_and_grad = grad(fn), value_and_grad(fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "fn":
            raise AttributeError(name)
        return getattr(self.fn, name)

    def __repr__(self) -> str:
        return f"<autodiff {self.__name__}>"


@Decorator
def autodiff(fn: Callable) -> Differentiable:
    """Mark a function as differentiable. Calling it gives its value; `f.grad` and
    `f.value_and_grad` are its derivatives. Composes with jit in either order: `@jit @autodiff`."""
    return Differentiable(fn)
