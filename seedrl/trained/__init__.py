"""Uses of a trained policy: run it, export it, record videos of it, describe it. Nothing here trains."""
