"""The reply parser: channels by control ids, whole characters, tolerance, tool calls."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from station.tokenizer.reply import ContentDelta, ReasoningDelta, ReplyParser, ToolCallDone
from station.tokenizer.vocabulary import Tokenizer

FULL = (
    "why 漢<|close|>think<|sep|><|open|>response<|sep|>answer é<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Ulm<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of `text` with the four control spellings as control tokens."""
    control = {
        "<|open|>": tokenizer.open_id,
        "<|close|>": tokenizer.close_id,
        "<|sep|>": tokenizer.sep_id,
        "<|end_of_msg|>": tokenizer.end_of_msg_id,
    }
    ids: list[int] = []
    for piece in re.split(r"(<\|(?:open|close|sep|end_of_msg)\|>)", text):
        ids += [control[piece]] if piece in control else tokenizer.encode_text(piece)
    return ids


class Outcome:
    """Everything one reply gave."""

    def __init__(self, tokenizer: Tokenizer, ids: list[int], *, thinking: bool = True) -> None:
        parser = ReplyParser(tokenizer, thinking=thinking)
        self.events = [event for token in ids for event in parser.feed(token)] + parser.finish()
        self.reasoning = "".join(e.text for e in self.events if isinstance(e, ReasoningDelta))
        self.content = "".join(e.text for e in self.events if isinstance(e, ContentDelta))
        self.calls = [e for e in self.events if isinstance(e, ToolCallDone)]


def parse(tokenizer: Tokenizer, text: str, *, thinking: bool = True) -> Outcome:
    """Feed `text` token by token."""
    return Outcome(tokenizer, ids_of(tokenizer, text), thinking=thinking)


def test_normal_reply_has_reasoning_answer_and_call(byte_tokenizer: Tokenizer) -> None:
    """The format as the release writes it."""
    reply = parse(byte_tokenizer, FULL)

    assert (reply.reasoning, reply.content) == ("why 漢", "answer é")
    assert [ToolCallDone("f", '{"city":"Ulm"}')] == reply.calls


def test_without_thinking_text_is_content(byte_tokenizer: Tokenizer) -> None:
    """The prompt left the response open: there is no reasoning."""
    reply = parse(byte_tokenizer, "hello<|close|>response<|sep|>", thinking=False)

    assert (reply.reasoning, reply.content) == ("", "hello")


def test_a2_characters_are_never_split(byte_tokenizer: Tokenizer) -> None:
    """A2: one byte per token gives whole characters only, and the text exactly."""
    text = "👩🏽‍🚀漢字é"
    reply = parse(byte_tokenizer, text, thinking=False)

    assert text == reply.content
    assert len(text) == len(reply.events)  # one delta per character: none waits longer than needed


def test_a2_invalid_bytes_are_flushed_at_the_end(byte_tokenizer: Tokenizer) -> None:
    """A2: a character cut by the end of the answer becomes U+FFFD, after all the rest."""
    ids = [*byte_tokenizer.encode_text("ab"), *byte_tokenizer.encode_text("漢")[:2]]
    reply = Outcome(byte_tokenizer, ids, thinking=False)

    assert reply.content == "ab\ufffd"


@settings(deadline=None)
@given(data=st.binary(max_size=40))
def test_a2_any_bytes_equal_the_whole_decoded_at_once(
    byte_tokenizer: Tokenizer, data: bytes
) -> None:
    """A2: deltas add up to what decoding everything at once gives, for any bytes."""
    single = {byte_tokenizer.decode_bytes([token]): token for token in range(256)}
    ids = [single[bytes([value])] for value in data]

    assert data.decode("utf-8", "replace") == Outcome(byte_tokenizer, ids, thinking=False).content


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("r<|close|>think<|open|>response<|sep|>a<|end_of_msg|>", "r", "a"),
        ("r<|close|>thinka", "r", "a"),
        ("r<|close|>think<|sep|><|open|>responsea", "r", "a"),
        ("r<|close|>think<|sep|>a<|end_of_msg|>", "r", "a"),
        ("r<|close|>think<|sep|>\n<|open|>response<|sep|>a", "r", "a"),
        ("a<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>", "a", "a"),
        ("r<|open|>response<|sep|>a", "r", "a"),
        ("r<|close|>think<|sep|><|open|>response<|sep|>a<|sep|>b", "r", "ab"),
        ("r<|close|>think<|sep|><|open|>response<|sep|>a<|close|>nonsense<|sep|>b", "r", "ab"),
        ("r<|close|>think<|sep|><|open|>response<|sep|>a<|close|>response<|sep|>junk", "r", "a"),
        ("r<|close|>think<|sep|><|open|>response<|sep|>a<|end_of_msg|>more", "r", "a"),
    ],
)
def test_sloppy_output_is_read_anyway(
    byte_tokenizer: Tokenizer, text: str, reasoning: str, content: str
) -> None:
    """Left-out separators and openings, an answer in the think channel, junk after the end."""
    reply = parse(byte_tokenizer, text)

    assert (reasoning, content) == (reply.reasoning, reply.content)


def test_text_after_a_stray_marker_is_not_lost(byte_tokenizer: Tokenizer) -> None:
    """A control token in the middle of a text is dropped, the words after it are not."""
    words = "many words follow and none of them is the name of a channel, so they are text"
    reply = parse(byte_tokenizer, f"so <|close|>{words}", thinking=False)

    assert f"so {words}" == reply.content


def test_reserved_tokens_are_never_text(byte_tokenizer: Tokenizer) -> None:
    """A reserved token in the answer leaves no trace."""
    ids = [
        *byte_tokenizer.encode_text("a"),
        byte_tokenizer.eos_id,
        *byte_tokenizer.encode_text("b"),
    ]

    assert Outcome(byte_tokenizer, ids, thinking=False).content == "ab"


def test_spelled_out_markers_are_text(byte_tokenizer: Tokenizer) -> None:
    """Markup is recognised by id: a model that talks about the format can spell it."""
    text = "write <|close|>think<|sep|> to end"
    reply = Outcome(byte_tokenizer, byte_tokenizer.encode_text(text), thinking=False)

    assert text == reply.content


def test_a12_tool_marker_closes_the_reasoning(byte_tokenizer: Tokenizer) -> None:
    """A12: a jump from thinking straight to a call ends the reasoning; no content appears."""
    reply = parse(
        byte_tokenizer,
        'r<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>',
    )

    assert ("r", "", [ToolCallDone("f", "{}")]) == (reply.reasoning, reply.content, reply.calls)


def test_a12_no_content_after_the_first_call(byte_tokenizer: Tokenizer) -> None:
    """A12: whatever the model writes behind a tool call is not part of the answer."""
    reply = parse(
        byte_tokenizer,
        "r<|close|>think<|sep|><|open|>response<|sep|>a<|close|>response<|sep|><|open|>tools<|sep|>"
        'x<|open|>call tool="f" index="1"<|sep|>y<|close|>call<|sep|><|close|>tools<|sep|>z'
        "<|open|>response<|sep|>late<|open|>think<|sep|>t<|close|>think<|sep|>later",
    )

    assert reply.content == "a"
    assert isinstance(reply.events[-1], ReasoningDelta | ToolCallDone)


def test_call_without_tools_element_is_a_call(byte_tokenizer: Tokenizer) -> None:
    """The transition was left out: the call is still found, with its arguments."""
    reply = parse(
        byte_tokenizer,
        'r<|close|>think<|sep|><|open|>call tool="f"<|sep|>'
        '<|open|>argument key="n" type="number"<|sep|>3<|close|>argument<|sep|><|end_of_msg|>',
    )

    assert [ToolCallDone("f", '{"n":3}')] == reply.calls
    assert reply.content == ""


def test_arguments_are_typed_and_unescaped(byte_tokenizer: Tokenizer) -> None:
    """Numbers, objects and strings keep their type; a value that is not of its type stays text."""
    body = "".join(
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        for key, kind, value in (
            ("a&amp;&quot;", "string", "1"),
            ("b", "number", "2.5"),
            ("c", "object", '{"k": [true, null]}'),
            ("d", "number", "NaN"),
            ("e", "boolean", "maybe"),
        )
    )
    reply = parse(byte_tokenizer, f'<|open|>call tool="f&quot;"<|sep|>{body}<|close|>call<|sep|>')

    assert reply.calls[0].name == 'f"'
    assert (
        reply.calls[0].arguments
        == '{"a&\\"":"1","b":2.5,"c":{"k":[true,null]},"d":"NaN","e":"maybe"}'
    )


def test_json_element_is_passed_as_it_is(byte_tokenizer: Tokenizer) -> None:
    """Arguments that the model wrote as one JSON text are not touched."""
    reply = parse(
        byte_tokenizer,
        '<|open|>call tool="f"<|sep|><|open|>json type="object"<|sep|>{"a" : 1<|close|>json<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="g"<|sep|><|close|>call<|sep|>',
    )

    assert [ToolCallDone("f", '{"a" : 1'), ToolCallDone("g", "{}")] == reply.calls


def test_cut_anywhere_leaks_nothing(byte_tokenizer: Tokenizer) -> None:
    """max_tokens may cut inside a marker: every prefix gives prefixes of the true channels."""
    ids = ids_of(byte_tokenizer, FULL)
    for length in range(len(ids) + 1):
        reply = Outcome(byte_tokenizer, ids[:length])

        assert "why 漢".startswith(reply.reasoning.rstrip("\ufffd"))
        assert "answer é".startswith(reply.content.rstrip("\ufffd"))
        assert [ToolCallDone("f", '{"city":"Ulm"}')][: len(reply.calls)] == reply.calls


def test_token_borders_do_not_matter(tokenizer: Tokenizer, byte_tokenizer: Tokenizer) -> None:
    """The same text in other tokens gives the same reply."""
    few, many = parse(tokenizer, FULL), parse(byte_tokenizer, FULL)

    assert (many.reasoning, many.content, many.calls) == (few.reasoning, few.content, few.calls)


@settings(deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(
            [
                "<|open|>",
                "<|close|>",
                "<|sep|>",
                "<|end_of_msg|>",
                "think",
                "response",
                "tools",
                'call tool="f"',
                'argument key="k" type="number"',
                "json",
                "message",
                "text",
                "é",
                " ",
            ]
        ),
        max_size=25,
    )
)
def test_any_sequence_is_read_without_failing(byte_tokenizer: Tokenizer, pieces: list[str]) -> None:
    """The parser never raises and never writes a control token's spelling."""
    reply = parse(byte_tokenizer, "".join(pieces))

    assert "<|" not in reply.content + reply.reasoning
    assert all(call.name == "f" for call in reply.calls)
