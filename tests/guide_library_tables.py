"""Tables of the guide from what was measured of the library."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
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


def by_length(kind: str, cell: Callable[[dict[str, Any]], str]) -> tuple[dict, str, str] | None:
    """Of benchmarks/rows.py: the file, where it was measured, and a table with a case in a line and
    lengths of rows side by side."""
    if (found := measured(kind)) is None:
        return None
    file, where = found
    cells: dict[str, dict[int, str]] = {}
    for name, x in file.items():
        if "of copy" in x:
            case, columns = name.rsplit(", ", 1)
            cells.setdefault(case, {})[int(columns)] = cell(x)
    lengths = sorted({n for row in cells.values() for n in row})
    lines = [(case, *(row.get(n, "") for n in lengths)) for case, row in sorted(cells.items())]
    return file, where, markdown(("Rows of", *map(str, lengths)), lines)


def rows_table() -> str | None:
    """Shares of a copy's rate, and ratios to torch.compile."""
    found = by_length("rows", lambda x: f"{x['of copy']:.2f}, {x['of torch.compile']:.2f}")
    if found is None:
        return None
    file, where, table = found
    ratio = file["all of torch.compile"]
    return (f"{where}. Ratios to `torch.compile`: geometric mean {ratio['geometric mean']:.2f}, "
            f"the least {ratio['least']:.2f}.\n\n{table}")


def orders_table() -> str | None:
    """Of sorts."""
    found = by_length("orders", lambda x: f"{x['us']:.0f}, {x['of PyTorch']:.2f}, "
                      f"{x['of torch.compile']:.2f}")
    return None if found is None else f"{found[1]}.\n\n{found[2]}"


def packed_table() -> str | None:
    """Of benchmarks/packed_weights.py: rows in a line, types of weights and rows side by side."""
    if (found := measured("packed_weights")) is None:
        return None
    file, where = found
    kinds = [k for k in next(iter(file["rows"].values())) if k != "cuBLAS"]
    lines = [(rows, f"{x['cuBLAS']['us']:.1f}", *(f"{x[k]['us']:.1f}, {x[k]['ratio']:.2f}"
                                                 for k in kinds)) for rows, x in
             file["rows"].items()]
    return f"{where}.\n\n" + markdown(
        ("Rows", "cuBLAS, us", *(k.replace(" ", ", ") for k in kinds)), lines)


def programs_table(benchmark: str) -> str | None:
    """Of benchmarks/user_programs.py or model_parts.py; None while nothing is measured."""
    if (found := measured(benchmark)) is None:
        return None
    file, where = found
    lines = [(name, f"{x['ours_us']:.0f}", f"{x['torch_us']:.0f}", f"{x['ratio']:.2f}",
              f"{x['gb_s']}") for name, x in
             sorted(file["programs"].items(), key=lambda entry: entry[1]["ratio"])]
    return (f"{where}. Geometric mean of the ratios {file['geometric_mean']:.2f}, the least "
            f"{file['least']:.2f}.\n\n" + markdown(
                ("Program", "us", "torch.compile, us", "Ratio", "GB/s"), lines))


def plain_attention_table() -> str | None:
    """Of benchmarks/plain_attention.py; None while nothing is measured."""
    if (found := measured("plain_attention")) is None:
        return None
    file, where = found
    lines = []
    for name, x in file["cases"].items():
        pairs = [[x[f"{side}{part}"] for side in ("ours", "SDPA", "with scores")]
                 for part in ("", ", gradient")]
        lines.append((name, *(", ".join(f"{ms:.2f}" for ms in pair) for pair in pairs)))
    return f"{where}.\n\n" + markdown(
        ("Mask, sequences x heads of queries x keys", "ms, SDPA's, with scores", "with gradients"),
        lines)


LAYOUTS = ("nt", "nn", "tn", "tt")


def products_table() -> str | None:
    """Of benchmarks/matmuls.py: an extent in a line, from the least ratio on, layouts side by side.
    """
    if (found := measured("products")) is None:
        return None
    file, where = found
    total, products = file["bf16"]["total"], file["bf16"]["products"]
    least = {shape: min(f["ratio"] for f in by.values()) for shape, by in products.items()}
    lines = [(shape, *(_time_and_ratio(products[shape][w]) for w in LAYOUTS))
             for shape in sorted(least, key=least.__getitem__)]
    means = ", ".join(f"{w} {total[w]:.2f}" for w in LAYOUTS)
    return (f"{where}. Geometric mean of the ratios {total['geometric mean']:.3f} ({means}), the "
            f"least {total['least']:.2f}.\n\n" + markdown(("M x N x K", *LAYOUTS), lines))


def attention_gradients_table() -> str | None:
    """Of benchmarks/attention_backward.py; None while nothing is measured."""
    if (found := measured("attention_backward")) is None:
        return None
    file, where = found
    sides = {"tessera": "Tessera", "cuDNN": "cuDNN"}
    lines = [(case, *(f"{x['ms'][side]:.2f} ({x['TFLOP/s'][side]})" for side in sides),
              f"{x['of cuDNN']:.2f}") for case, x in file.items() if isinstance(x, dict)]
    return (f"{where}. Geometric mean of the ratios {file['geometric mean of cuDNN']:.2f}.\n\n"
            + markdown(("Heads and queries", *(f"{side}, ms (TFLOP/s)" for side in sides.values()),
                        "Ratio"), lines))


def attention_forward_table() -> str | None:
    """Of benchmarks/attention_forward.py: a length in a line, causal and full side by side."""
    if (found := measured("attention_forward")) is None:
        return None
    file, where = found
    lines: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for case, x in file.items():
        if isinstance(x, dict):
            D, S, mask = case.split(", ")
            lines.setdefault((int(D[2:]), int(S[2:])), {})[mask] = x
    ratios = [x["ratio"] for by in lines.values() for x in by.values()]
    return (f"{where}. Geometric mean of the ratios {file['geometric mean']:.2f}, the least "
            f"{min(ratios):.2f}.\n\n" + markdown(
                ("Elements", "Queries", *(f"{m}: TFLOP/s, cuDNN's, FlashAttention's, ratio"
                                          for m in ("Causal", "full"))),
                [(str(D), str(S), *(_rates(by[m]) if m in by else "" for m in ("causal", "full")))
                 for (D, S), by in sorted(lines.items())]))


def _rates(x: dict[str, Any]) -> str:
    sides = (str(x["TFLOP/s"].get(side, "")) for side in ("tessera", "cuDNN", "FlashAttention"))
    return f"{', '.join(sides)}, {x['ratio']:.2f}"


def types_table() -> str | None:
    """Of benchmarks/matmuls.py --types: a type and an extent in a line, layouts side by side."""
    if (found := measured("matmuls")) is None:
        return None
    file, where = found
    kinds = {k: x for k, x in file.items() if isinstance(x, dict) and "products" in x}
    lines = [(kind, shape, *(_time_and_ratio(by[w]) if w in by else "" for w in LAYOUTS))
             for kind, x in kinds.items() for shape, by in x["products"].items()]
    means = "; ".join(f"{kind} {x['total']['geometric mean']:.2f}, {x['total']['least']:.2f}"
                      for kind, x in kinds.items())
    return (f"{where}. Geometric means of the ratios, and the least: {means}.\n\n"
            + markdown(("Operands", "M x N x K", *LAYOUTS), lines))


def _time_and_ratio(f: dict[str, Any]) -> str:
    us = f["tessera"]
    return f"{us:.{0 if us >= 100 else 1}f}, {f['ratio']:.2f}"


LIBRARY = {"attention_forward": attention_forward_table,
           "attention_gradients": attention_gradients_table,
           "convolutions": convolutions_table, "fft": fft_table, "orders": orders_table,
           "packed": packed_table, "plain_attention": plain_attention_table,
           "products": products_table, "rows": rows_table, "types": types_table,
           "user_programs": partial(programs_table, "user_programs"),
           "model_parts": partial(programs_table, "model_parts")}

__all__ = ["LIBRARY", "markdown"]
