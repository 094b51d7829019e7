"""Runs of NVIDIA's script, alone and under a schedule of this project, and what they print."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.launching import ROOT, Launch

CHECKOUT = Path(os.environ.get("MEGATRON_LM", "/nowhere")).resolve()
ON_CPU = Path(__file__).parent / "on_cpu"

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-2 --min-lr 1e-2 --lr-decay-style constant "
    "--save-interval 100 --tokenizer-type NullTokenizer --vocab-size 127 --log-interval 1 --eval-interval 1000 "
    "--eval-iters 1 --seed 7 --hidden-dropout 0 --attention-dropout 0 --num-workers 0 "
    "--untie-embeddings-and-output-weights --split 80,10,10 --data-path {data}"
)
ON_GLOO = (
    "--distributed-backend gloo --transformer-impl local --attention-backend unfused --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion "
    "--no-bias-dropout-fusion --no-rope-fusion --no-create-attention-mask-in-dataloader"
)
"""What NVIDIA's script needs without Transformer Engine, Apex and NCCL."""

LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --group-query-attention "
    "--num-query-groups 2"
)
TWO_STAGES = "--num-virtual-stages-per-pipeline-rank 2"
INTERLEAVED = "--num-layers-per-virtual-pipeline-stage 1"
CHUNKS = "--pipe-sp-splits 4"
OFFLOADED = "--pipe-sp-splits 3 --offload-activations 0.5 --min-offloaded-tensor-size 0"
PLAIN = ("1f1b", "zb1p", "zb2p", "gpipe", "adapipe")
LOOPED = (f"interleaved-1f1b {INTERLEAVED}", f"zb-interleaved {INTERLEAVED}")
V_SHAPES = tuple(f"{name} {TWO_STAGES}" for name in ("zbv", "v-half", "v-min", "hanayo"))
CUT = (f"seq1f1b {CHUNKS}", f"sppo {OFFLOADED}", f"zbv {TWO_STAGES} --pipe-sp-splits 2 --offload-activations 1")


class Steps(NamedTuple):
    """What a run prints, as printed: of each iteration loss and gradient norm, and the losses of evaluations."""

    iterations: dict[int, tuple[str, str]]
    evaluations: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Flags of a model and its division, and the schedules that are compared under them.

    exact: whether losses and norms are equal as printed; else they agree to `loss` and 0.002. In chunks of a sequence,
    where kernels sum in another order, losses agree to `loss` as well.
    """

    name: str
    flags: str
    schedules: tuple[str, ...]
    pipeline: int = 2
    ranks: int = 2
    loss: float = 2e-6
    script: str = "pretrain_gpt.py"


GROUPS = (
    Group("GPT", "", (*PLAIN, *LOOPED, *V_SHAPES, *CUT)),
    Group("Llama", LLAMA, ("1f1b", "zb1p", LOOPED[0], V_SHAPES[0], *CUT[:2])),
    Group(
        "experts",
        f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none",
        ("zb1p", LOOPED[0], V_SHAPES[0], CUT[0]),
    ),
    Group("TP 2", f"{LLAMA} --tensor-model-parallel-size 2", ("1f1b", V_SHAPES[0], CUT[0]), ranks=4),
    Group("four ranks", "--num-layers 8 --global-batch-size 12", ("zb1p", *V_SHAPES[:3], CUT[0]), pipeline=4, ranks=4),
    Group(
        "DP 2, distributed optimizer",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --dist-ckpt-optim-fully-reshardable",
        ("zb1p", V_SHAPES[0], CUT[1]),
        ranks=4,
    ),
    Group("bf16", f"{LLAMA} --bf16", ("zb1p", V_SHAPES[0], CUT[0]), loss=2e-3),
    Group(
        "hybrid",
        "--num-layers 8 --hybrid-layer-pattern *-*-|*-*- --spec hybrid_layers stack",
        ("zb1p", *CUT[:2]),
        script="pretrain_hybrid.py",
    ),
    Group("MTP", f"{LLAMA} --mtp-num-layers 1", ("zb1p", V_SHAPES[0])),
    Group(
        "MTP in a stage of its own",
        f"{LLAMA} --mtp-num-layers 1 --pipeline-model-parallel-layout Et|ttt|m|L",
        ("1f1b", "zb1p"),
        pipeline=4,
        ranks=4,
    ),
)


class Megatron:
    """NVIDIA's checkout with data, and the checkpoints that its own 1F1B starts each group from."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.data = folder / "numbers_text_document"
        text = folder / "numbers.jsonl"
        lines = [" ".join(str((7 * i + 3 * j + i * j) % 127) for j in range(50 + i % 40)) for i in range(300)]
        text.write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
        for checkout, prefix in ((CHECKOUT, "numbers"), (ROOT, "ours")):
            self.command(
                f"{checkout}/tools/preprocess_data.py",
                f"--input {text} --output-prefix {folder / prefix} --tokenizer-type NullTokenizer --vocab-size 127 "
                "--append-eod --workers 1",
                0,
                theirs=checkout == CHECKOUT,
            )
        self._theirs: dict[Group, Steps] = {}

    def command(self, script: str, flags: str, ranks: int, theirs: bool = True, **named: str) -> str:
        """Run a script until it ends well, and return what it printed."""
        with pytest.MonkeyPatch.context() as patch:
            first = (ON_CPU, CHECKOUT) if theirs else ()
            patch.setenv("PYTHONPATH", ":".join(map(str, (*first, ROOT))))
            patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # python3-config of pybind11
            patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
            for name, value in named.items():
                patch.setenv(name, value)
            done = Launch("megatron", flags, ranks, script, CHECKOUT if theirs else self.folder).run()
        assert done.status == 0, done.output[-6000:]
        return done.output

    def train(self, group: Group, schedule: str | None, more: str, trainer: bool = False, **named: str) -> Steps:
        """Run NVIDIA's script, under a schedule unless that is None; or the trainer of this project."""
        flags = f"{MODEL.format(data=self.data)} --pipeline-model-parallel-size {group.pipeline} {group.flags} {more}"
        ours = "" if schedule is None else f" --pipeline-schedule {schedule}"
        if trainer:
            cache = f" --data-cache-path {self.folder / 'cache'}"
            output = self.command(f"{ROOT}/pretrain_gpt.py", flags + ours + cache, group.ranks, theirs=False)
        elif schedule is None:
            output = self.command(group.script, f"{ON_GLOO} {flags}", group.ranks, **named)
        else:
            output = self.command("-m", f"helixpipe.megatron {group.script} {ON_GLOO} {flags}{ours}", group.ranks)
        steps = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+).*?grad norm: (\S+)", output)
        evaluations = re.findall(r"validation loss at .*?lm loss value: (\S+)", output)
        return Steps({int(number): (loss, norm) for number, loss, norm in steps}, tuple(evaluations))

    def start(self, group: Group) -> Path:
        """Return the checkpoint after one iteration of NVIDIA's 1F1B, from which all runs of a group go on.

        Weights drawn at random would differ between placements of stages.
        """
        path = self.folder / re.sub(r"\W", "_", group.name)
        if not path.exists():
            self.train(group, None, f"--save {path} --exit-interval 1")
        return path

    def theirs(self, group: Group) -> Steps:
        """Return what NVIDIA's own 1F1B prints from there."""
        if group not in self._theirs:
            steps = self.train(group, None, f"--load {self.start(group)}")
            assert list(steps.iterations) == [2, 3, 4] and len(steps.evaluations) == 2, steps
            self._theirs[group] = steps
        return self._theirs[group]


def going_on_from_2(theirs: Steps) -> dict[int, float]:
    """Return the losses of iterations 3 and 4 that NVIDIA's script prints when it goes on after iteration 2.

    In the second iteration after a start it prints the mean of both losses. theirs: a run that went on after iteration
    1.
    """
    second, third, fourth = (float(theirs.iterations[number][0]) for number in (2, 3, 4))
    third = 2 * third - second
    return {3: third, 4: (third + fourth) / 2}


def check_equal(ours: Steps, theirs: Steps, loss: float = 0.0) -> None:
    """Check losses, norms and evaluations: as printed, or to a relative difference of losses, and 0.002 of norms."""
    if not loss:
        assert ours == theirs
        return
    assert ours.iterations.keys() == theirs.iterations.keys() and len(ours.evaluations) == len(theirs.evaluations)
    for number, (value, norm) in theirs.iterations.items():
        assert float(ours.iterations[number][0]) == pytest.approx(float(value), rel=loss)
        assert float(ours.iterations[number][1]) == pytest.approx(float(norm), rel=10 * loss, abs=0.0011)
    assert [float(each) for each in ours.evaluations] == pytest.approx([*map(float, theirs.evaluations)], rel=loss)
