"""Fourier transforms on GPUs by the library's kernels, under the interpreter."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from tessera.graph.cuda import CudaProgram
from tessera.graph.host_copy import HostCopy
from tessera.kernels import fft_passes, fft_stages
from tessera.kernels.fft_stages import stage_angles
from tessera.kernels.mixed_fft import (
    LONGEST_MIXED,
    MOST_HELD,
    MOST_STAGES,
    across_form,
    mixed_form,
    points_held,
)

EPS = 2.0**-24


def ran(fn: Any, *xs: np.ndarray) -> tuple[CudaProgram, list[np.ndarray]]:
    made = CudaProgram(ts.jit(fn).graph(*map(ts.tensor, xs)), "sm_90a")
    return made, made.run(list(xs))


def calls(made: CudaProgram) -> list[str]:
    return [str(g.attr("call")).split("(")[0].split("[")[0] for g in made.plan.groups
            if g.kind == "launch"]


def check(got: Any, want: np.ndarray, points: int) -> None:
    """Errors of a transform grow with its stages: the norm of the difference by that of the result
    is about half of eps for each factor of 2."""
    off = np.linalg.norm(np.asarray(got, want.dtype) - want) / np.linalg.norm(want)
    assert off < 0.5 * EPS * (4 + np.log2(points)), off


def pair(rng: Any, *shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    re, im = rng.standard_normal((2, *shape)).astype(np.float32)
    return re, im, re.astype(np.float64) + 1j * im


@pytest.mark.parametrize(("N", "radices", "points"), [
    (256, (8, 8, 4), 8), (512, (2, 16, 16), 16), (1024, (8, 16, 8), 16), (2048, (8, 16, 16), 16),
    (4096, (16, 16, 16), 16), (4096, (8, 8, 8, 8), 16), (8192, (16, 32, 16), 32),
    (16384, (32, 32, 16), 32)])
def test_threads_of_an_exchange_meet_no_bank_twice(N: int, radices: tuple, points: int) -> None:
    """Those of a warp, where a stage's results are written and where the next one's are read."""
    each, m, lies, spans = N // points, 1, fft_stages.padded.fn, []
    for R, after in itertools.pairwise(radices):
        every, part = fft_stages.padding.fn(m, R), np.arange(each)
        u = (part + np.arange(0, N // R, each)[:, None]).reshape(-1, 32)
        spans += [lies(u % m + u // m * (m * R) + m * k, every) for k in range(R)]
        v = (part + np.arange(0, N // after, each)[:, None]).reshape(-1, 32)
        spans += [lies(v + j * (N // after), every) for j in range(after)]
        m *= R
    assert all(len(set(row % 32)) == 32 for at in spans for row in at)


@pytest.mark.parametrize("n", [1 << a for a in range(1, 15)])
def test_lines(n: int, rng: Any) -> None:
    re, im, z = pair(rng, 3, n)
    made, (a, b) = ran(lambda re, im: ts.fft((re, im)), re, im)
    assert calls(made) == ["fft_lines"] and len(made.plan.groups) == 1
    check(a + 1j * b, np.fft.fft(z), n)


@pytest.mark.parametrize("fn, inputs, launches", [
    (lambda re, im: ts.fft((re, im)), [4096] * 2, 1), (ts.rfft, [4096], 1),
    (lambda re, im: ts.fft2((re, im)), [4096] * 2, 3),
    (lambda re, im: ts.irfft((re, im)), [2049] * 2, 1)],
    ids=["lines", "real", "planes", "back to real"])
def test_large_results_are_not_filled_first(fn: Any, inputs: list[int], launches: int) -> None:
    kinds = [ts.Tensor[4096, n, ts.f32] for n in inputs]
    made = CudaProgram(ts.jit(fn).graph(*kinds), "sm_90a")
    assert [g.kind for g in made.plan.groups] == ["launch"] * launches


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
@pytest.mark.parametrize("inverse", [False, True])
def test_norms_and_inverses(inverse: bool, norm: str, rng: Any) -> None:
    re, im, z = pair(rng, 5, 32)
    ours, numpys = (ts.ifft, np.fft.ifft) if inverse else (ts.fft, np.fft.fft)
    _, (a, b) = ran(lambda re, im: ours((re, im), norm=norm), re, im)
    check(a + 1j * b, numpys(z, norm=norm), 32)


@pytest.mark.parametrize(("shape", "axis"), [((3, 64, 5), 1), ((256, 33), 0), ((2, 8, 3, 2), 1)])
def test_other_axes(shape: tuple, axis: int, rng: Any) -> None:
    re, im, z = pair(rng, *shape)
    made, (a, b) = ran(lambda re, im: ts.fft((re, im), axis=axis), re, im)
    assert calls(made) == ["fft_lines"] and len(made.plan.groups) == 1
    check(a + 1j * b, np.fft.fft(z, axis=axis), shape[axis])


@pytest.mark.parametrize(("lines", "n", "norm", "between"), [
    (3, 1 << 15, "backward", 48), (5, 1 << 15, "forward", 2), (2, 1 << 16, "forward", 24),
    (1, 1 << 18, "backward", 6), (1, 1 << 20, "forward", 2)])
def test_long_lines_are_two_passes_in_one_launch(lines: int, n: int, norm: str, between: int,
                                                 rng: Any, monkeypatch: Any) -> None:
    """Of fewer lines than lie between the passes, and of more."""
    if between < fft_passes.lag_of(n, 48):
        monkeypatch.setattr(fft_passes, "lag_of", lambda size, arrays: min(arrays, between))
    assert fft_passes.lag_of(n, 48) == between
    re, im, z = pair(rng, lines, n)
    made, (a, b) = ran(lambda re, im: ts.fft((re, im), norm=norm), re, im)
    assert calls(made) == ["fft_passes"] and len(made.plan.groups) == 1
    check(a + 1j * b, np.fft.fft(z, norm=norm), n)
    made, (a, b) = ran(lambda re, im: ts.ifft((re, im), norm=norm), re, im)
    assert calls(made) == ["fft_passes"]
    check(a + 1j * b, np.fft.ifft(z, norm=norm), n)


@pytest.mark.parametrize("shape", [(3, 128, 128), (1, 512, 1024)])
def test_counts_of_groups_are_zero_again(shape: tuple, rng: Any) -> None:
    """So that nothing has to be cleared in front of the next launch."""
    (count, rest, n), (re, im, z) = shape, pair(rng, *shape)
    lanes, given = fft_passes.blocks_of(n, rest, count)
    x, y = [[part.reshape(count, -1) for part in z] for z in ((re, im), (re * 0, im * 0))]
    angles = [stage_angles(k, given[r], given["points"])
              for k, r in ((n, "radices"), (rest, "radices_"))]
    done = np.zeros(count, np.int32)
    for _ in range(2):
        fft_passes.fft_passes.launcher(lanes=lanes)(*x, *y, done, *angles, along=False, scale=1.0,
                                                    **given)
        check(y[0] + 1j * y[1], np.fft.fft2(z).reshape(count, -1), n * rest)
        assert not done.any()


def test_long_columns_are_two_launches(rng: Any) -> None:
    re, im, z = pair(rng, 1 << 12, 3)
    made, (a, b) = ran(lambda re, im: ts.fft((re, im), axis=0), re, im)
    assert calls(made) == ["fft_lines"] * 2 and len(made.plan.groups) == 2
    check(a + 1j * b, np.fft.fft(z, axis=0), 1 << 12)


@pytest.mark.parametrize("axes", [(-2, -1), (-1, -2)])
@pytest.mark.parametrize("shape", [(2, 128, 128), (3, 2, 256, 128), (1024, 256), (70, 128, 256)])
def test_planes_are_one_launch(shape: tuple, axes: tuple, rng: Any) -> None:
    re, im, z = pair(rng, *shape)
    made, (a, b) = ran(lambda re, im: ts.fft2((re, im), axes=axes), re, im)
    assert calls(made) == ["fft_passes"] and len(made.plan.groups) == 1
    check(a + 1j * b, np.fft.fft2(z), shape[-1] * shape[-2])


@pytest.mark.parametrize("axes", [(-2, -1), (-1, -2)])
def test_planes_of_a_group_are_one_launch(axes: tuple, rng: Any) -> None:
    re, im, z = pair(rng, 3, 64, 64)
    made, (a, b) = ran(lambda re, im: ts.fft2((re, im), axes=axes), re, im)
    assert calls(made) == ["fft_squares"] and len(made.plan.groups) == 1
    check(a + 1j * b, np.fft.fft2(z), 64 * 64)
    made, (a, b) = ran(lambda re, im: ts.fft(ts.ifft2((re, im), norm="ortho"), axis=0), re, im)
    assert calls(made) == ["fft_squares", "mixed_lines"]
    check(a + 1j * b, np.fft.fft(np.fft.ifft2(z, norm="ortho"), axis=0), 64 * 64)


def test_planes_back(rng: Any) -> None:
    re, im, z = pair(rng, 3, 128, 256)
    made, (a, b) = ran(lambda re, im: ts.ifft2((re, im), norm="ortho"), re, im)
    assert calls(made) == ["fft_passes"]
    check(a + 1j * b, np.fft.ifft2(z, norm="ortho"), 1 << 15)


@pytest.mark.parametrize(("shape", "fn"), [
    ((2, 16, 64), lambda re, im: ts.fft2((re, im))),                          # small ones
    ((128, 3, 128), lambda re, im: ts.fft2((re, im), axes=(0, 2))),           # not side by side
    ((128, 128), lambda re, im: ts.ifft(ts.fft((re, im)), axis=0)),           # one there, one back
    ((128, 128), lambda re, im: ts.fft(tuple(ts.fft((re, im)))[::-1], axis=0)),  # parts exchanged
    ((128, 128), lambda re, im: (lambda y: (*ts.fft(y, axis=0), y.imag))(ts.fft((re, im)))),
])
def test_what_is_no_plane_is_two_launches(shape: tuple, fn: Any, rng: Any) -> None:
    re, im, _ = pair(rng, *shape)
    made, got = ran(fn, re, im)
    assert calls(made) == ["fft_lines"] * 2
    for y, want in zip(got, ts.jit(fn)(re, im), strict=True):
        check(y, np.asarray(want, np.float64), 1 << 14)


def test_gradients_are_transforms(rng: Any) -> None:
    re, im, z = pair(rng, 3, 64)

    def fn(re: Any, im: Any) -> Any:
        return ts.vjp(lambda a, b: ts.fft((a, b)), re, im)[1]((re, im))

    made, (a, b) = ran(fn, re, im)
    assert calls(made) == ["fft_lines"]
    check(a + 1j * b, np.fft.ifft(z, norm="forward"), 64)


@pytest.mark.parametrize(("lines", "n"), [(9, 12), (7, 60), (4, 100), (1, 144), (3, 225),
                                          (2, 1000), (9, 360), (1, 6144)])
def test_lines_of_factors_3_and_5(lines: int, n: int, rng: Any) -> None:
    """Of one to three stages; of groups with fewer lines than they have threads for, and more; with
    fewer butterflies than threads in the last stage."""
    re, im, z = pair(rng, lines, n)
    made, (a, b) = ran(lambda re, im: ts.ifft((re, im), norm="ortho"), re, im)
    assert calls(made) == ["mixed_lines"] and len(made.plan.groups) == 1
    check(a + 1j * b, np.fft.ifft(z, norm="ortho"), n)


@pytest.mark.parametrize(("shape", "axis"), [((2, 60, 5), 1), ((15, 33), 0), ((45, 2), 0),
                                             ((1080, 3), 0)])
def test_lines_of_factors_3_and_5_side_by_side(shape: tuple, axis: int, rng: Any) -> None:
    """In one pass over the points as they lie; groups with lines of two rows, and too many."""
    re, im, z = pair(rng, *shape)
    made, (a, b) = ran(lambda re, im: ts.fft((re, im), axis=axis), re, im)
    assert calls(made) == ["mixed_lines"] and len(made.plan.groups) == 1
    check(a + 1j * b, np.fft.fft(z, axis=axis), shape[axis])


def test_groups_are_wide_where_rows_begin_anywhere_in_sectors() -> None:
    wide, usual = across_form(1080, 3), across_form(1080)  # a test above has the first
    assert wide is not None and usual is not None
    assert (wide.BM, wide.groups) == (16, 1) and (usual.BM, usual.groups) == (8, 2)
    assert across_form(480, 16777) == across_form(480) and across_form(1920, 3) == across_form(1920)


@pytest.mark.parametrize(("lines", "n"), [(9, 12), (4, 15), (5, 60), (1, 225), (2, 400)])
def test_real_lines_of_factors_3_and_5(lines: int, n: int, rng: Any) -> None:
    """Two lines at once; no imaginary part that has to be 0 is read."""
    x = rng.standard_normal((lines, n)).astype(np.float32)
    made, (a, b) = ran(ts.rfft, x)
    assert calls(made) == ["mixed_real"] and len(made.plan.groups) == 1
    alone = [0] if n % 2 else [0, -1]
    assert not b[:, alone].any()
    check(a + 1j * b, np.fft.rfft(x.astype(np.float64)), n)
    b[:, alone] = np.nan
    made, (y,) = ran(lambda a, b: (ts.irfft((a, b), n),), a, b)
    assert calls(made) == ["mixed_real_back"] and len(made.plan.groups) == 1
    check(y, x.astype(np.float64), n * n)


@pytest.mark.parametrize("n", [1, 2])
def test_real_lines_too_short_for_a_kernel(n: int, rng: Any) -> None:
    x = rng.standard_normal((3, n)).astype(np.float32)
    _, (re, im) = ran(ts.rfft, x)
    check(re + 1j * im, np.fft.rfft(x), n)
    _, (back,) = ran(lambda re, im: ts.irfft((re, im), n), re, im)
    check(back, x, n)


@pytest.mark.usefixtures("gpu", "apart")
@pytest.mark.parametrize("n", [60, 225])
def test_a_launch_knows_how_long_its_table_is(n: int, rng: Any) -> None:
    """Its extent had the name of a parameter, the threads of a line, and accesses were checked
    against that number."""
    re, im, z = pair(rng, 3, n)
    y = ts.fft(ts.to((ts.tensor(re), ts.tensor(im)), "cuda"))
    check(y.numpy(), np.fft.fft(z), n)
    a, b = ts.rfft(ts.tensor(re).to("cuda"))
    check(a.numpy() + 1j * b.numpy(), np.fft.rfft(re.astype(np.float64)), n * n)


@pytest.mark.parametrize("sides", [1, 2, 0])
def test_all_stages_but_the_last_come_out_even(sides: int) -> None:
    """And points behind each other in a stage have room between those that it has finished. Where
    butterflies lie side by side, so do their points at even places; sides: 0 where lines do."""
    beside = 0
    for n in (*range(1, 257, 1 if sides else 5), 360, 500, 1000, 1536, 2500, 3000, 6144, 7500,
              LONGEST_MIXED + 8):
        if (form := mixed_form(n, sides) if sides else across_form(n)) is None:
            continue
        assert math.prod(form.radices) == n and len(form.radices) <= MOST_STAGES
        assert all(n // r % (form.T * form.side) == 0 for r in form.radices[:-1])
        assert points_held(n, form.radices, form.T) <= MOST_HELD
        done = [math.prod(form.radices[:s + 1]) for s in range(len(form.pads))]
        assert all(n + pad * (n // (m * c)) <= form.P and n % (m * c) == 0
                   for (pad, c), m in zip(form.pads, done, strict=True))
        assert form.BM * form.T <= form.lanes < form.BM * form.T + 32
        if form.side == 2:
            beside += 1
            assert not any(v % 2 for v in (form.P, *(n // r for r in form.radices), *done,
                                           *(pad for pad, _ in form.pads)))
            assert any(n // r % 8 for r in (form.radices[0], form.radices[-1]))
    assert (beside > 0) == (sides == 2)


@pytest.mark.parametrize(("n", "dtype"), [(56, "f32"), (7168, "f32"), (64, "f64"), (1, "f32")])
def test_others_are_the_vendors(n: int, dtype: str, rng: Any) -> None:
    re, im, z = pair(rng, 3, n)
    wide = {"f32": np.float32, "f64": np.float64}[dtype]
    made, (a, b) = ran(lambda re, im: ts.fft((re, im)), re.astype(wide), im.astype(wide))
    assert not calls(made) and [g.kind for g in made.plan.groups] == ["library"]
    check(a + 1j * b, np.fft.fft(z), n)


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
@pytest.mark.parametrize(("lines", "n"), [
    *((5, n) for n in (4, 8, 16, 32, 64, 256, 512, 2048, 4096)), (1, 64), (6, 128),
    (133, 512), (130, 1024)])
def test_real_points(lines: int, n: int, norm: str, rng: Any) -> None:
    """Of two short lines or more, two at once where a thread has 16 points of both."""
    x = rng.standard_normal((lines, n)).astype(np.float32)
    made, (a, b) = ran(lambda x: ts.rfft(x, norm=norm), x)
    assert calls(made) == ["rfft_pairs" if lines > 1 and 16 <= n <= 2048 else "rfft_lines"]
    assert len(made.plan.groups) == 1 and not b[:, 0].any() and not b[:, -1].any()
    check(a + 1j * b, np.fft.rfft(x.astype(np.float64), norm=norm), n)


def test_the_longest_real_lines_are_of_half_as_many_complex_points(rng: Any) -> None:
    x = rng.standard_normal((2, 1 << 15)).astype(np.float32)
    made, (a, b) = ran(ts.rfft, x)
    assert calls(made) == ["rfft_lines"]
    check(a + 1j * b, np.fft.rfft(x.astype(np.float64)), 1 << 15)


@pytest.mark.parametrize(("lines", "n", "norm"), [
    (2, 1 << 16, "ortho"), (1, 1 << 21, "backward")])
def test_longer_real_lines_are_one_launch_there_and_one_back(lines: int, n: int, norm: str,
                                                             rng: Any, monkeypatch: Any) -> None:
    """Of as many lines as lie between the passes, and of more; of three stages in a pass."""
    monkeypatch.setattr(fft_passes, "AHEAD", 8)
    x = rng.standard_normal((lines, n)).astype(np.float32)
    made, (a, b) = ran(lambda x: ts.rfft(x, norm=norm), x)
    assert calls(made) == ["rfft_passes"] and len(made.plan.groups) == 1
    assert not b[:, 0].any() and not b[:, -1].any()
    check(a + 1j * b, np.fft.rfft(x.astype(np.float64), norm=norm), n)
    b[:, 0], b[:, -1] = np.nan, np.inf
    made, (y,) = ran(lambda a, b: (ts.irfft((a, b), norm=norm),), a, b)
    assert calls(made) == ["irfft_passes"] and len(made.plan.groups) == 1
    check(y, x.astype(np.float64), n * n)


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
@pytest.mark.parametrize(("lines", "n"), [
    *((5, n) for n in (4, 8, 16, 32, 64, 128, 256, 512, 2048, 4096)), (1, 64), (6, 1024)])
def test_back_to_real_points(lines: int, n: int, norm: str, rng: Any) -> None:
    """The imaginary parts of frequencies that stand alone are not read. As for real points, two
    short lines at once."""
    re, im, z = pair(rng, lines, n // 2 + 1)
    im[:, 0], im[:, -1] = np.nan, np.inf
    made, (y,) = ran(lambda re, im: (ts.irfft((re, im), norm=norm),), re, im)
    assert calls(made) == ["irfft_pairs" if lines > 1 and 16 <= n <= 2048 else
                           "irfft_whole" if n == 4096 else "irfft_lines"]
    assert len(made.plan.groups) == 1
    check(y, np.fft.irfft(z, norm=norm), n)


def test_angles_are_brought_to_a_gpu_once(rng: Any) -> None:
    """Nobody else has the array, so that no call has to ask whether it was written to."""
    for fn in (lambda x: ts.fft(x), lambda x: ts.rfft(x)):
        graph = CudaProgram(ts.jit(fn).graph(ts.zeros((2, 64))), "sm_90a").lowered
        (angles,) = graph.captures.values()
        assert not HostCopy.of(angles).may_differ(angles)


@pytest.mark.parametrize(("lines", "ours"), [(2047, True), (2048, False)])
def test_more_elements_than_the_kernels_count_to_are_the_vendors(lines: int, ours: bool) -> None:
    x = ts.Tensor[lines, 1 << 20, "f32"]
    made = CudaProgram(ts.jit(lambda re, im: ts.fft((re, im))).graph(x, x), "sm_90a")
    assert calls(made) == ["fft_passes"] * ours


def convolved(x: Any, h: Any, order: str = "ab") -> Any:
    (a, b), (c, d) = ts.rfft(x), h
    real, imaginary = a * c - b * d, {"ab": a * d + b * c, "ba": c * b + d * a}[order]
    return ts.irfft((real, imaginary))


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize(("shape", "factors"), [
    ((5, 64), (33,)), ((2, 3, 512), (3, 257)), ((3, 4), (3,)), ((4, 8), (4, 5)),
    ((2, 8192), (4097,))])
def test_a_convolution_is_one_launch(shape: tuple, factors: tuple, order: str, rng: Any) -> None:
    x, n = rng.standard_normal(shape).astype(np.float32), shape[-1]
    re, im, h = pair(rng, *factors)
    made, (y,) = ran(lambda x, re, im: (convolved(x, (re, im), order),), x, re, im)
    assert calls(made) == ["filter_lines"] and len(made.plan.groups) == 1
    check(y, np.fft.irfft(np.fft.rfft(x.astype(np.float64)) * h, n), n * n)


def test_back_to_the_longest_lines_in_one_piece(rng: Any) -> None:
    """Pairs are made where frequencies are read, each of them once."""
    re, im, z = pair(rng, 3, (1 << 13) + 1)
    im[:, 0], im[:, -1] = np.nan, np.inf
    made, (y,) = ran(lambda re, im: (ts.irfft((re, im)),), re, im)
    assert calls(made) == ["irfft_whole"] and len(made.plan.groups) == 1
    check(y, np.fft.irfft(z), 1 << 14)


def test_longer_convolutions_are_transforms_and_a_loop() -> None:
    n = 1 << 16
    kinds = ts.Tensor[3, n, ts.f32], *[ts.Tensor[n // 2 + 1, ts.f32]] * 2
    fn = ts.jit(lambda x, re, im: (convolved(x, (re, im)),))
    made = CudaProgram(fn.graph(*kinds), "sm_90a")
    assert [g.kind for g in made.plan.groups] == ["launch", "loop", "launch"]


@pytest.mark.parametrize("fn", [
    lambda x, re, im: (convolved(x, (re, im)), ts.rfft(x).real),   # something else reads it
    lambda x, re, im: (ts.irfft((ts.rfft(x).real * re - ts.rfft(x).imag * im,
                                 ts.rfft(x).real * im - ts.rfft(x).imag * re)),),    # no product
    lambda x, re, im: (ts.irfft(tuple(tuple(ts.rfft(x))[i] * (re, im)[i] for i in (0, 1))),),
])
def test_what_is_no_convolution_stays(fn: Any, rng: Any) -> None:
    x = rng.standard_normal((5, 64)).astype(np.float32)
    re, im, _ = pair(rng, 33)
    made, got = ran(fn, x, re, im)
    assert "filter_lines" not in calls(made)
    for y, want in zip(got, ts.jit(fn)(x, re, im), strict=True):
        check(y, np.asarray(want, np.float64), 64**2)
