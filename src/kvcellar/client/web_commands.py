"""The commands that take `--url`: ping, describe, kvcache clear and query, under either name.

LMCache's options and paths, so that its guides' lines work with `lmcache` and with `kvcellar`.
Each makes a page of plain data and lines for people; `--format`, `--output` and `-q` say what
becomes of them. Called by `cli` and by `compat`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvcellar.client.engine_queries import (
    Query,
    describe_engine,
    filled_prompt,
    query_engine,
)
from kvcellar.client.web import ask, checked_url
from kvcellar.clock import SystemClock
from kvcellar.config.flags import read_flags
from kvcellar.config.server import Setting
from kvcellar.errors import ConfigError
from kvcellar.telemetry.summary import status_lines

__all__ = ["WEB_COMMANDS", "run_web_command"]

SERVER_URL = "http://localhost:8080"
ENGINE_URL = "http://localhost:8000"


def _flag(field: str, flag: str, value: str, text: str, default: str = "") -> Setting:
    return Setting(field, flag, value, text, "", False, default)


_OUTPUT = (
    _flag("format", "--format", "{terminal,json}", "For people or for programs.", "terminal"),
    _flag("output", "--output", "PATH", "Write it to a file as well."),
    _flag("quiet", "-q", "", "Print nothing."),
)
_TOKEN = _flag("token", "--admin-token-file", "FILE", "The server's.")
_QUERY = (
    _flag("prompt", "--prompt", "TEXT", "With {name} where a document is to stand."),
    _flag("model", "--model", "NAME", "The model; else the first that the engine serves."),
    _flag("max_tokens", "--max-tokens", "N", "Of the answer.", "128"),
    _flag("timeout", "--timeout", "SECONDS", "Between two tokens.", "30"),
    _flag("documents", "--documents", "NAME=PATH…", "Files for {NAME} in the prompt."),
    _flag("completions", "--completions", "", "Ask for a completion, not for a chat."),
    _flag("chat_first", "--chat-first", "", "Ask for a chat first, as it does anyway."),
)
_OBJECTS = (
    _flag("model", "--model", "NAME", "Only objects of this model."),
    _flag("limit", "--limit", "N", "How many objects at most.", "20"),
    _TOKEN,
)


class _Asked(NamedTuple):
    """A command line that was read: the URL, and the texts of the other flags."""

    url: str
    given: Mapping[str, tuple[str, ...]]

    @property
    def token_file(self) -> str | None:
        return self.text("token") or None

    def text(self, field: str, default: str = "") -> str:
        return self.given.get(field, (default,))[-1]


class _Found(NamedTuple):
    """What a command found: a page for programs, lines for people."""

    # Any: whatever the other side answered.
    page: Any
    lines: Sequence[str]


class _Command(NamedTuple):
    """One command.

    Attributes:
        run: does it.
        url: the URL where none is given; empty: it must be given.
        flags: its own.
    """

    run: Callable[[_Asked], _Found]
    url: str
    flags: tuple[Setting, ...] = ()


def run_web_command(program: str, name: str, arguments: Sequence[str]) -> str:
    """Run one of the commands and return what it prints; empty for nothing.

    Args:
        program: kvcellar or lmcache, for messages.
        name: the command, a key of `WEB_COMMANDS`.
        arguments: what follows it, the subject first.

    Raises:
        ConfigError: the command line is wrong.
        KVCellarError: nobody answers, or with an error.
    """
    subjects = WEB_COMMANDS[name]
    subject = arguments[0] if arguments else ""
    if subject in {"-h", "--help"}:
        return f"usage: {program} {name} {'|'.join(subjects)} [--flag value ...]"
    command = subjects.get(subject)
    if command is None:
        choices = " or ".join(subjects)
        raise ConfigError(f"{subject!r} cannot be asked for; write {program} {name} {choices}")
    url = _flag("url", "--url", "URL", "Where to ask.", command.url)
    flags = (url, *command.flags, *_OUTPUT)
    given = read_flags(arguments[1:], flags, program=f"{program} {name} {subject}").given
    asked = _Asked(given.get("url", (command.url,))[-1], given)
    form = asked.text("format", "terminal")
    if form not in {"terminal", "json"}:
        raise ConfigError(f"--format {form}: write terminal or json")
    asked = asked._replace(url=checked_url(asked.url, example=command.url or SERVER_URL))
    found = command.run(asked)
    text = json.dumps(found.page, indent=2) if form == "json" else "\n".join(found.lines)
    _write(text, asked)
    return "" if "quiet" in asked.given else text


def _write(text: str, asked: _Asked) -> None:
    path = asked.text("output")
    if path:
        try:
            Path(path).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {path}: {error.strerror}") from error


def _ping_kvcache(asked: _Asked) -> _Found:
    ask(f"{asked.url}/healthcheck")
    return _Found({"url": asked.url, "status": "healthy"}, [f"{asked.url} is healthy"])


def _ping_engine(asked: _Asked) -> _Found:
    ask(f"{asked.url}/health")
    return _Found({"url": asked.url, "status": "healthy"}, [f"{asked.url} is healthy"])


def _describe_kvcache(asked: _Asked) -> _Found:
    page = json.loads(ask(f"{asked.url}/status"))
    return _Found(page, [*status_lines(page)])


def _describe_engine(asked: _Asked) -> _Found:
    page = describe_engine(asked.url)
    lines = [f"engine {asked.url}: vLLM {page['version'] or 'of an unknown version'}"]
    lines += [f"model    {m['id']} (up to {m['max_model_len']} tokens)" for m in page["models"]]
    metrics = page.get("metrics", {})
    lines += [f"{name.replace('_', ' ')}: {value:g}" for name, value in metrics.items()]
    return _Found(page, lines)


def _clear(asked: _Asked) -> _Found:
    url = f"{asked.url}/cache/clear"
    page = json.loads(ask(url, method="POST", body=b"{}", token_file=asked.token_file))
    return _Found(page, [f"cleared {page.get('chunks', 'all')} chunks at {asked.url}"])


def _query_engine(asked: _Asked) -> _Found:
    prompt = asked.text("prompt")
    if not prompt:
        raise ConfigError("--prompt is missing: write the text to ask")
    documents = {}
    for text in asked.given.get("documents", ()):
        name, equals, path = text.partition("=")
        if not (equals and name and path):
            raise ConfigError(f"--documents {text}: write NAME=PATH")
        documents[name] = path
    report = query_engine(
        Query(
            url=asked.url,
            prompt=filled_prompt(prompt, documents),
            model=asked.text("model"),
            tokens_max=int(_number("--max-tokens", asked.text("max_tokens", "128"), low=1)),
            timeout_s=_number("--timeout", asked.text("timeout", "30"), low=0.001),
            is_chat="completions" not in asked.given,
        ),
        clock=SystemClock(),
    )
    cached = "" if report.cached_tokens is None else f", {report.cached_tokens} of them cached"
    lines = [
        report.text,
        "",
        f"TTFT {report.ttft_ms:.1f} ms, TPOT {report.tpot_ms:.1f} ms",
        f"{report.total_ms:.1f} ms in all",
        f"{report.prompt_tokens} prompt tokens{cached}; {report.completion_tokens} answered",
        f"request {report.id} (kvcellar why-miss {report.id})",
    ]
    return _Found(msgspec.to_builtins(report), lines)


def _query_kvcache(asked: _Asked) -> _Found:
    limit = int(_number("--limit", asked.text("limit", "20"), low=1))
    model = asked.text("model")
    entries: list[dict[str, Any]] = []
    place = "0"
    while place and len(entries) < limit:
        # Each page looks at so many places, few or none of which may be of this model.
        query = f"page_size=5000&page_token={place}" + (f"&model_name={model}" if model else "")
        content = ask(f"{asked.url}/cache/objects?{query}", token_file=asked.token_file)
        page = json.loads(content)
        entries += page["entries"]
        place = page["next_page_token"] or ""
    entries = entries[:limit]
    lines = [
        f"{entry['key']['chunk_hash_hex'][:16]} rank {entry['key']['kv_rank']} "
        f"{entry['size_bytes']} bytes {entry['key']['model_name']}"
        for entry in entries
    ]
    return _Found({"entries": entries}, lines or ["no objects"])


def _query_coordinator(_asked: _Asked) -> _Found:
    raise ConfigError("not yet in kvcellar 0.1: there is no coordinator to ask")


def _number(flag: str, text: str, *, low: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not low <= number <= 1e9:
        raise ConfigError(f"{flag} {text}: write a number from {low:g} on")
    return number


WEB_COMMANDS: Mapping[str, Mapping[str, _Command]] = {
    "ping": {
        "kvcache": _Command(_ping_kvcache, SERVER_URL),
        "engine": _Command(_ping_engine, ENGINE_URL),
    },
    "describe": {
        "kvcache": _Command(_describe_kvcache, SERVER_URL),
        "engine": _Command(_describe_engine, ENGINE_URL),
    },
    "kvcache": {"clear": _Command(_clear, "", (_TOKEN,))},
    "query": {
        "engine": _Command(_query_engine, ENGINE_URL, _QUERY),
        "kvcache": _Command(_query_kvcache, SERVER_URL, _OBJECTS),
        "coordinator": _Command(_query_coordinator, "http://localhost:9300"),
    },
}
"""The commands by name, then by subject."""
