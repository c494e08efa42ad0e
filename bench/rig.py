"""The serving half of a learner, without learning: real server, sessions, batcher, inference and store.

What would train is replaced by a thread that frees finished unrolls, so that recording is paid for and training is not.
"""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.harness import Turn, children, cpu_seconds
from seedrl.config import LearnerConfig
from seedrl.metrics import ServingMetrics
from seedrl.policy import Policy
from seedrl.serving.batcher import Batcher
from seedrl.serving.inference import Answer, Inference
from seedrl.serving.server import Server
from seedrl.serving.sessions import Request, SessionTable
from seedrl.serving.slots import Slots
from seedrl.specs import EnvSpec
from seedrl.store import Store
from seedrl.types import ModelInput, ModelOutput
from seedrl.v1 import inference_pb2 as pb
