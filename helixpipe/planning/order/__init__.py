"""What schedules find their orders with: chunks, divisions of the layers, list scheduling and other searches."""
