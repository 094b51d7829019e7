"""Follows the position of each rank in its instructions, and says which rank holds up which when nothing moves."""
