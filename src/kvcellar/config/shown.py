"""The configuration as it may be shown: every setting by its flag, without a secret.

The groups are LMCache's, so that scripts which read its `/config` find what they look for. What
may hold a secret (a tier's adapter does) is shown with the secret's place masked. Made by the
control process for the HTTP process, which has no other way to know it.
"""

import json
import re
from typing import Any

import msgspec

from kvcellar.config.server import ServerConfig, settings

__all__ = ["config_page", "without_secrets"]

_MASK = "***"
_SECRET = re.compile(r"(?i)password|passwd|secret|token|credential|access_key|api_key|auth")
_IN_URL = re.compile(r"(?<=//)[^/@\s]*(?=@)")
_GROUPS = {
    "http": ("http_host", "http_port", "admin_token_file"),
    "observability": ("log_level", "log_misses"),
    "storage_manager": (
        "l1_bytes", "l1_codec", "eviction_policy", "eviction_watermark", "eviction_ratio",
        "disk_path", "disk_bytes", "l2_adapters", "l2_store_policy", "l2_prefetch_policy",
        "l2_prefetches_max", "quota_file",
    ),
}  # fmt: skip


# Any: plain data that becomes JSON.
def config_page(config: ServerConfig) -> dict[str, dict[str, Any]]:
    """Return the settings in LMCache's groups, named by their flags; sizes are bytes."""
    group_of = {field: group for group, fields in _GROUPS.items() for field in fields}
    page: dict[str, dict[str, Any]] = {
        "mp": {}, "storage_manager": {}, "observability": {}, "http": {}, "coordinator": {},
    }  # fmt: skip
    for setting in settings():
        name = setting.flag.removeprefix("--").replace("-", "_").replace("_size_gb", "_size_bytes")
        value = msgspec.to_builtins(getattr(config, setting.field))
        page[group_of.get(setting.field, "mp")][name] = _shown(value)
    return page


def _shown(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return without_secrets(json.loads(value))
        except ValueError:
            return _MASK
    return without_secrets(value)


def without_secrets(value: object) -> object:
    """Return plain data with whatever is called a secret masked, and what stands in a URL's @."""
    if isinstance(value, dict):
        return {
            key: _MASK if _SECRET.search(str(key)) else without_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    return _IN_URL.sub(_MASK, value) if isinstance(value, str) else value
