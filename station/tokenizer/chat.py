"""Kimi-K3's chat format: a conversation becomes the token ids of a prompt.

Owns the order and the wording of everything the server adds around a conversation (tool
declarations, thinking effort, tool choice, response format, the generation prefix). Must not know
HTTP: it takes plain records and raises RequestError for a conversation that has no rendering.
Facts: `encoding_k3.py` of the release. The format has no template language; it is a list of
segments which are encoded **one by one**, so segment borders are token borders and matter:

* control tokens (`<|open|>`, `<|close|>`, `<|sep|>`, `<|end_of_msg|>`) are ids, never text,
  so content can never forge structure;
* an attribute is four segments: ` key`, `="`, the escaped value, `"`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from shared.core.errors import RequestError
from station.tokenizer.vocabulary import Tokenizer

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
Attributes: TypeAlias = Iterable[tuple[str, str | int]]

EFFORTS = ("low", "high", "max")
"""The efforts the release accepts. Its own message also lists `medium`, which it then refuses."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of an assistant message; `arguments` is the JSON text as the client sent it."""

    name: str
    arguments: str = ""
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    `content` is a text or the texts of several parts (each part is encoded on its own).
    `reasoning` fills the think channel of an assistant message. `tools` on a system message
    declares further tools in the middle of a conversation and replaces its content.
    """

    role: Role
    content: str | tuple[str, ...] = ""
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()


# ---------------------------------------------------------------- building blocks


def open_tag(tokenizer: Tokenizer, tag: str, attributes: Attributes = ()) -> list[int]:
    """Ids of `<|open|>tag key="value"...<|sep|>`."""
    ids = [tokenizer.open_id, *tokenizer.encode_text(tag)]
    for key, value in attributes:
        escaped = str(value).replace("&", "&amp;").replace('"', "&quot;")
        for segment in (f" {key}", '="', escaped, '"'):
            ids += tokenizer.encode_text(segment)
    ids.append(tokenizer.sep_id)
    return ids


def close_tag(tokenizer: Tokenizer, tag: str) -> list[int]:
    """Ids of `<|close|>tag<|sep|>`."""
    return [tokenizer.close_id, *tokenizer.encode_text(tag), tokenizer.sep_id]


def message(
    tokenizer: Tokenizer,
    role: Role,
    content: str | Sequence[str],
    attributes: Attributes = (),
) -> list[int]:
    """Ids of a whole message: opening tag with its role, content, closing tag, end of message."""
    ids = open_tag(tokenizer, "message", [("role", role), *attributes])
    ids += _content(tokenizer, content)
    return ids + _end_message(tokenizer)


def effort_message(tokenizer: Tokenizer, effort: str) -> list[int]:
    """The system message that tells the model how much to think; `effort` is one of EFFORTS."""
    if effort not in EFFORTS:
        raise RequestError(
            f"reasoning effort {effort!r} is not supported; use one of {', '.join(EFFORTS)}",
            param="reasoning_effort",
            error_code="invalid_value",
        )
    text = (
        "`thinking_effort` guides on how much to think in your thinking channel (not including the "
        "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
        f"Now the system is invoked with `thinking_effort={effort}`."
    )
    return _note(tokenizer, "thinking-effort", text)


def generation_prefix(tokenizer: Tokenizer, *, thinking: bool = True) -> list[int]:
    """The opening of the assistant's turn, left open in its think (or response) channel."""
    channel = "think" if thinking else "response"
    return open_tag(tokenizer, "message", [("role", "assistant")]) + open_tag(tokenizer, channel)


def assistant_body(tokenizer: Tokenizer, turn: ChatMessage, *, thinking: bool = True) -> list[int]:
    """The channels of an assistant message: think (always there when thinking), response, tools."""
    ids: list[int] = []
    if thinking:
        reasoning = turn.reasoning if turn.reasoning and turn.reasoning.strip() else ""
        ids += _element(tokenizer, "think", reasoning)
    ids += _element(tokenizer, "response", turn.content)
    if turn.tool_calls:
        ids += open_tag(tokenizer, "tools")
        for index, call in enumerate(turn.tool_calls, start=1):
            ids += _call(tokenizer, call, index)
        ids += close_tag(tokenizer, "tools")
    return ids


# ---------------------------------------------------------------- the whole prompt


def render(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    *,
    thinking: bool = True,
    effort: str | None = "max",
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | None = None,
    response_format: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of the prompt for `messages`, ending in the generation prefix.

    `effort` is used only when `thinking`; `tool_choice` is `required`, `none` or anything
    else for no instruction; `response_format` is OpenAI's object. RequestError names the message
    that has no rendering.
    """
    ids: list[int] = []
    if tools:
        ids += _note(tokenizer, "tool-declare", _TOOLS_HEAD + _fenced(tools))
    if thinking and effort is not None:
        ids += effort_message(tokenizer, effort)
    ids += _conversation(tokenizer, messages, thinking=thinking)
    if tool_choice in _TOOL_CHOICES:
        ids += _note(
            tokenizer,
            "tool-choice",
            f"The system is invoked with `tool_choice={tool_choice}`.\n"
            f"You MUST {_TOOL_CHOICES[tool_choice]} in the next message.",
        )
    if response_format is not None:
        ids += _response_format(tokenizer, response_format)
    return ids + generation_prefix(tokenizer, thinking=thinking)


_TOOLS_HEAD = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_MORE_TOOLS_HEAD = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
_TOOL_CHOICES = {"required": "call tools", "none": "NOT call any tools"}


def _conversation(
    tokenizer: Tokenizer, messages: Sequence[ChatMessage], *, thinking: bool
) -> list[int]:
    """The ids of every message in order. Tool results are numbered from 1 after each assistant."""
    ids: list[int] = []
    result_index = 0
    calls: tuple[ToolCall, ...] = ()
    for position, turn in enumerate(_order_tool_results(messages)):
        named = [("name", turn.name)] if turn.name else []
        match turn.role:
            case "system" if turn.tools:
                ids += _note(tokenizer, "tool-declare", _MORE_TOOLS_HEAD + _fenced(turn.tools))
            case "system" | "user":
                ids += message(tokenizer, turn.role, turn.content, named)
            case "assistant":
                calls, result_index = turn.tool_calls, 0
                ids += open_tag(tokenizer, "message", [("role", "assistant"), *named])
                ids += assistant_body(tokenizer, turn, thinking=thinking)
                ids += _end_message(tokenizer)
            case "tool":
                result_index += 1
                tool = turn.name or _name_at(calls, result_index, position)
                ids += message(
                    tokenizer, "tool", turn.content, [("tool", tool), ("index", result_index)]
                )
    return ids


def _name_at(calls: Sequence[ToolCall], index: int, position: int) -> str:
    """The function of call number `index`: a result without a known id is bound by its place."""
    if index <= len(calls):
        return calls[index - 1].name
    raise RequestError(
        f"messages[{position}]: this tool result belongs to no tool call of the assistant message "
        "before it; send tool_call_id or name",
        param=f"messages[{position}].tool_call_id",
        error_code="invalid_value",
    )


def _order_tool_results(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Each run of tool results in the order of the calls it answers.

    The format numbers results by place while OpenAI clients bind them by id, so the ids decide. A
    run with an id nobody knows (clients are seen to rewrite ids) stays as it was sent.
    """
    ordered: list[ChatMessage] = []
    by_id: dict[str, tuple[int, str]] = {}
    run: list[ChatMessage] = []
    for turn in messages:
        if turn.role == "tool":
            run.append(turn)
            continue
        ordered += _order_run(run, by_id)
        run = []
        if turn.role == "assistant":
            by_id = {}
            for place, call in enumerate(turn.tool_calls):
                if call.call_id is not None:
                    by_id.setdefault(call.call_id, (place, call.name))
        ordered.append(turn)
    return ordered + _order_run(run, by_id)


def _order_run(run: list[ChatMessage], by_id: Mapping[str, tuple[int, str]]) -> list[ChatMessage]:
    """`run` sorted by the calls' places and named after them; unchanged with an unknown id."""
    found: list[tuple[int, ChatMessage]] = []
    for turn in run:
        target = by_id.get(turn.tool_call_id) if turn.tool_call_id is not None else None
        if target is None:
            return run
        found.append((target[0], replace(turn, name=target[1])))
    return [turn for _, turn in sorted(found, key=lambda item: item[0])]


def _call(tokenizer: Tokenizer, call: ToolCall, index: int) -> list[int]:
    """One call element: typed arguments, or the text as it was when it is not JSON."""
    ids = open_tag(tokenizer, "call", [("tool", call.name), ("index", index)])
    arguments = _parse_arguments(call)
    if arguments is None:
        ids += _element(tokenizer, "json", call.arguments, [("type", "object")])
    else:
        for key, value in arguments.items():
            body = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            ids += _element(tokenizer, "argument", body, [("key", key), ("type", _type_of(value))])
    return ids + close_tag(tokenizer, "call")


def _parse_arguments(call: ToolCall) -> dict[str, Any] | None:
    """The arguments as an object; None when the text is not JSON. RequestError for other JSON."""
    if not call.arguments.strip():
        return {}
    try:
        parsed = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None  # a model that wrote broken JSON should see back what it wrote
    if not isinstance(parsed, dict):
        raise RequestError(
            f"the arguments of tool call {call.name!r} are not a JSON object; send an object",
            param="messages",
            error_code="invalid_value",
        )
    return parsed


def _type_of(value: object) -> str:
    """The `type` attribute of an argument element."""
    match value:
        case bool():  # before int: a bool is an int in Python
            return "boolean"
        case None:
            return "null"
        case int() | float():
            return "number"
        case str():
            return "string"
        case dict():
            return "object"
        case _:
            return "array"


def _response_format(tokenizer: Tokenizer, response_format: Mapping[str, Any]) -> list[int]:
    """The note that asks for JSON; no ids for any other kind."""
    kind = response_format.get("type")
    if kind not in ("json_object", "json_schema"):
        return []
    text = (
        f"The system is invoked with `response_format={kind}`.\n"
        "Your response must be raw JSON data without markdown code blocks (```json) or any "
        "additional formatting."
    )
    if kind == "json_schema":
        declared = response_format.get("json_schema")
        schema = declared
        if isinstance(declared, Mapping):
            schema = declared.get("schema", declared.get("json_schema", declared))
        text += f"\nThe JSON data must match the following schema:\n{_fenced(schema)}"
    return _note(tokenizer, "response-format", text)


def _note(tokenizer: Tokenizer, kind: str, text: str) -> list[int]:
    """A system message the server writes itself, marked with its `type`."""
    return message(tokenizer, "system", text.strip(), [("type", kind)])


def _element(
    tokenizer: Tokenizer, tag: str, content: str | Sequence[str], attributes: Attributes = ()
) -> list[int]:
    """Ids of an opening tag, content and the closing tag."""
    ids = open_tag(tokenizer, tag, attributes) + _content(tokenizer, content)
    return ids + close_tag(tokenizer, tag)


def _end_message(tokenizer: Tokenizer) -> list[int]:
    return [*close_tag(tokenizer, "message"), tokenizer.end_of_msg_id]


def _content(tokenizer: Tokenizer, content: str | Sequence[str]) -> list[int]:
    """Ids of a text, or of several texts encoded one by one."""
    if isinstance(content, str):
        return tokenizer.encode_text(content)
    return [token for part in content for token in tokenizer.encode_text(part)]


def _fenced(value: object) -> str:
    """`value` as compact JSON with sorted keys, in a code fence.

    Sorted so that the same tools in another key order give the same prompt.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    except RecursionError as error:
        raise RequestError(
            "the JSON schema is nested too deeply; send a flatter one",
            param="tools",
            error_code="invalid_value",
        ) from error
    return f"```json\n{text}\n```"
