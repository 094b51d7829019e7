"""Lengths of documents: histograms that say what was published, drawing by seed, files, and what is refused."""

from __future__ import annotations

from math import exp, log

import pytest

from helixpipe.common.errors import UserError
from helixpipe.planning.documents.length_data import LENGTHS, Histogram
from helixpipe.planning.documents.lengths import LengthOptions, documents_of


def token_shares(histogram: Histogram) -> list[float]:
    """Tokens of each bin over documents, where the logarithm of the length is evenly spread."""
    means = [(high - low) / log(high / low) for low, high in zip(histogram.edges, histogram.edges[1:], strict=False)]
    return [mean * share / 100 for mean, share in zip(means, histogram.shares, strict=True)]


def test_github_is_as_published():
    github = LENGTHS["github"]
    tokens = token_shares(github)
    assert sum(github.shares) == pytest.approx(100)
    assert github.share_below(8192) == pytest.approx(91.5)
    assert 100 - github.share_below(65536) == pytest.approx(0.6)
    above = sum(each for each, low in zip(tokens, github.edges, strict=False) if low >= 65536)
    assert above / sum(tokens) == pytest.approx(0.216, abs=5e-4)


def test_commoncrawl_is_as_published():
    crawl = LENGTHS["commoncrawl"]
    assert sum(crawl.shares) == pytest.approx(100)
    assert sum(token_shares(crawl)) == pytest.approx(20.5e12 / 14.5e9, rel=0.01)
    assert 100 - crawl.share_below(65536) == pytest.approx(100 * 6661465 / 14.5e9, rel=0.01)


@pytest.mark.parametrize("name", LENGTHS)
def test_drawn_as_the_histogram_says(name):
    drawn = documents_of(LengthOptions(name, documents=20000)).lengths
    for edge in (256, 2048, 8192):
        share = 100 * sum(length < edge for length in drawn) / len(drawn)
        assert share == pytest.approx(LENGTHS[name].share_below(edge), abs=1.2)
    assert LENGTHS[name].edges[0] <= min(drawn) and max(drawn) < LENGTHS[name].edges[-1]


def test_by_seed_and_length():
    first, again, other = (documents_of(LengthOptions("github", seed=seed)).lengths for seed in (0, 0, 1))
    assert first == again != other and len(first) == 512
    cut = documents_of(LengthOptions("github", documents=2000, max_length=3000)).lengths
    assert max(cut) <= 3000 and max(cut) > 2500 and len(cut) == 2000
    assert documents_of(LengthOptions()) is None


def test_lognormal():
    lengths = sorted(documents_of(LengthOptions("lognormal:6,1.5,20000", documents=4000)).lengths)
    assert lengths[2000] == pytest.approx(exp(6), rel=0.15)
    assert lengths[-1] <= 20000 and lengths[3980] > 5000


def test_file(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("5\n7\n900\n3\n")
    assert documents_of(LengthOptions(str(path))).lengths == (5, 7, 900, 3)
    found = documents_of(LengthOptions(str(path), max_length=7))
    assert found.lengths == (5, 7, 3) and found.left_out == 1 and found.tokens == 15
    sample = documents_of(LengthOptions(str(path), documents=2)).lengths
    assert len(sample) == 2 and set(sample) < {5, 7, 900, 3}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (LengthOptions(seed=3), "--seed needs --lengths"),
        (LengthOptions("github", documents=0), "--documents 0 must be at least 1"),
        (LengthOptions("githib"), "did you mean github"),
        (LengthOptions("github", max_length=10), "--max-length 10 leaves next to no document"),
        (LengthOptions("lognormal:6"), "lognormal:MU,SIGMA"),
        (LengthOptions("lognormal:6,0"), "sigma and most above 0"),
        (LengthOptions("lognormal:15,0.1,2"), "leaves next to no document of at most 2"),
    ],
)
def test_refused(options, says):
    with pytest.raises(UserError, match=says.replace("+", r"\+")):
        documents_of(options)


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("12\n0\n", {}, "number 2: '0' is no length"),
        ("12\n1e3\n", {}, "number 2: '1e3' is no length"),
        ("", {}, "has 0 documents, fewer than one"),
        ("5\n6\n", {"documents": 3}, "has 2 documents, fewer than --documents 3"),
        ("50\n60\n", {"max_length": 9}, "0 documents of at most 9 tokens"),
    ],
)
def test_files_refused(tmp_path, text, options, says):
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        documents_of(LengthOptions(str(path), **options))
