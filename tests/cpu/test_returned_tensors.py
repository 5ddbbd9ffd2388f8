"""Calls whose arguments are results of the call before, as those of a training step: they are known
by their origin, and what was donated two calls before is a result again. What anybody has, or has
changed, is not."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import Torch, filled
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from mesh.test_gpu_programs import gpus as gpus
from tessera.errors import ArgumentError, DeviceError
from tessera.graph import tree
from tessera.graph.placed_leaves import FEW
from tessera.graph.prepared_call import PreparedCall
from tessera.mesh import placement
from tessera.runtime import libcuda
from tessera.tensor import Tensor
from tessera.tile.launch.resident import offload

N = FEW + 8  # leaves
Values = dict[str, np.ndarray]


def descend(p: Any, x: Any) -> Any:
    loss = ts.sum(x)
    return loss, {k: v * 0.5 + x for k, v in p.items()}


def meant(p: Values, x: np.ndarray) -> Values:
    return {k: v * np.float32(0.5) + x for k, v in p.items()}


class Training:
    """Steps on a GPU, or on a mesh of one, and what they mean. `p`: the tensors of now."""

    def __init__(self, there: Callable[[np.ndarray], Tensor], seed: int = 0, step: Any = None):
        self.there, rng = there, np.random.default_rng(seed)
        self.host = {f"w{i}": rng.standard_normal(4).astype(np.float32) for i in range(N)}
        self.p = {k: there(v) for k, v in self.host.items()}
        self.x = rng.standard_normal(4).astype(np.float32)
        self.step = step or ts.jit(descend, donate="p")

    def steps(self, count: int) -> None:
        for _ in range(count):
            x = self.x = self.x + np.float32(0.25)
            _, self.p = self.step(self.p, self.there(x))
            self.host = {k: v * np.float32(0.5) + x for k, v in self.host.items()}

    def check(self) -> None:
        for k, v in self.host.items():
            np.testing.assert_allclose(self.p[k].numpy(), v, rtol=1e-6, err_msg=k)

    def go_on(self) -> None:
        """Right behind what was changed, and when calls are alike again."""
        for count in (1, 4):
            self.steps(count)
            self.check()


def on_gpu(x: np.ndarray) -> Tensor:
    return ts.tensor(x).to("cuda")


def on_mesh(x: np.ndarray) -> Tensor:
    mesh = ts.dist.mesh(["cuda:0"], axes="dp")
    return ts.dist.distribute(ts.tensor(x), ts.ShardSpec(replicate=True), mesh=mesh)


@pytest.fixture
def alone(gpus: Any, monkeypatch: Any) -> None:
    """A program that runs alone computes on the GPU that its mesh names."""
    monkeypatch.setattr(placement, "REAL", {"single"})


@pytest.fixture(params=[on_gpu, on_mesh])
def training(request: Any, alone: None) -> Iterator[Training]:
    made = Training(request.param)
    yield made
    vars(made).clear()  # its memory goes while there is a driver to give it back to
    gc.collect()


@pytest.fixture
def looked_at(monkeypatch: Any) -> list[int]:
    """Counts the calls that look at all that is asked of each leaf."""
    ask, seen = PreparedCall._are_alike, list[int]()
    monkeypatch.setattr(PreparedCall, "_are_alike",
                        lambda s, leaves: seen.append(len(leaves)) or ask(s, leaves))
    return seen


def ids(p: dict[str, Tensor]) -> list[int]:
    return [*map(id, p.values())]


# --- what is known again -------------------------------------------------------------------------
def test_results_of_the_call_before_are_known(training: Training, looked_at: list[int]) -> None:
    training.steps(5)
    looked_at.clear()
    training.steps(5)
    assert not looked_at
    training.check()


def test_two_sets_of_tensors_take_turns(training: Training) -> None:
    training.steps(5)
    sets = []
    for _ in range(4):
        training.steps(1)
        sets.append(ids(training.p))
    assert sets[0] == sets[2] and sets[1] == sets[3] and not {*sets[0]} & {*sets[1]}
    training.check()


def test_two_trainings_of_one_function(gpus: Any) -> None:
    first = Training(on_gpu)
    second = Training(on_gpu, 1, first.step)
    for count in (4, 1, 1, 2, 1):
        first.steps(count)
        second.steps(1)
    first.check()
    second.check()


def test_two_functions_of_other_extents(alone: None) -> None:
    """Tensors that one used up are none of the other's."""
    for there in (on_gpu, on_mesh):
        first, second = Training(there), Training(there, 1)
        second.host = {k: np.ones((2, 4), np.float32) for k in reversed(second.host)}
        second.p = {k: there(v) for k, v in second.host.items()}
        for _ in range(8):
            first.steps(1)
            second.steps(1)
        for t, shape in ((first, (4,)), (second, (2, 4))):
            t.check()
            assert {v.shape for v in t.p.values()} == {shape}


def test_a_parameter_is_another_signature(training: Training) -> None:
    training.steps(5)
    training.p["w6"].is_param = True
    training.steps(1)
    assert training.step.specializations == 2
    training.steps(4)
    training.check()


def test_parameters_are_parameters_again(gpus: Any) -> None:
    t = Training(on_gpu)
    t.p = {k: ts.param(v) if i % 2 else v for i, (k, v) in enumerate(t.p.items())}
    step = ts.jit(lambda p, x: p, donate="p")
    for _ in range(6):
        t.p = step(t.p, on_gpu(t.x))
        assert [v.is_param for v in t.p.values()] == [bool(i % 2) for i in range(N)]
    t.check()


# --- what somebody has ---------------------------------------------------------------------------
def test_what_was_donated_stays_used_up(training: Training) -> None:
    """All that is kept: no later result is one of these tensors."""
    kept = []
    for _ in range(8):
        kept.append(training.p)
        training.steps(1)
    training.check()
    for p in kept:
        with pytest.raises(ArgumentError, match="after it was donated"):
            p["w3"].numpy()
        with pytest.raises(ArgumentError, match="after it was donated"):
            training.step(p, training.there(training.x))
    training.check()


@pytest.mark.parametrize("one", ["w0", "w7", f"w{N - 1}"])
def test_one_kept_tensor(training: Training, one: str) -> None:
    training.steps(5)
    kept = training.p[one]
    training.steps(4)
    assert "donated to" in repr(kept)
    assert id(kept) not in ids(training.p)
    training.check()


def test_weak_references_die_with_their_tensors(training: Training) -> None:
    training.steps(5)
    seen = [weakref.ref(v) for v in training.p.values()]
    training.steps(4)
    gc.collect()
    assert all(r() is None for r in seen)
    training.check()


def test_results_that_are_kept_are_not_written_over(gpus: Any) -> None:
    """Without donation, and of the loss with it."""
    t = Training(on_gpu)
    plain, losses, kept = ts.jit(descend), [], []
    for i in range(8):
        value, p = plain(t.p, on_gpu(t.x))
        kept.append((p, meant(t.host, t.x)))
        loss, t.p = t.step(t.p, on_gpu(t.x))
        losses.append((loss, t.x.sum()))
        t.host = meant(t.host, t.x)
        t.x = t.x + np.float32(i)
    for p, want in kept:
        for k in want:
            np.testing.assert_allclose(p[k].numpy(), want[k], rtol=1e-6)
    np.testing.assert_allclose([x.item() for x, _ in losses], [x for _, x in losses], rtol=1e-5)


def test_memory_that_somebody_has_is_not_written(gpus: Any) -> None:
    t = Training(on_gpu)
    t.steps(5)
    held, was = ts.as_bytes(t.p["w2"]), t.p["w2"].numpy().tobytes()
    t.steps(3)
    assert held.numpy().tobytes() == was
    t.check()


# --- what has changed between calls --------------------------------------------------------------
def swap(t: Training) -> None:
    t.p["w1"], t.p["w2"] = t.p["w2"], t.p["w1"]
    t.host["w1"], t.host["w2"] = t.host["w2"], t.host["w1"]


def replace(t: Training) -> None:
    t.host["w5"] = np.arange(4, dtype=np.float32)
    t.p["w5"] = t.there(t.host["w5"])


def here(x: Any) -> Tensor:
    """It, or its part."""
    return x if x.layout is None else x.local


def write(t: Training) -> None:
    here(t.p["w5"])[1:3] = 7.0
    t.host["w5"][1:3] = 7.0


def rename(t: Training) -> None:
    t.p = {("v" if k == "w4" else k): v for k, v in t.p.items()}
    t.host = {("v" if k == "w4" else k): v for k, v in t.host.items()}


def reorder(t: Training) -> None:
    t.p, t.host = dict(reversed(t.p.items())), dict(reversed(t.host.items()))


def drop(t: Training) -> None:
    del t.p["w6"], t.host["w6"]


def extents(t: Training) -> None:
    t.host["w6"] = np.ones((3, 4), np.float32)
    t.p["w6"] = t.there(t.host["w6"])


def look(t: Training) -> None:
    here(t.p["w6"]).numpy()


@pytest.mark.parametrize("change", [swap, replace, write, rename, reorder, drop,
                                    extents, look])
def test_what_is_changed_between_calls(training: Training, change: Any) -> None:
    training.steps(5)
    change(training)
    training.go_on()


def test_other_arguments_are_asked_all(training: Training) -> None:
    training.steps(5)
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    _, p = training.step(training.p, training.there(x))
    for k, v in training.host.items():
        np.testing.assert_allclose(p[k].numpy(), v * np.float32(0.5) + x, rtol=1e-6)
    with pytest.raises(ArgumentError, match="after it was donated"):
        training.p["w1"].numpy()


def test_tensors_of_other_extents_are_swapped(training: Training) -> None:
    extents(training)
    training.steps(5)
    a, b = training.p["w5"], training.p["w6"]
    assert a.shape != b.shape
    training.p |= {"w5": b, "w6": a}
    training.host |= {"w5": training.host["w6"], "w6": training.host["w5"]}
    training.go_on()


def test_a_tensor_that_was_offloaded(gpus: Any) -> None:
    t = Training(on_gpu)
    t.steps(5)
    offload(t.p["w3"])
    t.check()
    assert t.p["w3"].origin is None
    t.steps(4)
    t.check()


def test_a_part_that_was_offloaded(alone: None) -> None:
    t = Training(on_mesh)
    t.steps(5)
    offload(t.p["w3"].local)
    t.go_on()


def test_a_part_in_memory_of_another_library(alone: None) -> None:
    """It is not written over, whoever put it there."""
    t = Training(on_mesh)
    t.steps(5)
    array = filled(np.full(4, 3.0, np.float32))
    t.p["w3"].local.storage = ts.from_dlpack(Torch(array)).storage
    t.host["w3"] = np.full(4, 3.0, np.float32)
    t.go_on()
    assert array.tolist() == [3.0] * 4


def test_attributes_are_those_of_a_new_tensor(training: Training) -> None:
    training.steps(5)
    training.p["w1"].name = "mine"
    training.steps(2)
    assert all(v.name is None and v.scale is None and not v.is_param for v in training.p.values())


# --- twice, and beside ---------------------------------------------------------------------------
def test_a_tensor_is_given_once(training: Training) -> None:
    training.steps(5)
    p = {**training.p, "w1": training.p["w2"]}
    with pytest.raises(ArgumentError, match=r"p\.w1 is donated and is given as p\.w2 too"):
        training.step(p, training.there(training.x))
    with pytest.raises(ArgumentError, match=r"p\.w2 is donated and is given as x too"):
        training.step(training.p, training.p["w2"])
    training.check()
    training.steps(2)
    training.check()


def test_a_call_that_fails_leaves_its_arguments(training: Training, driver: Any) -> None:
    with ts.config.scope(cuda_graphs=False):
        training.steps(5)
        for _ in range(2):
            driver.status = libcuda.OUT_OF_MEMORY + 700
            with pytest.raises(DeviceError):
                training.step(training.p, training.there(training.x))
            driver.status = 0
            training.check()
            training.steps(3)
            training.check()


def test_an_interrupted_call_leaves_no_results_behind(training: Training, monkeypatch: Any) -> None:
    """What it was given may be written over, as of any call; later calls are right."""
    training.steps(5)
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(ts.graph.traced_signature.TracedSignature, "result", _interrupted)
        m.setattr(ts.graph.steady_step.StepForm, "put", property(_interrupted), raising=False)
        training.step(training.p, training.there(training.x))
    fresh = {k: training.there(v) for k, v in training.host.items()}
    training.p = fresh
    training.steps(4)
    training.check()


def _interrupted(*args: Any) -> Any:
    raise KeyboardInterrupt


def test_settings_in_between(training: Training) -> None:
    for i in range(10):
        with ts.config.scope(cuda_graphs=i % 3 > 0, numerics=("off", "raise")[i % 4 == 3]):
            training.steps(1)
    training.check()


def test_threads_share_a_function(gpus: Any) -> None:
    first = Training(on_gpu)
    first.steps(3)  # compiled before
    all_ = [first, *(Training(on_gpu, s, first.step) for s in (1, 2))]
    failed: list[BaseException] = []

    def train(t: Training) -> None:
        try:
            for _ in range(6):
                t.steps(2)
                t.check()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=train, args=(t,)) for t in all_]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for t in all_:
        t.check()


def test_a_mesh_of_hosts(gpus: Any) -> None:
    t = Training(on_mesh)
    for _ in range(3):
        kept = t.p
        t.steps(2)
        t.check()
        with pytest.raises(ArgumentError, match="after it was donated"):
            kept["w3"].numpy()
    assert all(v.origin is None for v in t.p.values())


def test_few_tensors_have_no_origin(gpus: Any) -> None:
    f, x = ts.jit(lambda x: {"a": x * 2.0, "b": x + 1.0}), on_gpu(np.ones(4, np.float32))
    for _ in range(4):
        out = f(x)
    assert [v.origin for v in tree.flatten(out)[0]] == [None, None]
