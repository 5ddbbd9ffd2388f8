"""Compiled functions as files: `ts.export(f, path, *args)` writes one, `ts.load(path)` reads it.

    ts.export(predict, "predict.tsf", params, x)     # in the program that has the model's source
    predict = ts.load("predict.tsf")                 # in one that has not
    y = predict(params, x)

A file is a zip archive: `manifest.json` with the arguments, the results, the mesh and the SHA-256
of every other entry; `graph.txt`, the Graph IR; `tensors/N`, the bytes of the tensors that the
function captures; `schedules/TARGET.txt`, the Schedule IR, for people; `binaries/TARGET/NAME`, PTX
and machine code of each kernel of a GPU target. The loader takes those of this machine's GPUs, and
such a call compiles nothing. What else is asked of the function is compiled from the graph, so it
runs where its arguments lie, on a mesh by their layouts, under ts.grad and ts.vmap, as the function
did that it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import zipfile
from collections.abc import Mapping, Sequence
from inspect import Parameter
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoints.layout import stored_as
from .errors import ArgumentError, BundleError, DTypeError, ShapeError, warn_user
from .graph import tree
from .graph.graph_text import parse_graph, print_graph
from .graph.ir import Graph
from .graph.jit import JitFunction, jit
from .graph.ops.scaled import APART
from .graph.signature import is_data
from .graph.trace import evaluate
from .graph.traced_signature import TracedSignature
from .mesh.device_mesh import Mesh
from .mesh.errors import MeshError
from .mesh.ranks.messages import raised_on_all
from .mesh.world import transport
from .numerics import NumericType, as_type, unpack
from .runtime.cache import CacheEntry
from .runtime.device import device, device_count, has_gpu
from .runtime.target import parse_target
from .tensor import Tensor, TensorType, as_tensor
from .tile.launch.machine_code import GIVEN, compiler_hash

FORMAT, VERSION = "tessera-function", 1
MANIFEST, GRAPH = "manifest.json", "graph.txt"
STARS = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}
KINDS = {"tuple": tuple, "list": list, "dict": dict, "None": type(None)}


def export(fn: Any, path: str | os.PathLike, *args: Any, targets: Sequence[str] = ("cpu",),
           **kwargs: Any) -> Path:
    """Write what fn(*args, **kwargs) computes as one file, for `ts.load`.

    fn: a function under ts.jit, or one that can be. args: tensors, arrays, numbers or tensor types
    of the extents and types that it is to be called with, in tuples, lists and dicts; strings,
    bools and None among them are fixed. targets: whose Schedule IR the file shows, "cpu" and GPUs
    such as "sm_80" and "sm_90a"; of these it has the machine code of every kernel as well, for
    which no GPU is needed, but the compilers are. Tensors that fn captures go with it as they are
    now. Of distributed arguments the layouts and the mesh are written, and no machine code, since
    each rank has a program of its own; all ranks call it.

    Raises UnsupportedTargetError for a target that there is not, and without the compilers,
    GraphError where fn calls kernels or Python functions of the user's as nodes, BundleError for
    other trees, for captured distributed tensors, and where the file cannot be written.
    """
    compiled = fn if isinstance(fn, JitFunction) else JitFunction(fn)
    manifest, files = contents(compiled, args, kwargs)
    for target in targets:
        text = compiled.inspect_ir("schedule", *args,
                                   target=None if target == "cpu" else target, **kwargs)
        files[f"schedules/{target}.txt"] = text.encode()
    gpus = [t for t in targets if t != "cpu"]
    if gpus and manifest["mesh"] is None:
        _add_binaries(manifest, files, gpus)
    made = Path(path)
    if manifest["mesh"] is None or transport().size == 1:
        write(made, manifest, files)
    else:
        with raised_on_all(BundleError):
            if transport().rank == 0:
                write(made, manifest, files)
    return made


def contents(compiled: JitFunction, args: tuple, kwargs: dict[str, Any]
             ) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What the file of a function says, and its entries by name."""
    traced = compiled.traced(*args, **kwargs)
    manifest = _described(compiled.name, traced)
    kinds = {} if compiled.signature is None else {
        n: STARS[p.kind] for n, p in compiled.signature.parameters.items() if p.kind in STARS}
    manifest["stars"] = {n: kinds[n] for n in manifest["parameters"] if n in kinds}
    files = {GRAPH: print_graph(traced.graph).encode()}
    for i, (_, t) in enumerate(traced.graph.captures):
        files[f"tensors/{i}"] = tensor_bytes(t)
    return manifest, files


def _add_binaries(manifest: dict[str, Any], files: dict[str, bytes], targets: Sequence[str]
                  ) -> None:
    """Machine code of what the file's function launches when it is called."""
    from .graph.cuda.program.compile_ahead import compile_ahead  # loads what lowers for GPUs

    again = function_of({MANIFEST: json.dumps(manifest).encode(), **files})
    graph = again.traced()
    manifest["compiler"] = compiler_hash()
    for target in map(parse_target, targets):
        for key, entry in compile_ahead(graph, target).items():
            files[f"binaries/{target}/{key}"] = entry.to_bytes(key)


def tensor_bytes(t: Tensor) -> bytes:
    """Its elements, packed types in their packed rows."""
    return np.ascontiguousarray(t.buffer).tobytes()


def load(path: str | os.PathLike) -> LoadedFunction:
    """The function of a file that `ts.export` wrote.

    Where it has machine code for a GPU of this machine, a call there compiles nothing. That code
    runs on the GPU as it is: load files of those whose programs you would run.

    Raises BundleError for a file that is damaged or of a newer version, GraphError for ops that are
    not registered here, MeshError where this program runs on other ranks than it was exported for.
    """
    return function_of(read(Path(path)))


def function_of(files: Mapping[str, bytes]) -> LoadedFunction:
    """The function that the entries of a file hold."""
    manifest = json.loads(files[MANIFEST])
    captures = [tensor_of(files[f"tensors/{i}"], about)
                for i, about in enumerate(manifest["captures"])]
    if manifest["mesh"] is not None:
        _need_ranks(manifest)
    return LoadedFunction(manifest, parse_graph(files[GRAPH].decode(), captures),
                          {Path(name).stem: data.decode() for name, data in files.items()
                           if name.startswith("schedules/")}, variants(files))


def variants(files: Mapping[str, bytes]) -> dict[str, dict[str, bytes]]:
    """The machine code in a file: by target, by the portable key of each kernel."""
    found: dict[str, dict[str, bytes]] = {}
    for name, data in files.items():
        if name.startswith("binaries/"):
            _, target, key = name.split("/")
            found.setdefault(target, {})[key] = data
    return found


def local_targets() -> list[str]:
    """What code for the GPUs of this machine is compiled for."""
    count = device_count() if has_gpu() else 0
    return list(dict.fromkeys(str(device(i).target) for i in range(count)))


class BundleWarning(RuntimeWarning):
    """Machine code of a file is not used."""


class LoadedFunction:
    """A function that was read from a file. Make one with `ts.load`.

    name, graph: of the function   schedules: the Schedule IR by target, as it was written
    manifest: what the file says of itself: arguments, results, mesh, layouts
    variants: how many kernels the file has as machine code, by target
    chosen: the targets among them that are those of this machine's GPUs: there nothing is compiled
    """

    def __init__(self, manifest: Mapping[str, Any], graph: Graph, schedules: Mapping[str, str],
                 binaries: Mapping[str, Mapping[str, bytes]]):
        self.name, self.graph, self.manifest = manifest["name"], graph, manifest
        self.schedules = dict(schedules)
        self._in, self._out = _tree_of(manifest["arguments"]), _tree_of(manifest["results"])
        self._params = [how == "param" for how in manifest["rebuild"]]

        def run(*leaves: Tensor) -> list[Tensor]:
            return evaluate(graph, leaves)

        run.__name__ = run.__qualname__ = self.name
        self.compiled = jit(run)
        self.variants = {target: len(kernels) for target, kernels in binaries.items()}
        self.chosen = tuple(t for t in local_targets() if t in binaries) if binaries else ()
        if self.chosen and manifest["compiler"] != compiler_hash():
            warn_user(f"{self.name}: the machine code in the file was made by another version of "
                      "Tessera, so its kernels are compiled again. Export it anew", BundleWarning)
            self.chosen = ()
        for target in self.chosen:
            self._take(target, binaries[target])

    def traced(self) -> Graph:
        """The graph that is compiled for a call, on one device."""
        leaves = self.manifest["leaves"]
        return self.compiled.graph(*(TensorType(tuple(about["shape"]), as_type(about["type"]))
                                     for about in leaves if "type" in about))

    def _take(self, target: str, kernels: Mapping[str, bytes]) -> None:
        """Machine code for launches of this process to find."""
        from .graph.cuda.program.compile_program import GIVEN as PROGRAMS_GIVEN

        for key, data in kernels.items():
            entry = CacheEntry.from_bytes(data, key)
            if entry is None:
                raise BundleError(f"{self.name}: the machine code {key[:12]} for {target} is no "
                                  "entry that ts.export wrote")
            GIVEN[key] = entry
        PROGRAMS_GIVEN.add((self.traced().hash, target))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the exported function. Raises ArgumentError, ShapeError and DTypeError where the
        arguments are not such as it was exported for."""
        return self.on_leaves(self.leaves(args, kwargs))

    def on_leaves(self, leaves: Sequence[Tensor]) -> Any:
        """The result on the tensors of a call, in order."""
        made = self.compiled(*leaves)
        for y, param in zip(made, self._params, strict=True):
            y.is_param = param
        return tree.unflatten(self._out, made)

    def __repr__(self) -> str:
        names = ", ".join(f"{leaf['name']}: {leaf['type']}{leaf['shape']}"
                          for leaf in self.manifest["leaves"] if "type" in leaf)
        on = f" on {_mesh_label(self.manifest['mesh'])}" if self.manifest["mesh"] else ""
        return f"LoadedFunction {self.name}({names}){on}"

    def _bound(self, names: Sequence[str], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name; those behind *args and **kwargs as one."""
        stars = self.manifest.get("stars", {})
        rest, more = _by_star(stars, "*"), _by_star(stars, "**")
        plain = [n for n in names if n not in stars]
        first = plain if rest is None else plain[:names.index(rest)]
        bound = dict(zip(first, args, strict=False))
        given = {n: x for n, x in kwargs.items() if more is None or n in plain}
        if bound.keys() & kwargs.keys() or given.keys() - set(plain) or (
                rest is None and len(args) > len(first)):
            shown = ", ".join(stars.get(n, "") + n for n in names)
            raise ArgumentError(f"{self.name} was exported with the arguments {shown}")
        bound |= given
        if rest is not None:
            bound[rest] = args[len(first):]
        if more is not None:
            bound[more] = {n: x for n, x in kwargs.items() if n not in plain}
        return bound

    def leaves(self, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors of a call, which are such as it was exported for."""
        names, wanted = self.manifest["parameters"], self.manifest["leaves"]
        bound = self._bound(names, args, kwargs)
        fixed = {leaf["name"]: leaf["fixed"] for leaf in wanted if "fixed" in leaf} | bound
        bound = {n: fixed[n] for n in names if n in fixed}
        flat, structure = tree.flatten(bound)
        if structure != self._in:
            raise ArgumentError(f"{self.name} was exported for arguments of another structure:\n"
                                f"  exported: {self._in}\n  this call: {structure}",
                                hint="pass the same nested tuples, lists and dicts")
        given = [_fit(self.name, leaf, about) for leaf, about in zip(flat, wanted, strict=True)]
        found = [x for x in given if x is not None]
        for x in found:
            if x.layout is not None and _mesh_text(x.layout.mesh) != self.manifest["mesh"]:
                raise ArgumentError(f"{self.name}: a tensor lies on {x.layout.mesh}, it was "
                                    f"exported for {_mesh_label(self.manifest['mesh'])}")
        return found


def _by_star(stars: Mapping[str, str], star: str) -> str | None:
    return next((n for n, s in stars.items() if s == star), None)


def _fit(name: str, leaf: Any, about: Mapping[str, Any]) -> Tensor | None:
    """An argument as a tensor of the exported type; None for a fixed one."""
    what = f"{name}: argument {about['name']}"
    if "fixed" in about:
        if leaf != about["fixed"] or type(leaf) is not type(about["fixed"]):
            raise ArgumentError(f"{what} is {leaf!r}, it was exported with {about['fixed']!r}")
        return None
    if not is_data(leaf):
        raise ArgumentError(f"{what} is {type(leaf).__name__}, it was exported with a tensor")
    kind, shape = as_type(about["type"]), tuple(about["shape"])
    x = leaf if isinstance(leaf, Tensor) else as_tensor(leaf) if np.ndim(leaf) else Tensor(
        np.asarray(leaf, kind.dtype.numpy), kind)
    if tuple(x.shape) != shape:
        raise ShapeError(f"{what} is {list(x.shape)}, it was exported for {list(shape)}",
                         hint="export the function for these extents, as another file")
    if x.type != kind:
        raise DTypeError(f"{what} is {x.type}, it was exported for {kind}",
                         hint=f"convert it: ts.cast(x, {about['type']!r})")
    lies = None if x.layout is None else x.layout.describe()
    if lies != about["layout"]:
        raise ArgumentError(f"{what} lies as {lies or 'one tensor'}, it was exported for "
                            f"{about['layout'] or 'one tensor'}")
    return x


# --- what a file says ----------------------------------------------------------------------------
def _described(name: str, traced: TracedSignature) -> dict[str, Any]:
    if traced.updates or any(how not in ("tensor", "param") for how in traced.rebuild):
        raise BundleError(f"{name} gives more than tensors, or writes into its arguments",
                          hint="return plain tensors, in tuples, lists and dicts")
    captures = [t for _, t in traced.graph.captures]
    if any(t.layout is not None for t in captures):
        raise BundleError(f"{name} captures a distributed tensor", hint="pass it as an argument")
    if any(t.scale is not None for t in captures):
        raise BundleError(f"{name} captures a scaled tensor", hint=APART)
    layouts = traced.layouts or (None,) * len(traced.graph.inputs)
    mesh: Mesh | None = next((at.mesh for at in layouts if at is not None), None)
    return {
        "format": FORMAT, "version": VERSION, "name": name,
        "parameters": list(traced.in_tree.data), "arguments": _tree_text(traced.in_tree, name),
        "leaves": _leaves_text(traced, layouts), "results": _tree_text(traced.out_tree, name),
        "rebuild": list(traced.rebuild),
        "mesh": None if mesh is None else _mesh_text(mesh),
        "captures": [{"type": _type_text(t.type, name), "shape": list(t.shape),
                      "param": t.is_param, "name": t.name} for t in captures],
    }


def _leaves_text(traced: TracedSignature, layouts: Sequence[Any]) -> list[dict[str, Any]]:
    """Of each leaf of the arguments its path, and its type or its fixed value."""
    inputs = iter(zip(traced.graph.inputs, layouts, strict=False))
    found: list[dict[str, Any]] = []
    for path, leaf in zip(tree.paths(traced.in_tree), traced.leaf_types, strict=True):
        if not isinstance(leaf, TensorType):
            if not isinstance(leaf, str | bool | int | float):
                raise BundleError(f"{path} is {leaf!r}, which a file cannot hold",
                                  hint="fixed arguments are strings, bools and numbers")
            found.append({"name": path, "fixed": leaf})
            continue
        v, at = next(inputs)
        found.append({"name": path, "type": _type_text(v.aval.type, path),
                      "shape": list(v.aval.shape), "layout": None if at is None else
                      at.describe()})
    if next(inputs, None) is not None:
        raise BundleError("an argument is more than one tensor, such as codes with their scale",
                          hint=APART)
    return found


def _type_text(kind: NumericType, what: str) -> str:
    text = str(kind)
    if as_type(text) != kind:
        raise BundleError(f"{what} is of the type {text}, which has no text of its own",
                          hint="a type that a string can name")
    return text


def _tree_text(structure: tree.TreeDef, name: str) -> Any:
    """["dict", keys, children], "*" for a leaf."""
    if structure.kind is None:
        return "*"
    kind = next((k for k, t in KINDS.items() if t is structure.kind), None)
    if kind is None or (kind == "dict" and not all(isinstance(k, str) for k in structure.data)):
        raise BundleError(f"{name} has {structure.kind.__name__} among its arguments or results",
                          hint="a file holds tuples, lists and dicts with strings as keys")
    return [kind, list(structure.data or ()), [_tree_text(c, name) for c in structure.children]]


def _tree_of(text: Any) -> tree.TreeDef:
    if text == "*":
        return tree.LEAF
    kind, keys, children = text
    return tree.TreeDef(KINDS[kind], tuple(keys) if kind == "dict" else None,
                        tuple(map(_tree_of, children)))


def tensor_of(data: bytes, about: Mapping[str, Any]) -> Tensor:
    """The tensor of tensor_bytes. about: its type, shape, whether it is a param, and its name"""
    kind, shape = as_type(about["type"]), tuple(about["shape"])
    if kind.dtype.packed:
        codes = np.frombuffer(data, np.uint8).reshape(stored_as(kind, shape)[1])
        array = unpack(codes, kind.dtype, shape[-1] if shape else 1).reshape(shape)
    else:
        array = np.frombuffer(data, kind.dtype.numpy).reshape(shape).copy()
    return Tensor(array, kind, is_param=about.get("param", False), name=about.get("name"))


def _mesh_text(mesh: Mesh) -> list[list[Any]]:
    return [[a, n] for a, n in zip(mesh.axes, mesh.shape, strict=True)]


def _mesh_label(mesh: Sequence[Sequence[Any]]) -> str:
    return f"mesh({', '.join(f'{a}={n}' for a, n in mesh)})"


def _need_ranks(manifest: Mapping[str, Any]) -> None:
    ranks, here = int(np.prod([n for _, n in manifest["mesh"]])), transport().size
    if here not in (1, ranks):
        raise MeshError(f"{manifest['name']} was exported for {_mesh_label(manifest['mesh'])}, "
                        f"{ranks} ranks; this program runs on {here}",
                        hint=f"mpirun -n {ranks}, or one process")


# --- the file ------------------------------------------------------------------------------------
def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write(path: Path, manifest: dict[str, Any], files: Mapping[str, bytes]) -> None:
    """The file with its manifest, beside its place, then renamed: a reader sees a whole one."""
    manifest = manifest | {"files": {name: _digest(data) for name, data in files.items()}}
    files = {MANIFEST: json.dumps(manifest, indent=1).encode(), **files}
    beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with zipfile.ZipFile(beside, "x", zipfile.ZIP_STORED) as archive:
            for name, data in files.items():
                archive.writestr(name, data)
        os.replace(beside, path)
    except OSError as err:
        beside.unlink(missing_ok=True)
        raise BundleError(f"{path} is not written: {err}") from err


def read(path: Path) -> dict[str, bytes]:
    """The entries of a file, each compared with its SHA-256. Raises BundleError."""
    try:
        with zipfile.ZipFile(path) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
            manifest = json.loads(files[MANIFEST])
            version, digests = int(manifest["version"]), dict(manifest["files"])
            if manifest["format"] != FORMAT:
                raise KeyError("format")
    except FileNotFoundError as err:
        raise BundleError(f"there is no file {path}") from err
    except (OSError, zipfile.BadZipFile, KeyError, TypeError, ValueError) as err:
        raise BundleError(f"{path} is damaged, or no function that ts.export wrote") from err
    if version > VERSION:
        raise BundleError(f"{path} is of version {version}, this Tessera reads up to {VERSION}",
                          hint="load it with the Tessera that wrote it, or a newer one")
    odd = [n for n in digests.keys() | files.keys() if n != MANIFEST
           and (n not in files or digests.get(n) != _digest(files[n]))]
    if odd:
        raise BundleError(f"{path} is damaged: {', '.join(sorted(odd))}")
    return files


__all__ = ["BundleWarning", "LoadedFunction", "export", "load"]
