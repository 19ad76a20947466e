"""Random bodies of requests to /v1/messages. Most of them have an error somewhere."""

from __future__ import annotations

from tests.fuzz.random_bodies import COUNT, FIELDS, MESSAGES, STRANGE, Bodies, ending

ADDRESSES = (*[MESSAGES] * 6, *[f"{MESSAGES}?beta=true"] * 2, *[COUNT] * 2)

_NAMES = """
model messages max_tokens system stream temperature top_p top_k stop_sequences tools tool_choice thinking
output_config output_format metadata mcp_servers container context_management service_tier kvtool seed min_p
grammar prompt_cache_key
"""
OWN_FIELDS = tuple(_NAMES.split())


class MessageBodies(Bodies):
    """Draws bodies only for the Messages API and its token counts."""

    def any(self):
        ways = [self.message] * 2 + [self.without, self.wrong_own] * 3 + [self.bent] * 12
        ways += [self.unlike, self.much]
        _, body = self.rng.choice(ways)()
        return self.rng.choice(ADDRESSES), ending(body)

    def without(self):
        """Draw a body in which a field is missing."""
        path, body = self.message()
        body.pop(self.rng.choice(list(body)))
        return path, body

    def wrong_own(self):
        """Draw a body in which some fields have a wrong type, or a value that is out of range."""
        path, body = self.message()
        for _ in range(self.rng.randint(1, 3)):
            body[self.rng.choice(OWN_FIELDS)] = self.rng.choice(STRANGE)
        return path, body

    def bent(self):
        """Draw a body in which some parts, at any depth, are missing, repeated or replaced."""
        path, body = self.message()
        for _ in range(self.rng.randint(1, 3)):
            body = self._bent(body)
        return path, body

    def _bent(self, value):
        rng = self.rng
        if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
            return rng.choice(STRANGE)
        bent = value.copy()
        key = rng.choice(list(bent) if isinstance(bent, dict) else range(len(bent)))
        kind = rng.randrange(8)
        if kind == 0:
            del bent[key]
        elif kind == 1 and isinstance(bent, dict):
            bent[rng.choice((*FIELDS, *OWN_FIELDS, self.words()[:10]))] = bent.pop(key)
        elif kind == 1:
            bent[key:key] = [bent[key]] * rng.choice([1, 1, 100])
        else:
            bent[key] = self._bent(bent[key])
        return bent

    def unlike(self):
        """Draw a chat or a response in OpenAI's format, any JSON value, or bytes that are not JSON."""
        return self.rng.choice([self.chat, self.response, self.value, self.raw])()

    def much(self):
        """Draw a body with very many parts, or with very long parts."""
        rng, n = self.rng, self.rng.choice([100, 2000])
        body = self.message()[1] | {"max_tokens": 1}
        text = {"type": "text", "text": "x"}
        call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [text, call]}] * (n // 20)
        deep = {"type": "object"}
        for _ in range(rng.choice([10, 200])):
            deep = {"type": "object", "properties": {"a": deep}}
        more = [
            {"messages": [*turns, {"role": "user", "content": "x"}]},
            {"messages": [{"role": "user", "content": [text] * n}]},
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}] * (n // 10)}
                ]
            },
            {"messages": [{"role": "king", "content": "x"}] * 100_000},
            {"system": [text] * n},
            {"tools": [{"name": f"f{i}", "input_schema": {"type": "object"}} for i in range(n // 20)]},
            {"tools": [{"name": "f", "input_schema": deep}], "tool_choice": {"type": "any"}},
            {"stop_sequences": ["x" * rng.choice([1, 1000])] * n},
            {f"field {i}": i for i in range(n)},
        ]
        return MESSAGES, body | rng.choice(more)
