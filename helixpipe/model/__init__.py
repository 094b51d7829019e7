"""A megatron-core GPT cut into pieces: embed; norm, qkv, attn, proj, mlp of each layer; head."""

from helixpipe.model.device import prepare

prepare()  # megatron-core must be imported quietly and, without CUDA, made to run on the CPU

from helixpipe.model.attention.kv_store import KeyValueStore  # noqa: E402
from helixpipe.model.options import GPTOptions, Microbatch, UnitContext, layers_of  # noqa: E402
from helixpipe.model.pipeline_model import PipelineModel  # noqa: E402

__all__ = ["GPTOptions", "KeyValueStore", "Microbatch", "PipelineModel", "UnitContext", "layers_of"]
