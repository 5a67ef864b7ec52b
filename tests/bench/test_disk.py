"""From the rounds of the disk's script to its table."""

from kvcellar.bench.disk import DiskCase, disk_table

CASE = DiskCase(
    chunk="one of 1 MiB",
    chunk_bytes=1_048_576,
    chunks=256,
    gb_per_s={
        "preallocated_write": [3.0, 2.0, 1.0],
        "raw_write": [2.0, 1.0, 2.0],
        "tier_write": [1.8, 0.9, 1.0],
        "raw_read": [4.0, 4.0, 4.0],
        "tier_read": [3.0, 3.6, 4.0],
    },
)


def test_a_share_is_taken_within_a_round():
    table = disk_table([CASE], [{"write": 1.5, "read": 2.5}], "LMCache", ["first note"])
    assert table.rows == (
        ("one of 1 MiB", 1.048576, 2.0, 2.0, 1.0, 90.0, 1.5, 4.0, 3.6, 90.0, 2.5),
    )
    assert table.notes[0] == "first note"


def test_a_peer_that_cannot_be_measured_leaves_its_cells_empty():
    (row,) = disk_table([CASE], ["no network"], "LMCache", []).rows
    assert (row[6], row[10]) == (None, None)
