"""Where segments begin and end: the op on a CPU, the kernel of a GPU run on NumPy, and how many
launches attention with segments takes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import tessera as ts
from tessera import Tensor, bf16, i32
from tessera.graph.cuda import CudaProgram
from tessera.graph.ops.segment_spans import SEGMENT_SPANS
from tessera.graph.trace import apply
from tessera.kernels.segment_spans import segment_spans


def expected(ids):
    """By groups of neighbours, one by one."""
    out = np.empty((len(ids), 2, ids.shape[1]), np.int32)
    for line, made in zip(ids, out, strict=True):
        at = 0
        for _, part in itertools.groupby(line):
            count = len(list(part))
            made[:, at:at + count] = [[at], [at + count]]
            at += count
    return out


def numbers(rng, S, share, dtype):
    """Of three lines: neighbours differ in a share of places; a number may come again."""
    return ((rng.random((3, S)) < share).cumsum(1) % 3).astype(dtype)


@pytest.mark.parametrize("S, share", [(1, 0.5), (2, 0.5), (37, 0.3), (300, 0.02), (300, 0.0)])
def test_the_op(S, share, rng):
    ids = numbers(rng, S, share, np.int64)
    got = ts.jit(lambda x: apply(SEGMENT_SPANS, x))(ts.tensor(ids))
    np.testing.assert_array_equal(got.numpy(), expected(ids))


def test_no_places():
    assert apply(SEGMENT_SPANS, ts.zeros((2, 0), "int32")).shape == (2, 2, 0)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
@pytest.mark.parametrize("S, share, BN", [(1, 0.5, 64), (64, 0.1, 64), (65, 0.1, 64),
                                          (500, 0.01, 64), (333, 0.3, 64), (200, 0.0, 64),
                                          (2500, 0.001, 1024)])
def test_the_kernel(S, share, BN, dtype, rng):
    """Segments of many blocks, too, and blocks that reach over the end of their line."""
    ids = numbers(rng, S, share, dtype)
    out = np.full((3, 2, S), -7, np.int32)
    segment_spans(ids, out, BN=BN)
    np.testing.assert_array_equal(out, expected(ids))


@pytest.mark.parametrize("lengths", [False, True])
def test_attention_with_segments_is_a_launch_more(lengths):
    X = Tensor[2, 4, 1024, 64, bf16]

    def f(q, k, v, ids, most):
        return ts.attention(q, k, v, segments=ids, **({"lengths": most} if lengths else {}))

    made = CudaProgram(ts.jit(f).graph(X, X, X, Tensor[2, 1024, i32], Tensor[2, i32]), "sm_90a")
    assert [x.group.kind for x in made.launches] == [
        "launch", *["loop"] * lengths, "attention"]
