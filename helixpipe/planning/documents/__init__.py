"""Steps over documents of all lengths: dealt over pipelines, packed into rows of chunks, cut alike."""
