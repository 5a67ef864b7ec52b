"""What there is and what is free, from real files laid out as machines and containers have them."""

import pytest

from kvcellar.errors import ConfigError
from kvcellar.memory.limits import (
    CgroupMount,
    Memory,
    MemoryReader,
    check_l1_size,
    group_folders,
    parse_groups,
    parse_meminfo,
    parse_mounts,
    parse_stat,
    read_memory,
    reserve_bytes,
)
from kvcellar.units import GIB, MIB

MEMINFO = "MemTotal:       65536000 kB\nMemFree:         100 kB\nMemAvailable:   32768000 kB\n"
MACHINE_BYTES = 65536000 * 1024
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
UNLIMITED_V1 = "9223372036854771712\n"


def machine(tmp_path, *, cgroup, mounts, files):
    """Write a /proc and a /sys below `tmp_path` and return a reader of them."""
    texts = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": "27 1 254:0 / / rw - ext4 /dev/vda rw\n" + mounts,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return MemoryReader(tmp_path)


def test_without_a_group_the_machine_counts(tmp_path):
    memory = machine(tmp_path, cgroup="", mounts="", files={}).read()
    assert memory == Memory(MACHINE_BYTES, 32768000 * 1024, "the machine", "the machine")


def test_a_v2_limit_above_this_group_counts(tmp_path):
    reader = machine(
        tmp_path,
        cgroup="0::/kubepods/pod1/main\n",
        mounts=V2_MOUNT,
        files={
            "kubepods/pod1/main/memory.max": "max\n",
            "kubepods/pod1/main/memory.high": "max\n",
            "kubepods/pod1/main/memory.current": f"{2 * GIB}\n",
            "kubepods/pod1/memory.max": f"{10 * GIB}\n",
            "kubepods/pod1/memory.current": f"{7 * GIB}\n",
            "kubepods/pod1/memory.stat": (
                f"anon {GIB}\nfile {4 * GIB}\nshmem {GIB}\n"
                f"inactive_file {2 * GIB}\nactive_file {GIB}\nslab_reclaimable {512 * MIB}\n"
            ),
            "kubepods/memory.max": f"{40 * GIB}\n",
            "kubepods/memory.current": f"{39 * GIB}\n",
        },
    )
    memory = reader.read()
    assert memory.total_bytes == 10 * GIB
    assert memory.total_from == "the control group /sys/fs/cgroup/kubepods/pod1"
    # The pod could have 10 - (7 - 3.5) GiB, but its parent has one GiB left.
    assert memory.available_bytes == GIB
    assert memory.available_from == "the control group /sys/fs/cgroup/kubepods"


def test_page_cache_of_a_group_is_available(tmp_path):
    reader = machine(
        tmp_path,
        cgroup="0::/\n",
        mounts=V2_MOUNT,
        files={
            "memory.max": f"{10 * GIB}\n",
            "memory.current": f"{9 * GIB}\n",
            "memory.stat": f"inactive_file {2 * GIB}\nactive_file {GIB}\nslab_reclaimable 0\n",
        },
    )
    assert reader.read().available_bytes == 4 * GIB


def test_memory_high_is_a_limit_too(tmp_path):
    files = {"memory.max": "max\n", "memory.high": f"{4 * GIB}\n", "memory.current": "0\n"}
    memory = machine(tmp_path, cgroup="0::/\n", mounts=V2_MOUNT, files=files).read()
    assert (memory.total_bytes, memory.available_bytes) == (4 * GIB, 4 * GIB)


def test_a_v1_limit_counts_with_its_children(tmp_path):
    reader = machine(
        tmp_path,
        cgroup="9:cpu,cpuacct:/other\n4:memory:/docker/abc\n0::/unified\n",
        mounts=(
            "34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
            "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
        ),
        files={
            "memory/docker/abc/memory.limit_in_bytes": f"{6 * GIB}\n",
            "memory/docker/abc/memory.usage_in_bytes": f"{5 * GIB}\n",
            "memory/docker/abc/memory.stat": (
                f"inactive_file 1\nactive_file 2\n"
                f"total_inactive_file {GIB}\ntotal_active_file {GIB}\n"
            ),
            "memory/docker/memory.limit_in_bytes": UNLIMITED_V1,
            "memory/docker/memory.usage_in_bytes": "1\n",
        },
    )
    memory = reader.read()
    assert (memory.total_bytes, memory.available_bytes) == (6 * GIB, 3 * GIB)
    assert memory.total_from == "the control group /sys/fs/cgroup/memory/docker/abc"


def test_a_container_finds_its_group_at_the_mount_point(tmp_path):
    """Without a namespace of its own, a container sees the machine's names but its own mount."""
    reader = machine(
        tmp_path,
        cgroup="4:memory:/docker/abc\n",
        mounts="35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        files={
            "memory/memory.limit_in_bytes": f"{3 * GIB}\n",
            "memory/memory.usage_in_bytes": f"{GIB}\n",
        },
    )
    memory = reader.read()
    assert (memory.total_bytes, memory.available_bytes) == (3 * GIB, 2 * GIB)


def test_a_group_that_uses_more_than_its_limit_has_nothing_left(tmp_path):
    files = {"memory.max": f"{GIB}\n", "memory.current": f"{GIB + 1}\n"}
    memory = machine(tmp_path, cgroup="0::/\n", mounts=V2_MOUNT, files=files).read()
    assert memory.available_bytes == 0


def test_a_limit_above_the_machine_is_none(tmp_path):
    files = {"memory.max": f"{90 * GIB}\n", "memory.current": f"{89 * GIB}\n"}
    memory = machine(tmp_path, cgroup="0::/\n", mounts=V2_MOUNT, files=files).read()
    assert memory.total_bytes == MACHINE_BYTES
    assert memory.available_from == "the machine"


def test_a_reader_sees_what_changed(tmp_path):
    files = {"memory.max": f"{4 * GIB}\n", "memory.current": "0\n"}
    reader = machine(tmp_path, cgroup="0::/\n", mounts=V2_MOUNT, files=files)
    assert reader.read().available_bytes == 4 * GIB
    (tmp_path / "sys/fs/cgroup/memory.current").write_text(f"{GIB}\n")
    assert reader.read().available_bytes == 3 * GIB
    (tmp_path / "sys/fs/cgroup/memory.current").unlink()
    assert reader.read().available_from == "the machine"


def test_groups_and_mounts_are_told_apart_by_generation():
    assert parse_groups("12:pids:/p\n5:cpu,memory:/m\n0::/two:with:colons\n") == {
        1: "/m",
        2: "/two:with:colons",
    }
    assert parse_groups("3:memory_pressure:/x\n") == {}
    assert parse_mounts("1 2 0:3 /a\\040b /sys/c\\134d rw - cgroup2 none rw\n") == [
        CgroupMount(2, "/a b", "/sys/c\\d")
    ]
    assert parse_mounts("1 2 0:3 / /sys/c rw - cgroup cgroup rw,cpu\n") == []


@pytest.mark.parametrize(
    ("root", "group", "folders"),
    [
        ("/", "/a/b", ["/c/a/b", "/c/a", "/c"]),
        ("/", "/", ["/c"]),
        ("/a", "/a/b", ["/c/b", "/c"]),
        ("/elsewhere", "/a/b", ["/c"]),
        ("/", "/../outside", ["/c"]),
    ],
)
def test_folders_go_from_the_group_up_to_the_mount(root, group, folders):
    assert group_folders([CgroupMount(2, root, "/c")], {2: group}) == folders


def test_an_unreadable_meminfo_is_said():
    with pytest.raises(ValueError, match="MemAvailable"):
        parse_meminfo("MemTotal: 5 kB\n")
    assert parse_stat("") == 0


def test_this_machine_can_be_read():
    memory = read_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes


@pytest.mark.parametrize(
    ("total_bytes", "kept_bytes"),
    [(GIB, 256 * MIB), (20 * GIB, GIB), (2000 * GIB, 8 * GIB)],
)
def test_the_reserve_follows_the_memory(total_bytes, kept_bytes):
    assert reserve_bytes(total_bytes) == kept_bytes


def test_an_l1_that_memory_cannot_hold_is_refused_with_both_numbers_and_the_fix():
    memory = Memory(20 * GIB, GIB, "the control group /x", "the machine")
    check_l1_size(19 * GIB, memory)
    with pytest.raises(ConfigError, match=r"less a reserve of 1\.00 GiB"):
        check_l1_size(19 * GIB + 4096, memory)
    with pytest.raises(ConfigError) as refusal:
        check_l1_size(21 * GIB, memory)
    text = str(refusal.value)
    assert text.startswith("--l1-size-gb: ")
    assert "21.00 GiB" in text
    assert "20.00 GiB (limit of the control group /x)" in text
    assert "set --l1-size-gb to 19 or less" in text


def test_an_l1_larger_than_this_machine_is_refused():
    with pytest.raises(ConfigError, match="--l1-size-gb"):
        check_l1_size(read_memory().total_bytes + 4096)


def test_a_machine_too_small_for_any_l1_gets_no_impossible_advice():
    with pytest.raises(ConfigError, match="give it more memory"):
        check_l1_size(GIB, Memory(200 * MIB, 0, "the machine", "the machine"))
