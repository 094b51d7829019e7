"""The process in its job: process groups, signals, stall watching, output, lifetime."""
