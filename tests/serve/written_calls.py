"""Tool calls as models write them, for each format."""

from __future__ import annotations

ZURICH = ("weather", {"city": "Zurich", "unit": "C"})
TRICKY = (
    "weather",
    {"city": 'it\'s "Zürich" <b>, {[(\\n)]}\n\\ 雪\U0001f600', "unit": "F", "hours": [1, 23]},
)
NOW = ("now", {})

WRITTEN = {
    "hermes": {
        "one": (
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Zurich", "unit": "C"}}\n</tool_call>',
            [ZURICH],
        ),
        "two": (
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Zurich", "unit": "C"}}\n</tool_call>\n'
            '<tool_call>{"arguments": {}, "name": "now"}</tool_call>',
            [ZURICH, NOW],
        ),
        "without the last tag": ('<tool_call>{"name": "now"} ', [NOW]),
        "arguments in a string": (
            r'<tool_call>{"name": "weather", "arguments": "{\"city\": \"Zurich\", \"unit\": \"C\"}"}'
            "</tool_call>",
            [ZURICH],
        ),
        "no arguments": ('<tool_call>{"name": "now", "arguments": null}</tool_call>', [NOW]),
        "a list": (
            '<tool_call>[{"name": "now", "parameters": {}}, {"function": "now"}]</tool_call>',
            [NOW, NOW],
        ),
        "a tag in a text": (
            '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>}{"}}</tool_call>',
            [("weather", {"city": "</tool_call>}{"})],
        ),
        "an escaped quote": (
            r'<tool_call>{"name": "weather", "arguments": {"city": "\"}\\"}}</tool_call>',
            [("weather", {"city": '"}\\'})],
        ),
        "a line break in a text": (
            '<tool_call>{"name": "weather", "arguments": {"city": "a\n\tb"}}</tool_call>',
            [("weather", {"city": "a\n\tb"})],
        ),
    },
    "xml": {
        "one": (
            "<tool_call>\n<function=weather>\n<parameter=city>\nZurich\n</parameter>\n"
            "<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>",
            [ZURICH],
        ),
        "two": (
            "<tool_call>\n<function=weather>\n<parameter=city>\nZurich\n</parameter>\n<parameter=unit>C</parameter>"
            "\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
            [ZURICH, NOW],
        ),
        "without <tool_call>": ("<function=now></function>\n</tool_call>", [NOW]),
        "types": (
            "<tool_call><function=make-note><parameter=city>True</parameter><parameter=from>12</parameter>"
            "<parameter=other>[1, null]</parameter></function></tool_call>",
            [("make-note", {"city": True, "from": "12", "other": [1, None]})],
        ),
        "null or a text": (
            "<tool_call><function=make-note><parameter=city>false</parameter><parameter=from>null</parameter>"
            "<parameter=other>NaN</parameter></function></tool_call>",
            [("make-note", {"city": False, "from": None, "other": "NaN"})],
        ),
        "lines": (
            "<function=weather>\n<parameter=city>\n\n  a </function> b\n\n</parameter>\n</function>",
            [("weather", {"city": "\n  a </function> b\n"})],
        ),
    },
    "glm": {
        "one": (
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zurich</arg_value>\n<arg_key>unit</arg_key>\n"
            "<arg_value>C</arg_value>\n</tool_call>",
            [ZURICH],
        ),
        "two": (
            "<tool_call>weather<arg_key>city</arg_key><arg_value>Zurich</arg_value><arg_key>unit</arg_key>"
            "<arg_value>C</arg_value></tool_call><tool_call>now</tool_call>",
            [ZURICH, NOW],
        ),
        "types": (
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>12</arg_value>\n</tool_call>",
            [("weather", {"city": "12", "days": 12})],
        ),
    },
    "mistral": {
        "one": ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Zurich", "unit": "C"}}]', [ZURICH]),
        "two": (
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Zurich", "unit": "C"}, "id": "a2345678"'
            '}, {"name": "now", "arguments": {}}]',
            [ZURICH, NOW],
        ),
    },
    "mistral-args": {
        "one": ('[TOOL_CALLS]weather[ARGS]{"city": "Zurich", "unit": "C"}', [ZURICH]),
        "two": (
            '[TOOL_CALLS]weather[CALL_ID]a23456789[ARGS]{"city": "Zurich", "unit": "C"}'
            "[TOOL_CALLS]now[ARGS]{}",
            [ZURICH, NOW],
        ),
    },
    "granite": {
        "one": ('<|tool_call|>[{"name": "weather", "arguments": {"city": "Zurich", "unit": "C"}}]', [ZURICH]),
        "two": (
            '<|tool_call|> [{"arguments": {"city": "Zurich", "unit": "C"}, "name": "weather"},\n'
            ' {"name": "now"}]',
            [ZURICH, NOW],
        ),
    },
    "nemotron": {
        "one": (
            '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Zurich", "unit": "C"}}]</TOOLCALL>',
            [ZURICH],
        ),
        "two": (
            '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Zurich", "unit": "C"}}, {"name": "now"}]'
            " </TOOLCALL>",
            [ZURICH, NOW],
        ),
    },
    "llama": {
        "one": ('{"name": "weather", "parameters": {"city": "Zurich", "unit": "C"}}', [ZURICH]),
        "two": (
            '{"name": "weather", "parameters": {"city": "Zurich", "unit": "C"}}; '
            '{"name": "now", "parameters": {}}',
            [ZURICH, NOW],
        ),
        "after its tag": (
            '<|python_tag|>{"type": "function", "name": "weather", '
            '"parameters": {"city": "Zurich", "unit": "C"}}\n'
            '<|python_tag|>{"type": "function", "function": "now"}',
            [ZURICH, NOW],
        ),
    },
    "lfm2": {
        "one": ('<|tool_call_start|>[weather(city="Zurich", unit="C")]<|tool_call_end|>', [ZURICH]),
        "two": (
            "<|tool_call_start|>[weather(city='Zurich',unit='C'), now()]<|tool_call_end|>",
            [ZURICH, NOW],
        ),
        "without the last tag": ("<|tool_call_start|>[now()]", [NOW]),
        "values": (
            "<|tool_call_start|>[make-note(city=True, from='it's, so', a=-1.5e3, b=[1, (None, null)], "
            r"""c={"k": 'v\'\x41\u00e9\d', 'e': {}}, )]<|tool_call_end|>""",
            [
                (
                    "make-note",
                    {
                        **{"city": True, "from": "it's, so", "a": -1500.0, "b": [1, [None, None]]},
                        "c": {"k": "v'A\u00e9\\d", "e": {}},
                    },
                )
            ],
        ),
    },
    "seed": {
        "one": (
            "<seed:tool_call>\n<function=weather>\n<parameter=city>Zurich</parameter>\n"
            "<parameter=unit>C</parameter>\n</function>\n</seed:tool_call>",
            [ZURICH],
        ),
        "two": (
            "<seed:tool_call><function=weather><parameter=city>Zurich</parameter><parameter=unit>C</parameter>"
            "</function></seed:tool_call>\n<function=now></function>\n</seed:tool_call>",
            [ZURICH, NOW],
        ),
    },
    "apriel": {
        "one": (
            '<tool_calls>[{"name": "weather", "arguments": {"city": "Zurich", "unit": "C"}}]</tool_calls>',
            [ZURICH],
        ),
        "two": (
            '<tool_calls>[\n{"name": "weather", "arguments": {"city": "Zurich", "unit": "C"}, "id": "1"},'
            '{"name": "now", "arguments": {}}\n]\n</tool_calls>',
            [ZURICH, NOW],
        ),
    },
    "cohere": {
        "one": (
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", '
            '"parameters": {"city": "Zurich", "unit": "C"}}\n]<|END_ACTION|>',
            [ZURICH],
        ),
        "two": (
            '<|START_ACTION|>[{"tool_name": "weather", "parameters": {"city": "Zurich", "unit": "C"}},'
            '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}]',
            [ZURICH, NOW],
        ),
    },
    "minimax": {
        "one": (
            '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Zurich</parameter>\n'
            '<parameter name="unit">C</parameter>\n</invoke>\n</minimax:tool_call>',
            [ZURICH],
        ),
        "two": (
            '<minimax:tool_call><invoke name="weather"><parameter name="city">Zurich</parameter>'
            '<parameter name="unit">C</parameter></invoke><invoke name="now"></invoke></minimax:tool_call>',
            [ZURICH, NOW],
        ),
    },
    "gemma": {
        "one": ('<|tool_call>call:weather{city:<|"|>Zurich<|"|>,unit:<|"|>C<|"|>}<tool_call|>', [ZURICH]),
        "two": (
            '<|tool_call>call:weather{<|"|>city<|"|>: <|"|>Zurich<|"|>, unit:"C"}<tool_call|>'
            "<|tool_call>call:now{}<tool_call|>",
            [ZURICH, NOW],
        ),
        "without the last tag": ("<|tool_call>call:now{}", [NOW]),
        "values": (
            '<|tool_call>call:make-note{city:true,from:None,a:-1.5e3,b:[1,<|"|>, x: <|"|>,{c d:[]}],'
            'e:{f:{"g, h: i":null}}}<tool_call|>',
            [
                (
                    "make-note",
                    {
                        **{"city": True, "from": None, "a": -1500.0, "b": [1, ", x: ", {"c d": []}]},
                        "e": {"f": {"g, h: i": None}},
                    },
                )
            ],
        ),
        "a tag in a text": (
            '<|tool_call>call:weather{city:<|"|>}<tool_call|>{"\\<|"|>}<tool_call|>',
            [("weather", {"city": '}<tool_call|>{"\\'})],
        ),
    },
    "functionary": {
        "one": ('<function=weather>{"city": "Zurich", "unit": "C"}</function>', [ZURICH]),
        "two": (
            '<function=weather>{"city": "Zurich", "unit": "C"}</function><function=now>{}</function>',
            [ZURICH, NOW],
        ),
        "without the last tag": ("<function=now>{} ", [NOW]),
        "a tag in a text": (
            '<function=weather>{"city": "</function>}{"}</function>',
            [("weather", {"city": "</function>}{"})],
        ),
    },
    "harmony": {
        "one": (
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
            '{"city": "Zurich", "unit": "C"}',
            [ZURICH],
        ),
        "two": (
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
            '{"city": "Zurich", "unit": "C"}<|call|>'
            "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
            [ZURICH, NOW],
        ),
    },
}
# for each format, a text that opens a call but is not a complete call
OPENS = {
    "hermes": "<tool_call>",
    "xml": "<tool_call><function=",
    "glm": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "mistral-args": "[TOOL_CALLS]",
    "granite": "<|tool_call|>",
    "nemotron": "<TOOLCALL>",
    "llama": "<|python_tag|>",
    "lfm2": "<|tool_call_start|>",
    "gemma": "<|tool_call>",
    "seed": "<seed:tool_call>",
    "apriel": "<tool_calls>",
    "cohere": "<|START_ACTION|>",
    "minimax": "<minimax:tool_call>",
    "functionary": "<function=",
    "harmony": "to=functions.",
}

BLOCKS = {
    "one": (
        '{\n  "name": "weather",\n  "arguments": {\n    "city": "Zurich",\n    "unit": "C"\n  }\n}',
        [ZURICH],
    ),
    "no arguments": ('{"name": "now", "arguments": {}}', [NOW]),
    "two": (
        '{"name": "now", "arguments": {}}\n{"name": "weather", "arguments": {"city": "Zurich", "unit": "C"}}',
        [NOW, ZURICH],
    ),
    "a list": ('[\n{"name": "now", "arguments": {}},\n{"name":"now","arguments":{}}\n]', [NOW, NOW]),
    "a fence in a text": (
        '{"name": "weather", "arguments": {"city": "```json\\n{}\\n```"}}',
        [("weather", {"city": "```json\n{}\n```"})],
    ),
    "more": ('{"name": "now", "id": 3, "arguments": {}, "why": "[{"}', [NOW]),
    "double braces": ('{{"name": "weather", "arguments": {"city": "Zurich", "unit": "C"}}}', [ZURICH]),
}
"""Calls that models write in Markdown's code blocks instead of tags."""

NO_BLOCKS = (
    "",
    "5",
    "[]",
    "{}",
    '"now"',
    '{"name": "kvtool", "version": "1"}',
    '{"name": "no", "arguments": {}}',
    '{"name": "now"}',
    '{"name": "now", "arguments": "{}"}',
    '{"name": "now", "arguments": [1]}',
    '{"name": "now", "parameters": {}}',
    '{"name": "now", "arguments": {"x": 1}',
    '{"names": [{"name": "now", "arguments": {}}]}',
    '{"name": "now", "arguments": {}}\n{"name": "no", "arguments": {}}',
    '[{"name": "now", "arguments": {}}, {"name": "now"}]',
    '{"name": "now", "arguments": {}}\n# as above',
    '{{"name": "now", "arguments": {}}',
)
"""Code blocks that are not calls."""
