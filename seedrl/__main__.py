"""`python -m seedrl`."""

from seedrl.commands import main

main()
