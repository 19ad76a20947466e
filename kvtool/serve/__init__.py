"""The server of the OpenAI and Anthropic APIs. A request is processed like this:

1. `http/app.py` receives the request. `http/gate.py` checks its host, key and size.
2. `api/` checks the fields. Requests to /v1/responses or /v1/messages are converted to requests to
   /v1/chat/completions.
3. The request waits in `queue.py` until `pool.py` gives it a slot. A slot has an engine with its own cache.
4. `slot.py` renders the chat with the model's template (`rendering.py`). It then loads the stored chat that
   has the longest beginning in common with this chat (`store/`).
5. The engine reads the rest of the prompt and writes the answer. Several slots decode their answers in joint
   steps (`batching.py`).
6. `reply.py` splits the answer into thought, text and tool calls (`tools/`). The slot emits them as events
   (`events.py`).
7. `api/` turns each event into lines, and `http/app.py` sends these lines. At the end, `store/` stores the
   chat.
"""
