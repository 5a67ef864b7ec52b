"""What `query engine` and `describe engine` ask an OpenAI-compatible engine such as vLLM.

One prompt, streamed, with the time to its first token and between tokens; or what the engine says
of itself. The times are those of a user, the client's own share included. Used by the commands.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvcellar.client.web import ask, stream
from kvcellar.clock import Clock
from kvcellar.errors import ConfigError, KVCellarError

__all__ = ["Query", "QueryReport", "describe_engine", "filled_prompt", "query_engine"]

_PLACE = re.compile(r"\{(\w+)\}")
_COUNTERS = {
    "requests_running": "vllm:num_requests_running",
    "requests_waiting": "vllm:num_requests_waiting",
    "kv_cache_usage": "vllm:kv_cache_usage_perc",
    "prefix_cache_queries": "vllm:prefix_cache_queries_total",
    "prefix_cache_hits": "vllm:prefix_cache_hits_total",
    "external_prefix_cache_queries": "vllm:external_prefix_cache_queries_total",
    "external_prefix_cache_hits": "vllm:external_prefix_cache_hits_total",
}


class Query(msgspec.Struct, frozen=True):
    """One question to an engine.

    Attributes:
        url: of the engine.
        prompt: complete, see `filled_prompt`.
        model: its name; empty for the first that the engine serves.
        tokens_max: of the answer.
        timeout_s: between two bytes of the answer.
        is_chat: ask as a chat first, and as a completion where the model has no chat; else only
            as a completion.
    """

    url: str
    prompt: str
    model: str
    tokens_max: int
    timeout_s: float
    is_chat: bool


class QueryReport(msgspec.Struct, frozen=True):
    """What an engine answered and how fast.

    Attributes:
        id: the request's id, for `kvcellar why-miss`.
        model: that answered.
        endpoint: where it was asked.
        ttft_ms: milliseconds to the first token.
        tpot_ms: milliseconds for each token after it; 0 with one token.
        total_ms: milliseconds in all.
        prompt_tokens: as the engine counted.
        completion_tokens: likewise.
        cached_tokens: of the prompt, from any cache; None where the engine does not say.
        text: the answer.
    """

    id: str
    model: str
    endpoint: str
    ttft_ms: float
    tpot_ms: float
    total_ms: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    text: str


def filled_prompt(prompt: str, documents: Mapping[str, str]) -> str:
    """Return a prompt with each `{name}` replaced by the document of that name.

    Args:
        prompt: the text.
        documents: a path by name.

    Raises:
        ConfigError: a document cannot be read, or is not in the prompt.
    """
    unused = documents.keys() - set(_PLACE.findall(prompt))
    if unused:
        raise ConfigError(f"--documents {min(unused)}: the prompt has no {{{min(unused)}}}")
    texts = {}
    for name, path in documents.items():
        try:
            texts[name] = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--documents {name}={path}: cannot be read: {error}") from error
    return _PLACE.sub(lambda place: texts.get(place[1], place[0]), prompt)


def query_engine(query: Query, *, clock: Clock) -> QueryReport:
    """Ask, and return what came and when.

    Raises:
        KVCellarError: the engine answered with an error, or with nothing.
    """
    model = query.model or _first_model(query.url)
    if query.is_chat:
        # A model without a chat template says so with an error; then its completions are asked.
        with contextlib.suppress(_NoChatError):
            return _ask(query, model, "/v1/chat/completions", clock=clock)
    return _ask(query, model, "/v1/completions", clock=clock)


class _NoChatError(KVCellarError):
    """The engine cannot answer as a chat."""


def _ask(query: Query, model: str, path: str, *, clock: Clock) -> QueryReport:
    is_chat = path.endswith("chat/completions")
    message: dict[str, object] = (
        {"messages": [{"role": "user", "content": query.prompt}]}
        if is_chat
        else {"prompt": query.prompt}
    )
    body = {
        **message,
        "model": model,
        "max_tokens": query.tokens_max,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start_s = clock.monotonic_s()
    times_s: list[float] = []
    texts: list[str] = []
    usage: dict[str, Any] = {}
    request_id = ""
    try:
        encoded = json.dumps(body).encode()
        for event in stream(query.url + path, body=encoded, timeout_s=query.timeout_s):
            _check(event)
            request_id = str(event.get("id") or request_id)
            usage = _usage(event) or usage
            text = _text(event, is_chat=is_chat)
            if text:
                times_s.append(clock.monotonic_s())
                texts.append(text)
    except KVCellarError as error:
        if is_chat and not times_s and re.search(r"answered 4\d\d", str(error)):
            raise _NoChatError(str(error)) from error
        raise
    if not times_s:
        raise KVCellarError(f"{query.url}{path} answered without a token")
    end_s = clock.monotonic_s()
    count = int(usage.get("completion_tokens") or len(times_s))
    details = usage.get("prompt_tokens_details") or {}
    return QueryReport(
        id=request_id,
        model=model,
        endpoint=path,
        ttft_ms=round(1000 * (times_s[0] - start_s), 3),
        tpot_ms=round(1000 * (times_s[-1] - times_s[0]) / max(count - 1, 1), 3),
        total_ms=round(1000 * (end_s - start_s), 3),
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=count,
        cached_tokens=details.get("cached_tokens"),
        text="".join(texts),
    )


# Any: what an engine sent, of any shape.
def _check(event: Mapping[str, Any]) -> None:
    if "error" in event:
        raise KVCellarError(f"the engine reported {event['error']}")


def _usage(event: Mapping[str, Any]) -> dict[str, Any]:
    return event.get("usage") or {}


def _text(event: Mapping[str, Any], *, is_chat: bool) -> str:
    choices = event.get("choices") or [{}]
    if not is_chat:
        return choices[0].get("text") or ""
    delta = choices[0].get("delta") or {}
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


def _first_model(url: str) -> str:
    models = json.loads(ask(f"{url}/v1/models")).get("data") or []
    if not models:
        raise KVCellarError(f"the engine at {url} serves no model: write --model")
    return str(models[0]["id"])


def describe_engine(url: str) -> dict[str, Any]:
    """Return what an engine says of itself: models, version, and its caches' counters.

    Raises:
        KVCellarError: nobody answers.
    """
    models = json.loads(ask(f"{url}/v1/models")).get("data") or []
    page: dict[str, Any] = {
        "url": url,
        "version": None,
        "models": [
            {"id": model.get("id"), "max_model_len": model.get("max_model_len")} for model in models
        ],
    }
    with contextlib.suppress(KVCellarError, ValueError):
        page["version"] = json.loads(ask(f"{url}/version")).get("version")
    with contextlib.suppress(KVCellarError):
        samples = dict(_samples(ask(f"{url}/metrics").decode("utf-8", "replace")))
        page["metrics"] = {
            name: samples[theirs] for name, theirs in _COUNTERS.items() if theirs in samples
        }
    return page


def _samples(text: str) -> Iterator[tuple[str, float]]:
    """Yield each metric with its values summed over all labels."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            with contextlib.suppress(ValueError):
                family = name.partition("{")[0]
                totals[family] = totals.get(family, 0.0) + float(value)
    yield from totals.items()
