"""Builds the tier that an adapter asks for, wrapped as every tier is.

The tier process calls `open_tier` for each `--l2-adapter`; what may be written there is read by
`adapters`.
"""

from kvcellar.clock import Clock
from kvcellar.errors import ConfigError
from kvcellar.tiers.adapters import Adapter
from kvcellar.tiers.filesystem import FileSystemTier
from kvcellar.tiers.wrappers import CircuitBroken, Limited, Metered

__all__ = ["open_tier"]


def open_tier(adapter: Adapter, clock: Clock) -> Metered:
    """Return the opened tier, metered, fenced and limited.

    Raises:
        ConfigError: its folder cannot be used; the message names it and the reason.
        TierOwnedError: another process has the folder.
    """
    options = adapter.options
    try:
        tier = FileSystemTier(options, clock)
    except OSError as error:
        raise ConfigError(
            f"--l2-adapter {adapter.kind}: base_path {options.base_path} cannot be used: "
            f"{error.strerror or error}; choose a folder that this user may write"
        ) from error
    return Metered(CircuitBroken(Limited(tier, clock), clock), clock)
