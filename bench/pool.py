"""The ceiling: envpool alone, by environment, threads and groups in flight."""

import numpy as np

from bench.harness import Report, for_a_while, interleave, median, per_cpu, per_second
from envs_server.pool import EnvPool
from seedrl.config import BenchConfig
from seedrl.wire.messages import Welcome

ENVS = {"Pong-v5": ({"stack_num": 1}, 32), "CartPole-v1": ({}, 256)}


def run(config: BenchConfig) -> Report:
    report = Report("pool")
    for env_id, (options, num_envs) in ENVS.items():
        works = {
            (threads, groups): Stepping(env_id, options, num_envs, threads, groups).step
            for threads in (1, 2)
            for groups in (1, 2)
        }
        turns = interleave(for_a_while(works, config.seconds), config.repeats)
        for (threads, groups), measured in turns.items():
            row = {"env": env_id, "envs": num_envs, "threads": threads, "groups": groups}
            rate, per_cpu_second = median(measured, per_second), median(measured, per_cpu)
            report.add({**row, "steps per second": rate, "steps per CPU-second": per_cpu_second})
    return report


class Stepping:
    """One group of environments after the other, always with the same action."""

    def __init__(self, env_id: str, options: dict[str, int], num_envs: int, threads: int, groups: int) -> None:
        job = Welcome(1, env_id, options, num_envs, num_envs // groups, seed=1)
        self._pool = EnvPool(job, threads)
        for _ in range(4 * groups):  # the first steps are resets
            self.step()

    def step(self) -> int:
        rows = self._pool.recv()
        self._pool.send(np.ones(len(rows.env_id), np.int32), rows.env_id)
        return len(rows.env_id)
