"""Rows DBG that are commands; the others are shown in test_sentinels and test_debug_tools."""

from __future__ import annotations

import json

import pytest

from tessera.__main__ import main

STORED = {"device": "cpu", "steps": 100, "gemm": {"time_us": 100.0, "speed_tflops": 50.0},
          "runs": [{"latency_ms": 2.0}, {"latency_ms": 3.0}]}


def changed(**figures):
    new = json.loads(json.dumps(STORED))
    new["gemm"].update(figures)
    return new


@pytest.mark.row("DBG-20")
class TestCompare:
    def compare(self, tmp_path, new, *options):
        for name, data in (("old", STORED), ("new", new)):
            (tmp_path / f"{name}.json").write_text(json.dumps(data))
        return main(["compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"), *options])

    @pytest.mark.parametrize("new, code", [
        (STORED, 0),
        (changed(time_us=109.0), 0),
        (changed(time_us=111.0), 1),
        (changed(time_us=50.0), 0),
        (changed(speed_tflops=46.0), 0),
        (changed(speed_tflops=45.0), 1),
        (changed(speed_tflops=90.0), 0),
        ({**STORED, "runs": [{"latency_ms": 2.0}, {"latency_ms": 9.0}]}, 1),
        ({**STORED, "steps": 1}, 0),
        ({"other_ms": 1.0}, 1),
    ])
    def test_beyond_the_margin_it_fails(self, tmp_path, capsys, new, code):
        assert self.compare(tmp_path, new) == code
        out = capsys.readouterr().out
        assert ("SLOWER" in out or "no figure" in out) == bool(code)

    def test_the_margin_is_chosen(self, tmp_path, capsys):
        assert self.compare(tmp_path, changed(time_us=140.0), "--margin", "0.5") == 0
        assert self.compare(tmp_path, changed(time_us=160.0), "--margin", "0.5") == 1
        assert "gemm.time_us: 100 -> 160  (+60.0% time)" in capsys.readouterr().out

    def test_files_that_hold_nothing(self, tmp_path, capsys):
        assert self.compare(tmp_path, {"steps": 3}) == 1
        assert "holds no figure" in capsys.readouterr().err
