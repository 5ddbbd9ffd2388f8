"""A class whose methods are written at their first use is what the standard library makes of it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import threading
from collections.abc import Callable, Hashable
from dataclasses import field, replace
from typing import Any, ClassVar

import pytest

from tessera import lazy_dataclass

OPTIONS = [{}, {"frozen": True}, {"eq": False}, {"frozen": True, "eq": False}, {"repr": False},
           {"frozen": True, "order": True}, {"kw_only": True}, {"slots": True}]
NAMES = ["plain", "frozen", "by identity", "frozen, by identity", "no repr", "ordered",
         "by keyword", "slots"]


def point(make: Callable[..., Any], options: dict[str, bool]) -> type:
    @make(**options)
    class Point:
        """Two coordinates and what is counted of them."""

        x: int
        y: int = 2
        tags: list[str] = field(default_factory=list, compare=False, repr=False)
        size: int = field(default=7, kw_only=True)
        seen: int = field(init=False, default=0, compare=False)
        KIND: ClassVar[str] = "point"

        def __post_init__(self) -> None:
            object.__setattr__(self, "seen", self.x + self.y)

    return Point


def raised(act: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:
        act()
    return f"{caught.type.__name__}: {caught.value}"


OF_CLASSES = {"signature", "fields", "params", "match", "is one", "defaults"}
FACTS: dict[str, Callable[[type, Any, Any], object]] = {
    "repr": lambda cls, a, b: repr(a) if "object at" not in repr(a) else None,
    "equal": lambda cls, a, b: (a == a, a == b, a != replace(b, x=9), a == 3),
    "hashable": lambda cls, a, b: isinstance(a, Hashable),
    "hash": lambda cls, a, b: hash(a) == hash(b) if isinstance(a, Hashable) else
    raised(lambda: hash(a)),
    "order": lambda cls, a, b: (a < replace(b, x=9), a >= b) if "__lt__" in vars(cls) else
    raised(lambda: a < b),
    "signature": lambda cls, a, b: str(inspect.signature(cls)),
    "fields": lambda cls, a, b: [(f.name, f.type, f.init, f.kw_only) for f in
                                 dataclasses.fields(cls)],
    "params": lambda cls, a, b: repr(cls.__dataclass_params__),
    "match": lambda cls, a, b: cls.__match_args__,
    "defaults": lambda cls, a, b: (cls.KIND, hasattr(cls, "tags"), hasattr(cls, "x")),
    "values": lambda cls, a, b: (dataclasses.asdict(a), dataclasses.astuple(replace(b, y=5))),
    "copy": lambda cls, a, b: dataclasses.astuple(copy.deepcopy(a)),
    "assigned": lambda cls, a, b: raised(lambda: setattr(a, "x", 1)) if "frozen=True" in
    repr(cls.__dataclass_params__) else setattr(a, "x", 1),
    "deleted": lambda cls, a, b: raised(lambda: delattr(a, "y")) if "frozen=True" in
    repr(cls.__dataclass_params__) else None,
    "missing": lambda cls, a, b: raised(lambda: cls()),
    "names": lambda cls, a, b: [m.__qualname__ for n, m in sorted(vars(cls).items())
                                if inspect.isfunction(m)],
    "is one": lambda cls, a, b: dataclasses.is_dataclass(cls),
    "attributes": lambda cls, a, b: {n for n in vars(cls)},
}


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@pytest.mark.parametrize("fact", FACTS)
def test_it_is_as_the_librarys(fact: str, options: dict[str, bool]) -> None:
    """Each fact is the first that is asked for, of classes made for it."""
    found = []
    for make in (dataclasses.dataclass, lazy_dataclass.dataclass):
        cls = point(make, options)
        a, b = (None, None) if fact in OF_CLASSES else (cls(x=1, size=3), cls(x=1, size=3))
        found.append(FACTS[fact](cls, a, b))
    assert found[0] == found[1]


@lazy_dataclass.dataclass(frozen=True)
class Pair:
    """Two of something."""

    first: int
    second: int = 2


@lazy_dataclass.dataclass(frozen=True)
class Triple(Pair):
    """And a third."""

    third: int = 3

    def __repr__(self) -> str:
        return f"<{self.first} {self.second} {self.third}>"


def test_a_class_below_has_the_fields_above() -> None:
    assert dataclasses.astuple(Triple(1)) == (1, 2, 3) and repr(Triple(1)) == "<1 2 3>"
    assert Triple(1) != Pair(1) and hash(Triple(1)) == hash(Triple(1))
    with pytest.raises(TypeError, match="cannot inherit non-frozen"):
        @dataclasses.dataclass
        class Loose(Pair):
            pass


def test_a_plain_class_below_takes_what_is_no_field() -> None:
    class Named(Pair):
        pass

    named = Named(1)
    named.name = "ab"
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'first'"):
        named.first = 2
    del named.name
    assert named == Named(1) and "name" not in vars(named)


def test_one_unpickled_before_any_was_made_is_whole() -> None:
    @lazy_dataclass.dataclass(frozen=True)
    class Other(Pair):
        """Not made by its `__init__`."""

    empty = object.__new__(Other)
    vars(empty).update(first=1, second=5)
    assert empty == Other(1, 5) and pickle.loads(pickle.dumps(Triple(4))) == Triple(4)


def test_threads_that_begin_with_a_class_meet_it_whole() -> None:
    for _ in range(20):
        cls = point(lazy_dataclass.dataclass, {"frozen": True})
        begin, made = threading.Barrier(4), []

        def run(cls: type = cls, begin: Any = begin, made: list[Any] = made) -> None:
            begin.wait()
            made.append(cls(1, size=4))

        threads = [threading.Thread(target=run) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(made) == 4 and len(set(made)) == 1


def test_nothing_is_written_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[type] = []
    library = dataclasses.dataclass
    monkeypatch.setattr(dataclasses, "dataclass", lambda **options: lambda cls: (
        written.append(cls), library(cls, **options))[1])
    cls = point(lazy_dataclass.dataclass, {})
    assert not written and cls(1).y == 2 and repr(cls(1)) and len(written) == 1


def test_a_class_without_a_docstring_has_the_library_s() -> None:
    def make(one: Callable[..., Any]) -> type:
        @one(frozen=True)
        class Point:
            x: int
            y: int = 2

        return Point

    class Child(make(lazy_dataclass.dataclass)):  # type: ignore[misc]
        pass

    mine = make(lazy_dataclass.dataclass)
    assert "__init__" in vars(mine) and type(vars(mine)["__doc__"]) is lazy_dataclass._Unwritten
    assert Child.__doc__ is None
    assert mine.__doc__ == make(dataclasses.dataclass).__doc__ != ""
    assert mine(3) == mine(3, 2)
