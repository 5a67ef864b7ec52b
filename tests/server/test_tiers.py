"""A server with a folder behind its memory: real processes, real files."""

import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest
from tests.server.disk import WAIT_S, DiskServer
from tests.server.running import FLAGS, RunningServer, eventually, is_running, key, keys

from kvcellar.protocol.messages import REF_BYTES, AwaitFetch, Clear, Damaged, Lookup


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "disk"


@pytest.fixture
def disk(folder):
    with DiskServer(folder) as one:
        yield one
        assert "Traceback" not in one.log()
        assert "internal error" not in one.log()


def records(folder):
    return sorted(
        path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096
    )


def delete(server, *numbers, **more):
    body = {"keys": [key(number).hex() for number in numbers]} | more
    url = f"{server.http}/cache/objects"
    answer = httpx.request("DELETE", url, json=body, timeout=WAIT_S)
    return answer.json()


class TestDeletion:
    def test_a_deleted_chunk_is_nowhere_also_after_a_restart(self, folder):
        with DiskServer(folder) as server, server.engine() as engine:
            engine.put(1, 2, 3)
            server.wait_written(3)
            assert delete(server, 2, 9) == {"deleted": 1, "skipped": 1, "ok": True}
            assert len(records(folder)) == 2
            assert engine.look(1, 2, 3) == (1, 1)
        with DiskServer(folder) as server, server.engine() as engine:
            # What only the disk has is deleted as well.
            assert delete(server, 3, 3) == {"deleted": 2, "skipped": 0, "ok": True}
            assert engine.look(3) == (0, 0)
            assert engine.look(1, 2) == (0, 1)

    def test_a_tier_that_is_named_is_the_only_one(self, folder):
        with DiskServer(folder) as server, server.engine() as engine:
            engine.put(1, 2)
            server.wait_written(2)
            assert delete(server, 1, tier="l2")["deleted"] == 1
            assert delete(server, 2, tier="l1")["deleted"] == 1
            assert engine.look(1, 2) == (1, 2)

    def test_what_is_in_use_stays_everywhere_unless_forced(self, folder):
        with DiskServer(folder) as server, server.engine() as engine:
            engine.put(1)
            server.wait_written(1)
            engine.call(lambda i: Lookup(i, keys(1)))
            assert delete(server, 1)["skipped"] == 1
            assert len(records(folder)) == 1
            assert delete(server, 1, force=True)["deleted"] == 1
            assert records(folder) == []

    def test_a_file_that_cannot_be_removed_is_no_success(self, folder):
        with DiskServer(folder) as server, server.engine() as engine:
            engine.put(1, 2)
            server.wait_written(2)
            (path,) = [one for one in records(folder) if one.stem == key(1).hex()]
            path.unlink()
            path.mkdir()
            answer = delete(server, 1, 2)
            assert (answer["deleted"], answer["ok"]) == (1, False)
            assert "may keep 1 keys" in answer["error"]

    def test_a_tier_that_cannot_say_so_is_no_success(self, disk):
        engine = disk.engine()
        engine.put(1, 2)
        disk.wait_written(2)
        os.kill(disk.tier_pid(), signal.SIGSTOP)
        answers = []
        thread = threading.Thread(target=lambda: answers.append(delete(disk, 1)))
        thread.start()
        eventually(lambda: disk.status()["kvcellar"]["chunks"] == 1)
        # What is being deleted must not come back meanwhile.
        assert engine.call(lambda i: Lookup(i, keys(1))).fetch == 0
        os.kill(disk.tier_pid(), signal.SIGKILL)
        thread.join(WAIT_S)
        assert eventually(lambda: engine.call(lambda i: Lookup(i, keys(1))).fetch)
        (answer,) = answers
        assert (answer["deleted"], answer["ok"]) == (0, False)
        assert "may keep 1 keys" in answer["error"]


class TestHits:
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_what_was_stored_is_found_after_the_server_was_killed(self, folder, ranks):
        with DiskServer(folder) as server, server.engine(world_size=ranks) as engine:
            engine.put(1, 2, 3)
            server.wait_written(3)
            server.process.kill()
            server.process.wait(WAIT_S)
        with DiskServer(folder) as server, server.engine(world_size=ranks) as engine:
            assert engine.look(1, 2, 3, 4) == (0, 3)
            assert engine.look(1, 2, 3) == (3, 3)
            metrics = server.status_metrics()
            assert metrics["kvcellar_tier_fetched_chunks_total"] == 3
            # The lookup that waited counts once, with what it found in the end.
            assert metrics["kvcellar_lookups_total"] == 2
            assert metrics["kvcellar_lookup_chunks_total"] == 7
            assert metrics["kvcellar_lookup_hit_chunks_total"] == 6
            eventually(lambda: server.tier()["read_chunks"] == 3)
            # What came from the tier does not go there again.
            assert server.tier()["written_chunks"] == 0
            assert server.status()["kvcellar"]["leases"] == 0

    def test_only_what_memory_lacks_is_fetched(self, folder):
        with DiskServer(folder) as server, server.engine() as engine:
            engine.put(1, 2, 3)
            server.wait_written(3)
        with DiskServer(folder) as server, server.engine() as engine:
            assert engine.look(1) == (0, 1)
            assert engine.look(1, 2, 3) == (1, 3)
            eventually(lambda: server.tier()["read_chunks"] == 3)

    def test_lookups_of_the_same_prompt_read_it_once(self, folder):
        with DiskServer(folder) as server, server.engine() as engine:
            engine.put(*range(1, 9))
            server.wait_written(8)
        with DiskServer(folder) as server:
            engines = [server.engine(f"engine-{number}") for number in range(4)]
            found = []
            threads = [
                threading.Thread(target=lambda one=one: found.append(one.look(*range(1, 9))))
                for one in engines
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
            assert [last for _, last in found] == [8] * 4
            assert server.status_metrics()["kvcellar_tier_fetched_chunks_total"] == 8

    def test_a_working_set_larger_than_memory_is_served_from_the_disk(self, folder):
        """L1 has 16 slots; 40 chunks in ten prompts."""
        prompts = [tuple(range(at, at + 4)) for at in range(1, 41, 4)]
        size_gb = str(16 * 4096 / 2**30)
        with DiskServer(folder, "--l1-size-gb", size_gb) as server, server.engine() as engine:
            for number, prompt in enumerate(prompts, 1):
                engine.put(*prompt)
                server.wait_written(4 * number)
            for prompt in prompts * 2:
                assert engine.look(*prompt)[1] == 4
            assert server.status_metrics()["kvcellar_tier_fetched_chunks_total"] >= 40

    def test_what_memory_answers_does_not_age_on_the_disk(self, folder):
        """The folder has room for some 180 chunks; the first is used while the others come."""
        with DiskServer(folder, "--disk-size-gb", "0.0015") as server, server.engine() as engine:
            for first in range(1, 151, 50):
                engine.put(*range(first, first + 50))
                server.wait_written(first + 49)
            assert engine.look(1) == (1, 1)
            eventually(lambda: server.status_metrics()["kvcellar_tier_told_chunks_total"] == 1)
            engine.put(*range(151, 251))
            eventually(lambda: server.tier()["written_chunks"] == 250)
            names = {path.stem for path in records(folder)}
            assert key(1).hex() in names
            assert key(2).hex() not in names

    def test_without_a_wait_the_first_answer_stands(self, folder):
        with DiskServer(folder) as server, server.engine() as engine:
            engine.put(1, 2)
            server.wait_written(2)
        with DiskServer(folder) as server, server.engine() as engine:
            assert engine.call(lambda i: Lookup(i, keys(1, 2), False)).fetch == 0
            assert engine.call(lambda i: AwaitFetch(i, 4711, WAIT_S)).count == 0
            # It goes on in the background.
            assert engine.call(lambda i: Lookup(i, keys(1, 2))).fetch > 0
            eventually(lambda: engine.look(1, 2) == (2, 2))

    def test_chunks_leave_memory_at_once_where_it_is_to_be_skipped(self, folder):
        with (
            DiskServer(folder, "--l2-store-policy", "skip_l1") as server,
            server.engine() as engine,
        ):
            engine.put(1, 2, 3)
            server.wait_written(3)
            page = server.status()["storage_manager"]
            assert page["l1_manager"]["total_object_count"] == 0
            assert engine.look(1, 2, 3) == (0, 3)

    def test_without_tiers_nothing_is_fetched_and_no_process_started(self):
        with RunningServer() as server, server.engine() as engine:
            assert engine.lookup(1).fetch == 0
            assert engine.call(lambda i: AwaitFetch(i, 1, WAIT_S)).count == 0
            assert server.http_pid()
            assert server.status()["storage_manager"]["num_l2_adapters"] == 0


class TestDamage:
    @pytest.mark.parametrize("how", ["flip", "cut", "empty", "swap", "remove"])
    def test_a_record_that_does_not_pass_is_a_miss_and_the_rest_hits(self, folder, how):
        with DiskServer(folder) as server, server.engine() as engine:
            engine.put(1, 2, 3, 4)
            server.wait_written(4)
            paths = {path for path in records(folder) if key(3).hex() in path.name}
            (third,) = paths or [
                path for path in records(folder) if key(3) in path.read_bytes()[:4096]
            ]
            (fourth,) = [path for path in records(folder) if key(4) in path.read_bytes()[:4096]]
        content = third.read_bytes()
        match how:
            case "flip":
                third.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
            case "cut":
                third.write_bytes(content[:6000])
            case "empty":
                third.write_bytes(b"")
            case "swap":
                third.write_bytes(fourth.read_bytes())
            case "remove":
                third.unlink()
        with DiskServer(folder) as server, server.engine() as engine:
            assert engine.look(1, 2, 3, 4)[1] == 2
            engine.put(3)
            eventually(lambda: server.tier()["written_chunks"] == 1)
            assert engine.look(1, 2, 3, 4)[1] == 4

    def test_what_a_worker_finds_damaged_leaves_the_disk_too(self, disk):
        with disk.engine() as engine:
            engine.put(1, 2)
            disk.wait_written(2)
            found = engine.lookup(1, 2)
            offset = int.from_bytes(found.refs[REF_BYTES : REF_BYTES + 8], "little")
            engine.give_back(found)
            engine.workers[0].call(lambda i: Damaged(i, key(2), 0, offset), timeout_s=WAIT_S)
            disk.wait_written(1)
            assert engine.look(1, 2)[1] == 1


class TestClear:
    def test_a_clear_is_about_memory_unless_it_says_more(self, disk):
        with disk.engine() as engine:
            engine.put(1, 2)
            disk.wait_written(2)
            with disk.tool() as tool:
                cleared = tool.call(Clear, timeout_s=WAIT_S)
                assert (cleared.chunks, cleared.tier_chunks) == (2, 0)
                assert engine.look(1, 2) == (0, 2)
                cleared = tool.call(lambda i: Clear(i, tiers=True), timeout_s=WAIT_S)
                assert (cleared.chunks, cleared.tier_chunks) == (2, 2)
            assert engine.look(1, 2) == (0, 0)

    def test_the_page_and_the_command_say_it_too(self, disk):
        with disk.engine() as engine:
            engine.put(1, 2)
            disk.wait_written(2)
            said = httpx.get(f"{disk.http}/metrics").text
            assert 'kvcellar_tier_written_chunks_total{tier="fs-0"} 2' in said
            assert 'kvcellar_tier_up{tier="fs-0"} 1' in said
            assert {f"kvcellar_{name}" for name in ("tier_fetches_total", "tier_cap_bytes")} <= {
                line.partition(" ")[0].partition("{")[0] for line in said.splitlines()
            }
            answer = httpx.post(f"{disk.http}/cache/clear", json={"tier": "all"})
            assert answer.json()["tier_chunks"] == 2
            engine.put(1)
            disk.wait_written(1)
            words = [sys.executable, "-m", "kvcellar", "clear", "--all-tiers", "--json"]
            said = subprocess.run(
                [*words, "--port", str(disk.port)], capture_output=True, text=True, check=True
            )
            assert '"tier_chunks": 1' in said.stdout


class TestTheProcess:
    def test_a_frozen_one_costs_a_bounded_wait_and_is_asked_no_more(self, folder):
        with DiskServer(folder) as server, server.engine() as engine:
            engine.put(1, 2)
            server.wait_written(2)
        with DiskServer(folder) as server, server.engine() as engine:
            os.kill(server.tier_pid(), signal.SIGSTOP)
            start_s = time.monotonic()
            assert engine.look(1, 2, wait_s=0.5) == (0, 0)
            assert 0.4 < time.monotonic() - start_s < 5
            eventually(lambda: engine.lookup(1, 2).fetch == 0)
            health = httpx.get(f"{server.http}/healthcheck")
            assert health.status_code == 200
            assert "has said nothing" in health.json()["degraded"]["tiers"]
            assert server.status()["is_healthy"]
            os.kill(server.tier_pid(), signal.SIGCONT)
            eventually(lambda: engine.look(1, 2)[1] == 2)
            assert server.status()["kvcellar"]["degraded"] == {}
            assert server.status_metrics()["kvcellar_tier_restarts_total"] == 0

    def test_a_killed_one_is_started_again_and_its_slots_are_free(self, folder):
        with DiskServer(folder) as server, server.engine() as engine:
            engine.put(1, 2)
            server.wait_written(2)
        with DiskServer(folder) as server, server.engine() as engine:
            pid = server.tier_pid()
            os.kill(pid, signal.SIGSTOP)
            first = engine.lookup(1, 2)
            waiting = engine.scheduler.post(lambda i: AwaitFetch(i, first.fetch, WAIT_S))
            # Of a chunk that is on its way to the disk, the slot is held by the process, too.
            engine.put(7)
            os.kill(pid, signal.SIGKILL)
            assert engine.scheduler.collect(waiting, timeout_s=WAIT_S).count == 0
            away = server.tier()
            assert (away["is_healthy"], away["is_complete"]) == (False, False)
            assert away["trouble"] in {
                "the tier process starts",
                "the tier process ended with code -9",
            }
            eventually(lambda: engine.look(1, 2)[1] == 2)
            assert server.tier_pid() != pid
            own = server.status()["kvcellar"]
            assert (own["leases"], own["reservations"]) == (0, 0)
            assert server.status_metrics()["kvcellar_tier_restarts_total"] == 1
            assert server.status_metrics()["kvcellar_tier_unwritten_chunks_total"] == 1

    def test_one_that_stays_frozen_is_replaced_and_lets_go_of_what_it_held(self, disk):
        with disk.engine() as engine:
            pid = disk.tier_pid()
            os.kill(pid, signal.SIGSTOP)
            engine.put(1)
            assert disk.status()["kvcellar"]["leases"] == 1
            eventually(lambda: not is_running(pid), timeout_s=30)
            eventually(lambda: disk.status()["kvcellar"]["leases"] == 0)
            eventually(lambda: disk.tier().get("is_healthy"))
            engine.put(2)
            disk.wait_written(1)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    def test_it_ends_with_the_server(self, disk, number):
        children = disk.children()
        assert len(children) == 2
        disk.process.send_signal(number)
        disk.process.wait(WAIT_S)
        eventually(lambda: not any(is_running(pid) for pid in children))


class TestStart:
    @pytest.mark.parametrize(
        ("adapter", "said"),
        [
            ('{"type":"fs"}', "base_path"),
            ('{"type":"disk","base_path":"/x"}', "did you mean fs"),
            ('{"type":"fs","base_path":"/proc/nothing/here"}', "/proc/nothing/here"),
        ],
    )
    def test_what_cannot_be_used_ends_the_start_with_the_reason(self, adapter, said):
        words = [sys.executable, "-m", "kvcellar", "server", *FLAGS, "--l2-adapter", adapter]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert ended.returncode == 2
        assert said in ended.stderr
        assert "Traceback" not in ended.stderr

    def test_a_folder_that_another_server_has_is_refused(self, disk, folder):
        words = [sys.executable, "-m", "kvcellar", "server", *FLAGS, "--disk-path", str(folder)]
        # It tries for two seconds, with a new process each time.
        ended = subprocess.run(
            words, capture_output=True, text=True, timeout=3 * WAIT_S, check=False
        )
        assert ended.returncode != 0
        assert str(disk.tier_pid()) in ended.stderr
        assert "Traceback" not in ended.stderr
