"""Fourier transforms by the library's kernels, on the parts as they lie: one pass over the points,
or two for long lines and for planes, in one launch.

Powers of two in f32. Others are cuFFT's, whose arrays hold both parts of a number side by side: it
takes two copies to reach it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from math import prod
from typing import Any

from ....kernels.fft import (
    LONGEST,
    LONGEST_ACROSS,
    LONGEST_PAIR,
    NEAR,
    NEAR_MIXED,
    NEAR_PAIRS,
    NEAR_REAL,
    SPAN_PAIRS,
    SPAN_REAL,
    apart_of,
    fft_lines,
    form_of,
    is_beside,
    launcher_of,
    lines_of,
    mirror_form,
    radices_of,
)
from ....kernels.fft_passes import RADICES, blocks_of, fft_passes
from ....kernels.fft_squares import RADICES as OF_SIDE
from ....kernels.fft_squares import SIDE, THREADS, fft_squares
from ....kernels.fft_stages import POINTS, SECTOR, stage_angles
from ....kernels.mixed_fft import (
    MixedForm,
    across_form,
    mixed_angles,
    mixed_form,
    mixed_lines,
    mixed_real,
    mixed_real_back,
)
from ....kernels.real_fft import (
    filter_lines,
    irfft_lines,
    irfft_pairs,
    real_angles,
    rfft_lines,
    rfft_pairs,
)
from ....kernels.real_passes import blocks_of as real_blocks_of
from ....kernels.real_passes import irfft_passes, rfft_passes
from ....kernels.real_whole import BACK, irfft_whole
from ....numerics import as_type
from ....tensor import Tensor
from ....tile.kernel.kernel import Kernel
from ... import functions as F
from ...expand import Rule, expand_by
from ...ir import Graph, Node, Value, uses
from ...op import GraphOp
from ...ops.spectral import FFT, FFT_PLANES, FILTER, IRFFT, RFFT
from ...simplify import Rewriter, rebuild, remove_dead

F32, I32 = as_type("f32"), as_type("i32")
MOST = 1 << 31  # elements that the kernels do not count to


def use_fft_kernels(graph: Graph) -> Graph:
    """The graph with the transforms that the kernels take as their launches."""
    return expand_by(_planes(_filtered(graph)),
                     lambda node: RULES[node.op] if _is_taken(node) else None)


def _is_taken(node: Node) -> bool:
    if node.op not in RULES:
        return False
    x = node.inputs[0].aval
    if x.dtype.name != "f32" or not all(isinstance(n, int) and n for n in x.shape):
        return False
    if prod(max((v.aval.shape for v in (*node.inputs, *node.outputs)), key=prod)) >= MOST:
        return False
    if node.op is FILTER:
        return _is_power(x.shape[-1], 4, 2 * LONGEST) and node.inputs[1].aval.dtype is x.dtype
    if node.op is FFT_PLANES:
        return _is_plane_shape(x.shape)
    axis = node.attrs["axis"]
    along = axis == x.ndim - 1
    if node.op is FFT:
        return _is_power(x.shape[axis], 2, LONGEST_ACROSS**2) or (
            _form(x.shape[axis], 1 if along else SECTOR) is not None)
    n = (node.inputs[0] if node.op is RFFT else node.outputs[0]).aval.shape[axis]
    return along and (_is_power(n, 4, 2 * LONGEST_ACROSS**2) or _is_mixed(n))


def _is_mixed(n: Any) -> bool:
    return n & n - 1 != 0 and mixed_form(n) is not None


def _form(n: Any, inner: int) -> MixedForm | None:
    """Of complex lines with factors 3 and 5.  inner: of which neighbours in memory are"""
    return mixed_form(n, 2) if inner == 1 else across_form(n, inner)


def _is_power(n: Any, least: int, most: int) -> bool:
    return n & n - 1 == 0 and least <= n <= most


# --- planes --------------------------------------------------------------------------------------
def _planes(graph: Graph) -> Graph:
    """Transforms along one of the last two axes and then along the other as one op, where nothing
    else reads what is between."""
    count = uses(graph)
    made_by = {v: n for n in graph.nodes if n.op is FFT for v in n.outputs}
    first = {n: made_by[n.inputs[0]] for n in graph.nodes
             if n.op is FFT and n.inputs[0] in made_by and _is_plane(made_by[n.inputs[0]], n)
             and all(count[v] == 1 for v in n.inputs)}
    if not first:
        return graph
    nodes = tuple(n if n not in first else Node(
        FFT_PLANES, first[n].inputs, {k: n.attrs[k] for k in ("inverse", "norm")}, n.outputs,
        n.where) for n in graph.nodes)
    return remove_dead(replace(graph, nodes=nodes))


def _is_plane(a: Node, b: Node) -> bool:
    re = b.outputs[0].aval
    return (b.inputs == a.outputs and re.dtype is F32.dtype
            and {a.attrs["axis"], b.attrs["axis"]} == {re.ndim - 2, re.ndim - 1}
            and _is_plane_shape(re.shape)
            and all(isinstance(n, int) for n in re.shape) and 0 < prod(re.shape) < MOST
            and all(a.attrs[k] == b.attrs[k] for k in ("inverse", "norm")))


def _is_plane_shape(shape: Any) -> bool:
    return all(n in RADICES for n in shape[-2:]) or tuple(shape[-2:]) == (SIDE, SIDE)


# --- products of frequencies ---------------------------------------------------------------------
def _filtered(graph: Graph) -> Graph:
    """irfft(rfft(x) h) as one op, where nothing else reads what is between."""
    count = uses(graph)

    def once(rw: Rewriter, v: Value, name: str) -> Node | None:
        node = rw.made_by(v, name)
        return node if node is not None and count[v] == 1 else None

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op is not IRFFT:
            return None
        difference, total = once(rw, inputs[0], "sub"), once(rw, inputs[1], "add")
        if difference is None or total is None:
            return None
        products = [once(rw, v, "mul") for v in (*difference.inputs, *total.inputs)]
        if None in products:
            return None
        made = {v: rw.producer[v] for p in products for v in p.inputs  # type: ignore[union-attr]
                if rw.made_by(v, "rfft") is not None}
        source = next(iter(made.values()), None)
        if source is None or set(made) != set(source.outputs) or any(
                count[v] != 2 for v in source.outputs):
            return None
        h = _factors(products, *source.outputs)  # type: ignore[arg-type]
        return None if h is None else _as_filter(rw, source, node, h)

    return remove_dead(rebuild(graph, visit))


def _factors(products: list[Node], a: Value, b: Value) -> tuple[Value, Value] | None:
    """(re, im) of a re - b im, a im + b re; these are the products in their order, a sum's in any.
    """
    def other(p: Node, of: Value) -> Value | None:
        return next((p.inputs[1 - i] for i in (0, 1) if p.inputs[i] is of), None)

    re, im = other(products[0], a), other(products[1], b)
    cross = [{other(p, v) for p in products[2:]} - {None} for v in (a, b)]
    fits = re is not None and im is not None and cross == [{im}, {re}]
    return (re, im) if fits else None  # type: ignore[return-value]


def _as_filter(rw: Rewriter, source: Node, node: Node, h: tuple[Value, Value]) -> Value | None:
    x, n = source.inputs[0], node.attrs["n"]
    half = source.outputs[0].aval.shape
    shape = h[0].aval.shape
    fits = shape == h[1].aval.shape and shape == half[len(half) - len(shape):] and shape and (
        _is_power(n, 4, 2 * LONGEST))
    if not fits or x.aval.shape[-1] != n or source.attrs["axis"] != x.aval.ndim - 1 or (
            node.attrs["axis"] != x.aval.ndim - 1):
        return None
    return rw.emit(FILTER.name, x, *h, norm=source.attrs["norm"], back=node.attrs["norm"])


def _filter(x: Tensor, re: Tensor, im: Tensor, norm: str, back: str) -> Tensor:
    n = int(x.shape[-1])
    count, (lines, lanes) = prod(x.shape) // n, lines_of(n // 2, False)
    y = F.zeros((count, n), F32)
    h = (F.reshape(part, (-1, n // 2 + 1)) for part in (re, im))
    launcher_of(filter_lines, lanes)(
        F.reshape(x, (count, n)), *h, y, _real_angles(n // 2), radices_of(n // 2), N=n // 2,
        lines=count, scale=_scale(n, norm, False) * _scale(n, back, True), BM=lines)
    return F.reshape(y, x.shape)


# --- transforms ----------------------------------------------------------------------------------
def _fft(re: Tensor, im: Tensor, axis: int, inverse: bool, norm: str) -> tuple[Tensor, Tensor]:
    n, inner = int(re.shape[axis]), prod(re.shape[axis + 1:])
    scale = _scale(n, norm, inverse)
    parts = (im, re) if inverse else (re, im)
    if n & n - 1:
        made = _mixed(parts, n, inner, scale)
    elif n <= (LONGEST if inner == 1 else LONGEST_ACROSS):
        made = _lines(parts, n, inner, inner, scale=scale)
    elif inner == 1:
        made = _passes(parts, *_two(n), True, scale)
    else:
        first, rest = _two(n)
        made = _lines(_lines(parts, first, rest * inner, rest * inner, n, inner), rest, inner,
                      first * inner, scale=scale)
    yr, yi = (F.reshape(y, re.shape) for y in made)
    return (yi, yr) if inverse else (yr, yi)


def _fft_planes(re: Tensor, im: Tensor, inverse: bool, norm: str) -> tuple[Tensor, Tensor]:
    rows, columns = int(re.shape[-1]), int(re.shape[-2])
    scale = _scale(rows, norm, inverse) * _scale(columns, norm, inverse)
    parts = (im, re) if inverse else (re, im)
    made = _passes(parts, rows, columns, False, scale) if rows in RADICES else \
        _squares(parts, scale)
    yr, yi = (F.reshape(y, re.shape) for y in made)
    return (yi, yr) if inverse else (yr, yi)


def _squares(x: tuple[Tensor, Tensor], scale: float) -> tuple[Tensor, Tensor]:
    count = prod(x[0].shape) // SIDE**2
    yr, yi = (F.zeros((count, SIDE**2), F32) for _ in x)
    launcher_of(fft_squares, THREADS)(
        *(F.reshape(part, (count, SIDE**2)) for part in x), yr, yi,
        _angles(SIDE, OF_SIDE, POINTS), planes=count, scale=scale)
    return yr, yi


def _passes(x: tuple[Tensor, Tensor], n: int, rest: int, along: bool,
            scale: float) -> tuple[Tensor, Tensor]:
    """Both passes over arrays of `rest` lines of n points; see fft_passes."""
    size = n * rest
    count = prod(x[0].shape) // size
    lanes, given = blocks_of(n, rest, count)
    xr, xi = (F.reshape(part, (count, size)) for part in x)
    yr, yi = (F.zeros((count, size), F32) for _ in x)
    launcher_of(fft_passes, lanes, given["points"])(
        xr, xi, yr, yi, F.zeros((count,), I32), _angles(n, given["radices"], given["points"]),
        _angles(rest, given["radices_"], given["points"]), along=along, scale=scale, **given)
    return yr, yi


def _lines(x: tuple[Tensor, Tensor], n: int, inner: int, outer: int, whole: int = 1,
           apart: int = 1, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The transforms of lines of n points, see fft_lines."""
    count, across = prod(x[0].shape) // n, inner > 1 or outer > 1
    radices, points = form_of(n, across)
    lines, lanes = lines_of(n, across, points)
    xr, xi = (F.reshape(part, (-1, n * inner)) for part in x)
    yr, yi = (F.zeros((count // outer, n * outer), F32) for _ in x)
    launcher_of(fft_lines, lanes, points)(
        xr, xi, yr, yi, _angles(n, radices, points), radices, N=n, inner=inner, outer=outer,
        lines=count, whole=whole, apart=apart, scale=scale, BM=lines, points=points,
        beside=not across and is_beside(n, radices, points),
        near=0 if across else NEAR.get(n, 0))
    return yr, yi


def _mixed(x: tuple[Tensor, Tensor], n: int, inner: int, scale: float) -> tuple[Tensor, Tensor]:
    count, form = prod(x[0].shape) // n, _form(n, inner)
    assert form is not None
    given, launcher = _mixed_block(mixed_lines, n, count, form)
    yr, yi = (F.zeros((count // inner, n * inner), F32) for _ in x)
    launcher(*(F.reshape(part, (-1, n * inner)) for part in x), yr, yi, scale=scale, inner=inner,
             side=form.side, near=NEAR_MIXED.get(n, 0), **given)
    return yr, yi


def _mixed_block(kernel: Kernel, n: int, count: int, form: MixedForm | None
                 ) -> tuple[dict[str, Any], Any]:
    """What a kernel is given whose lines have factors 3 and 5, its launcher."""
    assert form is not None
    angles = Tensor(mixed_angles(n, form.radices).copy(), F32)
    given = {"angles": angles, "radices": form.radices, "pads": form.pads, "N": n, "lines": count,
             "BM": form.BM, "P": form.P, "T": form.T}
    return given, launcher_of(kernel, form.lanes, groups=form.groups)


def _angles(n: int, radices: tuple[int, ...], points: int) -> Tensor:
    """A copy of its own: what others hold might be written to, and is brought to a GPU anew."""
    return Tensor(stage_angles(n, radices, points).copy(), F32)


def _real_angles(n: int) -> Tensor:
    return Tensor(real_angles(n, radices_of(n)).copy(), F32)


def _scale(n: int, norm: str, inverse: bool) -> float:
    if norm == "ortho":
        return 1 / math.sqrt(n)
    return 1 / n if (norm == "backward") == inverse else 1.0


# --- of real points ------------------------------------------------------------------------------
def _rfft(x: Tensor, axis: int, norm: str) -> tuple[Tensor, ...]:
    n = int(x.shape[-1])
    count, shape = prod(x.shape) // n, (*x.shape[:-1], n // 2 + 1)
    yr, yi = (F.zeros((count, n // 2 + 1), F32) for _ in "ri")
    given, launcher = _real_block(n, count, False)
    launcher(F.reshape(x, (count, n)), yr, yi, scale=_scale(n, norm, False), **given)
    return tuple(F.reshape(y, shape) for y in (yr, yi))


def _irfft(re: Tensor, im: Tensor, axis: int, n: int, norm: str) -> Tensor:
    count = prod(re.shape[:-1])
    y = F.zeros((count, n), F32)
    given, launcher = _real_block(n, count, True)
    launcher(*(F.reshape(part, (count, n // 2 + 1)) for part in (re, im)), y,
             scale=_scale(n, norm, True), **given)
    return F.reshape(y, (*re.shape[:-1], n))


def _real_block(n: int, count: int, back: bool) -> tuple[dict[str, Any], Any]:
    """What the kernel is given of `count` lines of n real points, and its launcher. Two lines are
    the parts of a complex one where they are short, else half of a line's points each."""
    if n & n - 1:
        return _mixed_block(mixed_real_back if back else mixed_real, n, count, mixed_form(n))
    if n > 2 * LONGEST:
        return _real_passes(n // 2, count, back)
    if count > 1 and POINTS <= n <= LONGEST_PAIR:
        radices, points, lanes = mirror_form(n, back)
        lines, lanes = lines_of(n, False, points, lanes)
        given = {"angles": _angles(n, radices, points), "radices": radices, "N": n, "lines": count,
                 "BM": lines, "points": points}
        if not back:
            span = n in SPAN_PAIRS
            given |= {"apart": 1 if span else apart_of(n, count), "span": span}
            given["beside"] = is_beside(n, radices, points)
            given |= {"near": NEAR_PAIRS.get(n, 0), "early": n in NEAR_PAIRS}
        return given, launcher_of(irfft_pairs if back else rfft_pairs, lanes, points)
    return _real_lines(n // 2, count, back)


def _real_lines(half: int, count: int, back: bool) -> tuple[dict[str, Any], Any]:
    """The same for lines in one piece, of so many pairs of points."""
    if back and half in BACK:
        (radices, points), kernel = BACK[half], irfft_whole
    else:
        (radices, points), kernel = form_of(half, False), irfft_lines if back else rfft_lines
    table = stage_angles if kernel is irfft_whole and points > POINTS else real_angles
    lines, lanes = lines_of(half, False, points)
    given = {"angles": Tensor(table(half, radices, points).copy(), F32), "radices": radices,
             "N": half, "lines": count, "BM": lines, "points": points}
    if not back:
        given |= {"near": NEAR_REAL.get(half, 0), "span": half in SPAN_REAL}
    return given, launcher_of(kernel, lanes, points)


def _real_passes(size: int, count: int, back: bool) -> tuple[dict[str, Any], Any]:
    lanes, given = real_blocks_of(size, count, back)
    points = given["points"]
    given |= {"done": F.zeros((count,), I32),
              "angles": _angles(given["N"], given["radices"], points),
              "angles_": _angles(given["N_"], given["radices_"], points)}
    return given, launcher_of(irfft_passes if back else rfft_passes, lanes, points)


def _two(n: int) -> tuple[int, int]:
    first = 1 << (n.bit_length() - 1) // 2
    return first, n // first


RULES: dict[GraphOp, Rule] = {FFT: _fft, FFT_PLANES: _fft_planes, RFFT: _rfft, IRFFT: _irfft,
                              FILTER: _filter}

__all__ = ["use_fft_kernels"]
