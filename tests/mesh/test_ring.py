"""Ring attention against attention in f64: results, gradients, what is sent, memory and work."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from mesh import longcontext
from mesh.launch import needs_mpi, results_of_all
from mesh.training import mesh_of
from tessera.mesh.parallel.ring_steps import seen_pairs, zigzag_rows
from tolerance import assert_close

PROGRAMS = Path(longcontext.__file__)
B, H, S, D, DV = 2, 4, 13, 8, 6
SEQUENCE = ts.ShardSpec((2,), ("sp",))


def _softmax(s: np.ndarray) -> np.ndarray:
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def exact(q, k, v, causal, scale=None):
    """_softmax(scale q k') v in f64, heads of keys repeated for their queries."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        s = np.where(np.tri(q.shape[2], dtype=bool), s, -np.inf)
    return _softmax(s) @ v if s.size else s @ v


def operands(rng, heads: int = 2, length: int = S) -> list[np.ndarray]:
    shapes = (B, H, length, D), (B, heads, length, D), (B, heads, length, DV)
    return [rng.normal(size=s).astype(np.float32) for s in shapes]


def spread(arrays, mesh, spec=SEQUENCE) -> list[ts.dist.DistTensor]:
    return [ts.dist.distribute(a, spec, mesh=mesh) for a in arrays]


MESHES = {"ring": ({"sp": 4}, SEQUENCE),
          "batch too": ({"dp": 2, "sp": 3}, ts.ShardSpec((0, 2), ("dp", "sp"))),
          "heads too": ({"tp": 2, "sp": 2}, ts.ShardSpec((1, 2), ("tp", "sp"))),
          "whole": ({"sp": 3}, None),
          "two axes": ({"a": 2, "sp": 2}, ts.ShardSpec((2,), (("a", "sp"),))),
          "more ranks than rows": ({"sp": 16}, SEQUENCE),
          "dealt out": ({"sp": 3}, "cyclic")}


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", MESHES)
def test_results_and_gradients_are_those_of_attention(rng, kind, causal, zigzag):
    axes, spec = MESHES[kind]
    mesh, arrays = mesh_of(**axes), operands(rng)
    if spec == "cyclic":
        none = ts.dist.Split()
        spec = ts.dist.Layout(mesh, (none, none, ts.dist.Split(("sp",), 1), none))
    xs = spread(arrays, mesh, spec)
    f = ts.jit(lambda *xs: ts.ring_attention(*xs, causal=causal, zigzag=zigzag))
    y = f(*xs)
    assert y.layout.axes_of(2)[-1] == "sp"
    assert_close(y.numpy(), exact(*arrays, causal), "f32", n=S * D)
    eager = ts.ring_attention(*xs, causal=causal, zigzag=zigzag)
    assert_close(eager.numpy(), y.numpy(), "f32", n=S)

    def slopes(attend):
        return ts.grad(lambda *xs: ts.sum(ts.sin(attend(*xs))), argnums=(0, 1, 2))

    want = slopes(lambda *xs: ts.attention(*xs, causal=causal))(*map(ts.tensor, arrays))
    for g, w, x in zip(ts.jit(slopes(f))(*xs), want, xs, strict=True):
        assert g.layout == x.layout
        assert_close(g.numpy(), w.numpy(), "f32", n=S * D)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [0, 1, 7, 1100])
def test_alone_it_is_plain_attention(rng, causal, length):
    q, k, v = operands(rng, heads=4, length=length)
    y = ts.ring_attention(q, k, v, causal=causal, scale=0.3)
    assert_close(y.numpy(), exact(q, k, v, causal, 0.3), "f32", n=max(length, 1) * D)


def test_types(rng):
    arrays = operands(rng)
    mesh = mesh_of(sp=4)
    f = ts.jit(ts.ring_attention)
    wide = f(*spread([a.astype(np.float64) for a in arrays], mesh))
    assert_close(wide.numpy(), exact(*arrays, True), "f64", n=S * D)
    narrow = [ts.tensor(a, "bf16") for a in arrays]
    y = f(*spread(narrow, mesh))
    assert y.type == ts.as_type("bf16")
    assert_close(y.numpy(), exact(*(x.numpy().astype("f") for x in narrow), True), "bf16", n=4)
    assert [c.dtype for c in f.plan] == ["bf16"]


def test_what_is_sent(rng):
    xs = spread(operands(rng, length=16), mesh_of(sp=4))
    step = ts.jit(ts.grad(lambda *xs: ts.sum(ts.ring_attention(*xs)), argnums=(0, 1, 2)))
    with ts.dist.traffic() as log:
        step(*xs)
    assert not log  # no collective besides the ring
    block = B * 2 * 4 * (D + DV) * 4  # bytes of a rank's keys and values
    found = [(c.op, c.bytes, c.times) for c in step.plan]
    assert found == [("permute", block, 3), ("permute", block, 3), ("permute", block, 4)]
    assert "ring_attention sends slopes of keys and values on" in str(step.plan)


def test_memory_grows_with_the_block_of_a_rank(rng):
    length, ranks = 4096, 8
    arrays = [rng.normal(size=(1, 1, length, 8)).astype(np.float32) for _ in range(3)]
    xs = spread(arrays, mesh_of(sp=ranks))
    f = ts.jit(ts.ring_attention)
    f(*spread([a[:, :, :64] for a in arrays], mesh_of(sp=ranks)))
    f(*xs)
    peaks = []
    for run in (lambda: f(*xs), lambda: ts.attention(*arrays, causal=True)):
        tracemalloc.start()
        run()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    print(f"peak of {ranks} ranks together: {peaks[0]} bytes; of attention: {peaks[1]}")
    scores = 512 * length // ranks * 4  # of one block of queries, on one rank at a time
    rows = length * 8 * 4
    assert peaks[0] < 4 * scores + 16 * rows < peaks[1]
    tracemalloc.start()
    ts.ring_attention(*arrays)
    assert tracemalloc.get_traced_memory()[1] < 4 * 512 * length * 4  # blocks of queries here too
    tracemalloc.stop()


def test_zigzag_gives_every_rank_the_same_work():
    length, n = 64, 4

    def area(a, b, mask):
        return len(range(length)[a]) * len(range(length)[b]) if mask is None else mask.sum()

    def work(rows):
        """Pairs of a query and a key that it sees, per rank."""
        return [sum(area(*pair) for owner in rows for pair in seen_pairs(mine, owner, True))
                for mine in rows]

    even = work(zigzag_rows(length, n))
    plain = work([np.arange(i * 16, i * 16 + 16) for i in range(n)])
    assert len(set(even)) == 1 and sum(even) == sum(plain) == length * (length + 1) // 2
    assert max(plain) > 6 * min(plain)
    assert sorted(np.concatenate(zigzag_rows(13, 3))) == list(range(13))


def test_vmap(rng):
    q, k, v = operands(rng)
    y = ts.vmap(lambda q: ts.ring_attention(q, k, v))(np.stack([q, 2 * q]))
    for i in (0, 1):
        assert_close(y.numpy()[i], exact((1 + i) * q, k, v, True), "f32", n=S * D)


def test_errors(rng):
    q, k, v = operands(rng)
    with pytest.raises(ts.ShapeError, match="three tensors"):
        ts.ring_attention(q[0], k[0], v[0])
    with pytest.raises(ts.ShapeError, match="queries and keys must be of one sequence"):
        ts.ring_attention(q, k[:, :, 1:], v[:, :, 1:])
    with pytest.raises(ts.ShapeError, match="do not fit"):
        ts.ring_attention(q, k, v[:1])
    with pytest.raises(ts.ShapeError, match="a multiple of the key heads"):
        ts.ring_attention(q[:, :3], k, v)
    with pytest.raises(ts.AxisError, match="has no axis 'ring'"):
        ts.ring_attention(*spread([q, k, v], mesh_of(sp=2)), axis="ring")
    with pytest.raises(ts.GradError, match="made for reverse mode, once"):
        ts.jvp(lambda q: ts.ring_attention(q, k, v), (ts.tensor(q),), (ts.tensor(q),))


@pytest.mark.parametrize("program", ["ring", "zigzag"])
def test_simulated_ranks_have_the_sequence_of_one_process(program):
    assert len(set(ts.dist.simulate(getattr(longcontext, program), 4))) == 1


@needs_mpi
@pytest.mark.parametrize("program", ["ring", "zigzag"])
def test_mpi_gives_the_bits_of_the_simulation(program):
    found = results_of_all(PROGRAMS, longcontext.COMPARED, 4)[program]
    assert found == dict(enumerate(ts.dist.simulate(getattr(longcontext, program), 4)))
