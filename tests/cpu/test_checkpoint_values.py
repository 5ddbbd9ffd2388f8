"""Numbers and text among the tensors of a checkpoint."""

from __future__ import annotations

import pytest

import tessera as ts
from checkpoint_cases import assert_same, rewrite_manifest
from tessera.checkpoints import load, save


def test_numbers_and_text_come_back_with_their_types(tmp_path, rng):
    """None has its place in the structure. What differs by rank or mesh is in mesh/saving.py."""
    saved = {"w": ts.tensor(rng.normal(size=3)), "n": 3, "rate": 0.1, "act": "gelu", "on": False,
             "none": None, "list": [1, 1.0, True, "1", ts.zeros(2)]}
    save(tmp_path / "c", saved)
    blank = {**saved, "n": 0, "rate": 0.0, "act": "", "on": True, "list": [0, 0.0, False, "",
                                                                         ts.zeros(2)]}
    checkpoint = load(tmp_path / "c")
    found = checkpoint.tree(blank)
    assert_same(found["list"].pop(), saved["list"].pop())
    assert_same(found.pop("w"), saved.pop("w"))
    assert repr(found) == repr(saved)
    assert checkpoint.values == {"n": 3, "rate": 0.1, "act": "gelu", "on": False, "list.0": 1,
                                 "list.1": 1.0, "list.2": True, "list.3": "1"}
    assert set(checkpoint.tensors) == {"w", "list.4"}
    with pytest.raises(ts.CheckpointError) as caught:
        checkpoint.tree({"n": 3.0, "act": ts.zeros(4), "on": 1, "w": "w"}, part=True)
    for words in ("n is int 3, asked for float", "act is str 'gelu', asked for f32[4]",
                  "on is bool False, asked for int", "w is f64[3], asked for str"):
        assert words in str(caught.value)
    with pytest.raises(ts.CheckpointError, match="n is in it, but not asked for"):
        checkpoint.tree({"w": ts.zeros(3, "f64")})


def test_a_number_that_a_step_gave_back_as_a_tensor_is_a_number_again(tmp_path):
    params = {"w": ts.zeros(3), "n": 3, "rate": 0.25, "on": True, "act": "gelu"}
    save(tmp_path / "c", ts.jit(lambda p: {**p, "w": p["w"] + p["n"] * p["rate"]})(params))
    found = load(tmp_path / "c").tree(params)
    assert found.pop("w").tolist() == [0.75] * 3
    assert repr(found) == repr({k: v for k, v in params.items() if k != "w"})
    with pytest.raises(ts.CheckpointError, match=r"n is int64\[\], asked for float"):
        load(tmp_path / "c").tree({"n": 3.0}, part=True)


@pytest.mark.parametrize("value, words", [
    ({"type": "int", "value": "3"}, "values.n.value: a int is needed, it is '3'"),
    ({"type": "int", "value": True}, "a int is needed"),
    ({"type": "int", "value": 1 << 2000}, "a int is needed"),
    ({"type": "float", "value": 3}, "a float is needed"),
    ({"type": "float", "value": "1.5"}, "a float is needed"),
    ({"type": "float", "value": float("inf")}, "a float is needed"),
    ({"type": "bool", "value": 1}, "a bool is needed"),
    ({"type": "str", "value": None}, "a str is needed"),
    ({"type": "eval", "value": "1"}, "'eval' is none of bool, int, float, str"),
    ({"type": 3, "value": 1}, "values.n.type: a type is needed"),
    ({"type": "int"}, "values.n.value: it is not there"),
    (3, "values.n: an object is needed")])
def test_a_forged_number_is_an_error(tmp_path, value, words):
    folder = save(tmp_path / "c", {"w": ts.zeros(1), "n": 3})
    rewrite_manifest(folder, lambda m: m["values"].update(n=value))
    with pytest.raises(ts.CheckpointError, match="its manifest is malformed") as caught:
        load(folder)
    assert words in str(caught.value), str(caught.value)
    rewrite_manifest(folder, lambda m: m["values"].update(n={"type": "int", "value": 3}))
    rewrite_manifest(folder, lambda m: m["values"].update(w={"type": "int", "value": 3}))
    with pytest.raises(ts.CheckpointError, match="w is a tensor, too"):
        load(folder)


def test_checkpoints_of_tensors_alone_need_not_have_values(tmp_path):
    folder = save(tmp_path / "c", {"w": ts.zeros(2)})
    rewrite_manifest(folder, lambda m: m.pop("values"))  # as they were written before
    assert load(folder).tree({"w": ts.ones(2)})["w"].tolist() == [0, 0]


def test_an_index_as_in_pytorch_says_how_parts_are_had(tmp_path):
    save(tmp_path / "it", {"model": {"w": ts.ones(3)}, "step": 3})
    saved = load(tmp_path / "it")
    with pytest.raises(ts.CheckpointError, match="not indexed.*model.w, step") as error:
        saved["model"]
    assert "saved.tree(like)" in error.value.hint
    assert "saved.tensors['model.w']" in error.value.hint
    with pytest.raises(ts.CheckpointError) as error:
        saved["step"]
    assert "saved.values['step']" in error.value.hint
    with pytest.raises(ts.CheckpointError):
        list(saved)
