"""The machine code of a call, made before the call: what tuning does apart from measuring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera import config as settings
from tessera.tile.interpreter.arguments import Bound
from tessera.tile.interpreter.launch import Config
from tessera.tile.launch import first_call
from tessera.tile.launch.placement import place_call
from tessera.tile.launch.recipe import LaunchTarget

if TYPE_CHECKING:
    from tessera.tile.kernel.kernel import Kernel


def prepare(kernel: Kernel, bound: Bound, config: Config) -> None:
    """Compiles a kernel with a schedule for these arguments; nothing under the interpreter.

    Needs no context of the GPU, so any thread may do it.
    """
    place = place_call(kernel.__name__, {**bound.constants, **bound.given})
    if place.on_host:
        return
    schedule, arrays = kernel.choose(bound, config), first_call.arrays_of(bound, place)
    function, lanes, grid = first_call.specialised(kernel, config, bound, schedule)
    target = LaunchTarget(place.device, grid, "", bool(settings.debug))
    first_call.image_of(kernel, function,
                 first_call.request_for(schedule, bound, function, lanes, arrays, target))


__all__ = ["prepare"]
