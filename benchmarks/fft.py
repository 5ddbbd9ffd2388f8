"""Fourier transforms of 2^24 f32 points beside cuFFT, on one GPU.

    python benchmarks/fft.py

Ours is a jitted function of the real and imaginary parts of two arrays; cuFFT's, called by
PyTorch on two arrays of complex numbers, the same bytes, is a CUDA graph. Back to real points it
is called by CuPy: it writes over what it reads, of which PyTorch makes a copy before, as it has a
pass for the scale behind. So what a call costs the host is not measured. Of each the result for the
first is compared with f64. Times are medians of rounds in which both run in turn, behind work that
lets the host run ahead. Compiling many functions takes a while: processes make what is measured
side by side, and measure one after the other.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import cupy
import record
import side_processes
import torch
from cupy.cuda.cufft import CUFFT_C2R, CUFFT_INVERSE, Plan1d
from gpu_timing import captured, in_turn
from torch import fft as cufft

import tessera as ts

POINTS = 1 << 24
MANY = 2  # arrays of a call
CALLS, ROUNDS, AHEAD_CYCLES = 4, 7, 4_000_000
PROCESSES = min(12, len(os.sched_getaffinity(0)))
# Ours on all arrays, cuFFT's on one of them, and on the first in f64.
Made = tuple[Callable[[], Any], Callable[[int], torch.Tensor], Callable[[], torch.Tensor]]


def joined(y: Any) -> torch.Tensor:
    """A result as one array of PyTorch's."""
    if isinstance(y, torch.Tensor):
        return y
    if isinstance(y, tuple):
        return torch.complex(*map(torch.from_dlpack, y))
    return torch.from_dlpack(y)


@functools.cache
def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))


def wide(z: torch.Tensor) -> torch.Tensor:
    return z.to(torch.complex128 if z.is_complex() else torch.float64)


# --- cases ----------------------------------------------------------------------------------------
def of_arrays(ours: Callable, theirs: Callable, xs: list[torch.Tensor], *more: Any) -> Made:
    """ours: of the parts of one of these, and more, which theirs knows."""
    parts = [parts_of(x) for x in xs]
    fn = ts.jit(lambda parts, *more: [ours(*part, *more) for part in parts])
    there = [[ts.from_dlpack(p) for p in part] for part in parts]
    more = tuple(map(ts.from_dlpack, more))
    return lambda: fn(there, *more), lambda i: theirs(xs[i]), lambda: theirs(wide(xs[0]))


@functools.cache
def drawn_pairs() -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.complex, *drawn(2, MANY, POINTS)))


def pairs(*shape: int) -> list[torch.Tensor]:
    return [z[:math.prod(shape)].view(shape) for z in drawn_pairs()]


def parts_of(x: torch.Tensor) -> list[torch.Tensor]:
    """Real and imaginary parts, of numbers that were drawn as they lie there."""
    if not x.is_complex():
        return [x]
    for z, re, im in zip(drawn_pairs(), *drawn(2, MANY, POINTS), strict=True):
        if z.data_ptr() == x.data_ptr():
            return [part[:x.numel()].view(x.shape) for part in (re, im)]
    return [x.real.contiguous(), x.imag.contiguous()]


def lines(n: int) -> Made:
    return of_arrays(lambda re, im: ts.fft((re, im)), cufft.fft, pairs(POINTS // n, n))


def planes(n: int) -> Made:
    return of_arrays(lambda re, im: ts.fft2((re, im)), cufft.fft2, pairs(POINTS // n**2, n, n))


def volumes(n: int) -> Made:
    return of_arrays(lambda re, im: ts.fft(ts.fft2((re, im)), axis=-3),
                     lambda z: cufft.fftn(z, dim=(-3, -2, -1)), pairs(POINTS // n**3, n, n, n))


def columns(n: int) -> Made:
    return of_arrays(lambda re, im: ts.fft((re, im), axis=0), lambda z: cufft.fft(z, dim=0),
                     pairs(n, POINTS // n))


def reals(n: int) -> list[torch.Tensor]:
    return [x[:POINTS // n * n].view(-1, n) for x in drawn(2, MANY, POINTS)[0]]


def real(n: int) -> Made:
    return of_arrays(ts.rfft, cufft.rfft, reals(n))


def real_back(n: int) -> Made:
    return of_arrays(lambda re, im: ts.irfft((re, im), norm="forward"), back_alone,
                     [*map(cufft.rfft, reals(n))])


def back_alone(z: torch.Tensor) -> torch.Tensor:
    """The real points of z, which are not those of z any more, by cuFFT and nothing else."""
    lines, n = z.shape[0], 2 * (z.shape[1] - 1)
    if z.dtype == torch.complex128:
        return cufft.irfft(z, norm="forward")
    y = torch.empty(lines, n, device="cuda")
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        plan_back(n, lines).fft(cupy.from_dlpack(z), cupy.from_dlpack(y), CUFFT_INVERSE)
    return y


@functools.cache
def plan_back(n: int, lines: int) -> Any:
    return Plan1d(n, CUFFT_C2R, lines)


def convolution(n: int) -> Made:
    """Of real lines with one filter, whose transform is known."""
    h = cufft.rfft(drawn(n))

    def ours(x: Any, re: Any, im: Any) -> Any:
        a, b = ts.rfft(x)
        return ts.irfft((a * re - b * im, a * im + b * re))

    return of_arrays(ours, lambda x: cufft.irfft(cufft.rfft(x) * h), reals(n),
                     h.real.contiguous(), h.imag.contiguous())


MIXED = (360, 1000, 1536, 3000, 6144)
REAL = (8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20)
CASES: dict[str, Callable[[], Made]] = {
    **{f"lines of 2^{a}": lambda a=a: lines(1 << a) for a in range(8, 21)},
    **{f"real lines of 2^{a}": lambda a=a: real(1 << a) for a in REAL},
    **{f"back to real lines of 2^{a}": lambda a=a: real_back(1 << a) for a in REAL},
    **{f"lines of {n}": lambda n=n: lines(n) for n in MIXED},
    **{f"real lines of {n}": lambda n=n: real(n) for n in (400,)},
    **{f"back to real lines of {n}": lambda n=n: real_back(n) for n in (400,)},
    **{f"planes of 2^{a} x 2^{a}": lambda a=a: planes(1 << a) for a in (8, 9, 10, 11, 12)},
    **{f"volumes of 2^{a} x 2^{a} x 2^{a}": lambda a=a: volumes(1 << a) for a in (6, 7, 8)},
    **{f"columns of 2^{a}": lambda a=a: columns(1 << a) for a in (8, 10)},
    **{f"columns of {n}": lambda n=n: columns(n) for n in (480, 1000, 1920)},
    **{f"planes of {n} x {n}": lambda n=n: planes(n) for n in (480, 1000)},
    **{f"convolutions of 2^{a}": lambda a=a: convolution(1 << a) for a in (8, 12, 14)},
}


# --- measuring ------------------------------------------------------------------------------------
def prepared(name: str) -> tuple[dict[str, Callable], list[float]]:
    """(what is measured, its errors)."""
    ours, theirs, truth = CASES[name]()
    want = truth()
    errors = [float((wide(joined(y)) - want).norm() / want.norm())
              for y in (ours()[0], theirs(0))]
    del want
    runs = {"ours": ours, "cufft": captured([partial(theirs, i) for i in range(MANY)])}
    torch.cuda.empty_cache()  # others have a share of the memory
    torch.cuda.synchronize()
    return runs, errors


def measured(runs: dict[str, Callable], errors: list[float]) -> dict[str, float]:
    us = in_turn(runs, CALLS, ROUNDS, AHEAD_CYCLES)
    ours, cufft = us["ours"] / MANY, us["cufft"] / MANY
    return {"ours_us": round(ours, 1), "cufft_us": round(cufft, 1),
            "ratio": round(cufft / ours, 3), "error": float(f"{errors[0]:.2g}"),
            "cufft_error": float(f"{errors[1]:.2g}")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    side_processes.flag(parser)
    given = parser.parse_args()
    if given.work is not None:
        return side_processes.work(given.work, prepared, measured)
    source, target = drawn(MANY, 2, POINTS), torch.empty(MANY, 2, POINTS, device="cuda")
    copy = in_turn({"copy": lambda: target.copy_(source)}, CALLS, ROUNDS, AHEAD_CYCLES)["copy"]
    cases: dict[str, dict] = {}
    figures = {"device": torch.cuda.get_device_name(), "copy_us": round(copy / MANY, 1),
               "cases": cases}
    for (name,), found in side_processes.results(__file__, [[n] for n in CASES], PROCESSES):
        cases[name] = found
        print(name, json.dumps(found), flush=True)
    figures["cases"] = {name: cases[name] for name in CASES}
    record.write("fft", figures, shown=False)
    return None


if __name__ == "__main__":
    main()
