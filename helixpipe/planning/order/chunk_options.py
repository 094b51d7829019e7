"""Flags that say how sequences are cut into chunks, for the `helixpipe` command and for training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from helixpipe.common.errors import UserError
from helixpipe.common.flags import check_ranges, option
from helixpipe.common.ranges import MOST_CHUNKS, MOST_TOKENS
from helixpipe.planning.order.chunk_lengths import (
    CHUNK_COUNTS,
    FEW_CHUNKS,
    average_lengths,
    balanced_lengths,
    default_alignment,
)
from helixpipe.program.costs import Costs
from helixpipe.program.stages import even_stages

NOMINAL_LENGTH = 1 << 20
"""Parts of a sequence at most, where nothing says how many tokens it has, as with times given by hand: chunks are cut
to such a part."""

MOST_BALANCED = 1024
"""Chunks that are given equal times where nobody asks for it and nothing says how many tokens there are; with more of
them that takes longer than all else, and parts are too coarse."""


@dataclass(frozen=True)
class ChunkOptions:
    """Options of how each microbatch's sequence is cut; None: not given."""

    pipe_sp_splits: str | None = option(
        None,
        f"Chunks k each microbatch's sequence is cut into; auto: the best of {', '.join(map(str, CHUNK_COUNTS))} by "
        f"simulation that fits into the memory, those above {FEW_CHUNKS} with --hardware alone (default: auto for "
        "schedules made for chunks, else 1).",
        metavar="N|auto",
        at_least=1,
        at_most=MOST_CHUNKS,
        words=("auto",),
    )
    pipe_sp_strategy: Literal["uniform_comp", "average"] | None = option(
        None,
        "Lengths of the chunks: uniform_comp, each takes equally long, or average, each is equally long "
        "(default: uniform_comp).",
    )
    chunk_lengths: str | None = option(
        None, "Tokens of each chunk, in place of a strategy; they add up to the sequence.", metavar="N,N,..."
    )
    chunk_alignment: int | None = option(
        None,
        "Chunk lengths are multiples of this, but for the last one's remainder (default: the least common multiple of "
        "the tensor-parallel size and 64, where the sequence is long enough).",
        at_least=1,
        at_most=MOST_TOKENS,
    )

    @property
    def auto(self) -> bool:
        """Whether the number of chunks is searched for."""
        return self.pipe_sp_splits == "auto"

    def finding(self, made_for_chunks: bool, chunks: int | None = None) -> ChunkOptions:
        """Return these flags, or auto in place of a number of chunks that no flag says of a schedule made for chunks.

        Args:
            made_for_chunks: whether the schedule is (`Schedule.chunks`).
            chunks: what `--chunks` says.
        """
        said = self.auto or self._counts(chunks) or not made_for_chunks
        return self if said else replace(self, pipe_sp_splits="auto")

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """The lengths given one by one. Raises UserError."""
        if self.chunk_lengths is None:
            return None
        parts = [part.strip() for part in self.chunk_lengths.split(",")]
        if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
            raise UserError(
                f"--chunk-lengths {self.chunk_lengths} must be numbers of tokens with commas between, 1 or more each, "
                "such as 4096,2048,2048."
            )
        return tuple(map(int, parts))

    def count(self, chunks: int | None = None) -> int | None:
        """Return the number of chunks these flags ask for; None when they do not say or it is to be found.

        chunks: what another flag (`--chunks`) says. Raises UserError where two flags differ or a number is no number.
        """
        given = self._counts(chunks)
        if self.auto and given:
            raise UserError(f"--pipe-sp-splits auto finds the number of chunks; leave {next(iter(given))} out.")
        if len(set(given.values())) > 1:
            said = " and ".join(f"{flag} {count} chunks" for flag, count in given.items())
            raise UserError(f"the flags disagree: {said}.")
        for flag in ("pipe_sp_strategy", "chunk_alignment"):
            if getattr(self, flag) is not None:
                if self.lengths is not None:
                    raise UserError(f"--{flag.replace('_', '-')} has nothing to decide beside --chunk-lengths.")
                if not self.auto and max(given.values(), default=1) == 1:
                    raise UserError(f"--{flag.replace('_', '-')} needs --pipe-sp-splits of 2 or more, or auto.")
        return next(iter(given.values()), None)

    def cutting_flag(self, chunks: int | None = None) -> str | None:
        """Return the flag that asks for more than one chunk, with its value as given; None if none does.

        chunks: what `--chunks` says. Raises UserError where a number is no number.
        """
        if self.auto:
            return "--pipe-sp-splits auto"
        values = {"--chunk-lengths": self.chunk_lengths}
        flags = [f"{flag} {values.get(flag, count)}" for flag, count in self._counts(chunks).items() if count > 1]
        return flags[0] if flags else None

    def _counts(self, chunks: int | None) -> dict[str, int]:
        """Return the number of chunks that each given flag says."""
        check_ranges(self)
        counts = {"--chunks": chunks}
        if self.pipe_sp_splits is not None and not self.auto:
            counts["--pipe-sp-splits"] = int(self.pipe_sp_splits)
        if self.lengths is not None:
            counts["--chunk-lengths"] = len(self.lengths)
        return {flag: count for flag, count in counts.items() if count is not None}

    def resolve(
        self,
        chunks: int,
        costs: Costs,
        layers: int,
        seq_length: int | None = None,
        tensor_parallel: int = 1,
        unit: int | None = None,
    ) -> tuple[int, ...] | None:
        """Return the tokens of each of `chunks` chunks or, if no sequence length is known, lengths of which only the
        proportions matter; None for one chunk, and for more than MOST_BALANCED if nothing asks for lengths.

        unit: what lengths must be multiples of for the ranks that share a chunk; None: the tensor-parallel size. Raises
        UserError if lengths given do not add up to the sequence, or there are too few tokens.
        """
        if chunks == 1:
            return None
        check_ranges(self)
        unit = unit or tensor_parallel
        shared = f"the tensor-parallel size {tensor_parallel}"
        if unit != tensor_parallel:
            shared = f"{unit}, which tensor- and context-parallel ranks can share"
        if self.lengths is not None:
            return self._checked(self.lengths, chunks, seq_length, unit, shared)
        if seq_length is None and self.pipe_sp_strategy is None and chunks > MOST_BALANCED:
            return None
        # A multiple of the chunks, so that chunks that take as long as they are long come out equal.
        length = seq_length or NOMINAL_LENGTH // chunks * chunks
        alignment = self.chunk_alignment
        if alignment is None:
            alignment = 1 if seq_length is None else default_alignment(length, chunks, unit)
        if alignment % unit:
            raise UserError(f"--chunk-alignment {alignment} must be a multiple of {shared}.")
        if self.pipe_sp_strategy == "average":
            return average_lengths(length, chunks, alignment)
        return balanced_lengths(costs, even_stages(costs.layer_kinds(layers), 1), length, chunks, alignment)

    def _checked(
        self, lengths: tuple[int, ...], chunks: int, seq_length: int | None, unit: int, shared: str
    ) -> tuple[int, ...]:
        if len(lengths) != chunks:
            raise UserError(f"--chunk-lengths {self.chunk_lengths} are {len(lengths)} chunks, not {chunks}.")
        if seq_length is not None and sum(lengths) != seq_length:
            raise UserError(
                f"--chunk-lengths {self.chunk_lengths} add up to {sum(lengths)} tokens, but the sequence has "
                f"{seq_length}."
            )
        if any(length % unit for length in lengths):
            raise UserError(f"--chunk-lengths {self.chunk_lengths} must be multiples of {shared}.")
        return lengths
