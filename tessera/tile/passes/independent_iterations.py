"""Whether the iterations of a loop are independent, so that groups or lanes may share them (A1).

They are when nothing is carried, no barrier or asynchronous copy stands inside, and for every
memory that is written the accesses of different iterations cannot meet: along one axis all of them
lie in [c*i + r, c*i + r + w) with the same r and w <= c*step.
"""

from __future__ import annotations

from typing import Any

from tessera.lazy_dataclass import dataclass
from tessera.tile.ir import affine
from tessera.tile.ir.affine import Form, Forms
from tessera.tile.ir.ir import For, Op, SSAValue, outs_of, walk
from tessera.tile.ir.op_record import OPS

# Accesses of single lanes: (where their indices begin, elements along the last axis).
ELEMENTS = {"load_element": (1, 1), "store_element": (2, 1), "load_pair": (1, 2),
            "store_pair": (3, 2)}  # store_span writes how much its operands say


@dataclass(frozen=True)
class Reach:
    """Along one axis: from form to form + width (exclusive)."""

    form: Form
    width: int


def why_dependent(node: For, forms: Forms, bounds: dict[SSAValue, Any],
                  views: dict[SSAValue, Op]) -> str | None:
    """None when the iterations are independent, else the reason in words."""
    if node.carried:
        return "it carries " + ", ".join(d.value.name for d in node.carried)
    accesses: dict[SSAValue, list[tuple[bool, list[Any]]]] = {}
    inner = {d.value for n in walk(node.body) for d in outs_of(n)}
    for n in walk(node.body):
        if not isinstance(n, Op):
            continue
        effect = OPS[n.name].effect
        if effect in ("sync", "async"):
            return f"{n.name} is inside"
        if effect == "atomic" and n.outs:
            continue
        if effect in ("read", "write") and n.args:
            memory, reach = reaches(n, views, forms)
            accesses.setdefault(memory, []).append((effect == "write", reach))
    index = _Index(node, forms, bounds, inner)
    for memory, found in accesses.items():
        if not any(write for write, _ in found) or memory in inner:
            continue
        if not index.apart([reach for _, reach in found]):
            return f"different iterations may touch the same element of {memory.name}"
    return None


def reaches(n: Op, views: dict[SSAValue, Op], forms: Forms) -> tuple[SSAValue, list[Any]]:
    """The memory an access goes to and, per axis, its Reach."""
    target = n.args[0]
    assert isinstance(target, SSAValue)
    if n.name in ELEMENTS:
        first, wide = ELEMENTS[n.name]
        *row, last = [forms.form(x) for x in n.args[first:]]
        return target, [*[Reach(x, 1) for x in row], Reach(last, wide)]
    made = views.get(target)
    while made is not None and made.name == "view_transpose":
        target = made.args[0]
        assert isinstance(target, SSAValue)
        made = views.get(target)
    if made is None or made.name != "view":
        return target, []
    base = made.args[0]
    assert isinstance(base, SSAValue)
    return base, [Reach(forms.form(x), w) for x, w in
                  zip(made.args[1:], made.attr["box"], strict=True)]


class _Index:
    def __init__(self, node: For, forms: Forms, bounds: dict[SSAValue, Any], inner: set[SSAValue]):
        self.var, self.forms, self.bounds, self.inner = node.var.value, forms, bounds, inner
        step = forms.form(node.step)
        self.step = step.get(None, 0) if set(step) <= {None} else 1  # at least one apart

    def apart(self, reaches: list[list[Any]]) -> bool:
        """Whether some axis separates the iterations."""
        ranks = {len(r) for r in reaches}
        if len(ranks) != 1 or 0 in ranks:
            return False
        return any(self.separates([r[axis] for r in reaches]) for axis in range(ranks.pop()))

    def separates(self, reach: list[Any]) -> bool:
        spans = [self.over_inner_loops(r) for r in reach]
        if any(s is None for s in spans):
            return False
        first = spans[0]
        assert first is not None
        c = first.form.get(self.var, 0)
        low, high = 0, 0
        for s in spans:
            assert s is not None
            away = affine.add(s.form, first.form, -1)
            if set(k for k, v in away.items() if v) - {None}:
                return False
            low = min(low, away.get(None, 0))
            high = max(high, away.get(None, 0) + s.width)
        return c > 0 and high - low <= c * self.step

    def over_inner_loops(self, r: Reach) -> Reach | None:
        """The reach with inner loop variables replaced by their ranges; None when unknown."""
        form, width = dict(r.form), r.width
        for _ in range(8):
            loops = [v for v in form if v is not None and v in self.bounds and v != self.var
                     and v in self.bounds]
            if not loops:
                break
            v = loops[0]
            c = form.pop(v)
            lo, hi, _ = self.bounds[v]
            start = self.forms.form(lo)
            spans = [affine.add(h, start, -1) for h in self.forms.upper(hi)]
            known = [s.get(None, 0) for s in spans if not {k for k, x in s.items() if x} - {None}]
            if c < 0 or not known:
                return None
            form = affine.add(form, affine.scale(start, c))
            width += c * max(0, min(known) - 1)
        if any(v in self.inner for v in form if v is not None and v != self.var):
            return None
        return Reach(form, width)
