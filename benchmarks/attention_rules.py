"""Attention with windows, caps, segments and lengths beside PyTorch's FlexAttention, on one GPU.

    python benchmarks/attention_rules.py [D ...] [--rules window ...] [--length 8192]
        [--processes 18]

Of bf16 operands [B, 16, S, D] with B = 32768 / S: the result alone, then with the cotangents of
queries, keys and values, ours through ts.jit and ts.vjp, flex_attention through torch.compile with
its block mask made beforehand; ours makes spans of segments and lengths in each call. A window has
1024 keys, a short one 256; a cap is 30; documents have 1024 places on average. Times are medians
over rounds of calls one behind the other, interleaved; errors are distances from f32 of one head,
relative to its length. Needs torch and a GPU. Writes benchmarks/results/attention_rules.json, or
to $OUT when that is set, anew with each result. Processes, by default one for each case, compile
side by side; when all have, they measure one by one.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import record
import side_processes
import torch
from gpu_timing import as_torch, clocked_in_turn, distance
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tessera as ts

CAP, WINDOW, HEADS = 30.0, 1024, 16
RULES: dict[str, dict[str, Any]] = {
    "window": {"window": WINDOW, "causal": True},
    "short window": {"window": 256, "causal": True},
    "cap": {"soft_cap": CAP},
    "causal cap": {"soft_cap": CAP, "causal": True},
    "cap and window": {"soft_cap": CAP, "window": WINDOW, "causal": True},
    "documents": {"segments": True},
    "causal documents": {"segments": True, "causal": True},
    "lengths": {"lengths": True},
    "alibi": {"score": True, "causal": True},
}


def rows_of(rule: dict[str, Any], B: int, S: int) -> dict[str, torch.Tensor]:
    """Documents of 1 to S / 4 places; lengths of a quarter to all of S."""
    made = {}
    if "segments" in rule:
        ends = torch.rand(B, S, device="cuda") < 8 / S
        made["segments"] = ends.cumsum(1).to(torch.int32)
    if "lengths" in rule:
        made["lengths"] = torch.randint(S // 4, S + 1, (B,), device="cuda", dtype=torch.int32)
    return made


def seen_by(rule: dict[str, Any], rows: dict[str, torch.Tensor]) -> Any:
    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        parts = []
        if rule.get("causal"):
            parts.append(j <= i)
        if "window" in rule:
            parts.append(i - j < rule["window"])
        if "segments" in rows:
            parts.append(rows["segments"][b, i] == rows["segments"][b, j])
        if "lengths" in rows:
            parts.append(j < rows["lengths"][b])
        found = parts[0]
        for part in parts[1:]:
            found = found & part
        return found

    return seen if set(rule) - {"soft_cap", "score"} else None


def capped(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return CAP * torch.tanh(s / CAP)


def with_distance(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """ALiBi, of PyTorch's and of ours."""
    return s + (2.0 ** (-8.0 * (h + 1) / HEADS)) * (j - i)


def flex(rule: dict[str, Any], rows: dict[str, torch.Tensor], q: Any) -> Any:
    (B, _, S, _), seen = q.shape, seen_by(rule, rows)
    blocks = None if seen is None else create_block_mask(
        seen, B if rows else None, None, S, S, device="cuda")
    score = capped if "soft_cap" in rule else with_distance if "score" in rule else None
    run = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: run(q, k, v, score_mod=score, block_mask=blocks)


def ours(rule: dict[str, Any]) -> tuple[Any, Any]:
    """The result, and the result with the cotangents."""
    plain = {k: v for k, v in rule.items() if k not in ("segments", "lengths")}
    plain |= {"score": lambda s, b, h, i, j: s + ts.exp2(-8.0 * (h + 1) / HEADS) * (j - i)
              } if "score" in rule else {}

    names = [k for k in rule if k in ("segments", "lengths")]

    def of(q: Any, k: Any, v: Any, rows: tuple) -> Any:
        given = dict(zip(names, rows, strict=True))
        return ts.cast(ts.attention(q, k, v, **plain, **given), "bf16")

    @ts.jit
    def result(q: Any, k: Any, v: Any, *rows: Any) -> Any:
        return of(q, k, v, rows)

    @ts.jit
    def both(q: Any, k: Any, v: Any, g: Any, *rows: Any) -> Any:
        y, pull = ts.vjp(lambda q, k, v: of(q, k, v, rows), q, k, v)
        return y, tuple(ts.cast(x, "bf16") for x in pull(g))

    return result, both


def exact(rule: dict[str, Any], rows: Any, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of the last head of the last sequence, in f32: the result and the cotangents."""
    q, k, v, g = (x[-1, -1].float() for x in xs)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    s = q @ k.T * q.shape[-1] ** -0.5
    s = capped(s, 0, 0, 0, 0) if "soft_cap" in rule else s
    seen, places = seen_by(rule, rows), torch.arange(len(q), device="cuda")
    if "score" in rule:
        s = with_distance(s, 0, HEADS - 1, places[:, None], places[None, :])
    if seen is not None:
        b = torch.tensor(len(xs[0]) - 1, device="cuda")
        s = s.masked_fill(~seen(b, 0, places[:, None], places[None, :]), float("-inf"))
    y = torch.softmax(s, -1) @ v
    return y.detach(), *torch.autograd.grad(y, (q, k, v), g)


def error(x: Any, want: torch.Tensor) -> float:
    return round(distance(as_torch(x).detach()[-1, -1].float(), want), 5)


def prepared(D: int, name: str, S: int) -> tuple[dict[str, Any], list[Any]]:
    """What is measured, compiled and run, and the errors of both."""
    rule, B = RULES[name], 32768 // S
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(B, HEADS, S, D, device="cuda", dtype=torch.bfloat16) for _ in "qkvg")
    rows = rows_of(rule, B, S)
    given = [ts.from_dlpack(x) for x in (q, k, v, g)]
    lines = [ts.from_dlpack(x) for x in rows.values()]
    result, both = ours(rule)
    theirs = flex(rule, rows, q)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def their_gradient() -> Any:
        y = theirs(*leaves)
        return y, torch.autograd.grad(y, leaves, g)

    want = exact(rule, rows, q, k, v, g)
    torch.cuda.empty_cache()
    (y, made), (z, others) = both(*given, *lines), their_gradient()
    errors = [(error(a, w), error(b, w))
              for a, b, w in zip((y, *made), (z, *others), want, strict=True)]
    runs = {"ours": lambda: result(*given[:3], *lines), "flex": lambda: theirs(q, k, v),
            "ours, gradient": lambda: both(*given, *lines), "flex, gradient": their_gradient}
    for run in runs.values():
        run()
    del want, y, z, made, others
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return runs, errors


def measured(runs: dict[str, Any], errors: list[Any]) -> dict[str, Any]:
    ms = clocked_in_turn(runs, rounds=3, seconds=0.02)
    return {"errors, ours and flex": errors, **{n: round(t, 4) for n, t in ms.items()},
            "ratio": round(ms["flex"] / ms["ours"], 2),
            "ratio of gradients": round(ms["flex, gradient"] / ms["ours, gradient"], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("D", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--rules", nargs="*", default=list(RULES), choices=RULES)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--processes", type=int, default=2 * len(RULES))
    side_processes.flag(parser)
    given = parser.parse_args()
    if given.work is not None:
        return side_processes.work(given.work, prepared, measured)
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    cases = [[D, name, given.length] for D in given.D for name in given.rules]
    for (D, name, S), found in side_processes.results(__file__, cases, given.processes):
        case = f"D {D}, S {S}, {name}"
        figures[case] = found
        print(f"{case}:", json.dumps(found), flush=True)
        record.write("attention_rules", figures, shown=False)
    return None


if __name__ == "__main__":
    main()
