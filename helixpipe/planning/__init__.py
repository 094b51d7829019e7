"""Finds schedules and plans: the catalogue's types, list scheduling, choices of recomputation and of chunks."""
