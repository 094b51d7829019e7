"""Write the sources of the site: `make docs` runs this, then mkdocs.

    python tools/docs_site.py build/docs [--playground]

The pages of docs/ and of the root as they are, but for links: those to files that are no pages become their names, and
those whose words are a page's file lose its ending. And the reference, from the parsers' flags and the docstrings.
With --playground the playground's page leads to it: it will be in the site's folder of that name.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from helixpipe.cli.parser import parsers
from helixpipe.common.flags import FlagParser
from megatron.pretrain.arguments import build_parser
from schedules import CATALOGUE

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
ROW, CODE = re.compile(r"^\|.*", re.MULTILINE), re.compile(r"`[^`\n]*`")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")

MODULES = (
    *("schedules/__init__.py", "helixpipe/program/program.py", "helixpipe/program/stages.py"),
    *("helixpipe/program/workload.py", "helixpipe/program/timeline.py", "helixpipe/program/files.py"),
    *("helixpipe/planning/catalogue.py", "helixpipe/lowering/validate.py", "helixpipe/lowering/lower.py"),
    *("helixpipe/simulate/simulator.py", "helixpipe/certify/certificate.py", "helixpipe/draw/page.py"),
    *("helixpipe/torch_pipelining.py", "schedules/drop_in.py"),
)
"""The modules that a program of one's own imports."""


def pages() -> dict[Path, str]:
    """Return each page's file and its name on the site."""
    found = {ROOT / name: page for name, page in ROOT_PAGES.items()}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        if "upstream" not in path.parts:
            found[path] = str(path.relative_to(ROOT / "docs"))
    return found


def page_text(path: Path, known: dict[Path, str]) -> str:
    """Return a page for the site. Links to pages and pictures lead there; of others the words remain. A bar in the code
    of a table's row loses its backslash, which GitHub wants and mkdocs shows."""

    def linked(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve()
        if file in known:
            up = "../" * known[path].count("/")
            shown = words.removesuffix(".md") if words == name else words
            return f"[{shown}]({up}{known[file]}{'#' if anchor else ''}{anchor})"
        if file.suffix == ".svg":
            up = "../" * known[path].count("/")
            return f"{picture}[{words}]({up}{file.relative_to(ROOT / 'docs')})"
        place = str(file.relative_to(ROOT))
        return words if "`" in words else f"`{place}`" if place.endswith(words) else f"{words} (`{place}`)"

    text = LINK.sub(linked, path.read_text(encoding="utf-8"))
    return ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), text)


def flags_text(parser: FlagParser) -> Iterator[str]:
    """Give the lines of a parser's flags, a table for each group."""
    for group in parser._action_groups:
        rows = []
        for action in group._group_actions:
            if action.help == argparse.SUPPRESS or not action.option_strings:
                continue
            value = "" if action.nargs == 0 else f" {_value(action)}"
            names = ", ".join(f"`{flag}{value}`" for flag in action.option_strings)
            rows.append(f"| {names.replace('|', '&#124;')} | {_cell(action.help or '')} |")
        if rows:
            yield from ("", f"### {group.title}", "", "| flag | |", "|---|---|", *rows)


def _value(action: argparse.Action) -> str:
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


def _cell(text: str) -> str:
    return " ".join(text.replace("%%", "%").split()).replace("|", "&#124;").replace("<", "&lt;").replace("*", "\\*")


def commands_page() -> str:
    """Return the reference of the `helixpipe` command."""
    _, commands = parsers(CATALOGUE)
    lines = ["# Commands and flags", "", "Written from the command's parsers."]
    for name, parser in commands.items():
        lines += ["", f"## helixpipe {name}", "", _cell(parser.description or "")]
        lines += [line.replace("### ", f"### {name}: ") for line in flags_text(parser)]
    return "\n".join(lines) + "\n"


def training_page() -> str:
    """Return the reference of the training program's flags."""
    lines = ["# Training flags", "", "Of `pretrain_gpt.py` and `helixpipe train`, written from the parser."]
    return "\n".join([*lines, *flags_text(build_parser())]) + "\n"


def python_page() -> str:
    """Return the reference of the modules that a program of one's own imports, from their docstrings."""
    lines = ["# Python", "", "Written from the docstrings."]
    for name in MODULES:
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        lines += ["", f"## {module}", "", *_docstring(tree)]
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                lines += ["", f"### {module}.{node.name}", "", *_signature(node), *_docstring(node)]
    return "\n".join(lines) + "\n"


def _signature(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    if isinstance(node, ast.ClassDef):
        fields = [ast.unparse(item) for item in node.body if isinstance(item, ast.AnnAssign)]
        return ["```python", *(f"{field}" for field in fields), "```", ""] if fields else []
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return ["```python", f"{node.name}({ast.unparse(node.args)}){returned}", "```", ""]


def _docstring(node: ast.Module | ast.FunctionDef | ast.ClassDef) -> list[str]:
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    return text.replace("<", "&lt;").splitlines()


OPEN = """
<a class="md-button" href="playground/index.html">Open the playground</a>
(from a web server: browsers start no Python for files)
"""


def write(folder: Path, playground: bool = False) -> None:
    """Write all sources into a folder, which is emptied. playground: whether its page leads to it."""
    if folder.exists():
        shutil.rmtree(folder)
    known = pages()
    for path, name in known.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(page_text(path, known), encoding="utf-8")
    if playground:
        title, _, rest = (folder / "playground.md").read_text(encoding="utf-8").partition("\n")
        (folder / "playground.md").write_text(f"{title}\n{OPEN}{rest}", encoding="utf-8")
    for file in (path for path in (ROOT / "docs").rglob("*") if path.suffix in (".svg", ".css")):
        shutil.copyfile(file, folder / file.relative_to(ROOT / "docs"))
    (folder / "reference").mkdir(exist_ok=True)
    for name, text in (("commands", commands_page()), ("training", training_page()), ("python", python_page())):
        (folder / "reference" / f"{name}.md").write_text(text, encoding="utf-8")


def configuration() -> str:
    """Return mkdocs' configuration, with the pages that its navigation lacks behind the others."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").rstrip("\n")
    more = sorted(set(pages().values()) - set(re.findall(r"[\w/]+\.md", text.partition("nav:")[2])))
    return text + "".join(["\n  - More:", *(f"\n      - {name}" for name in more)] if more else []) + "\n"


if __name__ == "__main__":
    sources = Path(sys.argv[1])
    write(sources, "--playground" in sys.argv[2:])
    (sources.parent / "mkdocs.yml").write_text(configuration(), encoding="utf-8")
