"""Jacobians and Hessians: a pass per row or column, all of them at once by vmap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ArgumentError, GradError
from ..graph import functions as F
from ..graph import tree
from ..graph.operand import compute_type
from ..graph.signature import callable_name
from ..tensor import Tensor
from .api import grad, jvp, vjp
from .reverse import is_differentiable
from .subgraphs import Packed
from .transform import Transform, need_function
from .vmap import vmap


def jacrev(fn: Callable, argnums: int | Sequence[int] = 0) -> Transform:
    """The Jacobian by reverse mode: shape of the result, then shape of argument `argnums`.

    A nested result gives a nested Jacobian, with one like the argument in each place where that is
    nested too; several argnums give a tuple in each place.
    """
    need_function(fn, "jacrev")

    def rule(*args: Any, **kwargs: Any) -> Any:
        chosen = _Chosen(argnums, args)
        value, pull = vjp(chosen.function(fn, args, kwargs), *chosen.leaves)
        leaves, structure = tree.flatten(value)
        rows = [_rows(pull, leaves, i, structure, chosen.leaves) for i in range(len(leaves))]
        return tree.unflatten(structure, [chosen.like_arguments(r) for r in rows])

    return Transform(fn, rule, "jacrev")


def _rows(pull: Callable, leaves: list[Tensor], i: int, structure: Any, xs: list[Tensor]) -> tuple:
    """d leaf_i / d x for every x: the pullback of each unit tensor of the leaf."""
    y = leaves[i]

    def one(g: Tensor) -> tuple:
        cts = [g if k == i else F.zeros(z.shape, compute_type(z.type))
               for k, z in enumerate(leaves)]
        found = pull(tree.unflatten(structure, cts))
        return found if len(xs) > 1 else (found,)

    stacked = vmap(one).rule(_basis(y))
    return tuple(F.reshape(r, (*y.shape, *x.shape))
                 for r, x in zip(stacked, xs, strict=True))


def jacfwd(fn: Callable, argnums: int | Sequence[int] = 0) -> Transform:
    """The Jacobian by forward mode: shape of the result, then shape of argument `argnums`.

    A nested result gives a nested Jacobian, with one like the argument in each place where that is
    nested too; several argnums give a tuple in each place.
    """
    need_function(fn, "jacfwd")

    def rule(*args: Any, **kwargs: Any) -> Any:
        chosen = _Chosen(argnums, args)
        one, xs = chosen.function(fn, args, kwargs), chosen.leaves
        per_x = [_columns(one, xs, i) for i in range(len(xs))]
        return tree.map_tree(lambda *c: chosen.like_arguments(c), *per_x)

    return Transform(fn, rule, "jacfwd")


def _columns(fn: Callable, xs: list[Tensor], i: int) -> Any:
    """d fn / d x_i: the derivative along each unit tensor of x_i, on the last axes."""
    x = xs[i]

    def along(t: Tensor) -> Any:
        ts = [t if k == i else F.zeros(z.shape, compute_type(z.type))
              for k, z in enumerate(xs)]
        return jvp(fn, tuple(xs), tuple(ts))[1]

    stacked = vmap(along, out_axes=-1).rule(_basis(x))
    return tree.map_tree(lambda c: F.reshape(c, (*c.shape[:-1], *x.shape)), stacked)


def hessian(fn: Callable, argnums: int | Sequence[int] = 0) -> Transform:
    """The matrix of second derivatives, forward over reverse: the shape of the argument twice.

    With several argnums entry [i][j] is d2 f / d x_i d x_j, and so is [a][b] of a dict's entries.
    """
    return jacfwd(jacrev(fn, argnums), argnums)


def hvp(fn: Callable, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """Hessian-vector product of a scalar function, forward over reverse: bare for one primal."""
    if not isinstance(primals, tuple | list) or not isinstance(tangents, tuple | list):
        raise ArgumentError("hvp takes tuples: ts.hvp(f, (x,), (v,))")
    every = tuple(range(len(primals))) if len(primals) > 1 else 0
    return jvp(grad(fn, argnums=every), primals, tangents)[1]


def _argument_positions(argnums: Any, args: tuple) -> tuple[list[int], bool]:
    bare = not isinstance(argnums, tuple | list)
    places = [argnums] if bare else list(argnums)
    for p in places:
        if isinstance(p, bool) or not isinstance(p, int) or not -len(args) <= p < len(args):
            raise ArgumentError(f"argnums {p!r}: the function is called with {len(args)} arguments")
    return [p % len(args) for p in places], bare


class _Chosen:
    """The arguments that are differentiated, as a list of their tensors. What is none stays as it
    is, and has None in its place in a Jacobian, as in a gradient."""

    def __init__(self, argnums: Any, args: tuple):
        self.places, self.bare = _argument_positions(argnums, args)
        self.packed = Packed([args[p] for p in self.places])
        self.leaves = self.packed.tensors
        if not self.leaves:
            raise ArgumentError(f"argnums {argnums!r}: there is no tensor in it")

    def like_arguments(self, values: Sequence[Any]) -> Any:
        """One value for each tensor, put together like the arguments."""
        made = self.packed.replaced(values)
        return made[0] if self.bare else tuple(made)

    def function(self, fn: Callable, args: tuple, kwargs: dict) -> Callable:
        """fn of the tensors."""
        def one(*xs: Tensor) -> Any:
            full = list(args)
            for p, x in zip(self.places, self.packed.build(xs), strict=True):
                full[p] = x
            return fn(*full, **kwargs)

        one.__name__ = callable_name(fn)
        return one


def _basis(x: Tensor) -> Tensor:
    """The unit tensors of x's shape, stacked: [size, *shape]."""
    if not is_differentiable(x):
        raise GradError(f"a Jacobian needs floating values, got {x.type}")
    numeric = compute_type(x.type)
    return F.reshape(F.eye(x.size, dtype=numeric), (x.size, *x.shape))
