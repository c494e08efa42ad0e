"""Decides who plays against whom, and counts who wins. Knows nothing of models, streams or how actions are chosen.

Where a game begins, each opponent's seat gets an entry of the bank. Where it ends, the sign of the learner's return
counts as a win, a draw or a loss against the entries it has met, and moves its Elo rating.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seedrl.bank import CURRENT, Bank, Entry
from seedrl.config import LeagueConfig, Match
from seedrl.metrics import ServingMetrics
from seedrl.serving.seats import Seats
from seedrl.serving.slots import FinishedEpisodes

FIRST_ELO = 1000.0  # of the first snapshot
ELO_STEP = 8.0  # points that a game moves at most
RATE_STEP = 0.02  # by which a win rate follows a game, once there were enough
HARDNESS = 2.0  # power of the chance to lose in the probability of an opponent, as in AlphaStar

Indices = NDArray[np.int64]


@dataclass
class Payoff:
    """The games of the policy in training against one entry. Draws count as half a win in `rate`."""

    name: str
    elo: float
    won: int = 0
    drawn: int = 0
    lost: int = 0
    rate: float = 0.5  # of late

    @property
    def games(self) -> int:
        return self.won + self.drawn + self.lost

    def add(self, score: float) -> None:
        """Count a game: 1 for a win, 0.5 for a draw, 0 for a loss."""
        self.rate += (score - self.rate) * max(RATE_STEP, 1 / (self.games + 2))
        self.won, self.drawn, self.lost = (
            count + (score == result)
            for count, result in zip((self.won, self.drawn, self.lost), (1, 0.5, 0), strict=True)
        )


def expected_score(elo: float, other: float) -> float:
    """Return the mean score that Elo's model gives a player against another."""
    return float(1 / (1 + 10 ** ((other - elo) / 400)))


class League:
    """Owned by the server thread; `table` and `state` are for any thread, which may see a game half counted."""

    def __init__(self, config: LeagueConfig, bank: Bank, seats: Seats, metrics: ServingMetrics, seed: int) -> None:
        self._match = config.match
        self._share_of_current = config.current
        self._bank = bank
        self._seats = seats
        self._metrics = metrics
        self._random = np.random.default_rng(seed)
        self.elo = FIRST_ELO  # of the policy in training
        self._payoffs: dict[int, Payoff] = {}  # by number, of all entries that were ever met
        self._met: dict[int, Entry] = {}  # that some seat plays now, or may play

    def begin(self, slots: Indices) -> None:
        """Choose who acts in opponents' seats whose game begins; `slots` are those of all games that begin."""
        seats = self._seats
        opponents = slots[seats.is_opponent[slots]]
        if not len(opponents):
            return
        self._meet(opponents)
        numbers, chances = self._chances()
        seats.entry[opponents] = self._random.choice(numbers, len(opponents), p=chances)

    def _meet(self, opponents: Indices) -> None:
        """Take note of new entries, and let the bank drop those that no game needs."""
        seats = self._seats
        seats.entry[opponents] = CURRENT
        self._bank.drop_surplus(set(seats.entry[seats.is_opponent].tolist()))
        for entry in self._bank.entries:
            if entry.number not in self._payoffs:
                self._payoffs[entry.number] = Payoff(entry.name, self.elo if entry.is_snapshot else FIRST_ELO)
        self._met = {entry.number: entry for entry in self._bank.entries}
        self._metrics.bank_entries = len(self._met)

    def _chances(self) -> tuple[list[int], NDArray[np.float64]]:
        """Return the numbers that an opponent may have, and how likely each of them is."""
        snapshots = [number for number, entry in self._met.items() if entry.is_snapshot]
        others = [number for number, entry in self._met.items() if not entry.is_snapshot]
        numbers = others if self._match is Match.fixed else [*others, *snapshots]
        weights = np.ones(len(numbers))
        if self._match is Match.latest and snapshots:
            numbers, weights = [snapshots[-1]], np.ones(1)
        elif self._match is Match.prioritized:
            weights = np.array([(1 - self._payoffs[number].rate) ** HARDNESS for number in numbers])
        if not numbers:
            return [CURRENT], np.ones(1)
        total = weights.sum()
        chances = weights / total if total > 0 else np.full(len(numbers), 1 / len(numbers))
        share = self._share_of_current
        return [CURRENT, *numbers], np.concatenate(([share], (1 - share) * chances))

    def model_of(self, number: int) -> Any:
        """Return the model of an entry that acts."""
        return self._met[number].model

    def finish(self, finished: FinishedEpisodes) -> None:
        """Count games of seats in which the policy in training has played, against each opponent that it met."""
        seats = self._seats
        for slot, episode_return in zip(finished.slots.tolist(), finished.returns.tolist(), strict=True):
            rivals = seats.rivals[slot]
            for number in seats.entry[rivals[seats.is_opponent[rivals]]].tolist():
                if number != CURRENT:
                    self._count(number, 1.0 if episode_return > 0 else 0.0 if episode_return < 0 else 0.5)

    def _count(self, number: int, score: float) -> None:
        payoff, metrics = self._payoffs[number], self._metrics
        surprise = score - expected_score(self.elo, payoff.elo)
        self.elo += ELO_STEP * surprise
        if not self._met[number].is_snapshot:  # snapshots keep theirs, so that the scale stays
            payoff.elo -= ELO_STEP * surprise
        payoff.add(score)
        metrics.games["won" if score == 1 else "lost" if score == 0 else "drawn"] += 1
        metrics.elo = self.elo
        metrics.win_rate = float(np.mean([each.rate for each in self._played()]))

    def _played(self) -> list[Payoff]:
        return [self._payoffs[number] for number in self._met if self._payoffs[number].games]

    # For people and checkpoints.

    def table(self) -> list[dict[str, Any]]:
        """Return the pay-off table: one row for each entry of the bank that was met."""
        return [asdict(payoff) for payoff in self._played()]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs, as plain JSON values."""
        payoffs = {str(number): asdict(payoff) for number, payoff in self._payoffs.copy().items()}
        return {"elo": self.elo, "payoffs": payoffs, "random": self._random.bit_generator.state}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""
        self.elo = float(state["elo"])
        self._payoffs = {int(number): Payoff(**payoff) for number, payoff in state["payoffs"].items()}
        self._random.bit_generator.state = state["random"]
        self._met = {entry.number: entry for entry in self._bank.entries}
        if self._played():
            self._metrics.elo = self.elo
