"""gradcheck: both derivative modes of a function against central differences in f64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError, GradError
from ..graph import tree
from ..graph.operand import convert
from ..graph.signature import callable_name
from ..lazy_dataclass import dataclass
from ..numerics import as_type
from ..numerics.random_state import RandomState, get_state, set_state
from ..tensor import Tensor, as_tensor
from .api import grad, jvp, vjp
from .subgraphs import Packed, is_float
from .transform import need_function

F64 = as_type("f64")
MODES = ("reverse", "forward")


@dataclass(frozen=True)
class GradcheckRow:
    """The worst error of one argument in one mode, at one element."""

    argument: str
    mode: str
    index: tuple[int, ...]
    got: float
    want: float
    error: float
    allowed: float

    @property
    def bad(self) -> bool:
        return not self.error <= self.allowed

    def __str__(self) -> str:
        place = f"{self.argument}{list(self.index)}"
        flag = "  <--" if self.bad else ""
        return (f"{place:<18}{self.mode:<10}{self.got:>14.6g}{self.want:>14.6g}"
                f"{self.error:>12.3g}{self.allowed:>12.3g}{flag}")


def gradcheck(fn: Callable, args: Sequence[Any], *, order: int = 1, eps: float = 1e-5,
              rtol: float = 1e-5, atol: float = 1e-7, modes: str | Sequence[str] = MODES,
              seed: int = 0) -> bool:
    """True when the derivatives of fn at args are its central differences, else GradError.

    args: floating ones are converted to f64 and varied, others passed as they are
    order: 2 checks the gradient's own derivatives too   modes: "reverse", "forward", or both
    Each element is compared: |got - want| <= atol + rtol max(|want|, 1), where want is
    (L(x + eps e_i) - L(x - eps e_i)) / (2 eps) for a random weighting L of the results.
    Where fn draws random numbers, every evaluation draws the same.
    The error's text is a table of the worst element per argument.
    """
    need_function(fn, "gradcheck")
    if not isinstance(args, tuple | list):
        raise ArgumentError("gradcheck takes the arguments as a tuple: ts.gradcheck(f, (x, y))")
    modes = (modes,) if isinstance(modes, str) else tuple(modes)
    for mode in modes:
        if mode not in MODES:
            raise ArgumentError(f"there is no mode {mode!r}: modes are {', '.join(MODES)}")
    rng = np.random.default_rng(seed)
    packed = Packed(list(args))
    wide = [convert(x, F64) if is_float(x) else x for x in packed.tensors]
    moved = [i for i, x in enumerate(wide) if is_float(x)]
    if not moved:
        raise GradError("gradcheck: no argument has a floating type")

    def call(*xs: Tensor) -> list[Tensor]:
        full = list(wide)
        for i, x in zip(moved, xs, strict=True):
            full[i] = x
        out = tree.flatten(fn(*packed.replaced(full)))[0]
        return [y for y in map(as_tensor, out) if is_float(y)]

    names = [packed.names("args")[i] for i in moved]
    xs = [wide[i] for i in moved]
    _check(call, xs, names, callable_name(fn), (eps, rtol, atol), modes, rng)
    if order > 1:
        weights = [_random(y, rng) for y in call(*xs)]
        every = tuple(range(len(xs)))

        def slope(*given: Tensor) -> tuple[Tensor, ...]:
            return grad(lambda *a: _weighted(call(*a), weights), argnums=every)(*given)

        gradcheck(slope, tuple(xs), order=order - 1, eps=eps, rtol=10 * rtol, atol=10 * atol,
                  modes=modes, seed=seed + 1)
    return True


def _random(like: Tensor, rng: np.random.Generator) -> Tensor:
    return Tensor(np.asarray(rng.standard_normal(like.shape)).astype(like.dtype.compute.numpy),
                  as_type(like.dtype.compute))


def _weighted(ys: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    total: Any = 0.0
    for y, w in zip(ys, weights, strict=True):
        total = total + (y * w).sum()
    return total


def _check(call: Callable, xs: list[Tensor], names: list[str], fn: str, limits: tuple,
           modes: Sequence[str], rng: np.random.Generator) -> None:
    state = get_state()
    weights = [_random(y, rng) for y in call(*xs)]
    eps, rtol, atol = limits
    value, pullback, push = call, vjp, jvp
    if get_state() != state:  # it draws: alike in all that follows, and as in a derivative
        value = _from_state(state, lambda *xs: vjp(call, *xs)[0])
        pullback, push = _from_state(state, vjp), _from_state(state, jvp)
    want = _differences(value, xs, weights, eps)
    rows = []
    for mode in modes:
        found = _reverse(pullback, call, xs, weights) if mode == "reverse" else \
            _forward(push, call, xs, weights)
        rows += [_worst(n, mode, g, w, rtol, atol)
                 for n, g, w in zip(names, found, want, strict=True)]
    if any(r.bad for r in rows):
        head = f"{'element':<18}{'mode':<10}{'derivative':>14}{'difference':>14}" \
               f"{'error':>12}{'allowed':>12}"
        raise GradError("\n".join([f"gradcheck: derivatives of {fn} are off", head,
                                   *map(str, rows)]),
                        hint="the worst element of each argument is shown; a kink within eps of "
                        "the point also shows here")


def _from_state(state: RandomState, function: Callable) -> Callable:
    """The function, whose every call draws what it draws at this state."""
    def called(*args: Any) -> Any:
        set_state(state)
        return function(*args)

    return called


def _differences(call: Callable, xs: list[Tensor], weights: list[Tensor], eps: float
                 ) -> list[np.ndarray]:
    out = []
    for k, x in enumerate(xs):
        base = np.array(x.array, np.float64)
        slope = np.empty(base.shape)
        for i in np.ndindex(base.shape):
            values = []
            for step in (eps, -eps):
                near = base.copy()
                near[i] += step
                values.append(_value(call, [*xs[:k], Tensor(near, F64), *xs[k + 1:]], weights))
            slope[i] = (values[0] - values[1]) / (2 * eps)
        out.append(slope)
    return out


def _value(call: Callable, xs: list[Tensor], weights: list[Tensor]) -> float:
    return float(sum(np.vdot(np.asarray(y.numpy(), np.float64), w.array)
                     for y, w in zip(call(*xs), weights, strict=True)))


def _reverse(vjp: Callable, call: Callable, xs: list[Tensor], weights: list[Tensor]
             ) -> list[np.ndarray]:
    found = vjp(call, *xs)[1](weights)
    return [g.array for g in (found if len(xs) > 1 else (found,))]


def _forward(jvp: Callable, call: Callable, xs: list[Tensor], weights: list[Tensor]
             ) -> list[np.ndarray]:
    """One pass per element: the derivative along its unit tensor."""
    out = []
    for k, x in enumerate(xs):
        slope = np.empty(x.shape)
        for i in np.ndindex(slope.shape):
            unit = np.zeros(slope.shape)
            unit[i] = 1.0
            ts = [Tensor(unit if j == k else np.zeros(z.shape), F64) for j, z in enumerate(xs)]
            moved = jvp(call, tuple(xs), tuple(ts))[1]
            slope[i] = sum(np.vdot(t.array, w.array) for t, w in zip(moved, weights, strict=True))
        out.append(slope)
    return out


def _worst(name: str, mode: str, got: np.ndarray, want: np.ndarray, rtol: float, atol: float
           ) -> GradcheckRow:
    error = np.abs(got - want)
    allowed = atol + rtol * np.maximum(np.abs(want), 1.0)
    if not error.size:
        return GradcheckRow(name, mode, (), 0.0, 0.0, 0.0, atol)
    excess = np.where(np.isnan(error), np.inf, error / allowed)
    at = np.unravel_index(int(np.argmax(excess)), error.shape)
    return GradcheckRow(name, mode, tuple(map(int, at)), float(got[at]), float(want[at]),
                        float(error[at]),
                        float(allowed[at]))
