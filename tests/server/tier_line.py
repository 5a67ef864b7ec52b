"""A tier process for tests of what asks it: nothing is answered before the test says so."""


class Disk:
    """Takes questions as the tier line does.

    Attributes:
        asked: the questions that are open, the oldest first, and who waits for each.
        is_away: no question can be asked.
    """

    def __init__(self, *, batch_max):
        self.batch_max = batch_max
        self.asked = []
        self.is_away = False
        self._last = 0

    def ask(self, make, on_answer):
        if self.is_away:
            return False
        self._last += 1
        self.asked.append((make(self._last), on_answer))
        return True
