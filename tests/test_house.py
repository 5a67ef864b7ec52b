"""What is promised about the package as a whole: one pure wheel, a light import, kept contracts."""

import ast
import configparser
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import kvcellar

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
OF_THE_ENGINE = {"huggingface_hub", "tokenizers", "torch", "transformers", "triton", "vllm"}
HEAVY = ("lmcache", "numba", "numpy", "torch", "transformers", "triton", "vllm")


def _run(*command, cwd=ROOT):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def _in_python(code):
    """Return what `code` prints in a fresh Python that finds this tree's package first."""
    path = f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n"
    answer = _run(sys.executable, "-I", "-c", path + code)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def _modules_under(*packages):
    """Name every module of these packages, whatever exists of them."""
    for package in packages:
        home = SOURCE / "kvcellar" / package
        for path in sorted(home.rglob("*.py")) if home.is_dir() else [home.with_suffix(".py")]:
            parts = path.relative_to(SOURCE).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.fixture(scope="module")
def releases(tmp_path_factory):
    """Build the wheel and the source archive as a release would."""
    folder = tmp_path_factory.mktemp("releases")
    built = _run(sys.executable, "-m", "hatchling", "build", "-d", str(folder))
    assert built.returncode == 0, built.stderr
    return folder


def test_the_wheel_is_pure_and_carries_what_it_must(releases):
    (wheel,) = releases.glob("*.whl")
    assert wheel.name == f"kvcellar-{kvcellar.__version__}-py3-none-any.whl"
    info = f"kvcellar-{kvcellar.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    assert {"kvcellar/__init__.py", "kvcellar/py.typed", f"{info}/licenses/LICENSE"} <= names
    outside = {n for n in names if not n.startswith(("kvcellar/", f"{info}/"))}
    assert outside == set()
    assert {Path(n).suffix for n in names if n.startswith("kvcellar/")} == {".py", ".typed"}
    assert "License-Expression: Apache-2.0" in metadata
    points = configparser.ConfigParser()
    points.read_string(entry_points)
    assert dict(points["console_scripts"]) == {
        "kvcellar": "kvcellar.cli.main:main",
        "lmcache": "kvcellar.compat.lmcache_cli:main",
    }
    assert dict(points["vllm.general_plugins"]) == {
        "kvcellar": "kvcellar.compat.vllm_plugin:register"
    }


def test_the_source_archive_holds_what_is_listed_and_no_more(releases):
    (archive,) = releases.glob("*.tar.gz")
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    allowed = listed["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]
    with tarfile.open(archive) as source:
        names = [Path(*Path(name).parts[1:]).as_posix() for name in source.getnames()]
    always = {"PKG-INFO", "pyproject.toml", ".gitignore"}
    strays = [
        n for n in names if n not in always and not any(Path(n).is_relative_to(a) for a in allowed)
    ]
    assert strays == []
    assert "src/kvcellar/__init__.py" in names


def test_every_entry_point_leads_to_a_function():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = [
        *project["scripts"].values(),
        *project["entry-points"]["vllm.general_plugins"].values(),
    ]
    for point in points:
        module, name = point.split(":")
        code = f"import {module} as found; print(callable(found.{name}))"
        assert _in_python(code) == "True", point


def test_what_is_imported_is_what_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[<>=]", line)[0] for line in project["dependencies"]}
    imported = {
        name.partition(".")[0]
        for path in (SOURCE / "kvcellar").rglob("*.py")
        for name in _imports(ast.parse(path.read_text(encoding="utf-8")))
    }
    ours = {"kvcellar", *project["optional-dependencies"], *sys.stdlib_module_names}
    assert imported - ours - OF_THE_ENGINE == declared


def _imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert kvcellar.__version__ == project["version"]


def test_importing_the_package_loads_nothing_heavy_and_takes_no_time():
    code = (
        "import time; before = set(sys.modules); start = time.perf_counter()\n"
        "import kvcellar\n"
        "print(time.perf_counter() - start, *(set(sys.modules) - before))"
    )
    answers = [_in_python(code).split() for _ in range(3)]
    assert set(answers[0][1:]) == {"kvcellar"}
    assert min(float(seconds) for seconds, *_ in answers) < 0.1


@pytest.mark.parametrize("package", ["cli", "compat", "server"])
def test_what_runs_beside_the_engine_imports_nothing_heavy(package):
    # The connector under LMCache's name is part of the engine; the plug-in that names it is not.
    modules = [name for name in _modules_under(package) if name != "kvcellar.compat.vllm"]
    code = f"import importlib\nfor name in {modules}: importlib.import_module(name)\n"
    loaded = _in_python(code + f"print(*(name for name in {HEAVY} if name in sys.modules))")
    assert loaded == ""


def _contracts():
    """Map each contract's section to its name, from the settings that `make check` uses."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / ".importlinter", encoding="utf-8")
    return {
        section.rpartition(":")[2]: settings[section]["name"]
        for section in settings.sections()
        if section != "importlinter"
    }


PLANTED = {
    "layers": ("layout/planted.py", "import kvcellar.keys"),
    "acyclic": ("client/a/one.py", "import kvcellar.client.b.two"),
    "pure": ("keys/planted.py", "import socket"),
    "light": ("server/planted.py", "import numpy"),
    "doors": ("client/planted.py", "import torch"),
    "store": ("client/planted_too.py", "import kvcellar.store"),
    "compat": ("bench/planted.py", "import kvcellar.compat"),
}


def _lint(source):
    linter = "from importlinter.cli import lint_imports_command as lint; lint()"
    path = f"import sys; sys.path.insert(0, {str(source)!r})\n"
    settings = str(ROOT / ".importlinter")
    return _run(sys.executable, "-I", "-c", path + linter, settings, "--no-cache")


def _plant(source, file, line):
    path = source / "kvcellar" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in path.parents:
        if folder == source:
            break
        (folder / "__init__.py").touch()
    path.write_text(line + "\n", encoding="utf-8")


def _copy_of_the_package(folder):
    target = folder / "src"
    for path in (SOURCE / "kvcellar").rglob("*.py"):
        copy = target / path.relative_to(SOURCE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    return target


def test_every_import_contract_is_kept():
    answer = _lint(SOURCE)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_a_planted_violation_of_each_contract_is_reported(tmp_path):
    contracts = _contracts()
    assert set(PLANTED) == set(contracts), "plant a violation of every contract"
    source = _copy_of_the_package(tmp_path)
    for file, line in PLANTED.values():
        _plant(source, file, line)
    _plant(source, "client/b/two.py", "import kvcellar.client.a.one")
    answer = _lint(source)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    kept = [name for name in contracts.values() if f"{name} BROKEN" not in answer.stdout]
    assert kept == [], answer.stdout


def test_a_package_that_no_layer_names_is_reported(tmp_path):
    source = _copy_of_the_package(tmp_path)
    _plant(source, "utils/__init__.py", "")
    answer = _lint(source)
    assert "kvcellar.utils" in answer.stdout
    assert answer.returncode == 1
