"""Loads that the workers run: from vLLM's word that blocks are there to the last rank's report.

A load's leases are held until every rank has reported it, whatever became of its request. Used by
the scheduler half on the engine's thread.
"""

from dataclasses import dataclass

from kvcellar.engines.vllm.exchange import Exchange
from kvcellar.engines.vllm.lookups import Answer
from kvcellar.engines.vllm.metadata import JobResult, LoadJob
from kvcellar.engines.vllm.requests import RequestState
from kvcellar.keys.digest import KEY_BYTES
from kvcellar.protocol.messages import REF_BYTES

__all__ = ["Loads"]


@dataclass(eq=False)
class _Load:
    state: RequestState
    answer: Answer
    token_count: int


class Loads:
    """The loads that are being planned or run."""

    def __init__(self, exchange: Exchange, *, block_tokens: int) -> None:
        self._exchange = exchange
        self._block_tokens = block_tokens
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
        block_ids: list[int],
        chunk_stop: int,
        token_count: int,
    ) -> None:
        """Plan the load that vLLM has made room for; it leaves with the step's metadata.

        Args:
            job_id: a new one.
            state: the request.
            answer: the lookup's, whose leases pass over to the load.
            block_ids: the request's whole block table.
            chunk_stop: the first of the answer's chunks that is not loaded.
            token_count: tokens to load; they end where that chunk begins.
        """
        bound, block_tokens, chain = answer.bound, self._block_tokens, state.chain
        stop = chunk_stop * bound.chunk_tokens
        start = stop - token_count
        assert chunk_stop <= answer.count, (chunk_stop, answer.count)
        assert start >= 0, (start, stop)
        assert start % block_tokens == 0, (start, block_tokens)
        assert len(block_ids) * block_tokens >= stop, (len(block_ids), stop)
        assert chain is not None
        first = start // bound.chunk_tokens
        filled = block_ids[start // block_tokens : stop // block_tokens]
        for index, (part, found) in enumerate(zip(bound.parts, answer.found, strict=True)):
            session, chunk_refs = part.line.session, part.shard_count * REF_BYTES
            job = LoadJob(
                job_id=job_id,
                request_id=state.request_id,
                boot_id=session.boot_id,
                keys=chain.joined(first, chunk_stop, part=index),
                refs=found.refs[first * chunk_refs : chunk_stop * chunk_refs],
                shard_count=part.shard_count,
                block_ids=filled,
                skip_blocks=start // block_tokens - first * bound.blocks_per_chunk,
                fidelity=session.welcome.fidelity,
                part=index,
            )
            assert len(job.refs) == len(job.keys) // KEY_BYTES * chunk_refs
            self._planned.append(job)
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
