"""What a trained model says: text that it writes, and how well it predicts text far from the beginning."""
