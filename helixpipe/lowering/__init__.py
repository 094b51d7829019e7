"""From a program to each rank's instructions: what waits for what, what crosses ranks, one order, its projection."""
