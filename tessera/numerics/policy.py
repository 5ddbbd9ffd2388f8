"""Numeric policies: how a tensor's storage is accumulated, rounded, scaled and placed.

`fp8_e4m3 @accum(f32) @stochastic_round` is a `NumericType`: a `DType` and a `Policy`. Each name
after an `@` is one self-registering `ModifierKind` that sets one field of the policy, so the Python
expression, the string grammar (parse.py) and the printed form all come from the same table.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import field, replace
from functools import cached_property
from typing import Any

import numpy as np

from tessera.errors import DTypeError, PolicyError
from tessera.lazy_dataclass import dataclass
from tessera.numerics.dtypes import (
    DType,
    all_dtypes,
    bf16,
    bool_,
    dtype_of_numpy,
    f32,
    fp4_e2m1,
    fp6_e2m3,
    fp8_e4m3,
    int32,
    int64,
)

ROUNDINGS = ("nearest_even", "toward_zero", "stochastic")
SCALINGS = ("amax",)


@dataclass(frozen=True)
class Policy:
    """What a storage format does not say.

    accum        type of sums and products; None: the storage's own rule (NumericType.accum)
    rounding     'nearest_even' | 'toward_zero' | 'stochastic', applied once, on storing
    saturate     out-of-range values become +-max instead of inf or NaN
    loss_scale   factor on cotangents that flow through the tensor
    scaled       None, or how the scale beside the data is found: 'amax'
    per_channel  None, or the axis along which the scale is a vector
    device       None, or where the tensor lives
    packed_for   None, or the type beside which packed codes are multiplied on a GPU: they lie
                 there in the order in which tensor cores take them
    custom       None, or a class registered with @precision_policy
    """

    accum: DType | None = None
    rounding: str = "nearest_even"
    saturate: bool = False
    loss_scale: float = 1.0
    scaled: str | None = None
    per_channel: int | None = None
    device: str | None = None
    packed_for: DType | None = None
    custom: type | None = None

    def __str__(self) -> str:
        base = custom_base(self.custom) if self.custom is not None else Policy()
        parts = (kind.show(self, base) for kind in _KINDS.values())
        return " ".join(part for part in parts if part)


@dataclass(frozen=True, repr=False)
class NumericType:
    """A storage format with a policy; str() is accepted by parse() and is valid Python.

    Such a string, a dtype and a NumPy type are equal to the type that `as_type` makes of them.
    """

    dtype: DType
    policy: Policy = field(default_factory=Policy)

    def __eq__(self, other: object) -> bool:
        if other.__class__ is NumericType:
            return self is other or (self.dtype is other.dtype and self.policy == other.policy)
        return same_type(self, other)

    def __hash__(self) -> int:
        """Each call of a kernel asks for it; few types differ in their policy alone."""
        return hash(self.dtype)

    @property
    def name(self) -> str:
        """Name of the storage format."""
        return self.dtype.name

    @property
    def accum(self) -> DType:
        """Type that sums are kept in: the policy's, else f32 for floats up to 32 bits, f64 for
        f64, and int32 for the integers narrower than that."""
        if self.policy.accum is not None:
            return self.policy.accum
        if self.dtype.kind != "float" and self.dtype.bits < 32:
            return int32
        return self.dtype.compute

    def __matmul__(self, modifier: Modifier) -> NumericType:
        if isinstance(modifier, Modifier):
            need_order(self.dtype, policy := modifier.apply(self.policy))
            return NumericType(self.dtype, policy)
        if isinstance(modifier, ModifierKind):
            raise PolicyError(f"@{modifier.name} needs an argument: {modifier.example}")
        if isinstance(modifier, (DType, NumericType, str, int, float)):
            raise PolicyError(f"{modifier!r} is not a policy modifier", hint=_accepted_modifiers())
        return NotImplemented  # the other side may know: a device object has its own __rmatmul__

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__

    @cached_property
    def _text(self) -> str:
        custom = self.policy.custom
        head = self.dtype.name if custom is None else custom.__name__
        return f"{head} {self.policy}".rstrip()


@dataclass(frozen=True)
class Modifier:
    """One `@name(value)`: sets one field of a policy."""

    kind: ModifierKind
    value: Any

    def apply(self, policy: Policy) -> Policy:
        return replace(policy, **{self.kind.field: self.value})

    def __rmatmul__(self, left: Any) -> NumericType:
        return as_type(left) @ self  # a precision_policy class on the left

    def __enter__(self) -> Modifier:
        if self.kind.name not in BLOCKS:
            raise PolicyError(f"{self} is a policy of a type, it opens no block",
                              hint="with device(gpu): ...")
        block = BLOCKS[self.kind.name](self.value)
        block.__enter__()
        _open.blocks.append(block)
        return self

    def __exit__(self, *exc: Any) -> Any:
        return _open.blocks.pop().__exit__(*exc)

    def __str__(self) -> str:
        return self.kind.text(self.value)

    __repr__ = __str__


# name of a modifier -> value -> a context; `with device(gpu):` is one. Filled by upper floors.
BLOCKS: dict[str, Callable[[Any], AbstractContextManager]] = {}


class _Open(threading.local):
    def __init__(self) -> None:
        self.blocks: list[AbstractContextManager] = []


_open = _Open()  # blocks of modifiers that have been entered, innermost last


@dataclass(frozen=True)
class DeviceFamily:
    """Devices of one kind: `device(gpu)` is this process's own, `device(gpu[1])` one by number."""

    name: str
    member: str  # how one of them is named

    def __getitem__(self, index: int) -> str:
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise PolicyError(f"{self.name}[{index!r}]: devices have numbers from 0")
        return self.member.format(index)

    def __repr__(self) -> str:
        return self.name


gpu = DeviceFamily("gpu", "cuda:{}")
cpu = DeviceFamily("cpu", "cpu")


@dataclass(frozen=True, eq=False)
class ModifierKind:
    """A modifier that takes an argument. Calling it checks the argument: `accum(f32)`."""

    name: str
    field: str
    check: Callable[[Any], Any]  # argument -> value of the field; PolicyError when it is not one
    write: Callable[[Any], str]  # value -> argument as written in Python
    example: str
    when: Any = None  # a flag (`saturate`) has this fixed value and no argument

    def __call__(self, value: Any) -> Modifier:
        return Modifier(self, self.check(value))

    def text(self, value: Any) -> str:
        return f"@{self.name}" if self.when is not None else f"@{self.name}({self.write(value)})"

    def show(self, policy: Policy, base: Policy) -> str:
        """How `policy` differs from `base` in this kind's field, or ''."""
        value = getattr(policy, self.field)
        if value == getattr(base, self.field):
            return ""
        if self.when is not None and value != self.when:
            return ""
        if self.name == "rounding" and value == "stochastic":
            return ""  # printed as @stochastic_round
        return self.text(value)


_KINDS: dict[str, ModifierKind] = {}


def _kind(name: str, field: str, check: Any, write: Any, example: str) -> ModifierKind:
    return _register(ModifierKind(name, field, check, write, example))


def _flag(name: str, field: str, when: Any) -> Modifier:
    kind = _register(ModifierKind(name, field, lambda v: v, str, f"@{name}", when))
    return Modifier(kind, when)


def _register(kind: ModifierKind) -> ModifierKind:
    if kind.name in _KINDS:
        raise PolicyError(f"policy modifier {kind.name!r} is declared twice")
    _KINDS[kind.name] = kind
    return kind


def _accepted_modifiers() -> str:
    return "modifiers: " + " ".join(kind.example for kind in _KINDS.values())


def modifier_kinds() -> dict[str, ModifierKind]:
    """All modifiers by name, in the order in which they are printed."""
    return dict(_KINDS)


def _check_accum(value: Any) -> DType:
    dtype = as_dtype(value)
    if dtype.kind == "bool" or dtype.packed:
        raise PolicyError(f"@accum cannot keep sums in {dtype}", hint="use f32, bf16, f64 or int32")
    return dtype


def _check_rounding(value: Any) -> str:
    return _one_of("rounding", value, ROUNDINGS)


def _check_scaled(value: Any) -> str:
    return _one_of("scaled", value, SCALINGS)


def _one_of(name: str, value: Any, accepted: tuple[str, ...]) -> str:
    if value not in accepted:
        choices = ", ".join(repr(word) for word in accepted)
        raise PolicyError(f"@{name} got {value!r}", hint=f"accepted: {choices}")
    return value


def _check_loss_scale(value: Any) -> float:
    number = isinstance(value, (int, float, np.integer, np.floating)) and value is not True
    if not number or not (math.isfinite(value) and value > 0):
        raise PolicyError(f"@loss_scale needs a finite number > 0; got {value!r}")
    return float(value)


def _check_axis(value: Any) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise PolicyError(f"@per_channel needs an axis number such as 0 or -1; got {value!r}")
    return int(value)


def _check_device(value: Any) -> str:
    value = value.name if isinstance(value, DeviceFamily) else value
    allowed = isinstance(value, str) and value and all(c.isalnum() or c in "_:." for c in value)
    if not allowed:
        raise PolicyError(f"@device needs gpu, gpu[0], cpu, or a name such as 'cuda:0'; got "
                          f"{value!r}")
    return value


def _check_packed_for(value: Any) -> DType:
    dtype = as_dtype(value)
    if dtype not in (bf16, fp8_e4m3):
        raise PolicyError(f"@packed_for({dtype}) is no order of codes",
                          hint="accepted: bf16, fp8_e4m3")
    return dtype


def clamps(source: NumericType, to: NumericType) -> bool:
    """Whether a cast to another policy of the same storage changes infinities: to what the narrow
    formats that have them hold at most. Those of f32 and f64, in which is computed, stay."""
    return to.dtype is source.dtype and saturates_itself(to.dtype, to.policy.saturate) and \
        not source.policy.saturate


def saturates_itself(dtype: DType, saturate: bool) -> bool:
    """Whether numbers of a format become others by a cast to it that saturates."""
    return saturate and dtype.special == "ieee" and dtype.bits <= 16


def need_order(dtype: DType, policy: Policy) -> None:
    """Raise PolicyError for codes that have no order of their own beside another type."""
    if policy.packed_for is not None and dtype not in (fp4_e2m1, fp6_e2m3):
        raise PolicyError(f"{dtype} @packed_for({policy.packed_for}): its codes have one order",
                          hint=f"for weights of {fp4_e2m1}, {fp6_e2m3}")


def _quoted(value: str) -> str:
    return f'"{value}"'


accum = _kind("accum", "accum", _check_accum, str, "@accum(f32)")
stochastic_round = _flag("stochastic_round", "rounding", "stochastic")
rounding = _kind("rounding", "rounding", _check_rounding, _quoted, '@rounding("toward_zero")')
saturate = _flag("saturate", "saturate", True)
loss_scale = _kind("loss_scale", "loss_scale", _check_loss_scale, repr, "@loss_scale(128.0)")
scaled = _kind("scaled", "scaled", _check_scaled, _quoted, '@scaled("amax")')
per_channel = _kind("per_channel", "per_channel", _check_axis, str, "@per_channel(0)")
device = _kind("device", "device", _check_device, _quoted, '@device("cuda:0")')
packed_for = _kind("packed_for", "packed_for", _check_packed_for, str, "@packed_for(bf16)")
host = device("host")  # `f32 @host`: page-locked memory, beside the GPU that computes with it


def without_host(numeric: NumericType) -> NumericType:
    """The type that a tensor has which `f32 @host` has placed."""
    if numeric.policy.device != "host":
        return numeric
    return NumericType(numeric.dtype, replace(numeric.policy, device=None))


def without_draws(numeric: NumericType) -> NumericType:
    """The type that rounds to the nearest where this one rounds at random."""
    if numeric.policy.rounding != "stochastic":
        return numeric
    return NumericType(numeric.dtype, replace(numeric.policy, rounding="nearest_even"))



# -- policy classes --

_CUSTOM: dict[str, type] = {}  # by name, the latest
_CUSTOM_CLASSES: set[type] = set()  # all of them: an earlier class keeps working
_CUSTOM_DTYPES = ("storage", "scale", "compute", "accumulate")
_CUSTOM_METHODS = ("quantize", "dequantize")


def precision_policy(cls: type) -> type:
    """Class decorator: makes `cls` usable where a dtype stands, `Tensor["D", "D", cls]`.

    Attributes storage, scale, compute, accumulate are dtypes; quantize(self, x) returns
    (values, scale) and dequantize(self, values, scale) returns x. Raises PolicyError naming what
    is missing. A later class of the same name takes the name over in parse(): running a notebook
    cell twice is no mistake.
    """
    if not isinstance(cls, type):
        raise PolicyError(f"@precision_policy decorates a class; got {cls!r}")
    for name in _CUSTOM_DTYPES:
        _check_custom_dtype(cls, name)
    for name in _CUSTOM_METHODS:
        if not callable(getattr(cls, name, None)):
            raise PolicyError(
                f"precision policy {cls.__name__} has no method {name!r}",
                hint="define quantize(self, x) -> (values, scale) and dequantize(self, values, "
                "scale) -> x",
            )
    from tessera.numerics.parse import parse

    _CUSTOM[cls.__name__] = cls
    _CUSTOM_CLASSES.add(cls)
    parse.cache_clear()
    return cls


def _check_custom_dtype(cls: type, name: str) -> None:
    value = getattr(cls, name, None)
    if value is None:
        raise PolicyError(
            f"precision policy {cls.__name__} has no attribute {name!r}",
            hint=f"add a dtype to the class: {name} = ts.f32",
        )
    if not isinstance(value, DType):
        raise PolicyError(
            f"{cls.__name__}.{name} must be a dtype; got {value!r}", hint=f"{name} = ts.f32"
        )


def custom_policies() -> dict[str, type]:
    """The registered policy classes by name."""
    return dict(_CUSTOM)


def is_custom_policy(value: Any) -> bool:
    """True for a class that was decorated with @precision_policy."""
    return isinstance(value, type) and value in _CUSTOM_CLASSES


def custom_base(cls: type) -> Policy:
    """The policy that a policy class stands for, before any modifier."""
    return Policy(accum=cls.accumulate, custom=cls)  # type: ignore[attr-defined]


# -- conversion --

_PYTHON_TYPES: dict[type, DType] = {float: f32, int: int64, bool: bool_}
_SCALARS = {t.numpy.type for t in all_dtypes()}  # ml_dtypes' scalars do not derive from np.generic


def as_type(x: Any) -> NumericType:
    """`x` as a NumericType.

    x: NumericType | DType | str in the grammar of parse() | np.dtype or NumPy scalar type |
       float (f32), int (int64), bool | a class decorated with @precision_policy
    Raises DTypeError naming what is accepted; PolicyError for a malformed string.
    """
    if isinstance(x, NumericType):
        return x
    if isinstance(x, DType):
        return _unscaled_type(x)
    if isinstance(x, str):
        from tessera.numerics.parse import parse

        return parse(x)
    if is_custom_policy(x):
        return NumericType(x.storage, custom_base(x))
    if isinstance(x, np.dtype):
        return _unscaled_type(dtype_of_numpy(x))
    if isinstance(x, type) and x in _PYTHON_TYPES:
        return _unscaled_type(_PYTHON_TYPES[x])
    if isinstance(x, type) and (issubclass(x, np.generic) or x in _SCALARS):
        return _unscaled_type(dtype_of_numpy(x))
    raise DTypeError(
        f"{x!r} is not a numeric type",
        hint="accepted: a dtype (ts.f32), a dtype with a policy (ts.bf16 @accum(ts.f32)), a string "
        "such as 'fp8_e4m3 @saturate', a NumPy dtype, float, int, bool, or a class decorated with "
        "@precision_policy",
    )


@functools.cache
def _unscaled_type(dtype: DType) -> NumericType:
    """The format alone: one object for all, so that most types are compared at a glance."""
    return NumericType(dtype)


def same_type(mine: DType | NumericType, other: Any) -> bool:
    """Whether `other`, a type in another spelling, is `mine`; NotImplemented for what is no type.

    Raises DTypeError for text that names no type: it would differ from every type in silence.
    """
    if not isinstance(other, str):
        kinds = (DType, NumericType, np.dtype, type)
        numeric = isinstance(other, kinds) and (not isinstance(other, type) or _is_element(other))
        if not numeric or (isinstance(other, np.dtype) and other.type not in _SCALARS):
            return NotImplemented
    return as_type(mine) == as_type(other)


def _is_element(x: type) -> bool:
    return x in _PYTHON_TYPES or x in _SCALARS or is_custom_policy(x)


def as_dtype(x: Any) -> DType:
    """The storage format of as_type(x)."""
    return x if isinstance(x, DType) else as_type(x).dtype
