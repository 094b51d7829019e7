"""Where each rank stands in its instructions, and who keeps whom waiting when nothing moves."""
