"""`python -m envs_server`: the same as `seedrl actor`."""

import sys

from seedrl.commands import execute

execute("actor", sys.argv[1:])
