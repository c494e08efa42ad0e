"""seedrl: central inference for reinforcement learning. Importing this package imports neither torch nor grpc."""

__version__ = "0.1.0"
