"""The server of the OpenAI and Anthropic APIs. The path of a request:

1. `http/app.py` receives it; `http/gate.py` checks its host, key and size.
2. `api/` checks its fields. A request of /v1/responses or /v1/messages becomes one of /v1/chat/completions.
3. It waits in `queue.py` until `pool.py` gives it a slot, which has an engine with its own cache.
4. `slot.py` renders the chat with the model's template (`rendering.py`), and loads the stored chat that
   shares its longest beginning (`store/`).
5. The engine reads the rest of the prompt and writes the answer. Answers are decoded in joint steps
   (`batching.py`).
6. `reply.py` splits the answer into thought, text and tool calls (`tools/`).
7. `api/` turns each piece into lines, and `http/app.py` sends them. At the end `store/` keeps the chat.
"""
