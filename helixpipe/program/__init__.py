"""A pipeline schedule as data: stages, ops, messages, costs as a protocol, timelines."""
