"""A prompt in a file, made into what a server can be asked about: its keys and a sketch.

The text becomes tokens as `/v1/completions` makes them, by the `tokenizer.json` of the model, which
must be on this host already: nothing is downloaded. Whoever has tokens (an engine's `/tokenize`
answers with those of a chat, template and all) needs no tokenizer. What is heavy is imported when
it is needed, and torch never. Used by `kvcellar why-miss`.
"""

import json
from pathlib import Path

from kvcellar.errors import ConfigError
from kvcellar.keys.digest import NamespaceId, request_seed, short_digest
from kvcellar.protocol.limits import KEYS_MAX, SKETCH_MAX_BYTES
from kvcellar.protocol.messages import ExplainPrompt
from kvcellar.protocol.prompts import NamespaceNote

__all__ = ["question_about", "tokens_of_file", "tokens_of_text"]

_FILE_MAX_BYTES = 64 * 1024 * 1024
_TOKEN_MAX = 0xFFFF_FFFF
_INSTEAD = "give its tokens instead, with --tokens-file and what the engine's /tokenize answers"


def tokens_of_file(path: str) -> list[int]:
    """Return the tokens in a file: a JSON list, or an object that has one under `tokens`.

    Raises:
        ConfigError: there is none.
    """
    try:
        content = json.loads(_read("--tokens-file", path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--tokens-file {path}: is no JSON: {error}") from error
    tokens = content.get("tokens") if isinstance(content, dict) else content
    if not isinstance(tokens, list) or not all(
        isinstance(token, int) and not isinstance(token, bool) and 0 <= token <= _TOKEN_MAX
        for token in tokens
    ):
        raise ConfigError(f"--tokens-file {path}: write a list of tokens, as in [128000, 791]")
    return tokens


def tokens_of_text(path: str, tokenizer: str) -> list[int]:
    """Return the tokens of the text in a file; blocks for its length.

    Args:
        path: of the text, in UTF-8; a line break at its end counts.
        tokenizer: a folder with a `tokenizer.json`, or the name of a model in this user's cache.

    Raises:
        ConfigError: the file or the tokenizer cannot be read; the message names the flag.
    """
    text = _read("--prompt-file", path)
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(
            f"--prompt-file needs the package tokenizers: pip install tokenizers, or {_INSTEAD}"
        ) from error
    file = _tokenizer_file(tokenizer)
    try:
        loaded = tokenizers.Tokenizer.from_file(str(file))
    # The library raises nothing more special than this for a file that it cannot read.
    except Exception as error:
        raise ConfigError(f"{file}: cannot be read: {error}; {_INSTEAD}") from error
    # A tokenizer may be saved with a length to cut or fill to; an engine does neither.
    loaded.no_truncation()
    loaded.no_padding()
    return list(loaded.encode(text).ids)


def question_about(
    tokens: list[int], space: NamespaceNote, salt: str, *, request_id: int
) -> ExplainPrompt:
    """Return the question why a prompt would not hit.

    Args:
        tokens: all of the prompt.
        space: where it would be looked up.
        salt: the request's `cache_salt`; "" for none.
        request_id: the message's id.
    """
    from kvcellar.keys.chain import ChunkChain

    seed = request_seed(NamespaceId(space.namespace), adapter=None, cache_salt=salt or None)
    chain = ChunkChain(seed, chunk_tokens=space.chunk_tokens)
    count = min(chain.extend(tokens, token_count=len(tokens)), KEYS_MAX)
    return ExplainPrompt(
        request_id,
        space.namespace,
        len(tokens),
        chain.joined(0, count),
        salt=short_digest("salt", salt.encode("utf-8", "surrogatepass")),
        unit_tokens=chain.unit_tokens,
        sketch=chain.sketch(size_max_bytes=SKETCH_MAX_BYTES),
    )


def _tokenizer_file(name: str) -> Path:
    path = Path(name).expanduser()
    if path.exists():
        file, place = (path if path.is_file() else path / "tokenizer.json"), "that folder"
    else:
        file, place = _in_cache(name), "this user's cache"
    if not file.is_file():
        raise ConfigError(
            f"--tokenizer {name}: {place} has no tokenizer.json of it, and nothing is downloaded: "
            f"name a folder that has one, or {_INSTEAD}"
        )
    return file


def _in_cache(name: str) -> Path:
    """Return the file in the Hugging Face cache; one that is not there where it has none."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return Path()
    try:
        found = try_to_load_from_cache(name, "tokenizer.json")
    except HFValidationError:
        return Path()
    return Path(found) if isinstance(found, str) else Path()


def _read(flag: str, path: str) -> str:
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(_FILE_MAX_BYTES + 1)
        if len(content) > _FILE_MAX_BYTES:
            raise ConfigError(f"{flag} {path}: is larger than {_FILE_MAX_BYTES} bytes")
        return content.decode()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path}: is not UTF-8: {error}") from error
