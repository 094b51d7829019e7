"""What schedules are found with, in folders: memory, then the catalogue, order, reorder, documents and search."""
