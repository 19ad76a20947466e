"""The server of the OpenAI and Anthropic APIs. A request's way:

1. `http/app.py` receives it; `http/gate.py` checks its host, key and size.
2. `api/` checks its fields. A request of /v1/responses or /v1/messages becomes one of /v1/chat/completions.
3. It waits in `queue.py` until `pool.py` gives it a slot: an engine with its own cache.
4. `slot.py` renders the chat by the model's template (`rendering.py`), and brings the engine to the stored
   chat that shares the longest beginning with it (`store/`).
5. The engine reads the rest of the prompt and writes the answer; answers share steps (`batching.py`).
6. `reply.py` splits the answer into thought, text and calls of tools (`tools/`).
7. `api/` makes a line of each piece, and `http/app.py` sends it. At the end `store/` keeps the chat.
"""
