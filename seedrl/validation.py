"""Refuses settings that cannot work, alone or together, before anything is started. Knows no machine."""

import math

from seedrl.algorithms.settings import ALGORITHMS, REPLAYING, AlgorithmConfig
from seedrl.config import (
    MISSING,
    MODELS,
    ActorConfig,
    Engine,
    EvalConfig,
    LearnerConfig,
    Placement,
    RunConfig,
    ServeConfig,
)
from seedrl.errors import require
from seedrl.league_settings import check_league, check_teacher
from seedrl.plugins import check_name, is_import_path, is_own
from seedrl.sizes import (
    can_be_on_policy,
    group_size,
    serving_ranks,
    trained_envs,
)
from seedrl.store_settings import check_source, check_store
from seedrl.wire.address import check_address
from seedrl.wire.security import (
    check_actor_security,
    check_learner_security,
    check_websocket_security,
    is_socket,
    is_wildcard,
)


def check(config: LearnerConfig) -> None:
    """Refuse settings of a learner that cannot work."""
    _check_algorithm(config)
    check_store(config)
    check_source(config)
    _check_exploration(config)
    _check_run(config)
    _check_serving(config)
    _check_environments(config)
    check_league(config)
    check_teacher(config)
    _check_ranks(config)
    _check_actors(config)
    _check_model(config)
    if config.listen:
        check_address("listen", config.listen)
    check_learner_security(config)


def _check_algorithm(config: LearnerConfig) -> None:
    algorithm = config.algorithm
    require(algorithm.unroll_length >= 1, f"algorithm.unroll_length={algorithm.unroll_length} must be at least 1")
    require(algorithm.batch_size >= 1, f"algorithm.batch_size={algorithm.batch_size} must be at least 1")
    require(algorithm.passes >= 0, f"algorithm.passes={algorithm.passes} must not be negative")
    require(algorithm.minibatches >= 0, f"algorithm.minibatches={algorithm.minibatches} must not be negative")
    require(
        not algorithm.on_policy or can_be_on_policy(config),
        f"algorithm.on_policy=true needs store.select=fifo, one rank, a fixed number of actors, and an "
        f"algorithm.batch_size that is a multiple of the environments that are trained on, not {algorithm.batch_size}",
    )
    _check_replaying(config)
    require(0 <= algorithm.discount <= 1, f"algorithm.discount={algorithm.discount} must be between 0 and 1")
    require(algorithm.learning_rate > 0, f"algorithm.learning_rate={algorithm.learning_rate} must be positive")


def _check_replaying(config: LearnerConfig) -> None:
    """Refuse an algorithm that learns from replay without any, or with settings that cannot work."""
    algorithm, name = config.algorithm, config.algorithm.name
    require(
        name not in REPLAYING or config.store.select != "fifo",
        f"algorithm.name={name} has to train on every unroll many times, and store.select=fifo hands each out once; "
        f"algorithm={name} (without .name) also sets the store, or set store.select=uniform",
    )
    require(
        name not in REPLAYING or not algorithm.on_policy,
        f"algorithm.on_policy=true leaves out what older policies did, and algorithm.name={name} learns from that",
    )
    _check_dqn(algorithm)
    _check_sac(config)


def _check_dqn(algorithm: AlgorithmConfig) -> None:
    own = algorithm.dqn
    require(own.n_steps >= 1, f"algorithm.dqn.n_steps={own.n_steps} must be at least 1")
    require(own.target_period >= 1, f"algorithm.dqn.target_period={own.target_period} must be at least 1")
    require(0 <= own.eta <= 1, f"algorithm.dqn.eta={own.eta} must be between 0 and 1")
    require(
        0 <= 2 * own.burn_in < algorithm.unroll_length,
        f"algorithm.dqn.burn_in={own.burn_in} must be 0 or more, and less than half of "
        f"algorithm.unroll_length={algorithm.unroll_length}",
    )


def _check_sac(config: LearnerConfig) -> None:
    own, model, is_chosen = config.algorithm.sac, config.model, config.algorithm.name == "sac"
    require(own.n_steps >= 1, f"algorithm.sac.n_steps={own.n_steps} must be at least 1")
    require(0 < own.target_rate <= 1, f"algorithm.sac.target_rate={own.target_rate} must be above 0 and at most 1")
    require(0 < own.temperature < math.inf, f"algorithm.sac.temperature={own.temperature} must be positive and finite")
    require(
        not is_chosen or is_import_path(model.name) or (model.squash and model.state_std),
        "algorithm.name=sac needs model.squash=true and model.state_std=true; algorithm=sac (without .name) sets both",
    )
    require(
        not is_chosen or not (model.lstm or model.gru),
        "algorithm.name=sac has critics without a memory; set model.lstm=0 and model.gru=0",
    )


def _check_exploration(config: LearnerConfig) -> None:
    own = config.exploration
    require(0 <= own.temperature < math.inf, f"exploration.temperature={own.temperature} must be finite, not negative")
    require(0 <= own.epsilon <= 1, f"exploration.epsilon={own.epsilon} must be between 0 and 1")
    require(
        own.epsilon_end is None or 0 <= own.epsilon_end <= 1,
        f"exploration.epsilon_end={own.epsilon_end} must be between 0 and 1, or null",
    )
    require(0 < own.decay <= 1, f"exploration.decay={own.decay} must be above 0 and at most 1")
    require(0 <= own.ladder < math.inf, f"exploration.ladder={own.ladder} must be finite and not negative")
    require(
        own.temperature > 0 or own.epsilon > 0 or bool(own.epsilon_end),
        "exploration.temperature=0 takes the best choice always, so nothing would explore; set exploration.epsilon",
    )


def _check_run(config: LearnerConfig) -> None:
    require(config.stop.env_steps >= 1, f"stop.env_steps={config.stop.env_steps} must be at least 1")
    require(config.checkpoint.keep >= 1, f"checkpoint.keep={config.checkpoint.keep} must be at least 1")
    require(config.checkpoint.milestones >= 0, f"checkpoint.milestones={config.checkpoint.milestones} is negative")
    require(config.report.video_seconds >= 0, f"report.video_seconds={config.report.video_seconds} is negative")
    require(config.max_restarts >= 0, f"max_restarts={config.max_restarts} must not be negative")
    require(config.seed >= 0, f"seed={config.seed} must not be negative")
    require(config.threads >= 0, f"threads={config.threads} must not be negative")
    classes = [path.partition(":")[2] for path in config.callbacks]
    for name, options in config.callback_options.items():
        require(name in classes, f"callback_options has {name}, which is no class of callbacks={config.callbacks}")
        require(isinstance(options, dict), f"callback_options.{name}={options} must be {{key: value}}")
    require(not config.socket or is_socket(config.socket), f"socket={config.socket} must be unix:PATH")


def _check_serving(config: LearnerConfig) -> None:
    serving = config.serving
    require(
        0 < serving.min_rows <= serving.max_rows,
        f"serving.min_rows={serving.min_rows} must be between 1 and serving.max_rows={serving.max_rows}",
    )
    require(
        serving.min_rows <= serving.max_slots,
        f"serving.min_rows={serving.min_rows} can never be reached: serving.max_slots={serving.max_slots}",
    )
    require(0 <= serving.max_wait < math.inf, f"serving.max_wait={serving.max_wait} must be finite and not negative")
    require(serving.max_silence >= 0, f"serving.max_silence={serving.max_silence} must not be negative")
    for name in ("max_observation", "max_reward"):
        require(getattr(serving, name) > 0, f"serving.{name}={getattr(serving, name)} must be more than 0")


def _check_environments(config: LearnerConfig) -> None:
    actors, slots = config.actors, config.serving.max_slots
    require(config.env.frame_stack >= 1, f"env.frame_stack={config.env.frame_stack} must be at least 1")
    require(
        actors.envs >= 1 and actors.groups >= 1 and actors.envs % actors.groups == 0,
        f"actors.groups={actors.groups} must divide actors.envs={actors.envs}",
    )
    players = config.env.players
    require(
        players >= 1 and group_size(config) % max(1, players) == 0,
        f"env.players={players} must divide actors.envs={actors.envs} / actors.groups={actors.groups}: "
        "the players of a simulation are in one group",
    )
    require(
        0 <= actors.evaluation < 1 and trained_envs(config) > 0,
        f"actors.evaluation={actors.evaluation} of actors.envs={actors.envs} leaves no environment to train on",
    )
    require(
        actors.envs <= slots,
        f"actors.envs={actors.envs} is more than serving.max_slots={slots}: no actor could ever join",
    )


def _check_actors(config: LearnerConfig) -> None:
    actors, slots, ranks = config.actors, config.serving.max_slots, serving_ranks(config)
    require(actors.count >= 0, f"actors.count={actors.count} must not be negative")
    require(
        actors.at_most == 0 or actors.at_most >= actors.count,
        f"actors.at_most={actors.at_most} is less than actors.count={actors.count}; 0 keeps actors.count",
    )
    for setting, count in (("actors.count", actors.count), ("actors.at_most", actors.at_most)):
        require(
            math.ceil(count / ranks) * actors.envs <= slots,
            f"{setting}={count} × actors.envs={actors.envs} is more than serving.max_slots={slots}"
            + (f" of {ranks} ranks" if ranks > 1 else ""),
        )
    require(not config.lockstep or actors.count == 1, f"lockstep=true needs actors.count=1, not {actors.count}")
    require(
        not config.lockstep or actors.at_most <= 1,
        f"lockstep=true needs one actor, not actors.at_most={actors.at_most}",
    )


def _check_model(config: LearnerConfig) -> None:
    model = config.model
    check_name("model.name", model.name, MODELS)
    check_name("algorithm.name", config.algorithm.name, ALGORITHMS)
    require(min(model.lstm, model.gru) >= 0, f"model.lstm={model.lstm} or model.gru={model.gru} is negative")
    require(not (model.lstm and model.gru), f"model.lstm={model.lstm} and model.gru={model.gru}: one has to be 0")
    require(
        not (model.separate and (model.lstm or model.gru)),
        "model.separate=true gives values a network without a memory; set model.lstm=0 and model.gru=0",
    )
    require(min(model.layers, default=1) >= 1, f"model.layers={model.layers} must be positive")
    if config.compile:
        _check_compiled(config)


def _check_compiled(config: LearnerConfig) -> None:
    """Refuse to compile what would be compiled again and again, or what promises to be exact."""
    model, ranks = config.model, config.ranks
    require(
        not (model.lstm or model.gru),
        f"compile=true is for networks without a memory, not model.lstm={model.lstm} model.gru={model.gru}: how many "
        "rows a core runs depends on resets, so that torch would compile it again and again",
    )
    require(
        not config.lockstep,
        "compile=true rounds differently from the network that acts, so that lockstep=true could not promise runs that "
        "are the same bit for bit; set one of them to false",
    )
    require(
        ranks.count == 1,
        f"compile=true needs ranks.count=1, not {ranks.count}: a compiled backward pass has all gradients at its end, "
        "and ranks exchange theirs while it runs",
    )


def check_job(config: RunConfig) -> None:
    """Refuse a job that its engine could not run on any machines."""
    check(config)
    check_placement(config)
    require(
        not config.source or config.launch.engine is Engine.local,
        f"source={config.source} trains on this machine: launch.engine={config.launch.engine.name} is not supported",
    )
    if config.launch.engine is Engine.ray:
        _check_on_ray(config)
    else:
        _check_on_this_machine(config)


def _check_on_this_machine(config: RunConfig) -> None:
    ranks, actors, per_node = config.ranks, config.actors, config.launch.per_node
    require(
        not is_own(config.env.id) or not actors.count,
        f"env.id={config.env.id}: actors bring this environment, so `seedrl run` cannot start them; start the learner "
        "alone with `seedrl learner`, or set actors.count=0",
    )
    require(
        ranks.count == 1 or config.launch.engine is not Engine.local,
        f"ranks.count={ranks.count} needs an engine that starts several ranks: launch=torchrun on this machine, "
        "launch=ray on a cluster",
    )
    require(
        actors.count >= serving_ranks(config) or not actors.count,
        f"actors.count={actors.count} leaves some of ranks.count={ranks.count} without an actor, "
        "so that they would train on nothing: start at least one per rank",
    )
    most = max(actors.count, actors.at_most)
    require(
        not per_node or most <= per_node,
        f"launch.per_node={per_node} is less than the {most} actors on this machine; launch=ray uses several machines",
    )


def _check_on_ray(config: RunConfig) -> None:
    launch, actors = config.launch, config.actors
    bound = [
        *(["launch.placement=[collocate]"] if Placement.collocate in launch.placement else []),
        *([f"launch.per_node={launch.per_node}"] if launch.per_node else []),
    ]
    require(
        actors.at_most <= actors.count or not bound,
        f"actors.at_most={actors.at_most} and {' and '.join(bound)} contradict each other: Ray places actors that "
        "it starts later wherever there is room; remove one of them",
    )


def check_placement(config: RunConfig) -> None:
    """Refuse placement that no set of machines could satisfy."""
    launch = config.launch
    require(launch.per_node >= 0, f"launch.per_node={launch.per_node} must not be negative")
    for name, role in (("learner", launch.learner), ("actor", launch.actor)):
        require(
            min(role.cpus, role.gpus, role.memory_gb) >= 0,
            f"launch.{name}: cpus, gpus and memory_gb must not be negative",
        )


def _check_ranks(config: LearnerConfig) -> None:
    ranks = config.ranks
    require(ranks.count >= 1, f"ranks.count={ranks.count} must be at least 1")
    require(ranks.sync_every >= 1, f"ranks.sync_every={ranks.sync_every} must be at least 1")
    require(ranks.timeout > 0, f"ranks.timeout={ranks.timeout} must be positive")
    require(
        not ranks.separate or ranks.count == 2,
        f"ranks.separate=true needs two ranks, one that serves and one that trains: ranks.count=2, not {ranks.count}",
    )
    require(
        ranks.count == 1 or ranks.separate or bool(ranks.advertise) or not is_wildcard(config.listen),
        f"listen={config.listen} is not an address that actors could be sent to: set ranks.advertise=HOST",
    )
    require(not config.lockstep or ranks.count == 1, f"lockstep=true needs ranks.count=1, not {ranks.count}")


def check_actor(config: ActorConfig) -> None:
    require(
        config.learner not in ("", MISSING), "the actor needs the learner's address: seedrl actor learner=HOST:PORT"
    )
    check_address("learner", config.learner)
    require(config.patience >= 0, f"patience={config.patience} must not be negative")
    require(config.step_deadline > 0, f"step_deadline={config.step_deadline} must be positive")
    require(config.max_env_failures >= 0, f"max_env_failures={config.max_env_failures} must not be negative")
    check_actor_security(config)


def check_eval(config: EvalConfig) -> None:
    require(config.episodes >= 1, f"episodes={config.episodes} must be at least 1")
    require(config.seeds >= 1, f"seeds={config.seeds} must be at least 1")
    require(config.seed >= 0, f"seed={config.seed} must not be negative")
    require(config.envs >= 0, f"envs={config.envs} must not be negative")
    require(1 <= config.actors <= config.episodes, f"actors={config.actors} must be 1 to episodes={config.episodes}")


def check_serve(config: ServeConfig) -> None:
    """Refuse settings of `seedrl serve` that cannot work; address and security are checked like a learner's."""
    require(config.envs >= 0, f"envs={config.envs} must not be negative")
    require(config.max_slots >= 1, f"max_slots={config.max_slots} must be at least 1")
    if config.websocket:
        check_address("websocket", config.websocket)
        require(not is_socket(config.websocket), f"websocket={config.websocket} must be HOST:PORT")
        check_websocket_security(config.websocket, config.security)
    require(config.seed >= 0, f"seed={config.seed} must not be negative")
