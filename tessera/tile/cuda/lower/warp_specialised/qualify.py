"""Which functions take the warp-specialised form; raises Refused with the reason for the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.lazy_dataclass import dataclass
from tessera.numerics import DType
from tessera.runtime.generations import MatmulOperand, WarpgroupMatmul
from tessera.tile.cuda.lower.warp_specialised.program import Refused, copied_windows
from tessera.tile.cuda.lower.warp_specialised.rewrite import is_part, ops_in
from tessera.tile.ir.ir import Const, For, Function, Op, SSAValue, defining_ops, definitions, walk
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import GlobalTensor, Scalar, TileType

# Besides pure ops: what a consumer or the producer does for its whole tile.
MATMULS = "matmul", "matmul_codes_stacked"
READ_AS_TILES = "bf16", "f16", "f32", "bool_"  # by consumers
STORES = "store_tile", "store_scatter", "store_element"  # by consumers, of which none reads later
ALLOWED = frozenset({"load_tile", "load_element", *STORES, *MATMULS})


@dataclass(frozen=True)
class SharedOperand:
    """The stored tile of an operand in shared memory. dtype: that is multiplied."""

    side: str
    major: str
    shape: tuple[int, int]
    tensor: GlobalTensor
    name: str
    dtype: DType


def qualify(function: Function) -> None:
    """Raises Refused where something in the function does not fit the form as a whole."""
    if not ops_in(function.body, *MATMULS):
        raise Refused("it has no matmul")
    if function.launch == "elements" or function.result[0] == "scalar":
        raise Refused(f"its groups are counted by {function.launch}")
    if function.lanes is not None:
        raise Refused(f"it fixes its lanes at {function.lanes}")
    types = definitions(function)
    for value, type in types.items():
        if isinstance(type, Scalar) and not type.uniform:
            raise Refused(f"{value.name} differs between lanes")
    for node in walk(function.body):
        if isinstance(node, Op):
            if node.name not in ALLOWED and (
                    OPS[node.name].effect != "pure" or node.name == "group_size"):
                raise Refused(f"{node.name} is not done by warpgroups that specialise")
        if isinstance(node, For) and node.over != "serial":
            raise Refused("a loop is spread over lanes")
        if isinstance(node, For) or is_part(node):
            check_coordinates(node, types)


def check_coordinates(node: For | Op, types: Mapping[SSAValue, Any]) -> None:
    """Of a view, or of a loop, whose variable may become one."""
    used = node.args[1:] if isinstance(node, Op) else (node.lo, node.hi, node.step)
    for x in used:
        dtype = x.dtype if isinstance(x, Const) else types[x].dtype if x in types else None
        if dtype is not None and dtype.name == "int64":
            raise Refused(f"{x} is an integer of 64 bits; coordinates of copies have 32")


def check_memory(function: Function, overlapping: bool) -> None:
    """The producer runs ahead: what it reads may not be written by the same kernel.

    overlapping: an argument is given twice, so any two parameters may be the same memory.
    """
    written = tensors_of(function, *STORES)
    if overlapping and written:
        raise Refused("an argument is given twice, and one of the two may be written")
    for tensor in tensors_of(function, "ring_load", "load_element"):
        if tensor in written:
            raise Refused(f"{tensor.name} is read ahead and written")


def tensors_of(function: Function, *names: str) -> dict[SSAValue, None]:
    """The tensors that ops of these names read or write parts of, in the order of the program."""
    made = defining_ops(function.body)
    places = [n.args[0] for n in ops_in(function.body, *names)]
    return dict.fromkeys(made[x].args[0] if x in made else x for x in places)  # type: ignore


def check_formats(op: Op, form: WarpgroupMatmul, a: Any, b: Any) -> None:
    """Of one matmul: whether there are instructions for it."""
    for t in (a, b):
        if t.dtype.name not in form.operands:
            raise Refused(f"wgmma does not multiply {t.dtype}")
    if a.dtype is not b.dtype and not (a.dtype.name[:4] == b.dtype.name[:4] == "fp8_"):
        raise Refused(f"wgmma does not multiply {a.dtype} by {b.dtype}")
    dtype = op.attr["dtype"].name
    if dtype != ("f32" if a.dtype.kind == "float" else "int32"):
        raise Refused(f"matmuls of {a.dtype} in {dtype}")
    if op.attr["precision"] == "f32":
        raise Refused("precision='f32' asks for more than tensor cores give")


def check_shape(shape: tuple[int, int], k: int, bits: int, form: WarpgroupMatmul) -> None:
    """Of one matmul."""
    (m, n), step = shape, form.column_step
    if m % form.rows:
        raise Refused(f"a matmul has {m} rows, not a multiple of {form.rows}")
    if n % step or n > form.most_columns:
        raise Refused(f"a matmul has {n} columns; multiples of {step} up to {form.most_columns} "
                      "are done")
    if k * bits % (8 * form.step_bytes):
        raise Refused(f"a matmul sums over {k}, not a multiple of {8 * form.step_bytes // bits}")


def check_operand(x: SharedOperand, load: Op, view: Op, known: Any, aligned: frozenset[str],
                  form: WarpgroupMatmul) -> None:
    """Whether TMA can bring this operand, and wgmma read it there. known: divisors of extents."""
    tensor, dtype, copies = x.tensor, x.tensor.dtype, form.copies
    if x.major != "K" and not _any_major(form.operands[x.dtype.name], x.side):
        raise Refused(f"{x.name}: wgmma reads {x.dtype} only along the contracted axis")
    if load.attr["fill"] != 0:
        raise Refused(f"{x.name} is filled with {load.attr['fill']} outside")
    if view.name == "windows":
        check_windows(x, view, known, form)
    else:
        check_box(x, view)
    if x.name not in aligned:
        raise Refused(f"{x.name} may not start at a multiple of {copies.alignment_bytes} bytes")
    if known.extent(str(tensor.dims[-1])) * dtype.bits % (8 * copies.alignment_bytes):
        raise Refused(f"rows of {x.name} may not be multiples of {copies.alignment_bytes} bytes",
                      str(tensor.dims[-1]))
    if x.shape[0] > copies.most_box:
        raise Refused(f"a tile of {x.name} has {x.shape[0]} rows; a copy brings {copies.most_box}")


def _any_major(operand: MatmulOperand, side: str) -> bool:
    return operand.any_major or operand.by_columns and side == "a"


def check_box(x: SharedOperand, view: Op) -> None:
    """Whether a view is a matrix whose rows are contiguous."""
    kept, rank = tuple(view.attr["kept"]), len(x.tensor.dims)
    if len(kept) != 2 or kept[1] != rank - 1 or kept[0] > kept[1] or rank > 5:
        raise Refused(f"{x.name} is no box of rows that are contiguous")


def check_windows(x: SharedOperand, view: Op, known: Any, form: WarpgroupMatmul) -> None:
    """Whether TMA unfolds images: each panel of columns lies in one pixel of a window."""
    windows, width = copied_windows(view.attr, x.tensor.dtype)
    panel = width * 8 // x.tensor.dtype.bits
    if not panel:
        raise Refused(f"{x.name}: copies of windows do not bring {x.shape[1]} columns of "
                      f"{windows.channels} channels")
    for name, found, most in (("padding", windows.reach, form.copies.most_corner),
                              ("window", windows.offset, form.copies.most_offset),
                              ("stride", max(windows.geometry.stride), form.copies.most_stride)):
        if found > most:
            raise Refused(f"{x.name}: a copy's windows have a {name} of at most {most} pixels, not "
                          f"{found}")
    if known.divisor(view.args[2]) % panel:
        raise Refused(f"columns of windows of {x.name} may not begin at multiples of {panel}")
    if windows.steps[1] * x.tensor.dtype.bits % (8 * form.copies.alignment_bytes):
        raise Refused(f"{x.name}: its pixels may not be multiples of {form.copies.alignment_bytes} "
                      "bytes apart")


def comes_as_tile(x: SharedOperand, load: Op, view: Op, known: Any, aligned: frozenset[str],
                  form: WarpgroupMatmul) -> bool:
    """Whether TMA can bring a matrix of numbers that consumers read into registers."""
    dtype = x.tensor.dtype
    if dtype.name not in READ_AS_TILES or len(x.shape) != 2 or (
            x.shape[0] % form.rows or x.shape[1] * dtype.bits % (8 * form.step_bytes)):
        return False
    try:
        check_operand(x, load, view, known, aligned, form)
    except Refused:
        return False
    return True


def comes_as_row(tensor: GlobalTensor, tile: TileType, load: Op, view: Op, known: Any,
                 aligned: frozenset[str], form: WarpgroupMatmul) -> bool:
    """Whether TMA can bring a row of numbers of 16 or 32 bits, contiguous in memory."""
    copies, rank = form.copies, len(tensor.dims)
    plain = tensor.dtype is tile.dtype and tensor.dtype.bits in (16, 32) and load.attr["fill"] == 0
    row = len(tile.shape) == 1 and tuple(view.attr["kept"]) == (rank - 1,) and rank <= 5
    if not plain or not row or view.args[0].name not in aligned:  # type: ignore[union-attr]
        return False
    step = 8 * copies.alignment_bytes // tensor.dtype.bits
    pitched = rank == 1 or known.extent(str(tensor.dims[-1])) % step == 0
    if known.divisor(view.args[-1]) % step:
        return False  # a copy that begins elsewhere is an illegal instruction (H100)
    return pitched and tile.shape[0] % step == 0 and tile.shape[0] <= copies.most_box


__all__ = ["MATMULS", "STORES", "SharedOperand", "check_formats", "check_memory", "check_operand",
           "check_shape", "comes_as_row", "comes_as_tile", "qualify", "tensors_of"]
