"""What a tenant is called: the request's `cache_salt`, bounded, and how it is shown to people.

A salt separates what tenants can find, so it may be a secret: nothing prints it but the quota
commands, whose users set it. Pages and metrics show a digest. Used by the engine's side, which
names the tenant of what it stores, and by everything that counts for tenants.
"""

from blake3 import blake3

__all__ = ["DEFAULT_NAME", "TENANT_MAX_BYTES", "label_of", "shown_name", "tenant_of"]

DEFAULT_NAME = "_default"
"""How the tenant without a salt is written where a name is needed, as LMCache does."""
TENANT_MAX_BYTES = 256
_LABEL_DIGITS = 12


def tenant_of(salt: str | None) -> str:
    """Return the tenant that a `cache_salt` stands for.

    It is the salt itself, "" for none and for "_default"; for one of more than `TENANT_MAX_BYTES`
    bytes of UTF-8, or that is no UTF-8 at all, the hexadecimal BLAKE3 of its bytes. Only accounts
    go by it: what can be found goes by keys, which hold the whole salt.
    """
    if not salt or salt == DEFAULT_NAME:
        return ""
    try:
        data = salt.encode()
    except UnicodeEncodeError:
        return blake3(salt.encode("utf-8", "surrogatepass")).hexdigest()
    return salt if len(data) <= TENANT_MAX_BYTES else blake3(data).hexdigest()


def shown_name(tenant: str) -> str:
    """Return the tenant's name for those who set quotas: the salt, or "_default"."""
    return tenant or DEFAULT_NAME


def label_of(tenant: str) -> str:
    """Return the tenant's name for pages that anybody may read: 12 digits of its BLAKE3."""
    return blake3(tenant.encode()).hexdigest()[:_LABEL_DIGITS] if tenant else DEFAULT_NAME
