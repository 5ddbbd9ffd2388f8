"""Views of unfolded images: what they mean, how targets make them, and the convolutions that
multiply them: under the interpreter, in the warp-specialised form, and gathered."""

from __future__ import annotations

from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import emulator
import tessera as ts
from emulator import compare
from hopper_lowering import Known, lowered, program, run
from tessera import Tensor, bf16, f32, tile
from tessera.kernels.conv import (
    Geometry,
    conv_backward,
    conv_backward_strided,
    conv_forward,
    conv_patches,
    conv_weights,
)
from tessera.numerics import decode
from tessera.tile.cuda.emit.emitter import ArgumentFacts
from tessera.tile.cuda.intrinsics import warp_specialised
from tessera.tile.cuda.lower.gather_windows import gather_windows
from tessera.tile.interpreter.launch import _environment
from tessera.tile.interpreter.machine import Machine
from tessera.tile.ir.ir import Op, walk
from tessera.tile.ir.register_layout import warpgroups
from tessera.tile.ops.windows import Windows
from tessera.tile.passes import verify
from tessera.tile.passes.overwritten_arguments import overwritten_parameters

FACTS = Known(divisible=frozenset("SCMKPE"), aligned=frozenset("XWYGD"))
# (images, filters, window, stride, dilation, before, behind, extents)
CONVS = {
    "plain": (2, 64, (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), (9, 10)),
    "strided": (2, 64, (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), (10, 9)),
    "odd": (1, 64, (3, 2), (1, 1), (2, 1), (1, 0), (0, 2), (7, 9)),
    "by three": (1, 64, (5, 5), (3, 3), (1, 1), (1, 1), (1, 1), (10, 11)),
    "one pixel": (2, 128, (1, 1), (2, 2), (1, 1), (0, 0), (0, 0), (8, 7)),
}


class Conv:
    """Arrays of small integers, whose sums are exact, and what NumPy makes of them in f64."""

    def __init__(self, rng: Any, name: str, channels: int = 64):
        n, M, window, stride, dilation, before, behind, extents = CONVS[name]
        results = tuple((i + a + b - d * (k - 1) - 1) // s + 1 for i, a, b, d, k, s in zip(
            extents, before, behind, dilation, window, stride, strict=True))
        self.g = Geometry(window, stride, dilation, before, extents, results)
        self.images, self.M, self.C = n, M, channels
        self.P, self.S = n * prod(results), n * prod(extents)
        self.x, self.w, self.dy = (rng.integers(-2, 3, shape).astype(np.float64) for shape in (
            (n, *extents, channels), (M, self.g.taps * channels), (self.P, M)))
        self.U = unfolded(self.x, self.g)
        self.X, self.W, self.G = (ts.tensor(a.astype(np.float32), bf16) for a in (
            self.x.reshape(self.S, channels), self.w, self.dy))

    @property
    def dx(self) -> np.ndarray:
        """Each element of the unfolded cotangent, added where it came from."""
        rows = unfolded(np.arange(1.0, self.S * self.C + 1).reshape(self.x.shape), self.g)
        out = np.zeros(self.S * self.C + 1)
        np.add.at(out, rows.astype(np.int64).reshape(-1), (self.dy @ self.w).reshape(-1))
        return out[1:].reshape(self.S, self.C)


def unfolded(x: np.ndarray, g: Geometry) -> np.ndarray:
    """[N OH OW, KH KW C], window by window."""
    n, _, _, C = x.shape
    out = np.zeros((n, *g.results, *g.window, C))
    for i, oh, ow, r, s in np.ndindex(n, *g.results, *g.window):
        h = oh * g.stride[0] - g.before[0] + r * g.dilation[0]
        w = ow * g.stride[1] - g.before[1] + s * g.dilation[1]
        if 0 <= h < g.images[0] and 0 <= w < g.images[1]:
            out[i, oh, ow, r, s] = x[i, h, w]
    return out.reshape(n * prod(g.results), g.taps * C)


def everywhere(kernel: Any, grid: tuple[int, ...], want: np.ndarray, out: Any, *args: Any,
               specialised: bool = True, **sizes: Any) -> None:
    """The kernel gives what is wanted, into arrays full of NaN, in each form."""
    def fresh() -> tuple[Any, list[Any]]:
        made = ts.full(want.shape, np.nan, out)
        return made, [made if a is None else a for a in args]

    def check(made: Any) -> None:
        np.testing.assert_array_equal(np.asarray(made.array, np.float64), want)

    made, given = fresh()
    kernel[grid](*given, **sizes)
    check(made)
    if specialised:
        made, given = fresh()
        run(kernel, program(kernel, *given, facts=FACTS, **sizes), grid, *given, **sizes)
        check(made)
    made, given = fresh()
    function = verify(gather_windows(kernel.lower(*given, **sizes)))
    assert not [n for n in walk(function.body) if isinstance(n, Op) and n.name == "windows"]
    bound = kernel.bind(given, sizes)
    machine = Machine(np.arange(prod(grid)), 1, grid, _environment(function, bound)[0])
    machine.run(function.body)
    bound.write_back()
    check(made)


@pytest.mark.parametrize("sizes", [{"BM": 64, "BN": 64}, {"BM": 128, "BN": 64, "BK": 128},
                                   {"BM": 256, "BN": 64, "BK": 32}], ids=str)
@pytest.mark.parametrize("name", CONVS)
def test_forward(name: str, sizes: dict, rng: Any) -> None:
    c = Conv(rng, name)
    want = c.U @ c.w.T
    everywhere(conv_forward, (-(-c.P // sizes["BM"]), -(-c.M // 64)), want, f32, c.X, c.W, None,
               c.g, **sizes)


@pytest.mark.parametrize("columns", [64, 192])
@pytest.mark.parametrize("name", CONVS)
def test_weights(name: str, columns: int, rng: Any) -> None:
    """In two parts, with columns that lie in one pixel of a window and in several."""
    c = Conv(rng, name)
    depth = -(-c.P // 128) * 64
    parts = [slice(p, p + depth) for p in range(0, c.P, depth)]
    want = np.stack([c.dy[p].T @ c.U[p] for p in parts])
    everywhere(conv_weights, (-(-c.M // 64), -(-c.U.shape[1] // columns), len(want)), want, f32,
               c.X, c.G, None, c.g, depth, BM=64, BN=columns)


@pytest.mark.parametrize("name", ["plain", "odd"])
def test_backward(name: str, rng: Any) -> None:
    c = Conv(rng, name)
    everywhere(conv_backward, (-(-c.S // 64), 1), c.dx, f32, c.G, c.W, None, c.g.backwards, BM=64,
               BN=64)


@pytest.mark.parametrize("out", [bf16, f32], ids=str)
@pytest.mark.parametrize("name", ["strided", "by three", "one pixel"])
def test_backward_of_windows_apart(name: str, out: Any, rng: Any) -> None:
    c = Conv(rng, name)
    patches, classes = c.g.patches, prod(c.g.stride)
    places = c.images * prod(patches.results)
    args = (c.G, c.W, None, c.g, c.g.readers, patches)
    sizes = {"classes": classes, "places": places, "BM": 64, "BN": 64}
    everywhere(conv_backward_strided, (-(-places // 64), 1, classes), c.dx, out, *args, **sizes)
    D = ts.zeros((c.S, c.C), out)
    given = [D if a is None else a for a in args]
    (store,) = (n for n in walk(program(conv_backward_strided, *given, facts=FACTS, **sizes)
                                .function.body) if isinstance(n, Op) and "store" in n.name)
    assert store.name == "store_rows"
    watched = ArgumentFacts(aligned=FACTS.aligned, divisible=FACTS.divisible,
                            watched=frozenset("D"))
    assert lowered(conv_backward_strided, *given, facts=watched, **sizes).reason == (
        "D is written in windows that rows of accumulators do not fill")
    function = conv_backward_strided.lower(*given, **sizes)
    grid, shapes = (-(-places // 64), 1, classes), {"D": (c.S, c.C)}
    names = dict(zip("SCMKP", (c.S, c.C, c.M, c.g.taps * c.C, c.P), strict=True))
    assert overwritten_parameters(function, grid, 128, shapes, names) == {"D"}
    less = (*grid[:2], classes - 1)
    assert not overwritten_parameters(function, less, 128, shapes, names)


def test_patches(rng: Any) -> None:
    x = rng.integers(-2, 3, (2, 9, 10, 3)).astype(np.float64)
    g = Geometry((2, 2), (2, 2), (1, 1), (1, 1), (9, 10), (6, 7))
    want = np.pad(unfolded(x, g), ((0, 0), (0, 4)))
    everywhere(conv_patches, (2,), want, bf16, ts.tensor(x.reshape(-1, 3), bf16), None, g,
               specialised=False, BM=64, BN=16)


def test_pixels_of_a_row_are_brought_together(rng: Any) -> None:
    """4 x 4 windows of 16 channels: 64 elements of a row lie together, 16 from window to window."""
    x, w = rng.integers(-2, 3, (2, 13, 14, 16)), rng.integers(-2, 3, (64, 256))
    g = Geometry((4, 4), (1, 1), (1, 1), (0, 0), (13, 14), (10, 11))
    X, W = (ts.tensor(a.astype(np.float32), bf16) for a in (x.reshape(-1, 16), w))
    Y = ts.zeros((220, 64), f32)
    made = program(conv_forward, X, W, Y, g, BN=64, facts=FACTS)
    ((windows, width),) = (a.windows for a in made.rings[0].loads if a.windows)
    assert (windows.channels, windows.geometry.window) == (64, (4, 1))
    assert windows.steps == (14 * 16, 16)
    assert width == 128
    everywhere(conv_forward, (2, 1), unfolded(x, g) @ w.T, f32, X, W, None, g, BN=64)
    for channels, other in ((16, g._replace(before=(0, 1))), (16, g._replace(dilation=(1, 2))),
                            (16, g._replace(results=(10, 12))), (24, g)):
        plain = Windows.of({"channels": channels, **other._asdict()})
        assert plain.joined(64) == plain


# --- what they mean ---------------------------------------------------------------------------
@ts.kernel
def unfold(X: Tensor["S", "C", f32], Y: Tensor["P", "K", f32], geometry, place=0, column=0,
           rows=8, columns=8):
    Y[0:rows, 0:columns] = tile.load(tile.windows(X, place, column, geometry, rows, columns))


@ts.kernel
def fold(X: Tensor["S", "C", f32], Y: Tensor["P", "K", f32], geometry, rows=8, columns=8):
    tile.store(tile.windows(X, 0, 0, geometry, rows, columns), tile.load(Y[0:rows, 0:columns]))


def test_a_view_is_a_part_of_the_unfolded_matrix(rng: Any) -> None:
    x = rng.standard_normal((2, 4, 5, 3)).astype(np.float32)
    g = Geometry((2, 2), (1, 2), (2, 1), (1, 0), (4, 5), (3, 2))
    want = np.pad(unfolded(x, g), ((0, 9), (0, 9)))
    for place, column in ((0, 0), (5, 7), (9, 10)):
        Y = ts.full((8, 8), np.nan, f32)
        unfold(ts.tensor(x.reshape(-1, 3)), Y, g, place=place, column=column)
        np.testing.assert_array_equal(Y.array, want[place:place + 8, column:column + 8])


def test_elements_are_written_where_they_are_read() -> None:
    X, Y = ts.zeros((16, 2), f32), ts.tensor(np.arange(1.0, 65, dtype=np.float32).reshape(8, 8))
    g = Geometry((2, 2), (2, 2), (1, 1), (0, 0), (4, 4), (2, 2))
    fold(X, Y, g)
    want = unfolded(X.array.reshape(1, 4, 4, 2), g)
    np.testing.assert_array_equal(want, Y.array[:4])
    with pytest.raises(ts.TesseraError, match="a store to windows that overlap"):
        fold(X, Y, Geometry((2, 2), (1, 1), (1, 1), (0, 0), (4, 4), (3, 3)))


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("columns", [8, 16])
def test_gathered_as_machine_code_says(target: str, columns: int, rng: Any) -> None:
    """Columns in one pixel of a window are rows, of several are elements."""
    X = ts.tensor(rng.standard_normal((40, 8)).astype(np.float32))
    g = Geometry((2, 2), (1, 1), (1, 1), (1, 1), (4, 5), (4, 5))
    compare(unfold, X, ts.zeros((16, columns), f32), g, groups=1, lanes=32, target=target,
            place=5, column=8, rows=16, columns=columns)


# --- what they may not be -----------------------------------------------------------------------
def refusal(channels: int = 64, **changes: Any) -> str:
    g = Geometry((3, 3), (1, 1), (1, 1), (1, 1), (9, 9), (9, 9))._replace(**changes)
    X, W, Y = (ts.zeros(s, bf16) for s in ((81, channels), (64, 9 * channels), (81, 64)))
    return lowered(conv_forward, X, W, Y, g, BN=64, facts=FACTS).reason


@ts.kernel
def before_the_first(X: Tensor["S", "C", bf16], W: Tensor["M", "K", bf16],
                     Y: Tensor["P", "M", bf16], geometry, shift=0, BM=64, BN=64, BK=64):
    p, m = tile.group_id(0) * BM, tile.group_id(1) * BN
    acc = tile.zeros((BM, BN), f32)
    for k in range(0, K, BK):
        x = tile.load(tile.windows(X, p - 8, k + shift, geometry, BM, BK))
        acc = tile.dot(x, tile.load(W[m:m+BN, k:k+BK]).T, acc)
    Y[p:p+BM, m:m+BN] = acc


def test_rows_in_front_of_the_first_are_zeros(rng: Any) -> None:
    c = Conv(rng, "plain")
    want = np.concatenate([np.zeros((8, 64)), c.U @ c.w.T])[:c.P]
    want = np.asarray(ts.tensor(want.astype(np.float32), bf16).array, np.float64)
    everywhere(before_the_first, (-(-c.P // 64), 1), want, bf16, c.X, c.W, None, c.g)


def test_what_copies_cannot_unfold_is_refused() -> None:
    assert refusal(40) == "X: copies of windows do not bring 64 columns of 40 channels"
    assert refusal(before=(1, 200)) == ("X: a copy's windows have a padding of at most 127 pixels, "
                                        "not 200")
    assert "a window of at most 255 pixels, not 300" in refusal(dilation=(150, 1), before=(99, 1))
    X, W, Y = (ts.zeros(s, bf16) for s in ((81, 64), (64, 576), (81, 64)))
    g = Geometry((3, 3), (1, 1), (1, 1), (1, 1), (9, 9), (9, 9))
    assert lowered(before_the_first, X, W, Y, g, shift=32, facts=FACTS).reason == (
        "columns of windows of X may not begin at multiples of 64")
    assert "a stride of at most 8 pixels, not 9" in refusal(stride=(9, 1), results=(1, 9))


@ts.kernel
def of_three_axes(X: Tensor["A", "B", 4, f32], Y: Tensor["P", 4, f32], geometry):
    Y[0:8, 0:4] = tile.load(tile.windows(X, 0, 0, geometry, 8, 4))


@ts.kernel
def copied(X: Tensor["S", 4, f32], Y: Tensor["P", 4, f32], geometry):
    held = tile.alloc_shared((8, 4), f32)
    tile.cp_async(held, tile.windows(X, 0, 0, geometry, 8, 4))


@ts.kernel
def of_each_lane(X: Tensor["S", 4, f32], Y: Tensor["P", 4, f32], geometry):
    Y[0:8, 0:4] = tile.load(tile.windows(X, tile.local_id(), 0, geometry, 8, 4))


def test_mistakes() -> None:
    g, Y = Geometry((2, 2), (1, 1), (1, 1), (0, 0), (4, 4), (3, 3)), ts.zeros((9, 4))
    with pytest.raises(ts.TesseraError, match="taken of a tensor of pixels and channels"):
        of_three_axes(ts.zeros((4, 4, 4)), Y, g)
    with pytest.raises(ts.TesseraError, match="cp_async of windows of images"):
        copied(ts.zeros((16, 4)), Y, g)
    with pytest.raises(ts.TesseraError, match="at a place that depends on the lane"):
        of_each_lane(ts.zeros((16, 4)), Y, g)


# --- intrinsics, emulated -----------------------------------------------------------------------
class Copies(emulator.Block):
    """A block that writes down which copies of windows it asks for."""

    def __init__(self, threads: int):
        super().__init__(threads)
        self.asked: list[tuple[int, ...]] = []

    def call(self, instruction: Any, *args: Any) -> Any:
        if instruction.name == "tma_load_windows":
            self.asked.append(tuple(int(np.asarray(a).flat[0]) for a in args))
            return None
        return super().call(instruction, *args)


def test_copies_are_asked_for_the_pixels(rng: Any) -> None:
    """For rows from `place` on: where the first window begins, which pixel of it, which channel;
    behind the last pixel of a window, of no image."""
    g = Geometry((3, 2), (2, 1), (1, 3), (1, 2), (9, 11), (5, 12))
    geometry = (128, *g, (0, 0))
    for place, column in ((0, 0), (59, 128), (60, 64), (137, 640), (100, 704), (-5, 64), (-63, 0),
                          (-256, 128)):
        block = Copies(32)
        block.operate(warp_specialised.ring_copy_windows(1024, 4096, 0, 2, 2048, 64, geometry), 1,
                      77, place, column)
        assert len(block.asked) == 2
        for i, (_, map_, c, w, h, n, _, right, down) in enumerate(block.asked):
            tap, channel = divmod(column + 64 * i, 128)
            assert map_ == 77 and c == channel
            row, x = divmod(place, 12)
            image, y = divmod(row, 5)
            assert (w, h) == (x - 2, 2 * y - 1)
            assert (right, down) == (tap % 2 * 3, tap // 2)
            assert n == (image if tap < 6 else -1)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("place, column", [(0, 0), (3, 96), (128, 64)])
def test_rows_are_stored_to_their_pixels(place: int, column: int, dtype: str, rng: Any) -> None:
    """By two warpgroups, to patches of 2 x 2 pixels of 64 channels that the images cut off."""
    g = Geometry((2, 2), (2, 2), (1, 1), (0, 0), (9, 11), (5, 6))
    layout, columns = warpgroups((128, 32), 2), 32
    bits = np.uint16 if dtype == "bf16" else np.uint32
    tile_ = rng.integers(0, 0x7F80, (128, columns)).astype(bits) << (bits == np.uint32) * 16
    x = decode(tile_.view(ml_dtypes.bfloat16 if dtype == "bf16" else np.float32), dtype)
    found = np.full((5 * 99, 64), -1 & np.iinfo(bits).max, bits)
    block = emulator.Block(256, memory=emulator.GlobalMemory({"found": found}))
    t = block.t
    row = (t >> 2 & 7) | (t >> 5) << 4
    held = [x[row + base[0], (t & 3) * 2 + base[1]] for base in layout.bases]
    operation = warp_specialised.store_windows(layout.text, layout.shape, dtype, (64, *g, (0, 0)))
    block.operate(operation, held, block.memory.pointers["found"], 5 * 99, place + row, column,
                  t & 3)
    block.memory.copy_back()
    want = np.full((5, 9, 11, 64), -1 & np.iinfo(bits).max, bits)
    (a, b), channel = divmod(column // 64, 2), column % 64
    for r in range(128):
        (n, y), z = divmod((place + r) // 6, 5), (place + r) % 6
        if n < 5 and 2 * y + a < 9 and 2 * z + b < 11:
            want[n, 2 * y + a, 2 * z + b, channel:channel + 32] = tile_[r]
    np.testing.assert_array_equal(found, want.reshape(-1, 64))


@pytest.mark.parametrize("channels, width", [(16, 32), (32, 64), (48, 32), (96, 64), (128, 128)])
def test_narrow_pixels_come_in_narrow_panels(channels: int, width: int, rng: Any) -> None:
    """Columns of a step may lie in several pixels of a window, one copy each."""
    c = Conv(rng, "odd", channels)
    Y = ts.zeros((c.P, 64), f32)
    made = program(conv_forward, c.X, c.W, Y, c.g, BM=64, BN=64, facts=FACTS)
    (load,) = (a for a in made.rings[0].loads if a.windows)
    assert (load.width_bytes, load.panels) == (width, 128 // width)
    assert load.panel_box == (64, width // 2)
    everywhere(conv_forward, (1, 1), c.U @ c.w.T, f32, c.X, c.W, None, c.g, BM=64, BN=64)
    everywhere(conv_weights, (1, -(-c.U.shape[1] // 128), 1), (c.dy.T @ c.U)[None], f32, c.X, c.G,
               None, c.g, c.P, BM=64, BN=128)
