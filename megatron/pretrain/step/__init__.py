"""A training step around the pipeline: model, gradients, update, learning rate, batch size."""
