"""The two sets of tensors of a training loop, which have the memory in turn: who is told it, keeps
one or uses one up ends that."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from mesh.test_gpu_programs import gpus as gpus
from step_cases import Place, after, in_turn, ones, step, stepped, weights
from step_cases import long_way as long_way
from step_cases import place as place
from tessera.errors import ArgumentError
from tessera.graph import steady_step
from tessera.graph.cuda.program.steady_calls import SteadyCalls
from tessera.graph.placed_leaves import FEW
from tessera.tile.launch.object_words import ObjectWords


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
