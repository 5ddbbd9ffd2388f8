"""The machine code of a call, made before the call: what tuning does apart from measuring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera import config as settings
from tessera.tile.interpreter.arguments import Bound
from tessera.tile.interpreter.launch import Config
from tessera.tile.launch.compile_images import WantedImage
from tessera.tile.launch.first_call import arrays_of, request_for
from tessera.tile.launch.machine_code import image_for
from tessera.tile.launch.recipe import LaunchTarget

if TYPE_CHECKING:
    from tessera.tile.kernel.kernel import Kernel

DEFAULT = Config()


def prepare(kernel: Kernel, bound: Bound, config: Config) -> None:
    """Compiles a kernel with a schedule for these arguments; nothing under the interpreter.

    Needs no context of the GPU, so any thread may do it.
    """
    if not bound.place.on_host:
        w = wanted_image(kernel, bound, config)
        image_for(w.function, w.request, w.loaded)


def wanted_image(kernel: Kernel, bound: Bound, config: Config = DEFAULT) -> WantedImage:
    """What a call with these arguments on a GPU has to have compiled."""
    work = kernel.specialised(bound, config)
    target = LaunchTarget(bound.place.device, work.grid, "", bool(settings.debug),
                          settings.numerics)
    return WantedImage(work.function, request_for(kernel, work, bound, arrays_of(bound), target),
                       kernel.images)


__all__ = ["prepare", "wanted_image"]
