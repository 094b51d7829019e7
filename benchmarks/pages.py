"""Tables in the documents, written anew in their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def written_into(page: str, tables: Mapping[str, Sequence[str]]) -> str:
    """The page with each table in place of the one between its marks, `<!-- bench: NAME -->` and `<!-- end -->`."""
    for name, lines in tables.items():
        before, mark, rest = page.partition(f"<!-- bench: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not (mark and end):
            raise ValueError(f"the page has no place for the table {name}")
        page = f"{before}{mark}" + "".join(f"{line}\n" for line in lines) + f"{end}{after}"
    return page
