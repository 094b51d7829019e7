"""Conversations as tokens, and which of these the model is to learn: what the assistant says.

A line of JSON is `{"messages": [{"role": …, "content": …}, …]}` or `{"prompt": …, "completion": …}`. It is rendered to
pieces of text, trained and not, by turns, and each piece is tokenized by itself: so the model sees a prompt in training
exactly as it will when it is given the prompt alone.

- A prompt and its completion are taken as they are, one after the other.
- Messages are rendered by the tokenizer's chat template where it has one. What it adds for the assistant to go on from
  (its generation prompt) is not trained; the assistant's words are, and what ends its turn.
- Without a template each is a line `role: content`; only `content` and the line's end are trained, of the assistant.
- `identity` takes contents as they are, one after the other.

Where no template says how a conversation ends, the end-of-document token ends it, and is trained behind the assistant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from helixpipe.common.errors import DataError
from helixpipe.common.json_values import parse_json
from megatron.pretrain.data.boundaries import end_of_document
from megatron.pretrain.data.chat_template import ChatTemplate, Conversation

ASSISTANT = "assistant"
ROLES = ("system", "user", "assistant", "tool")
"""The roles that can be rendered without a template."""


class TextSpan(NamedTuple):
    """Part of a conversation. trained: whether its tokens are to be learned."""

    text: str
    trained: bool


class ChatMessage(NamedTuple):
    role: str
    content: str


class Encoded(NamedTuple):
    """Tokens of a conversation, and which are trained."""

    tokens: list[int]
    trained: list[bool]


@dataclass(frozen=True)
class Renderer:
    """Turns lines into tokens. prompt_format: --sft-tokenizer-prompt-format."""

    tokenizer: Any
    prompt_format: str = "default"

    @property
    def template(self) -> str | None:
        """The chat template that is used: the tokenizer's, of several the default."""
        if self.prompt_format != "default":
            return None
        template = getattr(self.tokenizer, "chat_template", None)
        if isinstance(template, dict):
            template = template.get("default")
        return template if isinstance(template, str) and template else None

    @cached_property
    def _chat(self) -> ChatTemplate | None:
        return None if self.template is None else ChatTemplate(self.tokenizer, self.template)

    def encode(self, line: bytes | str) -> Encoded:
        """Encode a conversation. Raises DataError, a phrase without file and line, for an invalid one."""
        pieces, ended = self._pieces(line)
        tokens: list[int] = []
        trained: list[bool] = []
        for piece in pieces:
            ids = token_ids(self.tokenizer, piece.text)
            tokens += ids
            trained += [piece.trained] * len(ids)
        eod = end_of_document(self.tokenizer)
        if not ended and eod is not None:
            tokens.append(eod)
            trained.append(pieces[-1].trained)
        return Encoded(tokens, trained)

    def _pieces(self, line: bytes | str) -> tuple[list[TextSpan], bool]:
        """Return the text spans of a line, and whether they include the end of the document."""
        record = _record(line)
        if "messages" not in record:
            return [
                TextSpan(_text(record, "prompt"), False),
                TextSpan(_spoken(_text(record, "completion")), True),
            ], False
        messages = _messages(record["messages"])
        if self._chat is not None:
            return _by_template(messages, self._chat.render), True
        if self.prompt_format == "identity":
            return [TextSpan(content, role == ASSISTANT) for role, content in messages], False
        return _plainly(messages), False


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the text's tokens. Raises DataError if the tokenizer fails or returns tokens outside its vocabulary."""
    if not text:
        return []
    try:
        ids: list[int] = tokenizer.tokenize(text)
    except Exception as error:
        raise DataError(f"the tokenizer fails on the text ({_first_line(error)})") from error
    if ids and not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
        raise DataError(f"tokens {min(ids)} to {max(ids)} do not fit the vocabulary of {tokenizer.vocab_size}")
    return ids


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def json_object(line: bytes | str) -> dict[str, Any]:
    """Parse a line as JSON. Raises DataError if it is not an object."""
    try:
        record = parse_json(line)
    except ValueError as error:
        raise DataError(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise DataError(f"a JSON object is expected, not {type(record).__name__}")
    return record


def _record(line: bytes | str) -> dict[str, Any]:
    record = json_object(line)
    if "messages" not in record and not {"prompt", "completion"} <= set(record):
        there = ", ".join(map(repr, record)) or "none"
        raise DataError(f"neither 'messages' nor 'prompt' and 'completion' are among its keys; there are {there}")
    return record


def _text(record: dict[str, Any], key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise DataError(f"the value of {key!r} is {type(value).__name__}, not text")
    return value


def _spoken(text: str) -> str:
    if not text:
        raise DataError("the assistant says nothing: there is nothing to learn")
    return text


def _messages(value: Any) -> list[ChatMessage]:
    if not isinstance(value, list) or not value:
        raise DataError("'messages' must be a list of objects with 'role' and 'content'")
    messages = []
    for number, message in enumerate(value, 1):
        role, content = (message.get(key) for key in ("role", "content")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f"message {number} must have a 'role' and a 'content', both text")
        messages.append(ChatMessage(role, _spoken(content) if role == ASSISTANT else content))
    if all(message.role != ASSISTANT for message in messages):
        raise DataError("no message is the assistant's: there is nothing to learn")
    return messages


def _plainly(messages: Sequence[ChatMessage]) -> list[TextSpan]:
    pieces = []
    for number, (role, content) in enumerate(messages, 1):
        if role not in ROLES:
            valid = ", ".join(ROLES)
            raise DataError(f"message {number} has the role {role!r}; without a chat template valid are {valid}")
        pieces += [TextSpan(f"{role}: ", False), TextSpan(f"{content}\n", role == ASSISTANT)]
    return pieces


def _by_template(messages: Sequence[ChatMessage], rendered: Callable[[Conversation, bool], str]) -> list[TextSpan]:
    """Return the spans from rendering longer and longer beginnings of the conversation with the template.

    Each rendering must extend the one before, and the assistant's turn its prompt: otherwise the model would be trained
    on text that differs from its prompts at inference.
    """

    def render(part: Sequence[ChatMessage], go_on: bool) -> str:
        return rendered([message._asdict() for message in part], go_on)

    pieces: list[TextSpan] = []
    done = ""
    for number, message in enumerate(messages):
        if message.role != ASSISTANT:
            continue
        said = render(messages[: number + 1], False)
        prompt = render(messages[:number], True) if number else ""
        if not said.startswith(prompt):  # some prompts say more than the turn then does
            prompt = render(messages[:number], False)
        if not (said.startswith(prompt) and prompt.startswith(done)):
            raise DataError(f"the chat template writes earlier turns otherwise once message {number + 1} follows")
        pieces += [TextSpan(prompt[len(done) :], False), TextSpan(said[len(prompt) :], True)]
        done = said
    whole = render(messages, False)
    if not whole.startswith(done):
        raise DataError("the chat template writes earlier turns otherwise at the end")
    return [*pieces, TextSpan(whole[len(done) :], False)]
