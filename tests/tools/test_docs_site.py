"""The site's sources and the tutorial's pictures are what the scripts make of the repository as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helixpipe.cli.parser import parsers
from schedules import CATALOGUE
from tools.docs_site import ROOT, commands_page, configuration, page_text, pages, python_page, training_page, write
from tools.learn_pictures import FOLDER, PICTURES, picture


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_of_the_schedules_as_they_are(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == picture(PICTURES[name])


@pytest.mark.parametrize("name", PICTURES)
def test_pages_say_what_their_pictures_show(name: str) -> None:
    page = (FOLDER / name.replace(".svg", ".md")).read_text(encoding="utf-8")
    shown = re.findall(r"(\d+) % idle", picture(PICTURES[name]))
    for share in re.findall(r"(\d+) %", page):
        assert share in shown, (name, share)


def test_the_reference_has_every_flag_and_its_text() -> None:
    text = commands_page()
    for name, parser in parsers(CATALOGUE)[1].items():
        assert f"## helixpipe {name}\n" in text
        for flag in parser.option_strings():
            assert f"`{flag}" in text, (name, flag)
    assert "`--pipeline-schedule" in training_page() and "| `--lr " in training_page()
    assert "### helixpipe.lowering.validate.validate" in python_page()


def test_links_out_of_the_site_become_names(tmp_path: Path) -> None:
    known = pages()
    text = page_text(ROOT / "README.md", known)
    assert "](planning.md)" in text and "](docs/" not in text and "![" in text
    assert "; `examples/minimal.py` is all of it" in text
    assert "([costs](costs.md))" in page_text(ROOT / "docs" / "sppo.md", known)
    assert "`--recompute-granularity selective|full|without-attention`" in page_text(
        ROOT / "docs" / "training.md", known
    )
    write(tmp_path / "docs")
    for page in (tmp_path / "docs").rglob("*.md"):
        for target in re.findall(r"\]\(([^()\s#]+\.(?:md|svg|py|sh))[)#]", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).is_file(), (page, target)


def test_the_playgrounds_page_leads_to_it_where_it_is(tmp_path: Path) -> None:
    for there in (True, False):
        write(tmp_path / "docs", there)
        page = (tmp_path / "docs" / "playground.md").read_text(encoding="utf-8")
        assert page.startswith("# The playground\n") and ('href="playground/index.html"' in page) == there


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"[\w/]+\.md", configuration().partition("nav:")[2])
    reference = [f"reference/{name}.md" for name in ("commands", "training", "python")]
    assert sorted(listed) == sorted([*pages().values(), *reference])
