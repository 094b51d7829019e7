"""Models as Hugging Face folders: their files, the names and layouts of their weights."""
