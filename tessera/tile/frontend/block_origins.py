"""Free names tile_<dim> and block_<dim>: origins of the group's block along a named extent (Q32).

The block size is read from slices `x : x + c`, from the bound of the range that is added to the
name, from slices at its multiples, `c x : c x + n`, which are n / c wide, or from the positions
`x + arange(c)`. `i = 32 * x` is another name of what it says. An extent of a tensor
that the kernel writes becomes a grid axis, also one that is a part of an axis ("2*N") along which
all stores go by its blocks, or any where a kernel only adds to tensors by position; any other (a
contraction) becomes one serial loop around the statements from the first use to the last that
depends on it, ended by a barrier, so that its next iteration may overwrite shared memory.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tessera.dims import Dim
from tessera.tile.frontend.tracer import KernelTracer
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import GlobalTensor

PREFIXES = ("tile_", "block_")


def bind(t: KernelTracer, body: list[ast.stmt]) -> list[ast.stmt]:
    """Binds the origins that `body` uses; the body with loops for those that are not grid axes."""
    used = _used(t, body)
    said = _written_out(t, body) if used else body
    written = _written_dims(t, body) if used else set()
    for name, dim in used.items():
        t.position.node = _first_use(body, name)
        if dim not in written and (_goes_along_a_part(t, body, name, dim) or _only_adds(
                t, body, name)):
            written.add(dim)
        if dim in written:
            size = block_size(t, body, said, name)
            axis = t.grid.axis(dim, size)
            start = t.ir.arithmetic("mul", (t.grid.group_coordinate(axis), size))
            t.grid.origins[dim] = t.env[name] = t.ir.named(start, name)
    for name, dim in used.items():
        if dim not in written:
            body = _serial(t, body, name, dim, block_size(t, body, said, name))
    t.position.node = t.position.source.tree
    return body


def _written_out(t: KernelTracer, body: list[ast.stmt]) -> list[ast.stmt]:
    """The body with names that are assigned once, to sums and products of origins and of what does
    not change, replaced by these."""
    names = [n for s in body for n in ast.walk(s) if isinstance(n, ast.Name | ast.arg)]
    stores = Counter(n.arg if isinstance(n, ast.arg) else n.id for n in names
                     if isinstance(n, ast.arg) or isinstance(n.ctx, ast.Store))
    known: dict[str, ast.expr] = {}
    for s in body:
        for name, value in _pairs(s) if isinstance(s, ast.Assign) else ():
            parts = [*ast.walk(_Replaced(known).visit(copy.deepcopy(value)))]
            free = [n.id for n in parts if isinstance(n, ast.Name)]
            if stores[name] == 1 and name not in t.env and any(
                    n.startswith(PREFIXES) for n in free) and not any(n in stores for n in free) \
                    and all(isinstance(n, SUMS) for n in parts):
                known[name] = parts[0]  # type: ignore[assignment]
    return [_Replaced(known).visit(copy.deepcopy(s)) for s in body] if known else body


SUMS = (ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.Add, ast.Sub, ast.Mult)


class _Replaced(ast.NodeTransformer):
    def __init__(self, known: dict[str, ast.expr]) -> None:
        self.known = known

    def visit_Name(self, n: ast.Name) -> ast.expr:
        if n.id not in self.known or not isinstance(n.ctx, ast.Load):
            return n
        made = copy.deepcopy(self.known[n.id])
        for part in ast.walk(made):
            ast.copy_location(part, n)
        return made


def _used(t: KernelTracer, body: list[ast.stmt]) -> dict[str, str]:
    """Names of origins, to the extents they belong to, in order of the extents."""
    dims = [*t.grid.loaded_dims, *t.grid.fixed]
    lower = {d.lower(): d for d in dims}
    found = {}
    names = [n for s in body for n in ast.walk(s) if isinstance(n, ast.Name)]
    stored = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    for name in dict.fromkeys(n.id for n in names if n.id.startswith(PREFIXES)):
        if name in stored or name in t.env or name in t.globals:
            continue
        for prefix in PREFIXES:
            if name.startswith(prefix) and name[len(prefix):] in lower:
                found[name] = lower[name[len(prefix):]]
    if not found:
        return {}
    order = [str(d) for _,
             kind in t.spec.params if isinstance(kind, GlobalTensor) for d in kind.dims]
    written = _order_of_written(t, body)
    rank = {d: i for i, d in enumerate([*written, *order])} if written else {}
    return dict(sorted(found.items(), key=lambda item: rank.get(item[1], 99)))


def _order_of_written(t: KernelTracer, body: list[ast.stmt]) -> list[str]:
    return [d for name in _written_parameters(t, body) for d in _dims_of(t, name)]


def _written_dims(t: KernelTracer, body: list[ast.stmt]) -> set[str]:
    found = set(_order_of_written(t, body))
    return found or {d for name, k in t.spec.params if isinstance(k, GlobalTensor)
                     for d in _dims_of(t, name)}


def _goes_along_a_part(t: KernelTracer, body: list[ast.stmt], name: str, dim: str) -> bool:
    """Whether all that is written is of blocks along a part of an axis, and none needs another:
    nothing is carried from block to block, or read of what is written but at the same places."""
    stores = _stores(t, body)
    tensors = {n.value.id for n in stores if isinstance(n.value, ast.Name)}
    if not stores or tensors != {*_written_parameters(t, body)} or not all(
            _names(n.slice, name) for n in stores) or not all(
            any(isinstance(d, Dim) and (dim,) in dict(d.terms) for d in kind.dims)
            for n, kind in t.spec.params if n in tensors and isinstance(kind, GlobalTensor)):
        return False
    places = {ast.dump(n.slice) for n in stores}
    read = [n for s in body for n in ast.walk(s) if isinstance(n, ast.Subscript)
            and isinstance(n.value, ast.Name) and n.value.id in tensors]
    kept = _carried_names(body, name)
    calls = {n.args[0].id for s in body for n in ast.walk(s) if isinstance(n, ast.Call)
             and n.args and isinstance(n.args[0], ast.Name)}
    return not kept and not calls & tensors and all(ast.dump(n.slice) in places for n in read)


def _carried_names(body: list[ast.stmt], name: str) -> set[str]:
    """Names that blocks of an extent hand on to each other."""
    first = next(i for i, s in enumerate(body) if _reads(s, {name}))
    assigned = [*map(_assigned, body)]
    return set().union(*assigned[:first]) & set().union(*assigned[first:])


def _only_adds(t: KernelTracer, body: list[ast.stmt], name: str) -> bool:
    """Whether all that a kernel does is to add to tensors by position, in any order, what it does
    not read, and each time what comes of the block: anything else is added once."""
    tensors, of_block = set(_written_parameters(t, body)), {name}
    for s in body:
        if _reads(s, of_block):
            of_block |= _assigned(s)
    adds = [s.value for s in body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)
            and _call_name(s.value).startswith("scatter") and any(
                k.arg == "mode" and isinstance(k.value, ast.Constant) and k.value.value == "add"
                for k in s.value.keywords)]
    into = [n for call in adds for n in ast.walk(call.args[0]) if isinstance(n, ast.Name)]
    named = [n for s in body for n in ast.walk(s) if isinstance(n, ast.Name) and n.id in tensors]
    return bool(adds) and all(n in into for n in named) and not _carried_names(body, name) and all(
        _reads(call, of_block) for call in adds)


def _stores(t: KernelTracer, body: list[ast.stmt]) -> list[ast.Subscript]:
    """The places of tensor parameters that the body writes."""
    tensors = set(_written_parameters(t, body))
    return [n for s in body for n in ast.walk(s) if isinstance(n, ast.Subscript) and isinstance(
        n.value, ast.Name) and n.value.id in tensors and isinstance(n.ctx, ast.Store)]


def _dims_of(t: KernelTracer, name: str) -> list[str]:
    kind = dict(t.spec.params).get(name)
    return [str(d) for d in kind.dims if isinstance(d, Dim)] \
        if isinstance(kind, GlobalTensor) else []


def _written_parameters(t: KernelTracer, body: list[ast.stmt]) -> list[str]:
    """Names of tensor parameters that the body writes."""
    tensors = {n for n, k in t.spec.params if isinstance(k, GlobalTensor)}
    found: dict[str, None] = {}
    for s in body:
        for n in ast.walk(s):
            targets: list[ast.expr] = []
            if isinstance(n, ast.Assign):
                targets = n.targets
            elif isinstance(n, ast.AugAssign):
                targets = [n.target]
            elif isinstance(n, ast.Call) and n.args and _call_name(n).startswith(
                    ("store", "atomic_", "scatter")):
                targets = [n.args[0]]
            for target in targets:
                base = target.value if isinstance(target, ast.Subscript) else target
                if isinstance(base, ast.Name) and base.id in tensors:
                    found[base.id] = None
    return list(found)


def _call_name(n: ast.Call) -> str:
    return n.func.attr if isinstance(n.func, ast.Attribute) else getattr(n.func, "id", "")


def _first_use(body: list[ast.stmt], name: str) -> Any:
    return next(n for s in body for n in ast.walk(s) if isinstance(n, ast.Name) and n.id == name)


def block_size(t: KernelTracer, body: list[ast.stmt], said: list[ast.stmt], name: str) -> int:
    """The extent of the blocks, as the body tells it; where it does not, as it does with names
    written out, `said`."""
    sizes = _sizes(t, body, name)
    if not sizes:
        body, sizes = said, _sizes(t, said, name)
    if len(sizes) > 1:
        t.position.node = list(sizes.values())[-1]
        t.fail(f"blocks of {' and '.join(map(str, sizes))} begin at {name}",
               "one extent has one block size in a kernel; a part that reaches further is written "
               f"by its own ends, x[{name} - 1:{name} + {min(filter(None, sizes)) + 1}]")
    if not sizes:
        t.fail(f"the block size of {name} is not known",
               f"use it in a slice with a constant extent: x[{name}:{name}+64], or "
               f"x[{name}:{name}+B] with B: int or B=64 in the signature; or alone as an index, "
               f"x[{name}], where a block is one")
    (size,) = sizes
    assert size is not None
    _require_blocks_stored(t, body, name, size)
    return size


def _sizes(t: KernelTracer, body: list[ast.stmt], name: str) -> dict[int | None, Any]:
    """c of x : x + c, or the bound of the range added to x; 1 where x alone is an index of what is
    written, or of all that is read; n / c of c x : c x + n; c of x + arange(c)."""
    sizes = _sliced(t, body, name)
    if not sizes:
        sizes = _added_ranges(t, body, name)
        stored = {id(n) for s in body for n in ast.walk(s)
                  if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)}
        for n in _indexed(body, name):
            if not sizes or id(n) in stored:
                sizes[1] = n
    return sizes or _multiples(t, body, name) or _positions(t, body, name)


def _require_blocks_stored(t: KernelTracer, body: list[ast.stmt], name: str, size: int) -> None:
    """y[x] = number, with blocks of more than one element along that axis of y and no store of
    them, would leave the others as they are."""
    whole: set[tuple[str, int]] = set()
    alone: dict[tuple[str, int], ast.Subscript] = {}
    for n in _stores(t, body):
        kind = dict(t.spec.params)[n.value.id]  # type: ignore[attr-defined]
        at = n.slice.elts if isinstance(n.slice, ast.Tuple) else [n.slice]
        for axis, (e, d) in enumerate(zip(at, getattr(kind, "dims", ()), strict=False)):
            if str(d).lower() != name.split("_", 1)[1]:
                continue
            key = (n.value.id, axis)  # type: ignore[attr-defined]
            if isinstance(e, ast.Name) and e.id == name:
                alone.setdefault(key, n)
            else:
                whole.add(key)
    for (tensor, axis), n in alone.items():
        if size > 1 and (tensor, axis) not in whole:
            t.position.node = n
            t.fail(f"{tensor} is written at {name} alone: that is one of the {size} elements along "
                   f"axis {axis} that are a group's, and the others stay as they are",
                   f"write all of them, {tensor}[{name}:{name}+{size}] = ..., or let a group have "
                   f"one: read x[{name}], or x[{name}:{name}+1]")


def _multiples(t: KernelTracer, body: list[ast.stmt], name: str) -> dict[int | None, Any]:
    """The slices of c x + i : c x + i + n by n / c: of what is written, else of all."""
    stored = {id(s) for n in _stores(t, body) for s in ast.walk(n) if isinstance(s, ast.Slice)}
    found: list[tuple[int, ast.Slice]] = []
    for n in _slices(body):
        if n.lower is None or not isinstance(n.upper, ast.BinOp) or not isinstance(
                n.upper.op, ast.Add) or ast.dump(n.upper.left) != ast.dump(n.lower):
            continue
        times, extent = _times(t, n.lower, name), _constant(t, n.upper.right)
        if times and times not in (1, -1) and extent and extent > 0 and extent % times == 0:
            found.append((extent // times, n))
    return {size: n for size, n in found if id(n) in stored} or {size: n for size, n in found}


def _positions(t: KernelTracer, body: list[ast.stmt], name: str) -> dict[int | None, Any]:
    """The sums x + arange(c) by c."""
    found: dict[int | None, Any] = {}
    for s in body:
        for n in ast.walk(s):
            other = _other_operand(n, name) if isinstance(n, ast.BinOp) and isinstance(
                n.op, ast.Add) else None
            other = other.value if isinstance(other, ast.Subscript) else other
            if isinstance(other, ast.Call) and _call_name(other) == "arange" and len(
                    other.args) == 1:
                found[_constant(t, other.args[0])] = n
    found.pop(None, None)
    return found


def _times(t: KernelTracer, e: ast.expr, name: str) -> int | None:
    """How often x is in a sum: 32 for 32 * x + i; None where that cannot be told."""
    if not _names(e, name):
        return 0
    if isinstance(e, ast.Name):
        return 1
    if isinstance(e, ast.Call) and _call_name(e) in ("min", "max"):
        (one, *others) = {_times(t, a, name) for a in e.args if _names(a, name)}
        return None if others else one
    if not isinstance(e, ast.BinOp):
        return None
    left, right = e.left, e.right
    if isinstance(e.op, ast.Mult):
        times, factor = (left, right) if _names(left, name) else (right, left)
        n, c = _times(t, times, name), _constant(t, factor)
        return None if n is None or c is None else n * c
    a, b = _times(t, left, name), _times(t, right, name)
    if a is None or b is None or not isinstance(e.op, ast.Add | ast.Sub):
        return None
    return a - b if isinstance(e.op, ast.Sub) else a + b


def _sliced(t: KernelTracer, body: list[ast.stmt], name: str) -> dict[int | None, Any]:
    """The slices of x : x + c by c, and of x + i : x + i + c. Where a loop's iterations lay such
    slices side by side, y[x + i : x + i + c] for i in range(0, n, c), all of them are a block; of
    what is only read, where no other slice tells."""
    sizes: dict[int | None, Any] = {}
    beside: dict[int | None, Any] = {}
    stored = {id(s) for n in _stores(t, body) for s in ast.walk(n)}
    for n, loops in _in_loops(body, {}):
        if n.lower is None or not isinstance(n.upper, ast.BinOp) or not isinstance(
                n.upper.op, ast.Add):
            continue
        if isinstance(n.lower, ast.Name) and n.lower.id == name:
            sizes[_constant(t, _other_operand(n.upper, name))] = n
        elif ast.dump(n.upper.left) == ast.dump(n.lower) and _times(t, n.lower, name) in (1, -1):
            size = _constant(t, n.upper.right)
            swept = _swept(t, loops, n.lower, size)
            (sizes if swept == size or id(n) in stored else beside)[swept] = n
    sizes.pop(None, None)
    beside.pop(None, None)
    return sizes or beside


def _in_loops(nodes: list[Any], loops: dict[str, list[ast.expr] | None]
              ) -> Iterator[tuple[ast.Slice, dict[str, list[ast.expr] | None]]]:
    """The slices, each with the variables of the loops around it: the arguments of the range that a
    variable takes, None of other loops."""
    for n in nodes:
        if isinstance(n, ast.Slice):
            yield n, loops
        made = n.generators if isinstance(n, ast.ListComp | ast.GeneratorExp) else [n]
        around = dict(loops)
        for loop in made:
            if not isinstance(loop, ast.For | ast.comprehension):
                continue
            plain = isinstance(loop.target, ast.Name) and isinstance(loop.iter, ast.Call) and (
                _call_name(loop.iter) == "range")
            around |= {v.id: loop.iter.args if plain else None  # type: ignore[attr-defined]
                       for v in ast.walk(loop.target) if isinstance(v, ast.Name)}
        yield from _in_loops(list(ast.iter_child_nodes(n)), around)


def _swept(t: KernelTracer, loops: dict[str, list[ast.expr] | None], lower: ast.expr,
           size: int | None) -> int | None:
    """How many elements the slices from `lower` on are in all iterations of the loop whose variable
    is in it, where they lie side by side; None where that loop does not say how often; else the
    size of one."""
    variables = {n.id for n in ast.walk(lower) if isinstance(n, ast.Name) and n.id in loops}
    if len(variables) != 1 or size is None:
        return size
    (v,) = variables
    times, given = _times(t, lower, v), loops[v]
    if given is None:
        return None if times == size else size
    bounds = [_constant(t, a) for a in given]
    if None in bounds or not 1 <= len(bounds) <= 3:
        return size
    r = range(*bounds)  # type: ignore[arg-type]
    return size * len(r) if len(r) and times is not None and times * r.step == size else size


def _added_ranges(t: KernelTracer, body: list[ast.stmt], name: str) -> dict[int | None, Any]:
    """The sums x + i by the bound of i's range, but for those in slices."""
    sizes: dict[int | None, Any] = {}
    loops = {n.target.id: n for s in body for n in ast.walk(s)
             if isinstance(n, ast.For) and isinstance(n.target, ast.Name)}
    sliced = {id(n) for part in _slices(body) for n in ast.walk(part)}
    for s in body:
        for n in ast.walk(s):
            if not isinstance(n, ast.BinOp) or not isinstance(n.op, ast.Add) or id(n) in sliced:
                continue
            other = _other_operand(n, name)
            loop = loops.get(other.id) if isinstance(other, ast.Name) else None
            call = None if loop is None else loop.iter
            if isinstance(call, ast.Call) and call.args:
                sizes[_constant(t, call.args[1 if len(call.args) > 1 else 0])] = n
    sizes.pop(None, None)
    return sizes


def _indexed(body: list[ast.stmt], name: str) -> list[ast.Subscript]:
    """Where x alone is an index."""
    return [n for s in body for n in ast.walk(s) if isinstance(n, ast.Subscript) and any(
        isinstance(at, ast.Name) and at.id == name
        for at in (n.slice.elts if isinstance(n.slice, ast.Tuple) else [n.slice]))]


def _slices(body: list[ast.stmt]) -> list[ast.Slice]:
    return [n for s in body for n in ast.walk(s) if isinstance(n, ast.Slice)]


def _names(e: ast.expr, name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(e))


def _other_operand(n: ast.BinOp, name: str) -> ast.expr | None:
    if isinstance(n.left, ast.Name) and n.left.id == name:
        return n.right
    return n.left if isinstance(n.right, ast.Name) and n.right.id == name else None


def _constant(t: KernelTracer, e: ast.expr | None) -> int | None:
    """A constant expression over module constants, parameters and locals that are assigned once."""
    if e is None:
        return None
    table = _simple_assignments(t)
    if isinstance(e, ast.Name) and e.id in table and e.id not in t.env:
        return _constant(t, table[e.id])
    if isinstance(e, ast.Name) and e.id not in t.env and e.id not in t.globals:
        return None
    if isinstance(e, ast.Attribute) and isinstance(e.value, ast.Name) and e.value.id in table:
        made = table[e.value.id]  # T.m of T = ts.tile.context(), which is not traced yet
        if not isinstance(made, ast.Call) or _call_name(made) != "context":
            return None
        e = ast.copy_location(ast.Attribute(made, e.attr, ast.Load()), e)
    value = t.expr(e)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _simple_assignments(t: KernelTracer) -> dict[str, ast.expr]:
    return {name: value for n in ast.walk(t.position.source.tree) if isinstance(n, ast.Assign)
            for name, value in _pairs(n)}


def _pairs(s: ast.Assign) -> list[tuple[str, ast.expr]]:
    """The names that an assignment gives, each with its expression."""
    target, value = s.targets[0], s.value
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = [*zip(target.elts, value.elts, strict=False)]
    return [(a.id, b) for a, b in pairs if isinstance(a, ast.Name)]


def _serial(t: KernelTracer, body: list[ast.stmt], name: str, dim: str,
            size: int) -> list[ast.stmt]:
    """`for name in range(0, dim, size)` around what depends on it, with a barrier at the end."""
    uses = [i for i, s in enumerate(body) if _reads(s, {name})]
    first, touched, last = uses[0], {name}, uses[-1]
    for i in range(first, len(body)):
        s = body[i]
        if isinstance(s, ast.Assign) and _is_result(s):
            continue
        if i <= last or _reads(s, touched):
            last = max(last, i)
            touched |= _changes(s)
    inner = body[first:last + 1]
    results = [s for s in body[first:] if isinstance(s, ast.Assign) and _is_result(s)]
    _require_sums(t, body[:first], inner, results, name, dim, touched)
    barrier = ast.Expr(ast.Call(ast.Name("__barrier", ast.Load()), [], []))
    call = ast.Call(ast.Name("range", ast.Load()),
                    [ast.Constant(0), ast.Name(dim, ast.Load()), ast.Constant(size)], [])
    loop = ast.For(ast.Name(name, ast.Store()), call, [*inner, barrier], [])
    ast.copy_location(loop, inner[0])
    ast.copy_location(barrier, inner[-1])
    for n in (loop, barrier):
        ast.fix_missing_locations(n)
    t.env["__barrier"] = OPS["barrier"]
    return [*copy.copy(body[:first]), loop, *body[last + 1:]]


def _require_sums(t: KernelTracer, before: list[ast.stmt], inner: list[ast.stmt],
                  results: list[ast.Assign], name: str, dim: str, touched: set[str]) -> None:
    """What the loop over blocks stores at one place goes on from block to block: a value that has
    nothing of the blocks before would leave the last one's."""
    kept = set().union(*map(_changes, before)) & set().union(*map(_changes, inner))
    kept |= {s.target.id for s in inner if isinstance(s, ast.AugAssign)
             and isinstance(s.target, ast.Name)}
    for s in inner:
        if _reads(s, kept):
            kept |= _changes(s)
        if not isinstance(s, ast.Assign) or not isinstance(s.targets[0], ast.Subscript):
            continue
        place = s.targets[0].slice
        if _reads(s.value, touched) and not _reads(s.value, kept) and not _reads(place, touched):
            t.position.node = s
            t.fail(f"{name} is a loop here, since nothing is written along {dim}, and each block "
                   f"writes the same elements: the last one's would stay",
                   f"add up, acc += ... with acc from before, or read the whole axis, 0:{dim}")
    for s in results:
        if _reads(s.value, touched - {name}) and not _reads(s.value, kept):
            t.position.node = s
            t.fail(f"{name} is a loop here, since nothing is written along {dim}, and the result "
                   "is of one of its blocks",
                   f"store each block, y[..., {name}:{name}+B] = t with y as an argument, or read "
                   f"the whole axis, 0:{dim}")


def _is_result(s: ast.Assign) -> bool:
    return isinstance(s.targets[0], ast.Name) and s.targets[0].id.startswith("__result")


def _reads(s: ast.AST, names: set[str]) -> bool:
    return any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(s))


def _assigned(s: ast.stmt) -> set[str]:
    return {n.id for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _changes(s: ast.stmt) -> set[str]:
    """Names a statement assigns, or whose memory it may change."""
    found = _assigned(s)
    for n in ast.walk(s):
        if isinstance(n, ast.Call) and n.args and isinstance(n.args[0], ast.Name):
            found.add(n.args[0].id)
        if isinstance(n, ast.Call) and n.args and isinstance(n.args[0], ast.Subscript):
            base = n.args[0].value
            if isinstance(base, ast.Name):
                found.add(base.id)
    return found
