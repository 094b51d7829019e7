"""NCCL's settings for process groups, from the file that Megatron-LM's --nccl-communicator-config-path names.

    pp: {max_ctas: 4, min_ctas: 1, is_high_priority_stream: true}
    dp: {cga_cluster_size: 2}

Groups are named as in megatron-core's `parallel_state.initialize_model_parallel`, which reads the file as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from helixpipe.common.errors import UserError
from megatron.pretrain.config.parallel import ParallelConfig

_FLAG = "--nccl-communicator-config-path"


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


_COUNT = _is_count, "a whole number above 0"

_SETTINGS: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "is_high_priority_stream": (lambda value: isinstance(value, bool), "true or false"),
        "min_ctas": _COUNT,
        "max_ctas": _COUNT,
        "cga_cluster_size": _COUNT,
        "net_name": (lambda value: str(value).lower() in ("ib", "socket"), "IB or Socket"),
    }
)
"""The settings that megatron-core takes from the file, with a check and a description of their values."""


def pipeline_settings(parallel: ParallelConfig) -> dict[str, int | str | bool]:
    """Return the settings of the communicator for pipeline messages that the flags give."""
    path = parallel.nccl_communicator_config_path
    settings = {} if path is None else nccl_settings(path).get("pp", {})
    high = "pp" in (parallel.high_priority_stream_groups or ())
    return {**settings, "is_high_priority_stream": True} if high else settings


def nccl_settings(path: str) -> dict[str, dict[str, int | str | bool]]:
    """Read the settings of each group from a file. Raises UserError if it cannot be read or is invalid."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{_FLAG} {path} cannot be read: {reason}.") from None
    except RecursionError:
        raise UserError(f"{_FLAG} {path} cannot be read: it is nested too deeply.") from None
    if not isinstance(content, dict):
        raise UserError(f"{_FLAG} {path} must hold a mapping from process groups, such as pp, to settings.")
    for group, settings in content.items():
        if not isinstance(settings, dict):
            raise UserError(f"{_FLAG} {path}: {group} must be a mapping of {', '.join(_SETTINGS)}.")
        for name, value in settings.items():
            if name not in _SETTINGS:
                raise UserError(f"{_FLAG} {path}: {group} has {name!r}, which is none of {', '.join(_SETTINGS)}.")
            fits, what = _SETTINGS[name]
            if not fits(value):
                raise UserError(f"{_FLAG} {path}: {name} of {group} is {value!r} and must be {what}.")
        if settings.get("min_ctas", 1) > settings.get("max_ctas", settings.get("min_ctas", 1)):
            raise UserError(f"{_FLAG} {path}: min_ctas of {group} is above its max_ctas.")
    return content
