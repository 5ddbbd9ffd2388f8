"""Tensors that a function captures are read at each call: what is written into them is seen."""

from __future__ import annotations

import enum
import functools
import sys
import threading
import types
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from tessera.graph.cuda.program.workspace import Workspace
from tessera.graph.kept_traces import RetracingWarning
from tolerance import assert_close

TYPES = ["f32", "f64", "bf16", "f16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int8", "int32", "int4",
         "f32 @accum(f32)", "bf16 @saturate", 'int8 @scaled("amax")']
USES: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda x, w: x @ w,
    "elementwise": lambda x, w: x * w + 1.0,
    "of it alone": lambda x, w: x + ts.sum(ts.exp(ts.cast(w, "f32") * 0.5)) * 2.0,
    "a view of it": lambda x, w: x + w.T[0],
    "cast": lambda x, w: x + ts.cast(w, "f64"),
    "a constant": lambda x, w: ts.where(w > 0.0, x, ts.zeros((4, 4)) + 3.0),
    "gradient": lambda x, w: ts.grad(lambda y: ts.sum((y * w) ** 2))(x),
    "vmap": lambda x, w: ts.vmap(lambda row: row * w[0] + ts.max(w))(x),
    "scan": lambda x, w: ts.scan(lambda c, row: (ts.cast_like(c + row * w[1], c), c),
                                 ts.zeros(4), x)[1],
    "cond": lambda x, w: ts.cond(ts.sum(x) > -1e9, lambda y: ts.cast_like(y * w, y),
                               lambda y: y, x),
}


@pytest.mark.parametrize("numeric", TYPES)
@pytest.mark.parametrize("use", USES)
def test_what_is_written_is_seen(use: str, numeric: str, rng: np.random.Generator) -> None:
    x = ts.tensor(rng.integers(-3, 4, (4, 4)).astype(np.float32))
    values = rng.integers(-2, 3, (4, 4)).astype(np.float32)
    x[0, 0], values[0, 0] = -1.0, 0.0  # here every use gives another value after each write
    w = ts.param(values, numeric)
    f = ts.jit(lambda x: USES[use](x, w))
    seen = []
    for _ in range(3):
        want = USES[use](x, w)
        seen.append(want.numpy().astype(np.float64))
        assert_close(f(x).numpy(), want.numpy(), want.dtype, 8, scale=8.0)
        values = np.where(values == 2, np.float32(-2), values + 1)
        w[...] = values
    assert not np.array_equal(seen[0], seen[1]), "the case shows nothing"


@pytest.mark.parametrize("numeric", ["f32", "bf16", "int8"])
def test_what_is_written_is_seen_on_a_gpu(numeric: str, gpu: Any, apart: Any,
                                          rng: np.random.Generator) -> None:
    x = ts.tensor(rng.integers(-3, 4, (4, 4)).astype(np.float32))
    w = ts.param(rng.integers(-2, 3, (4, 4)).astype(np.float32), numeric)
    f = ts.jit(lambda x: x * ts.exp(ts.cast(w, "f32")) + w, target="cuda")
    for _ in range(2):
        wide = ts.cast(w, "f32")
        assert_close(f(x).array, (x * ts.exp(wide) + wide).array, "f32", 4, scale=8.0)
        w[...] = rng.integers(-2, 3, (4, 4)).astype(np.float32)


def test_what_several_functions_capture_is_copied_to_a_gpu_once_for_each(
        gpu: Any, apart: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = ts.tensor(rng.normal(size=(4, 4)), "f32"), ts.param(rng.normal(size=(4, 4)), "f32")
    given, copied = x.to("cuda"), []
    fill = Workspace._fill
    monkeypatch.setattr(Workspace, "_fill", lambda *a: (copied.append(a[-1] is w), fill(*a)))
    functions = [ts.jit(lambda x, c=c: x * w + c) for c in (0.0, 1.0, 2.0)]
    for count in (3, 6):
        for _ in range(3):
            for c, f in enumerate(functions):
                np.testing.assert_allclose(f(given).array, x.array * w.array + c, rtol=1e-6)
        assert sum(copied) == count
        w[...] = rng.normal(size=(4, 4))


def test_a_numpy_array_is_read_at_each_call() -> None:
    table = np.arange(4.0, dtype=np.float32)
    f = ts.jit(lambda x: x + ts.exp(ts.cast(table, "f64")))
    for _ in range(2):
        np.testing.assert_allclose(f(ts.zeros(4)).numpy(), np.exp(table.astype(np.float64)))
        table += 1.0


def test_what_nobody_can_change_is_computed_once() -> None:
    """Tensors that are made inside: fills, ranges, and what follows from them alone."""
    f = ts.jit(lambda x: x + ts.exp(ts.arange(4, dtype="f32") * ts.full((4,), 0.5)))
    f(ts.zeros(4))
    calls = [u for u in f.inspect_ir("schedule").splitlines() if "call" in u]
    assert len(calls) == 1 and "add" in calls[0]
    np.testing.assert_allclose(f(ts.zeros(4)).numpy(), np.exp(np.arange(4) * 0.5), rtol=1e-6)


# --- names that are bound to another tensor ---------------------------------------------------
@dataclass(slots=True)
class Slots:
    w: Any


class Module:
    """Holds what a test binds anew, as a user's model does."""

    def __init__(self, w: Any):
        self.w, self.parts, self.slots = w, {"inner": [w]}, Slots(w)

    def bind(self, w: Any) -> None:
        self.w, self.parts["inner"][0], self.slots.w = w, w, w

    def __call__(self, x: Any) -> Any:
        return x * self.w

    @ts.jit
    def method(self, x: Any) -> Any:
        return x * self.w


NAMES: dict[str, Callable[[Module], Callable]] = {
    "attribute": lambda m: ts.jit(lambda x: x * m.w),
    "called": lambda m: ts.jit(lambda x: m(x)),
    "object": lambda m: ts.jit(m),
    "method": lambda m: m.method,
    "slots": lambda m: ts.jit(lambda x: x * m.slots.w),
    "containers": lambda m: ts.jit(lambda x: x * m.parts["inner"][0]),
    "module": lambda m: ts.jit(functools.partial(_of_module, _holding(m))),
    "compiled": lambda m: (lambda inner: ts.jit(lambda x: inner(x)))(ts.jit(lambda x: x * m.w)),
    "grad": lambda m: ts.grad(lambda x: ts.sum(x * m.w)),
    "array": lambda m: ts.jit(lambda x: x * ts.tensor(m.w)),
    "scan": lambda m: ts.jit(lambda x: ts.scan(lambda c, _: (c * m.w, None), x, length=1)[0]),
    "gpu": lambda m: ts.jit(lambda x: x * m.w, target="cuda"),
}


def _holding(m: Module) -> types.ModuleType:
    made = types.ModuleType("holding")
    made.model = m
    return made


def _of_module(module: Any, x: Any) -> Any:
    return x * module.model.w


@pytest.mark.parametrize("way", NAMES)
def test_a_name_bound_to_another_tensor_is_seen(way: str, request: pytest.FixtureRequest,
                                                rng: np.random.Generator) -> None:
    if way == "gpu":
        request.getfixturevalue("gpu")
    make = np.asarray if way == "array" else ts.tensor
    m = Module(make(rng.standard_normal(3).astype(np.float32)))
    f, x = NAMES[way](m), ts.ones(3)
    for _ in range(2):
        for _ in range(3):  # traced, called by its short key
            np.testing.assert_array_equal(f(x).numpy(), np.asarray(m.w))
        m.bind(make(rng.standard_normal(3).astype(np.float32)))
    if way not in ("grad", "method"):
        assert f.specializations == 1, "a trace of a tensor that is gone was kept"


class Net:
    """Settings of an object, as PyTorch's modules have."""

    def __init__(self) -> None:
        self.w, self.training, self.scale = ts.ones(3), True, 2.0
        self.traces = 0

    def factor(self) -> float:
        return self.scale if self.training else 10.0

    @ts.jit
    def method(self, x: Any) -> Any:
        self.traces += 1
        return x * self.w * self.factor()

    def __call__(self, x: Any) -> Any:
        self.traces += 1
        return x * self.w * self.factor()


@pytest.mark.parametrize("way", ["method", "closure"])
def test_a_setting_of_an_object_is_seen_and_its_trace_kept_for_later(way: str) -> None:
    net, x = Net(), ts.ones(3)
    f = net.method if way == "method" else ts.jit(lambda x: net(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in range(6):
            net.training = k % 2 == 0
            assert f(x).tolist() == f(x).tolist() == [2.0 if net.training else 10.0] * 3
        assert net.traces == 2
        net.training, net.scale = True, 3.0
        assert f(x).tolist() == [3.0] * 3 and net.traces == 3
        net.w = net.w * 2.0
        assert f(x).tolist() == [6.0] * 3
        net.training = False
        assert f(x).tolist() == [20.0] * 3


class Sign(enum.Enum):
    PLUS, MINUS = 1, -1


class Defaults:
    """What is read by the class of an object, by a property, and by a static method."""

    w, training, inner, other, sign = ts.ones(3), True, 2.0, 5.0, Sign.PLUS

    @property
    def scale(self) -> float:
        return self.inner

    @staticmethod
    def factor(model: Any) -> float:
        return model.other

    @classmethod
    def product(cls, x: Any) -> Any:
        return x * cls.w

    def __call__(self, x: Any) -> Any:
        y = x * self.w * self.scale * self.factor(self) + float(self.training)
        return y if self.sign is Sign.PLUS else -y


@pytest.mark.parametrize("of", ["object", "class"])
def test_what_an_object_has_by_its_class_is_seen(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = Defaults(), ts.ones(3)
    f, by_name = ts.jit(lambda x: net(x)), ts.jit(lambda x: Defaults.product(x) * Defaults.inner)
    assert f(x).tolist() == [11.0] * 3 and by_name(x).tolist() == [2.0] * 3
    holder = net if of == "object" else Defaults
    for name, value, want in [("training", False, 10.0), ("inner", 3.0, 15.0), ("other", 2.0, 6.0),
                              ("w", ts.full((3,), 4.0), 24.0), ("sign", Sign.MINUS, -24.0)]:
        monkeypatch.setattr(holder, name, value, raising=False)
        assert f(x).tolist() == f(x).tolist() == [want] * 3, name
    assert by_name(x).tolist() == [2.0 if of == "object" else 12.0] * 3


def test_names_that_a_function_met_later_has_are_looked_for() -> None:
    """Whatever the order in which the globals of a function are looked through."""
    module = types.ModuleType("module")
    module.w, module.v, x = ts.ones(3), 1.0, ts.ones(3)
    for outer in ("module.v + helper(x)", "helper(x) + module.v"):
        for helper in ("helper", "a", "q", "zz"):  # the order is that of their hashes
            names: dict[str, Any] = {"module": module, "__name__": "user"}
            exec(f"def {helper}(x): return x * module.w\n"
                 f"def f(x): return {outer.replace('helper', helper)}", names)
            f = ts.jit(names["f"])
            for k in (1.0, 5.0):
                module.w = ts.full((3,), k)
                assert f(x).tolist() == [k + 1.0] * 3


def test_arrays_that_the_code_does_not_name_are_not_looked_at() -> None:
    net, traces = Net(), []
    net.batch = np.ones(3)
    f = ts.jit(lambda x: (traces.append(1), x * net.w)[1])
    for _ in range(4):
        net.batch = np.ones(3)
        f(ts.ones(3))
    assert len(traces) == 1


def test_a_setting_that_changes_at_each_call_is_told() -> None:
    net = Net()
    f = ts.jit(lambda x: x * net.w * net.scale, name="scaled")
    with pytest.warns(RetracingWarning, match="33 times, .*or another value of 'scale'"):
        for k in range(40):
            net.scale = float(k)
            assert f(ts.ones(3)).tolist() == [float(k)] * 3


@pytest.mark.filterwarnings("ignore::tessera.graph.kept_traces.RetracingWarning")
def test_threads_that_see_a_name_bound_anew_at_once() -> None:
    """Each forgets the trace, or puts it aside, which another one may have done."""
    net, wrong, threads = Net(), [], 4
    f, meet = ts.jit(lambda x: x * net.w * net.scale), threading.Barrier(threads)
    before = sys.getswitchinterval()

    def bind() -> None:
        net.w, net.scale = net.w + 1.0, 3.0 - net.scale

    def call() -> None:
        try:
            for k in range(40):
                if meet.wait() == 0:
                    bind()
                meet.wait()
                if f(ts.ones(3)).tolist() != [(k + 2.0) * net.scale] * 3:
                    wrong.append(k)
        except Exception as error:
            wrong.append(error)
            meet.abort()

    sys.setswitchinterval(1e-6)
    try:
        workers = [threading.Thread(target=call) for _ in range(threads)]
        for step in (threading.Thread.start, threading.Thread.join):
            [step(w) for w in workers]
    finally:
        sys.setswitchinterval(before)
    assert not wrong


TABLE = ts.ones(3)


def test_globals_and_variables_of_functions_around_are_names(rng: np.random.Generator) -> None:
    global TABLE
    w, x = ts.ones(3), ts.ones(3)
    inside, outside = ts.jit(lambda x: x * w), ts.jit(lambda x: (lambda y: y * TABLE)(x))
    for k in (1.0, 2.0):
        w = TABLE = ts.full((3,), k)
        assert inside(x).tolist() == outside(x).tolist() == [k] * 3


def test_a_function_that_is_traced_again_and_again_says_why() -> None:
    m = Module(ts.ones(3))
    f = ts.jit(lambda x: x * m.w, name="scaled")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            f(ts.ones(3))
            m.bind(m.w * 2.0)
    with pytest.warns(RetracingWarning, match="scaled .* 3 times, as 'w'.*give it as an argument"):
        assert f(ts.ones(3)).tolist() == [8.0] * 3


# --- Python values: numbers, functions, lists and dicts ----------------------------------------
RATE, ACT, KIND, SHAPE, CONFIG = 2.0, ts.relu, ts.f32, (2, 3), {"rate": 2.0, "step": 0}
COUNT, SEEN = 0, []


def _through(helper: Callable, factor: float = 1.0) -> Any:
    return lambda x: helper(x) * factor


def _counts(x: Any) -> Any:
    global COUNT
    COUNT += 1
    SEEN.append(x.shape)
    CONFIG["traces"] = COUNT
    return x * CONFIG["rate"]


@pytest.mark.filterwarnings("ignore::tessera.graph.kept_traces.RetracingWarning")
@pytest.mark.parametrize("wrap", [ts.jit, ts.vmap, lambda f: ts.jit(ts.jit(f))],
                         ids=["jit", "vmap", "jit of jit"])
def test_python_values_of_other_scopes_are_seen(wrap: Callable) -> None:
    global RATE, ACT, KIND, SHAPE
    x, rate, factors, table = ts.ones(6), 2.0, [], {"a": 3.0}
    module = types.ModuleType("settings")
    module.rate = 2.0
    RATE, ACT, KIND, SHAPE, CONFIG["rate"] = 2.0, ts.relu, ts.f32, (2, 3), 2.0
    inside, of_global = wrap(lambda x: x * rate), wrap(lambda x: ACT(x) * RATE)
    typed, of_module = wrap(lambda x: ts.cast(x, KIND)), wrap(lambda x: x * module.rate)
    of_list = wrap(lambda x: functools.reduce(lambda y, k: y * k, factors, x))
    of_dict, of_key = wrap(lambda x: x * sum(table.values())), wrap(lambda x: x * CONFIG["rate"])

    def values() -> list:
        return [float(f(x)[0]) for f in (inside, of_global, of_module, of_list, of_dict, of_key)]

    shaped = ts.jit(lambda x: ts.reshape(x, SHAPE))
    assert values() == values() == [2.0, 2.0, 2.0, 1.0, 3.0, 2.0]
    assert typed(x).dtype is ts.f32 and shaped(x).shape == (2, 3)
    rate = RATE = module.rate = CONFIG["rate"] = 4.0
    factors.append(5.0)
    table["b"] = 4.0
    assert values() == values() == [4.0, 4.0, 4.0, 5.0, 7.0, 4.0]
    factors.append(ts.full((), 2.0))
    ACT, KIND, SHAPE = (lambda x: -x), ts.f16, (3, 2)
    assert values() == [4.0, -4.0, 4.0, 10.0, 7.0, 4.0]
    assert typed(x).dtype is ts.f16 and shaped(x).shape == (3, 2)
    factors[0], factors[1] = 3.0, ts.full((), 3.0)
    assert values()[3] == 9.0
    del factors[1]
    assert values()[3] == 3.0


def test_sets_queues_and_dicts_of_other_classes_are_seen() -> None:
    kept, queue, counts, names = {1}, deque([2.0]), Counter(a=2), defaultdict(float, a=2.0)
    x = ts.ones(2)
    fs = [ts.jit(f) for f in (lambda x: x * (5.0 if 3 in kept else 2.0), lambda x: x * queue[0],
                              lambda x: x * counts["a"], lambda x: x * names["a"])]
    for k in (2.0, 5.0):
        assert [f(x).tolist() for f in fs] == [f(x).tolist() for f in fs] == [[k] * 2] * 4
        kept.add(3)
        queue[0], counts["a"], names["a"] = 5.0, 5, 5.0


def test_queues_and_sets_that_a_trace_changes_cause_no_other() -> None:
    """Traces for two signatures, each of which notes that it was made."""
    queue, numbers, traces = deque[int](), set[int](), list[int]()

    @ts.jit
    def first(x: Any) -> Any:
        traces.append(1)
        queue.appendleft(len(traces))
        return x * float(bool(queue))

    @ts.jit
    def second(x: Any) -> Any:
        traces.append(1)
        numbers.symmetric_difference_update({len(traces)})
        return x * float(bool(numbers))

    for f in (first, second):
        for _ in range(3):
            assert f(ts.ones(2)).tolist() == [1.0] * 2 and f(ts.ones(3)).tolist() == [1.0] * 3
        assert len(traces) == 2
        traces.clear()


READS: dict[str, Callable] = {"float": float, "item": lambda w: w.item(), "int": int,
                              "tolist": lambda w: w.tolist(), "numpy": lambda w: w.numpy()}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in another"])
def test_a_name_whose_value_was_read_in_a_trace_is_seen(read: str, inside: bool) -> None:
    w, x = ts.tensor(2.0), ts.ones(3)
    f = ts.jit(lambda x: x * READS[read](w))
    f(x)
    g = ts.jit(lambda x: f(x)) if inside else f
    assert g(x).tolist() == [2.0] * 3
    w = ts.tensor(5.0)
    assert g(x).tolist() == g(x).tolist() == [5.0] * 3


def test_entries_of_a_long_list_and_dict_are_seen_together() -> None:
    """One that changes, is gone or is added; equal ones that other objects are cause no trace."""
    rates, named, traces = [0.5 + i for i in range(9)], {f"k{i}": float(i) for i in range(9)}, []

    @ts.jit
    def f(x: Any) -> Any:
        traces.append(1)
        return x * (sum(rates) + sum(named.values()))

    def check(count: int) -> None:
        assert f(ts.ones(2)).tolist() == [sum(rates) + sum(named.values())] * 2
        assert len(traces) == count

    check(1)
    rates[:] = [float(str(r)) for r in rates]
    check(1)
    rates[8] = 100.0
    check(2)
    named["k3"] = -7.0
    check(3)
    del named["k5"]
    check(4)
    rates.pop()
    check(5)
    rates.insert(0, 1.0)
    check(6)


def test_signed_zeros_and_types_of_numbers_are_other_constants() -> None:
    zero: Any = 0.0
    f = ts.jit(lambda x: ts.atan2(x * 0.0 + zero, -x) if isinstance(zero, float) else x)
    assert f(ts.ones(())).item() == pytest.approx(np.pi)
    zero = 0
    assert f(ts.ones(())).item() == 1.0


def test_what_a_function_writes_itself_and_equal_functions_cause_no_trace() -> None:
    f, x = ts.jit(_counts), ts.ones(2)
    SEEN.clear()
    for _ in range(3):
        for k in (2, 3, 2):
            f(ts.ones(k))
            CONFIG["step"] += 1  # which f does not read
    assert len(SEEN) == 2
    traces: list = []
    helper = _through(ts.exp)
    g = ts.jit(lambda x: (traces.append(1), helper(x))[1])
    for text in ("0.5", "0.5", "0.5", "0.25"):
        helper = _through(ts.exp, float(text))
        np.testing.assert_allclose(g(x), np.exp(1.0) * float(text), rtol=1e-6)
    assert len(traces) == 2


def test_many_plain_values_are_not_compared() -> None:
    vocabulary = {f"word {k}": k for k in range(5000)}
    f, x = ts.jit(lambda x: x * len(vocabulary)), ts.ones(2)
    assert f(x).tolist() == [5000.0] * 2
    captured = f.traced(x).captured
    assert len(captured._items) + len(captured._others) == 2  # the name, and how many there are
    vocabulary["another"] = 5000
    assert f(x).tolist() == [5001.0] * 2


def test_what_is_passed_costs_no_look_at_names() -> None:
    f = ts.jit(lambda x, w: x * w + ts.arange(3))
    f(ts.ones(3), ts.ones(3))
    assert f.traced(ts.ones(3), ts.ones(3)).captured is None


class _StartsADriver:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")


def test_objects_of_other_scopes_are_asked_for_nothing() -> None:
    other = _StartsADriver()

    @ts.jit
    def f(x: Any) -> Any:
        return x * (2.0 if other is not None else 1.0)

    assert f(ts.ones(2)).tolist() == [2.0, 2.0]


def test_objects_that_answer_any_attribute_are_not_asked() -> None:
    class Library:  # as what a compiler has of a shared library
        __slots__ = ()

        def __getattr__(self, name: str) -> Any:
            return lambda: name

    library = Library()
    assert ts.jit(lambda x: x * len(library.two()))(ts.ones(2)).tolist() == [3.0, 3.0]


def test_properties_of_captured_objects_are_not_asked():
    """Nor those that stand for what a class further back has: they may raise, or compute."""
    class Plain:
        scale = 2.0
        kind = 3.0

    class Lazy(Plain):
        @property
        def kind(self):
            raise IndexError("nobody may ask")

    held = Lazy()

    @ts.jit
    def f(x):
        return x * held.scale if x.ndim else held.kind

    x = ts.tensor([1.0, 2.0])
    assert f(x).tolist() == [2.0, 4.0]
    Plain.scale = 3.0
    assert f(x).tolist() == [3.0, 6.0]
