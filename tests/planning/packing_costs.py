"""Costs of a small model on named hardware, for tests of packing."""

from helixpipe.cli.model import ModelOptions, make_plan

PLAN = make_plan(ModelOptions(model="infinipipe-7b", hardware="a800", seq_length=32768), 2, None, 4)
assert PLAN is not None
MODEL_COSTS = PLAN.costs
