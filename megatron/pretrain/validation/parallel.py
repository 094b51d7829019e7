"""Checks how the model is distributed over ranks."""

from __future__ import annotations

from helixpipe.common.errors import UserError
from helixpipe.costs.context_parallel import nearest_sizes
from helixpipe.costs.models import A2A, IN_PARTS, P2P
from helixpipe.program.files import is_file
from megatron.pretrain.config import Config
from megatron.pretrain.config.communicators import nccl_settings
from megatron.pretrain.validation.wording import checked, nearest
from schedules import CATALOGUE


def world_size(config: Config) -> Config:
    """World size = pipeline x tensor x context x data."""
    parallel, world = config.parallel, config.launch.world_size
    pp, tp = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    cp = parallel.context_parallel_size
    copy = pp * tp * cp
    if world % copy:
        context = f" x --context-parallel-size {cp}" if cp > 1 else ""
        raise UserError(
            f"the world size {world} must be a multiple of --pipeline-model-parallel-size {pp} x "
            f"--tensor-model-parallel-size {tp}{context} = {copy}; the nearest valid sizes are {nearest(world, copy)}."
        )
    return config.replace("parallel", data_parallel_size=world // copy)


def context_parallel(config: Config) -> Config:
    """Check that all layers communicate in one way and that heads and sequence divide; one rank divides nothing."""
    parallel, model = config.parallel, config.model
    cp, length = parallel.context_parallel_size, checked(model.seq_length)
    if cp == 1:
        return config.replace("parallel", cp_comm_type=(P2P,))
    ways, given = set(parallel.cp_comm_type), " ".join(parallel.cp_comm_type)
    if not ways <= {A2A, P2P}:
        raise UserError(f"--cp-comm-type {given} is not supported; valid values are {A2A} and {P2P}.")
    if len(ways) > 1:
        raise UserError(
            f"--cp-comm-type {given}: ranks have other tokens with {P2P} than with {A2A}; give one for all layers."
        )
    config = config.replace("parallel", cp_comm_type=parallel.cp_comm_type[:1])
    heads = checked(model.num_attention_heads) // parallel.tensor_model_parallel_size
    if ways == {A2A} and heads % cp:
        raise UserError(
            f"--context-parallel-size {cp} with --cp-comm-type {A2A} must divide the {heads} heads of a "
            f"tensor-parallel rank; nearest valid sizes are {nearest_sizes(heads, cp)}, or use {P2P}."
        )
    if ways == {P2P} and model.attention_dropout:
        raise UserError(
            f"--attention-dropout {model.attention_dropout:g} cannot be had with --cp-comm-type {P2P}; give 0, or "
            f"--cp-comm-type {A2A}."
        )
    unit = config.parallel.unit
    if length % unit:
        raise UserError(
            f"--seq-length {length} must be a multiple of {unit} with --context-parallel-size {cp} and --cp-comm-type "
            f"{given}; the nearest valid values are {nearest(length, unit)}."
        )
    return config


def virtual_stages(config: Config) -> Config:
    """Set the stages of a rank from either of Megatron-LM's two flags."""
    parallel, layers = config.parallel, checked(config.model.num_layers)
    pp, per_stage = parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    stages = parallel.num_virtual_stages_per_pipeline_rank
    if per_stage is not None:
        if stages is not None:
            raise UserError(
                "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank say the same; "
                "give one."
            )
        if layers % (pp * per_stage):
            raise UserError(
                f"--num-layers-per-virtual-pipeline-stage {per_stage} must divide the layers of a pipeline rank "
                f"(--num-layers {layers} over {pp} ranks)."
            )
        stages = layers // (pp * per_stage)
    if stages is None:
        return config
    if pp == 1 and stages > 1:
        raise UserError(f"{stages} virtual stages need --pipeline-model-parallel-size above 1.")
    return config.replace("parallel", virtual_pipeline_model_parallel_size=stages)


def pipeline_schedule(config: Config) -> Config:
    """Fill in the default schedule, and check that one rank has none, and that flags find no chunks for a file. The
    schedule's own rules are checked when its program is built.
    """
    parallel = config.parallel
    pp, stages = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    name = parallel.pipeline_schedule
    if name is None:
        cut = pp > 1 and config.chunks.cutting_flag() is not None and not config.data.variable_seq_lengths
        name = CATALOGUE.default(pp == 1, virtual_stages=pp > 1 and stages not in (None, 1), chunks=cut)
    if name in CATALOGUE and CATALOGUE[name].one_rank and pp > 1:
        raise UserError(
            f"--pipeline-schedule {name} is for one pipeline rank, not --pipeline-model-parallel-size {pp}."
        )
    config = config.replace("parallel", pipeline_schedule=name)
    chunks = config.chunks
    CATALOGUE.check_chunks(chunks.cutting_flag(), [name])
    if config.data.variable_seq_lengths:
        if (flag := chunks.cutting_flag()) is not None:
            raise UserError(f"{flag} is for sequences that are all alike; of documents --infinipipe-chunks says it.")
        return config
    finding = chunks.finding(not is_file(name) and CATALOGUE.find(name).chunks)
    return config.replace("chunks", pipe_sp_splits=finding.pipe_sp_splits)


def sequence_parallel(config: Config) -> Config:
    """Off with one tensor-parallel rank, as in Megatron-LM; else the sequence is divided evenly."""
    parallel, length = config.parallel, checked(config.model.seq_length)
    tp = parallel.tensor_model_parallel_size
    if not parallel.sequence_parallel:
        return config
    if tp == 1:
        return config.replace("parallel", sequence_parallel=False).warn(
            "--sequence-parallel does nothing with --tensor-model-parallel-size 1."
        )
    if length % tp:
        raise UserError(
            f"--seq-length {length} must be a multiple of --tensor-model-parallel-size {tp} with --sequence-parallel; "
            f"the nearest valid values are {nearest(length, tp)}."
        )
    return config


def check_device(config: Config, *, gpus: int) -> None:
    """Check that nothing that needs a GPU is requested of a machine without one. `gpus`: how many this process sees."""
    if gpus:
        if config.adapt.check_every and not config.training.deterministic_mode:
            raise UserError(
                f"--check-every {config.adapt.check_every} compares bits, and a GPU's usual kernels add up in an order "
                "that may change: give --deterministic-mode, or --check-every 0."
            )
        local = config.launch.local_rank
        if local >= gpus and config.parallel.distributed_backend != "gloo":
            raise UserError(
                f"the process with LOCAL_RANK {local} has no GPU of its own on a machine with {gpus}, and NCCL "
                "needs one each; start as many as there are GPUs, or share them with --distributed-backend gloo."
            )
        return
    if config.parallel.distributed_backend == "nccl":
        raise UserError("--distributed-backend nccl needs a GPU; use gloo, the default without one.")


def sharding(config: Config) -> Config:
    """Set what data-parallel ranks shard, from Megatron-LM's flags."""
    parallel, strategy = config.parallel, config.parallel.data_parallel_sharding_strategy
    if parallel.use_torch_fsdp2:
        if strategy not in (None, "optim_grads_params"):
            raise UserError(
                f"--use-torch-fsdp2 and --data-parallel-sharding-strategy {strategy} contradict each other; it means "
                "optim_grads_params."
            )
        strategy = "optim_grads_params"
    elif parallel.use_megatron_fsdp and strategy is None:
        strategy = "optim_grads_params"
    if strategy == "optim":
        config = config.replace("parallel", use_distributed_optimizer=True)
    elif strategy in IN_PARTS and config.training.optimizer_cpu_offload:
        raise UserError(
            f"--optimizer-cpu-offload cannot be combined with --data-parallel-sharding-strategy {strategy}; "
            "use optim, or leave the optimizer's parts on the device."
        )
    whole, training = config.parallel.use_distributed_optimizer and strategy not in IN_PARTS, config.training
    if whole and training.optimizer != "adam" and not training.optimizer_cpu_offload:
        flag = "--data-parallel-sharding-strategy optim" if strategy == "optim" else "--use-distributed-optimizer"
        raise UserError(
            f"{flag} is megatron-core's for Adam alone, and cannot be combined with --optimizer "
            f"{training.optimizer}; leave it out, or give --data-parallel-sharding-strategy optim_grads."
        )
    return config.replace("parallel", data_parallel_sharding_strategy=strategy)


def communicators(config: Config) -> Config:
    """Check that the file of NCCL's settings can be read and is valid."""
    if config.parallel.nccl_communicator_config_path is not None:
        nccl_settings(config.parallel.nccl_communicator_config_path)
    return config


def stage_layers(config: Config) -> Config:
    """Set each stage's layers from the flags that divide them; a layout says, too, how many stages a rank has."""
    parallel, layers = config.parallel, checked(config.model.num_layers)
    ranks, stages = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    counts = config.division.stage_layers(layers, ranks, stages)
    if counts is None:
        return config
    stages = len(counts) // ranks if len(counts) > ranks else stages
    return config.replace("parallel", stage_layers=counts, virtual_pipeline_model_parallel_size=stages)
