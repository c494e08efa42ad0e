"""The command line: how a line is read, checked and completed, its help, and sweeps of many runs.

`seedrl/commands.py` has the commands themselves.
"""
