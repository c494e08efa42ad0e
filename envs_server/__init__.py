"""The actor: steps environments, streams observations, holds no model. Never imports torch.

With your own environments: from envs_server import Actor; Actor("host:port", make_env).run()
To examine them before: from envs_server import check_env; check_env(make_env)
"""

import os

# Some environments fork, from several threads at once: Doom's do. gRPC's own handlers of that abort the process then,
# and no forked process here uses gRPC. It is read when grpc is imported first.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from envs_server.actor import Actor
from envs_server.examination import check_env

__all__ = ["Actor", "check_env"]
