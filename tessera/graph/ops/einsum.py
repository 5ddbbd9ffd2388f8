"""einsum, tensordot, outer: index expressions as transposes, sums and matrix products.

The expression is parsed here; the order of pairwise contractions comes from opt_einsum. A pair is
one matmul [batch, M, K] x [batch, K, N] over groups of letters, or a broadcast product when no
letter is summed.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

from ...dims import Dim, show_shape, size_of
from ...errors import ArgumentError, AxisError, ShapeError
from ...lazy_dataclass import dataclass
from ...numerics import DType, NumericType, as_type
from ...tensor import Tensor, as_tensor
from .. import functions as F
from ..operand import axis_index, countable, dequantized, promote, public, store, to_compute
from ..trace import apply
from .contract import matmul_compute, matmul_type, operand_as, widened
from .index import DIAGONAL
from .reduce import SUM
from .scaled_matmul import multiplies_scaled, scaled_product

NOMINAL = 64  # stands for a symbolic extent when costs of contraction orders are compared


@dataclass(frozen=True)
class EinsumSpec:
    """A parsed expression: letters of each operand and of the result, '.' for the ellipsis."""

    inputs: tuple[str, ...]
    output: str


def parse_spec(text: str, ndims: Sequence[int]) -> EinsumSpec:
    """`"bij,bjk->bik"`, `"...ij->...ji"`, `"ij,jk"` (result: letters that stand once, sorted).

    The axes behind an ellipsis become capital letters of their own, aligned at the end.
    Raises ArgumentError with the expression and what is wrong in it.
    """
    def fail(problem: str, hint: str = 'for example "bij,bjk->bik"') -> ArgumentError:
        return ArgumentError(f"einsum {text!r}: {problem}", hint=hint)

    plain = text.replace(" ", "").replace("...", ".")
    if not re.fullmatch(r"[A-Za-z.,]*(->[A-Za-z.]*)?", plain):
        raise fail("letters, commas, '...' and one '->' only")
    left, arrow, output = plain.partition("->")
    inputs = left.split(",")
    if len(inputs) != len(ndims):
        raise fail(f"it names {len(inputs)} operands, {len(ndims)} are given")
    if any(t.count(".") > 1 for t in (*inputs, output)):
        raise fail("an operand has at most one ellipsis")
    counts = [n - len(t.replace(".", "")) for t, n in zip(inputs, ndims, strict=True)]
    for i, (t, extra, n) in enumerate(zip(inputs, counts, ndims, strict=True)):
        if extra < 0 or (extra and "." not in t):
            raise fail(f"operand {i} has {n} axes, {t.replace('.', '...')!r} names "
                       f"{n - extra}{' or more' if '.' in t else ''}")
    hidden = max((c for c, t in zip(counts, inputs, strict=True) if "." in t), default=0)
    free = [c for c in string.ascii_uppercase + string.ascii_lowercase if c not in plain][:hidden]
    if not arrow:
        once = [c for c in sorted(set(left) - {",", "."}) if left.count(c) == 1]
        output = ("." if "." in left else "") + "".join(once)
    if "." in output and "." not in left:
        raise fail("the result has an ellipsis, no operand has one")
    repeated = [c for c in set(output) if output.count(c) > 1]
    unknown = sorted(set(output) - set(left))
    if repeated or unknown:
        raise fail(f"letter {(repeated or unknown)[0]!r} "
                   + ("stands twice in the result" if repeated else "is in no operand"))
    dots = "".join(free)
    return EinsumSpec(
        tuple(t.replace(".", dots[hidden - c:]) for t, c in zip(inputs, counts, strict=True)),
        output.replace(".", dots),
    )


# --- letters ----------------------------------------------------------------------------------
Labelled = tuple[Tensor, str]


def _bind_extents(spec: EinsumSpec, xs: Sequence[Tensor], text: str) -> dict[str, Any]:
    """Letter -> extent; an extent of 1 stretches (as in NumPy). Raises ShapeError."""
    sizes: dict[str, Any] = {}
    for i, (letters, x) in enumerate(zip(spec.inputs, xs, strict=True)):
        own: dict[str, Any] = {}
        for c, n in zip(letters, x.shape, strict=True):
            have = sizes.get(c, 1)
            if own.setdefault(c, n) != n:
                raise ShapeError(f"einsum {text!r}: the diagonal {c!r} of operand {i} "
                                 f"{show_shape(x.shape)} is not square")
            if have != 1 and n != 1 and have != n:
                raise ShapeError(f"einsum {text!r}: letter {c!r} is {have} and, in operand {i} "
                                 f"{show_shape(x.shape)}, {n}")
            sizes[c] = n if have == 1 else have
    return sizes


def _prepare(x: Tensor, letters: str, sizes: dict[str, Any]) -> Labelled:
    """Repeated letters as diagonals; axes of extent 1 that stretch dropped."""
    for c in dict.fromkeys(letters):
        while letters.count(c) > 1:
            a = letters.index(c)
            b = letters.index(c, a + 1)
            x = apply(DIAGONAL, dequantized(x), offset=0, axis1=a, axis2=b)  # becomes the last axis
            letters = letters[:a] + letters[a + 1:b] + letters[b + 1:] + c
    keep = [i for i, c in enumerate(letters) if x.shape[i] == sizes[c]]
    if len(keep) < len(letters):
        x = F.reshape(x, [x.shape[i] for i in keep])
        letters = "".join(letters[i] for i in keep)
    return x, letters


def _sum_out(x: Tensor, letters: str, gone: str, accum: DType) -> Labelled:
    axes = tuple(i for i, c in enumerate(letters) if c in gone)
    if not axes:
        return x, letters
    total = apply(SUM, widened(dequantized(x)), axis=axes, keepdims=False, accum=accum)
    return total, "".join(c for c in letters if c not in gone)


def _arrange(x: Tensor, letters: str, order: str) -> Tensor:
    return F.transpose(x, [letters.index(c) for c in order])


def _contract(a: Labelled, b: Labelled, keep: set[str], accum: DType) -> Labelled:
    """One pair; `keep` holds the letters that the result or a later operand needs."""
    (x, left), (y, right) = a, b
    x, left = _sum_out(x, left, "".join(c for c in left if c not in keep and c not in right), accum)
    y, right = _sum_out(y, right, "".join(c for c in right if c not in keep and c not in left),
                        accum)
    both = [c for c in left if c in right]
    batch = "".join(c for c in both if c in keep)
    summed = "".join(c for c in both if c not in keep)
    m = "".join(c for c in left if c not in right)
    n = "".join(c for c in right if c not in left)
    if x.dtype is not y.dtype and not multiplies_scaled(x, y):  # a sum by now, and an operand
        x, y = widened(dequantized(x)), widened(dequantized(y))
    if not summed:
        return _product(x, left, y, right, batch + m + n), batch + m + n
    if batch and not m and not n:  # many short dot products: a loop, not a matmul for each
        return _sum_out(_product(x, left, y, right, batch + summed), batch + summed, summed, accum)
    extents = dict(zip(left, x.shape, strict=True)) | dict(zip(right, y.shape, strict=True))
    rows, columns, depth = ([extents[c] for c in group] for group in (m, n, summed))
    lead = [extents[c] for c in batch]
    x = F.reshape(_arrange(x, left, batch + m + summed),
                          (*lead, size_of(rows), size_of(depth)))
    y = F.reshape(_arrange(y, right, batch + summed + n),
                          (*lead, size_of(depth), size_of(columns)))
    out = scaled_product(x, y) if multiplies_scaled(x, y) else matmul_compute(x, y, accum)
    return F.reshape(out, (*lead, *rows, *columns)), batch + m + n


def _product(x: Tensor, left: str, y: Tensor, right: str, order: str) -> Tensor:
    """Letters in `order`, every one of them broadcast: no sum."""
    def spread(t: Tensor, letters: str) -> Tensor:
        t = _arrange(t, letters, "".join(c for c in order if c in letters))
        shape, it = [], iter(t.shape)
        for c in order:
            shape.append(next(it) if c in letters else 1)
        return F.reshape(t, shape)

    return F.multiply(spread(widened(dequantized(x)), left), spread(widened(dequantized(y)), right))


# --- order ------------------------------------------------------------------------------------
def contraction_path(spec: EinsumSpec, sizes: dict[str, Any],
                     optimize: str) -> list[tuple[int, ...]]:
    """Pairs of operand positions, as opt_einsum orders them; a symbolic extent counts as 64."""
    count = len(spec.inputs)
    if count <= 2:
        return [tuple(range(count))]
    import opt_einsum

    shapes = [
        tuple(NOMINAL if isinstance(sizes[c], Dim) else sizes[c] for c in letters)
        for letters in spec.inputs
    ]
    text = ",".join(spec.inputs) + "->" + spec.output
    path, _ = opt_einsum.contract_path(text, *shapes, shapes=True, optimize=optimize)
    return [tuple(p) for p in path]


def _operands(xs: list[Tensor], parsed: EinsumSpec) -> tuple[list[Tensor], NumericType, DType]:
    """Operands in one type, as matmul takes them, the result's type and the accumulate type."""
    if len(xs) == 2 and multiplies_scaled(*xs):
        wide = as_type("f32")
        return xs, wide, wide.dtype
    if any(x.scale is not None for x in xs):
        xs = [to_compute(x) for x in xs]
    if len(xs) == 1:
        summed = set(parsed.inputs[0]) - set(parsed.output) and xs[0].dtype.kind != "bool"
        (c,), numeric = promote(countable(xs[0]) if summed else xs[0])
        return [c], numeric, numeric.policy.accum or c.dtype
    compute, result, accum = matmul_type(xs[0].type, xs[1].type)
    for x in xs[2:]:
        compute, result, accum = matmul_type(result, x.type)
    return [operand_as(x, compute) for x in xs], result, accum


@public
def einsum(spec: str, *tensors: Any, optimize: str = "auto") -> Tensor:
    """Sum of products over index letters: `ts.einsum("bij,bjk->bik", a, b)`.

    A letter that stands twice in an operand takes the diagonal; '...' stands for axes that
    broadcast; without '->' the result has the letters that stand once, in alphabetical order.
    optimize: how opt_einsum orders three or more operands ("auto", "greedy", "optimal", ...)
    Computes in the accumulate type and rounds once to the operands' common type; int8 gives
    int32, and so do sums of narrow integers. Raises ArgumentError for a malformed expression,
    ShapeError when extents disagree.
    """
    if not isinstance(spec, str):
        raise ArgumentError(f"einsum's first argument is the expression, got {type(spec).__name__}",
                            hint='ts.einsum("ij,jk->ik", a, b)')
    if not tensors:
        raise ArgumentError(f"einsum {spec!r} needs operands")
    given = [as_tensor(t) for t in tensors]
    parsed = parse_spec(spec, [x.ndim for x in given])
    xs, result, accum = _operands(given, parsed)
    sizes = _bind_extents(parsed, xs, spec)
    path = contraction_path(parsed, sizes, optimize)
    held = [_prepare(x, t, sizes) for x, t in zip(xs, parsed.inputs, strict=True)]
    for places in path:
        picked = [held.pop(i) for i in sorted(places, reverse=True)][::-1]
        held.append(_reduce_group(picked, held, parsed.output, accum))
    (x, letters), = held
    gone = "".join(c for c in letters if c not in parsed.output)
    x, letters = _sum_out(x, letters, gone, accum)
    return store(_arrange(x, letters, parsed.output), result)


def _reduce_group(group: list[Labelled], others: list[Labelled], output: str,
                  accum: DType) -> Labelled:
    while len(group) > 1:
        keep = set(output).union(*(t for _, t in others), *(t for _, t in group[2:]))
        group = [_contract(group[0], group[1], keep, accum), *group[2:]]
    return group[0]


# --- tensordot, outer -------------------------------------------------------------------------
@public
def tensordot(a: Any, b: Any, axes: Any = 2) -> Tensor:
    """Sum over the last `axes` axes of a with the first of b, or over (axes of a, axes of b).

    Rules and types of matmul; np.tensordot. Raises ShapeError, AxisError, ArgumentError.
    """
    x, y = as_tensor(a), as_tensor(b)
    left, right = _dot_axes(axes, x.ndim, y.ndim)
    for i, j in zip(left, right, strict=True):
        if x.shape[i] != y.shape[j]:
            raise ShapeError(f"axis {i} of {show_shape(x.shape)} and axis {j} of "
                             f"{show_shape(y.shape)} differ")
    names = iter(string.ascii_letters)
    first = [next(names) for _ in range(x.ndim)]
    second = [first[left[right.index(j)]] if j in right else next(names) for j in range(y.ndim)]
    kept = [c for c in first if c not in second] + [c for c in second if c not in first]
    return einsum(f"{''.join(first)},{''.join(second)}->{''.join(kept)}", x, y)


def _dot_axes(axes: Any, nx: int, ny: int) -> tuple[list[int], list[int]]:
    if isinstance(axes, int) and not isinstance(axes, bool):
        if not 0 <= axes <= min(nx, ny):
            raise AxisError(f"tensordot over {axes} axes of tensors with {nx} and {ny}")
        return list(range(nx - axes, nx)), list(range(axes))
    if not isinstance(axes, tuple | list) or len(axes) != 2:
        raise ArgumentError(f"tensordot axes {axes!r}", hint="a number, or (axes of a, axes of b)")
    pair = [[i] if isinstance(i, int) else list(i) for i in axes]
    left, right = [axis_index(i, nx) for i in pair[0]], [axis_index(j, ny) for j in pair[1]]
    if len(left) != len(right) or len(set(left)) != len(left) or len(set(right)) != len(right):
        raise AxisError(f"tensordot axes {axes!r}: as many different axes of a as of b")
    return left, right


@public
def outer(a: Any, b: Any) -> Tensor:
    """y_ij = a_i b_j of two vectors. a: [M]   b: [N]   y: [M, N]. Raises ShapeError."""
    x, y = as_tensor(a), as_tensor(b)
    if x.ndim != 1 or y.ndim != 1:
        raise ShapeError(
            f"outer takes vectors, got {show_shape(x.shape)} and {show_shape(y.shape)}",
            hint="ts.flatten(x), or an einsum",
        )
    return F.expand_dims(x, 1) * y
