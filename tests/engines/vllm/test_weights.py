"""Weights are named by their bytes, wherever they lie and whatever the files are called."""

import pytest

from kvcellar.engines.vllm.weights import (
    SAMPLE_BYTES,
    SAMPLES,
    files_digest,
    files_stamp,
    local_folder,
    weight_files,
)

pytestmark = pytest.mark.engine

LARGE = 3 * SAMPLES * SAMPLE_BYTES + 1234


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a file and returns its path."""

    def write(name, data):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    return write


@pytest.fixture(scope="module")
def large():
    return bytes(range(256)) * (LARGE // 256) + bytes(LARGE % 256)


def test_equal_bytes_have_equal_digests_under_any_name(write, large):
    assert files_digest([write("a", large)]) == files_digest([write("b", large)])


@pytest.mark.parametrize("place", [0, 1, SAMPLE_BYTES - 1, LARGE - 1, LARGE - SAMPLE_BYTES])
def test_a_change_at_the_head_or_the_tail_is_seen(write, large, place):
    changed = bytearray(large)
    changed[place] ^= 1
    assert files_digest([write("a", large)]) != files_digest([write("b", changed)])


def test_a_fine_tune_of_any_tensor_is_seen(write, large):
    """Any stretch that is longer than the space between two samples."""
    stretch = 4 * SAMPLE_BYTES
    before = files_digest([write("a", large)])
    for start in range(0, LARGE - stretch, LARGE // 9):
        changed = bytearray(large)
        changed[start : start + stretch] = bytes(b ^ 1 for b in changed[start : start + stretch])
        assert files_digest([write("b", changed)]) != before, start


def test_every_byte_of_a_small_file_counts(write):
    data = bytes(5000)
    before = files_digest([write("a", data)])
    for place in range(0, 5000, 99):
        changed = bytearray(data)
        changed[place] = 1
        assert files_digest([write("b", changed)]) != before, place


def test_length_and_number_of_files_count(write):
    one, two = write("a", b"12"), write("b", b"34")
    digests = [
        files_digest([one, two]),
        files_digest([two, one]),
        files_digest([one]),
        files_digest([]),
        files_digest([write("c", b"1234")]),
        files_digest([write("d", b"12\x00")]),
        files_digest([write("e", b"")]),
    ]
    assert len(set(digests)) == len(digests)


def test_only_files_that_hold_weights_are_looked_at(write, tmp_path):
    for name in ("config.json", "model.safetensors.index.json", "tokenizer.json"):
        write(name, b"{}")
    write("original/consolidated.pth", b"the same again")
    second, first = write("model-2.safetensors", b"2"), write("model-1.safetensors", b"1")
    assert weight_files(tmp_path) == [first, second]
    assert weight_files(second) == [second]


def test_a_stamp_changes_with_size_and_time(write, tmp_path):
    path = write("adapter_model.safetensors", b"1")
    before = files_stamp(tmp_path)
    path.write_bytes(b"12")
    longer = files_stamp(tmp_path)
    import os

    os.utime(path, ns=(1, 1))
    assert len({before, longer, files_stamp(tmp_path)}) == 3


def test_a_name_of_the_hub_is_found_in_the_local_cache_alone(tmp_path):
    found = local_folder("somebody/some-model", revision=None, cache_dir=str(tmp_path))
    assert found is None
    snapshot = tmp_path / "models--somebody--some-model" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    found = local_folder("somebody/some-model", revision=None, cache_dir=str(tmp_path))
    assert found == snapshot


def test_a_name_that_is_no_repository_is_not_found():
    assert local_folder("s3://bucket/a b/c", revision=None, cache_dir=None) is None
