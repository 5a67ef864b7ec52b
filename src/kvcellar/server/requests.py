"""Requests in, replies out: what each message of a client means to the store.

A table from message to method, and another that says which roles may send it. A failure that has
a name is answered as an `ErrorReply` and ends nothing; the caller closes the connection when the
message itself was malformed. An exception without a name is a bug: it is answered, logged with
its traceback, and the server reports itself as unhealthy, because its books may be wrong.
"""

from collections.abc import Callable
from typing import Any

from kvcellar.errors import (
    KVCellarError,
    MalformedError,
    MismatchError,
    NotRegisteredError,
)
from kvcellar.keys.digest import KEY_BYTES, NamespaceId
from kvcellar.protocol.messages import (
    Abort,
    Bind,
    Cancel,
    Clear,
    Cleared,
    Commit,
    CommitOutcome,
    CommitReply,
    Damaged,
    ErrorReply,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Loaded,
    Lookup,
    LookupReply,
    Ok,
    Ping,
    Pong,
    Release,
    Reply,
    Request,
    Reserve,
    ReserveReply,
    Role,
    Status,
    StatusReply,
)
from kvcellar.server.deletions import Deletions
from kvcellar.server.facts import status_with_metrics
from kvcellar.server.gates import gate_table
from kvcellar.server.inquiries import Inquiries
from kvcellar.server.instances import Client, Instance
from kvcellar.server.node import Node
from kvcellar.server.prefetches import Prefetches
from kvcellar.server.prompt_inquiries import PromptInquiries
from kvcellar.server.quotas import QuotaBook
from kvcellar.server.recent import NamespaceFacts
from kvcellar.server.tier_requests import TierRequests
from kvcellar.telemetry.logs import EventLog
from kvcellar.tenancy.names import tenant_of

__all__ = ["Requests"]

_ANYONE = frozenset({Role.SCHEDULER, Role.WORKER, Role.TOOL})
_ENGINES = frozenset({Role.SCHEDULER, Role.WORKER})
_SCHEDULERS = frozenset({Role.SCHEDULER})
_WORKERS = frozenset({Role.WORKER})

_log = EventLog("kvcellar.server")


class Requests:
    """Answers the requests of clients that have said hello."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._store = node.store
        self._meters = node.meters
        self._clock = node.clock
        self._tier_requests = TierRequests(node)
        # Any: each method takes its own message; the table pairs them.
        self._table: dict[type, tuple[frozenset[str], Callable[[Client, Any], Reply | None]]] = {
            Lookup: (_SCHEDULERS, self._lookup),
            Release: (_SCHEDULERS, self._release),
            Reserve: (_SCHEDULERS, self._reserve),
            Commit: (_WORKERS, self._commit),
            Abort: (_WORKERS, self._abort),
            Cancel: (_SCHEDULERS, self._cancel),
            Heartbeat: (_ANYONE, self._heartbeat),
            Loaded: (_WORKERS, self._loaded),
            Damaged: (_ENGINES, self._damaged),
            Bind: (_SCHEDULERS, self._bind),
            Clear: (frozenset({Role.SCHEDULER, Role.TOOL}), self._clear),
            Ping: (_ANYONE, self._ping),
            Status: (_ANYONE, self._status),
            Goodbye: (_ANYONE, self._goodbye),
            **gate_table(),
            **Inquiries(node).table(),
            **PromptInquiries(node).table(),
            **Deletions(node).table(),
            **QuotaBook(node).table(),
            **Prefetches(node).table(),
            **self._tier_requests.table(),
        }

    def answer(self, client: Client, request: Request) -> Reply | None:
        """Return the one reply to a request; a failure that has a name becomes an `ErrorReply`.

        None means that the client's connection is given the reply later.

        Raises:
            MalformedError: the request is not one; the caller answers it and closes.
        """
        try:
            return self._method(client, request)(client, request)
        except MalformedError:
            raise
        except KVCellarError as error:
            self._meters.error_replies[error.code] += 1
            if isinstance(request, Bind):
                # Nothing is cached for that engine; its own log says so, and so must ours.
                _log.warning("namespace refused", pid=client.hello.pid, reason=str(error))
                if client.instance is not None:
                    client.instance.refusal = str(error)
            return ErrorReply(request.id, error.code, str(error))
        except Exception as error:  # noqa: BLE001 - a request ends here, the server goes on.
            return self._bug(request, error)

    # Any: see the table.
    def _method(self, client: Client, request: Request) -> Callable[[Client, Any], Reply | None]:
        entry = self._table.get(type(request))
        if entry is None:
            raise MalformedError(f"{_name(request)} has no place after the hello")
        roles, method = entry
        if client.hello.role not in roles:
            raise MismatchError(
                f"a {client.hello.role} may not send {_name(request)}, only "
                f"{' and '.join(sorted(roles))}"
            )
        return method

    def count_refusal(self, error: KVCellarError) -> None:
        """Count an error reply that was made elsewhere, because there was no request."""
        self._meters.error_replies[error.code] += 1

    def _bug(self, request: Request, error: Exception) -> ErrorReply:
        self._meters.error_replies[KVCellarError.code] += 1
        self._node.failures["store"] = (
            f"an internal error in {_name(request)}: {error!r}; restart the server"
        )
        _log.error("internal error", exception=error, request=_name(request))
        return ErrorReply(request.id, KVCellarError.code, f"internal error: {error!r}")

    def _lookup(self, client: Client, request: Lookup) -> Reply:
        start_s = self._clock.monotonic_s()
        instance = _bound(client)
        namespace = instance.namespace
        assert namespace is not None
        hit = self._store.lookup(client.owner, namespace, request.keys, request=request.id)
        fetch, tiers = 0, self._node.tiers
        if tiers is not None:
            asked = len(request.keys) // len(instance.spans)
            if hit.count * KEY_BYTES < asked and request.fetch:
                fetch = tiers.begin_fetch(client, instance, request, hit.count)
            if hit.count and not fetch:
                # A fetch tells the tiers by itself.
                for at in range(0, len(request.keys), asked):
                    tiers.touches.note(request.keys[at : at + asked], hit.count)
        self._meters.lookup_s.observe(self._clock.monotonic_s() - start_s)
        return LookupReply(request.id, hit.count, hit.lease, hit.refs, fetch)

    def _release(self, client: Client, request: Release) -> Reply:
        self._store.release(client.owner, request.leases)
        return Ok(request.id)

    def _reserve(self, client: Client, request: Reserve) -> Reply:
        start_s = self._clock.monotonic_s()
        instance = _bound(client)
        assert instance.namespace is not None
        reserved = self._store.reserve(
            client.owner,
            instance.namespace,
            request.keys,
            parent=request.parent,
            writers=instance.writers(request.turn),
            now_s=start_s,
            request=request.id,
            tenant=tenant_of(request.tenant),
            groups=request.groups,
        )
        self._meters.reserve_s.observe(self._clock.monotonic_s() - start_s)
        return ReserveReply(request.id, reserved.reservation, reserved.states, reserved.offsets)

    def _commit(self, client: Client, request: Commit) -> Reply:
        start_s = self._clock.monotonic_s()
        _check_seconds("copy_s", request.copy_s)
        tiers = self._node.tiers
        held = self._store.reservations.get(request.reservation) if tiers else None
        outcome = self._store.commit(
            client.owner, request.reservation, request.shard, request.seals
        )
        if tiers and held is not None and outcome == CommitOutcome.VISIBLE:
            tiers.committed(held)
        self._meters.store_s.observe(request.copy_s)
        self._meters.commit_s.observe(self._clock.monotonic_s() - start_s)
        return CommitReply(request.id, outcome)

    def _abort(self, client: Client, request: Abort) -> Reply:
        outcome = self._store.abort(client.owner, request.reservation, request.shard)
        return CommitReply(request.id, outcome)

    def _cancel(self, client: Client, request: Cancel) -> Reply:
        self._store.cancel(client.owner, request.reservation)
        return Ok(request.id)

    def _heartbeat(self, client: Client, request: Heartbeat) -> Reply:
        self._store.keep(
            client.owner,
            leases=request.leases,
            reservations=request.reservations,
            seen=request.seen,
        )
        instance = client.instance
        if instance is not None and request.counts:
            self._meters.count_engine(instance.counts, request.counts)
            instance.counts = request.counts
        return HeartbeatReply(
            request.id,
            boot_id=self._node.boot_id,
            epoch=self._store.epoch,
            steps_ready=self._node.steps_ready,
            layouts=instance.layouts() if instance is not None else (),
        )

    def _loaded(self, client: Client, request: Loaded) -> Reply:
        _check_seconds("copy_s", request.copy_s)
        if request.chunks < 0 or request.size_bytes < 0:
            raise MalformedError("chunks and size_bytes must not be below 0")
        meters = self._meters
        if request.ok:
            meters.loads_ok += 1
            meters.loaded_chunks += request.chunks
            meters.loaded_bytes += request.size_bytes
            meters.load_s.observe(request.copy_s)
        else:
            meters.loads_failed += 1
        return Ok(request.id)

    def _damaged(self, client: Client, request: Damaged) -> Reply:
        if len(request.key) != KEY_BYTES:
            raise MalformedError(f"key has {len(request.key)} bytes instead of {KEY_BYTES}")
        if self._store.remove_damaged(request.key, request.shard, request.offset):
            if self._node.tiers:
                self._node.tiers.remove(request.key)
            _log.warning(
                "damaged chunk removed",
                chunk=request.key.hex()[:16],
                shard=request.shard,
                offset=request.offset,
                reported_by=client.hello.pid,
            )
        return Ok(request.id)

    def _bind(self, client: Client, request: Bind) -> Reply:
        instance = _seated(client)
        holders = _holders(request, instance)
        namespace = NamespaceId(request.namespace)
        self._store.bind(namespace, request.shard_bytes, request.spans)
        if instance.namespace != namespace:
            _log.info(
                "namespace bound",
                instance=instance.name,
                namespace=request.namespace.hex()[:16],
                chunk_tokens=request.chunk_tokens,
                chunk_bytes=sum(request.shard_bytes),
            )
        facts = NamespaceFacts(
            instance.name, client.hello.model, instance.world_size, request.chunk_tokens,
            request.shard_bytes, request.spans, request.fields,
        )  # fmt: skip
        self._node.recent.note_namespace(namespace, facts)
        instance.namespace, instance.refusal = namespace, ""
        instance.holders = holders
        instance.shard_bytes, instance.spans = request.shard_bytes, request.spans
        instance.chunk_tokens = request.chunk_tokens
        return Ok(request.id)

    def _clear(self, client: Client, request: Clear) -> Reply | None:
        if len(request.namespace) not in {0, KEY_BYTES}:
            raise MalformedError(f"namespace has {len(request.namespace)} bytes, not 0 or 32")
        namespace = NamespaceId(request.namespace) if request.namespace else None
        chunks, size_bytes = self._store.clear(namespace)
        _log.info(
            "cleared", chunks=chunks, size_bytes=size_bytes, by=client.hello.role,
            pid=client.hello.pid,
        )  # fmt: skip
        cleared = Cleared(request.id, chunks, size_bytes)
        return self._tier_requests.clear(client, request, cleared)

    def _ping(self, client: Client, request: Ping) -> Reply:
        client.heard_s = self._node.awake.monotonic_s()
        return Pong(request.id, self._node.boot_id)

    def _status(self, _client: Client, request: Status) -> Reply:
        return StatusReply(request.id, status_with_metrics(self._node))

    def _goodbye(self, client: Client, request: Goodbye) -> Reply:
        # The caller sees that the client is no longer known and closes after the reply.
        client.connection = None
        self._node.forget(client)
        return Ok(request.id)


def _name(request: Request) -> str:
    return str(type(request).__struct_config__.tag)


def _seated(client: Client) -> Instance:
    if client.instance is None:
        raise NotRegisteredError("this client has no seat in an instance: say hello again")
    return client.instance


def _bound(client: Client) -> Instance:
    instance = _seated(client)
    if instance.namespace is None:
        raise NotRegisteredError("no namespace is bound: send bind first")
    return instance


def _check_seconds(name: str, seconds: float) -> None:
    if not 0.0 <= seconds < float("inf"):
        raise MalformedError(f"{name} {seconds} is no number of seconds")


def _holders(request: Bind, instance: Instance) -> list[list[int]]:
    """Return the ranks that hold each shard."""
    if request.chunk_tokens < 1:
        raise MalformedError(f"chunk_tokens {request.chunk_tokens} is below 1")
    # A namespace with other than as many shards in each KV group is not bound at all.
    count = len(request.shard_bytes) // max(1, len(request.spans))
    held = request.held or tuple(range(count))
    if len(held) != instance.world_size:
        raise MismatchError(
            f"the bind names shards of {len(held)} ranks but the instance has "
            f"{instance.world_size} ranks"
        )
    if set(held) != {*range(count)}:
        raise MalformedError(f"ranks hold the shards {held}, not each of {count} at least once")
    holders: list[list[int]] = [[] for _ in range(count)]
    for rank, shard in enumerate(held):
        holders[shard].append(rank)
    return holders
