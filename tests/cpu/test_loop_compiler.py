"""What Numba is asked while it compiles a loop for the CPU, and how often."""

from __future__ import annotations

from typing import Any

import pytest

import tessera as ts
from tessera.graph.cpu import kernel


def loop_source(monkeypatch: pytest.MonkeyPatch) -> str:
    """An emitted loop with functions of several operands."""
    seen: list[str] = []
    obtain = kernel.obtain

    def noted(source: str) -> Any:
        seen.append(source)
        return obtain(source)

    monkeypatch.setattr(kernel, "obtain", noted)
    with ts.config.scope(loop_min_elements=1):
        ts.jit(lambda x, y: ts.sum(ts.exp(x) * y + ts.exp(y) - x * x, 1))(
            ts.ones((7, 9)), ts.ones((7, 9)))
    return seen[-1]


def test_types_of_a_call_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from tessera.graph.cpu import compile as loops

    typing = loops.cpu_target.typing_context
    kind, asked = type(typing), []
    ask = kind.resolve_function_type

    def counted(context: Any, function: Any, args: tuple, kws: Any) -> Any:
        asked.append((str(function), args))
        return ask(context, function, args, kws)

    monkeypatch.setattr(kind, "resolve_function_type", counted)
    monkeypatch.setattr(loops, "_known", {})
    source = loop_source(monkeypatch)
    asked.clear()
    loops._known.clear()
    symbol, code = loops.compile_source(source, "a")
    once = list(asked)
    assert once and len(set(once)) == len(once)
    loops.compile_source(source, "a")
    assert asked == once, "asked again for a later loop"
    monkeypatch.setattr(loops, "_asked_once", lambda typing: ts.config.scope())
    numbas = loops.compile_source(source, "a")[1]
    assert len(asked) > 2 * len(once) and len(numbas) == len(code)
    assert "resolve_function_type" not in vars(typing), "other functions are typed as ever"
