"""Modules that are left out, for the host's time, give what they give when they are called."""

from __future__ import annotations

from tests.distributed import run_ranks
from tests.model import direct


def test_equal_to_the_last_bit_and_hooks_run() -> None:
    """Loss and every parameter's gradient; a module with a hook is called, once a forward."""
    (results,) = run_ranks(direct.compare, 1)
    for (case, deferred), (wrong, called) in results.items():
        assert not wrong, (case, deferred, wrong)
        modules = {"input_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj", "pre_mlp_layernorm"}
        modules |= {"mlp", "mlp.linear_fc1", "mlp.linear_fc2"}
        expected = {f"{layer}.{module}" for layer in range(2) for module in modules}
        assert {name for name, count in called.items() if count == 1} >= expected, (case, called)
