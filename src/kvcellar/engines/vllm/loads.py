"""Loads that the workers run: from vLLM's word that blocks are there to the last rank's report.

A load's leases are held until every rank has reported it, whatever became of its request. Used by
the scheduler half on the engine's thread.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcellar.engines.pages import NOT_WRITTEN
from kvcellar.engines.vllm.binding import BoundPart
from kvcellar.engines.vllm.exchange import Exchange
from kvcellar.engines.vllm.groups import ChunkGroup
from kvcellar.engines.vllm.lookups import Answer
from kvcellar.engines.vllm.metadata import GroupLoad, JobResult, LoadJob
from kvcellar.engines.vllm.requests import RequestState
from kvcellar.protocol.messages import REF_BYTES
from kvcellar.telemetry.logs import EventLog

__all__ = ["Loads"]

log = EventLog("vllm.kvcellar.loads")

NULL_BLOCK = 0
"""Stands in vLLM's tables for a block that a group does not keep."""


@dataclass(eq=False)
class _Load:
    state: RequestState
    answer: Answer
    token_count: int


class Loads:
    """The loads that are being planned or run."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._running: dict[int, _Load] = {}
        self._planned: list[LoadJob] = []
        self.failed_count = 0

    def __len__(self) -> int:
        return len(self._running)

    def plan(
        self,
        job_id: int,
        state: RequestState,
        answer: Answer,
        *,
        tables: Sequence[list[int]],
        chunk_stop: int,
        token_count: int,
    ) -> None:
        """Plan the load that vLLM has made room for; it leaves with the step's metadata.

        Args:
            job_id: a new one.
            state: the request.
            answer: the lookup's, whose leases pass over to the load.
            tables: the request's whole block table in each of vLLM's KV groups.
            chunk_stop: the first of the answer's chunks that is not loaded.
            token_count: tokens to load; they end where that chunk begins.
        """
        bound = answer.bound
        start = chunk_stop * bound.chunk_tokens - token_count
        assert chunk_stop == answer.count or bound.is_divisible, (chunk_stop, answer.count)
        assert start >= 0, (start, chunk_stop)
        plan = _Plan(state, answer, start=start, chunk_stop=chunk_stop)
        for part in bound.parts:
            groups = tuple(plan.groups(part, tables))
            # With a block left over that nothing fills it must fail: vLLM would believe in it.
            is_covered = plan.covers(tables, groups)
            if not is_covered:
                log.warning("load does not cover its blocks", request_id=state.request_id)
            session = part.line.session
            self._planned.append(
                LoadJob(
                    job_id=job_id,
                    request_id=state.request_id,
                    boot_id=session.boot_id if is_covered else b"",
                    shard_count=part.shard_count,
                    groups=groups,
                    is_divisible=bound.is_divisible and len(bound.kinds) == 1,
                    fidelity=session.welcome.fidelity,
                    part=part.line.part.index,
                )
            )
        self._running[job_id] = _Load(state, answer, token_count)
        state.receipt.open_job()

    def take_planned(self) -> list[LoadJob]:
        """Return the loads of this step."""
        planned, self._planned = self._planned, []
        return planned

    def is_loading(self, state: RequestState) -> bool:
        """Return whether some rank may still write the request's blocks."""
        return any(load.state is state for load in self._running.values())

    def end(self, job_id: int, result: JobResult) -> bool:
        """Note that every rank has reported a job; False when it is none of these."""
        load = self._running.pop(job_id, None)
        if load is None:
            return False
        state = load.state
        load.answer.give_back(self._exchange)
        if result.ranks_failed:
            # vLLM looks the request up again at once: only memory keeps it from failing for ever.
            # What a server lost is offered again once it has been computed.
            self.failed_count += 1
            state.may_load = False
            state.next_chunk = 0
        state.receipt.loaded.add(result, token_count=load.token_count)
        state.receipt.close_job()
        return True


class _Plan:
    """Which chunks of each KV group fill which blocks."""

    def __init__(self, state: RequestState, answer: Answer, *, start: int, chunk_stop: int) -> None:
        self._state = state
        self._answer = answer
        self._bound = answer.bound
        self._start = start
        self._chunk_stop = chunk_stop

    def groups(self, part: BoundPart, tables: Sequence[list[int]]) -> Iterator[GroupLoad]:
        """Yield what a part's ranks read for each group that has a block to fill."""
        chain, width = self._state.chain, part.shard_count * REF_BYTES
        assert chain is not None
        index, refs_at = part.line.part.index, 0
        found = self._answer.found[index]
        for group in self._bound.groups:
            first = group.first_chunk(found.count)
            low, block_ids = self._targets(group, tables, max(first, self._first_chunk()))
            if block_ids:
                refs_from = refs_at + (low - first) * width
                refs_stop = refs_at + (self._chunk_stop - first) * width
                yield GroupLoad(
                    group=group.group.index,
                    keys=group.keys(chain.joined(low, self._chunk_stop, part=index)),
                    refs=found.refs[refs_from:refs_stop],
                    block_ids=block_ids,
                )
            refs_at += (found.count - first) * width

    def covers(self, tables: Sequence[list[int]], groups: Sequence[GroupLoad]) -> bool:
        """Return whether every block that vLLM will take for loaded is filled."""
        filled = {group.group: {*group.block_ids} for group in groups}
        stop = self._chunk_stop * self._bound.chunk_tokens
        return all(
            id_ == NULL_BLOCK or id_ in filled.get(index, ())
            for index, (table, group) in enumerate(zip(tables, self._bound.kinds, strict=True))
            for id_ in table[self._start // group.block_tokens : stop // group.block_tokens]
        )

    def _first_chunk(self) -> int:
        return self._start // self._bound.chunk_tokens

    def _targets(
        self, group: ChunkGroup, tables: Sequence[list[int]], first: int
    ) -> tuple[int, list[int]]:
        """Return the blocks to fill, and the chunk with which they begin; none before is wanted."""
        block_ids: list[int] = []
        for chunk in range(first, self._chunk_stop):
            ids = self._ids(group, tables, chunk)
            if block_ids or any(id_ != NOT_WRITTEN for id_ in ids):
                first = first if block_ids else chunk
                block_ids += ids
        return first, block_ids

    def _ids(self, group: ChunkGroup, tables: Sequence[list[int]], chunk: int) -> list[int]:
        first, block_tokens = group.first_block(chunk), group.group.block_tokens
        table = group.table_part(tables[group.group.index], chunk)
        assert len(table) == group.blocks, (len(table), group)
        return [
            NOT_WRITTEN
            if id_ == NULL_BLOCK or (first + index) * block_tokens < self._start
            else id_
            for index, id_ in enumerate(table)
        ]
