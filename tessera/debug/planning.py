"""`python -m tessera plan`: what a step takes on a mesh that need not be here.

    python -m tessera plan train.py --mesh dp=8,tp=9 --fabric nvl72
    python -m tessera plan --transformer 70b --mesh dp=8,tp=9 --fabric nvl72 --B 64 --html plan.html

A file offers `def plan(mesh)`, which returns a function and the tuple of its arguments: tensors,
tensor types, or ts.dist.stand_in for distributed ones. FILE::NAME names another such function.
Nothing that is planned is allocated. Without a file, a transformer is planned by formulas.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ArgumentError, did_you_mean
from ..mesh.device_mesh import Mesh, need_few
from ..mesh.device_mesh import mesh as make_mesh
from ..numerics import as_type
from ..planning.fabric import FABRICS, fabric, fabric_of
from ..planning.functions import need_plan, plan_report
from ..planning.planner import Planned
from ..planning.transformer import MODELS, Training, model, plan_transformer
from .inspect_command import import_file

# Option -> (type of its value, its meaning).
MODEL_FLAGS = {"layers": (int, "layers"), "d": (int, "width of the model"),
               "heads": (int, "heads of queries"),
               "kv_heads": (int, "heads of keys and values"),
               "ffn": (int, "hidden units of the feed-forward part"),
               "vocab": (int, "tokens of the vocabulary"), "T": (int, "tokens of a sequence"),
               "params": (float, "parameters in all, in place of the formula's count")}
TRAINING_FLAGS = {"B": (int, "sequences of a step, on all ranks"),
                  "microbatches": (int, "parts of a batch in a pipeline (4 for each stage)"),
                  "zero": (int, "what dp splits: 1 optimizer state, 2 gradients too, 3 parameters "
                                "too (0)"),
                  "chunks": (int, "parts of the layers on each rank of a pipeline; above 1 they "
                                  "interleave (1)"),
                  "schedule": (str, "of a pipeline: 1f1b or gpipe (1f1b)")}
SWITCHES = {"gated": "three matrices in the feed-forward part", "tied": "the embedding is the head"}
TRAINING_SWITCHES = {"sequence": "norms split over tp along the sequence",
                     "remat": "keep only the input of each layer"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", nargs="?", metavar="FILE[::NAME]",
                        help="a program with def plan(mesh), which returns (step, arguments)")
    parser.add_argument("--mesh", required=True, metavar="dp=8,tp=9", help="axes and extents")
    parser.add_argument("--fabric", metavar="NAME",
                        help=f"{', '.join([*FABRICS, 'FILE.json'])}; where it is not said, "
                             "8xh200 for up to 8 GPUs, infiniband for more")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the picture there")
    shape = parser.add_argument_group("a transformer, without a file")
    shape.add_argument("--transformer", metavar="NAME", help=", ".join(MODELS))
    for name, (kind, text) in (MODEL_FLAGS | TRAINING_FLAGS).items():
        shape.add_argument(f"--{name.replace('_', '-')}", type=kind, default=None, help=text,
                           metavar=name.upper() if kind is str else "N")
    shape.add_argument("--dtype", default=None, help="of products (bf16)")
    for name, text in (SWITCHES | TRAINING_SWITCHES).items():
        shape.add_argument(f"--{name}", action="store_true", default=None, help=text)


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Exit code 0 also for one that does not fit: that is an answer."""
    mesh = parse_mesh(args.mesh)
    found = fabric(args.fabric) if args.fabric else fabric_of(mesh)
    found.need(mesh)
    shaped = _given_options(args, MODEL_FLAGS, SWITCHES)
    if args.program:
        trained = {**_given_options(args, TRAINING_FLAGS, TRAINING_SWITCHES), **shaped}
        if args.transformer or trained:
            raise ArgumentError(f"a file and --{next(iter(trained), 'transformer')}",
                                hint="the program says what it computes; leave one of them out")
        planned = plan_file(args.program, mesh, found.name)
    else:
        if not args.transformer and not shaped:
            raise ArgumentError("nothing to plan", hint="FILE, --transformer 70b, or --layers 4 "
                                "--d 256 --heads 8 --vocab 256")
        planned = plan_transformer(model(args.transformer or "", **shaped), mesh, found,
                                   _training(args, mesh))
    print(planned)
    if args.html:
        args.html.write_text(planned.html())
        print(f"\nthe picture: {args.html}")
    return 0


def _given_options(args: argparse.Namespace, *tables: dict) -> dict[str, Any]:
    return {n: v for t in tables for n in t if (v := getattr(args, n)) is not None}


def _training(args: argparse.Namespace, mesh: Mesh) -> Training:
    """As given; a sequence for each microbatch of each rank of dp when B is not."""
    given = _given_options(args, TRAINING_FLAGS, TRAINING_SWITCHES)
    if "microbatches" not in given and "pp" in mesh.axes:
        given["microbatches"] = 4 * mesh.size("pp")  # a bubble of a fifth
    each = given.get("microbatches", 1) * (mesh.size("dp") if "dp" in mesh.axes else 1)
    if args.dtype:
        given["dtype"] = as_type(args.dtype).dtype
    assert given.keys() <= {f.name for f in fields(Training)}
    return Training(**({"B": each} | given))


def parse_mesh(text: str) -> Mesh:
    """The mesh of `dp=8,tp=9`: axes in this order, the last fastest. Raises ArgumentError."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, mark, extent = part.strip().partition("=")
        if not (mark and name.isidentifier() and extent.isdecimal() and int(extent)):
            raise ArgumentError(f"--mesh {text}: {part.strip()!r} is not AXIS=EXTENT",
                                hint="--mesh dp=8,tp=9")
        if name in axes:
            raise ArgumentError(f"--mesh {text} has the axis {name!r} twice")
        axes[name] = int(extent)
    extents = tuple(axes.values())
    need_few(extents)
    return make_mesh([f"cuda:{i}" for i in range(prod(extents))], tuple(axes), extents)


def plan_file(text: str, mesh: Mesh, on: str) -> Planned:
    """The plan of FILE::NAME, NAME being `plan` when it is left out. Raises ArgumentError."""
    path, _, name = text.partition("::")
    file = Path(path)
    if not file.is_file():
        raise ArgumentError(f"there is no file {path!r}", hint="python -m tessera plan FILE --mesh "
                            "dp=8,tp=9, with the path of a Python file")
    offered = _offered(import_file(file), name or "plan", path)
    step, arguments = need_plan(offered(mesh), path)
    return plan_report(step, *arguments, mesh=mesh, fabric=on)


def _offered(module: ModuleType, name: str, path: str) -> Any:
    found = getattr(module, name, None)
    if callable(found):
        return found
    functions = sorted(n for n, x in vars(module).items()
                       if callable(x) and getattr(x, "__module__", None) == module.__name__)
    near = did_you_mean(name, functions) if functions else ""
    raise ArgumentError(f"{path} has no function {name!r}", hint=near if near.startswith("did") else
                        "def plan(mesh): return step, (params, state, tokens): a function and its "
                        "arguments, by type")


__all__ = ["add_arguments", "parse_mesh", "plan_file", "run"]
