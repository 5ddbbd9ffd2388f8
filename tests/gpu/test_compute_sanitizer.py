"""The smallest samples of the library's routines under NVIDIA's compute-sanitizer: every access of
memory is checked, and each pair of accesses to shared memory for a race.

racecheck orders threads by their own arrivals at an mbarrier alone. Where one lane arrives for its
warp, behind a barrier of the warp, it reports what the other lanes read before: so of attention's
gradient in turn, of which it reports nothing when all lanes arrive (H200, CUDA 13.0).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_harness import require_gpu

require_gpu()
ROOT = Path(__file__).parents[2]
SANITIZER = shutil.which("compute-sanitizer") or shutil.which(
    "compute-sanitizer", path="/usr/local/cuda/bin:/opt/cuda/bin")
FOUND = 86  # the exit status of a program in which something was found


def under(tool: str, folder: Path, *pytest_arguments: str) -> subprocess.CompletedProcess[str]:
    """TMPDIR: the locks of tests that share a card are not those of this one, which holds them."""
    assert SANITIZER is not None
    return subprocess.run(
        [SANITIZER, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "5",
         sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *pytest_arguments],
        cwd=ROOT, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True)


@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not on this machine")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_routines_are_clean(tool, tmp_path):
    done = under(tool, tmp_path, "tests/gpu/test_stdlib.py", "-k", "test_results")
    text = (done.stdout + done.stderr)[-4000:]
    assert done.returncode == 0, text
    assert "SUMMARY: 0 " in text and " passed" in text, text


@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not on this machine")
def test_a_write_out_of_bounds_is_found(tmp_path):
    (tmp_path / "test_out.py").write_text(
        "import numpy as np\n"
        "from numba import cuda\n"
        "@cuda.jit\n"
        "def out(x):\n"
        "    x[cuda.threadIdx.x + 4096] = 1.0\n"
        "def test_it():\n"
        "    out[1, 32](cuda.to_device(np.zeros(8, np.float32)))\n"
        "    cuda.synchronize()\n")
    done = under("memcheck", tmp_path, str(tmp_path / "test_out.py"))
    assert done.returncode not in (0, 5), (done.stdout + done.stderr)[-2000:]
    assert "Invalid __global__ write" in done.stdout + done.stderr
