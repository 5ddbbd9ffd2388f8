"""Steps of random programs with programs inside, loops, branches and transforms, and functions with
derivative rules of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from twins import Block

Step = Callable[[Any, list], Any]  # of a library and the values so far
Made = tuple[str, Step] | None


def axis_of(rng: np.random.Generator, x: Any, least: int = 1) -> int | None:
    fits = [a for a, n in enumerate(np.shape(x)) if n >= least]
    if not fits:
        return None
    a = int(rng.choice(fits))
    return a - np.ndim(x) if rng.random() < 0.5 else a


def _count(rng: Any) -> int:
    return int(rng.integers(1, 5))


def scan(b: Block, rng: Any) -> Made:
    xs = b.pick("f", lambda x: x.ndim >= 1 and 1 <= x.shape[0] <= 5)
    init = b.pick("f", lambda x: x.size <= 30)
    if xs < 0 or init < 0:
        return None
    reverse, last = bool(rng.random() < 0.4), bool(rng.random() < 0.5)
    start = b.values[init]
    block, outer = b.inner([start, b.values[xs][0]], _count(rng), like=start)
    out = block.pick("f")

    def step(L: Any, v: list) -> Any:
        def body(carry: Any, x: Any) -> Any:
            values = [carry, x, *[v[i] for i in outer]]
            for _, s in block.steps:
                values.append(s(L, values))
            return values[block.result], values[out]

        carry, ys = L.scan(body, v[init], v[xs], reverse)
        return carry if last else ys

    return (f"scan(v{init}, v{xs}, reverse={reverse}, last={last}) outer={outer} y=v{out}\n{block}",
            step)


def cond(b: Block, rng: Any) -> Made:
    p, i = b.pick("b"), b.pick()
    if p < 0:
        return None
    x = b.values[i]
    (yes, outer_yes), (no, outer_no) = (b.inner([x], _count(rng), like=x) for _ in "ab")
    text = f"cond(any v{p}, v{i}) outer={outer_yes} {outer_no}\n{yes}\n--\n{no}"
    return text, lambda L, v: L.cond(
        L.any(v[p]), lambda y: yes.run(L, [y, *[v[k] for k in outer_yes]]),
        lambda y: no.run(L, [y, *[v[k] for k in outer_no]]), v[i])


def fori(b: Block, rng: Any) -> Made:
    i, count = b.pick("f", lambda x: x.size <= 30), int(rng.integers(0, 4))
    if i < 0:
        return None
    x = b.values[i]
    block, outer = b.inner([x, np.asarray(1)], _count(rng), like=x)
    return f"fori({count}, v{i}) outer={outer}\n{block}", lambda L, v: L.fori(
        count, lambda t, y: block.run(L, [y, t, *[v[k] for k in outer]]), v[i])


def while_(b: Block, rng: Any) -> Made:
    i, limit = b.pick("f", lambda x: x.size <= 30), int(rng.integers(0, 5))
    if i < 0 or rng.random() < 0.5:
        return None
    x = b.values[i]
    block, outer = b.inner([x], _count(rng), like=x)
    b.reverse_mode = block.reverse_mode = False
    return f"while({limit}, v{i}) outer={outer}\n{block}", lambda L, v: L.while_(
        limit, lambda y: block.run(L, [y, *[v[k] for k in outer]]), v[i])


def vmap(b: Block, rng: Any) -> Made:
    i = b.pick(where=lambda x: x.ndim >= 1 and 1 <= max(x.shape) <= 5)
    if i < 0:
        return None
    x = b.values[i]
    a = axis_of(rng, x)
    if a is None:
        return None
    n = x.shape[a]
    j = b.pick("fib", lambda y: n in y.shape)
    second = None
    if j >= 0 and rng.random() < 0.7:
        second = [d for d, m in enumerate(b.values[j].shape) if m == n][0]
    j = j if j >= 0 else i
    axes = (a, second)
    given = [np.take(x, 0, a), b.values[j] if second is None else np.take(b.values[j], 0, second)]
    block, outer = b.inner(given, _count(rng))
    out = int(rng.integers(-1, 1))
    return f"vmap(v{i}, v{j}, {axes}, {out}) outer={outer}\n{block}", lambda L, v: L.vmap(
        lambda y, z: block.run(L, [y, z, *[v[k] for k in outer]]), axes, out, v[i], v[j])


def wrapped(b: Block, rng: Any) -> Made:
    i = b.pick()
    kind = str(rng.choice(["jit", "checkpoint", "saved", "jvp", "grad"]))
    block, outer = b.inner([b.values[i]], _count(rng))
    if kind == "grad" and not block.reverse_mode or kind == "jvp" and not block.forward_mode:
        kind = "jit"
    return f"{kind}(v{i}) outer={outer}\n{block}", lambda L, v: L.same(
        kind, lambda y: block.run(L, [y, *[v[k] for k in outer]]), v[i])


def more(b: Block, rng: Any) -> Made:
    """Functions with rules of their own."""
    i = b.pick()
    x = b.values[i]
    k = int(rng.integers(16))
    a = axis_of(rng, x)
    if k == 0:
        j = b.pick(where=lambda y: y.shape == x.shape)
        return a is not None and (f"recurrence(tanh v{i}, v{j}, {a})", lambda L, v: L.recurrence(
            L.tanh(v[i]), v[j], a)) or None
    if k == 1 and a is not None and x.shape[0]:
        j = b.pick(where=lambda y: y.shape == x.shape)
        kind = str(rng.choice(["max", "first", "pairs"]))
        return f"prefixes(v{i}, v{j}, {kind})", lambda L, v: L.prefixes(v[i], v[j], kind)
    if k == 2 and x.ndim and x.shape[-1]:
        kind = str(rng.choice(["rms", "layer"]))
        return f"{kind}norm(v{i})", lambda L, v: L.normed(v[i], kind)
    if k == 3 and x.ndim and x.shape[-1]:
        return f"fft(v{i})", lambda L, v: L.fft(v[i])
    if k == 4 and x.ndim >= 2 and 0 not in x.shape:
        causal = bool(rng.random() < 0.5)
        return f"attend(v{i}, {causal})", lambda L, v: L.attend(L.sin(v[i]), v[i], causal)
    if k == 5 and x.ndim >= 1 and x.shape[0]:
        at = b.pick("i", lambda y: y.shape == x.shape[:1])
        return at >= 0 and (f"segment_max(v{i}, v{at} % 3)", lambda L, v: L.segment_max(
            v[i], v[at] % 3, 3)) or None
    if k == 6:
        j = b.pick(where=lambda y: y.ndim == 2 and y.shape[0] == y.shape[1] > 0)
        return j >= 0 and (f"solve(v{j}, v{i})", lambda L, v: L.solve(L.sin(v[j]), v[i])) or None
    if k == 7:
        at = b.pick("i", lambda y: y.size <= 20)
        return at >= 0 and (f"one_hot(v{at} % 4)", lambda L, v: L.one_hot(v[at] % 4, 4)) or None
    if k == 8:
        n = int(rng.integers(1, 3))
        if a is None or rng.random() < 0.5:
            return f"tile(v{i}, {n})", lambda L, v: L.tile(v[i], n)
        return f"repeat(v{i}, {n}, {a})", lambda L, v: L.repeat(v[i], n, axis=a)
    if k == 9:
        kind = str(rng.choice(["jvp", "vjp"]))
        block, outer = b.inner([x], _count(rng))
        if outer:  # a rule gets what the function is given
            return None
        b.reverse_mode &= block.reverse_mode
        if kind == "vjp":
            b.forward_mode = False
        return f"custom {kind}(v{i})\n{block}", lambda L, v: L.custom(
            kind, lambda y: block.run(L, [y]), v[i])
    if k == 10 and x.ndim and 1 <= x.shape[0] <= 5:
        block, outer = b.inner([x[0]], _count(rng))
        return f"map(v{i}) outer={outer}\n{block}", lambda L, v: L.map(
            lambda y: block.run(L, [y, *[v[k] for k in outer]]), v[i])
    if k == 11 and x.ndim and 1 <= x.shape[0] <= 5:
        init = b.pick("f", lambda y: y.size <= 30)
        at = b.pick("i", lambda y: y.shape == x.shape[:1])
        if init < 0 or at < 0:
            return None
        block, outer = b.inner([b.values[init], x[0]], _count(rng), like=b.values[init])
        return f"counting(v{init}, v{i}, v{at}) outer={outer}\n{block}", lambda L, v: L.counting(
            lambda c, y: block.run(L, [c, y, *[v[k] for k in outer]]), v[init], v[i], v[at])
    if a is None:
        return None
    name, fn = [
        ("gelu", lambda L, x: L.gelu(x)), ("softplus", lambda L, x: L.softplus(x)),
        ("logcumsumexp", lambda L, x: L.logcumsumexp(x, a)),
        ("diff", lambda L, x: L.diff(x, axis=a)),
        ("cummin", lambda L, x: L.cummin(x, axis=a)), ("norm", lambda L, x: L.norm(x, a)),
        ("median", lambda L, x: L.median(x, a)), ("kron", lambda L, x: L.kron(x, L.sin(x))),
    ][int(rng.integers(8))]
    return f"{name}(v{i}, {a})", lambda L, v: fn(L, v[i])
