"""Sentinels of launches: which tensors a kernel watches, its words, and what is told of them.

In the mode "raise" a launch of the user's is waited for. When it has counted something, it is run
again under the interpreter from copies of its arguments, which says which op made what: arrays that
a kernel reads and writes are copied before it runs. In "flag" its words are read when somebody asks
(ts.debug.flags).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera import hooks
from tessera.errors import user_line
from tessera.numerics import as_type, decode
from tessera.runtime import late_checks
from tessera.runtime.arrays import HOST, read_array
from tessera.runtime.buffer import Borrowed
from tessera.runtime.device import device
from tessera.runtime.sentinel_words import WatchedLaunch, owner, sentinel_words
from tessera.tensor import Tensor
from tessera.tile.interpreter.arguments import Bound
from tessera.tile.interpreter.launch import extent
from tessera.tile.ir.ir import Function, Op, SSAValue, walk
from tessera.tile.ir.types import GlobalTensor, Scalar, TileType
from tessera.tile.passes.written_arguments import read_parameters, written_parameters

if TYPE_CHECKING:
    from tessera.tile.launch.machine_code import Image

RunAgain = Callable[[dict[str, Any], tuple[int, int]], Any]  # host arguments, key -> the result


def watched_tensors(function: Function) -> frozenset[str]:
    """The tensors of a kernel in which a NaN or an infinity can lie, and those of other formats
    to which it casts."""
    written = written_parameters(function)
    kinds = ("float", "int", "uint") if casts_to_integers(function) else ("float",)
    return frozenset(p.value.name for p in function.params if isinstance(p.type, GlobalTensor)
                     and p.type.dtype.kind in kinds
                     and (p.type.dtype.special in ("ieee", "fn") or p.value.name in written))


def casts_to_integers(function: Function) -> bool:
    """Whether it makes integers of floating-point numbers, of which those beyond the range become
    the largest or the least."""
    types = {d.value: d.type for n in walk(function.body) if isinstance(n, Op) for d in n.outs}
    made = [n for n in walk(function.body) if isinstance(n, Op) and n.name == "convert"]
    return any(_kind(n.outs[0].type) in ("int", "uint") and isinstance(n.args[0], SSAValue)
               and _kind(types.get(n.args[0])) == "float" for n in made)


def _kind(t: Any) -> str:
    return t.dtype.kind if isinstance(t, TileType | Scalar) else ""


class LaunchSentinels:
    """Those of one recipe. names: of its arguments. run_again: a call under the interpreter."""

    def __init__(self, image: Image, bound: Bound, index: int, raises: bool,
                 names: tuple[str, ...], run_again: RunAgain | None):
        self.image, self.index, self.raises, self.names = image, index, raises, names
        function = image.function
        self._shapes = {p.value.name: tuple(extent(str(d), bound) for d in p.type.dims)
                        for p in function.params if isinstance(p.type, GlobalTensor)}
        self._line, self._run_again = user_line(), run_again
        self._pointers: dict[tuple[int, int], tuple[int, WatchedLaunch]] = {}
        self._written = written_parameters(function)
        self._changed = self._written & read_parameters(function)

    def words(self) -> int:
        """Where this launch counts: of each owner's launch elsewhere."""
        by, part = owner()
        if by is None and self._written:  # it may write what a call under way was given
            late_checks.settle(wait=True)
        key = id(by), part
        if key not in self._pointers:
            launch = WatchedLaunch(self.image.function.name, self.image.sites, self._shapes,
                                   self._line, self.image.function, by, part)
            self._pointers[key] = sentinel_words(self.index).take(launch), launch
        return self._pointers[key][0]

    def waits(self) -> bool:
        """Whether the launch is looked at as soon as it has run."""
        return self.raises and owner()[0] is None

    def before(self, objects: Sequence[Any]) -> dict[str, Any]:
        """Copies of what the kernel will have changed."""
        return {n: host_copy(x, n) for n, x in zip(self.names, objects, strict=True)
                if n in self._changed}

    def after(self, objects: Sequence[Any], kept: dict[str, Any], key: tuple[int, int]) -> None:
        """Tells what was counted; the launch has been waited for. Raises NumericsError."""
        found = sentinel_words(self.index).collect()
        if not found:
            return

        def again() -> bool:
            assert self._run_again is not None
            given = {n: kept[n] if n in kept else host_copy(x, n)
                     for n, x in zip(self.names, objects, strict=True)}
            result = self._run_again(given, key)
            results = result if isinstance(result, tuple) else (result,)
            return any(map(_is_bad, [*(given[n] for n in self._written if n in given), *results]))

        for observe in hooks.bad_elements:
            observe(found, again if self._run_again is not None else None)


def host_copy(x: Any, name: str) -> Any:
    """An argument as the interpreter takes it: arrays copied to the host, numbers as they are."""
    if not hasattr(x, "shape"):
        return x
    array = read_array(x, name)
    if array.device == HOST:
        return x.copy() if isinstance(x, np.ndarray) else Tensor(x.array.copy(), x.type)
    if isinstance(x, Tensor):
        return Tensor(x.array, x.type)
    out = np.empty(array.shape, array.dtype.numpy)
    if out.size:
        size = prod(array.shape) * array.dtype.numpy.itemsize
        Borrowed(array.pointer, size, device(array.device), x).read(out)
    return Tensor(out, as_type(array.dtype))


def _is_bad(x: Any) -> bool:
    """Whether something that a kernel wrote holds a NaN or an infinity."""
    if not isinstance(x, Tensor | np.ndarray):
        return False
    numeric = x.type if isinstance(x, Tensor) else as_type(x.dtype)
    if numeric.dtype.kind != "float":
        return False
    array = x.array if isinstance(x, Tensor) else x
    return not np.isfinite(decode(array, numeric.dtype)).all()


__all__ = ["LaunchSentinels", "host_copy", "watched_tensors"]
