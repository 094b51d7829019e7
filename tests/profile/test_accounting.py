"""What the account of saved bytes counts, and until when."""

from __future__ import annotations

import torch

from benchmarks.accounting import SavedBytes


def test_a_storage_counts_once_while_autograd_or_a_holder_keeps_it() -> None:
    weight, input = torch.ones(4, 4, requires_grad=True), torch.ones(2, 4)
    with SavedBytes(ignore=[weight]) as account:
        output = input @ weight
        assert account.now == 32
        holder = account.hold(input.t())
        other = account.hold(torch.ones(3))
        assert account.now == 32 + 12
        output.sum().backward()
        assert account.now == 32 + 12
        del holder
        assert account.now == 12
        del other
    assert (account.now, account.peak) == (0, 44)


def test_a_storage_that_was_let_go_of_counts_no_longer() -> None:
    account = SavedBytes()
    emptied, exchanged = torch.ones(4), torch.ones(8)
    holders = [account.hold(emptied), account.hold(exchanged)]
    assert account.now == 16 + 32
    emptied.untyped_storage().resize_(0)
    exchanged.data = torch.ones(1)
    assert account.now == 0
    emptied.untyped_storage().resize_(16)
    assert account.now == 16
    del holders
    assert (account.now, account.peak) == (0, 48)


def test_what_passes_by_does_not_count_while_it_does() -> None:
    """As weights that travel: a tensor is one of them, or not, when it is saved."""
    input, copy = torch.ones(4, requires_grad=True), torch.ones(4)
    passing = [copy]
    with SavedBytes(passing=lambda: passing) as account:
        first = input * copy
        assert account.now == 0
        passing.clear()
        second = input * copy
        assert account.now == 16
    del first, second
    assert account.now == 0
