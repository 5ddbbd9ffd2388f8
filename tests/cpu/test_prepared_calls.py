"""Calls like one before are recognised as a whole; others go the way that looks at each leaf."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from fake_gpu import Torch, filled
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from tessera.graph import tree
from tessera.graph.jit import JitFunction
from tessera.graph.placed_leaves import FEW
from tessera.graph.tree_code import flattener, unflattener
from tessera.tensor import Tensor

Pair = namedtuple("Pair", "a b")


@dataclass
class Block:
    w: Any
    rest: Any
    heads: int = 4


class Registered:
    def __init__(self, x: Any, name: str):
        self.x, self.name = x, name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Registered) and (self.x, self.name) == (other.x, other.name)


tree.register_tree(Registered, lambda r: ((r.x,), r.name), lambda name, xs: Registered(xs[0], name))

LEAVES = st.integers(0, 9) | st.floats(0, 1)
TREES = st.recursive(
    LEAVES | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "b", 3, ("k", 1)]), inner, max_size=3)
        | st.builds(Pair, inner, inner) | st.builds(Block, inner, inner, st.integers(1, 2))
        | st.builds(Registered, inner, st.sampled_from("xy"))), max_leaves=12)


@given(TREES)
def test_trees_are_taken_apart_and_put_together(value):
    leaves, structure = tree.flatten(value)
    take = flattener(structure)
    assert take is not None
    again = take(value)
    assert again == leaves and [*map(type, again)] == [*map(type, leaves)]
    made = unflattener(structure)([*range(len(leaves))])
    want = tree.unflatten(structure, range(len(leaves)))
    assert made == want and tree.flatten(made)[1] == structure


@given(TREES, TREES)
def test_another_structure_is_not_taken(value, other):
    """What is taken has the structure, but for what lies where a leaf was: its type tells."""
    leaves, structure = tree.flatten(value)
    found, its = tree.flatten(other)
    take = flattener(structure)
    assert take is not None
    got = take(other)
    same = got is not None and [*map(type, got)] == [*map(type, leaves)]
    assert same == (its == structure and [*map(type, found)] == [*map(type, leaves)])


def test_what_is_deep_is_walked():
    value: Any = 1.0
    for _ in range(100):
        value = [value]
    leaves, structure = tree.flatten(value)
    assert flattener(structure) is None and unflattener(structure)(leaves) == value


# --- calls ---------------------------------------------------------------------------------------
@pytest.fixture
def long_way(gpu, apart, monkeypatch):
    """Counts the calls that look at each leaf."""
    split, seen = JitFunction._split, []
    monkeypatch.setattr(JitFunction, "_split", lambda *a: seen.append(a[0].name) or split(*a))
    return seen


def there(*values: float) -> Tensor:
    return ts.tensor(np.array(values, np.float32)).to("cuda")


def test_a_call_like_one_before_is_recognised(long_way):
    f = ts.jit(lambda p, x, k: {"y": p["a"] * k + x, "p": p})
    p = {"a": ts.param(there(1.0, 2.0)), "b": (there(3.0), None)}
    for i in range(5):
        out = f(p, there(float(i), 1.0), 2.0 + i)
        np.testing.assert_array_equal(out["y"].array, p["a"].array * (2.0 + i) + [i, 1])
        assert out["p"]["b"][1] is None and out["p"]["a"].is_param and not out["y"].is_param
        p = out["p"]
    assert len(long_way) == 2 and f.specializations == 1


CHANGED = {
    "extents": lambda p: {**p, "a": there(1.0, 2.0, 3.0)},
    "type": lambda p: {**p, "a": ts.cast(p["a"], "bf16")},
    "policy": lambda p: {**p, "a": ts.cast(p["a"], "f32 @saturate")},
    "parameter": lambda p: {**p, "a": ts.param(p["a"])},
    "structure": lambda p: {**p, "c": p["a"]},
    "order": lambda p: dict(reversed(p.items())),
    "number": lambda p: {**p, "a": 2.0},
    "container": lambda p: {**p, "a": (p["a"],)},
    "scaled": lambda p: {**p, "a": ts.cast(p["a"], 'fp8_e4m3 @scaled("amax")')},
}


@pytest.mark.parametrize("more", [0, FEW], ids=["few", "many"])
@pytest.mark.parametrize("change", CHANGED.values(), ids=list(CHANGED))
def test_what_has_changed_is_another_signature(change, more, long_way):
    def f(p: Any) -> Any:
        leaves = ts.graph.tree.flatten(p)[0]
        return [ts.cast(x, "f32") * 2.0 for x in leaves]

    g, p = ts.jit(f), {"b": there(5.0), "a": there(1.0, 2.0)}
    p |= {f"m{i}": there(float(i)) for i in range(more)}
    for _ in range(3):
        g(p)
    count, other = len(long_way), change(p)
    long_way.clear()
    for _ in range(2):
        for got, want in zip(g(other), f(other), strict=True):
            np.testing.assert_array_equal(got.array, want.array)
    assert "f" in long_way and g.specializations == 2 and count == (2 if more else 1)
    assert [x.array.tolist() for x in g(p)][:2] == [[10.0], [2.0, 4.0]]


def test_constants_are_compared(long_way):
    f = ts.jit(lambda x, how: x["a"] * (2.0 if how == "twice" else 3.0), static=("how",))
    x = {"a": there(1.0)}
    for how, want in (("twice", 2.0), ("twice", 2.0), ("thrice", 3.0), ("twice", 2.0),
                      ("thrice", 3.0)):
        assert f(x, how).array.tolist() == [want]
    assert f.specializations == 2 and len(long_way) == 4


def test_numbers_are_data_of_their_type(long_way):
    f = ts.jit(lambda x, n: x["a"] * n)
    x = {"a": there(1.0)}
    for n in (1.0, 2.0, 3.0, np.float32(4.0), 5, 6.0):
        assert f(x, n).array.tolist() == [float(n)]
    assert len(long_way) == 4


def test_arrays_of_other_libraries_and_of_the_host(long_way):
    f = ts.jit(lambda x: x["a"] * 2.0, target="cuda")
    ours, other = there(1.0), Torch(filled(np.ones(1, np.float32)))
    for x in (ours, ours, ours, other, np.ones(1, np.float32), ours):
        assert f({"a": x}).array.tolist() == [2.0]
    assert len(long_way) == 3


def test_arrays_of_other_libraries_alone(long_way):
    f = ts.jit(lambda x, y: x * 2.0 + y)
    xs = [Torch(filled(np.arange(k, k + 4).astype(np.float32))) for k in range(5)]
    for x, y in zip(xs, xs[1:], strict=False):
        np.testing.assert_array_equal(f(x, y).array, 2 * x.x + y.x)
    assert len(long_way) == 2
    short = [Torch(filled(np.ones(3, np.float32)))] * 2
    assert f(*short).array.tolist() == [3.0] * 3 and f.specializations == 2
    host = np.ones(4, np.float32)
    with pytest.raises(ts.ArgumentError, match="several places|lie in|cpu"):
        f(xs[0], host)


def test_settings_are_asked_at_each_call(long_way):
    f = ts.jit(lambda x: x["a"] * 2.0)
    for _ in range(3):
        f({"a": there(1.0)})
    with ts.config.scope(device="cpu"), pytest.raises(ts.ArgumentError, match="run on the CPU"):
        f({"a": there(1.0)})


def test_inside_of_a_trace_it_is_traced(long_way):
    f = ts.jit(lambda x: x["a"] * 2.0)
    for _ in range(3):
        f({"a": there(1.0)})
    g = ts.jit(lambda x: f(x)[0] + 1.0)
    assert g({"a": there(1.0)}).item() == 3.0
    assert ts.grad(lambda a: f({"a": a})[0])(there(1.0)).array.tolist() == [2.0]


def test_donated_arguments_are_used_up(long_way):
    f = ts.jit(lambda p, x: {k: v + x for k, v in p.items()}, donate="p")
    p, x = {"a": there(1.0), "b": there(2.0)}, there(1.0)
    for _ in range(4):
        first, p = p, f(p, x)
    assert len(long_way) == 2 and [v.array.tolist() for v in p.values()] == [[5.0], [6.0]]
    with pytest.raises(ts.ArgumentError, match="after it was donated"):
        _ = first["a"] + x
    with pytest.raises(ts.ArgumentError, match="after it was donated"):
        f(first, x)
    with pytest.raises(ts.ArgumentError, match=r"p\.a is donated and is given as p\.b too"):
        f({"a": p["a"], "b": p["a"]}, x)
    with pytest.raises(ts.ArgumentError, match=r"p\.b is donated and is given as x too"):
        f(p, p["b"])
