"""The guide is true: its code runs and prints what it shows; its links, names and tables hold."""

from __future__ import annotations

import configparser
import functools
import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from pathlib import Path

import pytest

import guide
import guide_tables
import tessera as ts
from guide import ACCEPT, PAGES, ROOT
from guide_tables import TABLES
from mesh.launch import needs_mpi
from registries import restored
from tessera import config, errors
from tessera.mesh.collectives.exchange_ops import by_group

README, DOCS = ROOT / "README.md", ROOT / "docs"
INDEX = DOCS / "index.md"
GUIDE = DOCS / "guide" / "programming_model.md"
TRAINING = DOCS / "guide" / "training.md"


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


RUNNING = [p for p in PAGES if any(b.runs for b in guide.blocks_of(p.read_text()))]
ALL_PAGES = pytest.mark.parametrize("path", PAGES, ids=page_id)
RUNNING_PAGES = pytest.mark.parametrize("path", RUNNING, ids=page_id)
TO_ACCEPT = "TESSERA_ACCEPT=1 python -m pytest tests/cpu/test_docs.py writes the pages anew"

NAME = re.compile(r"\bts((?:\.[A-Za-z_]\w*)+)")
MODULE = re.compile(r"`tessera((?:\.[A-Za-z_]\w*)+)`")
FILE = re.compile(r"\b((?:tessera|tests|examples|docs|benchmarks)/[\w./-]+\.\w+)\b")
FILES = re.compile(r"`([\w./-]+/)\{([\w,]+)\}(\.\w+)`")  # several of a folder: a/{b,c}.py
VARIABLE = re.compile(r"\bTESSERA_[A-Z_]+[A-Z]\b")
WRONG_ON_PURPOSE = {"sofmax"}


def section(title: str, page: Path = README) -> str:
    """A section of a page, of the README by default."""
    found = page.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert found, f"{page.name} has no section {title!r}"
    return found


@pytest.fixture
def folder(fresh_config, no_gpu, tmp_path, monkeypatch) -> Iterator[Path]:
    """An empty current directory, default settings, a fresh random state, and registries that are
    given back as they were. Pages show what is printed without a GPU."""
    state = ts.random.get_state()
    monkeypatch.chdir(tmp_path)
    ts.random.seed(0)
    ts.debug.flags()
    monkeypatch.setattr(ts.debug.sentinel._local, "run", 0)  # pages print the number of a call
    with restored():
        yield tmp_path
    ts.random.set_state(state)


# --- what the pages print ---------------------------------------------------------------------
@RUNNING_PAGES
def test_the_code_runs_and_prints_what_the_page_shows(path, folder):
    text = path.read_text()
    printed = list(guide.run_page(text, folder))
    if ACCEPT:
        text = guide.accepted(text, printed)
        path.write_text(text)
        printed = guide.with_texts_of(text, printed)
    assert printed
    for p in printed:
        at = f"{path.name}:{p.block.line}"
        if p.expected is None:
            assert not p.got, f"{at} prints this, and no ```text block follows:\n{p.got}"
        elif not guide.agrees(p.got, p.expected.text):
            pytest.fail(f"{at} prints\n\n{p.got}\nand the page shows\n\n{p.expected.text}\n"
                        f"{TO_ACCEPT}")


@pytest.mark.row("CORE-26")
def test_the_readme_shows_the_ir(folder):
    shown = [p for p in guide.run_page(README.read_text(), folder)
             if "inspect_ir(" in p.block.text]
    kinds = [word for p in shown
             for word in re.findall(r"^(graph|schedule|tile\.func) ", p.got, re.M)]
    assert kinds == ["graph", "schedule", "tile.func"]
    for p in shown:
        assert p.expected is not None and guide.agrees(p.got, p.expected.text)
    assert "def scores" in shown[0].block.text and "= gelu(%0)" in shown[0].got


@pytest.mark.row("CORE-28")
def test_the_readme_tunes_a_kernel_and_profiles_a_function(folder):
    """And it names the settings and the trace by which one goes on."""
    text = section("Tune and profile")
    assert "@ts.kernel.autotune(" in text and "tuning_trace" in text
    shown = {name: p for p in guide.run_page(README.read_text(), folder)
             for name in ("autotune", "profile") if f"{name}(" in p.block.text}
    for p in shown.values():
        assert p.expected is not None and guide.agrees(p.got, p.expected.text)
    found = re.match(r"(\d+) candidates, (\d+) of them cannot run; chosen: {",
                     shown["autotune"].got)
    assert found and int(found[1]) > int(found[2]) > 0
    assert "/loop gelu" in shown["profile"].got and " bytes at most" in shown["profile"].got
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {"forward", "loop gelu mul reduce_sum div"} <= {e["name"] for e in events}
    assert "<svg" in (folder / "profile.html").read_text()


@needs_mpi
@pytest.mark.row("CORE-27")
def test_the_commands_of_the_readme_train_on_several_processes(folder):
    """On four, and on from there on two: the first and the last line, of a small model."""
    lines = re.findall(r"^(mpirun -n \d .*?)(?:  +#.*)?$", section("Several GPUs or processes"),
                       re.M)
    assert len(lines) > 2 and "--resume" in lines[-1] and "-n 2" in lines[-1]
    (folder / "text.txt").write_text(README.read_text() * 12)
    small = ("--d 32 --layers 2 --heads 2 --T 32 --B 4 --checkpoint-every 1 --steps 2 --sample 0 "
             "--data text.txt")
    first, last = (guide.run_command(line.replace("examples/", f"{ROOT}/examples/") + " " + more,
                                     folder)
                   for line, more in ((lines[0], small), (lines[-1], "--steps 3")))
    for printed, words in ((first, ("step 0 of 2", "mesh(dp=2, tp=2)", "step 2: held-out loss")),
                           (last, ("step 2 of 3", "mesh(tp=2)", "step 3: held-out loss"))):
        for word in words:
            assert printed.count(word) == 1, printed


def test_the_readme_says_what_happens_when_a_rank_fails():
    text = section("Several GPUs or processes")
    assert "stops all ranks" in text and "TESSERA_COMM_TIMEOUT" in text
    assert f"({config.SETTINGS['comm_timeout'].default})" in text and "TESSERA_RANK_LOGS" in text


def test_the_picture_of_a_layout_is_the_one_that_is_made():
    file, mesh = DOCS / "guide" / "layout.svg", ts.dist.mesh(axes=("dp", "tp"), shape=(2, 3))
    grid = ts.ShardSpec(("row", "col"), ("dp", "tp"))
    made = ts.debug.show_sharding(grid, (5, 8), mesh).svg() + "\n"
    if ACCEPT:
        file.write_text(made)
    assert file.read_text() == made, TO_ACCEPT
    root = xml.fromstring(made)
    cells = [c for c in root if c.tag.endswith("rect")]
    assert len(cells) == len({c.get("fill") for c in cells}) == 6  # a colour for each holder
    texts = [t.text for t in root if t.tag.endswith("text")]
    assert texts[0] == "[5, 8] in (dp, tp) on mesh(dp=2, tp=3)" and {*"012345"} <= {*texts}
    for side, length, whole in (("x", "width", "width"), ("y", "height", "height")):
        assert all(float(c.get(side)) + float(c.get(length)) <= float(root.get(whole))
                   for c in cells)
    assert "![" in (DOCS / "guide" / "mesh.md").read_text() and "(layout.svg)" in (
        DOCS / "guide" / "mesh.md").read_text()


@pytest.mark.row("DOC-06")
def test_the_chapter_on_derivatives_has_effects_and_rules_of_both_kinds(folder):
    """That its snippets print what it shows is tested above."""
    text = (DOCS / "guide" / "autodiff.md").read_text()
    assert {"Effects and derivatives", "Rules of your own"} <= {t for _, t in guide.headings(text)}
    used = "".join(b.text for b in guide.blocks_of(text) if b.runs)
    for name in ("ts.custom_vjp", "ts.custom_jvp", "ts.dropout", "ts.debug.print"):
        assert name in used


# --- what the pages say exists ----------------------------------------------------------------
@ALL_PAGES
@pytest.mark.row("CORE-25")
def test_links_lead_somewhere(path):
    for link in guide.links(path.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        file, _, place = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.is_file(), f"{path.name} links to {link}, which is not there"
        if place:
            places = {guide.anchor(t) for _, t in guide.headings(target.read_text())}
            assert place in places, f"{path.name} links to {link}; {file} has {sorted(places)}"


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 220


def test_the_index_links_to_every_page():
    """Directly: whoever looks for something needs one click from there."""
    linked = {(INDEX.parent / link.partition("#")[0]).resolve()
              for link in guide.links(INDEX.read_text()) if "://" not in link}
    assert linked >= set(PAGES) - {INDEX}


@pytest.mark.parametrize("what, sign", [
    ("wgmma is emitted", "ptx.wgmma."), ("a race is detected", "RaceError("),
    ("softmax's gradient is", "SOFTMAX = GraphOp("), ("a dtype is declared", "fp8_e5m2 = _float("),
    ("barriers are inserted", "barrier"), ("ops are fused", "def fuse")])
def test_the_index_says_where_it_is(what, sign):
    """One click: the row of what one looks for leads to the file that has it."""
    row = next(line for line in INDEX.read_text().splitlines() if line.startswith(f"| {what} |"))
    file = next(link for link in guide.links(row) if link.endswith(".py"))
    assert sign in (INDEX.parent / file).read_text(), f"{file} has no {sign}"


def test_the_readme_leads_to_every_page():
    found, waiting = set(), [README]
    while waiting:
        page = waiting.pop()
        found.add(page)
        targets = ((page.parent / link.partition("#")[0]).resolve()
                   for link in guide.links(page.read_text()) if "://" not in link)
        waiting += [t for t in targets if t.suffix == ".md" and t not in found]
    assert found >= set(PAGES)


@ALL_PAGES
def test_names_of_ts_exist(path):
    """Tables apart: they quote the code, and some of it may not be public yet."""
    text = re.sub(r"\]\([^)\s]+\)", "]", guide.TABLE.sub("", path.read_text()))  # links: ts.md
    for dotted in sorted(set(NAME.findall(text))):
        parts = dotted.strip(".").split(".")
        if parts[0] not in WRONG_ON_PURPOSE:
            functools.reduce(getattr, parts, ts)  # raises for one that is not there


@ALL_PAGES
def test_modules_files_variables_and_targets_exist(path):
    text = path.read_text()
    for dotted in MODULE.findall(text):
        assert importlib.util.find_spec("tessera" + dotted), f"there is no tessera{dotted}"
    several = [folder + name + end for folder, names, end in FILES.findall(text)
               for name in names.split(",")]
    for file in (*FILE.findall(text), *several):
        assert (ROOT / file).exists(), f"{path.name} names {file}, which is not there"
    known = {s.env for s in config.SETTINGS.values()} | {"TESSERA_ACCEPT"}
    assert set(VARIABLE.findall(text)) <= known
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"^make (\w+)|`make (\w+)`", text, re.M)) <= {
        pair for t in targets for pair in ((t, ""), ("", t))}


@pytest.mark.parametrize("path", sorted((DOCS / "internals").glob("*.md")), ids=page_id)
def test_short_names_of_files_are_the_ends_of_paths(path):
    """`emit/reduce.py` and `cpu/`: internals name files and folders by the end of their path."""
    text = guide.without_blocks(path.read_text())
    known = ["/" + p.relative_to(ROOT).as_posix() for p in (ROOT / "tessera").rglob("*")]
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", text):
        if not (ROOT / name).exists():
            assert any(k.endswith("/" + name.rstrip("/")) for k in known), f"{path.name}: {name}"


def test_flags_of_the_training_example_exist():
    text = TRAINING.read_text() + section("Several GPUs or processes")
    used = set(re.findall(r"--[A-Za-z][A-Za-z-]*", text)) - {"--help"}
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    shown = subprocess.run([sys.executable, ROOT / "examples" / "train.py", "--help"], env=env,
                           capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"--[A-Za-z][A-Za-z-]*", shown))
    assert {"--resume", "--data", "--T", "--mesh", "--zero"} <= used <= known


def test_what_is_said_to_be_missing_is_missing():
    """When a part arrives this fails: write its section then."""
    missing = section("What is missing", DOCS / "reference" / "status.md")
    assert "rounded at random" in missing
    with pytest.raises(ts.UnsupportedTargetError, match="rounds at random, .* on hosts alone"):
        by_group("all_reduce", lambda *args, **attrs: args[1])(
            ts.ones(2), ts.ones(2), axis=None, mesh=None, index=0, type=ts.as_type("bf16"))


@ALL_PAGES
def test_no_page_says_that_kernels_are_not_compiled(path):
    text = guide.without_blocks(path.read_text())
    assert not re.search(r"CUDA (target|floor)[^.\n]*\b(not (here|there|in)|missing)\b", text)


def test_a_page_keeps_its_figures_while_nothing_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(guide_tables, "MEASURED", tmp_path / "kernels.json")
    assert TABLES["measured"]() is None and TABLES["measured in short"]() is None


def test_figures_come_from_the_file(monkeypatch, tmp_path):
    """A part that failed has no rows, and ratios are ours by theirs."""
    file = tmp_path / "kernels.json"
    monkeypatch.setattr(guide_tables, "MEASURED", file)
    context = {"device": "a GPU", "date": "2026-01-02", "commit": "abc", "command": "python x.py"}
    file.write_text(json.dumps(context | {
        "gemm": {"8192": {"NT": {"TFLOP/s": 300}, "cuBLAS": {"TFLOP/s": 400}}},
        "attention": {"failed": "OutOfMemory"}}))
    text = TABLES["measured in short"]()
    assert text is not None and "a GPU, 2026-01-02, commit abc, `python x.py`" in text
    assert "| A Bᵀ, 8192³, bf16 | 300 TFLOP/s | 400 TFLOP/s | cuBLAS | 0.75 |" in text
    assert "attention" not in text and "NN" not in text


# --- headings, tables, files ------------------------------------------------------------------
@pytest.mark.row("DOC-11")
def test_the_guide_has_the_seven_sections():
    sections = [t for level, t in guide.headings(GUIDE.read_text()) if level == 2]
    assert sections == ["Core Concepts", "Tiles and Execution Model", "Memory Management",
                        "Numerics and Types", "Autodiff System", "Distributed Computing",
                        "Advanced Patterns"]


@ALL_PAGES
def test_pages_have_one_title_and_no_heading_twice(path):
    found = guide.headings(path.read_text())
    assert [level for level, _ in found].count(1) == 1 and found[0][0] == 1
    assert len({guide.anchor(t) for _, t in found}) == len(found)


@ALL_PAGES
def test_tables_are_those_of_the_registries(path):
    text = path.read_text()
    fresh = guide.TABLE.sub(lambda m: m[1] + (TABLES[m["name"]]() or m["text"]) + m[4], text)
    if ACCEPT:
        path.write_text(fresh)
    elif fresh != text:
        changed = sorted(set(fresh.splitlines()) ^ set(text.splitlines()))
        pytest.fail("\n".join([f"{path.name} has old tables:", *changed[:10], TO_ACCEPT]))


def test_the_guide_names_every_modifier_of_a_policy():
    named = re.findall(r"^\| `@(\w+)", GUIDE.read_text(), re.M)
    assert sorted(named) == sorted(ts.numerics.modifier_kinds())


def test_every_table_has_its_page():
    used = [m["name"] for p in PAGES for m in guide.TABLE.finditer(p.read_text())]
    assert set(used) == set(TABLES)


@pytest.mark.parametrize("name, least", [("ops", 80), ("functions", 120), ("transforms", 15),
                                         ("errors", 12), ("special errors", 5), ("settings", 5),
                                         ("formats", 16), ("names", 15), ("modules", 8),
                                         ("kernel errors", 7), ("tile ops", 100), ("routines", 6),
                                         ("collectives", 6), ("commands", 40)])
def test_tables_are_complete_and_say_something(name, least):
    rows = [re.split(r"(?<!\\)\|", line)[1:-1]
            for line in (TABLES[name]() or "").splitlines()[2:]]
    assert len(rows) >= least
    assert all(len(row) == len(rows[0]) for row in rows)
    if name != "formats":  # its columns are numbers
        needed = (1, 2) if name in ("modules", "functions", "special errors") else (1,)
        silent = [row[0].strip() for row in rows if not all(row[i].strip() for i in needed)]
        assert not silent, f"nothing is said of {silent}"


def test_the_api_has_every_function_and_class():
    """With or without a docstring: one that says nothing is to be seen, too."""
    shown = "".join(TABLES[name]() or "" for name in ("api ts", "api classes"))
    public = {name: getattr(ts, name) for name in set(ts.__all__) - set(errors.__all__)}
    missing = [name for name, x in public.items() if inspect.isroutine(x) or isinstance(x, type)
               if f"`ts.{name}`\n" not in shown]
    assert not missing
    silent = re.findall(r"^### (.*)\n\n```\n(?:.+\n)+```", shown, re.M)
    assert not silent, "no docstring"


@pytest.mark.row("CORE-25", "CORE-29", "CORE-30", "CORE-31", "CARD-02")
def test_the_readme_says_where_things_are():
    links = guide.links(README.read_text())
    assert "docs/guide/programming_model.md" in links and "CONTRIBUTING.md" in links
    assert "LICENSE" in links
    where = README.read_text().partition("## Where things are")[2].partition("\n## ")[0]
    for word in ("**Code**", "**Documentation**", "**Issues**", "issue tracker", "`tessera/`",
                 "`docs/`"):
        assert word in where
    for name in ("CONTRIBUTING.md", "LICENSE", "setup.cfg", "pyproject.toml"):
        assert (ROOT / name).is_file()
    assert "Apache License" in (ROOT / "LICENSE").read_text()


@pytest.mark.row("SYS-02", "SYS-03")
def test_the_floors_of_the_readme_are_the_declared_ones():
    rows = {line.split("|")[1].split(",")[0].strip(): line
            for line in README.read_text().splitlines() if line.startswith("| ")}
    floor = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert f"{floor.removeprefix('>=')} or newer" in rows["Python"]
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    cuda = [e.removeprefix("cuda") for e in setup["options.extras_require"] if "cuda" in e]
    assert " or ".join(sorted(cuda)) == "12 or 13" and "| 12 or 13 |" in rows["CUDA"]
    for extra in setup["options.extras_require"]:
        assert f"'.[{extra}]'" in README.read_text()


# --- the tests' own tools: each of these checks can fail --------------------------------------
PAGE = """# Title

```python
x = 2
```

```python
def f(y):
    return x / y
print(x, "a|b")
```

```text
2 a|b
```

```python
try:
    f(0)
except ZeroDivisionError as error:
    print(error.__traceback__.tb_next.tb_lineno)
```

```text
wrong
```

A list, and a link to [the title](#title).

```text
no output
```

```python side.py
print("from a file")
```

```sh run
python side.py
```
"""


class TestTheTools:
    def test_blocks_run_in_order_as_lines_of_one_file(self, tmp_path):
        first, second, third, command = guide.run_page(PAGE, tmp_path)
        assert (first.got, first.expected) == ("", None)
        assert second.got == "2 a|b\n" and second.expected.text == "2 a|b\n"
        assert third.got == "4\n" and third.expected.text == "wrong\n"
        assert command.got == "from a file\n" and command.expected is None

    @pytest.mark.parametrize("there", [True, False])
    @pytest.mark.parametrize("words", [guide.COMPILER, guide.GPU])
    def test_blocks_for_the_compiler_run_where_it_is_and_count_as_lines(self, there, words,
                                                                         tmp_path, monkeypatch):
        monkeypatch.setattr(guide, f"has_{words[1]}", lambda: there)
        page = PAGE.replace("```python\nx = 2\n```", "```python\nx = 2\n```\n\n"
                            f"```{' '.join(words)}\nprint(x)\n```\n\n```text\n3\n```")
        printed = list(guide.run_page(page, tmp_path))
        assert [p.got for p in printed if p.block.words == words] == ["2\n"] * there
        assert printed[-2].got == "6\n"  # the line number that the page prints
        assert ("```text\n2\n```" in guide.accepted(page, printed)) is there

    @pytest.mark.parametrize("there", [True, False])
    def test_commands_of_several_processes_run_where_mpirun_is(self, there, tmp_path, monkeypatch):
        monkeypatch.setattr(guide, "has_mpi", lambda: there)
        page = "# Title\n\n```sh mpi\necho $OMPI_ALLOW_RUN_AS_ROOT\n```\n"
        assert [p.got for p in guide.run_page(page, tmp_path)] == ["1\n"] * there

    def test_accepting_writes_what_was_printed(self, tmp_path):
        page = guide.accepted(PAGE, list(guide.run_page(PAGE, tmp_path)))
        assert page == PAGE.replace("wrong\n", "4\n")

    @pytest.mark.parametrize("shown, taken", [("line 3: f(...)\n", True), ("line ...\n", False)])
    def test_dots_that_are_printed_are_text(self, shown, taken, tmp_path):
        page = ("# T\n\n```python\nprint('line 4: f(...)')\nprint(1)\n```\n\n"
                f"```text\n{shown}2\n```\n")
        made = guide.accepted(page, list(guide.run_page(page, tmp_path)))
        assert made == (page.replace(f"{shown}2", "line 4: f(...)\n1") if taken else page)

    @pytest.mark.parametrize("got, shown, same", [
        ("a\nb\n", "a\nb\n", True), ("a\n", "b\n", False), ("a\nb\n", "a\n", False),
        ("a \n", "a\n", True), ("took 3 s\n", "took ... s\n", True),
        ("x\na\nb\nc\n", "x\n...\nc\n", True),
        ("x\nc\n", "x\n...\nc\n", True), ("a.c\n", "abc\n", False), ("abc\n", "a.c\n", False),
        ("x\na\nb\n", "x\n...\nc\n", False), ("took 3 m\n", "took ... s\n", False),
    ])
    def test_comparing(self, got, shown, same):
        assert guide.agrees(got, shown) is same

    def test_prose_has_no_code(self):
        assert guide.headings(PAGE) == [(1, "Title")] and guide.links(PAGE) == ["#title"]
        assert guide.headings("```python\n# no heading\n```\n") == []

    def test_anchors(self):
        assert guide.anchor("What `ts.grad` is, and why") == "what-tsgrad-is-and-why"
