"""Let a trained model write.

    python tools/generate.py --load runs/quickstart/checkpoints --prompt "def " --max-new-tokens 200 --temperature 0.8
    torchrun --nproc-per-node 4 tools/generate.py --load DIR --pipeline-model-parallel-size 4 --prompt-file question.txt

Model and tokenizer are those of the checkpoint, whatever the ranks it was trained on. Each rank has as many layers, and
keeps the keys and values of what has run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere, installed or not

from helixpipe.common.errors import UserError
from helixpipe.common.output import say
from megatron.pretrain.inference.commands import run_with_model
from megatron.pretrain.inference.generation import GenerationOptions, continuation


def work(model: Any, options: GenerationOptions) -> None:
    """Print each prompt and what follows it, on the first rank."""
    prompts = list(options.prompt)
    if options.prompt_file is not None:
        try:
            prompts.append(Path(options.prompt_file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--prompt-file {options.prompt_file} cannot be read: {error}.") from None
    for prompt in prompts or [""]:
        for text in continuation(model, prompt, options):
            if model.parallel.rank == 0:
                say(f"{'-' * 80}\n{prompt}{text}")


if __name__ == "__main__":
    sys.exit(run_with_model(GenerationOptions, (__doc__ or "").splitlines()[0], work))
