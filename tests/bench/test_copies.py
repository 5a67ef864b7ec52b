"""From the rounds of the copy script to its table."""

from kvcellar.bench.copies import CopyCase, copies_table


def test_a_share_is_taken_within_a_round_and_of_the_faster_ceiling():
    """In the second round the machine was twice as slow for every way: the share stays."""
    case = CopyCase(
        pages="32 KiB",
        chunk_bytes=5_898_240,
        threads=1,
        gb_per_s={
            "store": {
                "memcpy_out": [10.0, 5.0, 10.0],
                "one_pass_out": [8.0, 4.0, 8.0],
                "two_passes_out": [6.0, 3.0, 6.0],
                "store": [6.0, 3.0, 6.0],
            },
            "load": {
                "memcpy_in": [10.0, 10.0, 10.0],
                "one_pass_in": [4.0, 4.0, 4.0],
                "two_passes_in": [5.0, 5.0, 5.0],
                "load": [4.5, 4.5, 4.5],
            },
        },
    )
    table = copies_table([case], ["first note"])
    assert table.rows == (("32 KiB", 5.89824, 1, 10.0, 8.0, 6.0, 75.0, 10.0, 5.0, 4.5, 90.0),)
    assert table.notes[0] == "first note"
