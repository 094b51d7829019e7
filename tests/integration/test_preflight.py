"""tools/preflight.py: what it predicts, and how it names links that are dead or slow, within a time limit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helixpipe.cli.hardware import HardwareFlags, as_flags_say
from helixpipe.common.errors import UserError
from helixpipe.costs.hardware import HARDWARE
from netlab.hosts import Lab, unavailable
from netlab.job import Job
from tests.distributed import run_ranks
from tests.integration.forked import Forked
from tests.integration.launching import MOCK, ROOT, Launch
from tools.link_report import report, slow_links
from tools.links import Check, GlooPair, Link, RankLocation, limited, on_all_pipelines, rounds
from tools.preflight import Network, PreflightOptions, main

FLAGS = f"{MOCK} --train-iters 2"
CHAIN = [(0, 1), (1, 2), (2, 3)]
PLACES = [RankLocation("node17", 0, "gpu", 3), RankLocation("node18", 1, "gpu", 3), RankLocation("node19", 2, "gpu", 3)]


# ---------------------------------------------------------------------------------------------------------- prediction


def predicted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ranks: int, flags: str) -> str:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert main(["--preflight-predict-only", *FLAGS.split(), *flags.split()]) == 0
    return capsys.readouterr().out


def test_it_predicts_what_the_simulator_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 32768 "
        "--max-position-embeddings 32768 --vocab-size 50257 --bf16 --hardware h20 --tensor-model-parallel-size 8 "
        "--sequence-parallel --pipeline-model-parallel-size 2 --pipeline-schedule zb1p --global-batch-size 4"
    )
    ours = predicted(monkeypatch, capsys, 16, flags).splitlines()
    command = (
        "simulate zb1p --model helix-1.3b --seq-length 32768 --hardware h20 --nodes 2 --ranks 2 --tensor-parallel 8"
    )
    theirs = subprocess.run(
        [sys.executable, "-m", "schedules.command", *command.split(), "--global-batch-size", "4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    differ = [(a, b) for a, b in zip(ours, theirs, strict=False) if a != b]
    assert len(ours) > 15 and all(a.replace("the model", "helix-1.3b") == b for a, b in differ)


def test_a_slower_network_and_other_schedules(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--pipeline-model-parallel-size 16 --num-layers 16 --preflight-compare 1f1b zb1p helix"
    tables = [
        dict(re.findall(r"^  (1f1b|zb1p|helix) +(\S+)", predicted(monkeypatch, capsys, 16, f"{flags} {network}"), re.M))
        for network in ("--preflight-network-bandwidth 80", "--preflight-network-bandwidth 0.008")
    ]
    assert all(float(tables[1][name]) > 2 * float(tables[0][name]) for name in ("1f1b", "zb1p"))
    assert tables[0]["helix"] == tables[1]["helix"] == "helix", "helix needs …, in place of a time"


def test_predicting_does_without_torch() -> None:
    code = (
        "import sys; from tools.preflight import main; assert not main(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, *FLAGS.split()], cwd=ROOT, check=True, capture_output=True, timeout=280)


def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS.split(), "--pipeline-model-parallel-size", "3"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(UserError, match="--preflight-seconds must be a number above 0, not 0"):
        PreflightOptions(preflight_seconds=0)
    with pytest.raises(UserError, match="below 1"):
        PreflightOptions(preflight_slow=1.5)
    with pytest.raises(UserError, match=r"give --preflight-network-bandwidth in Gb/s of a node, 8\.8 for each of"):
        PreflightOptions(preflight_network=1.1)


@pytest.mark.parametrize("name", HARDWARE)
def test_a_network_is_in_one_unit_everywhere(name: str) -> None:
    """Gb/s of a node over its adapters: of the commands that plan and of the preflight."""
    flags = HardwareFlags(network_bandwidth=25, network_adapters=2)
    planned, measured = as_flags_say(HARDWARE[name], flags), Network(25, 2).of(HARDWARE[name])
    assert (planned.network, planned.adapters) == (measured.network, measured.adapters) == (25e9 / 8, 2)


# ---------------------------------------------------------------------------------------------------- links on paper


def test_rounds_have_each_rank_once() -> None:
    assert rounds([(1, 0), (0, 1), (1, 2), (3, 2)]) == [[(0, 1), (2, 3)], [(1, 2)]]
    everyone = [(a, b) for a in range(8) for b in range(8) if a != b]
    order = rounds(everyone)
    assert sorted(pair for each in order for pair in each) == [(a, b) for a, b in everyone if a < b]
    assert all(len({rank for pair in each for rank in pair}) == 2 * len(each) for each in order)


def test_pipelines_lie_side_by_side() -> None:
    assert on_all_pipelines([[(0, 1)], [(1, 2)]], ranks=3, world=6) == [[(0, 2), (1, 3)], [(2, 4), (3, 5)]]


def test_slow_and_dead_links_are_named() -> None:
    speeds = {(0, 1): 3.1e9, (1, 0): 15.5e9, (1, 2): 15.5e9}
    links = [Link(*ends, bandwidth=speed, latency=2e-5) for ends, speed in speeds.items()]
    links.append(Link(2, 1, failure="nothing has come for 60 s"))
    assert slow_links(links, PLACES, 0.5) == {links[0]: 0.2} and not slow_links(links, PLACES, 0.1)
    assert report(links, PLACES, 0.5)[1:] == [
        "  SLOW node17 gpu3 (rank 0) -> node18 gpu3 (rank 1): 24.8 Gb/s, 0.20 of the median",
        "  DEAD node19 gpu3 (rank 2) -> node18 gpu3 (rank 1): nothing has come for 60 s",
    ]


def test_links_within_a_node_are_compared_with_each_other() -> None:
    places = [RankLocation("a", 0, "gpu", 0), RankLocation("a", 0, "gpu", 1), RankLocation("b", 1, "gpu", 0)]
    links = [Link(0, 1, 200e9, 1e-5), Link(1, 0, 200e9, 1e-5), Link(1, 2, 10e9, 1e-5), Link(2, 1, 10e9, 1e-5)]
    assert not slow_links(links, places, 0.5)


def test_what_takes_too_long_is_left_to_itself() -> None:
    assert limited(lambda: 3, 60.0) == 3
    with pytest.raises(TimeoutError, match="nothing has come"):
        limited(lambda: time.sleep(60), 0.05)
    with pytest.raises(ValueError, match="no number"):
        limited(lambda: _fail(ValueError("no number")), 60.0)


def _fail(error: Exception) -> None:
    raise error


# ---------------------------------------------------------------------------------------------------- links for real


def check(rank: int, world: int, ill: int, gone: bool) -> list[tuple[int, int, str]]:
    """A check in which rank `ill` hangs as soon as it is to connect, or is gone. Rank 0 returns what it found."""
    if rank == ill and gone:
        return []
    patience = 60.0 if ill < 0 else 5.0  # with all of them well nothing waits for as long
    make: Any = dist.PrefixStore  # type: ignore[attr-defined]  # torch does not say that it exports it
    store = make("links", dist.distributed_c10d._get_default_store())

    def connect(name: str, peer: int, first: bool) -> GlooPair:
        if rank == ill:
            time.sleep(600)
        return GlooPair(store, name, first, timedelta(seconds=patience))

    links = Check(store, rank, connect, torch.device("cpu"), slot=0.1, timeout=patience).run(rounds(CHAIN))
    return [(link.source, link.target, link.failure) for link in links]


def test_links_of_ranks_that_are_well() -> None:
    found, *others = run_ranks(check, 4, -1, False)
    assert sorted(found) == sorted((a, b, "") for low, high in CHAIN for a, b in ((low, high), (high, low)))
    assert others == [[], [], []]


@pytest.mark.thorough
@pytest.mark.parametrize("gone", [False, True], ids=["hangs", "is gone"])
def test_a_lost_rank_is_named_and_the_others_are_tried(gone: bool) -> None:
    found = {(source, target): failure for source, target, failure in run_ranks(check, 4, 3, gone, timeout=100)[0]}
    assert not any(found[pair] for pair in ((0, 1), (1, 0), (1, 2), (2, 1)))
    assert found[2, 3] and found[2, 3] == found[3, 2]


@pytest.mark.thorough
def test_a_rank_that_never_comes() -> None:
    """All others end with 1, and rank 0 says why."""
    flags = f"{FLAGS} --pipeline-model-parallel-size 4 --preflight-seconds 0.4 --preflight-timeout 6"
    job = Forked(Launch("preflight", flags, ranks=4, script="tools/preflight.py"), absent=3)
    assert [job.wait_for_rank(rank) for rank in range(3)] == [1, 1, 1]
    output = job.wait().output
    assert "not here within 6 s: rank 3" in output and "6 links, 2 dead" in output
    assert "not tried, since rank 3 is out" in output


@pytest.mark.thorough
def test_under_torchrun() -> None:
    flags = f"{FLAGS} --pipeline-model-parallel-size 2 --preflight-seconds 0.4"
    done = subprocess.run(
        [*(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")]
        + ["tools/preflight.py", *flags.split()],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step time" in done.stdout and "2 links, 0 dead" in done.stdout and "process1 (rank 1)" in done.stdout


# ------------------------------------------------------------------------------------------------------ slow hosts


@pytest.fixture
def lab() -> Lab:
    if reason := unavailable():
        pytest.skip(reason)
    return Lab(4, rate=200e6)


def preflight(lab: Lab, flags: str = "") -> tuple[list[int], str]:
    own = "--pipeline-model-parallel-size 4 --preflight-seconds 4 --preflight-timeout 15"
    job = Job(lab, ["tools/preflight.py", *FLAGS.split(), *own.split(), *flags.split()])
    return job.wait(grace=60), job.text(0)


@pytest.mark.netlab
def test_a_slow_host_is_named(lab: Lab) -> None:
    with lab:
        bucket = "root handle 2: tbf rate 20mbit burst 50kb limit 256kb"
        subprocess.run(f"tc -n {lab.namespace(2)} qdisc replace dev eth0 {bucket}".split(), check=True)
        statuses, output = preflight(lab)
        assert statuses == [0, 0, 0, 0], output
        strict, _ = preflight(lab, "--preflight-fail-on-slow")
    named = re.findall(
        r"SLOW .*?\(rank (\d)\) -> .*?\(rank (\d)\): (?:1[6-9]|2\d)\.?\d* Mb/s, 0\.10? of the median", output
    )
    assert sorted(named) == [("2", "1"), ("2", "3")], output
    assert all(strict)


@pytest.mark.netlab
def test_a_dead_link_is_named(lab: Lab) -> None:
    with lab:
        subprocess.run(f"ip -n {lab.namespace(2)} route add blackhole {lab.address(1)}".split(), check=True)
        statuses, output = preflight(lab)
    assert all(statuses) and "6 links, 2 dead" in output, output
    assert re.findall(r"DEAD .*?\(rank (\d)\) -> .*?\(rank (\d)\)", output) == [("1", "2"), ("2", "1")]
