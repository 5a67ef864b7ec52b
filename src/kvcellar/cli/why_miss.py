"""`kvcellar why-miss [REQUEST]`: why the last prompts, or one of them, did not hit.

The server remembers the last thousand lookups; this shows its conclusions and what they rest on.
With `--prompt-file` or `--tokens-file` it is asked about a prompt that need not have been sent.
Digests are cut to eight bytes; no token and no salt is shown, and neither leaves this process.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvcellar.cli.asking import Asking, connect, read_asking
from kvcellar.cli.prompts import question_about, tokens_of_file, tokens_of_text
from kvcellar.client.session import Session
from kvcellar.config.server import Setting
from kvcellar.errors import ConfigError
from kvcellar.protocol.messages import Explain, Explained, NamespaceList, Namespaces
from kvcellar.protocol.prompts import NamespaceNote

__all__ = ["run"]

_LAST_MAX = 50
_NOTHING = (
    "no request like {!r} is remembered: it is too long ago, or its engine never asked (no server, "
    "a kv_role that does not load, a request that reads no cache): see the engine's log"
)
_PROMPT = (
    Setting(
        "prompt", "--prompt-file", "FILE", "Ask about the prompt in a file, as /v1/completions "
        "would take it; needs --model.", "", False, "",
    ),
    Setting(
        "tokens", "--tokens-file", "FILE", "Ask about a prompt by its tokens: a JSON list, or "
        "what an engine's /tokenize answers; needs --model.", "", False, "",
    ),
    Setting(
        "model", "--model", "NAME", "The model as its engine calls it (kvcellar status).", "",
        False, "",
    ),
    Setting(
        "tokenizer", "--tokenizer", "NAME", "Folder or model whose tokenizer.json makes the "
        "tokens; it must be on this host. Without it that of --model.", "", False, "",
    ),
    Setting("salt", "--salt", "SALT", "The request's cache_salt.", "", False, ""),
)  # fmt: skip
_LAST = Setting("last", "--last", "N", "How many requests, the newest first.", "", False, "10")


def run(arguments: Sequence[str]) -> int:
    """Print why requests missed; return 0, or 1 if the one that was named is not remembered.

    Raises:
        KVCellarError: the command line is wrong, or nobody answers.
    """
    named = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    flags = arguments[1:] if named else arguments
    asking = read_asking(flags, program="kvcellar why-miss [REQUEST]", more=(_LAST, *_PROMPT))
    if asking.more.keys() - {"last"}:
        return _explain_prompt(asking, named)
    text = asking.more.get("last", "10")
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _LAST_MAX):
        raise ConfigError(f"--last {text}: write a number from 1 to {_LAST_MAX}")
    with connect(asking) as session:
        reply = session.call(lambda id_: Explain(id_, named, int(text)), timeout_s=asking.timeout_s)
    assert isinstance(reply, Explained), reply
    if reply.misses or asking.as_json:
        _print(reply, as_json=asking.as_json, is_long=bool(named))
    else:
        print(_NOTHING.format(named) if named else "no lookup missed lately")
    return 1 if named and not reply.misses else 0


def _explain_prompt(asking: Asking, named: str) -> int:
    more = asking.more
    if named or "last" in more:
        raise ConfigError("name a request, or a prompt with --prompt-file, not both")
    if ("prompt" in more) == ("tokens" in more):
        raise ConfigError("write --prompt-file FILE or --tokens-file FILE, with --model NAME")
    if "model" not in more:
        raise ConfigError("--model is missing: write the model as its engine calls it")
    model, salt = more["model"], more.get("salt", "")
    tokens = (
        tokens_of_file(more["tokens"])
        if "tokens" in more
        else tokens_of_text(more["prompt"], more.get("tokenizer", model))
    )
    with connect(asking) as session:
        space = _namespace(session, model, asking.timeout_s)
        reply = session.call(
            lambda id_: question_about(tokens, space, salt, request_id=id_),
            timeout_s=asking.timeout_s,
        )
    assert isinstance(reply, Explained), reply
    _print(reply, as_json=asking.as_json, is_long=True)
    return 0


def _namespace(session: Session, model: str, timeout_s: float) -> NamespaceNote:
    """Return the namespace that an engine of a model bound last."""
    reply = session.call(Namespaces, timeout_s=timeout_s)
    assert isinstance(reply, NamespaceList), reply
    known = {space.model: space for space in reversed(reply.namespaces)}
    if model not in known:
        others = f"models that were: {', '.join(sorted(known))}" if known else "no other was either"
        raise ConfigError(f"--model {model}: not served since the server's start; {others}")
    return known[model]


def _print(reply: Explained, *, as_json: bool, is_long: bool) -> None:
    if as_json:
        print(json.dumps(reply.misses, indent=2))
    else:
        print("\n".join(line for miss in reply.misses for line in _lines(miss, is_long=is_long)))


# Any: plain data of `server.misses.Miss`.
def _lines(miss: Mapping[str, Any], *, is_long: bool) -> Iterator[str]:
    when = (
        f"{miss['request']}  {miss['age_s']:.0f} s ago" if miss["request"] else "this prompt, now"
    )
    yield f"{when}, {miss['hit_tokens']} of {miss['tokens']} tokens found: {miss['reason']}"
    yield f"  {miss['text']}"
    if is_long:
        yield f"  instance {miss['instance']}, model {miss['model'] or 'unknown'}"
        for name, value in miss["evidence"].items():
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            yield f"  {name.replace('_', ' ')}: {shown}"
