"""Kernels with matmuls, written out for given types, orders and block sizes."""

from __future__ import annotations

import linecache
import zlib
from dataclasses import dataclass

import numpy as np

import tessera as ts
from tessera.numerics import as_type, find_dtype

HEAD = """\
import tessera as ts
from tessera import Tensor
tile = ts.tile
"""


def make(source: str, name: str):
    """The kernel `name` of a source text."""
    file = f"<matmuls {zlib.crc32(source.encode()):x}>"
    text = HEAD + source
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict = {"__name__": "matmuls"}
    exec(compile(text, file, "exec"), names)
    return names[name]


@dataclass(frozen=True)
class Gemm:
    """C = A B in blocks.

    orders: 'N' or 'T' for A and B: a transposed one lies in memory as [K, M] or [N, K].
    style: 'implicit' loads tiles, 'explicit' copies them to shared memory, 'ring' does so turns
    ahead by hand, 'stored' writes them there from registers.
    """

    dtype: str = "bf16"
    orders: str = "NT"
    block: tuple[int, int, int] = (32, 64, 32)
    style: str = "implicit"
    swizzle: str | None = "xor"
    precision: str | None = None
    sums: str = "f32"
    result: str = "f32"
    other: str = ""  # B's type when it differs

    @property
    def source(self) -> str:
        M, N, K = self.block
        turned = [o == "T" for o in self.orders]
        shape_a, shape_b = (K, M) if turned[0] else (M, K), (N, K) if turned[1] else (K, N)
        type_b = self.other or self.dtype
        precision = f", precision={self.precision!r}" if self.precision else ""
        dims_a, dims_b = ('"K", "M"', '"M", "K"')[not turned[0]], ('"N", "K"', '"K", "N"')[
            not turned[1]]
        part_a = f"A[k:k+{K}, m:m+{M}]" if turned[0] else f"A[m:m+{M}, k:k+{K}]"
        part_b = f"B[n:n+{N}, k:k+{K}]" if turned[1] else f"B[k:k+{K}, n:n+{N}]"
        lines = [
            "@ts.kernel",
            f"def gemm(A: Tensor[{dims_a}, ts.{self.dtype}], B: Tensor[{dims_b}, ts.{type_b}],",
            f'         C: Tensor["M", "N", ts.{self.result}]):',
            f"    m, n = tile.group_id(0) * {M}, tile.group_id(1) * {N}",
            f"    acc = tile.zeros(({M}, {N}), ts.{self.sums})"]
        if self.style != "implicit":
            stages = ", stages=3" * (self.style == "ring")
            for name, shape, dtype in (("a", shape_a, self.dtype), ("b", shape_b, type_b)):
                lines.append(f"    s{name} = tile.alloc_shared({shape}, ts.{dtype}, "
                             f"swizzle={self.swizzle!r}{stages})")
        dot = f"acc = tile.dot({{}}{'.T' * turned[0]}, {{}}{'.T' * turned[1]}, acc{precision})"
        lines += {"implicit": self._implicit, "explicit": self._explicit, "stored": self._stored,
                  "ring": self._ring}[self.style](K, part_a, part_b, dot)
        return "\n".join([*lines, f"    C[m:m+{M}, n:n+{N}] = acc", ""])

    def _implicit(self, K: int, a: str, b: str, dot: str) -> list[str]:
        return [f"    for k in range(0, K, {K}):",
                "        " + dot.format(f"tile.load({a})", f"tile.load({b})")]

    def _explicit(self, K: int, a: str, b: str, dot: str) -> list[str]:
        return [f"    for k in range(0, K, {K}):",
                f"        tile.cp_async(sa, {a})", f"        tile.cp_async(sb, {b})",
                "        tile.barrier()", "        " + dot.format("sa", "sb"),
                "        tile.barrier()"]

    def _stored(self, K: int, a: str, b: str, dot: str) -> list[str]:
        return [f"    for k in range(0, K, {K}):",
                f"        tile.store(sa, tile.load({a}))",
                f"        tile.store(sb, tile.load({b}))",
                "        tile.barrier()", "        " + dot.format("sa", "sb"),
                "        tile.barrier()"]

    def _ring(self, K: int, a: str, b: str, dot: str) -> list[str]:
        def copies(k: str, slot: str, indent: str) -> list[str]:
            return [f"{indent}tile.cp_async(sa[{slot}], {a.replace('k:k', f'{k}:{k}')})",
                    f"{indent}tile.cp_async(sb[{slot}], {b.replace('k:k', f'{k}:{k}')})"]

        return [*copies("0", "0", "    "), "    tile.cp_commit_group()",
                *copies(f"{K}", "1", "    "), "    tile.cp_commit_group()", "    i = 0",
                f"    for k in range(0, K, {K}):",
                "        tile.cp_wait_group(1)", "        tile.barrier()",
                f"        after = k + {2 * K}", "        if after < K:",
                *copies("after", "(i + 2) % 3", "            "),
                "        tile.cp_commit_group()",
                "        " + dot.format("sa[i % 3]", "sb[i % 3]"),
                "        i += 1"]

    @property
    def kernel(self):
        return make(self.source, "gemm")

    def arguments(self, rng: np.random.Generator, M: int, N: int, K: int) -> tuple:
        shapes = ((K, M) if self.orders[0] == "T" else (M, K),
                  (N, K) if self.orders[1] == "T" else (K, N))
        given = [array(rng, t, s) for t, s in zip((self.dtype, self.other or self.dtype), shapes,
                                                  strict=True)]
        return (*given, array(rng, self.result, (M, N)))

    def groups(self, M: int, N: int) -> tuple[int, int]:
        return -(-M // self.block[0]), -(-N // self.block[1])

    @property
    def tolerance(self) -> float:
        """Sums of normal numbers in another order; results of 16 bits round once more."""
        return {"f64": 1e-12, "bf16": 2e-2, "f16": 2e-3}.get(self.result, 3e-4)


def array(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]):
    """Random numbers that the type holds; integers small enough for any sum."""
    d = find_dtype(dtype)
    if d.kind != "float":
        low = 0 if d.kind == "uint" else -8
        x = rng.integers(low, 8, shape)
        return ts.tensor(x.astype(np.int8), dtype) if d.packed else x.astype(as_type(d).dtype.numpy)
    x = rng.standard_normal(shape)
    return x.astype(d.numpy) if dtype in ("f32", "f64") else ts.tensor(x.astype(np.float32), dtype)


ATTENTION = """
@ts.kernel
def attention(Q: Tensor["B", "S", "D", ts.bf16], K: Tensor["B", "S", "D", ts.bf16],
              V: Tensor["B", "S", "D", ts.bf16], O: Tensor["B", "S", "D", ts.f32], scale: ts.f32,
              BM=64, BN=32, causal=False):
    h, q0 = tile.group_id(1), tile.group_id(0) * BM
    q = tile.load(Q[h, q0:q0+BM, :])
    m, l, o = tile.full((BM,), -float("inf")), tile.zeros((BM,)), tile.zeros((BM, D))
    for k0 in range(0, min(S, q0 + BM) if causal else S, BN):
        k = tile.load(K[h, k0:k0+BN, :])
        s = tile.dot(q, k.T) * scale
        s = tile.causal_mask(s, q0, k0) if causal else s
        m_new = tile.running_max(m, tile.row_max(s), 0.0)
        alpha, p = tile.exp2(m - m_new), tile.exp2(s - m_new)
        l = l * alpha + tile.row_sum(p)
        v = tile.load(V[h, k0:k0+BN, :])
        o = tile.dot(p, v, o * alpha)
        m = m_new
    O[h, q0:q0+BM, :] = o / l
"""

# Two matmuls in turn over a loop in a loop: rings are started again and again.
NESTED = """
@ts.kernel
def nested(A: Tensor["M", "K", ts.bf16], B: Tensor["N", "K", ts.bf16],
           C: Tensor["M", "N", ts.f32], BN=32, BK=32):
    m = tile.group_id() * 32
    for n in range(0, N, BN):
        acc = tile.zeros((32, BN))
        for k in range(0, K, BK):
            a = tile.load(A[m:m+32, k:k+BK])
            b = tile.load(B[n:n+BN, k:k+BK])
            acc = tile.dot(a, b.T, acc)
        C[m:m+32, n:n+BN] = acc
"""

# A B D with the first matmul as it is: registers become the second matmul's A.
CHAIN = """
@ts.kernel
def chain(A: Tensor["M", "K", ts.{t}], B: Tensor["K", "N", ts.{t}], D: Tensor["N", "P", ts.{t}],
          C: Tensor["M", "P", ts.f32], BM=64, BP=32):
    m = tile.group_id() * BM
    p = tile.dot(tile.load(A[m:m+BM, :]), tile.load(B[:, :]))
    C[m:m+BM, 0:BP] = tile.dot(p, tile.load(D[:, 0:BP]))
"""
