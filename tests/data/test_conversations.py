"""--sft: which tokens of a conversation are trained, and the files that are made of them."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import DataError, UserError
from megatron.pretrain.data.conversations import Renderer
from megatron.pretrain.data.datasets import build_datasets
from megatron.pretrain.data.document_splits import build_orders, build_stream
from megatron.pretrain.data.options import DataOptions, LongDocuments
from megatron.pretrain.data.tokenizer import build_tokenizer

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
CHATML = TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}"
THINKS = CHATML.replace("%}<assistant>{%", "%}<assistant><think>{%")
FORGETS = (
    "{% for m in messages %}{% if loop.last or m.role == 'user' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
TALK = [
    {"role": "system", "content": "Brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6"},
]


class Templated:
    """A tokenizer of bytes with a chat template."""

    vocab_size, eod = 256, 0

    def __init__(self, template: str | dict[str, str] | None) -> None:
        self.chat_template = template

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(
        self, conversation: Any, chat_template: str, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        values = {"messages": conversation, "add_generation_prompt": add_generation_prompt}
        return jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(chat_template).render(**values)


def shown(record: Any, tokenizer: Any = None, prompt_format: str = "default") -> str:
    """The conversation's text, what is trained in brackets; the end of the document is a full stop."""
    line = "[" * 100_000 if record == "nested" else json.dumps(record)
    encoded = Renderer(tokenizer or build_tokenizer("ByteLevelTokenizer"), prompt_format).encode(line)
    text, open_ = "", False
    for token, trained in zip(encoded.tokens, encoded.trained, strict=True):
        text += ("[" if trained and not open_ else "]" if open_ and not trained else "") + (
            chr(token) if token else "."
        )
        open_ = trained
    return text + ("]" if open_ else "")


@pytest.mark.parametrize(
    ("record", "how", "expected"),
    [
        ({"prompt": "2+2=", "completion": "4"}, {}, "2+2=[4.]"),
        ({"prompt": "", "completion": "4"}, {"tokenizer": Templated(CHATML)}, "[4.]"),
        (
            {"messages": TALK},
            {},
            "system: Brief.\nuser: 2+2?\nassistant: [4\n]user: 3+3?\nassistant: [6\n.]",
        ),
        ({"messages": TALK[:4]}, {}, "system: Brief.\nuser: 2+2?\nassistant: [4\n]user: 3+3?\n."),
        ({"messages": TALK}, {"prompt_format": "identity"}, "Brief.2+2?[4]3+3?[6.]"),
        (
            {"messages": TALK},
            {"tokenizer": Templated(CHATML)},
            "<system>Brief.</s><user>2+2?</s><assistant>[4</s>]<user>3+3?</s><assistant>[6</s>]",
        ),
        (
            {"messages": TALK[1:4]},
            {"tokenizer": Templated({"tools": "", "default": CHATML})},
            "<user>2+2?</s><assistant>[4</s>]<user>3+3?</s>",
        ),
        # The prompt says more than the turn does then: the turn's head is trained as well.
        ({"messages": TALK[1:3]}, {"tokenizer": Templated(THINKS)}, "<user>2+2?</s>[<assistant>4</s>]"),
        ({"messages": TALK}, {"tokenizer": Templated(CHATML), "prompt_format": "identity"}, "Brief.2+2?[4]3+3?[6.]"),
        (
            {"messages": TALK[2:]},
            {"tokenizer": Templated(CHATML)},
            "[<assistant>4</s>]<user>3+3?</s><assistant>[6</s>]",
        ),
    ],
)
def test_what_the_assistant_says_is_trained(record: Any, how: dict[str, Any], expected: str) -> None:
    assert shown(record, **how) == expected


@pytest.mark.parametrize(
    ("record", "template", "words"),
    [
        ([1], None, "a JSON object is expected, not list"),
        ("nested", None, "not JSON"),
        ({"text": "a"}, None, "neither 'messages' nor 'prompt' and 'completion' are among its keys; there are 'text'"),
        ({"prompt": "a", "completion": 4}, None, "the value of 'completion' is int, not text"),
        ({"prompt": "a", "completion": ""}, None, "the assistant says nothing"),
        ({"messages": []}, None, "'messages' must be a list"),
        ({"messages": [{"role": "user"}]}, None, "message 1 must have a 'role' and a 'content', both text"),
        ({"messages": TALK[:2]}, None, "no message is the assistant's"),
        (
            {"messages": [*TALK, {"role": "clown", "content": ""}]},
            None,
            "message 6 has the role 'clown'; without a chat",
        ),
        ({"messages": TALK}, FORGETS, "the chat template writes earlier turns otherwise once message 5 follows"),
        ({"messages": TALK}, "{{ missing.such }}", "the chat template fails .'missing' is undefined"),
    ],
)
def test_what_is_no_conversation_is_told(record: Any, template: str | None, words: str) -> None:
    with pytest.raises(DataError, match=words):
        shown(record, Templated(template))


# --------------------------------------------------------------------------------------------------------------- files


def write(path: Path, lines: list[Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def train(path: str, seq_length: int = 12, samples: int = 6, **flags: Any) -> Any:
    options = DataOptions(seq_length, data_path=[path], split="1", sft=True, **flags)
    return build_datasets(options, build_tokenizer("ByteLevelTokenizer"), (samples, 0, 0)).train


def test_samples_are_padded_or_truncated_conversations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"prompt": "one ", "completion": "two"}, {"prompt": "longer than ", "completion": "twelve"}]
    dataset = train(write(tmp_path / "a.jsonl", lines))
    assert " > train: 2 documents, 1 of them truncated\n" in capsys.readouterr().out
    assert len(dataset) == 6
    found = {bytes(sample["tokens"].tolist()): sample for sample in (dataset[i] for i in range(6))}
    assert set(found) == {b"one two" + bytes(5), b"longer than "}
    short, cut = found[b"one two" + bytes(5)], found[b"longer than "]
    assert bytes(short["labels"].tolist()) == b"ne two\0" + bytes(5)
    assert short["loss_mask"].tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0]  # two and the end
    assert short["position_ids"].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]
    assert cut["loss_mask"].tolist() == [0] * 11 + [1] and bytes(cut["labels"].tolist()) == b"onger than t"
    for sample in found.values():
        assert {name: tensor.dtype for name, tensor in sample.items()} == {
            "tokens": torch.int64,
            "labels": torch.int64,
            "loss_mask": torch.float32,
            "position_ids": torch.int64,
            "real": torch.bool,
        }
    assert short["real"].tolist() == [True] * 7 + [False] * 5 and cut["real"].all()
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[3]["tokens"], dataset[3]["tokens"])  # loaders may be spawned
    order = [bytes(dataset[i]["tokens"].tolist()) for i in (5, 2, 3, 4, 0, 1)]
    assert all(len(set(order[i : i + 2])) == 2 for i in (2, 4))  # each once an epoch, wherever it is read from


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(1, 40),
    st.sampled_from(["truncate", "skip"]),
    st.booleans(),
)
def test_every_conversation_that_is_read_trains(
    sizes: list[tuple[int, int]], seq_length: int, long_documents: LongDocuments, as_messages: bool
) -> None:
    """Those cut before the assistant speaks are counted and left out; where no other is left, the run is refused."""
    lines: list[Any]
    if as_messages:
        turns = [[("user", "q" * asked), ("assistant", "a" * told)] for asked, told in sizes]
        lines = [{"messages": [{"role": role, "content": text} for role, text in each]} for each in turns]
        firsts = [len("user: \n") + asked + len("assistant: ") for asked, _ in sizes]
        lengths = [first + told + 2 for first, (_, told) in zip(firsts, sizes, strict=True)]
    else:
        lines = [{"prompt": "q" * asked, "completion": "a" * told} for asked, told in sizes]
        firsts = [max(1, asked) for asked, _ in sizes]
        lengths = [asked + told + 1 for asked, told in sizes]
    fits = [long_documents == "truncate" or length - 1 <= seq_length for length in lengths]
    late = sum(fit and first > seq_length for fit, first in zip(fits, firsts, strict=True))
    trains = sum(fit and first <= seq_length for fit, first in zip(fits, firsts, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        path, how = write(Path(folder) / "a.jsonl", lines), {"long_documents": long_documents}
        if not trains:
            with pytest.raises(DataError, match=r"a\.jsonl has no document for it"):
                train(path, seq_length, **how)
            return
        options = DataOptions(seq_length, data_path=[path], split="1", sft=True, **how)
        tokenizer = build_tokenizer("ByteLevelTokenizer")
        with contextlib.redirect_stdout(io.StringIO()) as output:
            order = build_orders(options, tokenizer).train
        told = f"{late} in which the assistant says nothing within --seq-length left out"
        assert (told in output.getvalue()) == (late > 0)
        assert order is not None and order.counts.untrained == late and order.round_size == trains
        dataset = train(path, seq_length, samples=2 * trains, **how)
        assert all(dataset[i]["loss_mask"].sum() > 0 for i in range(2 * trains))
        step = (stream := build_stream(order, options, tokenizer, 2 * trains)).step(0)
        assert all(stream.read(step, number).loss_mask.sum() > 0 for number in range(2 * trains))


def test_files_are_tokenized_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}])
    train(path)
    (made,) = (tmp_path / "a.jsonl.cache").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(Renderer, "encode", None)
        train(path)
    train(path, sft_tokenizer_prompt_format="identity")
    write(Path(path), [{"prompt": "a", "completion": "c"}])
    assert bytes(train(path)[0]["labels"].tolist()[:2]) == b"c\0"
    assert len(list((tmp_path / "a.jsonl.cache").iterdir())) == 3
    for masks in (tmp_path / "a.jsonl.cache").glob("*/trained.bin"):
        masks.write_bytes(b"")
    with pytest.raises(DataError, match=r"trained\.bin does not have a byte for each of 3 tokens"):
        train(path)
    assert made.is_dir()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": "a", "completion": "b"}\n\n{"prompt": "a"}\n', r"a\.jsonl, line 3: neither 'messages' nor"),
        ("{\n", r"a\.jsonl, line 1: not JSON"),
        ("\n", r"a\.jsonl holds no conversations"),
    ],
)
def test_bad_lines_are_named_and_leave_nothing(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=words) as caught:
        train(str(path))
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "a.jsonl.cache").iterdir()) == []


def test_wrong_files_and_formats_are_told(tmp_path: Path, make_pair: Callable[..., str]) -> None:
    with pytest.raises(DataError, match=r"is not a \.jsonl file"):
        train(make_pair("a", ["text"]))
    with pytest.raises(DataError, match=r"none\.jsonl cannot be read: No such file"):
        train(str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match=r"a\.jsonl is text: preprocess it"):
        options = DataOptions(12, data_path=[str(tmp_path / "a.jsonl")])
        build_datasets(options, build_tokenizer("ByteLevelTokenizer"), (6, 0, 0))
    with pytest.raises(UserError, match=r"nemotron-h-aligned is of one family .* valid are default and identity"):
        DataOptions(12, data_path=["a.jsonl"], sft=True, sft_tokenizer_prompt_format="nemotron-h-aligned")
