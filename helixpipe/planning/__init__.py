"""The means by which schedules are found, in folders: memory, then the catalogue, order, reorder,
documents and search.
"""
