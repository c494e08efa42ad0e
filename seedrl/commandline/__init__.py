"""The command line: how a line is read, checked and completed, its help, and sweeps of many runs.

`main.py` runs a line; `seedrl/commands.py` has the commands themselves.
"""
