"""What an owner held ends with it; memory waits until nobody can write to it."""

import pytest
from tests.store.bed import DROPPED, PENDING, RESERVED, VISIBLE, Bed

from kvcellar.errors import NotRegisteredError


class TestDeath:
    def test_it_ends_the_leases_of_the_dead_and_of_nobody_else(self):
        bed = Bed(pages=1)
        engine, other = bed.instance(), bed.instance()
        engine.put("a")
        engine.lookup("a")
        other.lookup("a")
        bed.die(engine.scheduler)
        assert bed.counted.leases == 1
        assert other.states("b") != [RESERVED]
        bed.die(other.scheduler)
        assert bed.instance().states("b") == [RESERVED]

    def test_a_scheduler_that_died_before_it_told_the_ranks_frees_nothing_while_they_live(self):
        """Whether it told them is not known, so their deaths have to be waited for."""
        bed = Bed()
        engine = bed.instance(1, 1)
        engine.reserve("a b")
        bed.die(engine.scheduler)
        assert bed.used_pages == 4
        bed.die(engine.workers[1])
        assert bed.used_pages == 4
        bed.die(engine.workers[0])
        assert bed.used_pages == 0
        assert bed.counted.reservations == 0

    def test_what_a_dead_scheduler_reserved_never_becomes_visible(self):
        bed = Bed()
        engine = bed.instance(1, 1)
        reserved = engine.reserve("a")
        engine.commit(reserved, 0)
        bed.die(engine.scheduler)
        assert bed.instance(1, 1).states("a") == [RESERVED]
        assert engine.commit(reserved, 1) == DROPPED
        assert bed.used_pages == 0
        assert engine.found("a") == 0

    def test_a_rank_that_died_before_its_commit_drops_the_chunks(self):
        bed = Bed()
        engine = bed.instance(1, 1)
        reserved = engine.reserve("a")
        bed.die(engine.workers[0])
        assert bed.used_pages == 2
        assert engine.commit(reserved, 1) == DROPPED
        assert bed.used_pages == 0

    def test_what_a_rank_had_committed_outlives_it(self):
        bed = Bed()
        engine = bed.instance(1, 1)
        reserved = engine.reserve("a")
        assert engine.commit(reserved, 0) == PENDING
        bed.die(engine.workers[0])
        assert engine.commit(reserved, 1) == VISIBLE

    def test_deaths_in_any_order_leave_nothing_but_the_chunks(self):
        bed = Bed()
        engine = bed.instance(1, 1)
        engine.put("a")
        engine.reserve("b", "a")
        engine.lookup("a")
        bed.die(engine.workers[0], engine.scheduler, engine.workers[1], engine.workers[1])
        counted = bed.counted
        assert (counted.leases, counted.reservations, counted.reserved_chunks) == (0, 0, 0)
        assert bed.used_pages == 2
        assert bed.instance(1, 1).found("a b") == 1

    def test_one_process_may_be_scheduler_and_all_ranks(self):
        bed = Bed()
        engine = bed.instance(1, 1)
        engine.workers = (engine.scheduler, engine.scheduler)
        engine.reserve("a")
        bed.die(engine.scheduler)
        assert bed.used_pages == 0


class TestLostConnection:
    def test_it_ends_leases_and_keeps_reservations(self):
        """The process may live, and its copies with it."""
        bed = Bed()
        engine = bed.instance()
        engine.put("a")
        engine.lookup("a")
        reserved = engine.reserve("b", "a")
        engine.disconnect()
        bed.store.reader_left(engine.workers[0])
        assert bed.counted.leases == 0
        assert bed.used_pages == 2
        assert engine.commit(reserved) == VISIBLE

    def test_the_first_heartbeat_over_a_new_one_says_which_reservations_are_known(self):
        """Requests may be counted anew there, and a reply that was on the way is lost."""
        bed = Bed()
        engine = bed.instance()
        engine.requests = 500
        known, lost = engine.reserve("a"), engine.reserve("b")
        other = bed.instance()
        on_its_way = other.reserve("c")
        engine.disconnect()
        other.heartbeat(seen=0)
        engine.heartbeat(reservations=[known.reservation], seen=1)
        assert bed.used_pages == 2
        with pytest.raises(NotRegisteredError):
            engine.commit(lost)
        assert engine.commit(known) == VISIBLE
        assert other.commit(on_its_way) == VISIBLE


class TestHeartbeat:
    def test_leases_that_are_not_listed_end(self):
        bed = Bed()
        engine, other = bed.instance(), bed.instance()
        engine.put("a")
        kept, lost, others = engine.lookup("a"), engine.lookup("a"), other.lookup("a")
        engine.heartbeat(leases=[kept.lease])
        assert bed.counted.leases == 2
        engine.release(lost)
        engine.release(kept)
        other.release(others)
        assert bed.counted.leases == 0

    def test_what_a_later_request_granted_is_spared(self):
        """Its reply was on the way when the heartbeat was made."""
        bed = Bed()
        engine = bed.instance()
        engine.put("a")
        engine.lookup("a")
        seen = engine.requests
        engine.lookup("a")
        reserved = engine.reserve("b")
        engine.heartbeat(seen=seen)
        assert bed.counted.leases == 1
        assert engine.commit(reserved) == VISIBLE
        engine.heartbeat()
        assert bed.counted.leases == 0

    def test_a_late_heartbeat_ends_nothing_that_it_could_not_know(self):
        bed = Bed()
        engine = bed.instance()
        engine.put("a")
        late = {"leases": [engine.lookup("a").lease], "seen": engine.requests}
        engine.lookup("a")
        engine.heartbeat(**late)
        engine.heartbeat(**late)
        assert bed.counted.leases == 2

    def test_reservations_that_are_not_listed_are_free_at_once(self):
        """The scheduler half lists one until each rank told it that its copy has ended."""
        bed = Bed()
        engine = bed.instance(1, 1)
        kept, lost = engine.reserve("a"), engine.reserve("b")
        engine.commit(lost, 0)
        engine.heartbeat(reservations=[kept.reservation])
        assert bed.used_pages == 2
        with pytest.raises(NotRegisteredError):
            engine.commit(lost, 1)
        engine.commit(kept, 0)
        assert engine.commit(kept, 1) == VISIBLE

    def test_a_reservation_that_can_not_become_visible_is_listed_like_any_other(self):
        bed = Bed()
        engine = bed.instance(1, 1)
        failed = engine.reserve("a")
        engine.abort(failed, 0)
        engine.heartbeat(reservations=[failed.reservation])
        assert bed.used_pages == 2
        engine.heartbeat()
        assert bed.used_pages == 0

    def test_a_rank_that_lists_nothing_ends_nothing(self):
        bed = Bed()
        engine = bed.instance()
        reserved = engine.reserve("a")
        bed.store.keep(engine.workers[0], leases=(), reservations=(), seen=1000)
        assert engine.commit(reserved) == VISIBLE
