"""Processes to be killed: forked from a server that has imported everything once, so that each costs milliseconds."""

import multiprocessing

processes = multiprocessing.get_context("forkserver")  # whoever asks, there is one such server
processes.set_forkserver_preload(["tests.test_checkpoint", "tests.test_context", "pytest"])
