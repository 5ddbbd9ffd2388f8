"""The run's seed and order: what it prints is what its tests had, in every process."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis.internal.conjecture.providers import HypothesisProvider

CONFTEST = Path(__file__).resolve().parent.parent / "conftest.py"
TEST = """
import pytest

@pytest.mark.parametrize("i", range(4))
def test_fails(rng, request, i):
    raise AssertionError(f"had {request.config.option.seed}")
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_drawn_seed_is_that_of_all_processes(tmp_path: Path, workers: int) -> None:
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_some.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "--seed", "random",
               "-p", "no:cacheprovider", str(tmp_path)]
    text = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    had = set(re.findall(r"^E +AssertionError: had (\d+)", text, re.M))
    assert had == set(re.findall(r"replay: --seed (\d+)", text)) and len(had) == 1, text
    assert "4 failed" in text


def test_what_is_drawn_does_not_follow_from_the_modules_that_are_imported() -> None:
    assert not len(HypothesisProvider(None)._local_constants)


def test_the_files_that_begin_first_are_there(request: pytest.FixtureRequest) -> None:
    own = request.config.pluginmanager.get_plugin(str(CONFTEST))
    assert all((CONFTEST.parent / name).is_file() for name in own.LONGEST_FILES)
