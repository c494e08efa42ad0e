"""Who starts the processes of a run, and where: one file for each engine. No scheduler and no rendezvous of our own."""
