"""The means by which schedules find their orders: chunks, divisions of the layers, list scheduling
and other searches.
"""
