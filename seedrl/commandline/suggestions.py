"""Finds what was probably meant by a word that does not exist. Knows settings only by their names elsewhere."""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

LIKELY = 0.64  # the similarity from which a word is suggested
MOST = 3  # suggestions that are equally good
# What other libraries call our settings.
ELSEWHERE = {
    "gamma": "algorithm.discount",
    "gae_lambda": "algorithm.trace_lambda",
    "lam": "algorithm.trace_lambda",
    "ent_coef": "algorithm.entropy_cost",
    "entropy_coef": "algorithm.entropy_cost",
    "exploration_loss_coeff": "algorithm.entropy_cost",
    "vf_coef": "algorithm.value_cost",
    "value_loss_coeff": "algorithm.value_cost",
    "clip_range": "algorithm.ppo.clip",
    "clip_coef": "algorithm.ppo.clip",
    "target_kl": "algorithm.ppo.max_kl",
    "n_epochs": "algorithm.passes",
    "update_epochs": "algorithm.passes",
    "num_epochs": "algorithm.passes",
    "epochs": "algorithm.passes",
    "num_minibatches": "algorithm.minibatches",
    "n_steps": "algorithm.unroll_length",
    "num_steps": "algorithm.unroll_length",
    "rollout": "algorithm.unroll_length",
    "num_envs": "actors.envs",
    "n_envs": "actors.envs",
    "num_workers": "actors.count",
    "workers": "actors.count",
    "total_timesteps": "stop.env_steps",
    "timesteps": "stop.env_steps",
    "train_for_env_steps": "stop.env_steps",
    "env_id": "env.id",
    "gym_id": "env.id",
    "max_norm": "algorithm.max_grad_norm",
    "train": "run",
    "enjoy": "record",
    "evaluate": "eval",
}


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return the known words that are most like this one, the best few if they are equally good."""
    scores = {each: likeness(word, each) for each in known}
    for name, ours in ELSEWHERE.items():
        if ours in scores:
            scores[ours] = max(scores[ours], _ratio(_last(word), name))
    best = max(scores.values(), default=0.0)
    return [each for each, score in scores.items() if best >= LIKELY and score > best - 0.01][:MOST]


def likeness(word: str, known: str) -> float:
    """Return how likely a word stands for a known one, from 0 to 1.

    A key may be given without its sections (learning_rate), by its initials (lr) or by some of its words (steps).
    """
    ours, theirs = _last(known), _last(word)
    scores = [_ratio(word, known), 0.97 * _ratio(theirs, ours)]
    words = ours.split("_")
    if theirs == "".join(part[0] for part in words if part) and len(words) > 1:
        scores.append(0.9)
    if theirs in words and len(theirs) > 2:
        scores.append(0.8)
    same_section = "." in word and word.rpartition(".")[0] == known.rpartition(".")[0]
    return max(scores) + (0.03 if same_section else 0.0)


def did_you_mean(word: str, known: Iterable[str], form: str = "{}") -> str:
    """Return the end of a sentence that suggests the nearest known words; empty if none is near."""
    found = [form.format(each) for each in nearest(word, known)]
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _last(key: str) -> str:
    return re.split(r"[./]", key)[-1].lower().replace("-", "_")


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()
