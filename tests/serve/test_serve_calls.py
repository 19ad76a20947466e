"""Tool calls are recognized in a reply, no matter how its text is divided into pieces."""

from __future__ import annotations

import json
import random
import re
from contextlib import closing
from functools import lru_cache

import pytest

from kvtool.chats.template import Template
from kvtool.chats.thinking import THINK, Splitter, tags_in
from kvtool.llama.loaded.model import Model
from kvtool.serve.reply import Reply
from kvtool.serve.tools import calls as parsing
from kvtool.serve.tools import fitting, formats
from kvtool.serve.tools.calls import Call, Parser
from kvtool.serve.tools.conversion import for_template
from kvtool.serve.tools.formats import HERMES, LLAMA, Format
from kvtool.serve.tools.values import typed
from tests import tiny
from tests.chats import published_templates
from tests.chats.published_templates import needs_published
from tests.serve.slot_requests import dictated_slot
from tests.serve.test_serve_tools import TOOLS, tool
from tests.serve.written_calls import BLOCKS, NO_BLOCKS, NOW, OPENS, TRICKY, WRITTEN

BROKEN = [
    "",
    "\n",
    "{",
    '{"name": "now", ',
    '{"name": now}',
    "[]",
    "[now(]",
    "[now(x=)]",
    '{"arguments": {}}',
    " {]",
    '[{"name": "now"}, {"name": "no"}]',
    '{"name": "now", "arguments": [1]}',
    '[{"name": "now"',
    "[now(), no()]",
    '{"name": "now", "arguments": {"x": NaN}}',
    '{"name": "now", "arguments": "x"}',
    '{"name": ["now"]}',
    "weather x",
    "now>",
    "now>\n<parameter=x>1</function>",
    "weather\n<arg_key>city</arg_key>",
    "no[ARGS]{}",
    "now[ARGS]x",
    "now[CALL_ID]1",
    '{"name": "no", "arguments": {}}',
    "no>\n</function>",
    "no</tool_call>",
    "[no()]<|tool_call_end|>",
    "[now()",
    "[now() x]",
    "[now()] x<|tool_call_end|>",
    "[now(x=1e999)]",
    '"now"',
    "call:no{}<tool_call|>",
    "call:now",
    "call:now{",
    "call:now{x}<tool_call|>",
    "call:now{x:NaN}<tool_call|>",
    'call:now{x:<|"|>}<tool_call|>',
    "call:now[]<tool_call|>",
    "</minimax:tool_call>",
    "now x",
    '{"name": "now", "parameters": {"x": 1e999}}',
    "[now(x={1: 2})]",
    '{"name": "now", "x" 1}',
    '{"name": "now", "arguments": ' + "[" * 3000 + "]" * 3000 + "}",
    "[now(x=" + "[" * 3000 + "]" * 3000 + ")]",
]
FORMATS = [each for each in vars(formats).values() if isinstance(each, Format)]

CASES = [(format, what, *case) for format in FORMATS for what, case in WRITTEN[format.name].items()] + [
    (format, "tricky", format.written([TRICKY, NOW]), [TRICKY, NOW]) for format in FORMATS
]
each_case = pytest.mark.parametrize(
    ("format", "text", "calls"),
    [case[:1] + case[2:] for case in CASES],
    ids=[f"{c[0].name}, {c[1]}" for c in CASES],
)
each_format = pytest.mark.parametrize("format", FORMATS, ids=[format.name for format in FORMATS])


@pytest.fixture(autouse=True, scope="module")
def remembered_fits():
    """Check each (arguments, schema) only once: the tests parse the same calls thousands of times."""
    fits = lru_cache(lambda arguments, schema: fitting.fits(arguments, json.loads(schema)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsing, "fits", lambda arguments, schema: fits(arguments, json.dumps(schema)))
        yield


def parsed(format, pieces, tools=TOOLS):
    """Return the events of a parser. An event is a text or a call (name, arguments)."""
    parser = Parser(format, tools)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.end()])


def joined(events):
    parts = []
    calls = [event for event in events if isinstance(event, Call)]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    for event in events:
        if isinstance(event, Call):
            assert re.fullmatch("call_[0-9a-f]{24}", event.id)
            parts.append((event.name, json.loads(event.arguments)))
        else:
            assert event
            if parts and isinstance(parts[-1], str):
                parts[-1] += event
            else:
                parts.append(event)
    return parts


def check_cuts(format, text, expected):
    """Check the events for a text that comes in one piece, in two pieces, or character by character.

    About 12 places are tried as the border of two pieces.
    """
    assert parsed(format, [text]) == expected
    assert parsed(format, text) == expected
    for cut in range(1, len(text), len(text) // 12 + 1):
        assert parsed(format, [text[:cut], text[cut:]]) == expected, text[:cut]


@each_case
def test_calls_are_found_however_the_text_is_cut(format, text, calls):
    check_cuts(format, text, calls)
    check_cuts(format, f"\n\n{text}\n", calls)


@each_format
def test_format_writes_calls_like_the_models(format):
    text, calls = WRITTEN[format.name]["one"]
    assert format.written(calls) == text


@each_case
def test_text_before_a_call_stays_without_its_last_blanks(format, text, calls):
    if format is LLAMA and text[0] == "{":
        # JSON without a tag is a call only at the start of a reply
        for before in ("So: ", "; "):
            check_cuts(format, before + text, [before + text])
    else:
        check_cuts(format, f" Hm <tool {text[:5]}\n\n{text}", [f" Hm <tool {text[:5]}", *calls])


@each_case
def test_text_after_a_call_stays_without_its_first_blanks(format, text, calls):
    # in LFM2 and Gemma, a call ends only at the closing tag or at the end of the reply
    if format not in (formats.LFM2, formats.GEMMA) or format.tags[1] in text:
        check_cuts(format, f"{text} \n a\n", [*calls, "a\n"])


@each_case
def test_call_after_a_thought_is_found_and_a_call_in_it_is_not(format, text, calls):
    splitter, parser = Splitter(THINK), Parser(format, TOOLS)
    thought, events = "", []
    for character in f"<think>\nI call it: {text}\n</think>\n\n{text}":
        for is_thought, part in splitter.feed(character):
            thought += part if is_thought else ""
            events += [] if is_thought else parser.feed(part)
    assert joined([*events, *parser.end()]) == calls
    assert thought == f"\nI call it: {text}\n"


@each_format
def test_call_in_a_thought_that_never_ends_is_found(format):
    # the template tells models to write calls in this form; a call of gpt-oss has its own header
    text, calls = format.written([TRICKY]), [TRICKY]
    if not format.opening or format is formats.HARMONY:
        pytest.skip("calls of this format begin with no tag, or with a header")
    for n in (1, 4, 1000):
        reply = Reply(Splitter(THINK, is_open=True, call_opening=format.opening), Parser(format, TOOLS))
        whole = f"I could call {text[:3]}.\n{text}"
        deltas = [delta for i in range(0, len(whole), n) for delta in reply.feed(whole[i : i + n])]
        deltas += reply.end()
        message = reply.message
        assert (message["content"], message["reasoning_content"]) == ("", f"I could call {text[:3]}.\n")
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
        functions = [call["function"] for call in message["tool_calls"]]
        assert [(each["name"], json.loads(each["arguments"])) for each in functions] == calls


@pytest.mark.share(2, "format")
@each_format
@pytest.mark.parametrize("inside", BROKEN, ids=range(len(BROKEN)))
def test_broken_calls_and_calls_of_unknown_tools_are_text(format, inside):
    texts = [OPENS[format.name] + inside, f"a\n{OPENS[format.name]}{inside}\n</tool_call> b \n"]
    if format is LLAMA and inside.startswith(("{", "[{")):
        texts += [inside, f" {inside}; x"]
    for text in texts:
        if len(text) < 200:
            check_cuts(format, text, [text])
        assert parsed(format, [text]) == parsed(format, text) == [text]


@each_case
def test_incomplete_call_is_text(format, text, calls):
    first = parsed(format, [text])[0]
    for n in range(1, len(text)):
        parts = parsed(format, [text[:n]])
        # once the first call is complete, the rest of the reply may be text
        assert parts[0] == first or parts == [text[:n]], text[:n]


@each_format
def test_forced_call_that_a_limit_cuts_is_left_out(format):
    for written_format in (format, HERMES):
        text = written_format.written([TRICKY])
        for n in range(1, len(text)):
            parser = Parser(format, TOOLS, "call")
            parts = joined([*parser.feed(text[:n]), *parser.end()])
            # once the call is complete, the beginning of its closing tag may be text
            assert (parts == [] and parser.has_left_out) or parts[0] == TRICKY, text[:n]


@each_format
def test_call_is_found_after_a_tag_that_opens_no_call(format):
    text, calls = WRITTEN[format.name]["one"]
    if format is LLAMA:
        text = f"<|python_tag|>{text}"
    opens = OPENS[format.name]
    for before in (opens, f"{opens} x", f"{opens}{opens}", f"{opens}\n{{", f'{opens}[{{"name": "', "{"):
        check_cuts(format, f"{before}\n{text}", [before, *calls])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>Yes.", ["Yes."]),
        (" to=functions.now<|channel|>commentary json<|message|>{}<|call|>", [NOW]),
        ("<|channel|>analysis to=functions.now code<|message|>{}<|call|>", [NOW]),
        (
            "<|channel|>commentary<|message|>I look. <|end|>"
            "<|start|>assistant to=functions.now<|channel|>commentary<|message|>{}",
            ["I look.", NOW],
        ),
        ("I look.<|end|><|start|>assistant<|channel|>final<|message|>Yes.", ["I look.\n\nYes."]),
        ("Write to=functions.now in it.", ["Write to=functions.now in it."]),
    ],
)
def test_headers_of_gpt_oss_are_not_text(text, expected):
    for n in (1, 3, len(text)):
        # a header does not count as the only call
        parser = Parser(formats.HARMONY, TOOLS, one_call=n == 3)
        splitter = Splitter(tags_in("<|channel|>analysis<|message|>"), call_opening=formats.HARMONY.opening)
        pieces = [text[i : i + n] for i in range(0, len(text), n)]
        parts = [part for piece in pieces for part in splitter.feed(piece)] + [*splitter.end()]
        assert not any(is_thought for is_thought, _ in parts)
        events = [event for _, part in parts for event in parser.feed(part)]
        assert joined([*events, *parser.end()]) == expected


@each_format
def test_every_format_also_reads_hermes_calls(format):
    text, calls = WRITTEN["hermes"]["two"]
    check_cuts(format, f"a {text}", ["a", *calls])


@each_format
def test_texts_and_calls_are_parsed_in_any_order(format):
    parts = [
        "a < b ",
        "<tool",
        "</tool_call>x",
        "[TOOL",
        "{ ",
        "; ",
        "\n\nb",
        f"{OPENS[format.name]} ! ",
        "<|",
        "<funct",
    ]
    draw = random.Random(5)
    for _ in range(60):
        reply, expected, follows = "", [], True
        for _ in range(draw.randrange(1, 7)):
            if draw.random() < 0.6:
                # an "x" in front, so that the text does not begin with a tag or with white space
                text = "x" + draw.choice(parts)
                if expected and isinstance(expected[-1], str):
                    expected[-1] += text
                else:
                    expected.append(text)
                reply, follows = reply + text, False
            else:
                text, calls = WRITTEN[format.name]["one"]
                if format is LLAMA and not follows:
                    text = f"<|python_tag|>{text}"
                space = draw.choice(["", " ", "\n\n"])
                if expected and isinstance(expected[-1], str):
                    expected[-1] = expected[-1].rstrip()
                expected += calls
                reply += space + text + draw.choice(["", "\n"])
                follows = True
        expected = [part for part in expected if part]
        assert parsed(format, [reply]) == expected, reply
        assert parsed(format, reply) == expected, reply
        cuts = sorted(draw.sample(range(len(reply) + 1), min(4, len(reply))))
        pieces = [reply[a:b] for a, b in zip([0, *cuts], [*cuts, len(reply)], strict=True)]
        assert parsed(format, pieces) == expected, pieces


JSON_FORMATS = [format for format in FORMATS if format.is_json]
OTHERS = [format for format in FORMATS if not format.is_json]
each_json_format = pytest.mark.parametrize(
    "format", JSON_FORMATS, ids=[format.name for format in JSON_FORMATS]
)


def test_formats_with_json_calls_are_as_listed():
    names = {format.name for format in JSON_FORMATS}
    assert names == {"hermes", "mistral", "granite", "nemotron", "llama", "apriel", "cohere"}


WRAPS = [("```json", "```"), ("<tools>", "</tools>")]


@pytest.mark.share(3, "format")
@each_json_format
@pytest.mark.parametrize(("opening", "close"), WRAPS)
@pytest.mark.parametrize(("inside", "calls"), BLOCKS.values(), ids=BLOCKS)
def test_code_block_with_calls_is_parsed_as_calls(format, inside, calls, opening, close):
    block = f"{opening}\n{inside}\n{close}"
    check_cuts(format, block, calls)
    check_cuts(format, f"I call it:\n\n{block}\n", ["I call it:", *calls])
    check_cuts(format, f"{block}\n{block}\nSo.", [*calls, *calls, "So."])
    # models may leave out the closing line
    check_cuts(format, f"{opening}\n{inside}", calls)
    # models may also leave out both the opening and the closing line
    check_cuts(format, f"\n{inside}\n", calls)


@pytest.mark.share(3, "format")
@each_json_format
@pytest.mark.parametrize(("opening", "close"), WRAPS)
@pytest.mark.parametrize("inside", NO_BLOCKS)
def test_code_block_without_calls_is_text(format, inside, opening, close):
    block = f"{opening}\n{inside}\n{close}"
    for text in (block, f"So:\n\n  {block}\nas it is.\n"):
        check_cuts(format, text, [text])
    text, calls = WRITTEN["hermes"]["one"]
    check_cuts(format, f"{block}\n\n{text}", [block, *calls])
    if format is not LLAMA and inside:
        check_cuts(format, inside, [inside])
        check_cuts(format, f"{inside}\n", [f"{inside}\n"])


@each_format
def test_call_that_does_not_fit_its_schema_is_text(format):
    for arguments in (
        {"city": "a", "unit": "c"},
        {"city": "a", "days": "x"},
        {},
        {"city": "a", "hours": [1, 2, 3, 4]},
    ):
        for wrong in ([("weather", arguments)], [NOW, ("weather", arguments)]):
            bare = json.dumps([{"name": name, "arguments": given} for name, given in wrong])
            for text in (bare, f"```json\n{bare}\n```", f"<tools>{bare}</tools>", f"<tool_call>{bare}"):
                check_cuts(format, text, [text])
        text = format.written([("weather", arguments)])
        # all of the text stays, with the parts that formats leave out of texts
        assert not [part for part in parsed(format, [text]) if isinstance(part, tuple)]
    # a text may be followed by a call
    check_cuts(
        format, f"{bare} <tool_call>{bare}\n{HERMES.written([NOW])}", [f"{bare} <tool_call>{bare}", NOW]
    )


def test_bare_json_object_next_to_text_is_text():
    for bare in (BLOCKS["one"][0], BLOCKS["a list"][0]):
        for text in (f"Like this: {bare}", f"{bare}\nThat is it.", f"{bare}\n```"):
            check_cuts(HERMES, text, [text])


@pytest.mark.parametrize("format", OTHERS, ids=[format.name for format in OTHERS])
def test_code_block_is_text_if_the_formats_calls_are_not_json(format):
    for text in (f"```json\n{BLOCKS['one'][0]}\n```", BLOCKS["one"][0]):
        check_cuts(format, text, [text])


def test_block_is_held_back_only_while_it_may_be_a_call():
    parser = Parser(HERMES, TOOLS)
    texts = [
        "".join(parser.feed(piece)) for piece in ("Hm\n", "``", "`json\n", '{\n "', "nam", 'es": ', "[1")
    ]
    assert texts == ["Hm", "", "", "", "", '\n```json\n{\n "names":', " [1"]
    parser = Parser(HERMES, TOOLS)
    texts = ["".join(parser.feed(piece)) for piece in ('```json\n{"name": "no', 'n", ', "x")]
    assert texts == ["", '```json\n{"name": "non",', " x"]
    parser = Parser(HERMES, TOOLS)
    assert [*parser.feed('```json\n{"name": "now", "arguments": {}}\n``')] == []
    assert len([*parser.feed("`")]) == 1


def test_text_is_held_back_only_while_it_may_be_a_call():
    def texts(format, pieces):
        parser = Parser(format, TOOLS)
        return ["".join(parser.feed(piece)) for piece in pieces]

    assert texts(HERMES, ["Hi", " ", "there <", "b> <tool_call", ">{", "x"]) == [
        "Hi",
        "",
        " there",
        " <b>",
        "",
        "",
    ]
    assert texts(HERMES, ["[", "\n", "1, ", '{"name"']) == ["", "", "[\n1,", ' {"name"']
    assert texts(HERMES, ["[", "{", '"', "x"]) == ["", "", "", '[{"x']
    assert texts(formats.MISTRAL, ["[", "TOOL", "s"]) == ["", "", "[TOOLs"]
    assert texts(HERMES, ["<tool_call>", "\n", "is a tag"]) == ["", "", "<tool_call>\nis a tag"]
    assert texts(formats.XML, ["<function=", "no", ">"]) == ["", "", "<function=no>"]
    assert texts(formats.GLM, ["<tool_call>no", "\nx"]) == ["", "<tool_call>no\nx"]
    assert texts(formats.MISTRAL_ARGS, ["[TOOL_CALLS]no", "["]) == ["", "[TOOL_CALLS]no"]
    assert texts(formats.LFM2, ["<|tool_call_start|>", "no"]) == ["", "<|tool_call_start|>no"]


def test_call_is_returned_as_soon_as_it_is_complete():
    parser = Parser(formats.MISTRAL, TOOLS)
    assert [*parser.feed('[TOOL_CALLS][{"name": "now"}')] == []
    (call,) = parser.feed("]")
    assert (call.name, call.arguments) == ("now", "{}")
    parser = Parser(HERMES, TOOLS)
    assert [*parser.feed('<tool_call>{"name": "now"}\n</tool_call')] == []
    assert len([*parser.feed(">")]) == 1


@each_format
def test_one_call_keeps_only_the_first_call(format):
    text, calls = format.written([TRICKY, NOW]), [TRICKY, NOW]
    for pieces in ([text], text, [text[: len(text) // 2], text[len(text) // 2 :]]):
        parser = Parser(format, TOOLS, one_call=True)
        events = [event for piece in pieces for event in parser.feed(piece)]
        assert joined([*events, *parser.end()]) == calls[:1]
        assert (parser.is_done, parser.has_left_out) == (True, True)
    text, calls = WRITTEN[format.name]["one"]
    parser = Parser(format, TOOLS, one_call=True)
    assert joined([*parser.feed(text), *parser.feed("\n"), *parser.end()]) == calls
    assert (parser.is_done, parser.has_left_out) == (True, False)


@pytest.mark.parametrize("tag", ["", "```json\n", "<tools>"])
def test_single_call_without_closing_tag_ends_where_the_next_begins(tag):
    one = '{"name": "now", "arguments": {}}'
    for text, n_call in (
        (f'{one}\n{{"name": "now"', 1),
        (f'{one} [{{"name": "now"', 1),
        (f'{one}\n{{"name": "no', 0),
        (f'{one}\n{{"other": "now"', 0),
        (f"{one} is a call", 0),
    ):
        for pieces in ([tag + text], tag + text):
            parser = Parser(HERMES, TOOLS, one_call=True)
            events = [event for piece in pieces for event in parser.feed(piece)]
            assert parser.is_done == parser.has_left_out == bool(n_call)
            assert joined([*events, *parser.end()]) == ([NOW] * n_call or [tag + text])


def test_arguments_are_written_again():
    arguments = '{ "city":"Z\\u00fcrich",\n"days": 1.0e1}'
    reply = Reply(None, Parser(HERMES, TOOLS))
    reply.feed(f'a<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>')
    (call,) = reply.message["tool_calls"]
    assert reply.message["content"] == "a"
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Z\u00fcrich", "days": 10.0}'}
    # a lone surrogate is escaped, because it could not be sent otherwise
    for format, text in (
        (HERMES, '<tool_call>{"name": "now", "arguments": "{\\"x\\": \\"\\ud800\\"}"}</tool_call>'),
        (formats.LFM2, r"<|tool_call_start|>[now(x='\ud800')]<|tool_call_end|>"),
    ):
        reply = Reply(None, Parser(format, TOOLS))
        reply.feed(text)
        (call,) = reply.message["tool_calls"]
        assert call["function"]["arguments"].encode() == b'{"x": "\\ud800"}'


def test_argument_types_are_found_through_definitions():
    schema = {
        "properties": {
            "size": {"$ref": "#/$defs/size"},
            "loop": {"$ref": "#/$defs/loop"},
            "list": {"anyOf": [{"type": "string"}, {"type": "array"}]},
            "code": {"enum": ["1", "2"]},
            "no": {"$ref": "#/$defs/no/such"},
        },
        "$defs": {
            "size": {"type": "string", "enum": ["1", "2"]},
            "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]},
        },
    }
    values = {"size": "1", "loop": "1", "list": "[1]", "code": "2", "no": "1"}
    text = formats.XML.written([("f", values)])
    expected = {"size": "1", "loop": 1, "list": [1], "code": "2", "no": 1}
    assert parsed(formats.XML, [text], [tool("f", schema)]) == [("f", expected)]


def test_invalid_parts_of_a_schema_name_no_types():
    schema = {
        "properties": {
            "list": {"type": [{}, ["string"], "string"]},
            "number": {"anyOf": 5, "oneOf": {"type": "string"}},
            "choice": {"anyOf": [None, {"type": "string"}], "enum": 5},
        }
    }
    text = formats.XML.written([("f", {"list": "1", "number": "1", "choice": "1"})])
    expected = {"list": "1", "number": 1, "choice": "1"}
    assert parsed(formats.XML, [text], [tool("f", schema)]) == [("f", expected)]


def test_objects_and_lists_of_python_in_a_parameter_are_parsed():
    schema = {"properties": {"list": {"type": "array"}, "text": {"type": "string"}}}
    for text, value in (("['a', True]", ["a", True]), ("{'a': None}", {"a": None}), ("['a' b]", "['a' b]")):
        assert typed(text, "list", schema) == value
        assert typed(text, "text", schema) == text


@needs_published
@pytest.mark.engine
@pytest.mark.parametrize("sends", [True, False], ids=["sends thoughts", "keeps thoughts"])
def test_cache_with_a_call_in_an_open_thought_equals_a_fresh_reading(tmp_path, sends):
    source = published_templates.templates()["Qwen3.5-4B"]
    tiny.write_llama(tmp_path / "t.gguf", n_ctx_train=4096, control=("<|im_start|>", "<|im_end|>"))
    with closing(Model(tmp_path / "t.gguf")) as model, dictated_slot(model, source, tmp_path) as serve:
        user = {"role": "user", "content": "Hi"}
        message = serve([user], f"I call.\n{formats.XML.written([NOW])}", tools=TOOLS)["message"]
        (call,) = message["tool_calls"]
        assert (message["content"], message["reasoning_content"]) == ("", "I call.\n")
        if not sends:
            del message["reasoning_content"]
        messages = [user, message, {"role": "tool", "tool_call_id": call["id"], "content": "Noon."}]
        end = serve(messages, "Hm.</think>\n\nNoon.", tools=TOOLS)
        assert (end["message"]["content"], end["n_cached"] > 0) == ("Noon.", True)
        expected = Template(source, "", "").render(
            for_template(messages, Template(source, "", "")), tools=TOOLS
        )
        assert serve.prompt in (expected, expected.removesuffix("<think>\n"))
