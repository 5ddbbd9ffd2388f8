"""Dataclasses pass through jit, grad, vmap, optimizers and checkpoints without registration."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import tessera as ts
from tessera.errors import ArgumentError
from tessera.graph import tree
from tolerance import assert_close


@dataclass(frozen=True)
class Config:
    width: int
    kind: str = "relu"


@dataclass
class Layer:
    w: ts.Tensor
    b: ts.Tensor | None
    heads: int
    act: Literal["relu", "tanh"] = "relu"
    shape: tuple[int, ...] = (2, 3)

    def __call__(self, x: Any) -> Any:
        assert type(self.heads) is int and self.shape == (2, 3)
        y = x @ self.w * self.heads
        return getattr(ts, self.act)(y if self.b is None else y + self.b)


@dataclass(frozen=True)
class Model:
    layers: list[Layer]
    config: Config
    note: Any = field(default="", metadata={"static": True})

    def __post_init__(self) -> None:
        if not all(isinstance(x.w, ts.Tensor) for x in self.layers):
            raise TypeError("not called on stand-ins")


def model(rng: np.random.Generator) -> Model:
    make = lambda *shape: ts.param(rng.standard_normal(shape), "f32")  # noqa: E731
    return Model([Layer(make(3, 3), make(3), 2), Layer(make(3, 3), None, 1, "tanh")], Config(3))


def loss(m: Model, x: Any) -> Any:
    assert m.config.width == 3 and m.note == ""
    for layer in m.layers:
        x = layer(x)
    return ts.mean(x * x)


def test_jit_and_grad(rng: np.random.Generator) -> None:
    m, x = model(rng), ts.tensor(rng.standard_normal((2, 3)), "f32")
    want = ts.grad(lambda w, b, v: loss(Model([Layer(w, b, 2), Layer(v, None, 1, "tanh")],
                                              Config(3)), x))
    parts = (m.layers[0].w, m.layers[0].b, m.layers[1].w)
    assert_close(ts.jit(loss)(m, x), loss(m, x), n=6)
    for run in (ts.grad(loss), ts.jit(ts.grad(loss))):
        g = run(m, x)
        assert type(g) is Model and g.config == Config(3) and g.layers[1].b is None
        assert g.layers[0].heads == 2
        for got, w in zip((g.layers[0].w, g.layers[0].b, g.layers[1].w), want(*parts), strict=True):
            np.testing.assert_allclose(got, w, rtol=2e-5, atol=1e-6)


def test_fixed_fields_are_part_of_the_trace(rng: np.random.Generator) -> None:
    m, x = model(rng).layers[1], np.ones((1, 3), np.float32)
    f = ts.jit(lambda layer, x: layer(x))
    first = f(m, x)
    m.heads = 3
    np.testing.assert_allclose(f(m, x), np.tanh(3 * np.arctanh(first.numpy().astype("f8"))),
                               rtol=1e-3)


def test_paths_optimizer_and_checkpoint(rng: np.random.Generator, tmp_path: Path) -> None:
    m = model(rng)
    names = tree.paths(tree.flatten(m)[1])
    assert names == ["layers.0.w", "layers.0.b", "layers.1.w"]
    optimizer = ts.optim.SGD()
    params, _ = optimizer.update(m, m, optimizer.init(m), 0.5)
    np.testing.assert_allclose(params.layers[0].b, m.layers[0].b.numpy() * 0.5)
    assert type(params) is Model and params.layers[1].act == "tanh"


def test_vmap(rng: np.random.Generator) -> None:
    w = ts.tensor(rng.standard_normal((4, 3, 3)), "f32")
    x = np.ones((2, 3), np.float32)
    out = ts.vmap(lambda layer: layer(x))(Layer(w, None, 1))
    assert_close(out[2], Layer(w[2], None, 1)(x), n=3)


def test_a_configuration_is_compared_by_value() -> None:
    f = ts.jit(lambda c, x: x * c.width if c.kind == "relu" else x)
    assert f(Config(3), 2.0).item() == 6.0 and f(Config(4), 2.0).item() == 8.0
    assert f(Config(4, "none"), 2.0).item() == 2.0
    assert tree.flatten(Config(3))[1] == tree.LEAF


@dataclass
class Sizes:
    width: int = 3
    scale: float = 1.0


@dataclass
class Sized:
    w: ts.Tensor
    sizes: Sizes = field(default_factory=Sizes)


def test_a_configuration_that_may_change_is_read_at_each_call() -> None:
    f = ts.jit(lambda c, x: x * c.width)
    sizes = Sizes()
    assert f(sizes, 2.0).item() == 6.0
    sizes.width = 4
    assert f(sizes, 2.0).item() == 8.0
    sizes.width = 3
    assert f(sizes, 2.0).item() == 6.0 and f(Sizes(4), 2.0).item() == 8.0
    assert f.specializations == 2
    layer = Sized(ts.param(ts.ones(2)))
    slope = ts.jit(ts.grad(lambda m: ts.sum(m.w * m.sizes.width)))
    assert slope(layer).w.tolist() == [3.0, 3.0] and slope(layer).sizes == Sizes()
    layer.sizes.width = 5
    assert slope(layer).w.tolist() == [5.0, 5.0]


def test_fixed_zeros_of_both_signs_are_two_values() -> None:
    f = ts.jit(lambda m: m.w * m.sizes.scale)
    for scale in (0.0, -0.0, 0.0):
        made = f(Sized(ts.ones(2), Sizes(3, scale)))
        assert np.signbit(made.numpy()).all() == np.signbit(scale)
    assert f.specializations == 2


@dataclass
class Node:
    value: ts.Tensor
    next: Node | None = None


@dataclass
class Listed:
    w: ts.Tensor
    sizes: Any = field(default_factory=lambda: [1], metadata={"static": True})


def test_recursion_and_what_cannot_be_fixed() -> None:
    total = ts.jit(lambda n: n.value + n.next.value)(Node(ts.ones(1), Node(ts.ones(1))))
    assert total.item() == 2.0
    with pytest.raises(ArgumentError, match=r"Listed.sizes = \[1\] is fixed but cannot be hashed"):
        ts.jit(lambda x: x.w)(Listed(ts.ones(1)))


def test_ordered_dicts_pass_as_the_state_of_a_module_does(tmp_path: Path) -> None:
    state = OrderedDict([("w", ts.param(ts.ones(3))), ("a", [ts.param(ts.zeros(2))])])
    loss = lambda p, x: ts.sum(p["w"] * x) + ts.sum(p["a"][0] * 3.0)  # noqa: E731
    g = ts.jit(ts.grad(loss))(state, ts.full((3,), 2.0))
    assert type(g) is OrderedDict and [*g] == ["w", "a"]
    assert g["w"].tolist() == [2.0] * 3 and g["a"][0].tolist() == [3.0] * 2
    assert tree.paths(tree.flatten(state)[1]) == ["w", "a.0"]
    optimizer = ts.optim.AdamW(weight_decay=0.0)
    stepped, _ = optimizer.update(state, g, optimizer.init(state), 0.1)
    assert type(stepped) is OrderedDict and stepped["w"].is_param
    ts.checkpoints.save(tmp_path / "c", stepped)
    again = ts.checkpoints.load(tmp_path / "c").tree(state)
    assert again["a"][0].tolist() == stepped["a"][0].tolist()
    carried, _ = ts.scan(lambda c, x: (OrderedDict(w=c["w"] + x, a=c["a"]), None), state,
                         ts.arange(3.0))
    assert carried["w"].tolist() == [4.0] * 3


def test_axes_of_vmap_as_an_instance_of_the_class() -> None:
    layer = Layer(ts.ones((2, 3)), ts.full((3,), 5.0), heads=2)
    f = lambda p, x: ts.sum(p.w * x + p.b) * p.heads  # noqa: E731
    axes = Layer(0, None, heads=2)  # type: ignore[arg-type]
    assert ts.vmap(f, in_axes=(axes, None))(layer, ts.ones(3)).tolist() == [36.0, 36.0]
    with pytest.raises(ArgumentError, match="does not fit"):
        ts.vmap(f, in_axes=(Config(1), None))(layer, ts.ones(3))
