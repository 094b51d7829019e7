"""Runs on the ranks of test_checkpoint.py."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
from argparse import Namespace
from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from helixpipe.common.errors import CheckpointError
from helixpipe.model.device import redirect
from helixpipe.model.latent import local_name
from megatron.pretrain.checkpoint import folder as folders
from megatron.pretrain.checkpoint import save_folder, writing
from megatron.pretrain.checkpoint import tensors as checkpoint_tensors
from megatron.pretrain.checkpoint.chained import saved_groups
from megatron.pretrain.checkpoint.saved_arguments import read_arguments
from megatron.pretrain.checkpoint.to_huggingface import Checkpoint
from megatron.pretrain.huggingface.weights import Weight
from tests.checkpoint import malicious
from tests.checkpoint.damage import DAMAGES, SHARD, TRACKER, TRACKERS, UNLISTED, remove, truncate
from tests.checkpoint.runs import Layout, Run, contents

PP, TP, DP, SHARDED = Layout(pp=2), Layout(tp=2), Layout(), Layout(sharded=True)
ZERO, CP = Layout(distributed_optimizer=True), Layout(cp=2, distributed_optimizer=True)
BF16, ZERO_BF16 = Layout(pp=2, bf16=True), Layout(distributed_optimizer=True, bf16=True)
OFFLOADED, HALF_OFFLOADED = replace(ZERO_BF16, offload=1.0), replace(ZERO_BF16, offload=0.5)
UNTIED, UNTIED_ZERO = Layout(pp=2, tied=False), Layout(distributed_optimizer=True, tied=False)
SPREAD, SPREAD_UNTIED = Layout(pp=2, spread_head=True), Layout(pp=2, spread_head=True, tied=False)
SPREAD_ZERO, SPREAD_BF16 = replace(SPREAD, distributed_optimizer=True), replace(SPREAD, bf16=True)
ODD = Layout(vocabulary=33)
SPLIT, SPLIT_UNTIED = (Layout(pp=2, split_head=True, vocabulary=33, tied=tied) for tied in (True, False))
ODD_PP, ODD_UNTIED = replace(ODD, pp=2), replace(ODD, distributed_optimizer=True, tied=False)
SPLIT_EVEN, SPLIT_BF16 = replace(SPLIT, vocabulary=32), replace(SPLIT_UNTIED, bf16=True)
SPLIT_ZERO = replace(SPLIT_EVEN, distributed_optimizer=True)
LEARNED = Layout(positions="learned_absolute")
LEARNED_TP, LEARNED_ZERO = replace(LEARNED, tp=2), replace(LEARNED, distributed_optimizer=True)
WEIPIPE, WZB2 = Layout(pp=2, schedule="weipipe"), Layout(pp=2, schedule="wzb2")
WEIPIPE_BF16, WZB2_UNTIED = replace(WEIPIPE, bf16=True), replace(WZB2, tied=False)
EXPERTS, EXPERTS_PP = Layout(experts=True), Layout(pp=2, experts=True)
EP, EP_ZERO = replace(EXPERTS, ep=2), replace(EXPERTS, ep=2, distributed_optimizer=True)
EP_SHARDED = replace(EP, sharded=True)
EP_BF16, EP_ZERO_BF16 = replace(EP, bf16=True), replace(EP_ZERO, bf16=True)
ENDS, ENDS_ZERO = Layout(pp=2, ends_lr=2e-2), Layout(distributed_optimizer=True, ends_lr=2e-2)
FUSED, FUSED_BF16 = replace(PP, fused=True), replace(BF16, fused=True)
FUSED_SHARDED, FUSED_EP = replace(SHARDED, fused=True), replace(EP_BF16, fused=True, chained=True)
SGD, SGD_SHARDED = replace(PP, optimizer="sgd"), replace(SHARDED, optimizer="sgd")
RESUMED: dict[str, tuple[Layout, dict[str, Layout]]] = {
    "pp2": (PP, {"same": PP, "dp2": DP, "tp2": TP, "zero": ZERO, "spread head": SPREAD, "sharded": SHARDED}),
    "weipipe": (WEIPIPE, {"same": WEIPIPE, "pp2": PP, "zero": ZERO}),
    "untied wzb2": (WZB2_UNTIED, {"same": WZB2_UNTIED, "pp2": UNTIED}),
    "spread head": (SPREAD, {"same": SPREAD, "pp2": PP}),
    "tp2": (TP, {"same": TP, "pp2": PP, "cp2": CP}),
    "cp2": (CP, {"same": CP, "tp2": TP}),
    "zero": (ZERO, {"same": ZERO, "pp2 zero": Layout(pp=2, distributed_optimizer=True), "tp2": TP}),
    "spread head zero": (SPREAD_ZERO, {"same": SPREAD_ZERO, "pp2": PP, "zero": ZERO}),
    "bf16 pp2": (BF16, {"same": BF16, "zero": ZERO_BF16, "spread head": SPREAD_BF16, "weipipe": WEIPIPE_BF16}),
    "bf16 zero": (ZERO_BF16, {"same": ZERO_BF16, "tp2": Layout(tp=2, bf16=True), "offloaded": OFFLOADED}),
    "offloaded": (OFFLOADED, {"same": OFFLOADED, "zero": ZERO_BF16, "pp2": BF16}),
    "half offloaded": (HALF_OFFLOADED, {"same": HALF_OFFLOADED, "offloaded": OFFLOADED}),
    "bf16 sharded": (
        replace(SHARDED, bf16=True),
        {"same": replace(SHARDED, bf16=True), "zero": ZERO_BF16, "pp2": BF16},
    ),
    "positions": (LEARNED, {"same": LEARNED, "tp2": LEARNED_TP}),
    "positions tp2": (LEARNED_TP, {"same": LEARNED_TP, "tp1": LEARNED, "zero": LEARNED_ZERO}),
    "split head": (SPLIT, {"same": SPLIT, "pp2": ODD_PP, "dp2": ODD}),
    "even split head": (SPLIT_EVEN, {"zero": SPLIT_ZERO, "tp2": TP}),
    "odd pp2": (ODD_PP, {"split head": SPLIT}),
    "untied split head": (SPLIT_UNTIED, {"same": SPLIT_UNTIED, "zero": ODD_UNTIED}),
    "untied odd zero": (ODD_UNTIED, {"split head": SPLIT_UNTIED}),
    "bf16 split head": (SPLIT_BF16, {"same": SPLIT_BF16, "sharded": replace(SPLIT_BF16, sharded=True)}),
    "split head zero": (SPLIT_ZERO, {"same": SPLIT_ZERO, "pp2": PP}),
    "untied zero": (UNTIED_ZERO, {"same": UNTIED_ZERO, "pp2": UNTIED, "spread head": SPREAD_UNTIED}),
    "untied spread head": (SPREAD_UNTIED, {"same": SPREAD_UNTIED, "pp2": UNTIED}),
    "ep2": (EP, {"same": EP, "pp2": EXPERTS_PP, "zero": EP_ZERO}),
    "ep2 zero": (EP_ZERO, {"same": EP_ZERO, "ep1": EXPERTS, "ep1 zero": replace(EP_ZERO, ep=1)}),
    "ep2 sharded": (EP_SHARDED, {"same": EP_SHARDED, "ep1": EXPERTS, "zero": EP_ZERO}),
    "experts sharded": (replace(EXPERTS, sharded=True), {"ep2 sharded": EP_SHARDED}),
    "experts pp2": (EXPERTS_PP, {"same": EXPERTS_PP, "ep2": EP, "ep2 zero": EP_ZERO}),
    "bf16 ep2": (EP_BF16, {"same": EP_BF16, "ep1": replace(EXPERTS, bf16=True), "zero": EP_ZERO_BF16}),
    "sgd": (SGD, {"same": SGD, "sharded": SGD_SHARDED}),
    "bf16 sgd sharded": (replace(SGD_SHARDED, bf16=True), {"pp2": replace(SGD, bf16=True)}),
    "ends zero": (ENDS_ZERO, {"same": ENDS_ZERO, "pp2": ENDS}),
    "fused": (FUSED, {"same": FUSED, "torch": PP, "zero": ZERO, "sharded": FUSED_SHARDED}),
    "torch": (PP, {"fused": FUSED}),
    "torch zero": (ZERO, {"fused": FUSED}),
    "bf16 fused": (FUSED_BF16, {"same": FUSED_BF16, "torch": BF16}),
    "bf16 torch": (BF16, {"fused": FUSED_BF16}),
    "fused sharded": (FUSED_SHARDED, {"same": FUSED_SHARDED, "torch": SHARDED}),
    "chained bf16 fused ep2": (FUSED_EP, {"torch": EP_BF16}),
    "chained bf16 ep2": (replace(EP_BF16, chained=True), {"ep2": EP_BF16, "pp2": replace(EXPERTS_PP, bf16=True)}),
    "chained ep2 zero": (replace(EP_ZERO, chained=True), {"ep2": EP_ZERO, "ep1": EXPERTS}),
    "bf16 ep2 zero": (
        EP_ZERO_BF16,
        {"same": EP_ZERO_BF16, "sharded": replace(EP_BF16, sharded=True), "pp2": replace(EXPERTS_PP, bf16=True)},
    ),
}
"""Layout that saves -> layouts that resume; `zero` is data parallelism with the distributed optimizer."""


def all_cases(rank: int, world_size: int, folder: str, resuming: Container[str]) -> dict[str, Any]:
    """resuming: which of `RESUMED`, as "one to other"."""
    directory = Path(folder)
    results: dict[str, Any] = {"after kill": after_kill(directory / "killed")}
    for name, (layout, others) in RESUMED.items():
        chosen = {other: others[other] for other in others if f"{name} to {other}" in resuming}
        if chosen or name in RATES:
            resumed(results, directory / name, layout, chosen)
    other_rates(results, directory)
    damaged(results, directory / "pp2", directory / "damaged")
    mistakes(results, directory / "pp2", directory)
    untrusted(results, directory / "pp2", directory / "untrusted")
    written(results, directory)
    results["from megatron-core"] = from_megatron_core(directory / "megatron-core")
    results["local layers"] = experts_in_local_layers(directory / "local")
    return results


# ------------------------------------------------------------------------------------------------------------ resuming


RATES = {"pp2": PP, "bf16 pp2": BF16, "bf16 zero": ZERO_BF16, "bf16 sharded": replace(SHARDED, bf16=True)}
RATES["ends"] = replace(BF16, ends_lr=2e-2)
SOURCES = ("flags", "checkpoint")


def other_rates(results: dict[str, Any], directory: Path) -> None:
    """Resume with other learning rates: (those of the optimizer's groups, those of a run that is not resumed, rate of
    the first group's next step)."""
    Run(RATES["ends"]).train(3).save(directory / "ends")
    for name, layout in RATES.items():
        for source in SOURCES:
            ends_lr = layout.ends_lr and 6e-2
            run = Run(replace(layout, lr=3e-2, ends_lr=ends_lr, rates_from=source), seed=2)
            wanted = [group["max_lr"] for group in (run if source == "flags" else Run(layout)).optimizer.param_groups]
            run.load(directory / name, ckpt_step=3)
            groups = run.optimizer.param_groups
            run.train(1)
            results[f"{name}, {source}"] = [group["max_lr"] for group in groups], wanted, groups[0]["lr"]
            again = Run(replace(layout, lr=3e-2, ends_lr=ends_lr, rates_from=source), seed=2)
            with contextlib.redirect_stdout(io.StringIO()) as output:
                again.load(directory / name, ckpt_step=3, no_load_optim=True, no_load_rng=True)
            lines = [line for line in output.getvalue().splitlines() if "not loaded" in line]
            again.train(1)
            same = [group["lr"] for group in again.optimizer.param_groups] == [group["lr"] for group in groups]
            results[f"{name}, {source}, weights alone"] = same, lines


def resumed(results: dict[str, Any], directory: Path, layout: Layout, others: dict[str, Layout]) -> None:
    """Train 3, save, train 2, save; load the first in runs of another seed, train 2 and compare with the second."""
    run = Run(layout).train(3).save(directory).train(2).save(directory)
    expected = named(directory / "iter_0000005")
    moments = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}[layout.optimizer]
    kinds = {*(f"optimizer.state.{moment}" for moment in moments), "embedding", "decoder"}
    assert all(any(name.startswith(kind) for name in expected) for kind in kinds)
    if layout.optimizer == "adam" and not layout.chained:  # where FusedAdam of Megatron-LM's looks for it
        plain = dist_checkpointing.load_common_state_dict(str(directory / "iter_0000005"))["optimizer"]
        assert {group["step"] for group in saved_groups(plain)} == {5}
    for name, other in others.items():
        again = Run(other, seed=2)
        loaded = again.load(directory, ckpt_step=3)
        start = None if loaded is None else (loaded[0].consumed_train_samples, loaded[1]["consumed_train_samples"])
        again.train(2).save(directory / name)
        same = start == (12, 12) and again.progress == run.progress
        same = same and again.scheduler.state_dict() == run.scheduler.state_dict()
        actual = named(directory / name / "iter_0000005")
        error = difference(expected, actual, 0.0 if other == layout else 1e-2 if layout.bf16 else 1e-5)
        results[f"{directory.name} to {name}"] = error if same else f"{start}: {again.progress} != {run.progress}"


def difference(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor], tolerance: float) -> str:
    """'' when equal: all tensors, exactly, for tolerance 0; else without the float32 copies that only one side has."""
    common = expected.keys() & actual.keys()
    unmatched = [name for name in expected.keys() ^ actual.keys() if not name.startswith("optimizer.state.param.")]
    if unmatched or (tolerance == 0.0 and len(common) < max(len(expected), len(actual))):
        return f"{unmatched or expected.keys() ^ actual.keys()} in one only"
    for name in sorted(common):
        a, b = expected[name].float(), actual[name].float()
        if not (torch.allclose(a, b, rtol=tolerance, atol=1e-7) if tolerance else torch.equal(a, b)):
            return f"{name} differs by {(a - b).abs().max()}"
    return ""


def named(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors by one name for the float32 copy, which optimizers call `param` or `fp32_param`."""
    return {name.replace("state.fp32_param", "state.param"): tensor for name, tensor in contents(folder).items()}


# -------------------------------------------------------------------------------------------------------------- damage


def damaged(results: dict[str, Any], original: Path, directory: Path) -> None:
    run = Run(PP, seed=3)
    expected = {}
    for step in (3, 5):
        run.load(original, ckpt_step=step)
        expected[step] = run.tensors()

    def load(change: Callable[[Path], Any]) -> tuple[int, bool, list[str]]:
        """(iteration loaded, state equal to a clean load of it, lines about it) after a change to a copy."""
        on_first(lambda: (shutil.rmtree(directory, ignore_errors=True), shutil.copytree(original, directory)))
        on_first(lambda: change(directory))
        with contextlib.redirect_stdout(io.StringIO()) as output:
            run.load(directory)
        iteration = run.progress.iteration
        equal = all(map(torch.equal, run.tensors(), expected[iteration]))
        return (
            iteration,
            equal,
            [line for line in output.getvalue().splitlines() if "WARNING" in line and "manifest.json (" not in line],
        )

    for name, change in DAMAGES.items():
        results[name] = load(lambda folder, change=change: change(folder / "iter_0000005"))  # type: ignore[misc]
    for name, (content, _) in TRACKERS.items():
        action = remove(TRACKER) if content is None else lambda d, c=content: (d / TRACKER).write_text(c)
        results[f"tracker {name}"] = load(action)

    def ruin(folder: Path) -> None:
        for each in folder.glob("iter_*"):
            truncate(SHARD)(each)

    with contextlib.suppress(CheckpointError):
        load(ruin)
        raise RuntimeError("nothing was usable, yet something was loaded")
    results["all damaged"] = message(lambda: run.load(directory))
    results["all damaged, arguments"] = message(lambda: read_arguments(str(directory)))


def on_first(action: Callable[[], Any]) -> None:
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def message(action: Callable[[], Any]) -> str:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    raise AssertionError("no error")


# ------------------------------------------------------------------------------------------------------------ mistakes


def mistakes(results: dict[str, Any], saved: Path, directory: Path) -> None:
    """Loading what does not fit, or is not there."""
    results["layers"] = message(lambda: Run(Layout(pp=2, num_layers=4)).load(saved))
    results["hidden"] = message(lambda: Run(Layout(pp=2, hidden_size=32)).load(saved))
    results["schedule"] = message(lambda: Run(Layout(pp=2, lr_decay_steps=50)).load(saved))
    run = Run(PP)
    before = run.tensors()
    results["step"] = message(lambda: run.load(saved, ckpt_step=4))
    results["missing"] = message(lambda: run.load(directory / "none", exit_on_missing_checkpoint=True))
    results["nothing there"] = message(lambda: run.load(directory / "none"))
    none = [run.load(path, save=str(path)) for path in (directory / "none", directory)]
    results["fresh"] = [*none, read_arguments(str(directory / "none"))]
    results["holds checkpoints"] = message(lambda: run.save(saved, locked=True))
    results["holds checkpoints, but of --load"] = message(lambda: run.save(saved, locked=True, load=str(directory)))
    results["untouched"] = len(before) == len(run.tensors()) and all(map(torch.equal, before, run.tensors()))
    results["arguments"] = read_arguments(str(saved))
    with contextlib.redirect_stdout(io.StringIO()) as output:
        loaded = run.load(saved, finetune=True)
    results["finetune says"] = [line for line in output.getvalue().splitlines() if "not loaded" in line]
    results["finetune"] = loaded is not None and (loaded[0].iteration, run.optimizer.state_dict()["state"])
    run.train(1).save(directory / "weights", no_save_optim=True)
    results["no optimizer"] = message(lambda: Run(PP).load(directory / "weights"))
    loaded = run.load(directory / "weights", no_load_optim=True)
    results["weights alone"] = loaded is not None and loaded[0].iteration
    results["weights alone, schedule"] = run.scheduler.num_steps
    args = {"num_layers": 4}
    for name, layout in {"pp2": PP, "zero": ZERO, "offloaded": OFFLOADED}.items():
        expected = Run(layout).save(directory / f"start {name}").train(1).tensors()
        again = Run(layout, seed=2)
        again.load(directory / f"start {name}")
        actual = again.train(1).tensors()
        results[f"saved before the first step, {name}"] = all(map(torch.equal, actual, expected))
    weights = Run(ZERO_BF16, seed=2).save(directory / "other weights", no_save_optim=True)
    run = Run(OFFLOADED)
    run.load(directory / "other weights", no_load_optim=True)
    same = zip(run.train(1).tensors(), weights.train(1).tensors(), strict=False)  # weights, then state by another name
    count = len(list(run.model.parameters()))
    results["weights alone, offloaded"] = all(torch.allclose(a, b, atol=1e-7) for a, b in islice(same, count))
    run = Run(PP)
    with mock.patch.dict(run.arguments, args):  # what the arguments say may also be wrong: the tensors decide
        run.save(directory / "lying")
    results["lying"] = message(lambda: Run(Layout(pp=2, num_layers=4)).load(directory / "lying"))
    with mock.patch.dict(run.arguments, {"rotary_base": 10000, "rotary_percent": 1.0}):
        run.save(directory / "positions")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        flags = {"rotary_base": 500, "rotary_percent": 1.0}
        run.saver("", load=str(directory / "positions")).load(run.model, run.optimizer, run.scheduler, flags)
    results["other positions"] = [line for line in output.getvalue().splitlines() if "positions are not" in line]


def copied_anew(saved: Path, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(saved, directory)


def untrusted(results: dict[str, Any], saved: Path, directory: Path) -> None:
    """Loading what runs code: refused, and no older checkpoint is taken in its place."""
    run = Run(PP)
    for name, change in malicious.FILES.items():
        mark = directory / "ran"
        newest = directory / "iter_0000005"
        on_first(partial(copied_anew, saved, directory))
        on_first(partial(change, newest, mark))
        on_first(partial(UNLISTED, newest))
        told = message(lambda: run.load(directory))
        arguments = message(lambda: read_arguments(str(directory))) if name in ("index", "common") else told
        dist.barrier()
        ran = mark.exists()
        with contextlib.suppress(CheckpointError):  # what it is worth is another question
            run.load(directory, trust_checkpoint=True)
        dist.barrier()
        results[f"untrusted {name}"] = told, arguments, ran, mark.exists()
        dist.barrier()  # the first rank makes the folder anew


# ------------------------------------------------------------------------------------------------------------- writing


def written(results: dict[str, Any], directory: Path) -> None:
    """Failures while saving, retention, and what a save leaves behind."""
    target = directory / "written"
    run = Run(PP).train(1).save(target).train(1)
    rank = dist.get_rank()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    def save_with(owner: Any, name: str, replacement: Any, here: bool) -> tuple[str, list[str], str]:
        with mock.patch.object(owner, name, replacement) if here else contextlib.nullcontext():
            text = message(lambda: run.save(target))
        dist.barrier()
        found = text, sorted(path.name for path in target.iterdir()), read(target / TRACKER)
        dist.barrier()
        return found

    results["disk full, shard"] = save_with(FileSystemWriter, "write_data", full, rank == 1)
    results["disk full, common"] = save_with(writing, "save_config", full, rank == 0)
    results["not shared"] = save_with(save_folder, "appears", lambda folder: rank == 0, True)
    results["no tracker yet"] = save_with(folders, "write_tracker", full, rank == 0)
    run.save(target).save(target)
    results["hidden left"] = sorted(path.name for path in target.iterdir() if path.name[0] == ".")
    for _ in range(3):
        run.train(1).save(target, save_retain_interval=4)
    results["retained"] = sorted(path.name for path in target.glob("iter_*"))
    results["children"] = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    manifest = json.loads((target / "iter_0000005" / "manifest.json").read_text())
    results["files"] = sorted(manifest["files"])
    results["keys"] = sorted(torch.load(target / "iter_0000005" / "common.pt"))


def read(path: Path) -> str:
    return path.read_text()


def killed(rank: int, world_size: int, folder: str) -> None:
    """Save, train on, and be killed, on all ranks, when the shards of the next checkpoint are written."""
    run = Run(PP).train(3).save(folder).train(2)
    write = writing.CheckpointFiles.write

    def write_and_die(files: Any) -> None:
        write(files)
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(writing.CheckpointFiles, "write", write_and_die):
        run.save(folder, locked=True, load=folder)


def after_kill(directory: Path) -> dict[str, Any]:
    """Relaunch after `killed`."""
    left = sorted(path.name.partition("-")[0] for path in directory.iterdir())
    dist.barrier()
    run = Run(PP, seed=2)
    run.load(directory)
    resumed = run.progress.iteration
    run.train(2).save(directory, locked=True, load=str(directory))
    return {"left": left, "resumed at": resumed, "in the end": sorted(path.name for path in directory.iterdir())}


# -------------------------------------------------------------------------------------------------------- interchange


def from_megatron_core(directory: Path) -> dict[str, Any]:
    """Load what plain megatron-core saved with its own writer, as Megatron-LM lays it out."""
    run = Run(PP)
    model = GPTModel(
        Run(DP).model.config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=32,
        max_sequence_length=8,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    folder = directory / "iter_0000007"
    on_first(lambda: folder.mkdir(parents=True))
    state = {
        "args": Namespace(num_layers=2, hidden_size=16, consumed_train_samples=28, swiglu=True),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": model.sharded_state_dict(),
    }
    with checkpoint_tensors.quiet(), redirect():
        dist_checkpointing.save(state, str(folder))
    on_first(lambda: (directory / TRACKER).write_text("7"))
    run = Run(PP)
    needed = message(lambda: run.load(directory))
    loaded = run.load(directory, no_load_optim=True)
    reference = dict(model.named_parameters())
    names = {"output_layer.weight": "embedding.word_embeddings.weight"}
    return {
        "without --no-load-optim": needed,
        "progress": loaded and (loaded[0].iteration, loaded[0].consumed_train_samples),
        "weights": all(torch.equal(w, reference[names.get(name, name)]) for name, w in run.model.named_parameters()),
        "some": len(list(run.model.parameters())),
    }


def experts_in_local_layers(directory: Path) -> dict[str, bool]:
    """Save experts for megatron-core's local layers, load them there, and go on from what these save, and from ours."""
    run = Run(EP).train(2).save(directory / "ours", local_names=True)
    config = run.model.config
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=32,
        max_sequence_length=8,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    with checkpoint_tensors.quiet(), redirect():
        asked = {"model": model.sharded_state_dict()}
        model.load_state_dict(dist_checkpointing.load(asked, str(directory / "ours" / "iter_0000002"))["model"])
    theirs, ours = model.state_dict(), run.model.state_dict()
    exported = Checkpoint(directory / "ours").read(Weight("decoder.layers.pre_mlp_layernorm.weight", 0, (), ()))
    found = {
        "their weights": all(torch.equal(theirs[name], value) for name, value in ours.items() if value is not None),
        "exported": torch.equal(exported, ours["decoder.layers.0.pre_mlp_layernorm.weight"]),
    }
    folder = directory / "theirs" / "iter_0000002"
    on_first(lambda: folder.mkdir(parents=True))
    state = {"args": Namespace(**run.arguments), "iteration": 2, "model": model.sharded_state_dict()}
    with checkpoint_tensors.quiet(), redirect():
        dist_checkpointing.save(state, str(folder))
    on_first(lambda: (directory / "theirs" / TRACKER).write_text("2"))
    again, resumed = Run(EP, seed=5), Run(EXPERTS_PP, seed=6)
    again.load(directory / "theirs", no_load_optim=True)
    found["our weights"] = all(map(torch.equal, again.model.parameters(), run.model.parameters()))
    resumed.load(directory / "ours")
    resumed.train(2).save(directory / "resumed", local_names=True)
    Run(EP).train(4).save(directory / "whole")
    one, other = (contents(directory / name / "iter_0000004") for name in ("resumed", "whole"))
    other = {local_name(key, False) if "layers.0." in key else key: value for key, value in other.items()}
    found["our optimizer"] = one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    return found
