"""Settings: where values come from, how long they hold, what is refused and how it is said."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import timeit
from pathlib import Path

import pytest

from tessera import config
from tessera.errors import ArgumentError

SETTINGS = config.SETTINGS.values()


def names(setting: config.Setting) -> str:
    return setting.name


@pytest.mark.parametrize("setting", SETTINGS, ids=names)
def test_a_default_is_what_its_setting_accepts(fresh_config, setting):
    value = config.get(setting.name)
    assert setting.convert(value, setting.env) == value


@pytest.mark.parametrize("variable, more", [
    ("OMPI_COMM_WORLD_LOCAL_SIZE", {"OMPI_COMM_WORLD_SIZE": "100"}),
    ("MPI_LOCALNRANKS", {"PMI_SIZE": "100"}), ("PYTEST_XDIST_WORKER_COUNT", {}),
    ("LOCAL_WORLD_SIZE", {"WORLD_SIZE": "100", "RANK": "0", "MASTER_ADDR": "a",
                          "MASTER_PORT": "1"})])
def test_processes_that_were_started_together_share_the_cpus(monkeypatch, variable, more):
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    for name, text in more.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(config, "available_cpus", lambda: 12)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    got = []
    for count in ("1", "4", "5", "100"):
        monkeypatch.setenv(variable, count)
        got.append(config.compile_cpus())
    assert got == [12, 3, 2, 1]
    monkeypatch.setattr(config, "available_cpus", lambda: 2)  # each rank is bound to two
    monkeypatch.setenv(variable, "4")
    assert config.compile_cpus() == 2


@pytest.mark.parametrize("setting", SETTINGS, ids=names)
def test_the_environment_gives_the_value_at_first_use(fresh_config, setting):
    name = setting.name
    text, value = next((t, v) for t, v in setting.kind.samples if config.get(name) != v)
    config.reset()
    fresh_config.setenv(config.SETTINGS[name].env, text)
    assert getattr(config, name) == value == config.get(name)
    fresh_config.delenv(config.SETTINGS[name].env)
    assert getattr(config, name) == value  # read once


def test_a_path_may_begin_at_home(fresh_config):
    fresh_config.setenv("TESSERA_CACHE_DIR", "~/elsewhere")
    assert config.cache_dir == Path.home() / "elsewhere"


def test_an_empty_variable_counts_as_unset(fresh_config):
    fresh_config.setenv("TESSERA_SEED", " ")
    assert config.seed == 0


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.kind.refused], ids=names)
def test_a_bad_variable_names_itself_its_value_and_what_is_accepted(fresh_config, setting):
    name, text = setting.name, setting.kind.refused
    fresh_config.setenv(setting.env, text)
    with pytest.raises(ArgumentError) as caught:
        getattr(config, name)
    assert f"{setting.env}={text!r} is not accepted" in str(caught.value)
    assert setting.kind.accepts in caught.value.hint and caught.value.code == "E_CONFIG"


def test_a_bad_variable_does_not_stop_the_import():
    code = "import tessera.config as c\ntry: c.seed\nexcept ValueError as e: print(e.message)"
    out = subprocess.run([sys.executable, "-c", code], env=os.environ | {"TESSERA_SEED": "x"},
                         capture_output=True, text=True, check=True)
    assert out.stdout == "TESSERA_SEED='x' is not accepted\n"


@pytest.mark.parametrize("values", [
    {"numerics": "loud"}, {"debug": 2}, {"cache_dir": ""}, {"num_threads": 1.5}, {"seed": True},
    {"seed": "one"}, {"seed": 2**64}, {"cache_dir": 3},
])
def test_set_and_scope_refuse_what_the_environment_would(fresh_config, values):
    (name,) = values
    for use in (lambda: config.set(**values), lambda: config.scope(**values).__enter__()):
        with pytest.raises(ArgumentError, match=f"{name}={values[name]!r} is not accepted"):
            use()
    assert not config._layers


def test_a_value_of_any_length_is_shown_in_one_line(fresh_config):
    fresh_config.setenv("TESSERA_SEED", "9" * 5000)
    with pytest.raises(ArgumentError, match=r"TESSERA_SEED='9{76}\.\.\. is not accepted"):
        _ = config.seed


def test_a_misspelled_setting_names_the_nearest(fresh_config):
    for use in (lambda: config.get("numeric"), lambda: config.set(numeric="off"),
                lambda: config.scope(numeric="off").__enter__()):
        with pytest.raises(ArgumentError, match="did you mean 'numerics'"):
            use()
    with pytest.raises(AttributeError, match="'numeric'; settings: numerics, debug, device"):
        _ = config.numeric


def test_scopes_nest_and_end_on_errors(fresh_config):
    with config.scope(seed=1, numerics="flag"):
        with pytest.raises(ZeroDivisionError), config.scope(seed=2):
            assert (config.seed, config.numerics) == (2, "flag")
            _ = 1 // 0
        assert (config.seed, config.numerics) == (1, "flag")
    assert (config.seed, config.numerics) == (0, "off")


def test_set_inside_a_scope_of_that_name_ends_with_it(fresh_config):
    config.set(seed=5)
    with config.scope(seed=1), config.scope(numerics="flag"):
        config.set(seed=2, num_threads=3)
        assert config.seed == 2
    assert (config.seed, config.num_threads) == (5, 3)


def test_overlapping_scopes_may_end_in_any_order(fresh_config):
    first, second = config.scope(seed=1), config.scope(seed=2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert config.seed == 2
    second.__exit__(None, None, None)
    assert config.seed == 0


def test_a_scope_holds_in_other_threads(fresh_config):
    seen = []
    with config.scope(numerics="flag"):
        thread = threading.Thread(target=lambda: seen.append(config.numerics))
        thread.start()
        thread.join()
    assert seen == ["flag"]


def test_reset_inside_a_scope_is_refused(fresh_config):
    with config.scope(seed=1), pytest.raises(ArgumentError, match="inside a config.scope"):
        config.reset()


def test_a_second_setting_of_a_name_or_variable_is_refused():
    before = dict(config.SETTINGS)
    for name, env in (("seed", "TESSERA_OTHER"), ("other", "TESSERA_SEED"), ("get", "TESSERA_GET")):
        with pytest.raises(ArgumentError, match="declared twice|would hide"):
            config.Setting(name, env, config.PATH, "x", "")
    assert config.SETTINGS == before


def test_unknown_variables_are_found(fresh_config):
    fresh_config.setenv("TESSERA_NUMERIC", "raise")
    assert config.unknown_variables() == ["TESSERA_NUMERIC"]


def test_every_setting_is_read_by_a_module():
    """A setting is declared when something obeys it."""
    folder = Path(config.__file__).parent
    text = "\n".join(p.read_text() for p in folder.rglob("*.py") if p.name != "config.py")
    for name in config.SETTINGS:
        assert re.search(rf'config\.{name}\b|config\.get\("{name}"\)', text), name


def test_reading_a_setting_takes_less_than_100_ns(fresh_config):
    timer = timeit.Timer("config.numerics", "from tessera import config; config.numerics")
    best_ns = min(timer.repeat(repeat=20, number=20_000)) / 20_000 * 1e9
    assert best_ns < 100, f"{best_ns:.0f} ns"


def test_blocks_of_switches_may_overlap_and_end_in_any_order(fresh_config):
    """As those of two threads do."""
    first = config.Switch(numerics="flag").__enter__()
    second = config.Switch(numerics="raise").__enter__()
    first.__exit__(None, None, None)
    assert config.numerics == "raise"
    second.__exit__(None, None, None)
    assert config.numerics == "off" and not config.chosen("numerics")


def test_a_switch_without_a_block_holds_until_set_again(fresh_config):
    config.Switch(numerics="flag", debug=True)
    with config.Switch(numerics="raise"):
        assert config.numerics == "raise"
    assert config.numerics == "flag"
    config.set(numerics="off")
    assert config.numerics == "off" and config.debug
    config.unset("debug")
    assert not config.debug
    for _ in range(3 * config.MOST_KEPT):
        config.Switch(numerics="flag")
    assert len(config._layers) <= config.MOST_KEPT
    config.reset()
    assert config.numerics == "off" and not config._layers
