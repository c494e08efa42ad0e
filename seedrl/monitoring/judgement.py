"""Tells from the rows of a run whether it learns, and if not, which setting to try. Pure; knows no algorithm by name.

The return has the last word: a run whose return rises or has reached its goal is well, whatever its other numbers are.
Where it stays or falls, the numbers that the learner and the algorithm report tell why (seedrl/algorithms/signs.py).
Nothing bad is said in the first minute, nor of a return that is flat before a third of the run is over: many tasks are
learned late.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from seedrl.algorithms.signs import Sign, Signs
from seedrl.config import LearnerConfig
from seedrl.monitoring.trend import NEEDED, Course, Trend, trend_of
from seedrl.status import Learning, Mood

CALM_SECONDS = 60.0  # at the start of a run, unless its steps are over before
UPDATES = 10  # before which nothing bad is said either
FALLING_SHARE, FLAT_SHARE = 0.1, 1 / 3  # of stop.env_steps, from which on a falling or flat return is pointed out
FLAT_STEPS = 2_000_000  # from which on it is in any case
RECENT = 0.25  # the share of the steps so far over which a number has to be a bad sign
READINGS = 5  # rows with that number that are needed; older ones are taken where fewer are that recent
SKIPPED_SHARE, SKIPPED = 0.05, 3  # of recent updates, and how many at least
DEAD_NORM = 1e-6  # of gradients: below it the epsilon of the optimizer is all that is left
CUT = 100.0  # times algorithm.max_grad_norm
REPORTED = "algorithm/"
EPISODES = 100  # that a goal is about

Rows = Sequence[Mapping[str, float]]


def columns_for(signs: Signs) -> tuple[str, ...]:
    """Return the columns of a row that a judgement needs."""
    own = ("seconds", "updates", "skipped_updates", "episodes", "return_mean_100", "reward_per_step", "grad_norm")
    return (*NEEDED, *own, "return_p10", "return_p90", *(f"{REPORTED}{sign.value}" for sign in signs.numbers))


def judge(rows: Rows, config: LearnerConfig, signs: Signs) -> Learning:
    """Return the verdict on a run from its rows, oldest first."""
    if not rows or not rows[-1]["updates"]:
        return Learning("early", "There has been no update yet.")
    trend, newest = trend_of(rows), rows[-1]
    if good := _good(trend, newest, config.stop.return_mean_100):
        return good
    bad = [] if _is_early(newest, config) else _bad_signs(rows, config, signs)
    if trend.course is Course.settled:
        return _settled(trend, newest, bad)
    is_due = _is_due(trend, newest, config)
    if bad and (is_due or bad[0][0].is_urgent):
        return _troubled(*bad[0], about=_course(trend, newest))
    if is_due:
        change = signs.if_flat if trend.course is Course.flat else _calmer(config)
        return Learning(trend.course.value, f"{_course(trend, newest)}.", change, Mood.bad)
    return _early(newest)


def _good(trend: Trend, newest: Mapping[str, float], goal: float | None) -> Learning | None:
    """Return the verdict on a run that needs no other; None if this is not one."""
    score = newest.get("return_mean_100", -math.inf)
    if goal is not None and score >= goal and newest.get("episodes", 0) >= EPISODES:
        return Learning("reached", f"The mean return, {score:.4g}, has reached the goal of {goal:.4g}.", mood=Mood.good)
    if trend.course is Course.rising:
        return Learning("rising", f"The return {_moved('has risen', trend)}.", mood=Mood.good)
    if goal is not None and trend.course is Course.settled and trend.now >= goal:
        beyond = f"The newest episodes return {trend.now:.4g}, beyond the goal of {goal:.4g}; the mean of 100 follows."
        return Learning("rising", beyond, mood=Mood.good)
    return None


def _is_early(newest: Mapping[str, float], config: LearnerConfig) -> bool:
    is_over = newest["env_steps"] >= config.stop.env_steps
    return newest["updates"] < UPDATES or (newest["seconds"] < CALM_SECONDS and not is_over)


def _is_due(trend: Trend, newest: Mapping[str, float], config: LearnerConfig) -> bool:
    steps, goal = newest["env_steps"], config.stop.env_steps
    if _is_early(newest, config):
        return False
    if trend.course is Course.falling:
        return steps >= FALLING_SHARE * goal
    return trend.course is Course.flat and steps >= min(FLAT_SHARE * goal, FLAT_STEPS)


def _early(newest: Mapping[str, float]) -> Learning:
    episodes = newest.get("episodes", 0)
    if episodes:
        ended = f"{episodes:,.0f} {'episode has' if episodes == 1 else 'episodes have'} ended so far"
        return Learning("early", f"{ended}; a verdict takes more time.")
    reward = newest.get("reward_per_step")
    known = "" if reward is None else f"; the reward is {reward:.3g} per step"
    return Learning("early", f"No episode has ended yet{known}.")


def _settled(trend: Trend, newest: Mapping[str, float], bad: Sequence[tuple[Sign, float]]) -> Learning:
    """Return a verdict that is neither good nor bad: this may be the best that is possible."""
    evidence = (
        f"The newest episodes return {trend.now:.4g}, the first {trend.before:.4g}; it does not clearly rise any more"
    )
    ceilings = [] if _are_alike(newest) else [pair for pair in bad if pair[0].is_ceiling]
    if not ceilings:
        return Learning("settled", f"{evidence}.")
    sign, value = ceilings[0]
    return Learning(
        "settled", f"{evidence}, and {sign.meaning.format(value=value)}.", f"For more: {_lower(sign.change)}"
    )


def _troubled(sign: Sign, value: float, about: str) -> Learning:
    return Learning(sign.condition, f"{about}, and {sign.meaning.format(value=value)}.", sign.change, Mood.bad)


def _course(trend: Trend, newest: Mapping[str, float]) -> str:
    """Return a clause about the return, without a period."""
    if trend.course is Course.unknown:
        return "Too few episodes have ended to judge the return"
    if trend.course is Course.falling:
        return f"The return {_moved('has fallen', trend)}"
    if trend.course is Course.flat and _are_alike(newest):
        return f"The return is flat: all of the last episodes returned {newest['return_mean_100']:.4g}"
    if trend.course is Course.flat:
        return f"The return is flat: {trend.before:.4g} at first, {trend.now:.4g} now, after {trend.steps:,} steps"
    return f"The return is near {trend.now:.4g}"


def _are_alike(newest: Mapping[str, float]) -> bool:
    """Return whether all of the last episodes had the same return."""
    low, high = newest.get("return_p10"), newest.get("return_p90")
    return low is not None and low == high == newest.get("return_mean_100")


def _moved(verb: str, trend: Trend) -> str:
    return f"{verb} from {trend.before:.4g} to {trend.now:.4g} within {trend.steps:,} steps"


def _bad_signs(rows: Rows, config: LearnerConfig, signs: Signs) -> list[tuple[Sign, float]]:
    """Return the bad signs that recent rows show with their values, worst first."""
    count = sum(row["env_steps"] >= (1 - RECENT) * rows[-1]["env_steps"] for row in rows)
    recent = rows[-max(count, READINGS) :]
    skipped, updates = _change(recent, "skipped_updates"), _change(recent, "updates")
    if skipped >= SKIPPED and skipped >= SKIPPED_SHARE * updates:
        return [(_skipping(config), skipped)]
    own = [(f"{REPORTED}{sign.value}", sign) for sign in signs.numbers]
    found = []
    for column, sign in [*_signs_of_gradients(config), *own]:
        values = [row[column] for row in recent if column in row]
        if len(values) >= READINGS and sign.is_bad(value := float(np.median(values))):
            found.append((sign, value))
    return sorted(found, key=lambda pair: not pair[0].is_urgent)


def _change(rows: Rows, column: str) -> float:
    return rows[-1].get(column, 0.0) - rows[0].get(column, 0.0)


def _skipping(config: LearnerConfig) -> Sign:
    return Sign(
        "skipped_updates",
        "updates skipped",
        "{value:,.0f} updates were skipped lately, because the loss or the gradient was not finite",
        _calmer(config),
        is_urgent=True,
    )


def _signs_of_gradients(config: LearnerConfig) -> list[tuple[str, Sign]]:
    """Return the signs in what the learner measures, whatever the algorithm is."""
    limit = config.algorithm.max_grad_norm
    dead = Sign(
        "grad_norm",
        "gradient dead",
        "nothing is learned any more: the gradient has a norm of {value:.1g}",
        _calmer(config),
        below=DEAD_NORM,
        is_urgent=True,
    )
    cut = Sign(
        "grad_norm",
        "gradient cut",
        f"the gradient has a norm of {{value:.3g}}, of which algorithm.max_grad_norm leaves {limit:g}",
        "Set model.popart=true." if not config.model.popart else "Lower algorithm.reward_scale.",
        above=CUT * limit if limit else math.inf,
    )
    return [("grad_norm", dead), ("grad_norm", cut)]


def _calmer(config: LearnerConfig) -> str:
    return f"Lower algorithm.learning_rate (now {config.algorithm.learning_rate:g})."


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]
