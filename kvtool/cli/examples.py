"""Examples for each command. -h and docs/cli.md show them."""

EXAMPLES = {
    "": ("kvtool chat", 'cat report.txt | kvtool generate "Summarize:" --budget 1024'),
    "chat": (
        "kvtool chat smollm2-135m --system-file tutor.txt",
        "kvtool chat --budget 64M --archive 2GiB --session talk.kv",
    ),
    "generate": (
        'kvtool generate "Why is the sky blue?" -n 200',
        'cat report.txt | kvtool generate "Summarize:" --budget 10% --explain > summary.txt',
    ),
    "serve": (
        "kvtool serve -m smollm2-135m --port 8080",
        "kvtool serve --budget 1024 --sessions ~/chats --api-key-file key.txt",
    ),
    "perplexity": (
        "kvtool perplexity book.txt --policy weightedkv --budget 256",
        "kvtool perplexity book.txt --policy full --windows 512",
    ),
    "compare": (
        "kvtool compare book.txt --max-tokens 4000 --policies h2o,buzz,local --budgets 128,512",
        "kvtool compare book.txt --records runs.jsonl --plot runs.png",
    ),
    "bench": (
        "kvtool bench --depths 512,8k --budget 512",
        "kvtool bench -m smollm2-135m --json > speeds.json",
    ),
    "eval": ("kvtool eval", "kvtool eval passkey --policy snapkv --budget 20% --limit 50"),
    "inspect": (
        "kvtool inspect book.txt --max-tokens 2000 --policy h2o --budget 256",
        "kvtool inspect book.txt --policy recall --budget 512 --html book.html",
    ),
    "policies": ("kvtool policies", "kvtool policies buzz"),
    "models list": ("kvtool models list", "kvtool models list --all"),
    "models pull": ("kvtool models pull smollm2-135m", "kvtool models pull smollm2-135m --json"),
    "models rm": ("kvtool models rm smollm2-135m", "kvtool models rm hf:OWNER/REPO:Q4_K_M"),
    "models show": (
        "kvtool models show smollm2-135m --fit 256M",
        "kvtool models show ./model.gguf --cache-type-k q8_0 --cache-type-v q8_0",
    ),
    "session show": ("kvtool session show talk.kv", "kvtool session show talk.kv --json"),
    "session export": ("kvtool session export talk.kv", "kvtool session export talk.kv --json > talk.json"),
    "config": (
        "kvtool config chat",
        'mkdir -p "$(dirname "$(kvtool config --path)")" && $EDITOR "$(kvtool config --path)"',
    ),
    "worker": ("kvtool worker", "kvtool worker --host 0.0.0.0 --mem 8GiB"),
    "build": ("kvtool build", "kvtool build --cuda"),
    "doctor": ("kvtool doctor", "kvtool doctor --json"),
    "help": ("kvtool help generate", "kvtool help models show"),
}
