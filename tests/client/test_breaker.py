"""Three silences in a row, not three silences."""

from kvcellar.client.breaker import Breaker


def test_the_third_silence_in_a_row_opens_it_once():
    breaker = Breaker()
    assert [breaker.note_silence() for _ in range(5)] == [False, False, True, False, False]
    assert breaker.is_open


def test_an_answer_in_between_starts_the_count_anew():
    breaker = Breaker()
    for _ in range(5):
        breaker.note_silence()
        breaker.note_silence()
        assert not breaker.note_answer()
    assert not breaker.is_open


def test_an_answer_closes_it_and_says_so_once():
    breaker = Breaker()
    for _ in range(3):
        breaker.note_silence()
    assert breaker.note_answer()
    assert not breaker.is_open
    assert not breaker.note_answer()
