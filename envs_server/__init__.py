"""The actor: steps environments, streams observations, holds no model. Never imports torch.

With your own environments: from envs_server import Actor; Actor("host:port", make_env).run()
"""

from envs_server.actor import Actor

__all__ = ["Actor"]
