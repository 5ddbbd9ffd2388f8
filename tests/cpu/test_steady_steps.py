"""A training loop: a step asks at once whether it is given the tensors that the step before
returned, and their memory passes at once. How much Python runs for each is counted, so that it does
not creep back."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import pytest

import tessera as ts
from counting import opcodes
from fake_driver import driver as driver
from fake_gpu import Torch, filled
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from mesh.test_gpu_programs import gpus as gpus
from step_cases import Place, after, in_turn, long_step, on_gpu, ones, step, stepped, weights
from step_cases import long_way as long_way
from step_cases import place as place
from tessera import hooks
from tessera.errors import ArgumentError, DeviceError
from tessera.graph import steady_step, tree
from tessera.graph.placed_leaves import FEW
from tessera.runtime import libcuda
from tessera.tensor import Tensor

OPCODES = 0.5  # of Python for each further tensor of a step: a pass over all takes 5 or more


# --- what is a step like the one before ----------------------------------------------------------
def test_each_step_with_a_batch_of_its_own(place: Place, long_way: list[str]) -> None:
    f, p = ts.jit(step, donate="p"), weights(place)
    for i in range(12):
        if i == 4:
            long_way.clear()
        value, p = f(p, ones(place))
    assert not long_way and value.item() == 4.0
    np.testing.assert_allclose(p["w0"].numpy(), after(12))
    np.testing.assert_allclose(p["w9"].numpy(), after(12, 9.0))


def test_losses_that_are_kept(place: Place, long_way: list[str]) -> None:
    f, p, losses = ts.jit(step, donate="p"), weights(place), []
    for i in range(12):
        if i == 4:
            long_way.clear()
        value, p = f(p, place(np.full(4, i, np.float32)))
        losses.append(value)
    assert not long_way and [x.item() for x in losses] == [4.0 * i for i in range(12)]


def test_numbers_constants_and_arrays_of_others(place: Place, long_way: list[str]) -> None:
    """Leaves that are looked at as in any call: they are few."""
    @ts.jit(donate="p", static=("how",))
    def f(p: Any, x: Any, rate: float, how: str) -> Any:
        return {k: v * rate + x if how == "add" else v * rate - x for k, v in p.items()}

    p, want = weights(place), 0.0
    array = filled(np.ones(4, np.float32)) if place is on_gpu else None
    for i in range(14):
        how, rate = ("sub" if i % 7 == 6 else "add"), 0.5 + i
        if i == 4:
            long_way.clear()
        p = f(p, ones(place) if array is None else Torch(array), rate, how)
        want = want * rate + (1.0 if how == "add" else -1.0)
        if i == 5:
            assert not long_way
    np.testing.assert_allclose(p["w0"].numpy(), want, rtol=1e-5)


def test_models_that_share_a_function(place: Place, long_way: list[str]) -> None:
    f, models = ts.jit(step, donate="p"), [weights(place) for _ in range(3)]
    for i in range(12):
        if i == 5:
            long_way.clear()
        models = [f(p, ones(place))[1] for p in models]
    assert not long_way
    for p in models:
        np.testing.assert_allclose(p["w0"].numpy(), after(12))


def test_a_graph_that_was_changed_is_not_found(place: Place) -> None:
    f, p = ts.jit(long_step, donate="p"), weights(place)
    for _ in range(8):
        loss, p = f(p, ones(place))
    runs = f._last.executable if place is on_gpu else f._last.program.on_gpu
    graphs = runs._workspace.repeated.graphs
    known = {g.key: g.places for g in graphs.graphs if g.key is not None}
    pointer = (loss if place is on_gpu else loss.local).memory.pointer
    places = next(places for places in known.values() if pointer in places)
    others = [on_gpu(np.ones(1, np.float32)).memory for _ in range(12)]
    for memory in others:
        graphs.launch([memory.pointer if at == pointer else at for at in places])
    left = {key: g for key in known if (g := next(
        (g for g in graphs.graphs if g.key == key), None)) is not None}
    assert len(left) < len(known)
    assert all(g.places is known[key] for key, g in left.items())


def test_without_cuda_graphs(place: Place, long_way: list[str]) -> None:
    f, p = ts.jit(step, donate="p"), weights(place)
    with ts.config.scope(cuda_graphs=False):
        for i in range(12):
            if i == 4:
                long_way.clear()
            _, p = f(p, ones(place))
    assert not long_way
    np.testing.assert_allclose(p["w0"].numpy(), after(12))


def test_parameters_of_two_calls_are_held(place: Place, long_way: list[str]) -> None:
    """Used up, but somebody has them: no result is one of these, and steps go on as they did."""
    f, p, held = ts.jit(step, donate="p"), weights(place), list[Any]()
    for i in range(12):
        if i == 4:
            long_way.clear()
        held = [*held[-(i % 4):], p]
        _, p = f(p, ones(place))
    assert not long_way
    np.testing.assert_allclose(p["w0"].numpy(), after(12))
    for old in held:
        with pytest.raises(ArgumentError, match="after it was donated"):
            old["w1"].numpy()


def test_tensors_are_read_and_used_between_steps(place: Place, long_way: list[str]) -> None:
    """By who keeps nothing of theirs."""
    f, norm, p = ts.jit(step, donate="p"), ts.jit(lambda p: sum(ts.sum(v) for v in p.values())), \
        weights(place)
    for i in range(12):
        if i == 4:
            long_way.clear()
        _, p = f(p, ones(place))
        total = norm(p).item()
        np.testing.assert_allclose(p["w9"].numpy(), after(i + 1, 9.0))
        np.testing.assert_allclose(total, sum(4 * after(i + 1, float(k)) for k in range(FEW)), 1e-5)
        assert str(p["w1"])
    assert long_way == ["<lambda>"] * 8


@pytest.mark.parametrize("told", [False, True])
def test_graphs_whose_places_change(told: bool, place: Place, long_way: list[str]) -> None:
    """Losses are kept for a while, so that their memory is another's and then this one's again.
    told: calls that go the long way launch and change these graphs, too."""
    f, p, x, kept = ts.jit(long_step, donate="p"), weights(place), ones(place), list[Any]()
    for i in range(80):
        if i == 6:
            long_way.clear()
        if told and i % 3 == 0:
            assert (p["w1"] if p["w1"].layout is None else p["w1"].local).memory is not None
        loss, p = f(p, x)
        kept = [*kept[-(i * i % 11):], (loss, 500.0 + 4 * after(i, 9.0))]
        for got, want in kept:
            np.testing.assert_allclose(got.item(), want, 1e-6)
    assert bool(long_way) is told and f.capture.endswith("in one launch")


# --- trees ---------------------------------------------------------------------------------------
def nested(place: Place) -> dict[str, Any]:
    """Containers of tensors alone, with others beside them, and tuples."""
    w = iter(weights(place, FEW + 8).values())
    return {"first": next(w), "layers": [{"w": next(w), "b": next(w)} for _ in range(8)],
            "mixed": {"w": next(w), "count": 3, "none": None}, "list": [next(w) for _ in range(9)],
            "tuple": (next(w), next(w)), "rest": {f"r{i}": x for i, x in enumerate(w)}}


@ts.jit(donate="p")
def nested_step(p: Any, x: Any) -> Any:
    """Results in other containers than arguments, in others' places, and in none."""
    q = ts.map_tree(lambda v: v if isinstance(v, int) else v * 0.5 + x, p)
    first, layers = q["first"], q["layers"]
    return {"rest": q["rest"], "loss": [ts.sum(x)], "layers": [*layers[:6], {
        "b": layers[6]["b"], "w": layers[6]["w"]}, layers[7]], "first": first,
        "list": q["list"], "tuple": q["tuple"],
        "mixed": {"w": q["mixed"]["w"], "more": x[:2] + 1.0}}


def test_trees_whose_containers_change(place: Place, long_way: list[str]) -> None:
    p, seen = nested(place), list[Any]()
    start = [v.numpy() if isinstance(v, Tensor) else v for v in tree.flatten(p)[0]]
    for i in range(10):
        if i == 5:
            long_way.clear()
        out = nested_step(p, ones(place))
        assert out["loss"][0].item() == 4.0 and tuple(out["layers"][6]) == ("b", "w")
        np.testing.assert_allclose(out["mixed"]["more"].numpy(), 2.0)
        p = {k: out[k] for k in p if k not in ("mixed", "layers")}
        p["mixed"] = {"w": out["mixed"]["w"], "count": 3, "none": None}
        p["layers"] = [{"w": d["w"], "b": d["b"]} for d in out["layers"]]
        p = {k: p[k] for k in ("first", "layers", "mixed", "list", "tuple", "rest")}
        seen.append(type(out["tuple"]))
    assert not long_way and {*seen} == {tuple}
    for got, first in zip(tree.flatten(p)[0], start, strict=True):
        if isinstance(got, Tensor):
            np.testing.assert_allclose(got.numpy(), after(10, float(first[0])), rtol=1e-6)


def test_containers_are_their_users(place: Place, long_way: list[str]) -> None:
    """Of no step before or behind: what is written into one is seen in no other."""
    f, p = ts.jit(step, donate="p"), weights(place)
    for i in range(12):
        if i == 5:
            long_way.clear()
        old = p
        _, p = f(p, ones(place))
        old["w1"], old["w2"] = 1, old["w3"]
        assert p is not old
        del old
    assert not long_way
    for k in range(4):
        np.testing.assert_allclose(p[f"w{k}"].numpy(), after(12, float(k)), rtol=1e-6)


def test_a_container_that_is_held(place: Place) -> None:
    p = nested(place)
    for i in range(10):
        out = nested_step(p, ones(place))
        old, tensor = p["layers"][2], p["tuple"]
        p = {k: out[k] for k in ("first", "layers", "mixed", "list", "tuple", "rest")}
        p["mixed"] = {"w": out["mixed"]["w"], "count": 3, "none": None}
        p["layers"][6] = {k: out["layers"][6][k] for k in "wb"}
        for used in (old["w"], *tensor):
            with pytest.raises(ArgumentError, match="after it was donated"):
                used.numpy()
        np.testing.assert_allclose(p["layers"][2]["w"].numpy(), after(i + 1, 5.0), rtol=1e-6)


# --- what changes between steps ------------------------------------------------------------------
def test_a_function_that_failed_leaves_its_arguments_as_they_come(place: Place, driver: Any,
                                                                  long_way: list[str]) -> None:
    """It may have taken copies that lay beside them."""
    f, g, p = ts.jit(step, donate="p"), ts.jit(lambda p: {k: v + 1.0 for k, v in p.items()},
                                               donate="p"), weights(place)
    for _ in range(6):
        _, p = f(p, ones(place))
    assert all(v.origin is not None for v in p.values())
    driver.status = libcuda.OUT_OF_MEMORY + 700
    with ts.config.scope(cuda_graphs=False), pytest.raises(DeviceError):
        g(p)
    driver.status = 0
    assert all(v.origin is None for v in p.values())
    long_way.clear()
    for _ in range(4):
        _, p = f(p, ones(place))
    assert long_way == ["step"]
    np.testing.assert_allclose(p["w0"].numpy(), after(10))


def test_a_tensor_of_the_set_is_given_twice(place: Place) -> None:
    f, p = ts.jit(step, donate="p"), weights(place)
    for _ in range(6):
        _, p = f(p, ones(place))
    with pytest.raises(ArgumentError, match=r"p\.w3 is donated and is given as x too"):
        f(p, p["w3"])
    _, p = f(p, ones(place))
    np.testing.assert_allclose(p["w0"].numpy(), after(7))


def test_other_donated_tensors_are_given_once(place: Place, long_way: list[str]) -> None:
    """Those whose place no result takes."""
    f = ts.jit(lambda p, x, y: {k: v * 0.5 + x[:4] + y[:4] for k, v in p.items()},
               donate=("p", "x", "y"))
    p, more = weights(place), [place(np.ones(6, np.float32)) for _ in range(18)]
    for i in range(8):
        if i == 5:
            long_way.clear()
        p = f(p, more.pop(), more.pop())
    assert not long_way
    x, y = more
    with pytest.raises(ArgumentError, match="x is donated and is given as y too"):
        f(p, x, x)
    p = f(p, x, y)
    np.testing.assert_allclose(p["w0"].numpy(), after(9, x=2.0))
    for used in (x, y):
        with pytest.raises(ArgumentError, match="after it was donated"):
            used.numpy()


def test_an_observer_sees_each_step(place: Place, monkeypatch: Any) -> None:
    f, p, seen = ts.jit(step, donate="p"), weights(place), list[str]()

    @contextmanager
    def observe(graph: Any) -> Iterator[Any]:
        seen.append(graph.name)
        yield lambda results: None

    for i in range(9):
        if i == 6:
            monkeypatch.setattr(hooks, "runs", [observe])
        _, p = f(p, ones(place))
    assert seen == ["step"] * 3
    np.testing.assert_allclose(p["w0"].numpy(), after(9))


def test_memory_goes_with_the_tensors(place: Place) -> None:
    """The function knows them again, and has nothing of theirs."""
    f, p = ts.jit(step, donate="p"), weights(place)
    for _ in range(6):
        _, p = f(p, ones(place))
    parts = [v if v.layout is None else v.read_parts[0] for v in p.values()]
    memories = [weakref.ref(v.storage) for v in parts]
    del parts
    kept = p["w3"]
    p = {}
    alive = [i for i, r in enumerate(memories) if r() is not None]
    assert alive == [3]
    np.testing.assert_allclose(kept.numpy(), after(6, 3.0))


def test_sets_that_never_come_back_are_not_kept(place: Place, monkeypatch: Any) -> None:
    made, new = list[Any](), steady_step.SteadyStep.__init__
    monkeypatch.setattr(steady_step.SteadyStep, "__init__",
                        lambda s, *a: made.append(1) or new(s, *a))
    f = ts.jit(step, donate="p")
    for _ in range(steady_step.AGAIN + 4):
        p = weights(place)
        _, p = f(p, ones(place))
    assert len(made) <= steady_step.MOST_UNUSED + 1
    for _ in range(2 * steady_step.AGAIN):
        _, p = f(p, ones(place))
    assert len(made) <= steady_step.MOST_UNUSED + 2  # it came back


def test_attributes_are_those_of_new_tensors(place: Place) -> None:
    """Also where somebody set those of one that was used up."""
    f, p = ts.jit(step, donate="p"), weights(place)
    for i in range(10):
        old = p
        _, p = f(p, ones(place))
        if i == 6:
            old["w3"].name, old["w4"].is_param = "mine", True
    assert all(v.name is None and not v.is_param and v.scale is None for v in p.values())
    assert f.specializations == 1


@pytest.mark.parametrize("attribute", ["is_param", "name", "scale"])
def test_an_attribute_of_one_that_is_there_is_set(attribute: str, place: Place,
                                                 long_way: list[str]) -> None:
    """It is seen where it matters, and no other step returns it."""
    f = ts.jit(step, donate="p")
    p = stepped(f, weights(place), place, 6)
    long_way.clear()
    setattr(p["w3"], attribute, {"is_param": True, "name": "mine", "scale": None}[attribute])
    assert not any(in_turn(p))
    old, p = p, stepped(f, p, place, 1)
    assert f.specializations == (2 if attribute == "is_param" else 1)
    np.testing.assert_allclose(p["w3"].numpy(), after(7, 3.0))
    assert old["w3"].name == ("mine" if attribute == "name" else None)
    del old
    p = stepped(f, p, place, 5)
    assert all(v.name is None and not v.is_param for v in p.values())
    np.testing.assert_allclose(p["w3"].numpy(), after(12, 3.0))


def test_results_that_are_parameters(place: Place, long_way: list[str]) -> None:
    """Those in the places of donated ones, and another."""
    @ts.jit(donate="p")
    def f(p: Any, x: Any) -> Any:
        return ts.param(ts.sum(x)), {k: ts.param(v * 0.5 + x) for k, v in p.items()}

    p = {k: ts.param(v) for k, v in weights(place).items()}
    for i in range(9):
        if i == 5:
            long_way.clear()
        value, p = f(p, ones(place))
        assert value.is_param and all(v.is_param for v in p.values())
    assert not long_way
    np.testing.assert_allclose(p["w0"].numpy(), after(9))


# --- how much runs -------------------------------------------------------------------------------
def test_python_that_runs_for_each_tensor(place: Place, driver: Any) -> None:
    few, many = FEW, 3 * FEW
    counts = []
    for count in (few, many):
        f, p, x = ts.jit(long_step, donate="p"), weights(place, count), ones(place)
        for _ in range(8):
            _, p = f(p, x)
        assert f.capture.endswith("in one launch")
        driver.run, run = (lambda launch: None), driver.run  # kernels are Python here
        box = [p]
        del p
        counts.append(median(opcodes(lambda box=box, f=f, x=x: box.append(f(box.pop(), x)[1]))
                             for _ in range(3)))  # Python 3.12 sees none of the first
        driver.run = run
    each = (counts[1] - counts[0]) / (many - few)
    assert each <= OPCODES, f"{each} for each tensor: a pass over all of them is new"
    assert counts[0] - few * each < 1600, f"{counts[0]} of a step with few tensors"
