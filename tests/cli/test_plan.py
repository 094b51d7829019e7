"""`helixpipe plan`: the commands it prints train what it planned, and what cannot be planned is said in a sentence."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helixpipe.cli.command_plan import nothing_fits
from helixpipe.cli.torchrun import torchrun_command
from helixpipe.common.errors import UserError
from helixpipe.costs.hardware import GIB
from helixpipe.costs.model_config import ModelConfig
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Layout, ModelShape
from helixpipe.costs.training_flags import model_flags, shape_of_flags
from helixpipe.planning.search.explore import Search
from helixpipe.planning.search.outcome import SearchResult
from helixpipe.planning.search.space import Candidate
from megatron.pretrain.arguments import parse_and_plan, parse_args, parse_config
from megatron.pretrain.config import Config
from megatron.pretrain.plan.costs import model_shape, training_costs
from megatron.pretrain.plan.programs import full_batch
from schedules.command import USER_ERROR, main
from tests.cli.commands import run, run_json
from tests.planning.search_questions import question
from tools.check_certificate import check

SMALL = "plan --model weipipe-1024 --gpus 2 --seq-length 8192 --global-batch-size 4 --jobs 1"


def test_the_commands_train_what_was_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """Their flags are training's, and give the program whose step was predicted."""
    printed = run_json(
        capsys,
        "plan --model llama3-8b --hardware h100 --gpus 8 --seq-length 8192 --global-batch-size 8 --jobs 1 --top 4 "
        "--schedule helix,zb1p,seq1f1b-interleaved,none --tensor-parallel 2 --optimizer-cpu-offload --host-memory 1000 "
        "--memory-limit 40",
    )
    times = [plan["step_time"] for plan in printed["plans"]]
    assert times == sorted(times) and len(times) == 4
    assert len({plan["schedule"] for plan in printed["plans"]}) > 1
    for plan in printed["plans"]:
        words = shlex.split(plan["command"].replace("\\\n", ""))
        assert words[:5] == ["torchrun", "--nproc-per-node", "8", "--nnodes", "1"]
        config, plans = parse_and_plan(words[6:], environ={"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"})
        shape = dataclasses.replace(MODELS["llama3-8b"], name="the model", seq_length=8192)
        parallel, trained_shape = config.parallel, model_shape(config)
        assert with_vocabulary_of(shape, trained_shape) == shape
        tp = parallel.tensor_model_parallel_size
        assert trained_shape.padded_vocab(tp) == shape.padded_vocab(tp)
        assert not [warning for warning in config.warnings if "accepted" in warning]
        assert plan["tensor_parallel"] == parallel.tensor_model_parallel_size
        assert plan["context_parallel"] == parallel.context_parallel_size
        assert plan["pipeline_parallel"] == parallel.pipeline_model_parallel_size
        assert plan["data_parallel"] == parallel.data_parallel_size
        assert (parallel.host_memory, config.training.optimizer_cpu_offload) == (1000, True)
        trained = plans.plan(full_batch(config))
        terms = plan["terms"]
        pipeline = plan["step_time"] - terms["gradients"] - terms["optimizer"]
        assert trained.simulation.makespan == pytest.approx(pipeline, rel=1e-6)
        assert max(trained.simulation.device_needs) <= printed["memory_limit"] * 1.001
        assert plan["memory"] <= printed["memory_limit"] == 40 * GIB
        assert sum(terms.values()) == pytest.approx(plan["step_time"], rel=1e-6)


def with_vocabulary_of(shape: ModelShape, other: ModelShape) -> ModelShape:
    """The other shape, whose vocabulary is padded already, with that of this one."""
    return dataclasses.replace(other, vocab=shape.vocab, vocab_multiple=shape.vocab_multiple)


def test_further_tokens_are_divided_as_the_head_is(capsys: pytest.CaptureFixture[str]) -> None:
    """The last stage has fewer layers by what tokens after the next need, each a layer and the output layer again."""
    flags = f"{SMALL} --schedule 1f1b --pipeline-parallel 2 --top 1 --mtp-num-layers"
    (none,), (four,) = (run_json(capsys, f"{flags} {count}")["plans"] for count in (0, 4))
    assert "--mtp-num-layers 4" in four["command"] and "--mtp-num-layers" not in none["command"]
    config, _ = parse_and_plan(
        shlex.split(four["command"].replace("\\\n", ""))[6:],
        environ={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    )
    assert config.model.mtp_num_layers == 4
    last = [16 if plan["stage_layers"] is None else plan["stage_layers"][-1] for plan in (none, four)]
    assert last[0] < 16 and 1 <= last[1] <= last[0] - 4
    evenly = "simulate 1f1b --model weipipe-1024 -p 2 -m 4 --gpus-per-node 2 --seq-length 8192 --mtp-num-layers 4"
    assert four["step_time"] < 0.8 * run_json(capsys, evenly)["step"]["step_time"]


def test_whole_experts_are_planned_and_trained(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "plan --model mixtral-8x7b --layers 4 --gpus 8 --seq-length 8192 --global-batch-size 8 --jobs 1 --top 1"
    sizes = "--tensor-parallel 2 --expert-parallel 4 --expert-tensor-parallel 1 --schedule 1f1b --pipeline-parallel 2"
    (plan,) = run_json(capsys, f"{flags} {sizes} --moe-load zipf:1")["plans"]
    assert (plan["expert_parallel"], plan["expert_tensor_parallel"]) == (4, 1)
    words = shlex.split(plan["command"].replace("\\\n", ""))
    config, _ = parse_and_plan(words[6:], environ={"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"})
    parallel = config.parallel
    assert (parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size) == (4, 1)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("deepseek-v2-lite --attention-output-gate", "megatron-core has no gate for it"),
        ("deepseek-v2-lite --window-size 128,0", "--window-size cannot be had"),
        ("deepseek-v2-lite --no-rope-freq 3", "--no-rope-freq cannot be had"),
        ("deepseek-v2-lite --add-qkv-bias", "--add-qkv-bias cannot be had"),
        ("deepseek-v2-lite --num-query-groups 4", "--group-query-attention cannot be had"),
        ("deepseek-v2-lite --overlap-tp-comm halves", "--overlap-tp-comm halves cannot be had"),
        ("qwen3-4b --mtp-num-layers 1 --overlap-tp-comm halves", "cannot be combined with --overlap-tp-comm halves"),
        ("qwen3-4b --mtp-num-layers 1 --loss-chunk-size 512", "cannot be combined with --loss-chunk-size 512"),
        ("qwen3-4b --mtp-num-layers 1 --data-parallel-sharding-strategy optim_grads", "gradients in parts"),
        ("weipipe-1024 --mtp-num-layers 1 --position-embedding-type none", "later tokens need places"),
    ],
)
def test_what_training_refuses_is_not_simulated(capsys: pytest.CaptureFixture[str], flags: str, says: str) -> None:
    for words in ("simulate 1f1b -p 2", "plan --gpus 2 --global-batch-size 16"):
        assert main(f"{words} --seq-length 8192 --model {flags}".split()) == USER_ERROR
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "changed",
    [
        {"layout": Layout(sequence_parallel=True, cuda_graphs="auto", attention_kernel="cudnn")},
        {"layout": Layout(attention_kernel="unfused")},
        {"layout": Layout(), "model": dataclasses.replace(MODELS["mixtral-8x7b"], layers=8, seq_length=4096)},
        {"model": dataclasses.replace(MODELS["qwen3-4b"], layers=8, seq_length=4096, further=1)},
        {"model": dataclasses.replace(MODELS["deepseek-v2-lite"], layers=8, seq_length=4096)},
    ],
)
def test_training_takes_every_command(changed: dict[str, Any]) -> None:
    """Of all sizes that are searched, with the layout that was planned."""
    asked = question(2, schedules="1f1b none", **changed)
    commands = 0
    for sizes in asked.sizes():
        for setting in asked.first_settings(sizes):
            words = shlex.split(torchrun_command(asked, Candidate(sizes, setting)).replace("\\\n", ""))
            config = parse_config(words[6:], environ={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
            planned, trained = asked.costs(sizes, setting.saving).layout, training_costs(config)
            assert isinstance(trained, ModelCosts)
            kernel = trained.layout.attention_kernel  # which --attention-backend leaves open
            assert trained.layout == dataclasses.replace(planned, attention_kernel=kernel)
            backend = {"cudnn": "fused", "unfused": "unfused"}.get(planned.attention_kernel, "auto")
            assert config.model.attention_backend == backend
            commands += 1
    assert commands > 1


@pytest.mark.thorough
@pytest.mark.parametrize("more", ["", "--micro-batch-size 2 --disable-distributed-optimizer", "--cuda-graphs auto"])
@pytest.mark.parametrize(
    "model",
    [
        "mixtral-8x7b --disable-sequence-parallel",
        "mixtral-8x7b --data-parallel-sharding-strategy optim_grads_params",
        "deepseek-v2-lite --overlap-tp-comm auto",
        "qwen3-4b --mtp-num-layers 1 --overlap-tp-comm auto",
        "qwen3-4b --window-size 128,0 --window-attn-skip-freq 4 --no-rope-freq 4 --pipeline-vocab-parallel auto",
        "llama3-8b --attention-output-gate --softmax-type learnable",
    ],
)
def test_training_takes_the_commands_of_a_search(capsys: pytest.CaptureFixture[str], model: str, more: str) -> None:
    printed = run_json(
        capsys,
        f"plan --model {model} {more} --num-layers 8 --gpus 4 --seq-length 4096 --global-batch-size 16 --jobs 1 "
        "--hardware h200 --top 6 --schedule 1f1b,zb1p,seq1f1b,helix,none --time-limit 5",
    )
    for plan in printed["plans"]:
        words = shlex.split(plan["command"].replace("\\\n", ""))
        parse_config(words[6:], environ={"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"})


def test_a_screen_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    """A table and the command of the best; those of the others are there for whoever asks."""
    short, long = (run(capsys, f"{SMALL} --top 5{flag}") for flag in ("", " --commands"))
    commands = [part for part in long.split("\n\n") if ". torchrun" in part]
    assert len(commands) > 2
    shared = long.split("\n\n2. torchrun")[0]
    assert short == f"{shared}\n\n--commands prints those of the others, too.\n"
    assert len(short.splitlines()) <= 28 and short.count("torchrun") == 1


TRAINING = "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --tokenizer-type NullTokenizer --mock-data"


def trained(flags: list[str], vocab: int) -> Config:
    """Return what training's parser makes of the flags of a model, for a vocabulary whose last is a document's end."""
    return parse_args(shlex.split(" ".join([*flags, TRAINING, f"--vocab-size {vocab - 1}"])), environ={})


@pytest.mark.parametrize("name", MODELS)
def test_the_flags_of_a_model_give_that_model(name: str) -> None:
    """Heads, norms, biases, positions and the base of RoPE as the preset has them."""
    shape = dataclasses.replace(MODELS[name], seq_length=4096)
    shape = dataclasses.replace(shape, mixed=shape.mixed[: shape.layers])
    config = trained(model_flags(shape), shape.vocab)
    assert with_vocabulary_of(shape, model_shape(config)) == dataclasses.replace(shape, name="the model")
    assert model_shape(config).padded_vocab(1) == shape.padded_vocab(1)


@st.composite
def models(draw: st.DrawFn) -> list[str]:
    """Return training's flags for a model that training takes."""
    layers, heads, some = draw(st.sampled_from((2, 4, 6))), draw(st.sampled_from((2, 4))), st.booleans()
    latent, experts = draw(some), draw(some)
    positions = draw(st.sampled_from(("learned_absolute", "rope", "none") if not latent else ("rope",)))
    yarn = positions == "rope" and not latent and draw(some)
    pattern = st.lists(st.sampled_from((0, 1)), min_size=layers, max_size=layers).map(lambda own: f"'{own}'")
    scaled = positions == "rope" and not yarn and not latent and draw(some)
    groups = [f"--group-query-attention --num-query-groups {heads // 2}", "--add-qkv-bias", "--kv-channels 24"]
    layered = [f"--window-size 7,0 --window-attn-skip-freq {draw(pattern)}", "--window-size 3,0"]
    routed = ["--moe-router-pre-softmax", "--moe-shared-expert-intermediate-size 40", "--moe-z-loss-coeff 0.01",
              "--moe-router-score-function sigmoid --moe-router-enable-expert-bias", "--moe-router-topk 1",
              "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1", "--moe-ffn-hidden-size 24",
              "--moe-expert-capacity-factor 1.5 --moe-token-drop-policy position",
              f"--moe-layer-freq {draw(pattern.filter(lambda own: '1' in own))}"]  # fmt: skip
    always = ["--swiglu", "--squared-relu", "--disable-bias-linear", "--untie-embeddings-and-output-weights",
              "--norm-epsilon 2e-6", "--normalization RMSNorm", "--apply-layernorm-1p", "--qk-layernorm",
              "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3", "--init-method-std 0.01",
              "--attention-dropout 0.2", "--hidden-dropout 0", "--make-vocab-size-divisible-by 96"]  # fmt: skip
    rope = ["--rotary-base 7000", "--rotary-percent 0.5", f"--no-rope-freq {draw(pattern)}"]
    choices = [
        *always,
        *(routed if experts else []),
        *(rope if positions == "rope" and not latent else []),
        *([*groups, *layered, "--softmax-type learnable", "--attention-output-gate"] if not latent else []),
    ]
    chosen = draw(st.lists(st.sampled_from(choices), unique=True, max_size=12))
    longest, kind = draw(st.sampled_from((16, 64))), "yarn" if yarn else positions
    return [
        f"--num-layers {layers} --hidden-size 48 --num-attention-heads {heads} --ffn-hidden-size 64 --seq-length 16",
        f"--position-embedding-type {kind} --max-position-embeddings {longest}",
        *["--rotary-scaling-factor 4 --yarn-original-max-position-embeddings 512 --mscale-all-dim 0.5"] * yarn,
        *["--use-rope-scaling --rope-scaling-factor 4"] * scaled,
        *["--num-experts 4"] * experts,
        *[f"--multi-latent-attention --kv-lora-rank 20 --rope-type {draw(st.sampled_from(('rope', 'yarn')))}"] * latent,
        *chosen,
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(100, 900))
def test_every_field_of_a_model_is_in_its_flags(flags: list[str], vocab: int) -> None:
    """Training gets the model that was planned: the flags made from its shape give every field again."""
    try:
        config = trained(flags, vocab)
    except UserError:
        assume(False)
    shape = shape_of_flags(vars(config.model), "own", vocab, config.model.make_vocab_size_divisible_by)
    again = trained(model_flags(shape), vocab)
    dispatcher = "alltoall" if shape.experts else config.model.moe_token_dispatcher_type  # as costs count
    found = shape_of_flags(vars(again.model), "own", vocab, again.model.make_vocab_size_divisible_by)
    patterns: dict[str, Any] = {"windowed": (), "unrotated": (), "mixed": ()}  # which several texts say
    assert dataclasses.replace(found, **patterns) == dataclasses.replace(shape, **patterns)
    assert found.pieces == shape.pieces and again.padded_vocabulary == config.padded_vocabulary
    for field in dataclasses.fields(ModelConfig):
        ours, theirs = getattr(again.model, field.name), getattr(config.model, field.name)
        if field.name not in ("window_attn_skip_freq", "no_rope_freq", "moe_layer_freq"):
            assert ours == (dispatcher if field.name == "moe_token_dispatcher_type" else theirs), field.name


def test_the_table_and_what_explains_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "front.png"
    text = run(capsys, f"{SMALL} --schedule 1f1b,seq1f1b,none --top 2 --commands --explain --pareto {picture}")
    assert text.count("torchrun") == 2 and "--nproc-per-node 2 --nnodes 1 pretrain_gpt.py" in text
    assert "\n2. takes " in text and "candidates: " in text and "No other plan beats these" in text
    assert "TP CP PP DP  schedule" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "The largest loss is" not in text  # there is no smaller number of nodes


def test_the_certificate_of_the_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of its whole pipeline, in the memory that a plan may need; the file is one that the checker accepts."""
    small, path = f"{SMALL} --schedule zb1p --top 1 --certify", tmp_path / "first.json"
    limits = []
    for gib in (40, 60):
        printed = run_json(capsys, f"{small} {path} --memory-limit {gib}")
        plan, certified, written = printed["plans"][0], printed["certified"], json.loads(path.read_text())
        pipeline = plan["step_time"] - plan["terms"]["gradients"] - plan["terms"]["optimizer"]
        assert written["makespan"] == pytest.approx(pipeline, rel=1e-6)
        assert certified["bound"] == written["bound"]["value"] <= written["makespan"]
        assert check(written).startswith("valid")
        limits.append(written["limits"][0])
    assert limits[1] - limits[0] == pytest.approx(20 * GIB, rel=1e-4)
    text = run(capsys, small)
    assert f"The pipeline of 1. takes {written['makespan']:.6g} s. Certified: no order of this work" in text


def test_what_takes_over_with_more_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--schedule 1f1b,none --gpus-per-node 2 --explain --top 1"
    printed = run_json(capsys, f"{SMALL} {flags}".replace("--gpus 2", "--nodes 2"))
    assert [each["gpus"] for each in printed["sizes"]] == [2, 4]
    assert set(printed["taking_over"]) >= {"bubble", "messages", "DP reduction", "TP and CP collectives"}
    assert printed["gpus"] == 4


def test_a_slower_network_is_a_slower_step(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{SMALL} --gpus-per-node 1 --schedule 1f1b --pipeline-parallel 2 --top 1"
    fast, slow = (run_json(capsys, f"{flags} --network {speed}")["plans"][0] for speed in (400, 1))
    assert slow["step_time"] > fast["step_time"] and slow["terms"]["messages"] > fast["terms"]["messages"]


def test_the_limit_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run_json(capsys, f"{SMALL} --schedule none --memory-limit 16 --top 1")
    assert printed["memory_limit"] == 16 * GIB
    assert json.dumps(printed["plans"][0]["command"]).count("--memory-limit 16 ") == 1


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--gpus 8", "plan needs --model, or the sizes of one (--hidden-size …)."),
        ("--model llama2-7b", "plan needs --gpus or --nodes."),
        ("--model llama2-7b --gpus 8 --nodes 1", "plan needs --gpus or --nodes, and not both."),
        ("--model llama2-7b --gpus 12", "--gpus 12 must be a multiple of the 8 GPUs of a node."),
        ("--model llama2-7b --gpus 0", "--gpus 0 must be at least 1."),
        (
            "--model llama2-7b --gpus 8 --global-batch-size 8 --tensor-parallel 3",
            "--tensor-parallel 3 must divide the 8 GPUs.",
        ),
        ("--model llama2-7c --gpus 8", "--model llama2-7c is unknown: did you mean llama2-7b? known are "),
        ("--model llama2-7b --hardware h10 --gpus 8", "--hardware h10 is unknown: did you mean h100? known are "),
        ("--model llama2-7b --gpus 8 --schedule 1f2b", "unknown pipeline schedule '1f2b': did you mean 1f1b? known "),
        (
            "--model llama2-7b --gpus 8 --schedule sppo --helix-folds 1",
            "--helix-folds is an option of helix, not of sppo.",
        ),
        ("--model llama2-7b --gpus 8", "plan needs --global-batch-size, the sequences of a step; or --lengths"),
        (
            "--model llama2-7b --gpus 8 --network 25 --network-bandwidth 100",
            "--network and --network-bandwidth say the",
        ),
        (
            "--model llama2-7b --gpus 8 --optimizer-cpu-offload --data-parallel-sharding-strategy optim_grads_params",
            "--optimizer-cpu-offload cannot be combined with --data-parallel-sharding-strategy optim_grads_params; ",
        ),
        ("--model llama2-7b --gpus 8 --global-batch-size 8 --pareto x.gif", "--pareto x.gif must end in .png"),
        (
            "--model llama2-7b --gpus 8 --global-batch-size 8 --pareto nowhere/x.png",
            "--pareto: cannot write nowhere/x.png: No such file or directory.",
        ),
    ],
)
def test_what_cannot_be_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: str, sentence: str
) -> None:
    """All of it is said before the search."""
    monkeypatch.setattr(Search, "run", lambda self: pytest.fail("it searched"))
    assert main(["plan", *flags.split()]) == USER_ERROR
    assert capsys.readouterr().err.startswith(f"helixpipe: {sentence}")


def test_documents_of_all_lengths(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Plans pack them as training does, and their commands ask for that."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(map(str, [8000, 300, 2000, 4000, 100, 700, 6000, 1500])), encoding="utf-8")
    flags = f"plan --model weipipe-1024 --gpus 2 --jobs 1 --top 2 --schedule seq1f1b,none --lengths {lengths}"
    printed = run_json(capsys, flags)
    assert printed["plans"] and printed["seq_length"] == 8192 and printed["global_batch_size"] == 8
    for plan in printed["plans"]:
        tokens = 22600 / (plan["step_time"] * 2)
        assert plan["tokens_per_second_per_gpu"] == pytest.approx(tokens)
        words = shlex.split(plan["command"].replace("\\\n", ""))
        config, _ = parse_and_plan(words[6:], environ={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
        assert config.data.variable_seq_lengths and config.training.global_batch_size == 8
    lengths.write_text("long", encoding="utf-8")
    for wrong, words_said in (
        (flags, "number 1: 'long' is no length"),
        (flags.replace(str(lengths), "nowhere"), "--lengths nowhere is no name of a histogram, and cannot be read"),
        (
            flags.replace(str(lengths), "github --seq-length 4096 --max-length 4096"),
            "--seq-length and --max-length say the same with --lengths; give one.",
        ),
        (flags.replace(str(lengths), "github --micro-batch-size 2"), "--micro-batch-size 2 cannot be given beside"),
    ):
        assert main(wrong.split()) == USER_ERROR
        assert words_said in capsys.readouterr().err


def test_sequence_length_and_batch_of_documents(capsys: pytest.CaptureFixture[str]) -> None:
    """As in training, --seq-length is the longest that a document may be, and the batch counts documents."""
    flags = "plan --model weipipe-1024 --gpus 1 --jobs 1 --top 1 --schedule none --lengths github"
    one = run_json(capsys, f"{flags} --seq-length 4096 --global-batch-size 6")
    same = run_json(capsys, f"{flags} --max-length 4096 --documents 6")
    assert one["seq_length"] == 4096 >= same["seq_length"] and one["global_batch_size"] == 6
    (words,) = (each["command"].split() for each in one["plans"])
    assert words[words.index("--seq-length") + 1] == "4096" and words[words.index("--global-batch-size") + 1] == "6"
    assert one["plans"][0]["mfu"] == pytest.approx(same["plans"][0]["mfu"], rel=1e-2)


def test_a_whole_optimizer_stays_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Where --disable-distributed-optimizer is given, weights are not divided over data-parallel ranks, either."""
    flags = f"{SMALL} --schedule none --tensor-parallel 1 --context-parallel 1 --top 3"
    for extra, divided in (("", True), (" --disable-distributed-optimizer", False)):
        plans = run_json(capsys, flags + extra)["plans"]
        assert any("--use-distributed-optimizer" in each["command"] for each in plans) == divided
        assert divided or not any(each["weights_in_parts"] for each in plans)


def test_enough_while_smaller_sizes_are_searched(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C then ends those searches, and what was found before is printed."""
    search, runs = Search.run, []

    def run_once(self: Search) -> SearchResult:
        runs.append(self.question.gpus)
        if len(runs) > 1:
            raise KeyboardInterrupt
        return search(self)

    monkeypatch.setattr(Search, "run", run_once)
    flags = f"{SMALL} --schedule none --gpus-per-node 1 --explain --top 1".replace("--gpus 2", "--nodes 2")
    assert "torchrun" in run(capsys, flags) and runs == [2, 1]


def test_a_memory_that_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """By how much, and what would fit."""
    flags = [*SMALL.split(), "--schedule", "1f1b", "--pipeline-parallel", "2", "--memory-limit"]
    for limit, words in (
        ("5.2", "--gpus 2 are too few for --seq-length 8192: the least"),
        ("1", "does not fit into 2 GPUs"),
    ):
        assert main([*flags, limit]) == USER_ERROR
        error = capsys.readouterr().err
        assert words in error and "more than" in error and "GiB of tensors" in error and "would do." in error
    assert "cannot be divided into sizes that a schedule takes" in nothing_fits(question(), SearchResult())


def test_adam_must_fit_into_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{SMALL} --schedule none --optimizer-cpu-offload --top 1 --host-memory".replace("--gpus 2", "--gpus 1")
    assert main([*flags.split(), "1"]) == USER_ERROR
    error = capsys.readouterr().err
    assert "cannot be divided" in error or "the host's memory is too little: " in error
