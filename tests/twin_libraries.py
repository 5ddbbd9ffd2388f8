"""What each name of a random program means: in NumPy, which knows none of our rules, and here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import tessera as ts


class Plain:
    """The meaning of each name in NumPy."""

    where, sum, max, min, prod = np.where, np.sum, np.max, np.min, np.prod
    mean, flip, roll, stack, concatenate = np.mean, np.flip, np.roll, np.stack, np.concatenate
    maximum, minimum, sin, cos, tanh, exp = np.maximum, np.minimum, np.sin, np.cos, np.tanh, np.exp
    sqrt, log1p, abs, square, arctan2 = np.sqrt, np.log1p, np.abs, np.square, np.arctan2
    cumsum, cumprod, argmax, argmin = np.cumsum, np.cumprod, np.argmax, np.argmin
    tril, triu, matmul, einsum = np.tril, np.triu, np.matmul, np.einsum
    floor_divide = np.floor_divide
    remainder, diagonal, any, all, clip = np.remainder, np.diagonal, np.any, np.all, np.clip
    logical_xor, transpose, broadcast_to = np.logical_xor, np.transpose, np.broadcast_to
    cummax, take_along_axis, std = np.maximum.accumulate, np.take_along_axis, np.std

    @staticmethod
    def f64(x: Any) -> Any:
        return np.asarray(x, np.float64)

    @staticmethod
    def sort(x: Any, axis: int, descending: bool) -> Any:
        y = np.sort(x, axis)
        return np.flip(y, axis) if descending else y

    @staticmethod
    def argsort(x: Any, axis: int) -> Any:
        return np.argsort(x, axis, kind="stable")

    @staticmethod
    def reshape(x: Any, shape: tuple) -> Any:
        return np.reshape(x, shape)

    @staticmethod
    def top_k(x: Any, k: int) -> Any:
        return np.flip(np.sort(x, -1), -1)[..., :k]

    @staticmethod
    def softmax(x: Any, axis: int) -> Any:
        e = np.exp(x - np.max(x, axis, keepdims=True))
        return e / np.sum(e, axis, keepdims=True)

    @staticmethod
    def logsumexp(x: Any, axis: int) -> Any:
        return np.log(np.sum(np.exp(x), axis))

    @staticmethod
    def pad(x: Any, width: Any, mode: str) -> Any:
        return np.pad(x, width, mode)

    @staticmethod
    def put(x: Any, index: Any, value: Any, mode: str) -> Any:
        y = np.array(x)
        if mode == "set":
            y[index] = value
        else:
            # NumPy 2's at leaves out some of the values that it broadcasts to more axes itself.
            value = np.array(np.broadcast_to(value, y[index].shape))
            {"add": np.add, "max": np.maximum, "min": np.minimum}[mode].at(y, index, value)
        return y

    @staticmethod
    def segment_sum(x: Any, ids: Any, count: int) -> Any:
        y = np.zeros((count, *x.shape[1:]))
        np.add.at(y, ids, x)
        return y

    @staticmethod
    def conv(x: Any, w: Any, stride: int, padding: int) -> Any:
        x = np.pad(x, ((0, 0), (0, 0), (padding, padding)))
        K = w.shape[-1]
        windows = np.lib.stride_tricks.sliding_window_view(x, K, -1)[:, :, ::stride]
        return np.einsum("nclk,ock->nol", windows, w)

    @staticmethod
    def dynamic_slice(x: Any, start: Any, size: int) -> Any:
        at = int(np.clip(start, 0, x.shape[0] - size))
        return x[at:at + size]

    @staticmethod
    def scan(body: Callable, init: Any, xs: Any, reverse: bool) -> Any:
        ys, carry = [], init
        order = range(len(xs))
        for t in reversed(order) if reverse else order:
            carry, y = body(carry, xs[t])
            ys.append(y)
        return carry, np.stack(ys[::-1] if reverse else ys)

    @staticmethod
    def cond(pred: Any, yes: Callable, no: Callable, x: Any) -> Any:
        return (yes if pred else no)(x)

    @staticmethod
    def fori(count: int, body: Callable, init: Any) -> Any:
        for i in range(count):
            init = body(np.asarray(i), init)
        return init

    @staticmethod
    def while_(limit: int, body: Callable, init: Any) -> Any:
        i = 0
        while i < limit and np.sum(np.abs(init)) < 40:
            init, i = body(init), i + 1
        return init

    @staticmethod
    def vmap(body: Callable, axes: tuple, out: int, *xs: Any) -> Any:
        count = next(np.shape(x)[a] for x, a in zip(xs, axes, strict=True) if a is not None)
        return np.stack([body(*[x if a is None else np.take(x, i, a)
                                for x, a in zip(xs, axes, strict=True)])
                         for i in range(count)], out)

    @staticmethod
    def same(kind: str, body: Callable, x: Any) -> Any:
        return body(x)

    @staticmethod
    def normed(x: Any, kind: str) -> Any:
        if kind == "rms":
            return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 0.5)
        d = x - np.mean(x, -1, keepdims=True)
        return d / np.sqrt(np.mean(d * d, -1, keepdims=True) + 0.5)

    @staticmethod
    def recurrence(a: Any, b: Any, axis: int) -> Any:
        a, b, h = np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0), 0.0
        rows = [h := x * h + y for x, y in zip(a, b, strict=True)]
        return np.moveaxis(np.stack(rows), 0, axis) if rows else np.moveaxis(b, 0, axis)

    @staticmethod
    def prefixes(x: Any, y: Any, kind: str) -> Any:
        pick = {"max": np.maximum, "first": lambda a, b: a}
        if kind in pick:
            rows = [x[0]]
            for row in x[1:]:
                rows.append(pick[kind](rows[-1], row))
            return np.stack(rows)
        return Plain.recurrence(x, y, 0)

    @staticmethod
    def map(body: Callable, x: Any) -> Any:
        return np.stack([body(row) for row in x])

    @staticmethod
    def counting(body: Callable, init: Any, xs: Any, ids: Any) -> Any:
        carry, n, seen = init, 0, []
        for x, i in zip(xs, ids, strict=True):
            carry = body(carry, x)
            n = n + int(i)
            seen.append(carry * n)
        return np.stack(seen) + n

    @staticmethod
    def fft(x: Any) -> Any:
        z = np.fft.rfft(x)
        return z.real - 0.5 * z.imag

    @staticmethod
    def attend(q: Any, k: Any, causal: bool) -> Any:
        scores = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
        if causal:
            S = scores.shape[-1]
            scores = np.where(np.tril(np.ones((S, S), bool)), scores, -np.inf)
        return Plain.softmax(scores, -1) @ k

    @staticmethod
    def gelu(x: Any) -> Any:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    @staticmethod
    def softplus(x: Any) -> Any:
        return np.logaddexp(x, 0.0)

    @staticmethod
    def logcumsumexp(x: Any, axis: int) -> Any:
        return np.logaddexp.accumulate(x, axis)

    @staticmethod
    def segment_max(x: Any, ids: Any, count: int) -> Any:
        y = np.full((count, *x.shape[1:]), -np.inf)
        np.maximum.at(y, ids, x)
        return np.where(np.isinf(y), 0.0, y)

    @staticmethod
    def solve(a: Any, b: Any) -> Any:
        return np.linalg.solve(a + 9.0 * np.eye(a.shape[-1]), b)

    @staticmethod
    def median(x: Any, axis: int) -> Any:
        return np.median(x, axis)

    @staticmethod
    def one_hot(x: Any, n: int) -> Any:
        return (np.asarray(x)[..., None] == np.arange(n)).astype(np.float64)

    @staticmethod
    def norm(x: Any, axis: int) -> Any:
        return np.sqrt(np.sum(x * x, axis) + 0.25)

    diff, repeat, tile, kron, cummin = np.diff, np.repeat, np.tile, np.kron, np.minimum.accumulate

    @staticmethod
    def custom(kind: str, body: Callable, x: Any) -> Any:
        return body(x)



class Ours:
    """The same names in tessera."""

    where, sum, max, min, prod = ts.where, ts.sum, ts.max, ts.min, ts.prod
    mean, flip, roll, stack, concatenate = ts.mean, ts.flip, ts.roll, ts.stack, ts.concatenate
    maximum, minimum, sin, cos, tanh, exp = ts.maximum, ts.minimum, ts.sin, ts.cos, ts.tanh, ts.exp
    sqrt, log1p, abs, square, arctan2 = ts.sqrt, ts.log1p, ts.abs, ts.square, ts.atan2
    cumsum, cumprod, argmax, argmin = ts.cumsum, ts.cumprod, ts.argmax, ts.argmin
    tril, triu, matmul, einsum = ts.tril, ts.triu, ts.matmul, ts.einsum
    floor_divide = ts.floor_divide
    remainder, diagonal, any, all, clip = ts.remainder, ts.diagonal, ts.any, ts.all, ts.clip
    logical_xor, transpose, broadcast_to = ts.logical_xor, ts.transpose, ts.broadcast_to
    cummax, take_along_axis, std = ts.cummax, ts.take_along_axis, ts.std
    argsort, reshape, softmax, logsumexp = ts.argsort, ts.reshape, ts.softmax, ts.logsumexp
    segment_sum = ts.segment_sum

    @staticmethod
    def f64(x: Any) -> Any:
        return ts.cast(x, "f64")

    @staticmethod
    def sort(x: Any, axis: int, descending: bool) -> Any:
        return ts.sort(x, axis, descending=descending)

    @staticmethod
    def top_k(x: Any, k: int) -> Any:
        return ts.top_k(x, k)[0]

    @staticmethod
    def pad(x: Any, width: Any, mode: str) -> Any:
        return ts.pad(x, width, mode=mode)

    @staticmethod
    def put(x: Any, index: Any, value: Any, mode: str) -> Any:
        return ts.index_put(x, index, value, mode=mode)

    @staticmethod
    def conv(x: Any, w: Any, stride: int, padding: int) -> Any:
        return ts.conv1d(x, w, stride=stride, padding=padding)

    @staticmethod
    def dynamic_slice(x: Any, start: Any, size: int) -> Any:
        return ts.dynamic_slice(x, (start, *[0] * (x.ndim - 1)), (size, *x.shape[1:]))

    @staticmethod
    def scan(body: Callable, init: Any, xs: Any, reverse: bool) -> Any:
        return ts.scan(body, init, xs, reverse=reverse)

    cond, fori = ts.cond, staticmethod(lambda n, body, init: ts.fori_loop(0, n, body, init))

    @staticmethod
    def while_(limit: int, body: Callable, init: Any) -> Any:
        return ts.while_loop(lambda c: (c[0] < limit) & (ts.sum(ts.abs(c[1])) < 40.0),
                             lambda c: (c[0] + 1, body(c[1])), (0, init))[1]

    @staticmethod
    def vmap(body: Callable, axes: tuple, out: int, *xs: Any) -> Any:
        return ts.vmap(body, in_axes=axes, out_axes=out)(*xs)

    @staticmethod
    def same(kind: str, body: Callable, x: Any) -> Any:
        if kind == "grad":  # the value of a function beside its gradient
            return ts.value_and_grad(lambda x: (lambda y: (ts.sum(y), y))(body(x)),
                                     has_aux=True)(x)[0][1]
        if kind == "jvp":
            return ts.jvp(body, (x,), (x,))[0]
        wrap = {"jit": ts.jit, "checkpoint": ts.checkpoint,
                "saved": lambda f: ts.checkpoint(f, policy="save_matmuls")}[kind]
        return wrap(body)(x)

    @staticmethod
    def normed(x: Any, kind: str) -> Any:
        return ts.rmsnorm(x, eps=0.5) if kind == "rms" else ts.layernorm(x, eps=0.5)

    @staticmethod
    def recurrence(a: Any, b: Any, axis: int) -> Any:
        return ts.linear_recurrence(a, b, axis)

    @staticmethod
    def prefixes(x: Any, y: Any, kind: str) -> Any:
        pick = {"max": ts.maximum, "first": lambda a, b: a}
        if kind in pick:
            return ts.associative_scan(pick[kind], x)
        return ts.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (x, y))[1]

    map = ts.map

    @staticmethod
    def counting(body: Callable, init: Any, xs: Any, ids: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            state = {"c": body(carry["c"], x[0]), "n": carry["n"] + x[1]}
            return state, state["c"] * state["n"]

        last, seen = ts.scan(step, {"c": init, "n": 0}, (xs, ids))
        return seen + last["n"]

    @staticmethod
    def fft(x: Any) -> Any:
        z = ts.fft.rfft(x)
        return z.real - 0.5 * z.imag

    @staticmethod
    def attend(q: Any, k: Any, causal: bool) -> Any:
        return ts.attention(q, k, k, causal=causal)

    gelu, softplus, logcumsumexp, median = ts.gelu, ts.softplus, ts.logcumsumexp, ts.median

    @staticmethod
    def one_hot(x: Any, n: int) -> Any:
        return ts.one_hot(x, n, "f64")

    diff, repeat, tile, kron, cummin = ts.diff, ts.repeat, ts.tile, ts.kron, ts.cummin

    @staticmethod
    def segment_max(x: Any, ids: Any, count: int) -> Any:
        y = ts.segment_max(x, ids, count)
        return ts.where(ts.isinf(y), 0.0, y)

    @staticmethod
    def solve(a: Any, b: Any) -> Any:
        return ts.solve(a + 9.0 * ts.eye(a.shape[-1], dtype="f64"), b)

    @staticmethod
    def norm(x: Any, axis: int) -> Any:
        return ts.sqrt(ts.norm(x, axis=axis) ** 2 + 0.25)

    @staticmethod
    def custom(kind: str, body: Callable, x: Any) -> Any:
        if kind == "jvp":
            f = ts.custom_jvp(body)
            f.defjvp(lambda ps, ts_: ts.jvp(body, ps, ts_))
            return f(x)
        g = ts.custom_vjp(body)
        g.defvjp(lambda x: (g(x), x), lambda x, ct: ts.vjp(body, x)[1](ct))
        return g(x)


for _cls in (Plain, Ours):
    for _name, _value in list(vars(_cls).items()):
        if callable(_value) and not isinstance(_value, staticmethod | type):
            setattr(_cls, _name, staticmethod(_value))
