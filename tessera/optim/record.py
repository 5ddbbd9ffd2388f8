"""What an optimizer is: a record of its settings, the state that it holds of a parameter, and how
a parameter moves. Walking the tree, master copies, layouts and checks are the same for all.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, TypeVar

from ..argument_kinds import wrong_argument
from ..call_errors import binding_problem, call_error, refuse_wrong_init
from ..dims import show_shape
from ..errors import ArgumentError, ShapeError, UnknownNameError
from ..graph import functions as F
from ..graph import tree
from ..graph.jit import JitFunction
from ..graph.operand import compute_type, convert, number_in
from ..graph.trace import in_part
from ..graph.weak_numbers import is_number
from ..mesh.parallel.matching_layouts import counter, lie_as, zeros_as
from ..numerics import as_type
from ..open_trace import trace_state
from ..tensor import Tensor, as_tensor
from ..tile.launch.resident import Resident
from .trainable import named_params

T = TypeVar("T")
F64 = as_type("f64")
State = dict[str, Any]
OPTIMIZERS: dict[str, type[OptimizerRecord]] = {}


class OptimizerRecord(ABC):
    """The base of all: `init` makes a state, `update` a step. A record is a frozen dataclass under
    `@optimizer`, which has weight_decay and decays among its fields, and gives

    holds   names of what the state holds, each a dict by the path of the parameter
    axes_of(path, p)  the axes of p that each of them has, for those that it holds of p
    rates(lr, step)   numbers of a step, as tensors
    moved(w, g, held, rates, decay)  the parameter and what is held, after the step
    """

    holds: ClassVar[tuple[str, ...]] = ()
    weight_decay: float
    decays: Callable[[str, Tensor], bool]

    def axes_of(self, path: str, p: Tensor) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(self.holds, tuple(range(p.ndim)))

    def rates(self, lr: Tensor, step: Tensor) -> tuple[Tensor, ...]:
        return (lr,)

    @abstractmethod
    def moved(self, w: Tensor, g: Tensor, held: dict[str, Tensor], rates: tuple[Tensor, ...],
              decay: float) -> tuple[Tensor, dict[str, Tensor]]: ...

    def init(self, params: Any) -> State:
        """The state before the first step: its number, what is held by the path of the parameter,
        and wide master copies of narrow parameters."""
        named = named_params(params)
        wide = {path: compute_type(p.type) for path, p in named.items()}
        state: State = {"step": counter(list(named.values())), **{m: {} for m in self.holds}}
        for path, p in named.items():
            for m, axes in self.axes_of(path, p).items():
                zeros, gone = zeros_as(p, wide[path]), set(range(p.ndim)) - set(axes)
                state[m][path] = F.max(zeros, axis=tuple(gone)) if gone else zeros
        masters = {path: convert(p, wide[path]) for path, p in named.items()
                   if p.dtype is not wide[path].dtype and p.policy.rounding != "stochastic"}
        return state | {"master": masters}

    def update(self, params: Any, grads: Any, state: State, lr: Any) -> tuple[Any, State]:
        """(params, state) after one step. lr: a number or a scalar tensor.

        Raises ArgumentError when grads or state do not belong to params.
        """
        with in_part("optimizer"):
            return _step(self, params, grads, state, lr)


_TORCHS = {
    "step": "params, state = opt.update(params, grads, state, lr)",
    "zero_grad": "nothing: ts.grad makes new gradients in each step",
    "state_dict": "the state itself: ts.checkpoints.save(path, {'params': params, 'state': state})",
}


def optimizer(cls: type[T]) -> type[T]:
    """Registers a record. Its settings are given by name; an error says what there are, and where
    parameters and the rate go. Raises ArgumentError for a second one of its name."""
    if cls.__name__ in OPTIMIZERS:
        raise ArgumentError(f"the optimizer {cls.__name__} is declared twice")
    signature = inspect.signature(cls)
    made = refuse_wrong_init(cls, _how(signature)).__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if args:
            raise ArgumentError(f"{cls.__name__} takes its settings by name, got "
                                f"{', '.join(map(repr, args))[:60]}", hint=_how(signature))
        made(self, **kwargs)
        wrong = wrong_argument(made, signature, (), kwargs)  # would fail at a step, or never
        if wrong is not None:
            raise ArgumentError(f"{cls.__name__}: {wrong}", hint=_how(signature))

    def unknown(self: Any, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownNameError(f"{cls.__name__} has no attribute {name!r}", name,
                               lambda: [*signature.parameters, "init", "update"], _TORCHS)

    cls.__init__ = init  # type: ignore[method-assign]
    cls.__getattr__ = unknown  # type: ignore[attr-defined]
    for name in ("init", "update"):
        setattr(cls, name, _with_named_errors(f"{cls.__name__}.{name}", getattr(cls, name)))
    OPTIMIZERS[cls.__name__] = cls  # type: ignore[assignment]
    return cls


def _with_named_errors(name: str, method: Callable) -> Callable:
    """A method whose arguments, where they do not fit, are an error that says the record's name."""
    signature = inspect.signature(method)
    signature = signature.replace(parameters=list(signature.parameters.values())[1:])

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (problem := binding_problem(signature, args, kwargs)) is not None:
            raise call_error(name, signature, kwargs, problem) from None
        return method(self, *args, **kwargs)

    return call


def _how(signature: inspect.Signature) -> str:
    return (f"{', '.join(signature.parameters)}; parameters and the rate are given later: "
            "state = opt.init(params), opt.update(params, grads, state, lr)")


def check(record: Any, fractions: tuple[str, ...] = (), positive: tuple[str, ...] = ()) -> None:
    """Raise ArgumentError unless these settings are in [0, 1) and above 0, and the weight decay is
    not negative."""
    kind = type(record).__name__
    for name in fractions:
        if not 0 <= getattr(record, name) < 1:
            raise ArgumentError(f"{kind}: {name} must be in [0, 1), got {getattr(record, name)}")
    for name in positive:
        if not getattr(record, name) > 0:
            raise ArgumentError(f"{kind}: {name} must be positive, got {getattr(record, name)}")
    if not record.weight_decay >= 0:
        raise ArgumentError(f"{kind}: weight_decay cannot be negative, got {record.weight_decay}")


# --- a step ---------------------------------------------------------------------------------------
def _step(record: OptimizerRecord, params: Any, grads: Any, state: State, lr: Any
          ) -> tuple[Any, State]:
    named = named_params(params)
    slopes = _matching_grads(named, params, grads)
    _check_state(record, {path: record.axes_of(path, p) for path, p in named.items()}, state)
    if trace_state.builder is None and _on_gpu((named, slopes, state)):
        made, new = _compiled(record)(named, slopes, state, lr)
    else:
        made, new = _moved(record, named, slopes, state, lr)
    leaves, structure = tree.flatten(params)
    out = [made.get(path, p) for path, p in zip(tree.paths(structure), leaves, strict=True)]
    return tree.unflatten(structure, out), new


def _moved(record: OptimizerRecord, named: dict[str, Tensor], slopes: dict[str, Tensor],
           state: State, lr: Any) -> tuple[dict[str, Tensor], State]:
    """What is trained and the state after a step, by path."""
    step = state["step"] + 1
    now = record.rates(_rate(lr, [*named.values()]), step)
    new: State = {"step": step, **{m: {} for m in record.holds}, "master": {}}
    out = {}
    for path, p in named.items():
        w, g = state["master"].get(path), slopes[path]
        w = convert(p, compute_type(p.type)) if w is None else w
        decay = record.weight_decay if record.decays(path, p) else 0.0
        mine = {m: state[m][path] for m in record.axes_of(path, p)}
        w, made = record.moved(w, convert(g, compute_type(g.type)), mine,
                               tuple(convert(r, w.type) for r in now), decay)
        for m, x in made.items():
            new[m][path] = lie_as(x, state[m][path])
        if path in state["master"]:
            new["master"][path] = lie_as(w, state["master"][path])
        out[path] = _like_param(w, p)
    return out, new


def _on_gpu(given: Any) -> bool:
    """Whether all of it lies on GPUs: then a step outside of traces is one program, and not many
    small ones."""
    leaves = [x for x in tree.flatten(given)[0] if not isinstance(x, Tensor) or x.ndim]
    return bool(leaves) and all(type(x) is Resident and not x.offloaded for x in leaves)


@functools.lru_cache(64)
def _compiled(record: OptimizerRecord) -> JitFunction:
    def step(named: Any, slopes: Any, state: Any, lr: Any) -> Any:
        with in_part("optimizer"):
            return _moved(record, named, slopes, state, lr)

    return JitFunction(step, name=f"{type(record).__name__}.update")


def _rate(lr: Any, params: list[Tensor]) -> Tensor:
    """The rate as a tensor: a number is one of f64 beside parameters of f64."""
    if isinstance(lr, str) or lr is None:
        raise ArgumentError(f"lr must be a number or a scalar tensor, got {lr!r}")
    wide = is_number(lr) and any(p.dtype is F64.dtype for p in params)
    return number_in(lr, F64) if wide else as_tensor(lr)


def _like_param(w: Tensor, p: Tensor) -> Tensor:
    out = lie_as(convert(w, p.type), p)
    out.is_param = p.is_param
    return out


def _matching_grads(named: dict[str, Tensor], params: Any, grads: Any) -> dict[str, Tensor]:
    """The gradients of what is trained, by path. Those of other leaves are not read."""
    leaves, structure = tree.flatten(grads)
    found = dict(zip(tree.paths(structure), map(as_tensor, leaves), strict=True))
    beside = set(tree.paths(tree.flatten(params)[1])) - named.keys()
    found = {path: g for path, g in found.items() if path not in beside}
    if isinstance(grads, dict) and {"step", "master"} <= grads.keys() - named.keys():
        raise ArgumentError("an optimizer's state in the place of the gradients",
                            hint="params, state = opt.update(params, grads, state, lr)")
    if odd := sorted(found.keys() ^ named.keys()):
        names = ", ".join(map(_parameter_name, odd))
        raise ArgumentError(f"gradients and parameters differ in {names}",
                            hint="pass the gradient that ts.grad returned for these parameters")
    for path, p in named.items():
        if tuple(found[path].shape) != tuple(p.shape):
            given = show_shape(found[path].shape)
            raise ShapeError(f"the gradient of {_parameter_name(path)} has shape {given}, the "
                             f"parameter {show_shape(p.shape)}")
    return found


def _parameter_name(path: str) -> str:
    return repr(path) if path else "the parameter"


def _check_state(record: OptimizerRecord, held: dict[str, dict], state: Any) -> None:
    if not isinstance(state, dict) or not {"step", *record.holds, "master"} <= state.keys():
        raise ArgumentError(f"this is no {type(record).__name__} state",
                            hint="state = optimizer.init(params)")
    for m in record.holds:
        want = {path for path, mine in held.items() if m in mine}
        if state[m].keys() != want:
            odd = sorted(state[m].keys() ^ want)
            raise ArgumentError(f"optimizer state and parameters differ in {', '.join(odd)}",
                                hint="state = optimizer.init(params) of these parameters; what is "
                                "trained are the ts.params, and arithmetic gives plain tensors")
