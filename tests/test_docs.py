"""The Markdown can be followed: links lead somewhere, and commands say what the programs accept."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from kvcellar.compat.lmcache_flags import LMCACHE_SERVER_FLAGS
from kvcellar.compat.vllm_options import read_lmcache_options
from kvcellar.config.load import load_server
from kvcellar.engines.vllm.options import read_options

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
SHELL_FENCE = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)
READERS = {"KVCellarConnector": read_options, "LMCacheMPConnector": read_lmcache_options}


def _listed(pattern):
    """Return the files of the checkout that are, or could be, committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(path for name in listed.stdout.splitlines() if (path := ROOT / name).exists())


def _name(path):
    return str(path.relative_to(ROOT))


def _anchors(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in HEADING.findall(text))
    return {heading.replace(" ", "-") for heading in plain}


def _commands():
    """Yield every shell command of the pages and examples, as words, with where it stands."""
    shells = [(path, path.read_text(encoding="utf-8")) for path in _listed("examples/*.sh")]
    for page in _listed("*.md"):
        shells += [(page, s) for s in SHELL_FENCE.findall(page.read_text(encoding="utf-8"))]
    for path, shell in shells:
        for line in shell.replace("\\\n", " ").splitlines():
            if re.search(r"\b(kvcellar|lmcache) server\b|--kv-transfer-config", line):
                words = shlex.split(line, comments=True)
                if words:
                    yield path, words


COMMANDS = {f"{_name(path)}-{n}": words for n, (path, words) in enumerate(_commands())}
SERVERS = [pytest.param(words, id=at) for at, words in COMMANDS.items() if "server" in words]
ENGINES = [
    pytest.param(words, id=at) for at, words in COMMANDS.items() if "--kv-transfer-config" in words
]


@pytest.mark.parametrize("page", _listed("*.md"), ids=_name)
def test_every_link_of_a_page_leads_somewhere(page):
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_index_leads_to_every_page():
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link).resolve() for link in LINK.findall(index.read_text("utf-8"))}
    pages = {page for page in _listed("docs/*") if page.parent == index.parent}
    assert sorted(_name(page) for page in pages - linked - {index}) == []


def test_there_are_commands_to_check():
    for found in (SERVERS, ENGINES):
        assert [at for at in (param.id for param in found) if at.startswith("README.md")] != []


@pytest.mark.parametrize("words", SERVERS)
def test_a_server_command_of_the_pages_is_accepted(words):
    at = words.index("server")
    program = words[at - 1]
    foreign = LMCACHE_SERVER_FLAGS if program == "lmcache" else ()
    loaded = load_server(words[at + 1 :], program=f"{program} server", foreign=foreign)
    assert loaded.config.l1_bytes > 0


@pytest.mark.parametrize("words", ENGINES)
def test_an_engine_command_of_the_pages_is_accepted(words):
    connectors = [json.loads(words[words.index("--kv-transfer-config") + 1])]
    for connector in connectors:
        extra = connector.get("kv_connector_extra_config", {})
        connectors += extra.get("connectors", [])
    ours = [c for c in connectors if c["kv_connector"] in READERS]
    assert ours
    for connector in ours:
        read = READERS[connector["kv_connector"]]
        assert read(connector.get("kv_connector_extra_config", {}))


@pytest.mark.parametrize("script", _listed("*.sh"), ids=_name)
def test_a_script_is_one_that_bash_reads(script):
    read = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert read.stderr == ""
