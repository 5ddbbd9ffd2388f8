"""Programs with a bad value somewhere, and programs in which bad values are meant or masked."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from tessera import Tensor, f16, f32, fp8_e4m3, saturate
from tessera.debug.sentinel import observe_run
from tessera.graph.cuda.program.device import DeviceExecutable
from tessera.graph.execute import Executable

tile = ts.tile
SHAPE = (64, 96)  # large enough for compiled loops


def positive(rng, *shape):
    return ts.tensor(rng.uniform(0.5, 2.0, shape or SHAPE).astype(np.float32))


def spoiled(x, value, at=(3, 5)):
    y = x.copy()
    y[at] = value
    return y


# A function, and the element that makes it go wrong.
CASES = {
    "log": (lambda x: ts.sum(ts.log(x - 0.25) * 3.0), -1.0),
    "hidden by a division": (lambda x: 1.0 / ts.exp(x * 100.0), 50.0),
    "hidden by a comparison": (lambda x: ts.cast(ts.log(x) < 1.0, "f32"), -1.0),
    "hidden by rsqrt": (lambda x: ts.rsqrt(ts.exp(x * 100.0)) + x, 50.0),
    "hidden inside a sum": (lambda x: ts.sum(ts.rsqrt(ts.exp(x * 100.0)), axis=-1), 50.0),
    "hidden in a count": (lambda x: ts.sum(ts.cast(ts.log(x) < 1.0, "f32"), axis=-1), -1.0),
    "through a product": (lambda x: ts.tanh(ts.sqrt(x) @ ts.ones((96, 64))), -1.0),
    "in front of attention": (lambda x: ts.attention(
        *[ts.cast(ts.sqrt(x), "bf16")[None, None]] * 3, causal=True), -1.0),
    "a query's": (lambda x: ts.attention(ts.sqrt(x)[None, None], x[None, None], x[None, None],
                                         causal=True), -1.0),
    "a key's": (lambda x: ts.attention(x[None, None], ts.log(x)[None, None], x[None, None],
                                       causal=True), -1.0),
    "a sum over rows": (lambda x: ts.sum(ts.exp(x * 60.0), 0), 50.0),
    "a softmax": (lambda x: ts.softmax(x * 1e38 * 1e38), 2.0),
    "a gradient": (ts.grad(lambda x: ts.sum(ts.sqrt(x - x) * x)), 1.0),
    "data": (lambda x: ts.sum(x * 2.0), np.nan),
    "in the body of a scan": (
        lambda x: ts.scan(lambda c, r: (c + ts.log(r), c), ts.zeros(96), x)[0], -1.0),
    "a constant": (lambda x: x + ts.log(ts.full(SHAPE, -1.0)), 1.0),
}


def attention(q, k, v):
    mask = ts.tensor(np.tril(np.ones((64, 64), bool)))
    scores = ts.where(mask, (q @ k.T) * 0.1, -np.inf)
    return ts.softmax_safe(scores) @ v


QUIET = {
    "masked attention": lambda x: attention(x, x, x),
    "its gradient": ts.grad(lambda x: ts.sum(attention(x, x, x) ** 2)),
    "attention": lambda x: ts.attention(x[None, None], x[None, None], x[None, None], causal=True),
    "in bf16": lambda x: attention(*[ts.cast(x, "bf16")] * 3),
    "dropout": lambda x: ts.random.dropout(ts.tanh(x), 0.3),
    "a branch not chosen": lambda x: ts.where(x > 1.0, ts.log(x - 1.0), 0.0) + x,
    "a maximum of logs": lambda x: ts.maximum(ts.log(x - x), -5.0) * x,
    "logsumexp": lambda x: ts.logsumexp(ts.where(x > 5.0, x, -np.inf)),
    "cross entropy": lambda x: ts.cross_entropy(x, ts.zeros((64,), "int64")),
    "a loop": lambda x: ts.scan(lambda c, r: (ts.tanh(c + r), c), ts.zeros(96), x)[0],
}


# --- injected at a chosen step and element --------------------------------------------------------
@ts.kernel
def logs_of(x: ts.Tensor["M", "N", ts.f32], y: ts.Tensor["M", "N", ts.f32]):
    t = ts.tile.load(x[tile_m:tile_m + 16, tile_n:tile_n + 32])  # noqa: F821
    t = ts.tile.log(t)  # here
    y[tile_m:tile_m + 16, tile_n:tile_n + 32] = t  # noqa: F821


def graph_op(x):
    y = ts.transpose(x)
    return ts.sum(ts.log(y) @ ts.ones((SHAPE[0], 8)), axis=0)  # here


def fused_group(x):
    y = ts.exp(-x)
    z = ts.sqrt(x * 3.0)  # here
    return ts.sum(ts.tanh(z) * y, axis=-1)


def users_kernel(x):
    y = ts.zeros(SHAPE)
    logs_of(x * 1.0, y)
    return ts.tanh(y) * 2.0


def narrow(x):
    y = x * 2.0
    h = ts.cast(y, "f16")  # here
    return ts.sum(ts.cast(h, "f32"), axis=-1)


def wide(x):
    y = x + 1.0
    z = ts.exp(y)  # here
    return 1.0 / (z + 1.0)


@ts.kernel
def logs(x: Tensor["N", f32], y: Tensor["N", f32]):
    i = tile.group_id() * 16
    t = tile.load(x[i:i + 16])
    y[i:i + 16] = tile.log(t) * 2.0  # stored


@ts.kernel
def casts(x: Tensor["N", f32], y: Tensor["N", f16]):
    i = tile.group_id() * 16
    t = tile.load(x[i:i + 16]) * 2.0
    y[i:i + 16] = tile.cast(t, f16)  # stored


@ts.kernel
def clamps(x: Tensor["N", f32], y: Tensor["N", fp8_e4m3 @ saturate]):
    i = tile.group_id() * 16
    t = tile.load(x[i:i + 16])
    y[i:i + 16] = t  # stored


# A function with the line that goes wrong, the element that makes it, and what it makes.
INJECTED = {"a graph op": (graph_op, -1.0, "nan"), "a fused group": (fused_group, -2.0, "nan"),
            "a user's kernel": (users_kernel, -1.0, "nan"), "a cast": (narrow, 6e4, "inf"),
            "an overflow in a group": (wide, 500.0, "inf"),
            "an infinity of a kernel": (users_kernel, 0.0, "inf")}


def check_injected(name, target, rng, at, step=3, calls=5):
    """Calls of a compiled function, one of which gets the element: that call raises, at the line
    and with the kind, and no other does."""
    fn, value, kind = INJECTED[name]
    f = ts.jit(fn, target=target)
    for i in range(calls):
        x = positive(rng)
        if i == step:
            x = spoiled(x, value, at)
        with ts.debug.numerics("raise"):
            try:
                f(x)
            except ts.NumericsError as error:
                assert i == step, f"call {i}: {error}"
                assert "# here" in error.where.text, str(error)
                said = str(error)
                assert f": {kind}" in said or f": -{kind}" in said, said
                inside = [at[0] % 16, at[1] % 32]  # of a kernel's tile
                places = [inside] if "in kernel" in said else [list(at), list(at[::-1])]
                assert any(f"at {p}" in said for p in places), said
                continue
        assert i != step, "nothing was found"


def found_by(executable, f, *args, operands=True):
    """What running a graph function finds: the first, and the counters. operands: with those of
    the first, which on a GPU are rounded as its maths rounds them."""
    ts.debug.flags()
    graph = ts.jit(f).graph(*args)
    run = executable(graph)
    with ts.debug.numerics("flag"), observe_run(graph) as show:
        run.run([x.array for x in args])
        show([])
        found = ts.debug.flags()
    first = found.first
    given = (first.operands, first.step) if first and operands else ()
    return (first and (first.op, first.where, first.kind, first.index, first.count, first.origin,
                       *given), found.nan, found.inf)


def found_on_gpu(f, x, **how):
    try:
        return found_by(DeviceExecutable, f, x, **how)
    except ts.UnsupportedTargetError as refused:
        pytest.skip(str(refused))


def check_blamed(name, rng, **how):
    """A GPU, real or pretended, finds what the CPU does."""
    fn, value = CASES[name]
    x = spoiled(positive(rng), value)
    assert found_on_gpu(fn, x, **how) == found_by(Executable, fn, x, **how)


def check_quiet(name, rng):
    assert found_on_gpu(QUIET[name], positive(rng))[0] is None
