"""Attention of one query over long caches beside PyTorch's, heads of 128, on one GPU.

    python benchmarks/decode.py [flex] [pages] [codes]

Microseconds, the share of a copy's bandwidth in which keys and values are read, of the time of a
copy that moves as many bytes, half of them read and half written, and the ratio to the quickest
peer. The bandwidth is that of 2 GB, which no copy of a few MB reaches. Peers are the backends of
scaled_dot_product_attention and, where it is asked for, FlexAttention by torch.compile, which
compiles for some seconds for each shape. pages: ours over pages of 16, 64 and 256 keys too, which
lie in a pool in random order. codes: over keys and values of fp8_e4m3 too, of which half as many
bytes are read, checked against these.
Each runs as a CUDA graph of calls over as many caches as L2 does not hold, that copy too, in turn;
results are checked against f64 first. Needs torch and a GPU. Writes
benchmarks/results/decode.json, or $OUT/decode.json when OUT is set.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import record
import torch
import torch.nn.functional as F
from gpu_timing import captured, in_turn, require
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from tessera.kernels.attention_scores import LOG2E
from tessera.kernels.decode_attention import (
    KERNELS,
    PAGED,
    combine_parts,
    decode_plan,
    planned,
    streams,
)
from tessera.runtime.device import device
from tessera.stdlib import flash_attention_2

SHAPES = [(1, 1024), (16, 1024), (64, 1024), (1, 8192), (16, 8192), (64, 4096), (4, 32768),
          (1, 131072)]
HEADS, KEY_HEADS, D = 32, 8, 128
FOOTPRINT = 2 << 30  # bytes of keys and values between two reads of one: forty times an H200's L2
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
MOST_CALLS = 48  # of a graph
ROUNDS = 8

PAGES = 16, 64, 256  # keys of one

Attend = Callable[[Any, Any, Any], Any]


def backend(which: SDPBackend) -> Attend:
    def attend(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(which):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return attend


def attended(q: Any, keys: tuple[int, ...], held: tuple[Any, ...], *, page: int = 0,
             codes: bool = False) -> Any:
    """As graphs attend few queries. keys: the extents of all of them.  held: what kernels are
    given of keys and values"""
    (B, H, S, _), (_, C, T, _), chip = q.shape, keys, device(0).target.generation
    R, out = H // C * S, torch.empty_like(q)
    plan = decode_plan(B * C, R, T, D, page=page, codes=codes, queries=S, streamed=streams(chip, D),
                       groups=chip.most_cluster_groups,
                       multiprocessors=device(0).multiprocessors)
    parts, lse = out.reshape(1, B * C, R, D), None
    if plan.clustered:
        parts = out.reshape(B * C, R, D)
    elif plan.parts > 1:
        parts = torch.empty(plan.parts, B * C, R, D, device="cuda", dtype=torch.float32)
        lse = torch.empty(parts.shape[:-1], device="cuda")
    kernel = next(x for x in KERNELS + PAGED if x.__name__ == plan.kernel)
    planned(kernel, plan)(q.reshape(B * C, R, D), *held, parts, lse, D**-0.5 * LOG2E, S=S,
                          BM=plan.rows, BN=plan.keys, **({"heads": C} if page else {}),
                          **plan.constants(R))
    if lse is not None:
        combine_parts(parts.reshape(plan.parts, -1, D), lse.reshape(plan.parts, -1),
                      out.reshape(-1, D), BP=plan.together)
    return out


class InPages:
    """Ours over pages of so many keys, which are copied into a pool when keys are first seen."""

    def __init__(self, size: int):
        self.size, self.pools = size, dict[int, tuple[Any, ...]]()

    def _pool(self, k: Any, v: Any) -> tuple[Any, ...]:
        if k.data_ptr() not in self.pools:
            B, H, T, _ = k.shape
            order = torch.randperm(B * T // self.size, device="cuda")
            pools = []
            for x in (k, v):
                pages = x.reshape(B, H, -1, self.size, D).transpose(1, 2).reshape(-1, self.size, D)
                pool = torch.empty_like(pages).reshape(-1, H, self.size, D)
                pool[order] = pages.reshape(pool.shape)
                pools.append(pool.reshape(-1, self.size, D))
            count = torch.full((B,), T, device="cuda", dtype=torch.int32)
            self.pools[k.data_ptr()] = *pools, order.reshape(B, -1).to(torch.int32), count
        return self.pools[k.data_ptr()]

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        return attended(q, k.shape, self._pool(k, v), page=self.size)


class InCodes:
    """Ours over codes of 8 bits, which are made of keys and values when these are first seen."""

    def __init__(self) -> None:
        self.made = dict[int, tuple[Any, ...]]()

    @staticmethod
    def rounded(x: Any) -> Any:
        return x.to(torch.float8_e4m3fn).to(x.dtype)

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        B, C, T, _ = k.shape
        if k.data_ptr() not in self.made:
            self.made[k.data_ptr()] = tuple(
                x.to(torch.float8_e4m3fn).reshape(B * C, T, D) for x in (k, v))
        return attended(q, k.shape, (*self.made[k.data_ptr()], None), codes=True)


def peers() -> dict[str, Attend]:
    found = {name: backend(b) for name, b in BACKENDS.items()}
    if "flex" in sys.argv[1:]:
        compiled = torch.compile(flex_attention, dynamic=False)
        found["FlexAttention"] = lambda q, k, v: compiled(q, k, v, enable_gqa=True)
    return found


def truth(q: Any, k: Any, v: Any) -> Any:
    keys, values = (x.double().repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    return torch.softmax(q.double() @ keys.mT / D**0.5, -1) @ values


def copies_of(size: int, calls: int, many: int) -> list[Callable[[], Any]]:
    """So many calls that move `size` bytes, read and written, in as many places, by a kernel.
    Tensor.copy_ is a copy node in a graph, which takes half as long again: 2,752 GB/s there and
    4,209 outside, this kernel 4,174 and 4,079 (H200, 2026-11-26)."""
    pairs = [torch.zeros(2, size // 8, device="cuda", dtype=torch.int32) for _ in range(many)]
    return [partial(torch.bitwise_not, pairs[i % many][0], out=pairs[i % many][1])
            for i in range(calls)]


def copy_rate() -> float:
    """GB/s, read and written."""
    calls = copies_of(1 << 31, 1, 1)
    return (1 << 31) / 1e3 / in_turn({"copy": captured(calls)}, rounds=ROUNDS)["copy"]


def measured(B: int, T: int, runs: dict[str, Attend], copy: float) -> dict[str, Any]:
    read = 2 * B * KEY_HEADS * T * D * 2
    caches = max(1, -(-FOOTPRINT // read))
    calls = max(4, min(caches, MOST_CALLS))
    data = [tuple(torch.randn(B, h, n, D, device="cuda", dtype=torch.bfloat16)
                  for h, n in ((HEADS, 1), (KEY_HEADS, T), (KEY_HEADS, T)))
            for _ in range(min(caches, calls))]
    part = tuple(x[:1] for x in data[0])
    want, graphs, bytes_read = truth(*part), {}, dict.fromkeys(runs, read)
    for name, run in runs.items():
        try:
            for x in data:
                run(*x)
            exact = want
            if isinstance(run, InCodes):
                exact = truth(part[0], *map(run.rounded, part[1:]))
                bytes_read[name] //= 2
            require(f"{name}, {B} x {T}", run(*data[0])[:1], exact, 6e-3)
            graphs[name] = captured([partial(run, *data[i % len(data)]) for i in range(calls)])
        except RuntimeError as failed:  # a backend that does not take the shape
            print(name, B, T, str(failed)[:100], flush=True)
    moves = {n: copies_of(n, calls, len(data)) for n in set(bytes_read.values())}  # keeps memory
    copies = {n: captured(x) for n, x in moves.items()}
    times = in_turn(graphs | {f"copy of {n}": run for n, run in copies.items()}, rounds=ROUNDS)
    us = {n: times[n] / calls for n in graphs}
    equal = {n: times[f"copy of {n}"] / calls for n in copies}
    best = min(t for name, t in us.items() if not name.startswith("tessera"))
    return {name: {"us": round(t, 1), "of copy": round(bytes_read[name] / t / 1e3 / copy, 3),
                   "copy of as many bytes, us": round(equal[bytes_read[name]], 1),
                   "of that copy": round(equal[bytes_read[name]] / t, 3),
                   "of best peer": round(best / t, 3)} for name, t in us.items()}


def main() -> None:
    copy = copy_rate()
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name(), "copy, GB/s": round(copy)}
    for B, T in SHAPES:
        paged = {f"tessera, pages of {n}": InPages(n) for n in PAGES if "pages" in sys.argv[1:]}
        codes = {"tessera, fp8_e4m3": InCodes()} if "codes" in sys.argv[1:] else {}
        runs = {"tessera": flash_attention_2, **paged, **codes, **peers()}
        name = f"B {B}, {T} keys"
        figures[name] = measured(B, T, runs, copy)
        print(name, json.dumps(figures[name]), flush=True)
        torch.cuda.empty_cache()
    record.write("decode", figures, shown=False)


if __name__ == "__main__":
    main()
