"""Megatron-LM's command line: from `argv` to one validated, immutable `Config`.

config = parse_args()          # raises UserError, one sentence, for anything wrong
config, plans = parse_and_plan()
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from helixpipe.common.errors import CheckpointError, UserError
from helixpipe.common.flags import (
    FlagParser,
    add_dataclass_arguments,
    check_ranges,
    dataclass_from_namespace,
    fits,
    whole_number,
)
from helixpipe.costs.expert_flags import ExpertFlags
from helixpipe.costs.huggingface.config import CONFIG
from helixpipe.costs.latent_flags import LatentFlags
from helixpipe.costs.model_config import ORIGINAL_LENGTHS
from helixpipe.planning.plan import Plans
from helixpipe.program.files import is_file
from megatron.pretrain.checkpoint.options import CheckpointOptions, missing
from megatron.pretrain.config import CheckpointConfig, Config, LaunchConfig, ModelConfig, compat
from megatron.pretrain.config.container import GROUPS
from megatron.pretrain.config.parallel import PIPELINE
from megatron.pretrain.config.vocabulary import padded_vocabulary
from megatron.pretrain.data.tokenizer_flags import TokenizerFlags
from megatron.pretrain.plan import auto
from megatron.pretrain.plan.loss_slices import settle
from megatron.pretrain.plan.programs import check_program, predicted_step, step_verdict, with_one_head, with_overlap
from megatron.pretrain.validation import validate
from megatron.pretrain.validation.inputs import one_iteration
from megatron.pretrain.validation.values import timeouts
from schedules import CATALOGUE, find, foreign_options

LAYER_PATTERNS = ("window_size", "window_attn_skip_freq", "no_rope_freq", "moe_layer_freq")
"""Fields that Megatron-LM saves as numbers and lists, and which are text here."""

MODEL_SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "group_query_attention",
    "num_query_groups",
    "seq_length",
    "max_position_embeddings",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rope_scaling_low_freq_factor",
    "rope_scaling_high_freq_factor",
    "rope_scaling_original_max_position_embeddings",
    "rotary_scaling_factor",
    "mscale",
    "mscale_all_dim",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_correction_range_round_to_int",
    *("window_size", "window_attn_skip_freq", "no_rope_freq"),
    *(item.name for flags in (ExpertFlags, LatentFlags) for item in dataclasses.fields(flags)),
    "apply_layernorm_1p",
    "qk_layernorm",
    *("attention_output_gate", "softmax_type"),
    "normalization",
    "norm_epsilon",
    "swiglu",
    "squared_relu",
    "add_bias_linear",
    "add_qkv_bias",
    *("mtp_num_layers", "mtp_loss_scaling_factor"),
    "untie_embeddings_and_output_weights",
    "make_vocab_size_divisible_by",
    "attention_dropout",
    "hidden_dropout",
)
"""The model's values that --use-checkpoint-args takes from the checkpoint."""

PLANNED = ("chunks", "packing", "recompute", "offload", "vocabulary")
"""Groups of flags that say how a step is planned; --help has them before Megatron-LM's."""

EXTENDS = frozenset(
    name
    for name in MODEL_SHAPE
    if name.startswith(("rotary_", "rope_", "yarn_", "mscale", "use_rope"))
    or name in ("seq_length", "max_position_embeddings", "position_embedding_type")
)
"""The fields of `MODEL_SHAPE` that a run may change, to extend the context of the model it loads."""

OTHER_MODELS = ("qk_l2_norm",)
"""Values under which a checkpoint of Megatron-LM holds a model that cannot be built here."""

CheckpointArgs = Callable[[CheckpointConfig], Mapping[str, Any] | argparse.Namespace | None]
"""Reads the `args` a checkpoint was saved with; None when there is no checkpoint."""


def parse_args(
    argv: Sequence[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    load_checkpoint_args: CheckpointArgs | None = None,
) -> Config:
    """Parse and validate the command line.

    argv: without the program's name; default the process's. environ: for RANK, WORLD_SIZE, LOCAL_RANK.
    load_checkpoint_args: called once at most, with --load: for --use-checkpoint-args, the vocabulary that was saved,
    and what --pipeline-schedule auto had found.

    Raises UserError (one sentence) for unknown flags, wrong values and combinations. --help prints and exits.
    """
    return parse_and_plan(argv, environ=environ, load_checkpoint_args=load_checkpoint_args)[0]


def parse_and_plan(
    argv: Sequence[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    load_checkpoint_args: CheckpointArgs | None = None,
) -> tuple[Config, Plans[int]]:
    """Parse the flags as `parse_args` does; return the planner too, which has planned a step of the full batch as a
    check.
    """
    config = parse_config(argv, environ=environ, load_checkpoint_args=load_checkpoint_args)
    config, plans = with_one_head(*settle(config))
    check_program(config, plans)
    if (verdict := step_verdict(config, plans)) is not None and not verdict.fits:
        config = dataclasses.replace(config, warnings=(*config.warnings, f"the step {verdict.sentence}"))
    return timeouts(config, predicted_step(config, plans)), plans


def parse_config(
    argv: Sequence[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    load_checkpoint_args: CheckpointArgs | None = None,
) -> Config:
    """Parse the flags as `parse_args` does, without checking the schedule's program: for callers that plan with other
    costs.
    """
    arguments, warnings = split_unavailable(sys.argv[1:] if argv is None else argv)
    load = None if load_checkpoint_args is None else functools.cache(load_checkpoint_args)
    parser = build_parser()
    namespace = parser.parse(arguments, also_known=[*compat.IGNORED, *compat.REFUSED])
    config = _config(namespace, LaunchConfig.from_environment(environ), warnings)
    if config.parallel.pipeline_schedule == auto.AUTO:
        chosen_flags = _search(config, parser.given(arguments), load)
        arguments = [*arguments, *chosen_flags.words]
        namespace = parser.parse(arguments)
        config = _config(namespace, config.launch, warnings)
        words = " ".join(chosen_flags.words)
        config = config.replace("parallel", auto_schedule=words, auto_schedule_why=chosen_flags.why)
    config = _with_vocabulary(validate(_of_checkpoint(config, load, parser.given(arguments))), load)
    schedule = config.parallel.pipeline_schedule or ""
    chosen = [] if is_file(schedule) else [find(schedule)]
    for each in chosen:
        config = dataclasses.replace(config, schedule_options=dataclass_from_namespace(each.options, namespace))
    for sentence in foreign_options(parser.given(arguments), chosen):
        config = config.warn(sentence)
    return with_overlap(config)


def _config(namespace: argparse.Namespace, launch: LaunchConfig, warnings: Sequence[str]) -> Config:
    """Return the configuration that the flags state, before validation."""
    groups: dict[str, Any] = {name: dataclass_from_namespace(cls, namespace) for name, (_, cls) in GROUPS.items()}
    return _of_earlier_launch(one_iteration(Config(**groups, launch=launch, warnings=tuple(warnings))))


def _of_earlier_launch(config: Config) -> Config:
    """Return the configuration with --load as --save, where that has what an earlier launch made of a Hugging Face
    folder.
    """
    load, save = config.checkpoint.load, config.checkpoint.save
    if load is None or save is None or config.checkpoint.overwrite_checkpoints or not Path(load, CONFIG).is_file():
        return config
    from megatron.pretrain.checkpoint.folder import iterations
    from megatron.pretrain.huggingface.folder import looks_like_one

    if not looks_like_one(Path(load)) or not iterations(Path(save)):
        return config
    return config.replace("checkpoint", load=save, finetune=False).warn(
        f"--save {save} holds checkpoints, so the run goes on from them, and not from the Hugging Face folder --load "
        f"{load}."
    )


def _of_checkpoint(config: Config, load: CheckpointArgs | None, given: Collection[str]) -> Config:
    """Return the configuration with the model of the checkpoint if --use-checkpoint-args is given. given: fields with a
    flag.
    """
    if not config.checkpoint.use_checkpoint_args:
        return _with_original_length(config, load)
    saved = load(config.checkpoint) if load is not None else None
    if saved is None and load is not None and not CheckpointOptions.from_config(config).continues:
        raise CheckpointError(
            missing(config.checkpoint.load or "", ", so --use-checkpoint-args can take no model from it")
        )
    return _with_original_length(overlay_checkpoint_args(config, saved, given), load)


def _with_original_length(config: Config, load: CheckpointArgs | None) -> Config:
    """Return the configuration with the lengths from which YaRN and --use-rope-scaling extend the context.

    Where no flag gives them they are those of the model that is loaded.
    """
    model = config.model
    yarn = model.position_embedding_type == "yarn" or (model.multi_latent_attention and model.rope_type != "rope")
    for name, default in ORIGINAL_LENGTHS.items():
        if getattr(model, name) is None:
            extends = yarn and model.rotary_scaling_factor > 1 if name.startswith("yarn") else model.use_rope_scaling
            if extends:
                saved = _saved(config, load)
                config = config.replace("model", **{name: default if saved is None else original_length(saved, name)})
    return config


def original_length(saved: Mapping[str, Any], name: str) -> int:
    """Return the longest sequence of a model before its context was extended.

    Args:
        saved: arguments of the model.
        name: field of `ORIGINAL_LENGTHS` that asks, for messages.

    Raises:
        CheckpointError: If the arguments do not tell.
    """
    flag = f"--{name.replace('_', '-')}"
    kind = "rope_type" if saved.get("multi_latent_attention") else "position_embedding_type"
    length = saved.get("max_position_embeddings")
    for field, extended in (
        (
            "yarn_original_max_position_embeddings",
            saved.get(kind) == "yarn" and (saved.get("rotary_scaling_factor") or 1) > 1,
        ),
        ("rope_scaling_original_max_position_embeddings", bool(saved.get("use_rope_scaling"))),
    ):
        if extended:
            length = saved.get(field, ORIGINAL_LENGTHS[field])
    if (saved.get("rotary_seq_len_interpolation_factor") or 1) != 1:
        raise CheckpointError(
            f"the model of --load has interpolated positions, which do not tell its length before; give {flag}."
        )
    if not fits(ModelConfig, name, length) or length is None:
        raise CheckpointError(f"the model of --load does not tell its longest sequence; give {flag}.")
    return int(length)


def _with_vocabulary(config: Config, load: CheckpointArgs | None) -> Config:
    """Return the configuration with the rows of the model's embedding filled in, which all planning needs."""
    tokenizer = TokenizerFlags.of(config.data)
    rows = padded_vocabulary(config, tokenizer.size, lambda: (_saved(config, load) or {}).get("padded_vocab_size"))
    return config.replace("data", padded_vocab_size=rows)


def _saved(config: Config, load: CheckpointArgs | None) -> Mapping[str, Any] | None:
    """Return the `args` of the checkpoint that is loaded; None if there is none."""
    saved = load(config.checkpoint) if load is not None and config.checkpoint.load else None
    return vars(saved) if isinstance(saved, argparse.Namespace) else saved


def _search(config: Config, given: Mapping[str, str], load: CheckpointArgs | None) -> auto.Chosen:
    """Return the flags chosen by --pipeline-schedule auto: those kept in the checkpoint, or else of a new search."""
    checked = validate(auto.stand_in(_of_checkpoint(config, load, given)))
    kept = auto.kept(checked, _saved(config, load))
    return kept or auto.search(_with_vocabulary(checked, load), given)


USUAL = (
    *("pipeline_schedule", "pipe_sp_splits", "recompute_granularity", "pipeline_model_parallel_size"),
    *("tensor_model_parallel_size", "sequence_parallel", "num_layers", "hidden_size", "num_attention_heads"),
    *("seq_length", "micro_batch_size", "global_batch_size", "train_iters", "lr", "bf16", "data_path", "mock_data"),
    *("tokenizer_type", "tokenizer_model", "save", "load", "save_interval", "log_interval"),
)
"""Fields whose flags --help shows; --help-all shows all."""


def build_parser() -> FlagParser:
    """Return the parser of all flags, each schedule's own among them."""
    parser = FlagParser(
        prog="pretrain_gpt.py",
        usage="torchrun [torchrun's flags] pretrain_gpt.py [flags]",
        common=USUAL,
        description="Train a GPT model under a pipeline schedule.",
        epilog=f"Besides these, {len(compat.IGNORED)} flags of Megatron-LM are accepted without effect, with one "
        "warning, and those that ask for something this project does not do are refused, saying why: "
        "megatron/pretrain/config/megatron_flags.toml lists both.",
    )
    parser.add_argument_group(PIPELINE)  # whatever group of the configuration they belong to, they are the first
    for name in PLANNED:
        add_dataclass_arguments(parser, GROUPS[name][1], title=GROUPS[name][0])
    for schedule in CATALOGUE.values():
        add_dataclass_arguments(parser, schedule.options, title=f"schedule {schedule.name}")
    for name, (title, cls) in GROUPS.items():
        if name not in PLANNED:
            add_dataclass_arguments(parser, cls, title=title)
    aliases = parser.add_argument_group("flags of papers' own code")
    of_schedules = [alias for schedule in CATALOGUE.values() for alias in schedule.aliases]
    for flag, words in (*of_schedules, *compat.ALIASES.items()):
        own, *values = words.split()
        how: dict[str, Any] = {"action": _Alias, "const": (values[0], values[1:])} if values else {}
        how = how or {"type": whole_number, "metavar": "N"}
        field = own.removeprefix("--").replace("-", "_")
        aliases.add_argument(flag, dest=field, help=f"The same as {words}.", default=argparse.SUPPRESS, **how)
    return parser


class _Alias(argparse.Action):
    """Set a flag's value, and turn off what further flags `--no-…` turn off. const: the value, and these flags."""

    def __init__(self, **options: Any):
        super().__init__(**options, nargs=0)

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        value, turned_off = self.const
        setattr(namespace, self.dest, value)
        for flag in turned_off:
            setattr(namespace, flag.removeprefix("--no-").replace("-", "_"), False)


def split_unavailable(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take the flags of `compat`'s tables, with their values, out of `argv`.

    Returns the rest, and warnings about what is ignored or read as something else. Raises UserError for a flag that is
    refused.
    """
    readings: list[str] = []
    rest: list[str] = []
    read: dict[str, str] = {}
    ignored: dict[str, str] = {}
    for flag, values, words in by_flag(argv):
        if (reading := compat.READ_AS.get((flag, *values))) is not None:
            readings.extend(reading.words)
            read[f"{' '.join([flag, *values])} as {' '.join(reading.words)}"] = reading.why
            continue
        if (renamed := compat.MODULES.get(flag)) is not None:
            names = renamed["names"]
            given = " ".join(values).strip("[]").replace(",", " ").split()
            modules = [each for each in dict.fromkeys(names.get(each, each) for each in given) if each]
            words = (flag, *modules) if modules else ()
            if modules != given:
                read[f"{' '.join([flag, *values])} as {' '.join(words) or 'nothing'}"] = renamed["why"]
        neutral = list(values) in ([value] for value in compat.NEUTRAL.get(flag, ()))
        refusal = compat.REFUSED.get(" ".join([flag, *values]))
        refusal = refusal or _reason(flag, compat.REFUSED, compat.REFUSED_FAMILIES)
        if refusal is not None:
            if not neutral:
                raise UserError(f"{' '.join([flag, *values])} is refused: {refusal}.")
        elif (why := _reason(flag, compat.IGNORED, compat.IGNORED_FAMILIES)) is not None:
            ignored[flag] = why
        else:
            rest.extend(words)
    warnings = [
        f"{what}: {_with_reasons(flags)}."
        for what, flags in (("accepted without effect", ignored), ("understood", read))
        if flags
    ]
    return readings + rest, warnings


def _with_reasons(flags: Mapping[str, str]) -> str:
    """Return `--a (why); --b (as --a); --c (why)`: each reason is written out once."""
    first: dict[str, str] = {}
    told = []
    for flag, reason in flags.items():
        told.append(f"{flag} ({f'as {first[reason]}' if reason in first else reason})")
        first.setdefault(reason, flag)
    return "; ".join(told)


def by_flag(argv: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Yield (flag, its values, the words as given) for each `--flag` and what follows it; flag "" for
    words before any.
    """
    start = 0
    for end in range(1, len(argv) + 1):
        if end == len(argv) or argv[end].startswith("--"):
            words = tuple(argv[start:end])
            flag, equals, value = words[0].partition("=")
            if words[0].startswith("--"):
                yield flag, ((value,) if equals else ()) + words[1:], words
            else:
                yield "", (), words
            start = end


def _reason(flag: str, table: Mapping[str, str], families: Mapping[str, str]) -> str | None:
    if flag in table:
        return table[flag]
    return next((reason for prefix, reason in families.items() if flag.startswith(prefix)), None)


def overlay_checkpoint_args(
    config: Config, saved: Mapping[str, Any] | argparse.Namespace | None, given: Collection[str] = ()
) -> Config:
    """Return the configuration with the model's shape (`MODEL_SHAPE`), vocabulary and tokenizer as saved in a
    checkpoint.

    saved: the checkpoint's `args`, of this project or of Megatron-LM; None keeps the flags', with a warning. given:
    fields whose flags are on the command line, which of those in `EXTENDS` and of the tokenizer's hold. Raises
    CheckpointError when it describes a model that cannot be built here.
    """
    if saved is None:
        return config.warn("--use-checkpoint-args: there is no checkpoint, so the flags describe the model.")
    values = dict(saved) if isinstance(saved, Mapping) else vars(saved)
    kept = EXTENDS.intersection(given) | set(ORIGINAL_LENGTHS)
    model = {name: values[name] for name in MODEL_SHAPE if values.get(name) is not None and name not in kept}
    if "seq_length" not in values and "seq_length" not in kept:  # a Hugging Face folder's says what it can take
        model["seq_length"] = values.get("max_position_embeddings")
    if not model.get("group_query_attention", True):
        model["num_query_groups"] = 1
    for field in dataclasses.fields(ModelConfig):  # Megatron-LM has one value bare
        if isinstance(field.default, tuple) and not isinstance(model.get(field.name, ()), (list, tuple)):
            model[field.name] = (model[field.name],)
    for name in LAYER_PATTERNS:
        if isinstance(model.get(name), (int, list, tuple)) and not isinstance(model[name], bool):
            model[name] = str(model[name]).replace(" ", "")
    positions = model.get("position_embedding_type")
    if positions not in (None, "learned_absolute", "rope", "yarn", "none"):
        raise CheckpointError(
            f"the checkpoint's model has position_embedding_type {positions!r}, which is not supported."
        )
    for name in OTHER_MODELS:
        if values.get(name):
            raise CheckpointError(f"the checkpoint's model has {name}, which is not supported.")
    names = ["vocab_size"]
    if config.data.tokenizer_type in (None, values.get("tokenizer_type")):
        names += [field.name for field in dataclasses.fields(TokenizerFlags)]
    vocabulary = {name: values[name] for name in names if values.get(name) is not None and name not in given}
    differ = []
    for group, taken in ((config.model, model), (config.data, vocabulary)):
        for name, value in taken.items():
            if not fits(type(group), name, value):
                raise CheckpointError(f"the checkpoint's arguments have {value!r:.40} as {name}, which it cannot be.")
            if name in given and getattr(group, name) != value:
                own = getattr(group, name)
                flag = given[name] if isinstance(given, Mapping) else f"--{name.replace('_', '-')}"
                words = flag if isinstance(own, bool) else f"{flag} {own}"
                differ.append(f"{words} (the checkpoint has {name} {value})")
    if differ:
        config = config.warn(f"--use-checkpoint-args takes the model from the checkpoint, not {', '.join(differ)}.")
    config = config.replace("model", **model)
    check_ranges(config.model, CheckpointError)
    return config.replace("data", **vocabulary)
