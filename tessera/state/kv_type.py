"""The type of a key-value cache: extents, a numeric type, and what happens when it is full."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..dims import Dim, bind_shape, show_shape
from ..errors import ArgumentError, DTypeError, PolicyError
from ..graph.value_type import ValueType
from ..lazy_dataclass import dataclass
from ..numerics import NumericType, as_type
from ..tensor import Tensor, TensorType

EXTENTS = ("B", "H", "S_max", "D_h")
UNSUPPORTED = ("scaled", "per_channel", "custom")  # policies whose codes need a scale beside them


class Flag:
    """A policy of state objects without an argument: `KVCache[...] @rolling_window`."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return f"@{self.name}"


rolling_window = Flag("rolling_window")  # a full cache gives up its oldest entries


@dataclass(frozen=True, repr=False)
class KVCacheType(ValueType):
    """`KVCache["B", "H", "S_max", "D_h", bf16] @rolling_window @device("cpu")`.

    Calling it makes a cache: the named extents by position in the order in which they stand, or by
    name. As an annotation of a `ts.jit` function it checks the argument, as tensor types do.
    """

    dims: tuple[int | Dim, ...]
    numeric: NumericType | None
    rolling: bool = False

    def __post_init__(self) -> None:
        if len(self.dims) != len(EXTENTS):
            raise ArgumentError(
                f"KVCache has 4 extents, {', '.join(EXTENTS)}, got {show_shape(self.dims)}",
                hint='KVCache["B", "H", "S_max", "D_h", bf16]')
        policy = self.numeric.policy if self.numeric else None
        wrong = [f for f in UNSUPPORTED if policy is not None and getattr(policy, f)]
        if wrong:
            raise PolicyError(f"KVCache does not take the policy {wrong[0]}: {self.numeric}",
                              hint="a plain type, such as bf16 or fp8_e4m3")

    @classmethod
    def of(cls, items: Any) -> KVCacheType:
        """The type that `KVCache[items]` names; without a numeric type, that of any."""
        items = items if isinstance(items, tuple) else (items,)
        numeric = None
        if items and not isinstance(items[-1], int | Dim) and len(items) > len(EXTENTS):
            numeric, items = as_type(items[-1]), items[:-1]
        return cls(tuple(Dim.of(d) for d in items), numeric)

    @property
    def stored(self) -> NumericType:
        """The type of its entries, f32 unless it says: without where they lie."""
        numeric = self.numeric or as_type("f32")
        return NumericType(numeric.dtype, replace(numeric.policy, device=None))

    def __matmul__(self, policy: Any) -> KVCacheType:
        if policy is rolling_window:
            return replace(self, rolling=True)
        if self.numeric is None:
            raise PolicyError(f"{self} has no numeric type that {policy} could apply to",
                              hint='KVCache["B", "H", "S_max", "D_h", bf16]')
        return replace(self, numeric=self.numeric @ policy)

    def __call__(self, *sizes: int, **named: int) -> Any:
        """A cache of this type. Raises ArgumentError for extents that are missing or unknown."""
        from .kv_cache import KVCache

        names = list(dict.fromkeys(str(d) for d in self.dims if isinstance(d, Dim)))
        if len(sizes) > len(names) or set(named) - set(names[len(sizes):]):
            raise ArgumentError(f"{self} takes the extents {', '.join(names) or '(none)'}, got "
                                f"{sizes} and {named}")
        known = {**dict(zip(names, sizes, strict=False)), **named}
        missing = [n for n in names if n not in known]
        if missing:
            raise ArgumentError(f"{self} needs the extent {missing[0]}",
                                hint=f"({', '.join(f'{n}=...' for n in names)})")
        shape = tuple(known[str(d)] if isinstance(d, Dim) else d for d in self.dims)
        if not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ArgumentError(f"extents of a cache are numbers >= 0, got {shape}")
        return KVCache.empty(replace(self, dims=shape, numeric=self.numeric or as_type("f32")))

    def check(self, value: Any, sizes: dict[str, int | Dim], what: str) -> None:
        """Raise DTypeError, ShapeError unless `value` is a cache of this type."""
        from .kv_cache import KVCache

        if not isinstance(value, KVCache):
            kind = "a tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise DTypeError(f"{what} is {kind}, its annotation says {self}")
        bind_shape(self.dims, value.shape, sizes, what)
        if self.numeric is not None and self.numeric.dtype is not value.dtype:
            raise DTypeError(f"{what} holds {value.dtype}, its annotation says {self}")
        if self.rolling and not value.kind.rolling:
            raise DTypeError(f"{what} has no rolling window, its annotation says {self}")

    @property
    def shape(self) -> tuple[int | Dim, ...]:  # type: ignore[override]  # an attribute there
        return self.dims

    def example(self, make: Any) -> Any:
        """A cache of tensors that `make` gives for their types."""
        from .kv_cache import CacheStorage, KVCache

        kind = replace(self, numeric=self.numeric or as_type("f32"))
        held = TensorType(kind.dims, kind.stored)
        count = TensorType((), as_type("int64"))
        return KVCache(kind, CacheStorage(make(held), make(held), None), make(count))

    def __repr__(self) -> str:
        dims = [repr(str(d)) if isinstance(d, Dim) else str(d) for d in self.dims]
        inner = ", ".join([*dims, *([str(self.numeric)] if self.numeric else [])])
        return f"KVCache[{inner}]" + (" @rolling_window" if self.rolling else "")
