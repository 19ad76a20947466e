"""Refused command lines: one line of stderr, which says what to do, and the exit code."""

from __future__ import annotations

import shlex

import pytest

from tests.cli.in_process_command import assert_one_line, run_kvtool
from tests.cli.test_cli import TEXT

MISSPELT = [
    ("run", "there is no command 'run'; use `kvtool chat`"),
    ("list", "there is no command 'list'; use `kvtool models list`"),
    ("ls", "kvtool: there is no command 'ls'; use `kvtool models list`"),
    ("pull x", "there is no command 'pull'; use `kvtool models pull`"),
    ("models ls", "kvtool: `kvtool models`: there is no command 'ls'; use `kvtool models list`"),
    ("session shwo", "`kvtool session`: there is no command 'shwo'. Did you mean `kvtool session show`?"),
    ("genrate x", "there is no command 'genrate'. Did you mean `kvtool generate`?"),
    ("tinyllama.gguf", "there is no command 'tinyllama.gguf'; use `kvtool chat tinyllama.gguf`"),
    ("xyzzy", "there is no command 'xyzzy'; `kvtool -h` lists them"),
    ("help xyzzy", "there is no command 'xyzzy'; `kvtool -h` lists them"),
    ("help chat x", "`kvtool chat` has no subcommands; `kvtool chat -h` shows its help"),
    ("chat --budgett 3", "kvtool: no such option: --budgett. Did you mean --budget? `kvtool chat -h` "),
    ("bench --policy h2o", "no such option: --policy; `kvtool bench -h` "),
    ("compare -o window=8", "-o; write parameters after their policy, as in --policies h2o:window=64; "),
    ("perplexity -f x", "no such option: -f; name the file without -f; `kvtool perplexity -h` "),
    ("compare --file=x", "no such option: --file; name the file without --file; "),
    ("chat -f x", "no such option: -f; `kvtool chat -h` "),
    (
        "generate --session a.kv hi",
        "--session; chats have sessions: `echo PROMPT | kvtool chat --session F",
    ),
    ("chat --temperatur 1", "no such option: --temperatur; `kvtool chat -h` "),
    ("models pull", "kvtool: MODEL is missing; `kvtool models pull -h` lists its options"),
    ("server", "there is no command 'server'; use `kvtool serve`"),
    ("ps", "there is no command 'ps'; `kvtool -h` lists them"),
    ("'Why so?'", 'name a command first: `kvtool generate "Why so?"` or `kvtool chat`'),
    # these are options of other programs
    ("chat -hf a/b:Q8_0", "no such option: -hf; use -m hf:a/b:Q8_0"),
    # -hf is not read as -h -f, although -h is an option
    ("generate -hf a/b", "no such option: -hf; use -m hf:a/b"),
    ("generate x --hf-repo=a/b", "no such option: --hf-repo; use -m hf:a/b"),
    ("chat -hf", "no such option: -hf; use -m hf:..."),
    ("serve --api-key 9", "no such option: --api-key; use --api-key-file"),
    ("chat --mmproj x.gguf", "no such option: --mmproj; kvtool takes no images"),
    # the error names the option's own name, and not the alias
    ("chat --num-ctx x", "kvtool: --ctx-size must be a whole number, got 'x'"),
    ("chat -s x", "kvtool: --seed must be a whole number, got 'x'"),
    # -cnv is not read as -c nv, although -c is an option
    ("chat -cnv", "no such option: -cnv; `kvtool chat` is a conversation, without this option"),
    ("chat -p x", "no such option: -p; `kvtool generate` answers a prompt"),
    ("chat --mlock", "no such option: --mlock; models are mapped into memory, and not locked there"),
    # `bench` has no option for a temperature, so the message names the help of `bench`
    ("bench --temperature 1", "no such option: --temperature; `kvtool bench -h` "),
    ("-hf a/b", "name a command before its options: `kvtool COMMAND -hf`"),
    ("-m x chat", "name a command before its options: `kvtool COMMAND -m`"),
    ("generate Tell me -n 9 more", 'put the prompt into quotes: `kvtool generate "Tell me more"`'),
    ("generate \"It's\" '$5?'", """put the prompt into quotes: `kvtool generate 'It'"'"'s $5?'`"""),
    ("generate -- -x -n 5", 'put the prompt into quotes: `kvtool generate -- "-x -n 5"`'),
    ("chat -- -x 5", "'-x 5' is not a model; `kvtool generate -- \"-x 5\"` answers a prompt, "),
    ("chat 'Why is it?'", "'Why is it?' is not a model; `kvtool generate \"Why is it?\"` answers a prompt, "),
    ("chat Why is it?", "'Why is it?' is not a model; `kvtool generate \"Why is it?\"` answers a prompt, "),
    ("policies H2O", "unknown policy 'H2O'. Did you mean h2o? See `kvtool policies`."),
    ("policies h2o tova", "`kvtool policies` takes only [NAME]; leave out tova"),
    ("eval passky", "unknown task 'passky'. Did you mean passkey? See `kvtool eval`."),
    # tide.txt has no records, so it cannot be a file for --json. It is read as a second text.
    ("compare tide.txt --json tide.txt", "`kvtool compare` takes only [FILE]; leave out tide.txt"),
    ("doctor x", "`kvtool doctor` takes only options; leave out x"),
    ("generate '-5 + 3 = ?'", "-5; if a text begins with -, put -- before it, or use -p; `kvtool generate "),
    ("perplexity -5.txt", "-5; if a name begins with -, put -- before it; `kvtool perplexity -h` "),
    ("doctor -5", "no such option: -5; `kvtool doctor -h` lists its options"),
    ("chat -n", "-n needs a value; `kvtool chat -h` lists its options"),
    ("chat --plain=3", "--plain takes no value; `kvtool chat -h` lists its options"),
]

WRONG_VALUES = [
    ("generate x --top-p 2 -m no-such-model", "kvtool: --top-p must be in 0..1, got 2\n"),
    # with more threads, ggml would end the process
    ("generate x -t 513", "kvtool: --threads must be in 1..512, got 513\n"),
    ("chat -t 0", "kvtool: --threads must be in 1..512, got 0\n"),
    ("generate x --resident 4294967360", "--resident must be in 0..1048576, got 4294967360"),
    ("generate x --top-k x", "kvtool: --top-k must be a whole number, got 'x'\n"),
    ("chat -n 0", "--predict must be at least 1, or -1 for no limit, got 0"),
    ("chat -n -2", "kvtool: --predict must be at least -1, got -2\n"),
    ("chat --seed -2", "kvtool: --seed must be at least -1, got -2\n"),
    ("chat -m ''", "the model's name is empty"),
    ("chat --budget ''", "the budget is empty"),
    ("chat --budget 0.5", "a budget in tokens is a whole number, got '0.5'"),
    ("chat --budget 0", "a budget of 0 is too small"),
    ("chat --budget 0.001%", "is less than 1 token"),
    ("chat --budget 64Mi", "--budget: a budget is a number of tokens (512)"),
    ("perplexity tide.txt --policy buzz --budget 3", "use at least 8"),
    ("perplexity tide.txt --policy h2o -o sinkz=1", "window, sinks"),
    ("perplexity tide.txt --policy h2o -o window=many", "h2o: window must be a whole number"),
    ("perplexity tide.txt -ctv q8_0 -fa off", "flash attention"),
    ("perplexity tide.txt -ctk q9", "q8_0"),
    ("perplexity tide.txt --windows 2", "--windows must be at least 3"),
    ("perplexity tide.txt --policy ./nowhere.py", "no policy file nowhere.py"),
    ("perplexity tide.txt --policy tide.txt", "is not a policy; the file of a policy ends in .py"),
    ("perplexity tide.txt --policy no/such.txt", "no/such.txt is not a policy; the file of a"),
    ("perplexity tide.txt --policy h2o --archive-type q8_0", "`h2o` has no archive; leave out"),
    ("chat --policy full --archive 9", "`full` has no archive; leave out --archive, or"),
    ("inspect tide.txt --policy tova --archive-type f16 --archive 9", "leave out --archive and"),
    ("generate -p x --prefill half", "prefill must be stream, whole or exact"),
    ("generate x --logprobs 2", "kvtool: --logprobs needs --json\n"),
    ("chat --system a --system-file /dev/null", "--system and --system-file are both given; leave out "),
    (
        "chat -l 5 -m no-such-model",
        "--logit-bias must be the number of a token and a bias (15043+1), got '5'; ",
    ),
    ("chat --grammar 'x ::= y' -j {} -m none", "--grammar and --json-schema cannot be combined; choose "),
    ("generate x -ot '[red](=CPU'", "--override-tensor: '[red](' is not a regular expression"),
    ("generate x -ot [red]=GPU0", "--override-tensor: there is no buffer 'GPU0'; there are: CPU"),
    ("generate x --lora a.gguf:inf", "--lora takes a file, or FILE:SCALE with a number, got 'a.gguf:inf'"),
    ("models show no-such-model --device abc", "memory of a GPU, like 8GiB; got 'abc'"),
    ("models show no-such-model --device 8", "memory of a GPU, like 8GiB; got '8'"),
    ("bench --depths 0", "a depth of --depths must be in 32..16777216, got 0"),
    ("bench --depths 512,-1", "--depths takes numbers of tokens, such as 512,8k, got '-1'"),
    ("bench --depths many", "--depths takes numbers of tokens, such as 512,8k, got 'many'"),
    ("bench --depths 17000k", "must be in 32..16777216, got 17408000"),
    ("bench --depths ' ,'", "--depths names no depth; give some, such as 512,8k"),
    ("bench --rounds 0", "--rounds must be at least 1, got 0"),
    ("bench --seconds 0", "--seconds must be in 0.001..1000000, got 0"),
    ("bench --seconds nan", "--seconds must be in 0.001..1000000, got nan"),
    ("bench --budget 4", "recall"),
    ("compare tide.txt --policies h2o,nope", "unknown policy 'nope'"),
    ("compare tide.txt --policies h2o --archive 9", "or choose --policies recall\n"),
    ("compare tide.txt --budgets 64,abc", "kvtool: --budgets: a budget is a number of tokens (512), "),
    ("compare tide.txt --policies h2o:decay=2:foo=1", "there is no parameter 'foo' (--policies); its "),
    ("chat --archive 0", "or choose the policy streamingllm, which archives nothing\n"),
    ("compare tide.txt --types f16,q9", "--types must name some of"),
    ("compare tide.txt --resume", "--records FILE"),
    ("compare tide.txt --records tide.txt", "tide.txt exists; continue it with --resume"),
    ("compare tide.txt --plot nowhere/out.png", "an existing folder"),
    ("compare tide.txt --policies local --budgets ''", "--budgets names no budget"),
    ("compare tide.txt --policies ''", "--policies names no policy"),
    ("compare tide.txt --policies full -c 100", "does not fit in the full cache (100)"),
    ("inspect --snapshots 0", "kvtool: --snapshots must be in 1..255, got 0\n"),
    ("inspect x --html /nowhere/x.html", "cannot write /nowhere/x.html: it must be a file in an "),
    ("inspect x --html /", "cannot write /"),
    ("inspect x --html -", "cannot write to -, because stdout has the result; name a file"),
    ("eval needle", "needle needs a file; name it after the task"),
    ("eval passkey --json --resume", "--resume needs the file to go on with: --records FILE"),
    ("eval --json --limit 3", "--limit needs a task; `kvtool eval` lists them"),
    ("eval passkey --policy full --budget 20%", "takes no --budget"),
    ("eval passkey -o x=1", "no parameter 'x'"),
    ("eval passkey --temp nan -m missing.gguf", "--temp must be in 0"),
    ("worker --host 203.0.113.1", "this machine has no such address"),
    ("worker --host no-such-host.invalid", "cannot be resolved to an IPv4 address"),
    ("worker --mem much", "a size is a number"),
]

OTHER_CODES = [
    ("perplexity tide.txt -m smollm2-135", 3, "Did you mean smollm2-135m?"),
    ("bench -m smollm2-135", 3, "Did you mean smollm2-135m"),
    ("perplexity tide.txt -m tide.txt", 3, "not a GGUF file"),
    ("generate hi -m EMPTY.txt", 3, "EMPTY.txt is empty, so it is not a GGUF model"),
    ("generate hi -m EMPTY.gguf", 3, "EMPTY.gguf is empty; download it again"),
    ("generate hi --lora [red].gguf:half", 3, "[red].gguf:half; --lora takes FILE or FILE:SCALE"),
    ("models show no-such-model", 3, "(and no such file). See `kvtool models list`."),
    ("perplexity missing.txt", 5, "cannot read missing.txt"),
    ("perplexity /dev/null", 5, "empty"),
    ("perplexity tide.txt --policy full -c 64", 5, "does not fit in the cache (64)"),
    ("perplexity tide.txt --positions original -c 300 --budget 256", 5, "positions end at 300"),
    ("perplexity tide.txt --windows 4096 --policy full", 5, "at least 4096 needed"),
    ("compare tide.txt --positions original -c 100 --budgets 64", 5, "original positions end at 100"),
    ("generate", 5, "nothing to read"),
    ("inspect nowhere.txt", 5, "cannot read nowhere.txt"),
    ("inspect -", 5, "stdin is empty"),
    ("eval needle missing", 5, "there is no file missing"),
]


@pytest.mark.parametrize(
    ("typed", "code", "words"),
    [*((typed, 2, words) for typed, words in MISSPELT + WRONG_VALUES), *OTHER_CODES],
)
def test_refused_command_prints_one_line_and_has_its_exit_code(default_talker, tmp_path, typed, code, words):
    (tmp_path / "tide.txt").write_text(TEXT)
    for name in ("EMPTY.txt", "EMPTY.gguf"):
        (tmp_path / name).touch()
    assert_one_line(run_kvtool(*shlex.split(typed), cwd=tmp_path), code, words)
