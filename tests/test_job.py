"""The builder gives what the command line gives, and processes know who they are."""

import pytest

from seedrl.commands import compose
from seedrl.config import Engine, LaunchConfig, RoleConfig
from seedrl.errors import ConfigError
from seedrl.job import Job
from seedrl.launching.environment import variables
from seedrl.run.identity import Identity, identity


def test_builder_makes_exactly_what_the_command_line_makes() -> None:
    built = (
        Job()
        .env("Pong-v5", episodic_life=True)
        .learner(ranks=2, device="cpu", gpus=0.5, env={"OMP_NUM_THREADS": "2"})
        .actors(total=8, per_node=4, envs=64, at_most=16, cpus=2, selector={"pool": "cpu"})
        .place("collocate")
        .restarts(learner=7, actors=9)
        .environment(TZ="UTC")
        .on("ray", address="head:6379")
        .set("algorithm.learning_rate=1e-4", seed=3)
        .build()
    )
    words = """env=any env.id=Pong-v5 +env.options.episodic_life=true ranks.count=2 device=cpu launch.learner.gpus=0.5
        +launch.learner.env.OMP_NUM_THREADS='2' actors.count=8 actors.envs=64 actors.at_most=16 launch.per_node=4
        launch.actor.cpus=2 +launch.actor.selector.pool=cpu launch.placement=[per_node,collocate] max_restarts=7
        actors.max_restarts=9 +launch.env.TZ=UTC launch=ray launch.address='head:6379' algorithm.learning_rate=1e-4
        seed=3"""
    assert built.config == compose("run", words.split())
    assert built.config.launch.engine is Engine.ray


def test_builder_takes_presets_by_name() -> None:
    assert Job().env("pong").build().config == compose("run", ["env=pong"])


def test_builder_leaves_earlier_jobs_alone() -> None:
    job = Job().env("pong")
    job.actors(total=5)
    assert job.build().config.actors.count == 1


def test_builder_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match=r"ranks.count=0 must be at least 1"):
        Job().learner(ranks=0).build()


def test_variables_of_the_role_win_over_the_jobs_and_those_over_ours() -> None:
    launch = LaunchConfig(env={"A": "job", "B": "job"})
    ours = {"A": "ours", "B": "ours", "C": "ours"}
    assert variables(launch, RoleConfig(env={"A": "role"}), ours) == {"A": "role", "B": "job", "C": "ours"}


def test_identity_is_what_the_engine_says() -> None:
    said = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_NAME": "n7"}
    assert identity("learner", said) == Identity("learner", 3, 4, 1, "n7")
    assert str(identity("learner", said)) == "learner rank 3/4 on n7"
    assert str(identity("learner", {})) == "learner"
