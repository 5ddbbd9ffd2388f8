"""The example's model on an 8-way mesh against JAX on 8 CPU devices: same weights, same layouts."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest

import tessera as ts
from mesh import example

if importlib.util.find_spec("jax") is None:
    pytest.skip("needs jax: pip install jax", allow_module_level=True)

FLAGS = {"d": 48, "layers": 1, "heads": 6, "T": 16, "B": 12, "steps": 4}
HIDDEN = 4 * FLAGS["d"]


@pytest.fixture(scope="module")
def jax():
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    if len(jax.devices()) != 8:
        pytest.skip("jax was started before with another number of devices")
    return jax


def jax_loss(jax, p, tokens, targets):
    """The model's equations in jax.numpy, written independently of the example."""
    jnp = jax.numpy
    d, heads, T = FLAGS["d"], FLAGS["heads"], FLAGS["T"]
    hd = d // heads

    def norm(x, gain):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain

    def rotate(x):
        angle = jnp.arange(T)[:, None] * 10000.0 ** (-jnp.arange(0, hd, 2) / hd)
        c, s = jnp.cos(angle), jnp.sin(angle)
        a, b = x[..., :hd // 2], x[..., hd // 2:]
        return jnp.concatenate([a * c - b * s, b * c + a * s], -1)

    x = p["embedding"][tokens]
    for block in p["blocks"].values():
        qkv = jnp.einsum("btd,dhn->bhtn", norm(x, block["norm1"]), block["qkv"])
        q, k, v = (qkv[..., i * hd:(i + 1) * hd] for i in range(3))
        scores = rotate(q) @ rotate(k).swapaxes(-1, -2) / np.sqrt(hd)
        scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf)
        y = jax.nn.softmax(scores, -1) @ v
        x = x + jnp.einsum("bhtn,hnd->btd", y, block["out"])
        h = jax.nn.gelu(norm(x, block["norm2"]) @ block["up"], approximate=True)
        x = x + h @ block["down"]
    logits = norm(x, p["norm"]) @ p["embedding"].T
    logp = jax.nn.log_softmax(logits, -1)
    return -jnp.take_along_axis(logp, targets[..., None], -1).mean()


def to_jax(jax, tree, mesh, dims, layout):
    """Arrays on JAX's mesh, laid out by the same table of names."""
    from jax.sharding import NamedSharding, PartitionSpec

    def put(name, x):
        if isinstance(x, dict):
            return {k: put(k, v) for k, v in x.items()}
        spec = PartitionSpec(*(layout.get(d) for d in dims[name]))
        return jax.device_put(np.asarray(x.numpy()), NamedSharding(mesh, spec))

    return put("", tree)


@pytest.mark.parametrize("shape", [(4, 2), (1, 8), (8, 1), (2, 4)])
def test_loss_and_gradients_equal_jax(jax, shape):
    _, model = example.modules()
    dp, tp = shape
    flags = {**FLAGS, "mesh": f"dp={dp},tp={tp}", "B": 16}
    c = model.Config(**flags)
    ts.random.seed(3)
    whole = model.init_params(c)
    batch = example.corpus().batch(0, B=c.B, T=c.T, seed=1)
    (stage,), (params,) = model.stages_of(c), model.stage_params(c, whole)

    def loss(p, tokens, targets):
        return model.loss_of(stage(p, tokens), targets)

    value, grads = ts.value_and_grad(loss)(params, *model.place_batch(c, batch))

    grid = jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), ("dp", "tp"))
    divides = {"heads": FLAGS["heads"] % tp == 0, "hidden": HIDDEN % tp == 0}
    layout = {k: v for k, v in model.LAYOUT.items() if divides.get(k, True)}  # jax needs it
    theirs = to_jax(jax, whole, grid, model.DIMS, layout)
    spec = jax.sharding.NamedSharding(grid, jax.sharding.PartitionSpec("dp"))
    tokens, targets = (jax.device_put(a, spec) for a in batch)
    their_value, their_grads = jax.jit(jax.value_and_grad(
        lambda p, a, b: jax_loss(jax, p, a, b)))(theirs, tokens, targets)

    np.testing.assert_allclose(float(value), float(their_value), rtol=1e-5)
    mine, meant = (dict(_named(t)) for t in (grads, their_grads))
    assert mine.keys() == meant.keys() and len(mine) == 2 + 6
    for name, g in mine.items():
        scale = np.abs(meant[name]).max()
        np.testing.assert_allclose(np.asarray(g), meant[name], rtol=1e-5, atol=1e-5 * scale,
                                   err_msg=name)


def _named(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _named(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", np.asarray(value)
