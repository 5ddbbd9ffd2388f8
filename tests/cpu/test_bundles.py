"""Functions as files: what is written is what runs, in a process without the source too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.request import urlopen

import numpy as np
import pytest

import tessera as ts
from cpu.test_rules_again import KINDS
from ptx_harness import require_compiler
from tessera import bundles
from tessera.errors import BundleError, GraphError
from tessera.graph.ir import VERSION
from tolerance import assert_close

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(rng):
    """(predict, params, x, f64 oracle of predict); a matrix is captured, one argument is fixed."""
    P = {"w": rng.standard_normal((5, 8)), "b": rng.standard_normal(8)}
    X, V = rng.standard_normal((4, 5)), rng.standard_normal((8, 3))
    head = ts.param(V, "f32")

    @ts.jit
    def predict(params, x, mode="eval", *, scale=2.0):
        h = ts.tanh(x @ params["w"] + params["b"])
        if mode == "train":
            h = ts.dropout(h, 0.5)
        return {"y": ts.softmax(h @ head), "h": [h * scale]}

    def oracle():
        h = np.tanh(X @ P["w"] + P["b"])
        e = np.exp(h @ V)
        return e / e.sum(-1, keepdims=True), 2 * h

    return predict, {k: ts.param(v, "f32") for k, v in P.items()}, ts.tensor(X, "f32"), oracle


def changed(path: Path, **entries: bytes | None) -> Path:
    """The file with other entries; None for one that is left out."""
    with zipfile.ZipFile(path) as archive:
        files = {n: archive.read(n) for n in archive.namelist()} | entries
    made = path.with_name("changed.tsf")
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in files.items():
            if data is not None:
                archive.writestr(name, data)
    return made


# --- what runs ------------------------------------------------------------------------------------
def test_a_loaded_function_is_the_one_that_was_exported(model, tmp_path):
    predict, params, x, oracle = model
    again = ts.load(ts.export(predict, tmp_path / "f.tsf", params, x))
    made, want = again(params, x), predict(params, x)
    assert (made["y"].numpy() == want["y"].numpy()).all()
    for got, right in zip((made["y"], made["h"][0]), oracle(), strict=True):
        assert_close(got.numpy(), right, "f32", 8)
    assert again.graph.hash == predict.graph(params, x).hash
    assert repr(again) == \
        "LoadedFunction predict(params.w: f32[5, 8], params.b: f32[8], x: f32[4, 5])"

    def loss(f, p):
        return ts.sum(ts.square(f(p, x, scale=2.0)["y"]))

    for a, b in zip(*(ts.grad(lambda p, f=f: loss(f, p))(params).values()
                      for f in (again, predict)), strict=True):
        assert_close(a.numpy(), b.numpy(), "f32", 40)


@pytest.mark.row("CORE-22")
def test_in_a_process_that_lacks_the_source(model, tmp_path):
    predict, params, x, oracle = model
    ts.export(predict, tmp_path / "f.tsf", params, x)
    np.savez(tmp_path / "in.npz", x=x.numpy(), **{k: v.numpy() for k, v in params.items()})
    code = ("import numpy as np, tessera as ts\n"
            "given = {k: ts.tensor(v) for k, v in np.load('in.npz').items()}\n"
            "x = given.pop('x')\n"
            "np.save('y.npy', ts.load('f.tsf')({'w': given['w'], 'b': given['b']}, x)['y'])\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert_close(np.load(tmp_path / "y.npy"), oracle()[0], "f32", 8)


@pytest.mark.row("DEP-03")
def test_a_server_answers_many_at_once(model, tmp_path, rng):
    """One loaded function, called by the threads of an HTTP server; the page says what else there
    is not."""
    predict, params, x, _ = model
    f = ts.load(ts.export(predict, tmp_path / "f.tsf", params, x))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            made = json.dumps(f(params, np.float32(given))["y"].tolist()).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(made)))
            self.end_headers()
            self.wfile.write(made)

        def log_message(self, *args):
            pass

    def ask(rows):
        body = json.dumps(rows.tolist()).encode()
        with urlopen(f"http://127.0.0.1:{server.server_port}", body, timeout=180) as answer:
            return np.array(json.loads(answer.read()))

    batches = rng.standard_normal((24, 4, 5)).astype(np.float32)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, ThreadPoolExecutor(8) as pool:
        Thread(target=server.serve_forever, daemon=True).start()
        answers = [*pool.map(ask, batches)]
        server.shutdown()
    for rows, answer in zip(batches, answers, strict=True):
        assert_close(answer, predict(params, rows)["y"].numpy(), "f32", 8)
    page = (ROOT / "docs/guide/deployment.md").read_text()
    assert "Phones and browsers are not supported" in page


def test_a_training_step_with_random_numbers(rng, tmp_path):
    optimizer = ts.optim.AdamW()
    params = {"w": ts.param(rng.standard_normal((6, 4)), "bf16")}
    x = ts.tensor(rng.standard_normal((8, 6)), "f32")

    @ts.jit
    def step(params, state, x, lr):
        def loss(p):
            return ts.mean(ts.square(ts.dropout(x, 0.25) @ ts.cast(p["w"], "f32")))

        value, grads = ts.value_and_grad(loss)(params)
        params, state = optimizer.update(params, grads, state, lr)
        return params, state, value

    again = ts.load(ts.export(step, tmp_path / "step.tsf", params, optimizer.init(params), x, 0.1))
    ends = []
    for f in (step, again):
        ts.random.seed(5)
        p, state = params, optimizer.init(params)
        for lr in (0.1, 0.01, 0.02):
            p, state, value = f(p, state, x, lr)
        assert p["w"].is_param
        ends.append((p["w"].numpy().tobytes(), float(value), int(state["step"])))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(("kind", "second"), [("vjp", 16.0), ("vjp, called in bwd", 24.0),
                                              ("jvp", 16.0)])
def test_rules_of_the_users_hold_in_the_loaded_function(kind, second, tmp_path):
    """f' is 2, where that of the body is 1: with h = f(x) f(2x), h' is 2 f(2x) + 4 f(x), h'' 16;
    where the rule is 2 f(x) / x, whose derivative is 2 / x, 8 more."""
    f = KINDS[kind]()
    x = ts.tensor(np.array([0.5, 2.0]), "f64")
    again = ts.load(ts.export(lambda x: f(x) * f(2.0 * x), tmp_path / "f.tsf", x))

    def derivatives(h):
        first = ts.grad(lambda x: ts.sum(h(x)))
        return h(x).numpy(), first(x).numpy(), ts.grad(lambda x: ts.sum(first(x)))(x).numpy()

    for got, want in zip(derivatives(again), derivatives(lambda x: f(x) * f(2.0 * x)),
                         strict=True):
        assert (got == want).all()
    assert (derivatives(again)[2] == second).all()


def test_packed_tensors_are_captured(tmp_path, rng):
    w = ts.tensor(rng.standard_normal((3, 5)), "fp6_e3m2")
    add = ts.jit(lambda x: x + ts.cast(w, "f32"))
    again = ts.load(ts.export(add, tmp_path / "f.tsf", ts.zeros((3, 5))))
    assert (again(ts.ones((3, 5))).numpy() == w.numpy().astype(np.float32) + 1).all()


# --- meshes ---------------------------------------------------------------------------------------
@pytest.mark.row("DEP-07")
def test_shardings_and_the_mesh_are_in_the_file_and_checked(tmp_path, rng):
    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))
    X, W = rng.standard_normal((6, 5)), rng.standard_normal((5, 7))
    rows, columns = ts.ShardSpec(("row",), ("dp",)), ts.ShardSpec(("col",), ("tp",))

    def operands(on=mesh):
        return (ts.dist.distribute(X.astype("f"), rows, mesh=on),
                ts.dist.distribute(W.astype("f"), columns, mesh=on))

    path = ts.export(ts.jit(lambda x, w: ts.sum(ts.tanh(x @ w), axis=0)), tmp_path / "f.tsf",
                     *operands())
    again = ts.load(path)
    assert again.manifest["mesh"] == [["dp", 2], ["tp", 2]]
    assert [leaf["layout"] for leaf in again.manifest["leaves"]] == ["(dp, -)", "(-, tp)"]
    want = np.tanh(X @ W).sum(0)
    for y in (again(*operands()).numpy(), *ts.dist.simulate(
            lambda: ts.load(path)(*operands()).numpy(), mesh)):
        assert_close(y, want, "f32", 11)
    with pytest.raises(ts.ArgumentError, match=r"argument w lies as one tensor, it was exported "
                                               r"for \(-, tp\)"):
        again(operands()[0], ts.tensor(W, "f32"))
    with pytest.raises(ts.dist.MeshError, match=r"mesh\(dp=2, tp=2\), 4 ranks; this program runs "
                                                "on 3"):
        ts.dist.simulate(lambda: ts.load(path), 3)
    other = ts.dist.mesh(axes=("dp", "tp"), shape=(4, 1))
    with pytest.raises(ts.ArgumentError, match=r"lies on mesh\(dp=4, tp=1\), it was exported for "
                                               r"mesh\(dp=2, tp=2\)"):
        again(*operands(other))


# --- the file -------------------------------------------------------------------------------------
@pytest.mark.row("RT-09")
@pytest.mark.parametrize("where", ["manifest", "graph"])
def test_a_newer_version_is_refused(model, tmp_path, where):
    predict, params, x, _ = model
    path = ts.export(predict, tmp_path / "f.tsf", params, x)
    with zipfile.ZipFile(path) as archive:
        manifest = json.loads(archive.read("manifest.json"))
        graph = archive.read("graph.txt")
    assert manifest["version"] == bundles.VERSION and f" v{VERSION}\n".encode() in graph
    if where == "manifest":
        manifest["version"] += 1
        newer = changed(path, **{"manifest.json": json.dumps(manifest).encode()})
        kind = BundleError
    else:
        graph = graph.replace(f" v{VERSION}\n".encode(), f" v{VERSION + 1}\n".encode())
        manifest["files"]["graph.txt"] = bundles._digest(graph)
        newer = changed(path, **{"graph.txt": graph,
                                 "manifest.json": json.dumps(manifest).encode()})
        kind = GraphError
    with pytest.raises(kind, match=r"of version 2, this Tessera reads up to (version )?1"):
        ts.load(newer)


def test_damage_is_found(model, tmp_path):
    predict, params, x, _ = model
    path = ts.export(predict, tmp_path / "f.tsf", params, x)
    for entries, says in (({"tensors/0": bytes(96)}, "is damaged: tensors/0"),
                          ({"graph.txt": None}, "is damaged: graph.txt"),
                          ({"other": b"x"}, "is damaged: other"),
                          ({"manifest.json": None}, "damaged, or no function"),
                          ({"manifest.json": b"{}"}, "damaged, or no function")):
        with pytest.raises(BundleError, match=says):
            ts.load(changed(path, **entries))
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(BundleError, match="damaged, or no function that ts.export wrote"):
        ts.load(tmp_path / "text")
    with pytest.raises(BundleError, match="there is no file"):
        ts.load(tmp_path / "nothing")


def test_an_older_file_stays_when_the_new_one_cannot_be_written(model, tmp_path, monkeypatch):
    predict, params, x, _ = model
    path = ts.export(predict, tmp_path / "f.tsf", params, x)
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(BundleError, match="f.tsf is not written: disk full"):
        ts.export(predict, path, params, x)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["f.tsf"]


def test_the_schedules_are_in_the_file(model, tmp_path):
    require_compiler()
    predict, params, x, _ = model
    again = ts.load(ts.export(predict, tmp_path / "f.tsf", params, x, targets=("cpu", "sm_90a")))
    assert list(again.schedules) == ["cpu", "sm_90a"]
    assert again.schedules["cpu"] == predict.inspect_ir("schedule", params, x)
    assert "sm_90a" in again.schedules["sm_90a"]


# --- what does not fit ----------------------------------------------------------------------------
def test_other_arguments_are_refused(model, tmp_path):
    predict, params, x, _ = model
    f = ts.load(ts.export(predict, tmp_path / "f.tsf", params, x))
    for call, kind, says in (
            (lambda: f(params, ts.zeros((5, 5))), ts.ShapeError,
             r"predict: argument x is \[5, 5\], it was exported for \[4, 5\]"),
            (lambda: f(params, ts.cast(x, "bf16")), ts.DTypeError, "x is bf16, .* for f32"),
            (lambda: f(params, x, "train"), ts.ArgumentError,
             "mode is 'train', it was exported with 'eval'"),
            (lambda: f([params], x), ts.ArgumentError, "another structure"),
            (lambda: f(params, "x"), ts.ArgumentError, "x is str, it was exported with a tensor"),
            (lambda: f(params, x, q=1), ts.ArgumentError, "the arguments params, x, mode, scale"),
            (lambda: f(params, x, x=x), ts.ArgumentError, "the arguments params, x, mode, scale")):
        with pytest.raises(kind, match=says):
            call()


def test_what_a_file_cannot_hold(tmp_path):
    mesh = ts.dist.mesh(axes="dp", shape=2)
    far = ts.dist.tensor((4,), ts.ShardSpec(("row",), ("dp",)), mesh, init=1.0)

    @ts.kernel
    def twice(x: ts.Tensor["N"], y: ts.Tensor["N"]):
        y[tile_n:tile_n + 16] = ts.tile.load(x[tile_n:tile_n + 16]) * 2.0

    def by_kernel(x):
        y = ts.zeros_like(x)
        twice(x, y)
        return y

    for fn, kind, says in (
            (by_kernel, GraphError, r"kernel has call=twice\(\), which the text"),
            (lambda x: x + far, BundleError, "captures a distributed"),
            (lambda x: (x, "text"), BundleError, "gives more than tensors"),
            (lambda x: {1: x}, BundleError, "has dict among its arguments or results")):
        with pytest.raises(kind, match=says):
            ts.export(fn, tmp_path / "f.tsf", ts.ones((4,)))
    assert not os.listdir(tmp_path)


def gathered(x, *rest, k=2.0, **more):
    return ts.sum(x) * k + sum(ts.sum(r) for r in rest) + sum(ts.sum(v) for v in more.values())


@pytest.mark.parametrize("args, named", [(3, ()), (1, ("p", "q")), (2, ("k",)), (1, ())])
def test_arguments_behind_stars(args, named, tmp_path, rng):
    given = [ts.tensor(rng.standard_normal(3)) for _ in range(args)]
    kwargs = {n: 3.0 if n == "k" else ts.tensor(rng.standard_normal(2)) for n in named}
    loaded = ts.load(ts.export(gathered, tmp_path / "f.tsf", *given, **kwargs))
    assert loaded(*given, **kwargs).item() == gathered(*given, **kwargs).item()
    with pytest.raises(ts.ArgumentError, match="exported for arguments of another structure"):
        loaded(*given, given[0], **kwargs)
    with pytest.raises(ts.ArgumentError, match=r"with the arguments x, \*rest, k, \*\*more"):
        loaded(*given, x=given[0], **kwargs)


def test_a_function_of_any_number_of_tensors(tmp_path, rng):
    xs = [ts.tensor(rng.standard_normal(3)) for _ in range(3)]
    total = ts.jit(lambda *xs: tuple(x * 2.0 for x in xs))
    loaded = ts.load(ts.export(total, tmp_path / "f.tsf", *xs))
    assert [y.tolist() for y in loaded(*xs)] == [y.tolist() for y in total(*xs)]
    with pytest.raises(ts.ArgumentError, match=r"with the arguments \*xs"):
        loaded(*xs, x=xs[0])
