"""Random kernels whose boxes reach beyond their tensors, on a GPU: what exists is what the
interpreter leaves and what fp64 NumPy says."""

from __future__ import annotations

import itertools
import os

import pytest

from edge_programs import accepted
from gpu_harness import require_gpu
from tessera import config
from tessera.runtime.device import device

require_gpu()

COUNT = 500 if os.environ.get("TESSERA_SLOW") == "1" else 60
PARTS = 4  # so that workers share them


@pytest.mark.parametrize("part", range(PARTS))
def test_random_kernels(part, request):
    seed = int(request.config.option.seed)
    programs = (p for p in accepted(seed) if p is not None)
    for program in itertools.islice(programs, part, COUNT, PARTS):
        args, here = program.call(), program.call()
        with config.scope(device="cpu"):
            program.kernel()(*here)
        kernel = program.kernel()
        with config.scope(device="cuda"):
            kernel(*args)
            device().synchronize()
        assert kernel.images, "it ran under the interpreter"
        program.check(*here[4:8])
        program.check(*args[4:8])
