"""The metrics about tiers, declared once; part of the families in `metrics`.

A tier's counters are those of the tier process and begin again when that is started again, which
Prometheus takes for the reset that it is.
"""

from kvcellar.telemetry.families import Family, counter, gauge, histogram

__all__ = ["TIER_FAMILIES"]

TIER_FAMILIES: tuple[Family, ...] = (
    gauge("tier_up", "1 while the tier can be used.", "tier"),
    counter("tier_lookups", "Times that a tier was asked what it has.", "tier"),
    counter("tier_asked_chunks", "Chunks that it was asked for.", "tier"),
    counter("tier_found_chunks", "Chunks that it had.", "tier"),
    counter("tier_read_chunks", "Chunks that were read from it.", "tier"),
    counter("tier_read_bytes", "Bytes that were read from it.", "tier"),
    counter("tier_read_seconds", "Time of all reads, added up.", "tier"),
    counter("tier_written_chunks", "Chunks that were written to it.", "tier"),
    counter("tier_written_bytes", "Bytes that were written to it.", "tier"),
    counter("tier_write_seconds", "Time of all writes, added up.", "tier"),
    counter("tier_full_chunks", "Chunks for which it had no room.", "tier"),
    counter("tier_evicted_chunks", "Chunks that left it to make room.", "tier"),
    counter("tier_damaged_chunks", "Records that did not pass and were removed.", "tier"),
    counter("tier_failures", "Calls that failed.", "tier"),
    gauge("tier_used_bytes", "Bytes that it occupies.", "tier"),
    gauge("tier_cap_bytes", "The most that it may occupy; 0: what the medium has.", "tier"),
    gauge("tier_chunks", "Chunks in it.", "tier"),
    counter("tier_fetches", "Lookups whose rest was looked for in the tiers."),
    counter("tier_fetches_late", "Fetches that took longer than an engine waited."),
    counter("tier_fetched_chunks", "Chunks that came from tiers into memory."),
    gauge("tier_fetches_in_flight", "Fetches that read now."),
    counter("tier_unwritten_chunks", "Stored chunks that no tier took."),
    gauge("tier_queued_bytes", "Bytes that wait to be written to tiers."),
    counter("tier_told_chunks", "Chunks that memory answered for and tiers were told of."),
    counter("tier_untold_lookups", "Lookups that memory answered and tiers were not told of."),
    counter("tier_restarts", "Times that the tier process had to be started again."),
    histogram("tier_fetch", "Time of fetches that read something."),
)
