"""These tests register a device for good, so that tests/test_accelerator.py runs them in processes of their own."""

import os

collect_ignore_glob = [] if os.environ.get("SEEDRL_SIMULATED_ACCELERATOR") else ["test_*.py"]

if not collect_ignore_glob:
    import torch

    torch.set_num_threads(1)
