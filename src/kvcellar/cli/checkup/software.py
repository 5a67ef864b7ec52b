"""What is installed in this Python, and who owns the names: connectors and commands.

Versions are read from what the installer wrote, so nothing heavy is imported. Whether a name is
ours decides what an engine loads and what a copied command starts, and both fail far away from
where the mistake was made. Used by `kvcellar doctor`.
"""

import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import kvcellar
from kvcellar.cli.checkup.findings import Finding, note, ok, problem
from kvcellar.config.load import is_switched_on, variable

__all__ = ["examine_software"]

_NEEDED = ("blake3", "msgspec", "numpy", "starlette", "uvicorn")
_VLLM_FIRST, _VLLM_BEHIND = (0, 25, 1), (0, 34)
_PLUGINS = "vllm.general_plugins"
_SWITCH = "KVCELLAR_VLLM_PLUGIN"
_CONNECTORS = "KVCellarConnector and LMCacheMPConnector"
_COMMANDS = ("kvcellar", "lmcache", "lmcache_server", "lmcache_controller")
_OWNER = re.compile(r"^\s*(?:from|import)\s+(kvcellar|lmcache)\b", re.MULTILINE)
_SCRIPT_BYTES = 4_096


def examine_software() -> Iterator[Finding]:
    """Yield what was found."""
    where = Path(kvcellar.__file__).parent
    yield ok("kvcellar", f"{kvcellar.__version__} in {where}, Python {sys.version.split()[0]}")
    missing = [name for name in _NEEDED if _version(name) is None]
    if missing:
        yield problem(
            "packages", f"{', '.join(missing)} missing", f"pip install {' '.join(missing)}"
        )
    else:
        yield ok("packages", ", ".join(f"{name} {_version(name)}" for name in _NEEDED))
    if _version("numba") is None:
        yield note(
            "numba",
            "not installed: on a CPU seals are computed more slowly",
            "pip install 'kvcellar[numba]' in the engine's environment",
        )
    yield _vllm()
    if _version("vllm") is not None:
        yield _connectors()
    yield from _commands()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _vllm() -> Finding:
    found = _version("vllm")
    if found is None:
        return note(
            "vllm", "not in this Python: engines of another environment need kvcellar there"
        )
    torch = _version("torch")
    text = f"{found}, torch {torch or 'not installed'}"
    numbers = tuple(int(part) for part in re.findall(r"\d+", found.partition("+")[0])[:3])
    if numbers < _VLLM_FIRST or numbers[:2] >= _VLLM_BEHIND:
        return problem(
            "vllm",
            f"{text}: kvcellar is tested with 0.25.1 to 0.33",
            "install one of those, or try and report what happens",
        )
    return ok("vllm", text)


def _connectors() -> Finding:
    """Say who answers to the connectors' names in vLLM."""
    ours = [point for point in entry_points(group=_PLUGINS) if point.value.startswith("kvcellar.")]
    lmcache = _version("lmcache")
    if not ours:
        return problem(
            "connectors",
            f"vLLM does not know {_CONNECTORS}: kvcellar's plug-in is not installed here",
            f"{sys.executable} -m pip install kvcellar",
        )
    if not is_switched_on(_SWITCH):
        owner = f"lmcache {lmcache}'s" if lmcache else "vLLM's own"
        return problem(
            "connectors",
            f"{_SWITCH}={variable(_SWITCH)} switches the plug-in off: LMCacheMPConnector is "
            f"{owner} and KVCellarConnector is unknown",
            f"unset {_SWITCH}",
        )
    allowed = variable("VLLM_PLUGINS")
    if allowed is not None and ours[0].name not in [name.strip() for name in allowed.split(",")]:
        return problem(
            "connectors",
            f"VLLM_PLUGINS={allowed} leaves kvcellar's plug-in out",
            f"export VLLM_PLUGINS={allowed.rstrip(',')},{ours[0].name}".replace("=,", "="),
        )
    beside = f", though lmcache {lmcache} is installed" if lmcache else ""
    return ok("connectors", f"{_CONNECTORS} are kvcellar's{beside}")


def _commands() -> Iterator[Finding]:
    """Say whom each command on the PATH belongs to."""
    for name in _COMMANDS:
        places = [*_places(name)]
        if places:
            yield _command(name, places)
    if not [*_places("kvcellar")]:
        yield note(
            "command kvcellar",
            "not on the PATH",
            f"export PATH={Path(sys.executable).parent}:$PATH, or {sys.executable} -m kvcellar",
        )


def _command(name: str, places: list[Path]) -> Finding:
    first = places[0]
    owner = _owner(first)
    label = f"command {name}"
    if owner == "kvcellar":
        return ok(label, f"{first} is kvcellar's")
    ours = next((path for path in places if _owner(path) == "kvcellar"), None)
    if name in {"lmcache_server", "lmcache_controller"}:
        return note(label, f"{first} is {owner}'s; kvcellar 0.1 has no such command")
    fix = f"export PATH={ours.parent}:$PATH" if ours else f"use {sys.executable} -m kvcellar server"
    return problem(
        label,
        f"{first} is {owner}'s: what it starts, kvcellar's connector cannot use",
        fix,
    )


def _places(name: str) -> Iterator[Path]:
    for folder in dict.fromkeys((variable("PATH") or "").split(os.pathsep)):
        path = Path(folder) / name
        if folder and path.is_file() and os.access(path, os.X_OK):
            yield path


def _owner(path: Path) -> str:
    try:
        with path.open("rb") as script:
            text = script.read(_SCRIPT_BYTES).decode("utf-8", "replace")
    except OSError:
        return "unreadable and nobody"
    found = _OWNER.search(text)
    return found[1] if found else "another program"
