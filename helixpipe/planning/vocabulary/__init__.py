"""The head over the pipeline: programs in which every rank has a share of its work."""
