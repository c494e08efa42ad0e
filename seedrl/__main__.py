"""`python -m seedrl`."""

from seedrl.commandline.main import main

main()
