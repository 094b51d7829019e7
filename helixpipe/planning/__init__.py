"""What schedules are found with: the catalogue's types, list scheduling, choices of recomputation and of chunks."""
