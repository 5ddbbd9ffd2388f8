"""Fourier transforms of 2^24 f32 points beside cuFFT, on one GPU.

    python benchmarks/fft.py            python benchmarks/fft.py compile PART PARTS

Ours is a jitted function of two arrays, real and imaginary parts; cuFFT's, called by PyTorch, is of
one array of complex numbers: the same bytes. Each result is compared with f64 first. Times are
medians of rounds in which both run in turn, five calls at a time behind work that lets the host run
ahead. Compiling many functions takes a while: `compile` leaves those of one part on the disk.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
import torch
from torch import fft as cufft

import tessera as ts

POINTS = 1 << 24
CALLS, ROUNDS, AHEAD_CYCLES = 5, 5, 6_000_000
Made = tuple[Callable[[], Any], Callable[[], Any], Callable[[], torch.Tensor]]


def joined(y: Any) -> torch.Tensor:
    """A result as one array of PyTorch's."""
    if isinstance(y, torch.Tensor):
        return y
    if isinstance(y, tuple):
        return torch.complex(*map(torch.from_dlpack, y))
    return torch.from_dlpack(y)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))


def wide(z: torch.Tensor) -> torch.Tensor:
    return z.to(torch.complex128 if z.is_complex() else torch.float64)


# --- cases: (ours, cuFFT's, in f64) ---------------------------------------------------------------
def of_pairs(ours: Callable, theirs: Callable, *shape: int) -> Made:
    re, im = drawn(2, *shape)
    z, fn, there = torch.complex(re, im), ts.jit(ours), (ts.from_dlpack(re), ts.from_dlpack(im))
    return lambda: fn(*there), lambda: theirs(z), lambda: theirs(wide(z))


def lines(n: int) -> Made:
    return of_pairs(lambda re, im: ts.fft((re, im)), cufft.fft, POINTS // n, n)


def planes(n: int) -> Made:
    return of_pairs(lambda re, im: ts.fft2((re, im)), cufft.fft2, POINTS // n**2, n, n)


def volumes(n: int) -> Made:
    return of_pairs(lambda re, im: ts.fft(ts.fft2((re, im)), axis=-3),
                    lambda z: cufft.fftn(z, dim=(-3, -2, -1)), POINTS // n**3, n, n, n)


def columns(n: int) -> Made:
    return of_pairs(lambda re, im: ts.fft((re, im), axis=0), lambda z: cufft.fft(z, dim=0), n,
                    POINTS // n)


def real(n: int) -> Made:
    x = drawn(POINTS // n, n)
    fn, there = ts.jit(ts.rfft), ts.from_dlpack(x)
    return lambda: fn(there), lambda: cufft.rfft(x), lambda: cufft.rfft(wide(x))


def real_back(n: int) -> Made:
    z = cufft.rfft(drawn(POINTS // n, n))
    parts = [ts.from_dlpack(part.contiguous()) for part in (z.real, z.imag)]
    fn = ts.jit(lambda re, im: ts.irfft((re, im)))
    return lambda: fn(*parts), lambda: cufft.irfft(z), lambda: cufft.irfft(wide(z))


def convolution(n: int) -> Made:
    """Of real lines with one filter, whose transform is known."""
    x, h = drawn(POINTS // n, n), cufft.rfft(drawn(n))

    @ts.jit
    def ours(x: Any, re: Any, im: Any) -> Any:
        a, b = ts.rfft(x)
        return ts.irfft((a * re - b * im, a * im + b * re))

    there = [ts.from_dlpack(v.contiguous()) for v in (x, h.real, h.imag)]
    return (lambda: ours(*there), lambda: cufft.irfft(cufft.rfft(x) * h),
            lambda: cufft.irfft(cufft.rfft(wide(x)) * wide(h)))


CASES: dict[str, Callable[[], Made]] = {
    **{f"lines of 2^{a}": lambda a=a: lines(1 << a) for a in range(8, 21)},
    **{f"real lines of 2^{a}": lambda a=a: real(1 << a) for a in (8, 10, 12, 14)},
    **{f"back to real lines of 2^{a}": lambda a=a: real_back(1 << a) for a in (8, 12, 14)},
    **{f"convolutions of 2^{a}": lambda a=a: convolution(1 << a) for a in (8, 12, 14)},
    "columns of 2^8": lambda: columns(256), "columns of 2^10": lambda: columns(1024),
    "planes of 2^8 x 2^8": lambda: planes(256), "planes of 2^10 x 2^10": lambda: planes(1024),
    "volumes of 2^8 x 2^8 x 2^8": lambda: volumes(256),
}


# --- measuring ------------------------------------------------------------------------------------
def in_turn(*runs: Callable[[], Any]) -> list[float]:
    """Microseconds of a call of each."""
    times: list[list[float]] = [[] for _ in runs]
    for r in range(ROUNDS + 1):
        for run, found in zip(runs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(AHEAD_CYCLES)
            begin.record()
            for _ in range(CALLS):
                run()
            end.record()
            torch.cuda.synchronize()
            if r:  # the first warms up
                found.append(1e3 * begin.elapsed_time(end) / CALLS)
    return [statistics.median(t) for t in times]


def measured(ours: Callable, theirs: Callable, truth: Callable) -> dict[str, float]:
    want = truth()
    errors = [float((wide(joined(run())) - want).norm() / want.norm()) for run in (ours, theirs)]
    del want
    us = in_turn(ours, theirs)
    return {"us": round(us[0], 1), "cuFFT, us": round(us[1], 1), "ratio": round(us[1] / us[0], 3),
            "error": float(f"{errors[0]:.2g}"), "cuFFT's error": float(f"{errors[1]:.2g}")}


def main() -> None:
    if sys.argv[1:2] == ["compile"]:
        part, parts = map(int, sys.argv[2:])
        for case in list(CASES.values())[part::parts]:
            case()[0]()
        return torch.cuda.synchronize()
    source, target = drawn(2, POINTS), torch.empty(2, POINTS, device="cuda")
    copy, _ = in_turn(lambda: target.copy_(source), lambda: None)
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name(),
                               "copy, us": round(copy, 1)}
    for name, case in CASES.items():
        figures[name] = measured(*case())
        print(name, json.dumps(figures[name]), flush=True)
    made = {**record.context(), **figures}
    if out := os.environ.get("OUT"):
        (Path(out) / "fft.json").write_text(json.dumps(made, indent=2) + "\n")
    else:
        record.write("fft", figures, shown=False)


if __name__ == "__main__":
    main()
