"""Steps of microbatches that are unlike each other: chains of chunks, with short documents behind the long ones."""

from __future__ import annotations

from random import Random

from helixpipe.program.workload import Chunk, Slice, Workload


def random_chains(rng: Random, microbatches: int, most: int, longest: int = 9) -> Workload:
    """Microbatches of one chunk and of up to `most`, each of one document, some with whole short ones behind its end.

    longest: tokens of a slice.
    """
    documents = 0
    chains: list[tuple[Chunk, ...]] = []
    for _ in range(microbatches):
        start, own, chunks = 0, documents, list[Chunk]()
        documents += 1
        count = rng.choice((1, rng.randint(1, most)))
        for _ in range(count):
            chunks.append((Slice(own, start, rng.randint(1, longest)),))
            start += chunks[-1][0].length
        for _ in range(rng.choice((0, 0, 1, 2))):
            chunks[-1] = (*chunks[-1], Slice(documents, 0, rng.randint(1, 4)))
            documents += 1
        chains.append(tuple(chunks))
    return Workload(tuple(chains))


def equal_chains(counts: tuple[int, ...], tokens: int = 8) -> Workload:
    """A document in each microbatch, in so many chunks of equally many tokens."""
    return Workload(
        tuple(
            tuple((Slice(document, chunk * tokens, tokens),) for chunk in range(count))
            for document, count in enumerate(counts)
        )
    )
