"""Says which test failed as soon as it is known: a run that is killed has no summary."""

from __future__ import annotations

import os
import sys

import pytest


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line to stderr, from the process that writes the dots and not from workers."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        said = crash.message.partition("\n")[0] if crash else report.longreprtext[-200:]
        print(f"\nFAILED {report.nodeid} ({report.when}): {said}", file=sys.stderr, flush=True)
