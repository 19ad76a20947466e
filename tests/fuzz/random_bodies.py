"""Random bodies of requests: correct bodies, wrong bodies, and bodies that are made to break a server."""

from __future__ import annotations

import json

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
POSTS = (CHAT, TEXT, RESPONSES, MESSAGES, COUNT, "/tokenize", "/detokenize")
PATHS = (*POSTS, "/v1/models", "/v1/messages/batches", "/props", "/health", "/metrics", "/nowhere")

N_VOCAB = 320
WORDS = ("What", "is", "a", "stone", "and", "why", "does", "the", "river", "not", "say", "so?")
_ROLES = "system developer user assistant tool function king"
ROLES = (*_ROLES.split(), "", "\ud800", None, 5, ["user"])
_SPECIAL = "<s> </s> <unk> <|im_start|> <|im_end|> <think> </think> [e] [a] <tool_call>"
SPECIAL = _SPECIAL.split()

NUMBERS = (
    *("@NaN", "@Infinity", "@-Infinity", "@1e999", "@-0.0", "@1e-999"),
    *("@1" + "0" * 400, "@" + "9" * 5000),
)
"""Numbers that json.dumps cannot write. `Bodies.text` writes the characters after the @ as a number."""

STRANGE = (
    *(None, True, False, 0, 1, -1, 1.5, -0.0, 1e308, -1e308, 5e-324),
    *(2**31 - 1, 2**31, -(2**31) - 1, 2**63, 2**64),
    *("", "x", "0", "NaN", "null", "true", "\0", "\n", "\ud800", "\udfff x", "\u202e", "\U0010ffff"),
    "a" * 10_000,
    *([], [None], [[]], [0], [1, 2], ["x"], [True], [{}], [[0, 1]], {}, {"a": 1}, {"": None}, {"type": "x"}),
    *({"\ud800": "\udfff"}, {"type": ["text"]}, "@DEEP50", "@DEEP199", "@DEEP1000", "@DEEP100000", *NUMBERS),
)

GRAMMARS = (
    *(f"root ::= {text}" for text in ('"a"*', "[0-9]+", ".*", '("a" | "b"){3,5}', '"\U0001f600"+')),
    *("", " ", "x", "root", "root ::=", 'root ::= "a', "root ::= foo", 'foo ::= "a"'),
    *('root ::= root "a" | "a"', 'root ::= "a"{1000000000}', 'root ::= "a"{99999999999999999999}'),
    "root ::= " + "(" * 500 + '"a"' + ")" * 500,
    *('root ::= "\\x"', "root ::= [", "root ::= []", "root ::= <[5]>*", "root ::= <[999999999]>"),
    *("#" * 10_000, 'root ::= "\0"', 'root ::= "a"\0', "root ::= [\ud800]"),
    *('root ::= "a" root "b" | "x"', 'root ::= (("a"*)*)*'),
    *("root ::= " + " | ".join(f'"a{i}"' for i in range(300)), 'root ::= "' + "a" * 100_000 + '"'),
    "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} | r{i + 1}" for i in range(8)) + '\nr8 ::= "a"',
)

SLOW_GRAMMARS = (
    "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000,
    'root ::= ((("a"?){50}){50}){50}',
    'root ::= "a"{5,1}',
    'root ::= "a" root "b" | "a" root "c" | "x"',
)
"""Grammars that let a careless parser run out of memory, run forever, or crash."""

SCHEMAS = (
    *({}, {"type": "object"}, {"type": "string"}, {"type": "integer"}, {"const": 1}),
    {"enum": ["a", None, 1.5]},
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array"}}, "required": ["a"]},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(60)}},
    *({"type": "array", "items": {}, "maxItems": 10**9}, {"type": "string", "minLength": 10**9}),
    *({"type": "string", "minLength": -5, "maxLength": -7}, {"type": "string", "minLength": 1.5}),
    *({"type": "string", "pattern": "^(((a+)+)+)+$"}, {"type": "string", "pattern": "^[$"}, {"pattern": 5}),
    {"type": "string", "pattern": "^((a{100}){100}){100}$"},
    {"type": "string", "pattern": "^" + "(" * 300},
    *({"$ref": "#"}, {"$ref": 5}, {"$ref": "#/$defs/x"}, {"$ref": "https://example.invalid/x.json"}),
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    *({"allOf": []}, {"anyOf": 5}, {"oneOf": [5]}, {"type": ["string", 5]}, {"type": {}}, {"type": "x"}),
    *({"properties": []}, {"enum": []}, {"required": 5}),
    {"type": "object", "properties": {'"\n::= x': {"type": "string"}, "\ud800": {}, "": {}, "\0": {}}},
    {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": True}},
)


def ending(body):
    """Replace token limits of -1 (no limit) and 2**31 - 1 by 8, so that replies end soon. Return the body."""
    if isinstance(body, dict):
        body |= {name: 8 for name in LIMITS if body.get(name) in (-1, 2**31 - 1)}
    return body


class Bodies:
    """Draws bodies."""

    def __init__(self, rng):
        self.rng = rng

    def any(self):
        """Draw (path, body). The body is a JSON value, or bytes."""
        ways = [self.chat] * 8 + [self.wrong_fields] * 12 + [self.drawn] * 6 + [self.messages] * 6
        ways += [self.completion, self.response] * 4 + [self.message] * 12
        ways += [self.tokens] * 3 + [self.shaped] * 2
        ways += [self.value, self.raw, self.large]
        path, body = self.rng.choice(ways)()
        return path, ending(body)

    def text(self, body):
        """Write a body as bytes.

        The bytes may have numbers that json.dumps cannot write, and a name that comes twice.
        """
        text = json.dumps(body, ensure_ascii=self.rng.random() < 0.7)
        while '"@' in text:
            before, _, rest = text.partition('"@')
            name, _, after = rest.partition('"')
            if name.startswith("DEEP"):
                n = int(name[4:])
                name = "[" * n + "]" * n
            text = before + name + after
        if isinstance(body, dict) and body and self.rng.random() < 0.05:
            twice = json.dumps(self.rng.choice(list(body)))
            text = f"{{{twice}: {json.dumps(self.rng.choice((None, 5, 'x', [], {})))}, {text[1:]}"
        data = text.encode("utf-8", "surrogatepass")
        return b"\xef\xbb\xbf" + data if self.rng.random() < 0.01 else data

    # methods that draw a part of a body

    def words(self):
        rng = self.rng
        kind = rng.randrange(6)
        if kind == 0:
            # characters of all Unicode planes
            return "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randint(0, 60)))
        if kind == 1:
            return "".join(rng.choices(SPECIAL, k=rng.randint(1, 8)))
        if kind == 2:
            return rng.choice(["\0", " ", "\n", "a", "\u0301", "\u4e2d", "\U0001f600"]) * rng.choice(
                [0, 1, 200]
            )
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))

    def turn(self, role=None):
        role = role or self.rng.choice(("user", "user", "assistant", "system"))
        return {"role": role, "content": self.words()}

    def talk(self):
        return [self.turn() for _ in range(self.rng.randint(0, 4))] + [self.turn("user")]

    def value(self, depth=3):
        """Draw an address of POSTS, and any JSON value as its body."""
        return self.rng.choice(POSTS), self._value(depth)

    def _value(self, depth):
        kind = self.rng.randrange(8)
        if depth and kind == 0:
            return [self._value(depth - 1) for _ in range(self.rng.randint(0, 4))]
        if depth and kind == 1:
            return {self.words()[:10]: self._value(depth - 1) for _ in range(self.rng.randint(0, 4))}
        return self.rng.choice(STRANGE)

    # methods that draw an address and a whole body

    def chat(self):
        return CHAT, {"messages": self.talk(), **self.options()}

    def options(self):
        rng = self.rng
        fields = {
            "max_tokens": rng.choice([0, 1, 2, 5, 8]),
            "temperature": rng.choice([0, 0.8, 10_000]),
            "stream": rng.random() < 0.4,
            "stream_options": rng.choice([None, {"include_usage": True}, {}]),
            "logprobs": rng.random() < 0.3,
            "seed": rng.choice([0, -1, 2**63, None]),
            "stop": rng.choice(
                [None, "", "a", ["x", "\n"], ["b" * rng.choice([1, 50, 100_000])] * 3, ["\U0001f600"]]
            ),
            "kvtool": rng.choice([None, {}, {"share": 100}, {"share": 2**31 - 1}]),
            "user": "x",
        }
        return {name: value for name, value in fields.items() if rng.random() < 0.6}

    def wrong_fields(self):
        """Draw a body in which some fields have a wrong type, or a value that is out of range."""
        kinds = [self.chat, self.completion, self.response, self.message, self.drawn, self.tokens]
        path, body = self.rng.choice(kinds)()
        for _ in range(self.rng.randint(1, 3)):
            body[self.rng.choice(FIELDS)] = self.rng.choice(STRANGE)
        return path, body

    def drawn(self):
        """Draw settings of the sampler at the ends of their ranges."""
        rng = self.rng
        body = self.chat()[1]
        for name, values in ENDS.items():
            if rng.random() < 0.2:
                body[name] = rng.choice(values)
        bias = rng.choice([-100, 100, 0, False, "@1e999", 10_000, -10_000, 10_001, "x"])
        names = rng.choice(
            [range(N_VOCAB), range(2, 3), rng.sample(range(N_VOCAB), 10), [-1], [N_VOCAB], [10**30]]
        )
        pairs = [[each, bias] for each in names]
        if rng.random() < 0.4:
            body["logit_bias"] = rng.choice([{str(each): bias for each in names}, pairs])
        return CHAT, body

    def messages(self):
        """Draw a chat. Its messages, or fields of the messages, are often malformed."""
        rng = self.rng
        images = [{"type": "image_url", "image_url": {"url": "x"}}]
        contents = (*STRANGE, [], [{"type": "text", "text": "x"}], images)
        function = {
            "name": rng.choice(["f", "", 5, "\ud800"]),
            "arguments": rng.choice(["{}", "[" * 5000, '"\\ud800"', {}, "x"]),
        }
        calls = [{"id": rng.choice(["1", "", None]), "type": "function", "function": function}]
        messages = []
        for _ in range(rng.randint(0, 5)):
            message = {"role": rng.choice(ROLES), "content": rng.choice([self.words(), rng.choice(contents)])}
            if rng.random() < 0.3:
                message["tool_calls"] = rng.choice([calls, calls * 3, [], {}, [None], "x", [{"function": 5}]])
            if rng.random() < 0.3:
                message["tool_call_id"] = rng.choice(["1", "x", 5, None])
            if rng.random() < 0.1:
                message["name"] = rng.choice(STRANGE)
            messages.append(rng.choice([message] * 9 + [rng.choice(STRANGE)]))
        right = {"tools": [{"type": "function", "function": {"name": "f"}}]}
        tools = rng.choice([{}, {}, {"tools": rng.choice(STRANGE)}, right])
        return CHAT, {"messages": messages, "max_tokens": 3, **tools}

    def completion(self):
        rng = self.rng
        prompts = ["", self.words(), [self.words()], ["a", "b"]]
        prompts += [[rng.randrange(N_VOCAB) for _ in range(rng.randint(0, 50))], list(range(N_VOCAB))]
        prompts += [[0, 1, 2], [1], [2, 2], [-1], [N_VOCAB], [10**30], [1.5], [True], [[1, 2]]]
        body = {"prompt": rng.choice(prompts), "echo": rng.random() < 0.2, **self.options()}
        return TEXT, body | {"logprobs": rng.choice([None, 0, 5, 20, 21])}

    def response(self):
        rng = self.rng
        items = [
            *({"type": "message", **self.turn()}, {"type": "reasoning"}, {"type": "x"}, 5, self.turn()),
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": rng.choice(["{}", 5, None])},
            {"type": "function_call_output", "call_id": rng.choice(["1", 5]), "output": rng.choice(STRANGE)},
        ]
        prompt = rng.choice([self.words(), rng.choices(items, k=rng.randint(0, 4)), None, 5])
        body = {"input": prompt, "max_output_tokens": rng.choice([0, 1, 5]), "stream": rng.random() < 0.4}
        body["metadata"] = rng.choice([None, {}, {"a": rng.choice(STRANGE)}])
        if rng.random() < 0.3:
            body[rng.choice(["text", "tools", "tool_choice", "instructions", "top_p"])] = rng.choice(STRANGE)
        return RESPONSES, body

    def message(self):
        rng = self.rng
        blocks = [
            *({"type": "text", "text": self.words()}, {"type": "text", "text": "", "cache_control": {}}) * 3,
            {"type": "tool_result", "tool_use_id": "1", "content": rng.choice([self.words(), [], None])},
            {"type": "tool_result", "tool_use_id": rng.choice(STRANGE), "content": rng.choice(STRANGE)},
            {"type": "tool_use", "id": "1", "name": rng.choice(["f", "", 5]), "input": rng.choice(STRANGE)},
            *(
                {"type": "tool_use", "id": "1", "name": "f", "input": {}},
                {"type": "thinking", "thinking": "x"},
            ),
            *({"type": "image"}, {"type": rng.choice(STRANGE)}, rng.choice(STRANGE)),
        ]

        def content():
            if rng.random() < 0.1:
                return rng.choices(blocks)
            return rng.choice([self.words(), rng.choices(blocks[:6], k=rng.randint(1, 4))])

        roles = ["user", "assistant", "user", "assistant", "system", rng.choice(ROLES)]
        talk = [{"role": rng.choice(roles), "content": content()} for _ in range(rng.randint(0, 3))]
        tool = {"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
        more = {
            "system": [self.words(), blocks[:2], rng.choice(STRANGE)],
            "stream": [True, False],
            "temperature": [0, 1, rng.choice(STRANGE)],
            "tools": [[tool], [tool, {"type": "web_search_20250305", "name": "w"}], rng.choice(STRANGE)],
            "tool_choice": [
                *({"type": name, "name": "f"} for name in ("auto", "any", "tool")),
                rng.choice(STRANGE),
            ],
            "stop_sequences": [["a"], ["e", "\n\n"], rng.choice(STRANGE)],
            "thinking": [{"type": "enabled", "budget_tokens": 5}, {"type": "disabled"}, rng.choice(STRANGE)],
            "output_config": [{"effort": "low"}, {"format": rng.choice(STRANGE)}, rng.choice(STRANGE)],
            "metadata": [{"user_id": "x"}, rng.choice(STRANGE)],
        }
        body = {name: rng.choice(values) for name, values in more.items() if rng.random() < 0.15}
        body["max_tokens"] = rng.choice([0, 1, 5, 5, 5, 5, 5, rng.choice([None, -1, "x"])])
        body["messages"] = [*talk, {"role": "user", "content": content()}]
        return rng.choice([MESSAGES] * 4 + [f"{MESSAGES}?beta=true", COUNT]), body

    def tokens(self):
        rng = self.rng
        if rng.random() < 0.5:
            content = rng.choice([self.words(), rng.choice(STRANGE)])
            return "/tokenize", {"content": content, "add_special": rng.random() < 0.5}
        tokens = [[], [1, 2, 3], list(range(N_VOCAB)), [-1], [N_VOCAB], [2**40], [True], rng.choice(STRANGE)]
        return "/detokenize", {"tokens": rng.choice(tokens)}

    def shaped(self):
        """Grammars and schemas."""
        rng = self.rng
        body = {"messages": self.talk(), "max_tokens": 8, "temperature": rng.choice([0, 1])}
        schema = rng.choice(SCHEMAS)
        shapes = [{"grammar": rng.choice(GRAMMARS)}] * 4 + [{"json_schema": schema}] * 2
        shapes += [{"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}] * 2
        shapes += [{"response_format": {"type": "json_object"}}, {"response_format": rng.choice(STRANGE)}]
        if rng.random() < 0.03:
            shapes = [{"grammar": rng.choice(SLOW_GRAMMARS)}]
        return CHAT, body | rng.choice(shapes)

    def raw(self):
        """Draw a body that is not JSON."""
        texts = [b"", b" ", b"{", b"[", b'"', b"nul", b"{}x", b"\xff", b"\0", b"{'a': 1}", b"\xed\xa0\x80"]
        texts += [b"[1,]", b'"\\ud8"', '{"messages": "\u00e9"}'.encode("utf-16"), b"-", b"1" * 5000]
        texts += [b"[" * 100_000, b'{"a":' * 100_000]
        return self.rng.choice(POSTS), self.rng.choice(texts)

    def large(self):
        """Draw a body with very many parts, or with very long parts."""
        rng = self.rng
        n = rng.choice([1000, 10_000])
        parts = [{"role": "user", "content": [{"type": "text", "text": "x"}] * n}]
        return rng.choice(
            [
                (CHAT, {"messages": [{"role": "user", "content": "x"}] * n, "max_tokens": 1}),
                (CHAT, {"messages": [{"role": "king", "content": "x"}] * 200_000, "max_tokens": 1}),
                (CHAT, {"messages": parts, "max_tokens": 1}),
                (CHAT, {"messages": self.talk(), "logit_bias": [[1, 1]] * n, "max_tokens": 1}),
                (CHAT, {"messages": self.talk(), "stop": ["x"] * n}),
                (CHAT, {f"field {i}": i for i in range(n)}),
                (TEXT, {"prompt": "word " * (n // 5), "max_tokens": 1}),
                (TEXT, {"prompt": [5] * n, "max_tokens": 1}),
                (TEXT, b"[" + b"[]," * 100_000 + b"[]]"),
                ("/tokenize", {"content": "a b" * 20_000}),
                ("/detokenize", {"tokens": [100] * 50_000}),
            ]
        )


ENDS = {
    "temperature": (0, 1e-9, 0.5, 10_000, 10_001, -1),
    "top_p": (0, 1e-9, 1, 1.1, -1),
    "min_p": (0, 1, 2),
    "top_k": (0, 1, -1, -(2**31), 2**31 - 1),
    "typical_p": (0, 1e-9, 1),
    "presence_penalty": (-10_000, 10_000, 2),
    "frequency_penalty": (-10_000, 10_000, 2),
    "repeat_penalty": (0, 0.001, 1000, 1.1),
    "repeat_last_n": (0, -1, 2**20, 2**20 + 1, 64),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 0.5, 1),
    "dry_multiplier": (0, 10_000, 1),
    "dry_base": (1, 10_000, 0),
    "dry_allowed_length": (0, 2**20),
    "dry_penalty_last_n": (-1, 0, 2**20),
    "mirostat": (0, 1, 2, 3),
    "mirostat_tau": (0, 5, 10_000),
    "mirostat_eta": (0, 0.1, 10_000),
    "top_logprobs": (0, 20, 21),
}

_NAMES = """
messages prompt input model max_tokens max_completion_tokens n_predict n best_of stream stop seed
stream_options logprobs logit_bias response_format json_schema grammar tools tool_choice kvtool
parallel_tool_calls prompt_cache_key echo user metadata content tokens add_special text
system stop_sequences thinking output_config
instructions max_output_tokens functions audio reasoning_effort cache_prompt suffix id_slot samplers
stop_token_ids ignore_eos return_progress modalities repetition_penalty min_tokens n_keep
include top_logprobs dry_sequence_breakers continue_final_message add_generation_prompt unheard_of
"""
FIELDS = (*_NAMES.split(), *ENDS)
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
