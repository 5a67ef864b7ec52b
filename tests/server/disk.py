"""Servers with a folder behind their memory, and engines whose chunks have real bytes and seals."""

import contextlib
import hashlib
from pathlib import Path

from tests.server import running
from tests.server.running import SHARD_BYTES, RunningServer, eventually, key, keys

from kvcellar.memory.seal import seal
from kvcellar.protocol.messages import REF_BYTES, AwaitFetch, ChunkState, Lookup, Release, Reserve

WAIT_S = 20.0


def bytes_of(number, shard=0):
    """Return what a chunk's shard holds."""
    start = hashlib.sha256(f"{number} {shard}".encode()).digest()
    return (start * (SHARD_BYTES // len(start) + 1))[:SHARD_BYTES]


class DiskServer(RunningServer):
    """A server with a folder as its only tier."""

    def __init__(self, folder, *flags):
        super().__init__("--disk-path", str(folder), *flags)

    def engine(self, instance="engine", *, world_size=1):
        return DiskEngine(self, instance, world_size)

    def tier(self):
        """Return what the server says of its tier; one that is away is shown, too."""
        (adapter,) = self.status()["storage_manager"]["l2_adapters"]
        return adapter

    def http_pid(self):
        raise AssertionError("there are two children")

    def tier_pid(self):
        """Return the process id of the tier process."""
        for pid in self.children():
            with contextlib.suppress(OSError):
                if b"kvcellar.tiers.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return 0

    def children(self):
        pid = self.process.pid
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
        return [int(word) for word in text.split()]

    def wait_written(self, count):
        """Wait until the tier has so many chunks, and nothing is on its way there."""
        eventually(lambda: self.tier().get("stored_object_count") == count)
        eventually(lambda: self.status()["kvcellar"]["leases"] == 0)


class DiskEngine(running.Engine):
    """An instance that writes its chunks as a real one does, and checks what it finds."""

    def put(self, *numbers, parent=b""):
        """Store chunks with their bytes and seals."""
        reserved = self.call(lambda i: Reserve(i, keys(*numbers), parent))
        new = [
            number
            for number, state in zip(numbers, reserved.states, strict=True)
            if state == ChunkState.RESERVED
        ]
        ranks = len(self.workers)
        for shard, worker in enumerate(self.workers):
            seals = []
            for place, number in enumerate(new):
                at = (place * ranks + shard) * 8
                offset = int.from_bytes(reserved.offsets[at : at + 8], "little")
                view = worker.arena.view[offset : offset + SHARD_BYTES]
                view[:] = bytes_of(number, shard)
                seals.append(seal(view, key(number), shard))
            packed = b"".join(value.to_bytes(8, "little") for value in seals)
            outcome = self.commit(reserved.reservation, packed, shard=shard).outcome
        return outcome

    def look(self, *numbers, wait_s=WAIT_S, tenant=""):
        """Look up and wait for the fetch; return how many were there at once and in the end.

        What was found is compared with what it must be, and given back.
        """
        first = self.call(lambda i: Lookup(i, keys(*numbers), True, tenant))
        last = first
        if first.fetch:
            then = self.call(lambda i: AwaitFetch(i, first.fetch, wait_s))
            last = then if then.count > first.count else first
            self.give_back(*{first, then} - {last})
        self.check(numbers, last)
        self.give_back(last)
        return first.count, last.count

    def give_back(self, *replies):
        leases = tuple(reply.lease for reply in replies if reply.lease)
        self.call(lambda i: Release(i, leases))

    def check(self, numbers, reply):
        ranks = len(self.workers)
        for place, number in enumerate(numbers[: reply.count]):
            for shard, worker in enumerate(self.workers):
                at = (place * ranks + shard) * REF_BYTES
                offset = int.from_bytes(reply.refs[at : at + 8], "little")
                view = worker.arena.view[offset : offset + SHARD_BYTES]
                assert bytes(view) == bytes_of(number, shard), number
                assert int.from_bytes(reply.refs[at + 8 : at + 16], "little") == seal(
                    view, key(number), shard
                )
