"""A mistake that several ranks see is printed once, by whichever launcher they were started; one's own always is."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from helixpipe.common.errors import UserError
from helixpipe.common.ports import free_port
from megatron.pretrain.process import once
from schedules import command
from tests.integration.forked import Forked
from tests.integration.launching import MOCK, Launch

SAID = "helixpipe: --lr is wrong."


def said(how: str, ranks: int = 2, served: bool = True, **environment: str) -> list[str]:
    """Lines that such ranks print. served: a launcher keeps a store, as torchrun does."""
    if not served:
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}
    launch = Launch(how, how, ranks=ranks, script="tests/integration/complains.py")
    result = Forked(launch, **environment).wait()
    assert result.status == (1 if how.startswith("memory") else 2), result.output
    return result.output.splitlines()


@pytest.mark.parametrize("served", [True, False], ids=["torchrun", "no launcher"])
@pytest.mark.parametrize("when", ["early", "late"])
def test_whoever_comes_first_speaks_for_all(when: str, served: bool) -> None:
    assert said(f"{when} 0,1,2,3", ranks=4, served=served) == [SAID]


@pytest.mark.parametrize("served", [True, False], ids=["torchrun", "no launcher"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_what_one_rank_alone_sees_is_said(rank: str, served: bool) -> None:
    assert said(f"early {rank}", served=served) == [SAID]


def test_every_rank_has_its_own_sentence() -> None:
    lines = said("early own,0,1")
    assert sorted(lines) == [f"helixpipe: --lr of rank {rank} is wrong." for rank in (0, 1)]


def test_ranks_that_cannot_meet_speak_for_their_host() -> None:
    assert said("meeting 0,1,2", ranks=3) == [SAID]
    assert said("early 0,1", MASTER_PORT="none") == [SAID]


def test_another_attempt_of_the_job_says_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun's store outlives the ranks that it starts anew."""
    counts: Counter[str] = Counter()

    def add(key: str, number: int) -> int:
        counts[key] += number
        return counts[key]

    monkeypatch.setattr(once, "_store", lambda *_: SimpleNamespace(add=add))
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    for attempt in ("0", "0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        once.tell("helixpipe", UserError("--lr is wrong."))
    assert capsys.readouterr().err.splitlines() == [SAID, SAID]


def test_memory_of_the_host_is_told_once_with_what_would_help() -> None:
    (line,) = said("memory 0,1")
    assert line.startswith("helixpipe: rank ")
    assert ": this host is out of memory (3725290.3 GiB more were asked for); a rank needs up to " in line


def test_flags_that_are_wrong() -> None:
    result = Forked(Launch("flags", f"{MOCK} --pipeline-model-parallel-size 2 --train-iters 4 --lr fast")).wait()
    assert result.output == "helixpipe: --lr: 'fast' is not a number.\n" and result.status == 2


def test_a_program_of_ones_own_flags() -> None:
    result = Forked(Launch("tools", "--max-new-tokens 1", script="tools/generate.py")).wait()
    assert result.output == "helixpipe: --load is needed: the folder of the model's checkpoints.\n"
    result = Forked(Launch("tools", f"{MOCK} --train-iters 1 --preflight-slow 2", script="tools/preflight.py")).wait()
    assert result.output == "preflight.py: --preflight-slow 2 must be at least 0 and below 1.\n"


def test_helixpipe_train(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert command.main(["train", "-p", "2", "--lr", "fast"]) == 2
    assert capfd.readouterr().err == "helixpipe: --lr: 'fast' is not a number.\n"
