import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcellar.errors import ConfigError
from kvcellar.tiers.adapters import FileSystemOptions, read_adapter


def test_reading_adapters_needs_nothing_heavy():
    """The control process does it, and must not share its time with what moves bytes."""
    code = (
        "import sys, kvcellar.tiers.adapters, kvcellar.tiers.base\n"
        "print(sorted({'numpy', 'numba', 'torch'} & set(sys.modules)))"
    )
    words = [sys.executable, "-c", code]
    answer = subprocess.run(words, capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


def read(**words):
    return read_adapter(json.dumps({"type": "fs", "base_path": "/data/kv", **words}))


def test_a_folder_is_enough():
    adapter = read()
    assert adapter.options == FileSystemOptions(name="fs-0", base_path=Path("/data/kv"))
    assert (adapter.kind, adapter.notes) == ("fs", ())


def test_every_key_of_lmcache_is_taken():
    adapter = read_adapter(
        json.dumps(
            {
                "type": "fs_native",
                "base_path": "~/kv",
                "relative_tmp_dir": "unfinished/here",
                "use_odirect": False,
                "num_workers": 8,
                "max_capacity_gb": 1.5,
                "shared": True,
                "persist_enabled": False,
                "serde": None,
                "eviction": {"eviction_policy": "noop"},
            }
        ),
        position=3,
    )
    assert adapter.options == FileSystemOptions(
        name="fs_native-3",
        base_path=Path.home() / "kv",
        temporary_dir="unfinished/here",
        cap_bytes=3 << 29,
        workers=8,
        direct=False,
        is_shared=True,
        keeps_chunks=False,
        may_evict=False,
    )
    assert adapter.notes == ()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"read_ahead_size": 4096}, "read whole"),
        ({"affinity_tag": "_default"}, "one L1"),
        ({"eviction": {"eviction_policy": "LRU", "trigger_watermark": 0.8}}, "no watermark"),
    ],
)
def test_a_key_without_a_meaning_is_explained_in_one_line(words, reason):
    (note,) = read(**words).notes
    (key,) = words
    assert f"--l2-adapter fs: {key} " in note
    assert reason in note


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ({"base_pth": "/x"}, ["base_pth", "did you mean base_path?"]),
        ({"zzz": 1}, ["'zzz'", "max_capacity_gb"]),
        ({"base_path": 7}, ["base_path 7", "write a folder"]),
        ({"base_path": ""}, ['base_path ""', "write a folder"]),
        ({"relative_tmp_dir": "/tmp"}, ["relative_tmp_dir", "below base_path"]),
        ({"relative_tmp_dir": "../tmp"}, ["relative_tmp_dir", "below base_path"]),
        ({"max_capacity_gb": -1}, ["max_capacity_gb -1", "GB"]),
        ({"max_capacity_gb": "10"}, ['max_capacity_gb "10"', "GB"]),
        ({"max_capacity_gb": True}, ["max_capacity_gb true", "GB"]),
        ({"max_capacity_gb": 1e-9}, ["max_capacity_gb", "4 KiB"]),
        ({"num_workers": 0}, ["num_workers 0", "from 1 to 64"]),
        ({"use_odirect": "yes"}, ['use_odirect "yes"', "true or false"]),
        ({"shared": 1}, ["shared 1", "true or false"]),
        ({"serde": {"type": "fp8"}}, ["serde", "come later", "--l1-codec int8"]),
        ({"eviction": {"policy": "LRU"}}, ["'policy'", "eviction_policy"]),
        ({"eviction": {"eviction_policy": "ARC"}}, ["ARC", "IsolatedLRU and noop"]),
        ({"eviction": {"eviction_ratio": 2}}, ["eviction_ratio 2", "from 0 to 1"]),
        ({"eviction": "LRU"}, ["eviction", "an object"]),
        ({"type": "s3"}, ["type s3", "comes later"]),
        ({"type": "resp"}, ["type resp", "comes later"]),
        ({"type": "plugin"}, ["type plugin", "docs/tiers.md"]),
        ({"type": "disk"}, ["did you mean fs", "base_path"]),
        ({"type": "fs_nativ"}, ["fs_nativ", "did you mean fs_native?"]),
        ({"type": 5}, ["no type 5", "write fs"]),
    ],
)
def test_a_mistake_is_refused_with_the_key_the_value_and_the_fix(words, parts):
    with pytest.raises(ConfigError) as caught:
        read(**words)
    for part in ["--l2-adapter", *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["", "fs", "[]", "{", '{"type":"fs"', "[" * 5000])
def test_what_is_no_object_is_refused(text):
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_adapter(text)


def test_a_type_and_a_folder_are_needed():
    with pytest.raises(ConfigError, match="type is missing"):
        read_adapter("{}")
    with pytest.raises(ConfigError, match="base_path is missing"):
        read_adapter('{"type":"fs"}')
