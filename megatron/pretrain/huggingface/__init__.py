"""Models as Hugging Face folders: their files, their configuration, the names and layouts of their weights."""
