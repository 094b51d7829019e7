"""Megatron-LM's own argument lists for GPT, what `pretrain_gpt.py` here makes of each, and the table of it in the docs.

    python -m tests.training.megatron_lists     # write outcomes.txt and the table in docs/megatron_lm.md anew

The lists are facts, copied from its functional tests and example scripts into megatron_lm/*.toml.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.data import read
from helixpipe.common.errors import UserError
from megatron.pretrain.arguments import by_flag, parse_args

FOLDER = Path(__file__).with_name("megatron_lm")
GOLDEN = FOLDER / "outcomes.txt"
PAGE = Path(__file__).parents[2] / "docs" / "megatron_lm.md"
BEGIN, END = "<!-- lists: written by python -m tests.training.megatron_lists -->\n", "<!-- end of lists -->\n"
IGNORED = "accepted without effect: "


@dataclass(frozen=True)
class ArgumentList:
    """One list. source: the file it is in, without its ending. world: number of ranks."""

    source: str
    name: str
    words: tuple[str, ...]
    world: int


@dataclass(frozen=True)
class Outcome:
    """The outcome of parsing. refusal: the sentence, or None. ignored: flags without effect. warnings: the other
    ones.
    """

    refusal: str | None
    ignored: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def reason(self) -> tuple[str, str]:
        """The flag that is refused, or "", and why, so that equal reasons can be counted."""
        flag, refused, why = (self.refusal or "").partition(" is refused: ")
        return (f"`{flag.split()[0]}`", why) if refused else ("", flag)

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"refused: {self.refusal}"
        ignored = (f"without effect {' '.join(self.ignored)}",) if self.ignored else ()
        return "; ".join(["accepted", *ignored, *self.warnings])


def argument_lists() -> list[ArgumentList]:
    """All of them, in the order of the files."""
    return [each for path in sorted(FOLDER.glob("*.toml")) for each in _read(path)]


def _read(path: Path) -> Iterable[ArgumentList]:
    tables = read(path)
    common = {name: _flags(text) for name, text in tables.pop("common").items()}
    for name, table in tables.items():
        flags: dict[str, tuple[str, ...]] = {}
        for part in table.get("like", "").split():
            flags |= common[part]
        flags |= _flags(table.get("flags", ""))
        for flag in table.get("without", "").split():
            del flags[flag]
        words = tuple(word for flag, values in flags.items() for word in (flag, *values))
        yield ArgumentList(path.stem, name, words, table.get("world", 8))


def _flags(text: str) -> dict[str, tuple[str, ...]]:
    return {flag: values for flag, values, _ in by_flag(text.split())}


def outcome(each: ArgumentList) -> Outcome:
    """Parse one list as the training program would on `world` ranks, if the tokenizer's files had GPT-2's size."""
    size = () if "--vocab-size" in each.words else ("--vocab-size", "50257")
    try:
        config = parse_args((*each.words, *size), environ={"WORLD_SIZE": str(each.world)})
    except UserError as error:
        return Outcome(str(error))
    ignored = [sentence for sentence in config.warnings if sentence.startswith(IGNORED)]
    listed = [part.split()[0] for sentence in ignored for part in sentence.removeprefix(IGNORED).split("; --")]
    others = tuple(sentence for sentence in config.warnings if sentence not in ignored)
    return Outcome(None, tuple(f"--{flag.removeprefix('--')}" for flag in listed), others)


def golden_lines(outcomes: Mapping[str, Outcome]) -> list[str]:
    return [f"{name}: {found}" for name, found in outcomes.items()]


def table(outcomes: Mapping[ArgumentList, Outcome]) -> str:
    """Counts for each source, and the reasons of refusals with how many lists each refuses, as Markdown."""
    lines = ["| lists | all | accepted | accepted with a warning | refused |", "|---|--:|--:|--:|--:|"]
    for source in dict.fromkeys(each.source for each in outcomes):
        found = [result for each, result in outcomes.items() if each.source == source]
        lines.append(_counts(source.replace("_", " "), found))
    lines += [_counts("together", list(outcomes.values())), "", "| refused | because | lists |", "|---|---|--:|"]
    reasons = Counter(result.reason for result in outcomes.values() if result.refusal is not None)
    lines += [f"| {flag} | {why} | {count} |" for (flag, why), count in reasons.most_common()]
    return "\n".join(lines) + "\n"


def _counts(label: str, found: list[Outcome]) -> str:
    refused = sum(result.refusal is not None for result in found)
    warned = sum(bool(result.refusal is None and (result.ignored or result.warnings)) for result in found)
    return f"| {label} | {len(found)} | {len(found) - refused - warned} | {warned} | {refused} |"


def outcomes() -> dict[ArgumentList, Outcome]:
    return {each: outcome(each) for each in argument_lists()}


def with_table(page: str, written: str) -> str:
    """The page with the table between its two marks replaced."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{written}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    found = outcomes()
    lines = golden_lines({each.name: result for each, result in found.items()})
    GOLDEN.write_text("\n".join(lines) + "\n", encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(found)), encoding="utf-8")
    print(table(found), end="")


if __name__ == "__main__":
    main()
