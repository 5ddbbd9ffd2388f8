"""A training loop: a step asks at once whether it is given the tensors that the step before
returned, and their memory passes at once. How much Python runs for each is counted, so that it does
not creep back."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from tessera import hooks
from tessera.errors import ArgumentError, DeviceError
from tessera.graph import steady_step, tree
from tessera.graph.cuda.program.steady_calls import SteadyCalls
from tessera.graph.placed_leaves import FEW
from tessera.graph.prepared_call import PreparedCall
from tessera.mesh import placement
from tessera.runtime import libcuda
from tessera.tensor import Tensor
from tessera.tile.launch.memory_turns import InTurn
from tessera.tile.launch.object_words import ObjectWords

OPCODES = 0.5  # of Python for each further tensor of a step: a pass over all takes 5 or more
Place = Callable[[np.ndarray], Tensor]


def on_gpu(x: np.ndarray) -> Tensor:
    return ts.tensor(x).to("cuda")


def on_mesh(x: np.ndarray) -> Tensor:
    mesh = ts.dist.mesh(["cuda:0"], axes="dp")
    return ts.dist.distribute(ts.tensor(x), ts.ShardSpec(replicate=True), mesh=mesh)


@pytest.fixture(params=[on_gpu, on_mesh])
def place(request: Any, gpus: Any, monkeypatch: Any) -> Iterator[Place]:
    monkeypatch.setattr(placement, "REAL", {"single"})
    yield request.param
    gc.collect()  # memory goes while there is a driver to give it back to


@pytest.fixture
def long_way(monkeypatch: Any) -> list[str]:
    """Counts the calls of prepared functions that look at each leaf."""
    ask, seen = PreparedCall.tensors, list[str]()
    monkeypatch.setattr(PreparedCall, "tensors",
                        lambda s, leaves: seen.append(s.traced.graph.name) or ask(s, leaves))
    return seen


def weights(place: Place, count: int = FEW) -> dict[str, Tensor]:
    return {f"w{i}": place(np.full(4, i, np.float32)) for i in range(count)}


def step(p: Any, x: Any) -> Any:
    loss = ts.sum(x)
    return loss, {k: v * 0.5 + x for k, v in p.items()}


def long_step(p: Any, x: Any) -> Any:
    """One that is launched as a graph."""
    y = x
    for _ in range(3):
        y = ts.sort(y) + ts.sum(y)
    return ts.sum(y) + ts.sum(p["w9"]), step(p, x)[1]


def after(steps: int, first: float = 0.0, x: float = 1.0) -> float:
    """An element of w0 after so many steps of this x."""
    for _ in range(steps):
        first = first * 0.5 + x
    return first


def ones(place: Place) -> Tensor:
    return place(np.ones(4, np.float32))


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


# --- memory in turn ------------------------------------------------------------------------------
def in_turn(p: Any) -> list[bool]:
    """Of each tensor, whether it has its memory in turn with others."""
    return [(v._storage if v.layout is None else v._held).__class__ is InTurn for v in p.values()]


def stepped(f: Any, p: Any, place: Place, steps: int) -> Any:
    for _ in range(steps):
        _, p = f(p, ones(place))
    return p


def test_tensors_that_change_places(place: Place, long_way: list[str]) -> None:
    f = ts.jit(step, donate="p")
    p = stepped(f, weights(place), place, 6)
    long_way.clear()
    p["w1"], p["w2"] = p["w2"], p["w1"]
    p = stepped(f, p, place, 1)
    assert long_way == ["step"]
    np.testing.assert_allclose(p["w1"].numpy(), after(7, 2.0))
    np.testing.assert_allclose(p["w2"].numpy(), after(7, 1.0))


def test_who_is_told_the_memory_of_one_has_it(place: Place, long_way: list[str]) -> None:
    """The others have their own from there on, and the function has none of it."""
    f = ts.jit(step, donate="p")
    p = stepped(f, weights(place), place, 6)
    assert all(in_turn(p))
    (p["w3"] if p["w3"].layout is None else p["w3"].local).memory  # noqa: B018
    assert not any(in_turn(p))
    memory = weakref.ref((p["w4"] if p["w4"].layout is None else p["w4"].read_parts[0]).storage)
    del p["w4"]
    assert memory() is None
    for k in (0, 3, 9):
        np.testing.assert_allclose(p[f"w{k}"].numpy(), after(6, float(k)))
    p["w4"] = place(np.full(4, after(6, 4.0), np.float32))
    long_way.clear()
    p = stepped(f, p, place, 6)
    assert len(long_way) < 6 and all(in_turn(p))
    np.testing.assert_allclose(p["w4"].numpy(), after(12, 4.0))


def test_one_that_was_used_up_gets_other_memory(place: Place) -> None:
    f = ts.jit(step, donate="p")
    old = stepped(f, weights(place), place, 6)
    p = stepped(f, old, place, 1)
    other = place(np.full(4, 7.0, np.float32))
    if other.layout is None:
        old["w2"].memory = other.memory
    else:
        old["w2"].held = other.held
    with pytest.raises(ArgumentError, match="after it was donated"):
        old["w3"].numpy()
    kept = old["w2"]
    del old
    p = stepped(f, p, place, 3)
    np.testing.assert_allclose(kept.numpy(), 7.0)
    np.testing.assert_allclose(p["w2"].numpy(), after(10, 2.0))


def test_a_weak_reference_to_one_that_was_used_up(place: Place) -> None:
    f = ts.jit(step, donate="p")
    p = stepped(f, weights(place), place, 6)
    ref = weakref.ref(p["w5"])
    p = stepped(f, p, place, 4)
    gc.collect()
    assert ref() is None
    np.testing.assert_allclose(p["w5"].numpy(), after(10, 5.0))


def test_another_function_uses_them_up(place: Place) -> None:
    f, g = ts.jit(step, donate="p"), ts.jit(lambda p: {k: v + 1.0 for k, v in p.items()},
                                            donate="p")
    old = stepped(f, weights(place), place, 6)
    p = g(old)
    with pytest.raises(ArgumentError, match="donated to <lambda>"):
        old["w1"].numpy()
    np.testing.assert_allclose(p["w1"].numpy(), after(6, 1.0) + 1.0)
    p = stepped(f, p, place, 3)
    np.testing.assert_allclose(p["w1"].numpy(), after(3, after(6, 1.0) + 1.0))


def test_one_that_was_used_up_is_given_to_another_function(place: Place) -> None:
    f, norm = ts.jit(step, donate="p"), ts.jit(lambda p: sum(ts.sum(v) for v in p.values()))
    p = stepped(f, weights(place), place, 6)
    for _ in range(3):
        total = norm(p).item()
    old, p = p, stepped(f, p, place, 1)
    with pytest.raises(ArgumentError, match="after it was donated to step"):
        norm(old)
    np.testing.assert_allclose(total, sum(4 * after(6, float(k)) for k in range(FEW)), 1e-5)
    np.testing.assert_allclose(p["w1"].numpy(), after(7, 1.0))


def test_copies_have_memory_of_their_own(place: Place) -> None:
    f = ts.jit(step, donate="p")
    p = stepped(f, weights(place), place, 6)
    copies = [copy.copy(p["w1"]), copy.deepcopy(p["w1"])]
    p = stepped(f, p, place, 2)
    for x in copies:
        np.testing.assert_allclose(x.numpy(), after(6, 1.0))


def test_turns_that_end_while_a_step_runs(place: Place, monkeypatch: Any) -> None:
    """As when another thread is told the memory of a tensor that the step uses up."""
    f = ts.jit(step, donate="p")
    p = stepped(f, weights(place), place, 6)
    run, old = SteadyCalls.run, p

    def meanwhile(calls: Any, tensors: Any) -> Any:
        made = run(calls, tensors)
        (old["w3"] if old["w3"].layout is None else old["w3"].local).memory  # noqa: B018
        return made

    with monkeypatch.context() as patch:
        patch.setattr(SteadyCalls, "run", meanwhile)
        _, p = f(p, ones(place))
    with pytest.raises(ArgumentError, match="after it was donated"):
        old["w1"].numpy()
    np.testing.assert_allclose(p["w1"].numpy(), after(7, 1.0))
    np.testing.assert_allclose(p["w3"].numpy(), after(7, 3.0))


def test_threads_that_read_while_others_step(place: Place) -> None:
    f, read = ts.jit(step, donate="p"), list[float]()
    box, stop = [stepped(f, weights(place), place, 6)], threading.Event()

    def look() -> None:
        while not stop.is_set():
            with suppress(ArgumentError):  # used up meanwhile
                part = box[0]["w1"]
                (part if part.layout is None else part.read_parts[0]).storage  # noqa: B018
                read.append(1.0)

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(40):
        box[0] = stepped(f, box[0], place, 1)
    stop.set()
    thread.join()
    assert read
    np.testing.assert_allclose(box[0]["w1"].numpy(), after(46, 1.0))


# --- who has them --------------------------------------------------------------------------------
class Held:
    __slots__ = ("__weakref__",)


def test_words_of_objects_say_who_has_them() -> None:
    held = [Held() for _ in range(5)]
    containers, refs = held[:3], [weakref.ref(x, lambda gone: None) for x in held]
    words = ObjectWords(held, [2, 2, 2, 1, 1], refs)
    assert words.unseen()
    for k in range(5):
        other = held[k]
        assert not words.unseen()
        del other
        assert words.unseen()
        weak = weakref.ref(held[k])
        assert not words.unseen()
        del weak
        assert words.unseen()
    del containers
    assert not words.unseen()


def test_an_interpreter_whose_objects_are_otherwise(place: Place, monkeypatch: Any) -> None:
    monkeypatch.setattr(steady_step, "are_readable", lambda: False)
    f, p = ts.jit(step, donate="p"), weights(place)
    p = stepped(f, p, place, 6)
    assert not any(in_turn(p))
    np.testing.assert_allclose(p["w3"].numpy(), after(6, 3.0))


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
