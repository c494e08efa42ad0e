"""PettingZoo's two interfaces, parallel and AEC, made to look like the one of envs_server/games.py.

Does not import PettingZoo: what has `possible_agents` is one of its environments. Players are numbered in that order.
"""

from typing import Any

from seedrl.errors import ConfigError

Stepped = tuple[dict[int, Any], dict[int, float], dict[int, bool], dict[int, bool], dict[int, dict[str, Any]]]


def adapted(env: Any) -> Any:
    """Return a simulation of PettingZoo with the interface of a Game; any other is one already."""
    if not hasattr(env, "possible_agents"):
        return env
    return TurnEnv(env) if hasattr(env, "agent_iter") else ParallelEnv(env)


class Named:
    """The players of an environment by name and by number, and their spaces, which have to be alike."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._names = list(env.possible_agents)
        self._number = {name: number for number, name in enumerate(self._names)}
        self.players = len(self._names)
        self.render_mode = getattr(env, "render_mode", None)
        self.observation_space = self._common("observation_space")
        self.action_space = self._common("action_space")

    def _common(self, kind: str) -> Any:
        spaces = [getattr(self._env, kind)(name) for name in self._names]
        for name, space in zip(self._names, spaces, strict=True):
            if space != spaces[0]:
                raise ConfigError(
                    f"all players need the same {kind}: {self._names[0]} has {spaces[0]}, {name} has {space}; "
                    "SuperSuit pads them"
                )
        return spaces[0]

    def _numbered(self, values: dict[Any, Any]) -> dict[int, Any]:
        return {self._number[name]: value for name, value in values.items()}

    def render(self) -> Any:
        return self._env.render()

    def close(self) -> None:
        self._env.close()


class ParallelEnv(Named):
    """All players act at once. One that ends is gone until the next game."""

    def reset(self, seed: int | None) -> tuple[dict[int, Any], dict[int, Any]]:
        observations, infos = self._env.reset(seed=seed)
        return self._numbered(observations), self._numbered(infos)

    def step(self, actions: dict[int, Any]) -> Stepped:
        named = {self._names[number]: action for number, action in actions.items()}
        observations, rewards, terminated, truncated, infos = map(self._numbered, self._env.step(named))
        return observations, rewards, terminated, truncated, infos


class TurnEnv(Named):
    """Players act one after the other: `agent_selection` is the one that acts next."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._over: set[Any] = set()  # players that have ended

    def reset(self, seed: int | None) -> tuple[dict[int, Any], dict[int, Any]]:
        self._env.reset(seed=seed)
        self._over = set()
        return self._seen(self._next())

    def step(self, actions: dict[int, Any]) -> Stepped:
        env = self._env
        (action,) = actions.values()
        env.step(action)
        rewards, terminated, truncated = (
            self._numbered(dict(values)) for values in (env.rewards, env.terminations, env.truncations)
        )
        ended = {name for name in env.agents if env.terminations[name] or env.truncations[name]} - self._over
        self._over |= ended
        observations, infos = self._seen(ended)  # now: those that have ended are about to leave
        following, their_infos = self._seen(self._next())
        return {**following, **observations}, rewards, terminated, truncated, {**their_infos, **infos}

    def _next(self) -> set[Any]:
        """Return the player that acts next, if one is left; those that have ended are stepped once more before."""
        env = self._env
        while env.agents and env.agent_selection in self._over:
            env.step(None)
        return {env.agent_selection} if env.agents else set()

    def _seen(self, names: set[Any]) -> tuple[dict[int, Any], dict[int, Any]]:
        """Return the observations and infos of some players."""
        infos = self._env.infos
        observations = {name: self._env.observe(name) for name in names}
        return self._numbered(observations), self._numbered({name: infos.get(name, {}) for name in names})
