"""Elements of a tile that ask a neighbour along an axis, whose number differs in one bit: another
register of the thread, another lane's by a shuffle, or another warp's through shared memory."""

from __future__ import annotations

from typing import cast

from tessera.lazy_dataclass import dataclass
from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.instruction import kind_bytes
from tessera.tile.cuda.intrinsics.exchange import registers
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.ir.ir import Op


@emits("exchange")
def _exchange(e: Emitter, op: Op) -> None:
    (x,), (made,), bit = op.args, op.outs, (op.attr["axis"], op.attr["bit"])
    layout, kind, text = e.layout(x), kind_of(e.dtype(x)), e.name(x)
    if bit not in layout.threads:
        pick = e.use("pick", f"use(fragments.pick({registers(layout, *bit)}))")
        e.define(made, f"{pick}({text})")
        return
    at, head = layout.threads.index(bit), f"{kind!r}, {layout.count}"
    if at < e.warp_bits:
        lanes = e.use("neighbours", f"use(exchange.lanes({head}, {1 << at}))")
        e.define(made, f"{lanes}({text})")
        return
    threads = 1 << len(layout.threads)
    area = _area(e, kind_bytes(kind) * layout.count * threads)
    put = e.use("put_exchange", f"use(exchange.put({head}, {threads}))")
    e.line(f"{put}({text}, {area.place}, {e.thread})")
    e.sync()
    get = e.use("get_exchange", f"use(exchange.get({head}, {threads}, {1 << at}))")
    e.define(made, f"{get}({area.place}, {e.thread})")
    area.read = len(e.lines)


@dataclass
class _Area:
    """Shared bytes of exchanges.  read: the line of the emitted text that read it last."""

    place: str
    size: int
    read: int = 0


def _area(e: Emitter, size: int) -> _Area:
    """The one of two that the exchange before did not take: those who read it last have met since,
    as a rule; else they do now."""
    areas = cast(list[_Area], e.memo.setdefault("exchanges", []))
    area = areas.pop(0) if len(areas) > 1 else None
    if area is None or area.size < size:
        area = _Area(e.scratch(size), size)
    areas.append(area)
    if (e.loops or area.read) and e.met <= area.read:
        e.sync()
    return area
