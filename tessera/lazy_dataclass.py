"""`dataclass` of the standard library, whose methods are written when one is first used.

The library writes and compiles up to seven functions for each class. For the 365 dataclasses that
`import tessera` declares that was 0.15 s of 0.6 (of a core, Python 3.11, 2026-11-27); three in four
of them a program never touches.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

_ALWAYS = {"__dataclass_fields__", "__dataclass_params__", "__match_args__",
           *(["__replace__"] if sys.version_info >= (3, 13) else [])}
_ORDER = {"__lt__", "__le__", "__gt__", "__ge__"}
_LOCK = threading.RLock()  # simulated ranks are threads, which begin with the same classes


class _Unwritten:
    """In the place of an attribute of a class, until somebody asks for it: writes all of them."""

    def __init__(self, cls: type, name: str, write: Callable[[], None]):
        self.cls, self.name, self.write = cls, name, write

    def __get__(self, instance: object, owner: type) -> Any:
        self.write()
        written = vars(self.cls)[self.name]
        bind = getattr(type(written), "__get__", None)
        return bind(written, instance, owner) if bind else written


def _lazily(cls: type, *, init: bool = True, repr: bool = True, eq: bool = True,
            order: bool = False, frozen: bool = False, kw_only: bool = False) -> type:
    own = {name: value for name, value in vars(cls).items()
           if name not in {"__dict__", "__weakref__"}}
    names = set(_ALWAYS)
    names |= {"__init__"} if init else set()
    names |= {"__repr__"} if repr else set()
    names |= {"__eq__"} if eq else set()
    names |= _ORDER if order else set()
    names -= own.keys()
    names |= set() if cls.__doc__ else {"__doc__"}  # which the library writes from the signature
    if eq and own.get("__hash__") is None:
        if frozen:
            names.add("__hash__")
        else:
            cls.__hash__ = None  # type: ignore[assignment]  # at once: what is hashable shows

    def write() -> None:
        with _LOCK:
            if not names:
                return
            # A second class takes what is written, so that no thread meets one half done.
            own["__qualname__"] = cls.__qualname__
            second = type(cls)(cls.__name__, cls.__bases__, own)
            dataclasses.dataclass(init=init, repr=repr, eq=eq, order=order, frozen=frozen,
                                  kw_only=kw_only)(second)
            for name in names:
                setattr(cls, name, vars(second)[name])
            names.clear()

    for name in names:
        setattr(cls, name, _Unwritten(cls, name, write))
    for name, value in own.items():
        if isinstance(value, dataclasses.Field):
            _leave_default(cls, name, value)
    if frozen:
        _freeze(cls)
    return cls


def _leave_default(cls: type, name: str, field: dataclasses.Field[Any]) -> None:
    """A field's value in the class is its default, if it has one."""
    if field.default is dataclasses.MISSING:
        delattr(cls, name)
    else:
        setattr(cls, name, field.default)


def _freeze(cls: type) -> None:
    def refuse(self: object, name: str, what: str) -> None:
        if type(self) is cls or name in {f.name for f in dataclasses.fields(cls)}:
            raise dataclasses.FrozenInstanceError(f"cannot {what} field {name!r}")

    def __setattr__(self: object, name: str, value: object) -> None:
        refuse(self, name, "assign to")
        super(cls, self).__setattr__(name, value)  # type: ignore[arg-type]

    def __delattr__(self: object, name: str) -> None:
        refuse(self, name, "delete")
        super(cls, self).__delattr__(name)  # type: ignore[arg-type]

    for function in (__setattr__, __delattr__):
        function.__qualname__ = f"{cls.__qualname__}.{function.__name__}"
        setattr(cls, function.__name__, function)


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    def dataclass(cls=None, /, **options):
        """As `dataclasses.dataclass`, which does it at once for a class with slots, since it makes
        another class of it."""
        if cls is None:
            return lambda cls: dataclass(cls, **options)
        if options.get("slots"):
            return dataclasses.dataclass(cls, **options)
        return _lazily(cls, **options)
