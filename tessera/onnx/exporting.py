"""A function as an ONNX model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import BundleError
from ..graph import tree
from ..graph.expand import Rule, expand_by
from ..graph.ir import Graph, Node, Value
from ..graph.jit import JitFunction
from ..graph.op import Aval
from ..graph.ops.scaled import APART
from ..graph.simplify import canonicalize, merge_common, remove_dead
from ..graph.traced_signature import TracedSignature
from ..tensor import Tensor, TensorType
from .package import onnx_package
from .spellings import why_refused
from .writer import OPSET, Step, Writer, refuse, rule_of, type_code

ONE_FILE_BYTES = 2**31 - 2**24  # protobuf's limit, with room for what is no weight


def export(fn: Any, path: str | os.PathLike, *args: Any, **kwargs: Any) -> Path:
    """Write what fn(*args, **kwargs) computes as an ONNX model, of opset 20.

    fn: a function under ts.jit, or one that can be. args: as of a call; what is a ts.param among
    them, and what fn captures, is in the model with its values, other tensors are its inputs.
    Inputs and results are named by their paths, such as "x" and "h.0"; a lone result is "result".
    Weights of more than 2 GB lie in a file beside it, path + ".data".

    Raises BundleError, at the op's line, for ops and types that ONNX cannot say, for distributed
    tensors, and without the onnx package.
    """
    compiled = fn if isinstance(fn, JitFunction) else JitFunction(fn)
    traced = compiled.traced(*args, **kwargs)
    leaves, _ = tree.flatten(compiled.bind(args, kwargs)[0])
    model = model_of(compiled.name, traced, leaves)
    made = Path(path)
    _write(model, made)
    return made


def model_of(name: str, traced: TracedSignature, leaves: list[Any]) -> Any:
    """The model, which ONNX's own rules have checked."""
    onnx = onnx_package()
    graph = expand_by(_plain_graph(name, traced, leaves), _smaller)
    for step in (canonicalize, merge_common, remove_dead):
        graph = step(graph)
    w, names = Writer(), _input_names(traced, graph)
    names.update((v, f"w{i}") for i, (v, _) in enumerate(graph.captures))
    for node in graph.nodes:
        _write_node(w, node, names)
    results = _result_names(w, graph, traced, names)
    inputs = [_info(names[v], v.aval) for v in graph.inputs]
    weights = [_info(names[v], v.aval) for v, _ in graph.captures]
    outputs = [_info(to, v.aval) for v, to in zip(graph.outputs, results, strict=True)]
    constants = [onnx.numpy_helper.from_array(a, k) for k, a in w.constants.items()]
    nodes = [_node_proto(s) for s in w.steps]
    _check(_model(name, nodes, inputs + weights, outputs, constants), w.steps)
    constants += [onnx.numpy_helper.from_array(t.array, names[v]) for v, t in graph.captures]
    return _model(name, nodes, inputs, outputs, constants)


def _model(name: str, nodes: list, inputs: list, outputs: list, initializers: list) -> Any:
    helper = onnx_package().helper
    opset = helper.make_opsetid("", OPSET)
    return helper.make_model(helper.make_graph(nodes, name, inputs, outputs, initializers),
                             opset_imports=[opset], producer_name="tessera",
                             ir_version=helper.find_min_ir_version_for([opset]))


def _plain_graph(name: str, traced: TracedSignature, leaves: list[Any]) -> Graph:
    """The traced graph with the params among its inputs as captures."""
    if traced.layouts is not None:
        raise BundleError(f"{name} has distributed tensors, which ONNX has not")
    if traced.updates or any(how not in ("tensor", "param") for how in traced.rebuild):
        raise BundleError(f"{name} gives more than tensors, or writes into its arguments",
                          hint="return plain tensors, in tuples, lists and dicts")
    graph, given = traced.graph, _input_values(name, traced, leaves)
    if not all(isinstance(n, int) for v in graph.inputs for n in v.aval.shape):
        raise BundleError(f"{name} has extents that are names",
                          hint="export it for arguments, whose extents are numbers")
    held = {v: x for v, x in zip(graph.inputs, given, strict=True)
            if isinstance(x, Tensor) and x.is_param}
    return Graph(graph.name, tuple(v for v in graph.inputs if v not in held),
                 graph.captures + tuple(held.items()), graph.nodes, graph.outputs)


def _input_values(name: str, traced: TracedSignature, leaves: list[Any]) -> list[Any]:
    """The argument behind each input of the graph."""
    given = [x for x, kind in zip(leaves, traced.leaf_types, strict=True)
             if isinstance(kind, TensorType)]
    if len(given) != len(traced.graph.inputs):
        raise BundleError(f"{name}: an argument is more than one tensor, such as codes with their "
                          "scale", hint=APART)
    return given


def _smaller(node: Node) -> Rule | None:
    """The smaller ops of an op that has no rule here; loops that are short are repeated."""
    op = node.op
    if rule_of(node) is not None or op.repeats is not None and op.repeats(**node.attrs).is_long:
        return None
    return op.unroll or ((op.expand or op.derives) if why_refused(op) is None else None)


def _input_names(traced: TracedSignature, graph: Graph) -> dict[Value, str]:
    paths = [p for p, kind in zip(tree.paths(traced.in_tree), traced.leaf_types, strict=True)
             if isinstance(kind, TensorType)]
    named = dict(zip(traced.graph.inputs, paths, strict=True))
    return {v: named[v] for v in graph.inputs}


def _write_node(w: Writer, node: Node, names: dict[Value, str]) -> None:
    rule = rule_of(node)
    if rule is None:
        raise refuse(f"{node.op.name}: {why_refused(node.op) or 'an op that ONNX lacks'}",
                     node.where, hint="compute it outside the exported function")
    for v in (*node.inputs, *node.outputs):
        _need_type(v.aval, node)
    w.where = node.where
    made = rule(w, node, *[names[v] for v in node.inputs])
    names.update(zip(node.outputs, made if node.op.multi else (made,), strict=True))


def _need_type(aval: Aval, node: Node) -> None:
    dtype = aval.dtype
    if dtype.packed or dtype.kind == "float" and dtype.bits < 16:
        raise refuse(f"{node.op.name} has a {aval}; ONNX computes in types of 16 bits and more",
                     node.where, hint="export the function with wider types")


def _result_names(w: Writer, graph: Graph, traced: TracedSignature, names: dict[Value, str]
                  ) -> list[str]:
    """A name for each result, by its path, given to what makes it."""
    paths = [p or "result" for p in tree.paths(traced.out_tree)]
    taken = {names[v] for v in graph.inputs}
    renamed = {}
    results = []
    for v, path in zip(graph.outputs, paths, strict=True):
        path = f"{path}.result" if path in taken else path
        made = any(names[v] in s.outputs for s in w.steps)
        old = names[v] if made and names[v] not in renamed else w.op("Identity", names[v])
        renamed[old] = path
        results.append(path)
    w.steps = [Step(s.kind, tuple(renamed.get(x, x) for x in s.inputs),
                    tuple(renamed.get(x, x) for x in s.outputs), s.attrs, s.where)
               for s in w.steps]
    return results


def _info(name: str, aval: Aval) -> Any:
    return onnx_package().helper.make_tensor_value_info(name, type_code(aval.dtype), aval.shape)


def _node_proto(s: Step) -> Any:
    """The node; its text is the user's line."""
    made = onnx_package().helper.make_node(s.kind, s.inputs, s.outputs, **s.attrs)
    made.doc_string = "" if s.where is None else str(s.where)
    return made


# --- what ONNX takes -----------------------------------------------------------------------------
def _check(model: Any, steps: list[Step]) -> None:
    """Of a model whose weights are inputs, of their types and extents, so that it is small. Raises
    BundleError at the user's line where an op of ONNX does not take a type."""
    onnx = onnx_package()
    graph = onnx.shape_inference.infer_shapes(model).graph
    types = {i.name: i.type.tensor_type.elem_type
             for i in (*graph.input, *graph.value_info, *graph.output)}
    types |= {t.name: t.data_type for t in graph.initializer}
    for node, step in zip(graph.node, steps, strict=True):
        for found, allowed in _not_taken(node, types):
            raise refuse(f"{node.op_type} takes no {found}", step.where,
                         hint=f"cast the operand to one of: {allowed}")
    onnx.checker.check_model(model, full_check=True)


def _not_taken(node: Any, types: dict[str, int]) -> Iterator[tuple[str, str]]:
    """The type of each operand that the op does not take, and those that it does."""
    onnx = onnx_package()
    schema = onnx.defs.get_schema(node.op_type, OPSET)
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    for i, name in enumerate(node.input):
        wanted = schema.inputs[min(i, len(schema.inputs) - 1)].type_str
        found = onnx.helper.tensor_dtype_to_string(types[name]).split(".")[-1].lower()
        if f"tensor({found})" not in allowed.get(wanted, [wanted]):
            yield found, ", ".join(sorted(allowed.get(wanted, [wanted])))


def _write(model: Any, path: Path) -> None:
    onnx = onnx_package()
    large = sum(len(t.raw_data) for t in model.graph.initializer) > ONE_FILE_BYTES
    try:
        onnx.save(model, path, save_as_external_data=large, location=f"{path.name}.data")
    except OSError as err:
        raise BundleError(f"{path} is not written: {err}") from err


__all__ = ["export"]
