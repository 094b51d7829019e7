"""A run that watches itself: what is slower than it was, what that costs, and whether another order would be faster."""
