"""Stands for megatron.training.utils, which says of each rank what of a batch it needs."""

from megatron.core import mpu


def is_first_or_last_pipeline_stage(vp_stage):
    place = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    return mpu.is_pipeline_first_stage(**place) or mpu.is_pipeline_last_stage(**place)


def get_batch_on_this_tp_rank(data_iterator, mtp_on_this_rank=False):
    """Keeps, of one end of the model, what that end needs, whatever the schedule has on this rank."""
    tokens, labels, loss_mask = next(data_iterator)
    if mpu.get_pipeline_model_parallel_world_size() > 1 and not mtp_on_this_rank:
        if mpu.is_pipeline_first_stage():
            labels = loss_mask = None
        else:
            tokens = None
    return tokens, labels, loss_mask
