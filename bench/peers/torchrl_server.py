# /// script
# dependencies = ["torch==2.13.0", "torchrl==0.14.1", "numpy==2.4.6"]
# ///
"""TorchRL's InferenceServer answering 32 clients that ask with ready-made frames: rows a second, nothing is trained.

Fair because: its recommended transport, with clients in threads of the same process, which is the fastest it has; the
Nature CNN; both cores for the network. A client asks for one environment: the server has no request of several.
"""

import threading
import time

import torch
from meter import Meter, arguments
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules.inference_server import InferenceServer

CLIENTS = 32


class Network(nn.Module):
    """The Nature CNN, answering with a sampled action, its logits and a value."""

    def __init__(self, actions: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(4, 32, 8, stride=4), nn.ReLU()),
            *(nn.Conv2d(32, 64, 4, stride=2), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3, stride=1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU()),
        )
        self.policy, self.value = nn.Linear(512, actions), nn.Linear(512, 1)

    @torch.no_grad()
    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.body(frames / 255.0)
        logits = self.policy(hidden)
        return logits.softmax(-1).multinomial(1), logits, self.value(hidden)


class Client(threading.Thread):
    """Asks again as soon as it is answered. `rows` is written by this thread only."""

    def __init__(self, server: InferenceServer) -> None:
        super().__init__(daemon=True)
        self._ask = server.client()
        self.rows = 0

    def run(self) -> None:
        frames = torch.randint(0, 256, (4, 84, 84), dtype=torch.uint8)
        while True:
            self._ask(TensorDict({"frames": frames}))["action"].item()
            self.rows += 1


def main() -> None:
    asked = arguments()
    assert asked.env == "inference", "this adapter serves only"
    policy = TensorDictModule(Network(), in_keys=["frames"], out_keys=["action", "logits", "value"])
    with InferenceServer(policy, transport="auto") as server:
        clients = [Client(server) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        meter = Meter(asked, warm_up=2.0)
        while not meter.update(sum(client.rows for client in clients)):
            time.sleep(0.05)
        meter.finish()


if __name__ == "__main__":
    main()
