"""One sentence instead of a trace: ports, hosts, full disks, closed terminals, memory, files nested too deeply."""

from __future__ import annotations

import io
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helixpipe.common import output
from helixpipe.common.errors import CheckpointError, UserError
from helixpipe.common.ports import free_port
from helixpipe.costs.profile_costs import Profile
from helixpipe.program.files import load_program
from helixpipe.program.timeline import Timeline
from megatron.pretrain.arguments import parse_and_plan
from megatron.pretrain.checkpoint.resumed import check_finite, check_optimizer
from megatron.pretrain.log.metrics import MetricsWriter
from megatron.pretrain.plan.out_of_memory import out_of_memory
from megatron.pretrain.process import meeting
from megatron.pretrain.process.meeting import MeetingError, check_master
from tests.training.helpers import BASE
from tools import preflight


@pytest.mark.parametrize(
    ("port", "says"),
    [(None, "MASTER_ADDR is set and MASTER_PORT is not"), ("x", "MASTER_PORT=x is not a port"), ("0", "not a port")],
)
def test_a_port_that_is_none(port: str | None, says: str) -> None:
    given = {} if port is None else {"MASTER_PORT": port}
    with pytest.raises(UserError, match=says):
        check_master({"MASTER_ADDR": "127.0.0.1", "RANK": "0", **given})


def test_a_port_in_use_and_one_that_answers() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(other.getsockname()[1])}
        with pytest.raises(UserError, match=rf"MASTER_PORT={at['MASTER_PORT']} cannot be used on this host"):
            check_master({**at, "RANK": "0"})
        check_master({**at, "RANK": "1"})
        check_master({**at, "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    check_master({**at, "RANK": "0"})


def test_an_address_that_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 needs it as the others do, and torch would try for minutes."""
    at = {"MASTER_ADDR": "no-such-host", "MASTER_PORT": "29500"}
    given = dict.fromkeys(("MASTER_PORT", "RANK"), "1")
    with pytest.raises(MeetingError, match="WORLD_SIZE is set and MASTER_ADDR is not: set both"):
        check_master(given)
    for name in ("a..b", "x" * 70):
        with pytest.raises(MeetingError, match=rf"^MASTER_ADDR={name} is not the name or address of a host"):
            check_master({**at, "MASTER_ADDR": name}, wait=0.0)

    def unknown(host: str, *_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, f"{host} is not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(meeting, "_QUIET", 0.0)
    capsys.readouterr()
    for rank in ("0", "1"):
        with pytest.raises(MeetingError, match=r"^MASTER_ADDR=no-such-host is not .* \(no-such-host is not known\):"):
            check_master({**at, "RANK": rank}, wait=0.01)
        said = capsys.readouterr().err
        assert said == "waiting for the address of no-such-host (no-such-host is not known)\n"


def test_rank_0_runs_elsewhere() -> None:
    """Nothing can be sent to the address of all hosts."""
    at = {"MASTER_ADDR": "255.255.255.255", "MASTER_PORT": str(free_port()), "RANK": "0"}
    with pytest.raises(MeetingError, match=rf"^MASTER_ADDR=255\.255\.255\.255 does not lead to {socket.gethostname()}"):
        check_master(at, wait=0.1)
    check_master({**at, "MASTER_ADDR": "localhost"})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_variable_that_is_no_number(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "two")
    words = f"{BASE} --mock-data --train-iters 1 --hardware h100 --preflight-predict-only --preflight-fastest"
    assert preflight.main([*words.split(), "--preflight-compare", "1f1b"]) == 2
    assert f"preflight.py: the environment variable {name}='two' is not a whole number.\n" == capsys.readouterr().err


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank says for whom it waits only after the time that ranks started together may need."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "1"}
    with pytest.raises(MeetingError, match=rf"nothing answers at MASTER_ADDR=127\.0\.0\.1, MASTER_PORT={port} after"):
        check_master(at, wait=0.05, each=0.01)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(meeting, "_QUIET", 0.02)
    with pytest.raises(MeetingError, match="nothing answers"):
        check_master(at, wait=0.3, each=0.01)
    assert capsys.readouterr().err == f"waiting for rank 0 at 127.0.0.1:{port} (Connection refused)\n"
    given_up = iter((False, True))
    with pytest.raises(MeetingError, match="nothing answers"):
        check_master(at, wait=3.0, each=0.01, given_up=lambda: next(given_up))
    assert not list(given_up), "it is asked, and not again once it says so"


class Full(io.StringIO):
    def flush(self) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("kind", ["full", "closed"])
def test_a_run_goes_on_without_its_terminal(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Full() if kind == "full" else io.StringIO()
    if kind == "closed":
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    output.say("first")
    output.say("second")
    sys.stdout.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING: standard output cannot be written (") and line.endswith("goes on without it.")
    monkeypatch.setattr(sys, "stderr", stream)
    output.complain("nobody hears")


def test_a_full_disk_ends_tensorboard_and_not_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    class Board:
        def add_scalar(self, *_: Any) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    for write in (lambda each: each.scalars({"lm loss": 1.0}, 1), lambda each: each.close()):
        writer = MetricsWriter(Board())
        write(writer)
        writer.scalars({"lm loss": 1.0}, 2)
        writer.close()
        (line,) = capsys.readouterr().err.splitlines()
        assert "--tensorboard-dir cannot be written (No space left on device)" in line and not writer.active


def test_another_optimizer_is_told_before_its_state_is_looked_for() -> None:
    check_optimizer({"optimizer": "adam"}, {"optimizer": "adam"}, "here")
    check_optimizer({}, {"optimizer": "adam"}, "here")
    with pytest.raises(CheckpointError, match=r"with --optimizer adam, not sgd; give that, or --no-load-optim"):
        check_optimizer({"optimizer": "adam"}, {"optimizer": "sgd"}, "here")


def test_a_checkpoint_of_a_run_that_had_diverged() -> None:
    check_finite([("a", torch.ones(2))], "here")
    for bad in (float("nan"), float("inf")):
        with pytest.raises(CheckpointError, match=r"here holds NaN or infinity in b: .*--ckpt-step"):
            check_finite([("a", torch.ones(2)), ("b", torch.tensor([1.0, bad]))], "here")


def test_out_of_memory_names_what_would_save_most() -> None:
    flags = f"{BASE} --train-iters 1 --seq-length 4096 --max-position-embeddings 4096 --bf16"
    config, plans = parse_and_plan(flags.split(), environ={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    said = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.1 GiB of which 1 is free."
    sentence = out_of_memory(config, plans, said)
    assert "the GPU, which has 79.1 GiB, is out of memory (2.50 GiB more were asked for)" in sentence
    needs = max(plans.plan(1).simulation.device_needs) / 2**30
    assert f"up to {needs:.3g} GiB on paper" in sentence
    assert re.search(r"what would save most is --recompute-granularity full \(.* and --micro-batch-size 1 \(", sentence)
    assert sentence.count(" GiB less)") == 2 and "\n" not in sentence
    assert "is out of memory;" in out_of_memory(config, plans, "no figures")
    more = "tried to allocate 4000000000 bytes. Error code 12"
    on_cpu = out_of_memory(config, plans, more, "this host", on_gpu=False)
    assert on_cpu.startswith("this host is out of memory (3.7 GiB more were asked for); a rank needs up to")
    assert "--recompute-granularity full" in on_cpu


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        ("", "up to 0 GiB of it on paper, as `helixpipe memory` says; run fewer ranks on it at a time."),
        ("--offload-activations 1", r"what would save most is --offload-activations off \(\S+ GiB less\)."),
        (
            "--optimizer-cpu-offload --use-distributed-optimizer --offload-activations 1",
            r"-activations off \(.* and no --optimizer-cpu-offload \(",
        ),
    ],
)
def test_advice_is_about_the_memory_that_is_short(flags: str, advice: str) -> None:
    """The host's memory of a job on GPUs holds only what is offloaded; the GPU's flags save nothing of it."""
    words = f"{BASE} --train-iters 1 --seq-length 4096 --max-position-embeddings 4096 --bf16 {flags}".split()
    config, plans = parse_and_plan(words, environ={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    sentence = out_of_memory(config, plans, "", "this host")
    assert sentence.startswith("this host is out of memory; a rank needs ") and "--recompute" not in sentence
    assert re.search(advice, sentence), sentence


@pytest.mark.parametrize("text", ["[" * 100_000, "\0", '{"format": 1}'], ids=["deep", "nonsense", "other"])
def test_files_that_are_nested_too_deeply_or_are_something_else(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    for read in (Profile.load, Timeline.load, load_program):
        with pytest.raises(UserError) as caught:
            read(path)
        assert "file.json" in str(caught.value) and "\n" not in str(caught.value)


def test_files_of_numbers_run_no_code(tmp_path: Path) -> None:
    """Profiles, timelines and programs are JSON: a pickle under their names is refused."""
    from tests.checkpoint.malicious import Payload

    path, mark = tmp_path / "file.json", tmp_path / "ran"
    torch.save(Payload(mark), path)
    for read in (Profile.load, Timeline.load, load_program):
        with pytest.raises(UserError):
            read(path)
    assert not mark.exists()
