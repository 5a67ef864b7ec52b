"""Which LoRA adapter a request runs with, named by the bytes of its files.

An adapter's name, path and number say nothing about its weights: the same path is trained again,
the same number is given to another adapter by the next engine. The files are looked at for each
request (their sizes and change times, not their bytes), and an adapter whose files change while
the engine runs is not cached any more: which of the two the engine computes with is its secret.
"""

from typing import Any

from kvcellar.engines.vllm.weights import FileStamp, files_digest, files_stamp, local_folder
from kvcellar.keys.digest import engine_digest
from kvcellar.telemetry.logs import EventLog

__all__ = ["Adapters"]

log = EventLog("vllm.kvcellar.adapters")


class Adapters:
    """The adapters that this engine has seen; used by the engine's thread alone."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, int], tuple[tuple[FileStamp, ...], bytes | None]] = {}

    def identity(self, lora_request: Any) -> bytes | None:
        """Return what names the adapter; None when it cannot be named, so must not be cached.

        Args:
            lora_request: vLLM's LoRARequest.

        Blocks for the samples of its files at the first call; a few `stat` calls later on.
        """
        place = (lora_request.lora_name, lora_request.lora_path, lora_request.lora_int_id)
        try:
            folder = local_folder(place[1], revision=None, cache_dir=None)
            if folder is None:
                # The workers may be downloading it right now: the next request may see it.
                return None
            stamp = files_stamp(folder)
            if place not in self._known:
                self._known[place] = (stamp, self._digest(place, folder, stamp))
        except OSError as error:
            log.warning("adapter cannot be read", name=place[0], path=place[1], reason=str(error))
            return None
        known_stamp, identity = self._known[place]
        if identity is not None and known_stamp != stamp:
            log.warning(
                "adapter changed on disk; its requests are not cached any more",
                name=place[0],
                path=place[1],
            )
            self._known[place] = (known_stamp, None)
            return None
        return identity

    def _digest(self, place: Any, folder: Any, stamp: tuple[FileStamp, ...]) -> bytes:
        paths = [folder / name for name, _, _ in stamp] if folder.is_dir() else [folder]
        fields = {"name": place[0], "path": place[1], "files": files_digest(paths)}
        return bytes(engine_digest(fields))
