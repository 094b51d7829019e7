"""A chat template is code of someone else: it ends within limits that are counted, or is refused by its file's name."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from helixpipe.common.errors import DataError
from megatron.pretrain.data.chat_template import ChatTemplate, TemplateLimits, template_file
from megatron.pretrain.data.conversation_files import tokenize_once

SAID = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
LIMITS = TemplateLimits(steps=100_000, seconds=60, bytes=64 << 20, characters=1000)

MANY_STEPS = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "loops of messages": "{% for a in messages * 9999 %}{% for b in messages * 9999 %}{{ a }}{% endfor %}{% endfor %}",
    "a macro that calls itself": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}"
    ),
    "a loop that calls itself": (
        "{% for a in [[1, 2]] * 2 recursive %}{% if loop.depth < 60 %}{{ loop([[1], [2]]) }}{% endif %}{% endfor %}"
    ),
    "filters": "{% for a in range(999) %}{{ range(99999) | map('string') | list | length }}{% endfor %}",
}
MUCH_MEMORY = {
    "a long text": "{{ ('x' * 999999999) | length }}",
    "text that doubles": (
        "{% set n = namespace(s='x') %}{% for a in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s | length }}"
    ),
    "filled up": "{{ 'x' | center(999999999) | length }}",
    "many replaced": "{{ ('x' * 30000) | replace('x', 'y' * 30000) | length }}",
}


class Tokenizer:
    """A tokenizer with what one of a folder has of interest here."""

    vocab_size, eod, unique_identifiers = 256, 0, "bytes"

    def __init__(self, template: str, path: Path | None = None) -> None:
        self.chat_template, self.path = template, str(path) if path else None
        self.process = os.getpid()

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(
        self, messages: Any, chat_template: str, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert os.getpid() != self.process
        values = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return ImmutableSandboxedEnvironment().from_string(chat_template).render(**values)


def rendered(template: str, limits: TemplateLimits = LIMITS) -> str:
    return ChatTemplate(Tokenizer(template), template, limits).render(SAID, False)


@pytest.mark.parametrize("name", MANY_STEPS)
def test_steps_are_counted(name: str) -> None:
    with pytest.raises(DataError) as caught:
        rendered(MANY_STEPS[name])
    assert str(caught.value) == "the chat template takes more than 100,000 steps for one conversation"


class Leaving:
    """Runs Python when it goes, where exceptions are dropped."""

    def __del__(self) -> None:
        pass


class Forgetful(Tokenizer):
    def apply_chat_template(
        self, messages: Any, chat_template: str, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        environment = ImmutableSandboxedEnvironment()
        environment.globals["drop"] = lambda: [Leaving() for _ in range(100)] and ""
        return environment.from_string(chat_template).render(messages=messages)


def test_steps_are_counted_where_exceptions_are_dropped() -> None:
    """What ends a template is no exception: one raised while an object goes is dropped, and counting with it."""
    template = "{% for a in range(9999) %}{% for b in range(9999) %}{{ drop() }}{% endfor %}{% endfor %}"
    with pytest.raises(DataError) as caught:
        ChatTemplate(Forgetful(template), template, replace(LIMITS, seconds=5)).render(SAID, False)
    assert str(caught.value) == "the chat template takes more than 100,000 steps for one conversation"


@pytest.mark.parametrize("name", MUCH_MEMORY)
def test_memory_is_limited(name: str) -> None:
    with pytest.raises(DataError) as caught:
        rendered(MUCH_MEMORY[name])
    assert str(caught.value) == "the chat template takes more than 64 MiB of memory for one conversation"


def test_what_is_long_in_a_single_step_ends_too() -> None:
    """A text is made of a list that holds itself over and over."""
    nested = "{% set n = namespace(l=[]) %}{% for a in range(60) %}{% set n.l = [n.l, n.l] %}{% endfor %}"
    with pytest.raises(DataError, match="takes more than 2 s of the processor for one conversation"):
        rendered(
            nested + "{{ n.l == [[], [1]] or n.l == n.l[0] or (n.l | tojson) == '' }}",
            replace(LIMITS, seconds=2, bytes=1 << 40),
        )


def test_the_text_may_be_as_much_longer_than_the_messages() -> None:
    assert len(rendered("{{ 'x' * 1005 }}")) == 1005  # 5 characters are said
    with pytest.raises(DataError, match="makes 1,006 characters of one conversation, and 1,005 are the most"):
        rendered("{{ 'x' * 1006 }}")


def test_each_conversation_has_the_limits_to_itself() -> None:
    loops = ChatTemplate(Tokenizer(""), "{% for a in range(20000) %}{% endfor %}{{ messages[0].content }}", LIMITS)
    assert [loops.render(SAID, False) for _ in range(5)] == ["2+2?"] * 5


def test_it_goes_on_after_a_failure() -> None:
    template = ChatTemplate(
        Tokenizer(""), "{% if add_generation_prompt %}{{ messages.x.y }}{% endif %}{{ messages | length }}", LIMITS
    )
    with pytest.raises(DataError, match=r"^the chat template fails \("):
        template.render(SAID, True)
    assert template.render(SAID, False) == "2"


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_file_of_conversations_is_refused_with_the_templates_name(file: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    for name in ("tokenizer_config.json", file):
        (tmp_path / "tokenizer" / name).write_text("{}")
    tokenizer = Tokenizer(MANY_STEPS["nested loops"], tmp_path / "tokenizer")
    talk = tmp_path / "talk.jsonl"
    talk.write_text(json.dumps({"messages": SAID}))
    with pytest.raises(DataError) as caught:
        tokenize_once(str(talk), tokenizer, "default", str(tmp_path / "cache"))
    assert str(caught.value) == (
        f"{talk}, line 1: the chat template of {tmp_path}/tokenizer/{file} takes more than 5,000,000 steps for one "
        "conversation"
    )
    assert not list((tmp_path / "cache").iterdir())


def test_a_tokenizer_that_is_a_file_or_none(tmp_path: Path) -> None:
    assert template_file(Tokenizer("")) is None
    assert template_file(Tokenizer("", tmp_path / "tokens.json")) == str(tmp_path / "tokens.json")


def test_no_process_is_left() -> None:
    template = ChatTemplate(Tokenizer(""), "{{ 1 }}", LIMITS)
    assert template.render(SAID, False) == "1"
    child = template._child
    del template
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
