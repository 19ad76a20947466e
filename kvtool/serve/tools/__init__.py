"""Tool calls: syntaxes of models, parsing replies, and grammars that force a call."""
