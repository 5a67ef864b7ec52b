"""How long things take, learned from how long they took: robust, quick to adapt, bounded state.

Times of an engine and of a link have a tail on one side only: compilations, pauses and busy
neighbours make them longer, nothing makes them shorter. So errors count relative to what was
seen, which leaves a sample that took a hundred times as long almost no weight, while one that was
quicker is believed at once. Used by the gate; pure but for the clock that it is handed.
"""

from collections import deque
from collections.abc import Sequence
from itertools import combinations

from kvcellar.clock import Clock

__all__ = ["Fit", "Recent"]

EXPIRE_S = 600.0
"""What nobody has seen for so long is not known any more."""
RECENT_MAX = 5
TOGETHER_S = 0.001
"""Values that come so soon after one another were held up by the same thing, if by anything."""
QUICKER = 0.25
"""A value below this part of the usual one means that things got better: no tail reaches there."""
FORGET = 0.98
"""Weight of a sample after the next one came: the last fifty or so count."""
LEVEL_SAMPLES_MIN = 3


class Recent:
    """The usual value of late: the median of the last few, so that one or two outliers are none."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._values: deque[tuple[float, float]] = deque(maxlen=RECENT_MAX)

    def __len__(self) -> int:
        self._forget_old()
        return len(self._values)

    def add(self, value: float) -> None:
        """Note a value, at least 0; of those that come together only the smallest counts."""
        usual = self.usual()
        now_s = self._clock.monotonic_s()
        if usual is not None and value < QUICKER * usual:
            self._values.clear()
        elif self._values and now_s - self._values[-1][0] < TOGETHER_S:
            value = min(value, self._values.pop()[1])
        self._values.append((now_s, value))

    def usual(self) -> float | None:
        """Return the (lower) median; None when nothing is known."""
        self._forget_old()
        if not self._values:
            return None
        return sorted(value for _, value in self._values)[(len(self._values) - 1) // 2]

    def _forget_old(self) -> None:
        while self._values and self._clock.monotonic_s() - self._values[0][0] > EXPIRE_S:
            self._values.popleft()


class Fit:
    """Seconds as a sum of features times coefficients, none of them below 0.

    The coefficients are a least-squares fit of relative errors in which old samples fade. Samples
    that do not tell two features apart (always the same prompt) are explained by the feature of
    the smaller stiffness. What changes quickly, as when a link gets busy, is a factor on top: the
    usual ratio of the last samples to the fit.

    Attributes:
        count: samples since the start, or since they were all too old.
    """

    def __init__(self, stiffness: Sequence[float], clock: Clock) -> None:
        """Know nothing.

        Args:
            stiffness: for each feature, how unwillingly it explains what another one could;
                small against 1.
            clock: for what is too old.
        """
        self.count = 0
        self._stiffness = tuple(stiffness)
        self._clock = clock
        self._seen_s = 0.0
        self._level = Recent(clock)
        self._clear()

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Learn from one sample; one of no time at all teaches nothing."""
        if seconds <= 0.0:
            return
        self._forget_old()
        self.count += 1
        self._seen_s = self._clock.monotonic_s()
        parts = [feature / seconds for feature in features]
        for row, mine in enumerate(parts):
            self._target[row] = FORGET * self._target[row] + mine
            for column, other in enumerate(parts):
                entry = FORGET * self._matrix[row][column] + mine * other
                self._matrix[row][column] = entry
        self._coefficients = _fit(self._matrix, self._target, self._stiffness)
        base_s = self._base_s(features)
        if base_s > 0.0:
            self._level.add(seconds / base_s)

    def prices_s(self) -> tuple[float, ...] | None:
        """Return the seconds that one unit of each feature costs now; None: nothing is known."""
        self._forget_old()
        if not self.count:
            return None
        factor = self._factor()
        return tuple(coefficient * factor for coefficient in self._coefficients)

    def predict_s(self, features: Sequence[float]) -> float | None:
        """Return the seconds to expect; None when nothing is known."""
        prices_s = self.prices_s()
        if prices_s is None:
            return None
        return sum(price_s * feature for price_s, feature in zip(prices_s, features, strict=True))

    def _factor(self) -> float:
        level = self._level.usual()
        return level if level is not None and len(self._level) >= LEVEL_SAMPLES_MIN else 1.0

    def _base_s(self, features: Sequence[float]) -> float:
        pairs = zip(self._coefficients, features, strict=True)
        return sum(coefficient * feature for coefficient, feature in pairs)

    def _forget_old(self) -> None:
        if self.count and self._clock.monotonic_s() - self._seen_s > EXPIRE_S:
            self.count = 0
            self._clear()

    def _clear(self) -> None:
        size = len(self._stiffness)
        self._matrix = [[0.0] * size for _ in range(size)]
        self._target = [0.0] * size
        self._coefficients = [0.0] * size


def _fit(
    matrix: Sequence[Sequence[float]], target: Sequence[float], stiffness: Sequence[float]
) -> list[float]:
    """Return the best coefficients of which none is below 0.

    With so few features every choice of those above 0 can be tried.
    """
    size = len(target)
    used = [index for index in range(size) if matrix[index][index] > 0.0]
    # Scaled to a diagonal of ones, so that features of any unit are treated alike.
    scale = {index: matrix[index][index] ** 0.5 for index in used}
    best, best_gain = [0.0] * size, 0.0
    for count in range(len(used), 0, -1):
        for chosen in combinations(used, count):
            rows = [
                [
                    matrix[row][column] / (scale[row] * scale[column])
                    + (stiffness[row] if row == column else 0.0)
                    for column in chosen
                ]
                for row in chosen
            ]
            right = [target[row] / scale[row] for row in chosen]
            solution = _solve(rows, right)
            gain = sum(value * aim for value, aim in zip(solution, right, strict=True))
            if min(solution) >= 0.0 and gain > best_gain:
                best, best_gain = [0.0] * size, gain
                for index, value in zip(chosen, solution, strict=True):
                    best[index] = value / scale[index]
                if count == len(used):
                    return best
    return best


def _solve(rows: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small positive definite system; the stiffness on its diagonal keeps it regular."""
    rows, right = [[*row] for row in rows], [*right]
    size = len(right)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = rows[row][pivot] / rows[pivot][pivot]
            for column in range(pivot, size):
                rows[row][column] -= factor * rows[pivot][column]
            right[row] -= factor * right[pivot]
    solution = [0.0] * size
    for row in reversed(range(size)):
        known = sum(rows[row][column] * solution[column] for column in range(row + 1, size))
        solution[row] = (right[row] - known) / rows[row][row]
    return solution
