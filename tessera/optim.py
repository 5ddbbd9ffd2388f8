"""Optimizers: frozen records of hyper-parameters. Their state is a tree of tensors like any other:
it passes through `ts.jit` and is saved beside the parameters.

    optimizer = ts.optim.AdamW(weight_decay=0.1)
    state = optimizer.init(params)

    @ts.jit
    def step(params, state, x, y, lr):
        loss, grads = ts.value_and_grad(loss_fn)(params, x, y)
        grads, norm = ts.optim.clip_by_global_norm(grads, 1.0)
        params, state = optimizer.update(params, grads, state, lr)
        return params, state, loss, norm

What is trained of a tree are its `ts.param`s; its other leaves, such as running statistics, stay as
they are. Of a tree without any all leaves are trained.

Of distributed parameters the states lie as the parameters do, and a step's results lie as its
arguments, so that the next step runs the same compiled program. `ts.dist.zero` splits the states.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from .call_errors import binding_problem, call_error
from .dims import show_shape
from .errors import ArgumentError, DTypeError, ShapeError, UnknownNameError
from .foreign import OPTIM
from .graph import functions as F
from .graph import tree
from .graph.operand import compute_type, convert
from .graph.signature import is_data
from .graph.trace import in_part
from .mesh.parallel.matching_layouts import counter, lie_as, zeros_as
from .numerics import as_type
from .tensor import Tensor, as_tensor

T = TypeVar("T")
TOGETHER = 8  # sums of squares that are added one after another


def decays_matrices(path: str, param: Tensor) -> bool:
    """The usual choice: weight decay for matrices, none for norms, biases and embeddings."""
    return param.ndim >= 2 and "embed" not in path


def named_params(params: Any) -> dict[str, Tensor]:
    """{"blocks.0.qkv": tensor}: what is trained of a tree, its `ts.param`s, or all leaves where
    none is one. Raises DTypeError for one that is no float tensor."""
    leaves, structure = tree.flatten(params)
    every = dict(zip(tree.paths(structure), leaves, strict=True))
    named = {path: x for path, x in every.items() if isinstance(x, Tensor) and x.is_param} or every
    for path, p in named.items():
        if not isinstance(p, Tensor) or p.dtype.kind != "float" or p.scale is not None:
            kind = p.type if isinstance(p, Tensor) else type(p).__name__
            data = not isinstance(p, Tensor) and is_data(p)
            raise DTypeError(f"parameter {path!r} is {kind}, an optimizer needs float tensors",
                             hint="make it a parameter: ts.param(x)" if data else
                             "mark what is trained, ts.param(x): an optimizer leaves what is "
                             "beside it as it is")
    return named


def _checked(cls: type[T]) -> type[T]:
    """An optimizer that says what it takes, and where parameters and the rate go."""
    signature, made = inspect.signature(cls), cls.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if (problem := binding_problem(signature, args, kwargs)) is not None:
            raise call_error(
                cls.__name__, signature, kwargs, problem,
                f"{', '.join(signature.parameters)}; parameters and the rate are given later: "
                "state = opt.init(params), opt.update(params, grads, state, lr)") from None
        made(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[method-assign]
    return cls


@_checked
@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay.

    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
    p <- p - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p)

    decays(path, param) says which parameters decay. Moments are f32 (f64 for f64 parameters). A
    parameter of a narrower type has an f32 master copy in the state: updates add up there, and the
    parameter is the master rounded once, as its type says. One whose type rounds stochastically,
    `bf16 @stochastic_round`, has none: its updates add up on average.
    Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2 with the rate as schedule.
    """

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    decays: Callable[[str, Tensor], bool] = decays_matrices

    def __post_init__(self) -> None:
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ArgumentError(f"AdamW: {name} must be in [0, 1), got {getattr(self, name)}")
        if not self.eps > 0:
            raise ArgumentError(f"AdamW: eps must be positive, got {self.eps}")
        if not self.weight_decay >= 0:
            raise ArgumentError(f"AdamW: weight_decay cannot be negative, got {self.weight_decay}")

    def init(self, params: Any) -> dict[str, Any]:
        """The state before the first step: step, moments by parameter path, master copies."""
        return _first_state(params, ("m", "v"))

    def update(self, params: Any, grads: Any, state: dict[str, Any], lr: Any
               ) -> tuple[Any, dict[str, Any]]:
        """(params, state) after one step. lr: a number or a scalar tensor.

        Raises ArgumentError when grads or state do not belong to params.
        """
        def rates(step: Tensor) -> tuple[Tensor, ...]:
            t = convert(step, compute_type(as_tensor(1.0).type))
            return as_tensor(lr), _unbias(self.b1, t), _unbias(self.b2, t)

        return _stepped(self, params, grads, state, ("m", "v"), rates)

    def _leaf(self, w: Tensor, g: Tensor, moments: tuple, rates: tuple, decay: float) -> tuple:
        lr, unbias1, unbias2 = rates
        m = moments[0] * self.b1 + g * (1 - self.b1)
        v = moments[1] * self.b2 + (g * g) * (1 - self.b2)
        change = (m * unbias1) / (F.sqrt(v * unbias2) + self.eps)
        return w - lr * (change + w * decay if decay else change), (m, v)


@_checked
@dataclass(frozen=True)
class SGD:
    """Gradient descent, with momentum if that is not 0, and decoupled weight decay.

    m <- momentum m + g,   p <- p - lr (m + weight_decay p)

    decays(path, param) and the f32 master copies of narrow parameters are those of AdamW.
    Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 1 with the rate on the whole step.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    decays: Callable[[str, Tensor], bool] = decays_matrices

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ArgumentError(f"SGD: momentum must be in [0, 1), got {self.momentum}")
        if not self.weight_decay >= 0:
            raise ArgumentError(f"SGD: weight_decay cannot be negative, got {self.weight_decay}")

    @property
    def _moments(self) -> tuple[str, ...]:
        return ("m",) if self.momentum else ()

    def init(self, params: Any) -> dict[str, Any]:
        """The state before the first step: step, momentum by parameter path, master copies."""
        return _first_state(params, self._moments)

    def update(self, params: Any, grads: Any, state: dict[str, Any], lr: Any
               ) -> tuple[Any, dict[str, Any]]:
        """(params, state) after one step. lr: a number or a scalar tensor.

        Raises ArgumentError when grads or state do not belong to params.
        """
        return _stepped(self, params, grads, state, self._moments, lambda step: (as_tensor(lr),))

    def _leaf(self, w: Tensor, g: Tensor, moments: tuple, rates: tuple, decay: float) -> tuple:
        change = moments[0] * self.momentum + g if moments else g
        made = (change,) if moments else ()
        return w - rates[0] * (change + w * decay if decay else change), made


def _first_state(params: Any, moments: Sequence[str]) -> dict[str, Any]:
    """Step 0: zero moments in the compute type, and master copies of narrow parameters."""
    named = named_params(params)
    wide = {path: compute_type(p.type) for path, p in named.items()}

    def zeros() -> dict[str, Tensor]:
        return {path: zeros_as(p, wide[path]) for path, p in named.items()}

    masters = {path: convert(p, wide[path]) for path, p in named.items()
               if p.dtype is not wide[path].dtype and p.policy.rounding != "stochastic"}
    step = counter(list(named.values()))
    return {"step": step, **{m: zeros() for m in moments}, "master": masters}


def _stepped(optimizer: AdamW | SGD, params: Any, grads: Any, state: dict[str, Any],
             moments: Sequence[str], rates: Callable[[Tensor], tuple[Tensor, ...]]
             ) -> tuple[Any, dict[str, Any]]:
    """(params, state) after optimizer._leaf has moved each parameter, or its master copy."""
    with in_part("optimizer"):
        return _step(optimizer, params, grads, state, moments, rates)


def _step(optimizer: AdamW | SGD, params: Any, grads: Any, state: dict[str, Any],
          moments: Sequence[str], rates: Callable[[Tensor], tuple[Tensor, ...]]
          ) -> tuple[Any, dict[str, Any]]:
    named = named_params(params)
    slopes = _matching_grads(named, params, grads)
    _check_state(type(optimizer).__name__, named, state, moments)
    step = state["step"] + 1
    now = rates(step)
    new: dict[str, Any] = {"step": step, **{m: {} for m in moments}, "master": {}}
    out = []
    leaves, structure = tree.flatten(params)
    for path, p in zip(tree.paths(structure), leaves, strict=True):
        if path not in named:
            out.append(p)
            continue
        w = state["master"].get(path)
        w = convert(p, compute_type(p.type)) if w is None else w
        held = tuple(state[m][path] for m in moments)
        decay = optimizer.weight_decay if optimizer.decays(path, p) else 0.0
        mine = tuple(convert(r, w.type) for r in now)
        w, made = optimizer._leaf(w, slopes[path], held, mine, decay)
        for m, x in zip(moments, made, strict=True):
            new[m][path] = lie_as(x, state[m][path])
        if path in state["master"]:
            new["master"][path] = lie_as(w, state["master"][path])
        out.append(_like_param(w, p))
    return tree.unflatten(structure, out), new


def _unbias(b: float, t: Tensor) -> Tensor:
    """1 / (1 - b^t). expm1: 1 - b^t in f32 would lose digits for b near 1 and small t."""
    if b == 0:
        return F.ones_like(t)
    return 1.0 / -F.expm1(t * math.log(b))


def _like_param(w: Tensor, p: Tensor) -> Tensor:
    out = lie_as(convert(w, p.type), p)
    out.is_param = p.is_param
    return out


def _matching_grads(named: dict[str, Tensor], params: Any, grads: Any) -> dict[str, Tensor]:
    """The gradients of what is trained. Of what is not there may be some, which are not read."""
    leaves, structure = tree.flatten(grads)
    found = dict(zip(tree.paths(structure), leaves, strict=True))
    beside = set(tree.paths(tree.flatten(params)[1])) - named.keys()
    found = {path: g for path, g in found.items() if path not in beside}
    if list(found) != list(named):
        odd = sorted(found.keys() ^ named.keys())
        raise ArgumentError(f"gradients and parameters differ in {', '.join(odd) or 'order'}",
                            hint="pass the gradient that ts.grad returned for these parameters")
    for path, p in named.items():
        if tuple(found[path].shape) != tuple(p.shape):
            raise ShapeError(f"the gradient of {path!r} has shape {show_shape(found[path].shape)}, "
                             f"the parameter {show_shape(p.shape)}")
    return {path: convert(g, compute_type(g.type)) for path, g in found.items()}


def _check_state(kind: str, named: dict[str, Tensor], state: Any, moments: Sequence[str]) -> None:
    if not isinstance(state, dict) or not {"step", *moments, "master"} <= state.keys():
        raise ArgumentError(f"this is no {kind} state", hint="state = optimizer.init(params)")
    for m in moments:
        if state[m].keys() != named.keys():
            odd = sorted(state[m].keys() ^ named.keys())
            raise ArgumentError(f"optimizer state and parameters differ in {', '.join(odd)}",
                                hint="state = optimizer.init(params) of these parameters; what is "
                                "trained are the ts.params, and arithmetic gives plain tensors")


def global_norm(grads: Any) -> Tensor:
    """sqrt(sum of all squares) over the floating leaves of a tree, in f32."""
    leaves = [g for g in map(as_tensor, tree.flatten(grads)[0]) if _is_float(g)]
    if not leaves:
        raise ArgumentError("the norm of a tree without tensors")
    with in_part("optimizer"):
        sums = [F.sum(F.square(convert(g, compute_type(g.type)))) for g in leaves]
        while len(sums) > 1:  # a tree: those of a level do not wait for each other
            sums = [functools.reduce(operator.add, sums[i:i + TOGETHER])
                    for i in range(0, len(sums), TOGETHER)]
        return F.sqrt(sums[0])


def clip_by_global_norm(grads: Any, limit: float, norm: Any = None) -> tuple[Any, Tensor]:
    """(grads, norm): all leaves times limit / norm when the norm before is above the limit.

    norm: that of a larger tree of which these are a part; default the norm of grads.

    A norm that is NaN or infinite stays visible: it is returned, and the gradients become NaN.
    Pascanu et al. 2013, arXiv:1211.5063. Raises ArgumentError unless limit > 0.
    """
    if not limit > 0:
        raise ArgumentError(f"clip_by_global_norm: the limit must be positive, got {limit}")
    norm = global_norm(grads) if norm is None else as_tensor(norm)
    with in_part("optimizer"):
        scale = limit / F.maximum(norm, limit) + 0.0 * norm  # NaN of a norm that is not finite
        return tree.map_tree(lambda g: g * scale if _is_float(g) else g, grads), norm


def _is_float(x: Any) -> bool:
    return as_tensor(x).dtype.kind == "float"


@dataclass(frozen=True)
class CosineSchedule:
    """Learning rate per step: linear from 0 to `peak` over `warmup` steps, then half a cosine down
    to `floor` at `steps`, and `floor` after that.

    Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5 without restarts. Steps count from 0; the
    first one already has a rate above 0. The rate of an integer is a float, that of a tensor,
    traced or not, an f32 tensor of its shape.
    """

    peak: float
    steps: int
    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= self.peak or not math.isfinite(self.peak):
            raise ArgumentError(f"CosineSchedule needs 0 <= floor <= peak, got floor {self.floor}, "
                                f"peak {self.peak}")
        if not 0 <= self.warmup <= self.steps or self.steps < 1:
            raise ArgumentError(f"CosineSchedule needs 0 <= warmup <= steps and steps >= 1, got "
                                f"warmup {self.warmup}, steps {self.steps}")

    def __call__(self, step: Any) -> Any:
        """The rate of this step."""
        if isinstance(step, Tensor):
            return self._of_tensor(step)
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if step >= self.steps:
            return self.floor
        way = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * way))

    def _of_tensor(self, step: Tensor) -> Tensor:
        """Differences of steps are taken before they become f32, which holds 2^24 of them."""
        kind = as_type("f32")
        rise = convert(step + 1, kind) * (self.peak / max(self.warmup, 1))
        way = convert(step - self.warmup, kind) * (1.0 / max(self.steps - self.warmup, 1))
        fall = self.floor + (self.peak - self.floor) * 0.5 * (1 + F.cos(math.pi * way))
        where = F.where
        return where(step < self.warmup, rise, where(step >= self.steps, self.floor, fall))


def __getattr__(name: str) -> NoReturn:
    """A name that ts.optim does not have: the error says which is near."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise UnknownNameError(f"tessera.optim has no name {name!r}", name, lambda: sorted(__all__),
                           OPTIM)


__all__ = [
    "AdamW", "CosineSchedule", "SGD", "clip_by_global_norm", "decays_matrices", "global_norm",
    "named_params",
]
