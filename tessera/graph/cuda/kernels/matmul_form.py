"""Which form a matmul takes as a kernel: operands, batch, block and stages, and why.

Everything that is decided about it is decided here; the kernel's text (library_kernels.py) follows.
Whether warpgroups specialise is up to the compiler (tile/cuda/compile.py).
"""

from __future__ import annotations

from math import prod

from ....kernels.matmul_blocks import (
    BESIDE_TILES,
    CROWDED,
    USUAL,
    MatmulExtents,
    choose_blocks,
    default_block,
    short_sums,
)
from ....lazy_dataclass import dataclass
from ....tile.ir.schedule import Schedule, shares_rows
from ...ir import Node, Value
from ...schedule.groups import FusionGroup
from ...schedule.loop_axes import Frame, extents_of
from ..choose_schedule import BUSY, chosen, grid_of
from .anchors import anchor_extents, row_lines, whole_rows, whole_steps
from .spell import is_light

KEPT_BYTES = 24 << 10  # of shared memory, for what follows a matmul
RING_BYTES = 192 << 10  # of operands under way
NARROWEST = 32  # columns of a block of warps
Extents = tuple[int, ...]


@dataclass(frozen=True)
class MatmulForm:
    """operands: the extents of all, pair by pair, as the kernel takes them.  layout: of each; "n"
    of one that lies as [M, K] or [K, N], "t" of one whose matrices lie transposed.

    batch: of each operand, which matrix belongs to matrix z of the result; empty where there is
    one matrix.
    open: whether the kernel takes the extents at each call; else they are constants of it.
    swapped: whether it multiplies B' A', and has the result as the transpose of that.
    """

    operands: tuple[Extents, ...]
    layout: str
    batch: tuple[str, ...]
    open: bool
    schedule: Schedule  # its notes say why
    grid: Extents
    swapped: bool = False


def matmul_form(group: FusionGroup, frame: Frame, shared_bytes: int) -> MatmulForm:
    """The form of a group's anchor. frame: the axes of its result."""
    anchor = group.anchor
    assert anchor is not None
    extents, lead = anchor_extents(anchor), extents_of(anchor.outputs[0])[:-2]
    shapes = [extents_of(v) for v in anchor.inputs]
    operands = tuple((prod(s[:-2]), *s[-2:]) if lead else s for s in shapes)
    batch = tuple(_matrix_index(lead, s[:-2]) for s in shapes) if lead else ()
    schedule = _schedule(anchor, shared_bytes, *block_of(group, frame))
    eights = _rows_of_eight(anchor, operands)
    schedule = schedule.with_notes(*_operand_notes(anchor, lead, eights), *schedule.notes)
    if anchor.attrs.get("cluster", 1) > 1:
        apart = "tuned" not in anchor.attrs and max(row_lines(anchor)) > 1
        one, other = ("columns", "rows") if shares_rows((schedule.m, schedule.n)) else (
            "rows", "columns")
        schedule = schedule.with_cluster(anchor.attrs["cluster"]).with_notes(
            *schedule.notes, f"blocks of {one} in pairs, which bring their {other} for each other"
            + ": operands' rows are no multiples of 128 bytes" * apart)
    return MatmulForm(operands, anchor.attrs["layout"], batch, not (lead or eights), schedule,
                      grid_of(extents, schedule.m, schedule.n), is_swapped(group, frame))


def is_swapped(group: FusionGroup, frame: Frame | None) -> bool:
    """Whether blocks of the transposed result are chosen, and nothing follows that would read or
    write elements of it one by one: a tile of the same extents, results that are no 16 bits. Of few
    rows that is little, and the operands decide."""
    assert group.anchor is not None
    attrs = group.anchor.attrs
    return "swapped" in attrs and (is_narrow(attrs["block"][0]) or (
        frame is None or not _epilogue_operands(group, frame)) and all(
            v.aval.dtype.bits == 16 for v in group.outputs))


def is_narrow(rows: int) -> bool:
    """Whether blocks of so many rows are those of a result with few, transposed."""
    return rows < 64


def _rows_of_eight(anchor: Node, operands: tuple[Extents, ...]) -> bool:
    """Whether rows are of 16 bytes, as TMA needs them, and it takes their extents to see it: open
    extents are known to the compiler as multiples of 16 elements or not at all."""
    bits = anchor.inputs[0].aval.dtype.bits
    rows = [shape[-1] for shape in operands]
    return bits <= 16 and any(n % 16 for n in rows) and not any(n * bits % 128 for n in rows)


def _operand_notes(anchor: Node, lead: Extents, eights: bool) -> list[str]:
    letters = [chr(ord("a") + i) for i in range(len(anchor.inputs))]
    names = [n for n, way in zip(letters, anchor.attrs["layout"], strict=True) if way == "t"]
    many = len(anchor.inputs) // 2
    notes = [f"{' and '.join(names)} read transposed, as they lie" if len(names) > 1 else
             f"{names[0]} is read transposed, as it lies"] if names else []
    notes = [f"{many} matmuls into the same sums", *notes] if many > 1 else notes
    types = [v.aval.dtype.name for v in anchor.inputs]
    kinds = " and ".join(dict.fromkeys(types))
    if copied := anchor.attrs["copied"]:
        notes.append(f"copy of {' and '.join(copied)}, because wgmma reads {kinds} only along "
                     "the contracted axis")
    wide = anchor.attrs["accum"].name
    notes += [f"operands of {kinds}, sums in {wide}"] if types[0] != wide else []
    if "parts" in anchor.attrs:
        return [*notes, f"sums over K in {anchor.attrs['parts']} parts of {anchor.attrs['depth']}, "
                "because the result has few blocks"]
    if lead:
        return [*notes, f"{prod(lead)} matrices: extents are constants of the kernel"]
    return notes + ["extents are constants of the kernel, which show that rows are of 16 bytes"
                    ] * eights


def block_of(group: FusionGroup, frame: Frame | None) -> tuple[tuple[int, int, int], list[str]]:
    """Rows, columns and depth of the block of a group's matmul, and notes. Memory may halve its
    columns.

    What follows the matmul may need registers beside the sums. 128 x 256 of them leave none to
    spare: a gelu spills, and a residual that threads read (ptxas for sm_80 and sm_90a). Tiles that
    TMA brings take shared memory.
    """
    anchor = group.anchor
    assert anchor is not None
    numeric, extents = anchor.inputs[0].aval.type, anchor_extents(anchor)
    M, N = extents[-2:]
    m, n, k = default_block(numeric, M, N)
    pressure = _pressure(group, frame) if frame is not None else ""
    if "block" not in anchor.attrs:
        if short_sums(numeric):
            pressure = f"short sums of {numeric.dtype} are added to others beside them"
        crowded = bool(pressure) and n > 128
        n, notes = 128 if crowded else n, [f"128 columns, because {pressure}"] * crowded
        while numeric.dtype.bits == 16 and n > NARROWEST and 2 * prod(
                grid_of(extents, m, n)) <= BUSY:
            n, notes = n // 2, [f"{n // 2} columns, so that there are more blocks"]
        return (m, n, k), notes
    m, n = anchor.attrs["block"]
    swapped = is_swapped(group, frame)
    if "swapped" in anchor.attrs and not swapped:
        pressure = "what follows is not transposed"
    tuned = anchor.attrs.get("tuned", "")
    notes = [f"blocks of {m} x {n}{' of the transposed result' * swapped}: "
             f"{tuned or 'the quickest by the estimate of their time'}"] * (
        (m, n) != USUAL or bool(tuned))
    bits, K = numeric.dtype.bits, whole_steps(anchor)
    narrow = bits <= 16 and frame is not None and _epilogue_operands(group, frame)
    fit = BESIDE_TILES if narrow else CROWDED
    if pressure and (m * n > prod(fit[0]) or "swapped" in anchor.attrs) and not swapped:
        found = choose_blocks(MatmulExtents(M, N, K, bits, bits, prod(extents[:-2])), fit)
        m, n = found.rows, found.columns
        notes = [f"blocks of {m} x {n}, because {pressure}"]
    return (m, n, k), notes


def _schedule(anchor: Node, shared_bytes: int, block: tuple[int, int, int],
              notes: list[str]) -> Schedule:
    """The block, narrower where two stages of operands do not fit shared memory; then as many
    stages as it takes, four at most, or more of small operands in the form of warpgroups."""
    (m, n, k), notes = block, list(notes)
    bits, room = anchor.inputs[0].aval.dtype.bits, shared_bytes - KEPT_BYTES
    fits = n
    while fits > 64 and 2 * (m + fits) * k * bits // 8 > room:
        fits //= 2
    if fits < n:
        notes.append(f"{fits} columns, because two stages of {n} do not fit {room} bytes")
    slot = (m + fits) * k * bits // 8
    groups = "block" in anchor.attrs and whole_rows(anchor)
    most = max(4, RING_BYTES // slot) if groups else 4
    stages = max(2, min(most, room // slot)) if bits <= 16 else 2
    wide = m * fits > 64 * 128 or (groups and m > 64)
    made = chosen(m, fits, k, warps=8 if wide else 4, stages=stages)
    return made.with_notes(*notes)


def _pressure(group: FusionGroup, frame: Frame) -> str:
    """What behind a matmul needs many registers: a tile beside its own, or a function; or ""."""
    behind = _epilogue_nodes(group)
    if _epilogue_operands(group, frame):
        return "what follows reads a tile of the same extents"
    heavy = next((n.op.name for n in behind if not is_light(n)), "")
    return f"{heavy} behind it needs registers" if heavy else ""


def _epilogue_nodes(group: FusionGroup) -> list[Node]:
    return [n for n in group.nodes if n is not group.anchor and n.op.name != "reshape"]


def _epilogue_operands(group: FusionGroup, frame: Frame) -> list[Value]:
    """What is read behind the matmul that has its result's extents."""
    return [v for v in group.inputs if any(v in n.inputs for n in _epilogue_nodes(group))
            and all(frame.pattern(extents_of(v)) or ())]


def _matrix_index(lead: Extents, own: Extents) -> str:
    """Which matrix of an operand belongs to matrix z of the result, leading axes broadcast."""
    full = (1,) * (len(lead) - len(own)) + own
    if prod(full) == 1:
        return "0"
    if full == lead:
        return "z"
    terms, inner, stride = [], 1, 1
    for n, mine in zip(reversed(lead), reversed(full), strict=True):
        if mine != 1:
            terms.append(f"z // {inner} % {n} * {stride}")
            stride *= mine
        inner *= n
    return " + ".join(reversed(terms))


__all__ = ["MatmulForm", "block_of", "is_narrow", "matmul_form"]
