"""Perplexity by position in a document: what extending a model's context is judged by.

    python tools/evaluate.py --load DIR --documents data/books_text_document --context 32768
    torchrun --nproc-per-node 4 tools/evaluate.py --load DIR --pipeline-model-parallel-size 4 --text book.txt

Each document is predicted by itself from its first token on, up to --context tokens of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere, installed or not

import numpy

from helixpipe.common.errors import DataError, UserError
from helixpipe.common.files import try_file, whole_file
from helixpipe.common.output import say
from megatron.pretrain.checkpoint.ranks import together
from megatron.pretrain.data.conversations import token_ids
from megatron.pretrain.data.document_files import IndexedDocuments
from megatron.pretrain.data.indexed_files import read_indexed_file
from megatron.pretrain.inference.commands import run_with_model
from megatron.pretrain.inference.perplexity import PerplexityOptions, context_of, perplexity, table


def documents(options: PerplexityOptions, tokenizer: Any, context: int) -> Iterator[numpy.ndarray]:
    """Token ids of each. Raises UserError without any, for a file that cannot be read, and where there is nothing to
    predict."""
    if (options.documents is None) == (options.text is None):
        raise UserError("give either --documents, the prefix of a .bin/.idx pair, or --text, a file.")
    if options.text is not None:
        try:
            text = Path(options.text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--text {options.text} cannot be read: {error}.") from None
        try:
            ids = token_ids(tokenizer, text) if text.strip() else []
        except DataError as error:
            raise UserError(f"--text {options.text}: {error}.") from None
        if len(ids) < 2:
            raise UserError(f"--text {options.text} has {_few(len(ids))}; give a file with two tokens or more.")
        yield numpy.asarray(ids)
        return
    indexed = IndexedDocuments(read_indexed_file(str(options.documents)), vocab_size=tokenizer.vocab_size)
    if (most := int(indexed.lengths.max(initial=0))) < 2:
        raise UserError(
            f"--documents {options.documents}: no document has more than {_few(most)}; give data whose "
            "documents have two tokens or more."
        )
    for number in numpy.argsort(-indexed.lengths, kind="stable")[: options.max_documents]:
        yield indexed.read(int(number), context).tokens


def _few(count: int) -> str:
    """Return how few tokens there are, none or one: nothing can be predicted, since each is from those before it."""
    return "no token" if count == 0 else "one token alone"


def work(model: Any, options: PerplexityOptions) -> None:
    """Print the table on the last rank of the pipeline, which knows the losses."""
    writes = model.is_last and model.parallel.tp_rank == 0
    together(lambda: try_file("--json", options.json) if writes and options.json is not None else None, "--json")
    context = context_of(model, options)
    buckets, count = perplexity(model, documents(options, model.tokenizer, context), options)
    if writes:
        say(table(buckets, count))
        if options.json is not None:
            rows = [{**each._asdict(), "perplexity": each.perplexity} for each in buckets if each.tokens]
            with whole_file(options.json) as path:
                path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_with_model(PerplexityOptions, (__doc__ or "").splitlines()[0], work))
