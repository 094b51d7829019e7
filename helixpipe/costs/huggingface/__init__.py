"""A Hugging Face model's config.json as the training program's flags, and back; and the model's shape."""
