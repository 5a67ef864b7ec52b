"""Digests of weight files that read a megabyte of each instead of the whole.

A path and a revision do not say what a folder holds: fine-tunes are saved over one another, and
they share their index files. What tells them apart is the bytes, and a change of weights changes
them nearly everywhere, so samples spread over each file are enough. Called by `identity` once for
the model, and once for each adapter and whenever its files change.
"""

from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

__all__ = ["files_digest", "files_stamp", "local_folder", "weight_files"]

SAMPLE_BYTES = 4096
SAMPLES = 256
WEIGHT_SUFFIXES = frozenset({".bin", ".ckpt", ".gguf", ".npz", ".pt", ".pth", ".safetensors"})

FileStamp = tuple[str, int, int]
"""A file's name, its size in bytes and when it was last changed, in nanoseconds."""


def local_folder(name: str, *, revision: str | None, cache_dir: str | None) -> Path | None:
    """Return the folder, or single file, on this host that holds a model or an adapter.

    Args:
        name: a path, or the name of a repository of the Hugging Face hub.
        revision: of the repository.
        cache_dir: where vLLM keeps what it downloads; None for the hub's default.

    Returns:
        None where it is neither a path nor in the local cache. Nothing is downloaded.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    try:
        return Path(
            snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True)
        )
    except (HFValidationError, LocalEntryNotFoundError, OSError, ValueError):
        return None


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold weights, in the order of their names; [] when there are none.

    Index files (`*.index.json`) name tensors but hold none. Subfolders are left out, as vLLM
    leaves them out ("original/" repeats a checkpoint in another format).
    """
    if folder.is_file():
        return [folder]
    return sorted(
        path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file()
    )


def files_stamp(folder: Path) -> tuple[FileStamp, ...]:
    """Return name, size and change time of each file in a folder: cheap, and changes with them."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
        if path.is_file():
            state = path.stat()
            found.append((path.name, state.st_size, state.st_mtime_ns))
    return tuple(found)


def files_digest(paths: Sequence[Path]) -> bytes:
    """Return 32 bytes over the sizes of files and samples of their bytes.

    Of each file `SAMPLES` pieces of `SAMPLE_BYTES` are read, evenly spread, with its head and its
    tail among them; a file that is not larger than that is read whole. File names do not count.
    Blocks for the reads: milliseconds while the pages are in memory, as they are after a start.

    Raises:
        OSError: a file cannot be read.
    """
    whole = blake3(b"kvcellar-files-1\x00")
    for path in paths:
        with path.open("rb") as file:
            size_bytes = file.seek(0, 2)
            whole.update(size_bytes.to_bytes(8, "little"))
            for offset in _sample_offsets(size_bytes):
                file.seek(offset)
                whole.update(file.read(SAMPLE_BYTES))
    return whole.digest()


def _sample_offsets(size_bytes: int) -> list[int]:
    if size_bytes <= SAMPLES * SAMPLE_BYTES:
        return list(range(0, size_bytes, SAMPLE_BYTES))
    last = size_bytes - SAMPLE_BYTES
    return [last * index // (SAMPLES - 1) for index in range(SAMPLES)]
