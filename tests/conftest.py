"""One seed for the whole run: printed at the top, replayed with `--seed N`."""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from tessera import config as tessera_config

# No deadline: the first example compiles, and the machine may be shared. The examples follow from
# --seed, so no database of failures is kept: a failure is replayed by the seed it prints.
settings.register_profile(
    "tessera",
    deadline=None,
    database=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="replay the random inputs of a run")


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its seed, and xdist copies the options
def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        config.option.seed = secrets.randbelow(2**31)
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(config.option.seed)
    settings.load_profile("tessera")


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed} (replay: --seed {config.option.seed})"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Again at the end when something failed: `pytest -q` prints no header."""
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(pytest_report_header(config))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of this run's seed and this test's name: the same alone and among others."""
    seed = request.config.option.seed
    print(f"rng of this test: rerun with --seed {seed}")  # pytest shows it when the test fails
    return np.random.default_rng([seed, zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture
def fresh_config(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Settings as in a new process without TESSERA_* variables; returns a monkeypatch for them."""
    for setting in tessera_config.SETTINGS.values():
        monkeypatch.delenv(setting.env, raising=False)
    tessera_config.reset()
    yield monkeypatch
    tessera_config.reset()
