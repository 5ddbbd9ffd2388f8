"""GPUs of the tests, on host memory: their compiler keeps Tile IR, a launch does nothing, and ranks
are simulated. What is left of a call is what Python takes."""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests")]

import fake_driver  # noqa: E402
import fake_gpu  # noqa: E402
import fake_nccl  # noqa: E402
import lowering_cases  # noqa: E402
from tessera.mesh import placement  # noqa: E402


@contextmanager
def simulated_gpus() -> Iterator[Any]:
    """The driver."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())

        def use(fixture: Any, *given: Any) -> Any:
            made = inspect.unwrap(fixture)(*given)
            return stack.enter_context(contextmanager(lambda: made)()) if inspect.isgenerator(
                made) else made

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        driver = use(fake_driver.driver, patch)
        use(fake_gpu.gpu, driver, patch, folder)
        use(lowering_cases.apart, patch)
        use(fake_nccl.nccl, patch)
        patch.setattr(placement, "REAL", {"local", "single"})
        driver.run, driver.cuGraphLaunch = (lambda launch: None), lambda graph, stream: (0,)
        yield driver


__all__ = ["simulated_gpus"]
