"""Programs with collectives called by hand, for simulated ranks and for mpirun."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import tessera as ts
from tessera.mesh.collectives.record import COLLECTIVES

Shape = Callable[[int, int], tuple]


def adjoint_cases() -> Iterator[tuple[str, Shape, Callable[[int], dict[str, Any]]]]:
    """(collective, shape of a rank's operand, attributes for so many ranks): the samples of the
    records, and some that need to know how many ranks there are."""
    for record in COLLECTIVES.values():
        for s in record.samples:
            yield record.name, s.shape, lambda n, s=s: s.attrs
    for shape in (lambda r, n: (2, 3), lambda r, n: (r + 1, 2)):
        yield "permute", shape, lambda n: {"pairs": [(r, (r + 1) % n) for r in range(n)]}
        yield "permute", shape, lambda n: {"pairs": [(r, r + 1) for r in range(n - 1)]}
    yield "broadcast", lambda r, n: (3, 2), lambda n: {"root": n - 1}
    yield "reduce_scatter", lambda r, n: (2, 5), lambda n: {"dim": 1, "op": "min"}
    yield "all_gather", lambda r, n: (2, 3 * (r % 2), 2), lambda n: {"dim": 1}


def distributed_loss():
    """The function of the guide, made anew: ranks of other widths trace it again."""
    @ts.jit
    @ts.autodiff
    def distributed_loss(x, W):
        """Autodiff with distributed operations"""
        y = ts.matmul(x, W)
        y = ts.all_gather(y, axis="tp")
        loss = ts.sum(y**2)
        return loss

    return distributed_loss


# --- a column-parallel and a row-parallel layer ------------------------------------------------
def _numbers() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(23)
    shapes = {"x": (3, 4), "a": (4, 7), "b": (7, 5), "t": (3, 5)}
    return {k: rng.standard_normal(s) for k, s in shapes.items()}


def _dense(x, a, b, t):
    return ts.mean((ts.tanh(x @ a) @ b - t) ** 2)


def _parallel(x, a, b, t):
    """Columns of a and rows of b lie on the ranks; x and t are one value on all of them."""
    same = ts.dist.replicated
    return ts.mean((ts.all_reduce(ts.tanh(same(x) @ a) @ b) - same(t)) ** 2)


def _gathered(x, a, b, t):
    """The same loss with the middle gathered, and b whole."""
    same = ts.dist.replicated
    return ts.mean((ts.tanh(ts.all_gather(same(x) @ a)) @ same(b) - same(t)) ** 2)


def _in_a_scan(loss):
    def looped(x, a, b, t):
        return ts.scan(lambda c, i: (c + loss(x, a, b, t), None), ts.zeros((), "f64"),
                       ts.arange(2))[0] * 0.5

    return looped


def gradients() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Gradients of x, a, b by several transforms on this rank, each beside what it should be."""
    held, rank, size = _numbers(), ts.dist.rank(), ts.dist.world_size()
    meant = dict(zip("xab", ts.grad(_dense, argnums=(0, 1, 2))(*held.values()), strict=True))
    whole = {k: g.numpy() for k, g in meant.items()}
    part = {"a": lambda v: np.array_split(v, size, axis=1)[rank],
            "b": lambda v: np.array_split(v, size, axis=0)[rank]}
    rows = {**held, "a": part["a"](held["a"]), "b": part["b"](held["b"])}
    columns = {**held, "a": rows["a"]}
    found: dict[str, tuple] = {}

    def note(how: str, got: Any, cut: dict[str, Any]) -> None:
        for k, g in zip("xab", got, strict=True):
            found[f"{how}: {k}"] = g.numpy(), cut[k](whole[k]) if k in cut else whole[k]

    every = {"argnums": (0, 1, 2)}
    for name, loss, given, cut in (("rows", _parallel, rows, part),
                                   ("columns", _gathered, columns, {"a": part["a"]})):
        args = [ts.tensor(v) for v in given.values()]
        value, got = ts.value_and_grad(loss, **every)(*args)
        np.testing.assert_allclose(value.item(), _dense(*held.values()).item(), rtol=1e-12)
        note(f"{name} value_and_grad", got, cut)
        note(f"{name} jit of grad", ts.jit(ts.grad(loss, **every))(*args), cut)
        note(f"{name} grad of jit", ts.grad(ts.jit(loss), **every)(*args), cut)
        note(f"{name} checkpoint", ts.grad(ts.checkpoint(loss), **every)(*args), cut)
        note(f"{name} scan", ts.grad(_in_a_scan(loss), **every)(*args), cut)
        pull = ts.vjp(loss, *args)[1]
        note(f"{name} vjp", pull(ts.full((), 1 / size, "f64"))[:3], cut)
    return found
