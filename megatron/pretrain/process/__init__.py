"""This process among the others: groups, signals, stall watching, output, lifetime."""
