"""Tables of the guide of what goes to ONNX and comes from there."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from guide_library_tables import markdown
from tessera.graph.op import OPS, GraphOp
from tessera.onnx.importing import FOLDED
from tessera.onnx.reading import READERS
from tessera.onnx.spellings import SAME, why_refused
from tessera.onnx.writer import RULES


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{n}`" for n in sorted(names)) + "\n"


def ours() -> list[GraphOp]:
    """The ops of the package, without those that a test has declared."""
    return [op for op in OPS.values() if op.shape.__module__.startswith("tessera.")]


def written_table() -> str:
    return markdown(("Op", "In ONNX"), [
        ("one for one", ", ".join(f"`{SAME[n]}`" for n in sorted(SAME))),
        ("by several ops, or with attributes", listed(RULES.keys() - SAME.keys()).strip()),
        ("by the smaller ops that it is made of, where those are",
         listed(op.name for op in ours() if op.name not in RULES and why_refused(op) is None
                and (op.expand or op.derives or op.unroll)).strip())])


def refused_table() -> str:
    reasons: dict[str, list[str]] = {}
    for op in ours():
        if (why := why_refused(op)) is not None:
            reasons.setdefault(why, []).append(op.name)
    some = {n for n in RULES if why_refused(OPS[n]) is not None}
    return markdown(("Why", "Ops"), [
        (why, ", ".join(f"`{n}`" + (" (some)" if n in some else "") for n in sorted(names)))
        for why, names in sorted(reasons.items())])


def read_table() -> str:
    return listed({*READERS, *FOLDED})


ONNX: dict[str, Callable[[], str]] = {
    "onnx written": written_table, "onnx refused": refused_table, "onnx read": read_table,
}
