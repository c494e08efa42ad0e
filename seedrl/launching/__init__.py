"""Engines that start the processes of a run and place them, one file each. Scheduling and rendezvous are theirs."""
