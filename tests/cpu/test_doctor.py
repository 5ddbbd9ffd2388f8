"""`python -m tessera`: the doctor's findings are true; its exit code says if they matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

import tessera
from fake_driver import Driver
from fake_driver import driver as driver
from tessera import config, doctor
from tessera.__main__ import COMMANDS, Command, main
from tessera.doctor import BROKEN, MISSING, OK, DoctorReport, Section
from tessera.errors import ArgumentError
from tessera.runtime import device, libcuda


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tessera", *words], env=os.environ | env,
                          capture_output=True, text=True)


def findings(title: str) -> dict[str, doctor.CheckResult]:
    return {line.name: line for line in doctor.SECTIONS[title].lines()}


def test_json_and_text_say_the_same_and_the_core_works(tmp_path):
    out = run("doctor", "--json", TESSERA_CACHE_DIR=str(tmp_path))
    assert out.returncode == 0, out.stdout + out.stderr
    report = json.loads(out.stdout)
    assert report["core_works"] is True and list(report["sections"]) == list(doctor.SECTIONS)
    lines = {line["name"]: line for lines in report["sections"].values() for line in lines}
    assert lines["numpy"] == {"name": "numpy", "status": OK, "fix": "",
                              "detail": metadata.version("numpy")}
    assert str(tmp_path) in lines["cache_dir"]["detail"]
    for line in lines.values():
        assert line["status"] in (OK, MISSING, BROKEN)
        assert line["status"] == OK or line["fix"], line


def test_a_bad_setting_gives_exit_code_1_and_says_which(fresh_config, capsys):
    fresh_config.setenv("TESSERA_NUMERICS", "perfect")
    fresh_config.setenv("TESSERA_DEBG", "1")
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "broken   TESSERA_NUMERICS     TESSERA_NUMERICS='perfect' is not" in shown
    assert "did you mean 'TESSERA_DEBUG'?" in shown
    assert shown.endswith("the core does not work: see above\n")


def test_a_missing_package_names_the_command(monkeypatch):
    monkeypatch.setattr(doctor, "CORE_PACKAGES", ("numpy", "no-such-package-here"))
    lines = findings("Core packages")
    assert lines["numpy"].status == OK
    assert lines["no-such-package-here"].status == MISSING
    assert lines["no-such-package-here"].fix.startswith("pip install ")


def test_an_installed_package_that_does_not_import_is_broken(monkeypatch):
    monkeypatch.setitem(sys.modules, "opt_einsum", None)  # import raises ModuleNotFoundError
    line = findings("Core packages")["opt_einsum"]
    assert line.status == BROKEN and metadata.version("opt_einsum") in line.detail


def test_a_wrong_sum_or_a_compiler_that_fails_is_broken(monkeypatch):
    import numba

    monkeypatch.setattr(numba, "njit", lambda f: lambda n: -1)
    (line,) = doctor.SECTIONS["CPU loops"].lines()
    assert (line.status, line.detail) == (BROKEN, "wrong sum -1")

    def fail(f):
        raise RuntimeError("no LLVM\nsecond line")

    monkeypatch.setattr(numba, "njit", fail)
    (line,) = doctor.SECTIONS["CPU loops"].lines()
    assert (line.status, line.detail) == (BROKEN, "RuntimeError: no LLVM")


def test_a_cache_that_others_can_write_to_is_broken(fresh_config, tmp_path):
    (tmp_path / "loops").mkdir()
    (tmp_path / "loops").chmod(0o777)
    with config.scope(cache_dir=tmp_path):
        (line,) = doctor.SECTIONS["Cache"].lines()
    assert line.status == BROKEN and "loops is writable by others" in line.detail
    assert line.fix.startswith("chmod 700")


def test_an_unusable_cache_folder_is_broken(fresh_config, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with config.scope(cache_dir=tmp_path / "file" / "cache"):
        (line,) = doctor.SECTIONS["Cache"].lines()
    assert line.status == BROKEN and "TESSERA_CACHE_DIR" in line.fix


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for ptxas")
@pytest.mark.parametrize("script, status", [
    ("echo 'Cuda compilation tools, release 12.9, V12.9.86'", OK), ("exit 3", BROKEN)])
def test_ptxas_of_the_path_is_run(monkeypatch, tmp_path, script, status):
    ptxas = tmp_path / "ptxas"
    ptxas.write_text(f"#!/bin/sh\n{script}\n")
    ptxas.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    line = doctor.check_ptxas()
    assert line.status == status and str(ptxas) in line.detail


class OneDevice(Driver):
    """A machine with one device."""

    def cuDriverGetVersion(self):
        return 0, 12080

    def cuDeviceTotalMem(self, handle):
        return 0, 141 * 2**30


def test_a_gpu_is_described(driver, monkeypatch):
    one = OneDevice()
    monkeypatch.setattr(doctor, "driver", lambda: one)
    monkeypatch.setattr(device, "driver", lambda: one)
    monkeypatch.setattr(device, "_devices", {})
    lines = findings("GPU")
    assert lines["driver"] == doctor.CheckResult("driver", OK, "supports CUDA 12.8")
    assert lines["cuda:0"] == doctor.CheckResult("cuda:0", OK, "NVIDIA H200, cc 9.0, 141 GiB")


def test_a_driver_that_refuses_is_missing_and_says_why(monkeypatch):
    refuses = SimpleNamespace(cuInit=lambda flags: (100,),
                              cuGetErrorName=lambda status: (0, b"CUDA_ERROR_NO_DEVICE"))
    monkeypatch.setattr(doctor, "driver", device.driver.__wrapped__)  # not what is kept of before
    monkeypatch.setattr(libcuda, "open_library", lambda: refuses)
    lines = findings("GPU")
    assert list(lines) == ["driver"] and lines["driver"].status == MISSING
    assert "cuInit answers CUDA_ERROR_NO_DEVICE" in lines["driver"].detail


def test_only_core_sections_decide_the_exit_code():
    bad = [doctor.CheckResult("x", BROKEN, "")]
    for title, section in doctor.SECTIONS.items():
        assert DoctorReport({title: bad}).core_works is not section.core


def test_a_second_section_or_command_of_a_name_is_refused():
    with pytest.raises(ArgumentError, match="declared twice"):
        Section("Python", True, lambda: iter(()))
    with pytest.raises(ArgumentError, match="declared twice"):
        Command("doctor", "", "tessera.doctor")


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == tessera.__version__ + "\n"


@pytest.mark.parametrize("words, message", [
    ([], "no command given"), (["docter"], "did you mean 'doctor'?"), (["-x"], "no command '-x'")])
def test_a_wrong_command_lists_the_commands(capsys, words, message):
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert message in shown and all(f"  {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0 and f"python -m tessera {name}" in capsys.readouterr().out
