"""Schedules: immutable records of how a kernel is mapped to the machine, and spaces of them.

    ts.block(128, 128).k(32).warps(8).stages(3).vector(8).swizzle("xor")
    base = Schedule(block=(128, 128), warps=8, stages=3); base.with_block(64, 64).parent is base
    Schedule().block(m=[64, 128], n=[64, 128], k=[64]).warps([4, 8])       a space of 8 schedules
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import field, fields
from typing import Any

from tessera.errors import ArgumentError, did_you_mean
from tessera.lazy_dataclass import dataclass

# Every spelling of a parameter (Q08) and the field it means.
ALIASES = {
    "m": "m", "BM": "m", "BLOCK_M": "m", "n": "n", "BN": "n", "BLOCK_N": "n",
    "k": "k_", "BK": "k_", "BLOCK_K": "k_", "d": "d", "BD": "d", "BLOCK_D": "d",
    "warps": "warps_", "num_warps": "warps_", "stages": "stages_", "num_stages": "stages_",
    "vector": "vector_", "swizzle": "swizzle_", "cluster": "cluster_",
    "unit": "unit_",
}
DEFAULTS = {"m": 64, "n": 64, "k_": 32, "warps_": 4, "stages_": 2}
_SIZES = ("m", "n", "k_", "d", "warps_", "stages_", "vector_", "cluster_")
SWIZZLES = (None, "none", "xor")
UNITS = (None, "wgmma", "mma")


def shares_rows(block: tuple[int, ...]) -> bool:
    """Whether groups of a cluster do blocks of a matmul with the same rows, and not with the same
    columns: where blocks have more rows. Of narrow ones there may be one beside the other alone."""
    rows, columns = block
    return rows > columns >= 96


@dataclass(frozen=True, init=False)
class Schedule:
    """Knobs of a kernel; None means: not chosen, the default or the compiler decides.

    block=(m, n)   rows and columns of the tile of a group    k   depth of a step
    warps   warps of a group   stages   buffers of a pipeline   vector   elements per access
    d   head size   swizzle   'xor' or None   cluster   groups of a cluster
    unit   'wgmma' | 'mma': what does matmuls; None: the best that the target has
    extra   parameters of the kernel's own, by name
    source  'user' | 'auto' | 'tuned'        parent  the schedule this one was derived from
    notes   why the compiler chose it
    """

    m: Any = None
    n: Any = None
    k_: Any = None
    d: Any = None
    warps_: Any = None
    stages_: Any = None
    vector_: Any = None
    swizzle_: Any = None
    unit_: Any = None
    cluster_: Any = None
    extra: tuple[tuple[str, Any], ...] = ()
    source: str = "user"
    parent: Schedule | None = field(default=None, compare=False, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __init__(self, block: Any = None, **values: Any):
        parent, source = values.pop("parent", None), values.pop("source", "user")
        chosen: dict[str, Any] = dict.fromkeys((f.name for f in fields(self)), None)
        chosen |= {"extra": (), "source": source, "parent": parent, "notes": ()}
        if block is not None:
            chosen |= _block(tuple(block) if isinstance(block, tuple | list) else (block,))
        extra = dict(values.pop("extra", ()))
        for name, value in values.items():
            if name in ALIASES:
                chosen[ALIASES[name]] = _checked(name, ALIASES[name], value)
            elif name in chosen:
                chosen[name] = value
            elif name.isidentifier() and name[0].isupper():
                extra[name] = value
            else:
                raise ArgumentError(f"a schedule has no {name!r}",
                                    hint=did_you_mean(name, ["block", *ALIASES]))
        chosen["extra"] = tuple(sorted(extra.items()))
        for name, value in chosen.items():
            object.__setattr__(self, name, value)

    # --- builder: each returns a new schedule ---------------------------------------------------
    def with_block(self, *sizes: Any, **named: Any) -> Schedule:
        """Rows, columns and depth of the tile: (m, n, k) in order, or by any of their names."""
        return self._with(_block(sizes) | {ALIASES[k]: _checked(k, ALIASES[k], v)
                                           for k, v in _check_names(named).items()})

    def with_k(self, size: Any) -> Schedule:
        return self._with({"k_": _checked("k", "k_", size)})

    def with_warps(self, count: Any) -> Schedule:
        return self._with({"warps_": _checked("warps", "warps_", count)})

    def with_stages(self, count: Any) -> Schedule:
        return self._with({"stages_": _checked("stages", "stages_", count)})

    def with_vector(self, width: Any) -> Schedule:
        return self._with({"vector_": _checked("vector", "vector_", width)})

    def with_swizzle(self, kind: Any) -> Schedule:
        return self._with({"swizzle_": _checked("swizzle", "swizzle_", kind)})

    def with_cluster(self, groups: Any) -> Schedule:
        return self._with({"cluster_": _checked("cluster", "cluster_", groups)})

    def with_unit(self, name: Any) -> Schedule:
        return self._with({"unit_": _checked("unit", "unit_", name)})

    # Each of these is a value that can also be called: s.warps == 8, s.warps(4) a new schedule.
    @property
    def block(self) -> Any:
        return knob((self.m, self.n) if self.m is not None else None, self.with_block)

    @property
    def k(self) -> Any:
        return knob(self.k_, self.with_k)

    @property
    def warps(self) -> Any:
        return knob(self.warps_, self.with_warps)

    @property
    def stages(self) -> Any:
        return knob(self.stages_, self.with_stages)

    @property
    def vector(self) -> Any:
        return knob(self.vector_, self.with_vector)

    @property
    def swizzle(self) -> Any:
        return knob(self.swizzle_, self.with_swizzle)

    @property
    def unit(self) -> Any:
        return knob(self.unit_, self.with_unit)

    @property
    def cluster(self) -> Any:
        return knob(self.cluster_, self.with_cluster)

    def _with(self, changes: dict[str, Any]) -> Schedule:
        new = Schedule()
        for f in fields(self):
            object.__setattr__(new, f.name, changes.get(f.name, getattr(self, f.name)))
        object.__setattr__(new, "parent", self)
        return new

    def with_source(self, source: str) -> Schedule:
        return self._with({"source": source})

    def with_notes(self, *notes: str) -> Schedule:
        return self._with({"notes": notes})

    def with_values(self, values: dict[str, Any]) -> Schedule:
        """Parameters by any of their names."""
        made = Schedule(**values)
        known = {f.name: getattr(made, f.name) for f in fields(made)
                 if f.name not in ("extra", "source", "parent", "notes")
                 and getattr(made, f.name) is not None}
        extra = dict(self.extra) | dict(made.extra)
        return self._with(known | {"extra": tuple(sorted(extra.items()))})

    # --- reading ------------------------------------------------------------------------------
    def value(self, name: str) -> Any:
        """A field, or its default."""
        got = getattr(self, ALIASES.get(name, name))
        return DEFAULTS.get(ALIASES.get(name, name)) if got is None else got

    @property
    def extra_names(self) -> tuple[str, ...]:
        return tuple(n for n, _ in self.extra)

    def extra_value(self, name: str) -> Any:
        return dict(self.extra)[name]

    def for_parameter(self, name: str, default: Any) -> Any:
        """What it sets for a kernel's parameter of that name, BM=32; else the parameter's default.

        m, n, k and d are too common as names of other things: there T.m is the way. What the
        compiler proposes sets the kernel's own parameters only."""
        if name in self.extra_names:
            return self.extra_value(name)
        chosen = getattr(self, ALIASES[name]) if name in ALIASES and len(name) > 1 else None
        return default if chosen is None or self.source == "auto" else chosen

    @property
    def lanes(self) -> int:
        """Lanes of a group: 32 per warp."""
        return 32 * self.value("warps_")

    @property
    def values(self) -> dict[str, Any]:
        """What was chosen, under the short names."""
        short = {v: k for k, v in reversed(ALIASES.items())}
        chosen = {short[f.name]: getattr(self, f.name) for f in fields(self)
                  if f.name in short and getattr(self, f.name) is not None}
        return chosen | dict(self.extra)

    # --- plain data ---------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """What was chosen, as numbers and text: {"m": 64, "warps": 8, "SPLIT": 2}."""
        return dict(self.values)

    @staticmethod
    def from_dict(values: Any, source: str = "user") -> Schedule:
        """The schedule of a dict by `to_dict`, or by hand under any of the names. ArgumentError."""
        if not isinstance(values, dict) or not all(isinstance(n, str) for n in values):
            raise ArgumentError(f"a schedule as data is a dict of names, got {values!r}")
        unknown = [n for n in values if n not in ALIASES and not n[:1].isupper()]
        if unknown:
            raise ArgumentError(f"a schedule has no {unknown[0]!r}",
                                hint=did_you_mean(unknown[0], list(ALIASES)))
        return Schedule(**values, source=source)

    # --- search spaces ------------------------------------------------------------------------
    @property
    def is_space(self) -> bool:
        return any(isinstance(v, list | tuple) for v in self.values.values())

    def __iter__(self) -> Iterator[Schedule]:
        """The schedules of a space: the product of all lists, last parameter fastest."""
        chosen = self.values
        lists = [v if isinstance(v, list | tuple) else [v] for v in chosen.values()]
        for point in itertools.product(*lists):
            yield self.with_values(dict(zip(chosen, point, strict=True)))

    def __len__(self) -> int:
        total = 1
        for v in self.values.values():
            total *= len(v) if isinstance(v, list | tuple) else 1
        return total

    def __bool__(self) -> bool:
        return True

    def text(self) -> str:
        """The schedule as IR: one parameter per line, defaults marked."""
        lines = ["schedule {", f"  source {self.source}"]
        names = {"m": "block_m", "n": "block_n", "k_": "block_k", "d": "block_d"}
        for f in (*_SIZES, "swizzle_", "unit_"):
            got = getattr(self, f)
            mark = "" if got is not None else "  // default"
            lines.append(f"  {names.get(f, f.rstrip('_'))} {self.value(f)}{mark}")
        lines += [f"  {n} {v}" for n, v in self.extra]
        return "\n".join([*lines, "}"]) + "\n"

    def explained(self) -> str:
        """The text, and why the compiler chose it. Two calls' reasons differ where their schedules
        are one, so `text`, which names machine code on disk, has none."""
        return self.text().removesuffix("}\n") + "".join(f"  // {n}\n" for n in self.notes) + "}\n"


class Unchosen:
    """A knob without a value: equal to None, false, and callable like the others."""

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Unchosen)

    def __hash__(self) -> int:
        return hash(None)

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "None"


_KNOBS: dict[type, type] = {}


def knob(value: Any, setter: Any) -> Any:
    """`value`, and when called setter(...): an int, str, tuple or list with __call__."""
    kind = Unchosen if value is None else type(value)
    if kind not in _KNOBS:
        _KNOBS[kind] = type(f"Knob_{kind.__name__}", (kind,), {
            "__call__": lambda self, *args, **kw: self.setter(*args, **kw)})
    made = _KNOBS[kind]() if value is None else _KNOBS[kind](value)
    made.setter = setter
    return made


def _check_names(named: dict[str, Any]) -> dict[str, Any]:
    for name in named:
        if name not in ALIASES:
            raise ArgumentError(f"block has no {name!r}", hint=did_you_mean(name, list(ALIASES)))
    return named


def _block(sizes: tuple) -> dict[str, Any]:
    if len(sizes) > 3:
        raise ArgumentError(f"block takes at most m, n, k; got {len(sizes)} sizes")
    return {f: _checked("block", f, v) for f, v in zip(("m", "n", "k_"), sizes, strict=False)}


def _checked(name: str, field: str, value: Any) -> Any:
    """A size or a list of sizes; a swizzle or a list of them. Raises ArgumentError."""
    for v in value if isinstance(value, list | tuple) else [value]:
        if field == "swizzle_":
            if v not in SWIZZLES:
                raise ArgumentError(f"swizzle {v!r} is not known", hint="'xor' or None")
        elif field == "unit_":
            if v not in UNITS:
                raise ArgumentError(f"unit {v!r} is not known", hint="'wgmma', 'mma' or None")
        elif v is not None and (not isinstance(v, int) or isinstance(v, bool) or v < 1):
            raise ArgumentError(f"{name}={v!r}: a schedule's sizes are positive integers")
    return list(value) if isinstance(value, tuple) and name != "block" else value


def block(*sizes: Any, **named: Any) -> Schedule:
    """A schedule that begins with its block: ts.block(128, 128).k(32)."""
    return Schedule().block(*sizes, **named)
