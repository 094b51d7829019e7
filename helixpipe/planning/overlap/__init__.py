"""Forwards beside backwards of other units, so that tensor-parallel collectives are hidden."""
