"""The tables of the guide, made from the registries: errors, settings, formats, ops, functions; and
from what was measured, in benchmarks/results."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import json
import math
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

import tessera as ts
from cpu.test_layers import FLOORS
from guide_api import API
from guide_library_tables import LIBRARY, markdown
from guide_mesh_tables import MESHES
from guide_onnx_tables import ONNX
from guide_optimizer_tables import OPTIMIZER
from tessera import config, errors, numerics
from tessera.__main__ import COMMANDS
from tessera.bench.catalogue import MODELS
from tessera.bench.kernel_classes import CLASSES
from tessera.call_errors import show_call
from tessera.graph.op import OPS, GraphOp
from tessera.graph.operand import PUBLIC
from tessera.kernels import ROUTINES
from tessera.mesh.collectives.record import COLLECTIVES, Collective
from tessera.tile.cuda.lower.warp_specialised.program import PipelineKnobs
from tessera.tile.ir import errors as tile_errors
from tessera.tile.ir import schedule
from tessera.tile.ops import OPS as TILE_OPS

PACKAGE = Path(ts.__file__).parent
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
MEASURED, LAUNCHES = RESULTS / "kernels.json", RESULTS / "launch_overhead.json"
OFFLOAD = RESULTS / "offload.json"
POWER = RESULTS / "power_limit.json"
CPU_MODELS = RESULTS / "cpu_models.json"
DECODE = RESULTS / "decode.json"
ATTENTION_RULES = RESULTS / "attention_rules.json"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def first_sentence(doc: str | None) -> str:
    """The first paragraph of a docstring, on one line."""
    text = inspect.cleandoc(doc or "").split("\n\n")[0].split("\n  ")[0]
    return " ".join(text.split())


def ours(fn: Any) -> bool:
    """Whether it was declared in the package: tests declare things of their own."""
    return getattr(inspect.unwrap(fn), "__module__", "").startswith("tessera.")


# --- errors -----------------------------------------------------------------------------------
def error_classes() -> list[type]:
    """The classes of tessera.errors in the order in which they are declared."""
    made = [c for c in vars(errors).values() if isinstance(c, type)]
    return [c for c in made if issubclass(c, errors.TesseraError)]


def builtin_bases(cls: type) -> list[str]:
    plain = [b for b in cls.__mro__ if b.__module__ == "builtins"]
    return [b.__name__ for b in plain if b not in (Exception, BaseException, object)
            and not any(issubclass(c, b) and c is not b for c in plain)]


def errors_table() -> str:
    rows = [
        (f"`{c.default_code}`", f"`{c.__name__}`",
         ", ".join(f"`{b}`" for b in builtin_bases(c)) or "`Exception`", first_sentence(c.__doc__))
        for c in error_classes()
    ]
    return markdown(("Code", "Class", "Also a", "Raised for"), rows)


def special_codes() -> Iterator[tuple[str, str, str]]:
    """(code, class, template of the message) of each error that is given a code of its own."""
    names = {c.__name__ for c in error_classes()}
    for path in SOURCES:
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or getattr(call.func, "id", "") not in names:
                continue
            for word in call.keywords:
                if word.arg == "code" and isinstance(word.value, ast.Constant):
                    yield word.value.value, call.func.id, template(call.args[0])  # type: ignore[attr-defined]


def template(message: ast.expr) -> str:
    """An f-string with … in the place of its values."""
    parts = message.values if isinstance(message, ast.JoinedStr) else [message]
    text = "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in parts)
    return re.sub(r"\s+", " ", text)


@functools.cache  # two tests ask, and to find the texts takes 3 s
def special_errors_table() -> str:
    rows = sorted({(f"`{code}`", f"`{cls}`", text) for code, cls, text in special_codes()})
    return markdown(("Code", "Class", "Message"), rows)


# --- settings ---------------------------------------------------------------------------------
def readers(name: str) -> list[str]:
    """The modules that read a setting."""
    use = re.compile(rf'config\.{name}\b|config\.get\("{name}"\)')
    found = [p.relative_to(PACKAGE) for p in SOURCES if p.name != "config.py"
             and use.search(p.read_text())]
    return [p.with_suffix("").as_posix().replace("/", ".") for p in found]


def settings_table() -> str:
    rows = []
    for s in config.SETTINGS.values():
        default = s.default.__name__.replace("_", " ") if callable(s.default) else s.default
        rows.append((f"`{s.name}`", f"`{s.env}`", s.kind.accepts, str(default), s.doc,
                     ", ".join(f"`{r}`" for r in readers(s.name))))
    return markdown(("Setting", "Variable", "Accepts", "Default", "Meaning", "Read by"), rows)


# --- numerics ---------------------------------------------------------------------------------
def ranges_table() -> str:
    """What each format makes of numbers it does not hold, as the codec does it now."""
    rows = []
    for t in numerics.all_dtypes():
        if t.kind == "bool":
            continue
        huge = float(t.max) * 4 if t.kind != "float" or t.bits < 64 else math.inf
        cells = [_stored(huge, t), _stored(huge, t, saturate=True), _stored(-huge, t),
                 _stored(math.inf, t), _stored(math.inf, t, saturate=True), _stored(math.nan, t)]
        least = "none" if t.kind != "float" or not t.man else f"{float(t.smallest):.8g}"
        rows.append((f"`{t.name}`", *cells, least))
    return markdown(("Format", "Too large", "`@saturate`", "Too small", "inf", "inf `@saturate`",
                     "NaN", "Least subnormal"), rows)


def _stored(x: float, t: ts.DType, saturate: bool = False) -> str:
    with np.errstate(all="ignore"):
        value = numerics.decode(numerics.encode(np.array([x]), t, saturate=saturate), t)[0]
    number = str(int(value)) if t.kind != "float" else f"{float(value):.8g}"
    return {"nan": "NaN", "-0": "0"}.get(number, number)


# --- kernels ----------------------------------------------------------------------------------
def kernel_errors_table() -> str:
    made = [c for c in vars(tile_errors).values() if isinstance(c, type)
            and issubclass(c, tile_errors.KernelError) and c is not tile_errors.KernelError]
    rows = [(f"`{c.default_code}`", f"`{c.__name__}`",
             ", ".join(f"`{b}`" for b in builtin_bases(c)), first_sentence(c.__doc__))
            for c in made]
    return markdown(("Code", "Class", "Also a", "Raised for"), rows)


def tile_ops_table() -> str:
    """What kernels may call, in the order of the modules that declare it."""
    found = sorted((op for op in TILE_OPS.values() if op.public), key=lambda op: op.family)
    rows = [(f"[`{op.signature}`](api/tile.md#tstile{op.name})", first_sentence(op.doc),
             f"`tile.ops.{op.family}`") for op in found]
    return markdown(("Operation", "Meaning", "Declared in"), rows)


# --- the standard library ---------------------------------------------------------------------
def routines_table() -> str:
    """The routines of the library, by name."""
    rows = [(f"`{r.__name__}{r.shown_signature}`", meaning_of(r.__doc__), r.record.arrays)
            for _, r in sorted(ROUTINES.items())]
    return markdown(("Function", "What it computes", "Arrays"), rows)


def meaning_of(doc: str | None) -> str:
    """The first paragraph of a docstring, equations as code."""
    text = first_sentence(doc).rstrip(".")
    return f"`{text}`"


# --- collectives ------------------------------------------------------------------------------
def collectives_table() -> str:
    """The records of collectives, in the order in which they are declared."""
    def shown(c: Collective) -> str:
        return ", ".join(["x", "axis", *(f"{name}=" for name in c.samples[0].attrs)])

    rows = [(f"`ts.dist.{c.name}({shown(c)})`", c.doc, c.adjoint,
             "yes" if c.same_result else "") for c in COLLECTIVES.values()]
    return markdown(("Call", "Each rank gets", "Its adjoint", "One value on all"), rows)


# --- ops and functions ------------------------------------------------------------------------
def ops_table() -> str:
    rows = [
        (f"`{op.name}`", op.doc or first_sentence(getattr(PUBLIC.get(op.name), "__doc__", "")),
         derivative(op), letters(op), "yes" if op.loop else "", ", ".join(sorted(op.effects)))
        for op in sorted(OPS.values(), key=lambda op: op.name) if ours(op.shape)
    ]
    return markdown(("Op", "Meaning", "Derivative", "Axes", "In loops", "Effects"), rows)


def derivative(op: GraphOp) -> str:
    if not op.differentiable:
        return "zero"
    rules = (("reverse", op.vjp or op.derives), ("forward", op.jvp or op.derives))
    return ", ".join(word for word, rule in rules if rule) or "none"


def letters(op: GraphOp) -> str:
    if op.axes is None:
        return ""
    return "by its attributes" if callable(op.axes) else f"`{op.axes}`"


def functions_table() -> str:
    """Public functions on tensors, in the order of the modules that hold them."""
    found = [f for f in PUBLIC.values() if ours(f)]
    found.sort(key=lambda f: (inspect.unwrap(f).__module__, f.__name__))
    rows = [(f"[`ts.{call_text(f)}`](api/ts.md#ts{f.__name__})", first_sentence(f.__doc__),
             f"`{family(f)}`") for f in found]
    return markdown(("Function", "Meaning", "Declared in"), rows)


def transforms_table() -> str:
    rows = [(f"`ts.{name}`", first_sentence(getattr(ts, name).__doc__), f"`{family(fn)}`")
            for name in sorted(ts.ad.__all__) if callable(fn := getattr(ts, name))
            and name not in PUBLIC]
    return markdown(("Transform", "Meaning", "Declared in"), rows)


NAMED_ELSEWHERE = (ts.DType | numerics.Modifier | numerics.ModifierKind | types.ModuleType | float)


def names_table() -> str:
    """The other callable names of ts: types, tensors, numerics, compiling."""
    shown = PUBLIC.keys() | set(ts.ad.__all__) | set(errors.__all__)
    rows = []
    for name in sorted(set(ts.__all__) - shown):
        made = getattr(ts, name)
        if isinstance(made, NAMED_ELSEWHERE):
            continue
        rows.append((f"`ts.{name}`", first_sentence(made.__doc__), f"`{family(made)}`"))
    return markdown(("Name", "Meaning", "Declared in"), rows)


def modules_table() -> str:
    """The modules that a program uses by name, and what they declare."""
    rows = []
    for name in sorted(MODULES):
        module = getattr(ts, name)
        own = getattr(module, "__all__", None) or [
            n for n, x in vars(module).items()
            if n[0] != "_" and callable(x)
            and (getattr(x, "__module__", "") + ".").startswith(module.__name__ + ".")]
        rows.append((f"`ts.{name}`", first_sentence(module.__doc__).rstrip(":"),
                     ", ".join(f"`{n}`" for n in sorted(own))))
    return markdown(("Module", "What it is for", "Names"), rows)


MODULES = ("checkpoints", "config", "data", "debug", "dist", "domain", "optim", "random", "shape",
           "sparse", "verify")


def family(fn: Any) -> str:
    module = getattr(inspect.unwrap(fn), "__module__", "") or "tessera.ad.checkpoint"
    return module.removeprefix("tessera.")


def call_text(fn: Callable) -> str:
    """`softmax(x, axis=-1)`: the signature without annotations."""
    return show_call(fn.__name__, inspect.signature(fn))


def commands_table() -> str:
    """The commands of `python -m tessera`, each with its arguments."""
    rows = []
    for command in COMMANDS.values():
        parser = argparse.ArgumentParser(add_help=False)
        importlib.import_module(command.module).add_arguments(parser)
        rows.append((f"`{command.name}`", command.doc))
        rows += [(f"- `{argument_text(a)}`", (a.help or "") % {"default": a.default})
                 for a in parser._actions if a.help != argparse.SUPPRESS]
    return markdown(("Command, arguments", "Meaning"), rows)


def argument_text(a: argparse.Action) -> str:
    """`--mesh dp=8,tp=9`: the name as one writes it, with what it takes."""
    takes = [] if a.nargs == 0 else [str(a.metavar or a.dest)]
    return " ".join([*a.option_strings, *takes])


def floors_list() -> str:
    """The order of imports, as the test has it: each imports what stands left of it."""
    text = " <- ".join(", ".join(names) for names in FLOORS if "__init__" not in names)
    return "```\n" + re.sub(r" <- (tensor|mesh|debug) ", r"\n  <- \1 ", text) + "\n```\n"


def rooms_table() -> str:
    """Every package of the code with the first sentence of its docstring."""
    rows = []
    for file in sorted(PACKAGE.rglob("__init__.py"), key=lambda p: p.parent.parts):
        said = first_sentence(ast.get_docstring(ast.parse(file.read_text())))
        rows.append((f"`{file.parent.relative_to(PACKAGE.parent).as_posix()}/`", said))
    return markdown(("Folder", "What it holds"), rows)


# --- figures ----------------------------------------------------------------------------------
# (part and case in the file, its unit, what is computed, our row, the row beside it, whose that is)
Figure = tuple[str, str, str, str, str, str, str]


def figures() -> Iterator[Figure]:
    for n in ("4096", "8192"):
        for ours, theirs, how in (("NT", "cuBLAS", "A Bᵀ"), ("NN", "cuBLAS NN", "A B"),
                                  ("NT mma.sync", "cuBLAS", "A Bᵀ by `mma.sync`")):
            yield "gemm", n, "TFLOP/s", f"{how}, {n}³, bf16", ours, theirs, "cuBLAS"
    for size in ("64x4096", "32x8192", "16x16384"):
        heads, S = size.split("x")
        for kind in ("full", "causal"):
            yield ("attention", f"{size} {kind}", "TFLOP/s", f"attention, {kind}, {heads} heads of "
                   f"{S} x 128, bf16", "tessera", "cuDNN", "cuDNN")
    for name in ("copy", "add"):
        yield "memory", "vectors", "GB/s", f"{name}, 2²⁶ f32", name, "memcpy", "PyTorch's copy_"
    for name in ("softmax", "rms_norm"):
        yield ("memory", "rows", "GB/s", f"{name}, 16384 x 4096, bf16", name,
               f"torch.compile {name}", "torch.compile")
    for routine in ROUTINES.values():
        for case in routine.record.benchmarks:
            title = f"{routine.__name__} {case.name}"
            yield "library", title, case.unit, title, "tessera", case.beside[0], case.beside[0]


IN_SHORT = ("A Bᵀ, 8192³, bf16", "attention, full, 16 heads of 16384 x 128, bf16",
            "attention, causal, 16 heads of 16384 x 128, bf16", "softmax, 16384 x 4096, bf16",
            "copy, 2²⁶ f32")


def measured_table() -> str | None:
    """The figures of benchmarks/kernels.py; None while nothing is measured."""
    return measured(lambda title: True, whole=True)


def measured_in_short() -> str | None:
    return measured(IN_SHORT.__contains__)


def measured(shown: Callable[[str], bool], whole: bool = False) -> str | None:
    """A part that was not run, or failed, has no rows. Ratios are those of the printed figures."""
    if not MEASURED.exists():
        return None
    file = json.loads(MEASURED.read_text())
    rows = []
    for part, case, unit, title, ours, theirs, whose in figures():
        found = file.get(part, {}).get(case, {})
        if shown(title) and {ours, theirs} <= found.keys():
            a, b = (found[name][unit] for name in (ours, theirs))
            rows.append((title, f"{a} {unit}", f"{b} {unit}", whose, f"{a / b:.2f}"))
    text = f"{file['device']}, {file['date']}, commit {file['commit']}, `{file['command']}`.\n\n"
    text += markdown(("What", "Tessera", "Beside it", "By", "Ratio"), rows)
    took = file.get("compile", {})
    if whole and {"first call", "from the disk cache"} <= took.keys():
        text += (f"\nThe first call of a small kernel takes {took['first call']} ms with its "
                 f"compilation, and {took['from the disk cache']} ms in a new process that finds "
                 "it on disk.\n")
    return text


def launches_table() -> str | None:
    """Of benchmarks/launch_overhead.py; None while nothing is measured."""
    if not LAUNCHES.exists():
        return None
    file = json.loads(LAUNCHES.read_text())
    counts = file["microseconds_by_arrays"]
    names = dict.fromkeys(name for row in counts.values() for name in row)
    rows = [(f"`{name}`", *(f"{row[name]:.1f}" if name in row else "" for row in counts.values()))
            for name in names]
    return (f"{file['device']}, {file['date']}, commit {file['commit']}, `{file['command']}`.\n\n"
            + markdown(("", *counts), rows))


def steps_table() -> str | None:
    """Of `python -m tessera bench step`: a file for each model; None while none is measured."""
    files = [json.loads(path.read_text()) for name in MODELS
             if (path := RESULTS / f"step_{name}.json").exists()]
    if not files:
        return None
    rows = []
    for file in files:
        ours, *others = file["sides"].items()
        rows.append(_step_row(file, *ours, None))
        rows += [_step_row(file, *other, ours[1]) for other in others]
    head = ("Model", "By", "tokens/s", "Tessera's by it", "MFU", "peak memory, GiB",
            "first step, s", "from the disk, s")
    when = dict.fromkeys(f"{f['name']}: {f['device']}, {f['date']}, commit {f['commit']}, "
                         f"`{f['command']}`" for f in files)
    return markdown(head, rows) + "\n" + "; ".join(when) + ".\n" + "".join(
        f"\n{_classes_table(f)}" for f in files if "classes" in f["sides"]["tessera"])


def _step_row(file: dict, name: str, side: dict, ours: dict | None) -> tuple[str, ...]:
    m = file["model"]
    cells = [f"{file['name']}, B {m['B']}, T {m['T']}" if ours is None else "", name,
             f"{side['tokens_per_s']:,.0f}",
             "" if ours is None else f"{ours['tokens_per_s'] / side['tokens_per_s']:.2f}",
             f"{side['mfu']:.3f}", f"{side['peak_mib'] / 1024:.1f}", f"{side['first_step_s']:.1f}"]
    disk = side.get("start_from_disk_s")
    return (*cells, "" if disk is None else f"{disk:.1f}")


def _classes_table(file: dict) -> str:
    """Milliseconds on the GPU and launches of a step, by class of kernel."""
    sides = {n: s["classes"] for n, s in file["sides"].items() if "classes" in s}
    rows = [(c, *(f"{s[c]['us'] / 1e3:.2f} ({s[c]['launches']})" if c in s else ""
                  for s in sides.values())) for c in CLASSES if any(c in s for s in sides.values())]
    return markdown((f"{file['name']}: ms (launches)", *sides), rows)


def offload_table() -> str | None:
    """Of benchmarks/offload.py; None while nothing is measured."""
    if not OFFLOAD.exists():
        return None
    file = json.loads(OFFLOAD.read_text())
    kept = {"nothing": "everything", "remat": "inputs of layers, `ts.remat`",
            "offload": "those on the host, `ts.remat(offload=True)`"}
    rows = [(text, f"{file['rows'][name]['device_mib']}", f"{file['rows'][name]['host_mib']}",
             f"{file['rows'][name]['ms']:.1f}") for name, text in kept.items()]
    alone = file["rows"]["offload"]["copies_alone_ms"]
    return (f"{file['device']}, {file['date']}, commit {file['commit']}, `{file['command']}`: "
            f"{file['layers']} layers of x + gelu(x W1) W2 in bf16, {file['tokens']} tokens, width "
            f"{file['width']}. The copies alone take {alone:.1f} ms; {100 * file['hidden']:.0f} % "
            "of that is hidden behind kernels.\n\n"
            + markdown(("Kept", "GPU memory, MiB", "host memory, MiB", "ms"), rows))


def training_table() -> str | None:
    """Of benchmarks/gpt2_train.py; None while nothing is measured."""
    files = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("gpt2_train*.json"))]
    if not files:
        return None
    rows = []
    for f in files:
        held_out = ", ".join(f"{loss:.3f} after {n:,}" for n, loss in f["held_out"])
        m = f["model"]
        rows.append((f"{f['model'].get('name', 'gpt2-124m')}, B {m['B']}, T {m['T']}",
                     f"{len(f['losses']):,}", f"{f['tokens_per_second']:,.0f}", held_out))
    when = "; ".join(f"{f['device']}, {f['date']}, commit {f['commit']}, `{f['command']}`"
                     for f in files)
    text = markdown(("Model", "Steps", "tokens/s", "held-out loss, nats per byte"), rows)
    profiles = {f["model"].get("name", "gpt2-124m"): f["profile"]["classes"] for f in files}
    kinds = [(c, *(f"{p[c]['us'] / 1e3:.2f} ({p[c]['launches']})" if c in p else ""
                   for p in profiles.values()))
             for c in CLASSES if any(c in p for p in profiles.values())]
    return f"{text}\n{when}.\n\n" + markdown(("A step: ms (launches)", *profiles), kinds)


def decode_table() -> str | None:
    """Of benchmarks/decode.py; None while nothing is measured."""
    if not DECODE.exists():
        return None
    file = json.loads(DECODE.read_text())
    rows, others, alike = [], list[str](), False
    for case, runs in file.items():
        if isinstance(runs, dict):
            ours = runs["tessera"]
            peers = [n for n in runs if not n.startswith("tessera")]
            others = [n for n in runs if n not in ("tessera", *peers)]
            best = min(peers, key=lambda n: runs[n]["us"])
            alike = "copy of as many bytes, us" in ours
            rows.append((case, f"{ours['us']:.1f}", f"{ours['of copy']:.2f}",
                         *([f"{ours['copy of as many bytes, us']:.1f}",
                            f"{ours['of that copy']:.2f}"] if alike else []),
                         f"{runs[best]['us']:.1f}", best, f"{ours['of best peer']:.2f}",
                         *(f"{runs[n]['us']:.1f}" for n in others)))
    return (f"{file['device']}, {file['date']}, commit {file['commit']}, `{file['command']}`; a "
            f"copy runs at {file['copy, GB/s']} GB/s.\n\n"
            + markdown(("Sequences and keys", "us", "of a copy's rate",
                        *(["copy of as many bytes, us", "of that copy"] if alike else []),
                        "best peer, us", "which", "Ratio",
                        *(f"{n.partition(', ')[2]}, us" for n in others)), rows))


def attention_rules_table() -> str | None:
    """Of benchmarks/attention_rules.py; None while nothing is measured."""
    if not ATTENTION_RULES.exists():
        return None
    file = json.loads(ATTENTION_RULES.read_text())
    rows = [(case, f"{runs['ours']:.3f}", f"{runs['flex']:.3f}", f"{runs['ratio']:.2f}",
             f"{runs['ours, gradient']:.2f}", f"{runs['flex, gradient']:.2f}",
             f"{runs['ratio of gradients']:.2f}")
            for case, runs in file.items() if isinstance(runs, dict)]
    return (f"{file['device']}, {file['date']}, commit {file['commit']}, `{file['command']}`.\n\n"
            + markdown(("Case", "ms", "FlexAttention, ms", "Ratio", "with gradients, ms",
                        "FlexAttention, ms", "Ratio"), rows))


def power_table() -> str | None:
    """Of benchmarks/power_limit.py; None while nothing is measured."""
    if not POWER.exists():
        return None
    file = json.loads(POWER.read_text())
    rows = [(name, f"{m['kernels_ms']:.1f}", f"{m['ms_alone']:.1f}", f"{m['ms_in_a_row']:.1f}",
             f"{m['highest_mhz']:.0f}", f"{m['median_mhz']:.0f}", f"{m['most_w']:.0f}")
            for name, m in file["models"].items()]
    return (f"{file['device']}, {file['date']}, commit {file['commit']}, `{file['command']}`.\n\n"
            + markdown(("Model", "its launches, ms", "a step after a pause, ms",
                        "steps in a row, ms each", "highest clock, MHz", "median clock in a row",
                        "most power, W"), rows))


def cpu_models_table() -> str | None:
    """Of benchmarks/cpu_models.py; None while nothing is measured."""
    if not CPU_MODELS.exists():
        return None
    file = json.loads(CPU_MODELS.read_text())
    rows = [(m["what"], f"{m['ours']:.1f}", f"{m['torch']:.1f}", f"{m['ratio']:.2f}")
            for m in file["models"].values()]
    return (f"{file['device']}, {file['date']}, commit {file['commit']}, PyTorch {file['torch']}, "
            f"`{file['command']}`.\n\n"
            + markdown(("Model", "Tessera, ms", "PyTorch, ms", "PyTorch by Tessera"), rows))


def schedule_table() -> str:
    """The fields of a schedule by all their names, what stands when none is said, their meaning."""
    found: dict[str, list[str]] = {}
    for spelled, name in schedule.ALIASES.items():
        found.setdefault(name, []).append(f"`{spelled}`")
    told = dict(re.findall(r"(?:^|   )(\w+) {3,}(\S.*?)(?=   |$)",
                           inspect.getdoc(schedule.Schedule) or "", re.M))
    told |= {"m": "rows of the tile of a group", "n": "columns of the tile of a group"}
    rows = [(", ".join(names), str(schedule.DEFAULTS.get(name, "the compiler decides")),
             told.get(names[0].strip("`"), "")) for name, names in found.items()]
    return markdown(("Field", "Default", "Meaning"), rows)


def knobs_table() -> str:
    """The fields of PipelineKnobs as its docstring has them."""
    lines = (line.split(maxsplit=1) for line in inspect.getdoc(PipelineKnobs).splitlines())  # type: ignore[union-attr]
    told = {words[0]: words[1] for words in lines if len(words) == 2}
    spelled = {"stages": "stages", "warpgroups": "warps"}
    return markdown(("Parameter", "Meaning"), [
        (f"`{spelled.get(f.name, f.name.upper())}`", told[f.name]) for f in fields(PipelineKnobs)])


TABLES: dict[str, Callable[[], str | None]] = {
    "errors": errors_table,
    "special errors": special_errors_table,
    "settings": settings_table,
    "formats": numerics.dtype_table,
    "ranges": ranges_table,
    "ops": ops_table,
    "functions": functions_table,
    "transforms": transforms_table,
    "names": names_table,
    "modules": modules_table,
    "kernel errors": kernel_errors_table,
    "tile ops": tile_ops_table,
    "collectives": collectives_table,
    "routines": routines_table,
    "measured": measured_table,
    "measured in short": measured_in_short,
    "launches": launches_table,
    "steps": steps_table,
    "offload": offload_table,
    "training": training_table,
    "decode": decode_table,
    "attention_rules": attention_rules_table,
    **LIBRARY, **MESHES, **ONNX, **OPTIMIZER,
    "power": power_table,
    "cpu_models": cpu_models_table,
    "schedule": schedule_table,
    "knobs": knobs_table,
    "floors": floors_list,
    "rooms": rooms_table,
    "commands": commands_table,
    **API,
}
