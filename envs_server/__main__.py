"""`python -m envs_server`: the same as `seedrl actor`."""

import sys

from seedrl.commandline.main import execute

execute("actor", sys.argv[1:])
