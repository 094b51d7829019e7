"""Hosts with slow links between them: `pytest -m netlab`, as root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helixpipe.common.errors import UserError
from netlab import hosts
from netlab.hosts import Lab, namespaces, unavailable
from netlab.job import Job, parse_delay, parse_rate
from tests.integration.launching import MOCK, ROOT, Launch, Result
from tools.netlab import main

PLAIN = f"{MOCK} --attention-dropout 0 --hidden-dropout 0 --train-iters 8"
P2 = f"{PLAIN} --pipeline-model-parallel-size 2"
P4 = f"{PLAIN} --pipeline-model-parallel-size 4 --save {{save}} --load {{save}} --save-interval 2"


@pytest.fixture
def allowed() -> Iterator[None]:
    """Skips where no lab can be made; afterwards nothing may be left of this process's labs."""
    if reason := unavailable():
        pytest.skip(reason)
    yield
    assert not left_by(os.getpid())


def left_by(pid: int) -> list[str]:
    return [name for name in namespaces() if name.startswith(f"netlab-{pid}-")]


def result(job: Job, statuses: list[int]) -> Result:
    """The output of the host that prints losses."""
    return Result(max(statuses), job.text(job.lab.hosts - 1), 0.0)


@pytest.mark.netlab
def test_two_hosts_train_as_two_ranks_do(allowed: None) -> None:
    with Lab(2, rate=50e6, delay=2e-3) as lab:
        speed = lab.measure(seconds=0.5)
        assert 25e6 < speed.bits_per_second < 50e6, "the bucket counts headers too"
        assert 4e-3 < speed.round_trip < 40e-3
        job = Job(lab, ["pretrain_gpt.py", *P2.split()])
        statuses = job.wait()
        assert statuses == [0, 0], job.text(0) + job.text(1)
        assert not lab.processes(0) and not lab.processes(1)
    expected = Launch("two ranks", P2).run().done().losses()
    assert len(expected) == 8 and result(job, statuses).losses() == expected


@pytest.mark.netlab
@pytest.mark.parametrize("schedule", ["1f1b", "weipipe"])
def test_hosts_notice_that_one_has_died_and_a_relaunch_resumes(allowed: None, schedule: str, tmp_path: Path) -> None:
    p4 = f"{P4} --pipeline-schedule {schedule}"
    arguments = ["pretrain_gpt.py", *p4.format(save=tmp_path / "hosts").split()]
    with Lab(4, rate=200e6) as lab:
        job = Job(lab, arguments)
        job.wait_for("successfully saved checkpoint from iteration       2", host=0)
        lab.kill(2)
        killed = time.monotonic()
        statuses = job.wait(grace=100)
        assert time.monotonic() - killed < 30, "the others ended by themselves"
        assert statuses[2] == job.first_failure == -signal.SIGKILL and all(statuses)
        again = Job(lab, arguments)
        relaunched = result(again, again.wait()).done()
    newest = max(int(path.name[5:]) for path in (tmp_path / "hosts").glob("iter_*") if int(path.name[5:]) < 8)
    assert "successfully loaded checkpoint" in again.text(0)
    whole = Launch("undisturbed", p4, ranks=4).run(save=tmp_path / "whole").done().losses()
    first = result(job, statuses).losses()
    assert min(relaunched.losses()) - 1 <= newest
    assert first.items() <= whole.items() and {**first, **relaunched.losses()} == whole and len(whole) == 8


@pytest.mark.netlab
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_after_a_signal(allowed: None, number: signal.Signals, tmp_path: Path) -> None:
    program = tmp_path / "wait.py"
    program.write_text("import time\nprint('here', flush=True)\ntime.sleep(1000)\n")
    command = [sys.executable, str(ROOT / "tools/netlab.py"), "--rate", "1gbit", "--", str(program)]
    lab = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert lab.stdout is not None
    assert any("here" in line for line in lab.stdout)
    assert len(left_by(lab.pid)) == 3
    lab.send_signal(number)
    status = lab.wait(60)
    lab.stdout.close()
    if number == signal.SIGKILL:
        assert len(left_by(lab.pid)) == 3
        assert main(["--clean"]) == 0
    else:
        assert status == 128 + number
    assert not left_by(lab.pid)


@pytest.mark.netlab
def test_the_first_failure_ends_the_others(allowed: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "fail.py"
    program.write_text("import os, sys, time\nsys.exit(3) if os.environ['RANK'] == '1' else time.sleep(1000)\n")
    assert main(["--hosts", "3", "--grace", "0.5", "--", str(program)]) == 1  # torchrun's own
    assert "[host 1]" in capsys.readouterr().out


def test_rates_delays_and_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert [parse_rate(text) for text in ("unlimited", "500kbit", "2.5gbit")] == [None, 500e3, 2.5e9]
    assert [parse_delay(text) for text in ("0", "50us", "1.5ms", "2s")] == pytest.approx([0, 50e-6, 1.5e-3, 2])
    for wrong in ("100", "fast", "0mbit", "-1mbit"):
        with pytest.raises(UserError, match="100mbit"):
            parse_rate(wrong)
    with pytest.raises(UserError, match=r"1\.5ms"):
        parse_delay("5")
    assert main(["--hosts", "1"]) == 2
    assert capsys.readouterr().err == "netlab.py: --hosts 1 must be from 2 to 200.\n"


def test_without_the_commands_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    assert main([]) == 2
    assert "needs the command ip, which is not here" in capsys.readouterr().err


def test_where_the_kernel_has_netem_the_switch_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[str] = []
    monkeypatch.setattr(hosts, "_check_rights", lambda: None)
    monkeypatch.setattr(hosts, "_run", lambda command: commands.append(command) or "")
    monkeypatch.setattr(hosts, "remove_namespace", lambda name: None)
    with Lab(2, rate=8e6, delay=1e-3) as lab:
        assert lab._delay_line is None
    delays = [command for command in commands if "netem delay 1000us" in command]
    assert len(delays) == 2 and all("-switch " in command for command in delays), "once on the way, not on a host"
    buckets = [command for command in commands if "tbf rate 8000000bit burst 3028" in command]
    assert ["parent 1:1" in command for command in buckets] == [False, True] * 2
