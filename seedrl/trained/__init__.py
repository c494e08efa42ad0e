"""What can be done with a policy once it is trained: export it, film it, describe it. Trains nothing."""
