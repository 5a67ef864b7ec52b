"""Sizes and durations as people write them.

One place for the factor between GB and bytes (1024³, as LMCache counts) and for the words that
status pages and log lines show, so that no two of them disagree.
"""

__all__ = ["GIB", "MIB", "align_up", "bytes_from_gb", "format_bytes"]

MIB = 1 << 20
GIB = 1 << 30


def bytes_from_gb(size_gb: float) -> int:
    """Return the bytes in `size_gb` GB of 1024³ bytes, rounded down to a page of 4096."""
    return int(size_gb * GIB) // 4096 * 4096


def align_up(size_bytes: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` that is at least `size_bytes`."""
    return -(-size_bytes // alignment) * alignment


def format_bytes(size_bytes: float) -> str:
    """Return a size for people, three digits and a binary unit: '1.50 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.2f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.2f} TiB"
