"""What a function captures of installed packages: what the user's code reads is seen, and the
thousands of objects that a package has behind it are not looked through."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import tessera as ts
from tessera.graph.captured_names import _Search

PACKAGE = """
import tessera as ts

rate = 2.0
table = {"rate": 2.0}

class Plot:
    def __init__(self, size):
        self.size, self.width, self.owner = size, 2.0, None
        self.parts = [Plot(0) for _ in range(size)]
        for part in self.parts:
            part.owner = self

    def draw(self):
        return self.size + sum(p.draw() for p in self.parts)

def scaled(x):
    return x * rate

def by_table(x):
    return x * table["rate"]

def wrapped(f):
    def call(x):
        return f(x)
    return call

by_rate = ts.jit(by_table)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    place = tmp_path / "site-packages"
    place.mkdir()
    (place / "installed_for_a_test.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(place)
    import installed_for_a_test  # type: ignore[import-not-found]

    yield installed_for_a_test
    del sys.modules["installed_for_a_test"]


def test_what_is_read_of_an_installed_package_is_seen(package: Any) -> None:
    plot, x = package.Plot(3), ts.ones(2)
    rate = 2.0
    reads = {"an attribute": (lambda x: x * plot.width, plot, "width"),
             "of a module": (lambda x: x * package.rate, package, "rate"),
             "its own setting": (lambda x: package.scaled(x), package, "rate")}
    for f, holder, name in reads.values():
        compiled = ts.jit(f)
        for value in (2.0, 3.0, 2.0):
            setattr(holder, name, value)
            assert compiled(x).tolist() == compiled(x).tolist() == [value] * 2
    compiled = ts.jit(package.wrapped(lambda x: x * rate))
    for rate in (2.0, 3.0):  # noqa: B007  the function in the package's reads it
        assert compiled(x).tolist() == [rate] * 2


def test_a_function_of_an_installed_package_sees_all_that_its_own_code_reads(package: Any) -> None:
    for value in (2.0, 3.0):
        package.table["rate"] = value
        assert package.by_rate(ts.ones(2)).tolist() == [value] * 2


def test_objects_of_an_installed_package_are_not_looked_through(package: Any) -> None:
    trainer = types.SimpleNamespace(plot=package.Plot(500), rate=2.0)

    def draws(x: Any) -> Any:
        return x * trainer.rate + trainer.plot.draw()

    def leaves(x: Any) -> Any:
        return x * trainer.rate

    for f in (draws, leaves):
        search = _Search(())
        search.links_from([f])
        assert len(search.seen) < 20 and "rate" in {key for _, key in search.links}


class Weak(Mapping[Any, Any]):
    """Keys are objects; a word is none, and no attribute is a key."""

    scale = 2.0

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(f"{key} is no key")

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0


def test_attributes_of_an_object_with_keys_are_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    weak, traces = Weak(), list[int]()
    f = ts.jit(lambda x: (x * weak.scale, traces.append(1))[0])
    for value in (2.0, 3.0):
        monkeypatch.setattr(Weak, "scale", value)
        assert f(ts.ones(2)).tolist() == f(ts.ones(2)).tolist() == [value] * 2
    assert len(traces) == 2
