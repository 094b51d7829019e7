"""The search for how to run a model on so many GPUs: what there is to choose, bounds, trials by simulation, terms."""
