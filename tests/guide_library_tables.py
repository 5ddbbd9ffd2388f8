"""Tables of the guide from what was measured of the library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

KINDS = ("forward", "images", "filters")
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |\n" for row in lines)


def measured(name: str) -> tuple[dict[str, Any], str] | None:
    """A file of results and where they are from; None while there is none."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return None
    file = json.loads(path.read_text())
    return file, f"{file['device']}, {file['date']}, commit {file['commit']}, `{file['command']}`"


def convolutions_table() -> str | None:
    """Of benchmarks/convolutions.py; None while nothing is measured."""
    if (found := measured("convolutions")) is None:
        return None
    file, where = found
    rows = []
    for layer, kinds in file["layers"].items():
        cells = [f"{kinds[k]['ours_us']:.0f}, {kinds[k]['cudnn_us']:.0f}, {kinds[k]['ratio']:.2f}"
                 if k in kinds else "" for k in KINDS]
        rows.append((layer, *cells))
    rows.append(("geometric mean", *(f"{file['geometric_mean'][k]:.2f}" for k in KINDS)))
    return f"{where}; {file['batch']} images.\n\n" + markdown(
        ("Layer", "forward: us, cuDNN's, ratio", "gradient of images", "gradient of filters"), rows)


def fft_table() -> str | None:
    """Of benchmarks/fft.py; None while nothing is measured."""
    if (found := measured("fft")) is None:
        return None
    file, where = found
    rows = [(name, f"{c['ours_us']:.0f}", f"{c['cufft_us']:.0f}", f"{c['ratio']:.2f}",
             f"{c['error']:.1e}", f"{c['cufft_error']:.1e}") for name, c in file["cases"].items()]
    return f"{where}; a copy of complex points takes {file['copy_us']:.0f} us.\n\n" + markdown(
        ("Transforms", "us", "cuFFT, us", "Ratio", "error", "cuFFT's"), rows)


LIBRARY = {"convolutions": convolutions_table, "fft": fft_table}

__all__ = ["LIBRARY", "markdown"]
