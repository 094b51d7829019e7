"""A lowered program run on paper: time, bubble, memory."""
