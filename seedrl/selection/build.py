"""From `store.*` settings to a selector. The one place that knows the built-in ones by name."""

from collections.abc import Callable

from seedrl import plugins
from seedrl.config import LearnerConfig
from seedrl.errors import ConfigError
from seedrl.selection.base import Selector
from seedrl.selection.fifo import Fifo, Fresh
from seedrl.selection.limiter import Limiter
from seedrl.selection.mixed import Mixed
from seedrl.selection.priority import Proportional
from seedrl.selection.replay import Replay
from seedrl.selection.ring import Chooser, Ring
from seedrl.selection.uniform import Uniform
from seedrl.sizes import store_capacity, store_tolerance

METHODS = ("add", "can_pick", "pick", "done", "evict", "prefer")
INHERITED = ("may_add", "limits", "take_dropped", "known", "arrays", "load")


def build_selector(
    config: LearnerConfig, updates: Callable[[], int] = lambda: 0, fraction: Callable[[], float] = lambda: 0.0
) -> Selector:
    """Return the selector that the settings name.

    `updates` is the version of the newest policy, and `fraction` how much of the run is over, for schedules.
    """
    store, batch_size = config.store, config.algorithm.batch_size
    if plugins.is_import_path(store.select):
        return _own(config)
    if store.select == "fifo":
        return Fresh() if config.algorithm.on_policy else Fifo()
    capacity = store_capacity(config)
    ring = Ring(capacity, config.serving.max_slots + capacity, _chooser(config, fraction), store.max_uses)
    if store.select == "mixed":
        return Mixed(
            ring,
            batch_size=batch_size,
            replay_share=store.replay_share,
            max_staleness=store.max_staleness,
            updates=updates,
        )
    limiter = Limiter(batch_size, store.min_size, store.samples_per_insert, store_tolerance(config))
    return Replay(ring, limiter, batch_size=batch_size, max_staleness=store.max_staleness, updates=updates)


def _chooser(config: LearnerConfig, fraction: Callable[[], float]) -> Chooser:
    capacity, priority = store_capacity(config), config.store.priority
    if config.store.select != "priority":
        return Uniform(capacity, config.seed)

    def beta() -> float:
        return priority.beta + min(1.0, fraction()) * (priority.beta_end - priority.beta)

    return Proportional(capacity, config.seed, priority.alpha, beta)


def _own(config: LearnerConfig) -> Selector:
    name = config.store.select
    sizes = (store_capacity(config), config.algorithm.batch_size, config.seed)
    selector: Selector = plugins.build("store.select", name, *sizes, **config.store.options)
    missing = [method for method in METHODS if not callable(getattr(selector, method, None))]
    if missing:
        raise ConfigError(f"store.select={name} has no {', '.join(missing)}; seedrl/selection/base.py explains each")
    if not all(hasattr(selector, method) for method in INHERITED):
        raise ConfigError(f"store.select={name} does not derive from seedrl.selection.base.Selector")
    return selector
