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
        modules |= {"core_attention", "mlp", "mlp.linear_fc1", "mlp.linear_fc2"}
        expected = {f"{layer}.{module}" for layer in range(2) for module in modules}
        assert {name for name, count in called.items() if count == 1} >= expected, (case, called)


def test_only_a_weight_that_stays_is_kept_by_autograd() -> None:
    """One that is gathered before an op and let go of after it, or travels, would be there until the backward."""
    (results,) = run_ranks(direct.products, 1)
    nodes, kept = ({case: result[number] for case, result in results.items()} for number in range(2))
    assert kept == {"as made": True, "moves": False, "put off": False, "its own": True}
    assert "Linear" not in nodes["as made"] and nodes["its own"].startswith("Mul")
    assert nodes["moves"] == "LinearWithGradAccumulationAndAsyncCommunicationBackward"
    assert nodes["put off"] == "_LinearBackward"


def test_who_watches_or_replaces_modules_is_heard() -> None:
    (results,) = run_ranks(direct.watched, 1)
    assert results == {"seen": ["ColumnParallelLinear", "RowParallelLinear", "MLP"], "replaced": ["replaced"]}
