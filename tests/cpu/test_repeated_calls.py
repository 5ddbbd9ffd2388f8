"""Calls of compiled functions on a GPU behind the first: what has moved is told to their steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_gpu import Torch, filled
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from tessera.errors import DeviceError
from tessera.graph.cuda.program import workspace
from tessera.runtime import libcuda
from tessera.tensor import Tensor

pytestmark = pytest.mark.usefixtures("gpu", "apart")


@pytest.fixture
def first_calls(monkeypatch: Any) -> list[str]:
    """The programs whose calls go the long way."""
    run, seen = workspace.Workspace._run, list[str]()
    monkeypatch.setattr(workspace.Workspace, "_run",
                        lambda s, *a, **k: seen.append(s.program.plan.name) or run(s, *a, **k))
    return seen


def there(*values: float) -> Tensor:
    return ts.tensor(np.array(values, np.float32)).to("cuda")


@pytest.mark.parametrize("graphs", [False, True])
def test_only_the_first_call_goes_the_long_way(graphs: bool, driver: Any,
                                               first_calls: list[str]) -> None:
    def short(x: Any, y: Any) -> Any:
        return x * 2.0 + y

    def long(x: Any, y: Any) -> Any:
        for _ in range(3):
            x = ts.reshape(ts.sort(x), x.shape) + ts.sum(y)
        return x

    with ts.config.scope(cuda_graphs=graphs):
        for fn in (short, long):
            f, x = ts.jit(fn), there(1.0, 2.0)
            pairs = [(x, x), (x, there(5.0, 6.0)), (there(7.0, 8.0), x), (there(3.0, 4.0),) * 2]
            for a, b in pairs * 3:
                want = fn(a.cpu(), b.cpu()).array
                np.testing.assert_array_equal(f(a, b).array, want)
            assert first_calls == [fn.__name__]
            first_calls.clear()


def test_settings_may_change_from_call_to_call(driver: Any, rng: np.random.Generator) -> None:
    """Between graphs and steps, with sentinels and without."""
    f = ts.jit(lambda x, w: ts.tanh(ts.tanh(x @ w) @ w) @ w)
    w, host = rng.standard_normal((2, 8, 8)).astype(np.float32)
    for i in range(12):
        x = ts.tensor(host + i).to("cuda")
        with ts.config.scope(cuda_graphs=i % 3 > 0, numerics=("off", "raise")[i % 4 == 3],
                             debug=i % 5 == 4):
            got = f(x, ts.tensor(w).to("cuda")).array
        np.testing.assert_allclose(got, np.tanh(np.tanh((host + i) @ w) @ w) @ w, 1e-4, 1e-4)


def test_steps_are_told_again_behind_a_graph(driver: Any) -> None:
    def fn(x: Any) -> Any:
        for _ in range(3):
            x = ts.reshape(ts.sort(x), x.shape) + ts.sum(x)
        return x

    f, x, y = ts.jit(fn), there(1.0, 2.0), there(5.0, 3.0)
    for graphs, a in ((0, x), (0, x), (0, x), (1, y), (1, y), (0, x), (1, x), (0, y), (0, y)):
        before = driver.graph_launches
        with ts.config.scope(cuda_graphs=bool(graphs)):
            np.testing.assert_array_equal(f(a).array, fn(a.cpu()).array)
        assert driver.graph_launches - before == graphs


@pytest.mark.parametrize("kept", [False, True])
def test_a_result_in_the_place_of_an_argument_and_beside_it(kept: bool, driver: Any) -> None:
    """Code that relies on arrays which lie apart is not run where they are one."""
    f = ts.jit(lambda x, y: x * 2.0 + y, donate="x")
    x, y = there(1.0, 2.0), there(10.0, 20.0)
    held, places = list[Any](), list[Any]()
    for i in range(8):
        if kept and i % 2:
            held.append(ts.as_bytes(x))  # somebody has the memory: it is not written over
        want = x.array * 2 + y.array
        at = x.memory.pointer
        x = f(x, y)
        places.append(x.memory.pointer == at)
        np.testing.assert_array_equal(x.array, want)
    assert places == [not (kept and i % 2) for i in range(8)]


def test_a_call_that_fails_leaves_nothing_behind(driver: Any, monkeypatch: Any) -> None:
    """The steps are told again where everything lies."""
    f = ts.jit(lambda x, y: ts.sort(x * 2.0) + ts.sum(y), capture_graph=False)
    x, y = there(2.0, 1.0), there(3.0, 4.0)
    for _ in range(3):
        assert f(x, y).array.tolist() == [9.0, 11.0]
    place = workspace.Workspace.place

    def fails(self: Any, given: Any, places: Any, before: Any) -> None:
        place(self, given[:1], places[:1], before[:1])
        raise KeyboardInterrupt

    other = there(6.0, 5.0)
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(workspace.Workspace, "place", fails)
        f(other, other)
    assert f(x, y).array.tolist() == [9.0, 11.0]
    driver.status = libcuda.OUT_OF_MEMORY + 700
    with pytest.raises(DeviceError):
        f(other, y)
    driver.status = 0
    assert f(x, y).array.tolist() == [9.0, 11.0]


def test_arrays_of_another_library_are_known_again(first_calls: list[str],
                                                   monkeypatch: Any) -> None:
    f = ts.jit(lambda x: x * 2.0)
    split, seen = ts.graph.jit.JitFunction._split, list[int]()
    monkeypatch.setattr(ts.graph.jit.JitFunction, "_split",
                        lambda *a: seen.append(1) or split(*a))
    for i in range(5):
        x = ts.from_dlpack(Torch(filled(np.full(3, i, np.float32))))
        assert f(x).array.tolist() == [2.0 * i] * 3
    assert len(seen) == 1 and len(first_calls) == 1
