"""The machine code of a call, made before the call: what tuning does apart from measuring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera import config as settings
from tessera.tile.arguments import Bound
from tessera.tile.device import calls
from tessera.tile.device.place import placement
from tessera.tile.device.recipe import Target
from tessera.tile.launch import Config

if TYPE_CHECKING:
    from tessera.tile.kernel import Kernel


def prepare(kernel: Kernel, bound: Bound, config: Config) -> None:
    """Compiles a kernel with a schedule for these arguments; nothing under the interpreter.

    Needs no context of the GPU, so any thread may do it.
    """
    place = placement(kernel.__name__, {**bound.constants, **bound.given})
    if place.on_host:
        return
    schedule, arrays = kernel.choose(bound, config), calls.arrays_of(bound, place)
    function, lanes, grid = calls.specialised(kernel, config, bound, schedule)
    target = Target(place.device, grid, "", bool(settings.debug))
    calls.image_of(kernel, function,
                 calls.request_for(schedule, bound, function, lanes, arrays, target))


__all__ = ["prepare"]
