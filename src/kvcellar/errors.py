"""Every failure that kvcellar names, as one small tree.

A failure says by its class what the caller may do: `RetryableError` may pass if asked again,
`FatalError` will not. Every class has a stable code, so that a failure crosses the wire as
`(code, message)` and is raised again on the other side as the same class. Expected outcomes
(a miss, a full arena, a chunk that another is storing) are return values and not in here.
"""

__all__ = [
    "ArenaMapError",
    "ConfigError",
    "FatalError",
    "KVCellarError",
    "LimitError",
    "MalformedError",
    "MismatchError",
    "NotLocalError",
    "NotRegisteredError",
    "PeerClosedError",
    "RetryableError",
    "TierBusyError",
    "TierOwnedError",
    "TierUnavailableError",
    "TimeoutExpiredError",
    "UnsupportedModelError",
    "error_from_wire",
]


class KVCellarError(Exception):
    """The root: something that kvcellar was asked to do did not happen."""

    code = "error"


class RetryableError(KVCellarError):
    """Asking again later may succeed; until then the caller goes on without the cache."""

    code = "retryable"


class FatalError(KVCellarError):
    """Asking again with the same input cannot succeed."""

    code = "fatal"


class ConfigError(FatalError, ValueError):
    """A flag, key, file or environment value is wrong; the message names it and the fix."""

    code = "config"


class MismatchError(FatalError):
    """Two sides do not fit together (versions, chunk sizes, layouts); both values are named."""

    code = "mismatch"


class MalformedError(FatalError):
    """Bytes from a peer are not a message of the protocol; the peer's connection is closed."""

    code = "malformed"


class LimitError(FatalError):
    """A message asks for more than a documented bound allows; the bound is named."""

    code = "limit"


class NotLocalError(FatalError):
    """The server is reachable by TCP alone; the message names the folder to share with it."""

    code = "not_local"


class UnsupportedModelError(FatalError):
    """The model's KV cannot be kept safely; the message names the group or setting."""

    code = "unsupported_model"


class NotRegisteredError(RetryableError):
    """The server does not know this client, instance or namespace: say hello again."""

    code = "not_registered"


class TimeoutExpiredError(RetryableError):
    """No answer came before the deadline; a late answer is dropped, not misread."""

    code = "timeout"


class PeerClosedError(RetryableError):
    """The other side closed the connection, died, or was never there."""

    code = "peer_closed"


class TierUnavailableError(RetryableError):
    """A tier cannot be asked now (its medium fails, it is fenced off or closed): count a miss."""

    code = "tier_unavailable"


class TierBusyError(TierUnavailableError):
    """A tier has as many calls waiting as it may have; it works, and this call was not begun."""

    code = "tier_busy"


class TierOwnedError(RetryableError):
    """Another process has the tier's folder; its pid is named."""

    code = "tier_owned"


class ArenaMapError(FatalError):
    """The arena's descriptor is not what the server promised (size, seals) or cannot be mapped."""

    code = "arena_map"


def error_from_wire(code: str, message: str) -> KVCellarError:
    """Return the exception for a failure that crossed the wire.

    Args:
        code: the `code` of a class above; an unknown one (a newer peer's) becomes `FatalError`.
        message: the text that the other side wrote.
    """
    classes: list[type[KVCellarError]] = [KVCellarError]
    while classes:
        candidate = classes.pop()
        if candidate.code == code:
            return candidate(message)
        classes.extend(candidate.__subclasses__())
    return FatalError(f"{code}: {message}")
