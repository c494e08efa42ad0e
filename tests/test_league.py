"""The league: whose seat is an opponent's, who plays against whom, and what the results do to ratings."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seedrl.bank import CURRENT, Bank
from seedrl.config import ActorsConfig, EnvConfig, LeagueConfig, LearnerConfig, Match
from seedrl.errors import ConfigError
from seedrl.metrics import ServingMetrics
from seedrl.monitoring.overview import league_words
from seedrl.roles.evaluate import Quota, Round, games_of
from seedrl.roles.policy_server import opponent_plan
from seedrl.rows import RESET, TERMINATED
from seedrl.run.budget import bank_copies
from seedrl.serving.league import FIRST_ELO, League, expected_score
from seedrl.serving.seats import EVALUATION, OPPONENTS, Seat, Seats, planned_seats
from seedrl.serving.slots import FinishedEpisodes
from seedrl.sizes import can_be_on_policy, trained_envs
from seedrl.trained.card import opponents_table
from seedrl.validation import check
from tests.chaos.counting import ENV, STEP, CountingPool
from tests.chaos.model import CountingModel, UnrollCheck
from tests.fakes import make_job, make_spec
from tests.rig import Rig, make_model, make_rows

PAIR = [Seat(), OPPONENTS]


def settings(match: Match = Match.uniform, players: int = 2, **league: Any) -> LearnerConfig:
    return LearnerConfig(
        env=EnvConfig(players=players),
        actors=ActorsConfig(envs=12, groups=1),
        league=LeagueConfig(match=match, **league),
    )


class Games:
    """A league with some snapshots and one game in slots 0 and 1."""

    def __init__(self, match: Match, snapshots: int = 4, others: int = 0, seed: int = 1, **config: Any) -> None:
        model = make_model(make_spec())
        self.bank = Bank(model, 10, 1)
        for number in range(others):
            self.bank.add(f"runs/{number}", 0, make_model(make_spec()))
        for version in range(snapshots):
            self.bank.freeze_if_due(model, version)
        self.seats = Seats(2, players=2)
        self.seats.assign(np.arange(2), PAIR)
        self.metrics = ServingMetrics()
        self.league = League(LeagueConfig(match=match, **config), self.bank, self.seats, self.metrics, seed)

    def begin(self) -> int:
        """Begin a game; return who plays against the learner."""
        self.league.begin(np.arange(2))
        assert self.seats.entry[0] == CURRENT
        return int(self.seats.entry[1])

    def finish(self, score: float) -> None:
        self.league.finish(FinishedEpisodes(np.array([0]), np.array([score]), np.array([5])))

    def play(self, games: int, result: dict[int, float]) -> None:
        for _ in range(games):
            self.finish(result[self.begin()])


# Seats.


def test_learner_has_another_side_in_each_simulation_and_learns_from_it_alone() -> None:
    assert [seat == OPPONENTS for seat in planned_seats(settings())] == [False, True, True, False] * 3
    three = [[True, *[False] * 2], [False, True, False], [*[False] * 2, True], [True, *[False] * 2]]  # one of each game
    assert [seat != OPPONENTS for seat in planned_seats(settings(players=3))] == [
        side for game in three for side in game
    ]
    assert trained_envs(settings()) == 6
    assert sum(seat.is_trained for seat in planned_seats(settings())) == 6


def test_self_play_trains_on_all_sides_and_only_evaluation_meets_opponents() -> None:
    config = settings(Match.self)
    assert all(seat.is_trained for seat in planned_seats(config))
    config.actors.evaluation = 0.3
    seats = planned_seats(config)
    assert seats[:2] == [EVALUATION, OPPONENTS]
    assert seats[6:8] == [OPPONENTS, EVALUATION]
    assert all(seat.is_trained for seat in seats[2:6] + seats[8:])
    config.league.snapshot_updates = 0  # then the policy plays all sides of evaluation
    assert planned_seats(config)[:2] == [EVALUATION, EVALUATION]


def test_train_batches_are_counted_without_opponents() -> None:
    config = settings()
    config.algorithm.batch_size = 6
    assert can_be_on_policy(config)
    config.algorithm.batch_size = 8
    assert not can_be_on_policy(config)


def test_budget_counts_the_bank() -> None:
    assert bank_copies(settings(Match.self)) == 0
    assert bank_copies(settings(snapshots=5, opponents=["a", "b"])) == 1 + 5 + 2 + 2
    assert bank_copies(settings(Match.fixed, snapshot_updates=0, opponents=["a"])) == 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (settings(players=1), "league.match=uniform needs several players, and env.players=1"),
        (settings(Match.fixed), "league.match=fixed needs league.opponents"),
        (settings(Match.latest, snapshot_updates=0), "league.match=latest needs league.snapshot_updates"),
        (settings(Match.self, opponents=["a"]), "league.opponents have no games"),
        (settings(snapshots=0), "league.snapshots=0 must be at least 1"),
        (settings(current=1.0), "league.current=1.0 must be at least 0 and below 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(config: LearnerConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(config)


# Matches.


def test_latest_is_the_newest_snapshot() -> None:
    games = Games(Match.latest)
    assert {games.begin() for _ in range(20)} == {4}
    games.bank.freeze_if_due(make_model(make_spec()), 9)
    assert {games.begin() for _ in range(20)} == {5}


def test_uniform_meets_all_alike_and_fixed_only_other_runs() -> None:
    met = Counter(Games(Match.uniform, seed=seed).begin() for seed in range(2000))
    assert met.keys() == {1, 2, 3, 4}
    assert all(abs(count - 500) < 90 for count in met.values())  # more than four standard deviations
    games = Games(Match.fixed, others=2)
    assert {games.begin() for _ in range(50)} == {1, 2}


def test_share_of_current_is_played_against_itself_and_counts_for_no_rating() -> None:
    games = Games(Match.uniform, current=0.75)
    met = Counter(games.begin() for _ in range(2000))
    assert abs(met[CURRENT] - 1500) < 80
    games = Games(Match.uniform, snapshots=0)
    assert games.begin() == CURRENT
    games.finish(1.0)
    assert sum(games.metrics.games.values()) == 0


def test_prioritized_prefers_those_that_win() -> None:
    """Against 1 the learner wins, against 2 it draws, against 3 and 4 it loses: (1 - w)² is about 0, ¼, 1 and 1."""
    games = Games(Match.prioritized)
    result = {1: 1.0, 2: 0.0, 3: -1.0, 4: -1.0}
    games.play(3000, result)
    met = Counter(games.begin() for _ in range(4500))
    assert met[1] < 60
    assert abs(met[2] - 500) < 130
    assert abs(met[3] - 2000) < 200
    assert abs(met[4] - 2000) < 200


def test_opponents_are_drawn_where_their_own_game_begins_and_nowhere_else() -> None:
    games = Games(Match.uniform)
    first = games.begin()
    for _ in range(30):
        games.league.begin(np.array([0]))  # the learner's first row
        games.league.begin(np.zeros(0, np.int64))
    assert games.seats.entry[1] == first


def test_matches_repeat_with_the_seed() -> None:
    drawn = [[Games(Match.uniform, seed=seed).begin() for seed in range(30)] for _ in range(2)]
    assert drawn[0] == drawn[1]


# Results.


def test_ratings_follow_elo_and_snapshots_keep_theirs() -> None:
    games = Games(Match.latest, snapshots=1)
    elo = FIRST_ELO
    for score in (1, 1, 0, -1, 1):
        games.begin()
        games.finish(score)
        elo += 8 * ((score + 1) / 2 - 1 / (1 + 10 ** ((FIRST_ELO - elo) / 400)))
    assert games.league.elo == pytest.approx(elo)
    assert games.metrics.elo == pytest.approx(elo)
    (row,) = games.league.table()
    assert (row["won"], row["drawn"], row["lost"], row["elo"]) == (3, 1, 1, FIRST_ELO)
    assert games.metrics.games == {"won": 3, "drawn": 1, "lost": 1}
    games.bank.freeze_if_due(make_model(make_spec()), 7)
    games.begin()
    games.finish(0)
    assert games.league.table()[1]["elo"] == pytest.approx(elo)  # the learner's when it was frozen


def test_ratings_of_other_runs_move_with_the_games() -> None:
    games = Games(Match.fixed, snapshots=0, others=1)
    games.play(400, {1: 1.0})
    gained = games.league.elo - FIRST_ELO
    assert gained > 100
    assert games.league.table()[0]["elo"] == pytest.approx(FIRST_ELO - gained)
    assert expected_score(games.league.elo, FIRST_ELO - gained) > 0.9
    assert games.metrics.win_rate == pytest.approx(1.0, abs=0.01)


def test_league_is_restored_with_ratings_results_and_random_numbers() -> None:
    games = Games(Match.uniform)
    games.play(50, {1: 1.0, 2: 0.0, 3: -1.0, 4: 1.0})
    again = Games(Match.uniform, seed=99)
    again.league.load(games.league.state())
    assert again.league.table() == games.league.table()
    assert again.metrics.elo == games.metrics.elo
    assert [again.begin() for _ in range(20)] == [games.begin() for _ in range(20)]


# Batches with opponents.


def opponents(count: int) -> Sequence[Seat]:
    return [PAIR[number % 2] for number in range(count)]


@pytest.mark.parametrize("group_size", [8, 4])
def test_run_no_row_of_an_opponent_reaches_a_train_batch_and_no_other_row_is_missing(
    group_size: int, tmp_path: Any
) -> None:
    """Counting environments sign every row; 301 rows of each."""
    pool = CountingPool(make_job(8, group_size, env_id="counting"))
    model = CountingModel(pool.spec, violations=str(tmp_path / "violations"))
    league = LeagueConfig(match=Match.uniform, snapshots=3, snapshot_updates=1)
    rig = Rig(pool.spec, model, slots=8, capacity=16, unroll_length=4, players=2, league=league)
    session, oracle = rig.join([5, 3, 1, 7, 0, 2, 4, 6], opponents(8)), UnrollCheck()
    trained: list[np.ndarray] = []
    acted: set[int] = set()
    for step in range(301 * 8 // group_size):
        rig.bank.freeze_if_due(model, step // 50)
        rig.play(session, pool, steps=1)
        acted |= set(rig.seats.entry.tolist())
        if rig.store.ready:
            unrolls = rig.store.take(rig.store.ready, timeout=0)
            assert unrolls is not None
            assert oracle.violations(unrolls.inputs) == []
            trained.append(unrolls.inputs.observation.numpy()[:-1].reshape(-1, pool.spec.observation.shape[0]))
    rows = np.concatenate(trained)
    assert set(rows[:, ENV].tolist()) == {0, 2, 4, 6}
    for env in (0, 2, 4, 6):
        assert sorted(rows[rows[:, ENV] == env, STEP].tolist()) == list(range(300))
    metrics = rig.metrics
    assert metrics.rows == 8 * 301
    assert abs(metrics.opponent_steps - metrics.env_steps) < 0.05 * metrics.env_steps
    assert (metrics.eval_steps, metrics.eval_episodes) == (0, 0)
    assert sum(metrics.games.values()) == metrics.episodes > 20
    assert len(acted) >= 5


def test_run_answers_with_the_actions_of_each_entry() -> None:
    """Each snapshot wants another action with certainty."""
    spec = make_spec(shape=(2,), num_actions=6)
    model = make_model(spec)
    league = LeagueConfig(match=Match.uniform, snapshots=5, snapshot_updates=1)
    rig = Rig(spec, model, slots=16, players=2, league=league)
    for version in range(6):
        wanted = model.state_dict()
        wanted["heads.weight"].zero_()
        wanted["heads.bias"].zero_()[version] = 1e4
        (rig.bank.freeze_if_due if version < 5 else rig.policy.publish)(model, version)
    session = rig.join(range(16), opponents(16))
    met: set[int] = set()
    for flags in (RESET, 0, TERMINATED) * 10:
        (action,) = rig.run(rig.request(session, make_rows(np.zeros((16, 2), np.float32), flags)))
        entry = rig.seats.entry[session.lease.slots]
        assert (entry[::2] == CURRENT).all()
        assert action.tolist() == np.where(entry == CURRENT, 5, entry - 1).tolist()
        met |= set(entry.tolist())
        if rig.store.ready:
            rig.store.take(rig.store.ready, timeout=0)
    assert met == {0, 1, 2, 3, 4, 5}


# Evaluation of one policy against another.


def test_quota_counts_the_slots_of_one_side() -> None:
    quota = Quota(7, 8, counted=lambda slot: slot % 2 == 0)
    assert quota.wanted == [2, 0, 2, 0, 2, 0, 1, 0]
    slots = np.arange(8).repeat(3)
    quota.add(FinishedEpisodes(slots, np.where(slots % 2 == 0, 1.0, -1.0), np.full(24, 5)))
    assert quota.is_full.is_set()
    assert quota.returns == [1.0] * 7


def test_report_has_the_shares_of_results() -> None:
    rounds = [Round(1, [1.0, 1.0, 0.0, -1.0], [3] * 4, 1.0, 0), Round(2, [2.0, 0.5, -3.0, 1.0], [3] * 4, 1.0, 0)]
    assert games_of(rounds) == {"won": 0.625, "drawn": 0.125, "lost": 0.25}


def test_random_opponents_draw_all_allowed_choices_alike() -> None:
    config = settings(Match.self)
    plan = opponent_plan(config, Seat(is_trained=False), "random")
    assert [seat.policy for seat in plan[:4]] == ["current", "opponent", "opponent", "current"]
    assert opponent_plan(config, EVALUATION, "") == [EVALUATION] * 12
    spec = make_spec(num_actions=4)
    rig = Rig(spec, slots=12, players=2, league=LeagueConfig(match=Match.fixed))
    session, chosen = rig.join(range(12), plan), []
    for _ in range(200):
        (action,) = rig.run(rig.request(session, make_rows(np.ones((12, 2), np.float32) * 9, RESET)))
        chosen += action[[seat.policy == "opponent" for seat in plan]].tolist()
    counts = np.bincount(chosen, minlength=4)
    assert np.abs(counts - 300).max() < 75  # five standard deviations


# What people see.


def test_card_has_a_table_of_the_results_against_each_opponent(tmp_path: Path) -> None:
    games = Games(Match.uniform, snapshots=2)
    games.play(20, {1: 1.0, 2: -1.0})
    newest = tmp_path / "checkpoints/000000001000"
    newest.mkdir(parents=True)
    (newest / "state.json").write_text(json.dumps({"league": games.league.state()}))
    shown = "\n".join(opponents_table(newest))
    won, lost = games.metrics.games["won"], games.metrics.games["lost"]
    assert f"an Elo rating of {games.league.elo:,.0f}" in shown
    assert f"`update 0` | won {won}, drawn 0, lost 0" in shown
    assert f"`update 1` | won 0, drawn 0, lost {lost}" in shown
    assert list(opponents_table(None)) == []


def test_status_says_how_the_policy_does_against_the_bank() -> None:
    row = {"elo": 1234.5, "win_rate": 0.61, "bank_entries": 4.0, "games": 5000.0}
    assert league_words(row) == "Elo 1,234, score 61% against 4 policies of the bank, 5,000 games"
