"""Check that the tests find faults: plant a fault in each part of kvtool, and run the tests that should fail.

    python tests/tools/planted.py [PART ...]

Each fault is planted in a copy of the checkout. The exit status is 1 if the tests did not find a fault, or if
the text that a fault replaces no longer exists. A fault in C++ needs a build, which takes a few minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    """A fault: one wrong line of a file.

    what: description of the fault.
    old: text that occurs once in the file.
    new: text that replaces it.
    tests: files, or FILE::NAME, that should fail.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


PLANTED = {
    "cli": Fault(
        "a session's options stand for those that were typed",
        "kvtool/options.py",
        "if name in saved and name not in self.typed]",
        "if name in saved and name in self.typed]",
        ("cli/test_chat_session.py",),
    ),
    "cli, wrong lines": Fault(
        "advice about another program's option is given where the command has the option",
        "kvtool/cli/near.py",
        "if name not in known and name in _ADVICE:",
        "if name in _ADVICE:",
        ("cli/test_help.py::test_values_are_not_read_as_options_of_other_programs",),
    ),
    "cli, texts": Fault(
        "a text is cut right behind the tokens that are needed",
        "kvtool/cli/texts.py",
        "_MARGIN = 256",
        "_MARGIN = 0",
        ("cli/test_sources.py",),
    ),
    "cli, chat": Fault(
        "Ctrl-C swallows the next key while text is selected",
        "kvtool/cli/chat/input.py",
        "filter=~is_searching, eager=True",
        "filter=~is_searching",
        ("cli/test_chat_typing.py::test_ctrl_c_swallows_no_key_while_text_is_selected",),
    ),
    "policies, budgets": Fault(
        "the budget that an error names is too small for the model",
        "kvtool/policies/__init__.py",
        "smallest = self._smallest_budget(budget, adapt=adapt)",
        "smallest = self._smallest_budget(budget)",
        ("cli/test_smallest_budgets.py",),
    ),
    "models, disks": Fault(
        "a full disk is an error of pip",
        "kvtool/models/download.py",
        "if error := full_disk(output):",
        "if error := None:",
        ("models/test_models.py::test_full_disk_is_reported_if_pip_prints_a_traceback",),
    ),
    "chats, loops": Fault(
        "a matrix of zeros counts as a loop",
        "kvtool/chats/loops.py",
        "np.where(self._n_sign < _BLOCKS, MIN_TOKENS, MIN_SIGNS)",
        "MIN_TOKENS",
        ("chats/test_loops.py",),
    ),
    "runs, models that fit": Fault(
        "a CPU of one core is as quick as one of eight",
        "kvtool/cli/fits.py",
        "min(default_threads() * _CORE_BYTES_S, _CPU_BYTES_S)",
        "_CPU_BYTES_S",
        ("models/test_fits.py",),
    ),
    "chats, archives": Fault(
        "an archive whose session was moved is deleted",
        "kvtool/chats/archive_file.py",
        "        self._set_other_aside()\n",
        "",
        ("engine/test_segments.py",),
    ),
    "system, texts": Fault(
        "a text keeps its CRLF",
        "kvtool/system/texts.py",
        'return text.replace("\\r\\n", "\\n").replace("\\r", "\\n")',
        "return text",
        ("cli/test_line_breaks.py",),
    ),
    "models": Fault(
        "a share of the context is rounded to the nearest cell",
        "kvtool/config/budget.py",
        "return int(n * percent / 100)",
        "return round(n * percent / 100)",
        ("models/test_models.py", "tasks/test_tasks_run.py"),
    ),
    "models, downloads": Fault(
        "a download that broke off counts as whole",
        "kvtool/models/fetch.py",
        "if size in (None, done):",
        "if True:",
        ("models/test_download.py",),
    ),
    "chats, efforts": Fault(
        "an effort that the template does not take is the nearest lower one without a word",
        "kvtool/chats/effort.py",
        "        if remark:\n            raise UsageError(",
        "        if False:\n            raise UsageError(",
        ("cli/test_think_options.py",),
    ),
    "chats, headers": Fault(
        "an empty thought of a reply's header stays once the reply is an earlier one",
        "kvtool/chats/header.py",
        "return cls(tokens, kept, left_out, len(tokens) - n, rest)",
        "return whole",
        ("chats/test_thinking.py",),
    ),
    "serve, thinking": Fault(
        "an effort that the template does not take is used without a remark",
        "kvtool/serve/api/thinking.py",
        "        if why:\n            remarks.append(",
        "        if False:\n            remarks.append(",
        ("serve/test_serve_thinking.py",),
    ),
    "serve, budgets": Fault(
        "a request gets more tokens of thought than the server allows",
        "kvtool/serve/api/thinking.py",
        "(budget, default.budget) if each",
        "(budget or default.budget,) if each",
        ("serve/test_serve_thinking.py",),
    ),
    "serve, thoughts": Fault(
        "a thought between calls is dropped although the template shows it",
        "kvtool/serve/rendering.py",
        "return self._with_start(reply, region), self._behind_header(region)",
        "return reply, self.header.earlier",
        ("serve/test_serve_thinking.py",),
    ),
    "serve, variables": Fault(
        "chats under variables that change their beginning are the same",
        "kvtool/serve/store/history.py",
        "self.digests = [_digest(variables_key.encode(), tools or [])]",
        'self.digests = [_digest(b"", tools or [])]',
        ("serve/test_serve_thinking.py",),
    ),
    "serve, calls of tools": Fault(
        "a call that is broken loses the white space before it",
        "kvtool/serve/tools/calls.py",
        "yield self._space + self._tag",
        "yield self._tag",
        ("serve/test_serve_calls.py",),
    ),
    "serve, last call": Fault(
        "of several calls the last one is dropped",
        "kvtool/serve/tools/calls.py",
        "for name, arguments in calls:\n            yield Call(",
        "for name, arguments in calls[:-1] or calls:\n            yield Call(",
        ("serve/test_serve_calls.py",),
    ),
    "serve, Anthropic's usage": Fault(
        "tokens that are stored are counted twice",
        "kvtool/serve/api/anthropic.py",
        '"input_tokens": n_read - n_created,',
        '"input_tokens": n_read,',
        ("serve/test_serve_anthropic.py",),
    ),
    "serve, names": Fault(
        "chats of all names are the same",
        "kvtool/serve/store/history.py",
        "[name, _compared(message)]",
        "[_compared(message)]",
        ("serve/test_serve_chats.py",),
    ),
    "serve, digests": Fault(
        "a chat is stored as if its reply were not there",
        "kvtool/serve/store/resumer.py",
        "        digest = history.now\n",
        "        digest = history.digests[-2]\n",
        ("serve/test_serve_chats.py",),
    ),
    "serve, pieces": Fault(
        "a chat is stored before its reply is whole",
        "kvtool/serve/slot.py",
        "message = dict(reply.message)",
        'message = reply.message | {"content": reply.message["content"][:-1]}',
        ("serve/test_serve_chats.py",),
    ),
    "serve, earlier files": Fault(
        "the oldest of an earlier version's files becomes the chat",
        "kvtool/serve/store/chats.py",
        "os.replace(numbered[-1], path)",
        "os.replace(numbered[0], path)",
        ("serve/test_serve_chats.py",),
    ),
    "engine, checkpoints": Fault(
        "a policy that forgets goes back, but its cache does not",
        "kvtool/engine/checkpoints.py",
        "snapshot.restore(cache, arrays_in(checkpoint.data), n_cell)",
        "cache.rows.n_past = checkpoint.n_past",
        ("engine/test_checkpoints.py",),
    ),
    "serve, cancelled": Fault(
        "an answer that nobody waits for goes on",
        "kvtool/serve/queue.py",
        '"""Stop the job before its next step, because the client has left."""\n'
        "        self.is_cancelled = True\n",
        '"""Stop the job before its next step, because the client has left."""\n',
        ("serve/test_serve_chats.py",),
    ),
    "serve, queue": Fault(
        "more requests wait than may",
        "kvtool/serve/queue.py",
        "if n_waiting >= self.n_max:",
        "if n_waiting >= self.n_max + 50:",
        ("serve/test_serve_chats.py",),
    ),
    "serve, usage": Fault(
        "the reply before does not count as cached",
        "kvtool/serve/store/resumer.py",
        "= candidate.marks, self._engine.n_past\n",
        "= candidate.marks, self._engine.n_past - self.conversation.writer.n_written\n",
        ("serve/test_serve_chats.py",),
    ),
    "serve, keys": Fault(
        "the beginning of a key is enough",
        "kvtool/serve/http/gate.py",
        "hmac.compare_digest(each, key.encode())",
        "key.encode().startswith(each)",
        ("serve/test_serve_chats.py",),
    ),
    "serve, hosts": Fault(
        "pages under any name may ask",
        "kvtool/serve/http/gate.py",
        "if limits.names is None:",
        "if limits:",
        ("serve/test_serve.py::test_models_props_tokenize_and_metrics_answer",),
    ),
    "serve, neutral values": Fault(
        "a field that asks for nothing is refused",
        "kvtool/serve/api/fields.py",
        "if value is not None and value not in neutral:",
        "if value is not None and value not in neutral[1:]:",
        ("serve/test_serve_fields.py",),
    ),
    "serve, names of fields": Fault(
        "an error names a tool as kvtool counts them, not as the client does",
        "kvtool/serve/api/anthropic.py",
        'where = f"tools[{i}]"',
        'where = f"tools[{len(tools)}]"',
        ("serve/test_serve_fields.py",),
    ),
    "serve, decoded bodies": Fault(
        "a small body may become a large one",
        "kvtool/serve/http/gate.py",
        "        if len(decoded) > most:\n            raise _too_large(most)\n        at +=",
        "        at +=",
        ("serve/test_serve_gate.py",),
    ),
    "serve, origins": Fault(
        "a page may ask whose origin begins with an allowed one",
        "kvtool/serve/http/gate.py",
        'return bool("*" in self.origins or origin in self.origins or ',
        'return bool("*" in self.origins or origin.startswith(self.origins or ("x",)) or ',
        ("serve/test_serve_gate.py",),
    ),
    "serve, access log": Fault(
        "the log does not say that a client has gone",
        "kvtool/serve/http/access.py",
        'is_over = not message.get("more_body", False)',
        "is_over = bool(message)",
        ("serve/test_serve_gate.py",),
    ),
    "serve, ids of calls": Fault(
        "results of calls with the same id all belong to the first",
        "kvtool/serve/api/messages.py",
        "numbers[i] = waiting[id].popleft()",
        "numbers[i] = waiting[id][0]",
        ("serve/test_serve_tools.py",),
    ),
    "serve, leftovers": Fault(
        "chats of a running server are taken for those of a killed one",
        "kvtool/serve/store/leftovers.py",
        "and not is_locked(folder / LOCK):",
        "and is_locked(folder / LOCK) < 2:",
        ("serve/test_serve_chats.py",),
    ),
    "serve, strict clients": Fault(
        "a model has no lifecycle",
        "kvtool/serve/http/app.py",
        'openai | anthropic | {"lifecycle": "active"} | meta',
        "openai | anthropic | meta",
        ("serve/test_serve_strict.py",),
    ),
    "serve, progress": Fault(
        "a prompt is reported as read before it is",
        "kvtool/serve/api/completions.py",
        '"processed": min(event["n_past"], n)',
        '"processed": n',
        ("serve/test_serve_fields.py",),
    ),
    "serve, continued replies": Fault(
        "the beginning of a reply comes inside the thought that the header opens",
        "kvtool/chats/header.py",
        "text, earlier = self.kept + self.earlier, template.earlier_start",
        'text, earlier = self.kept + self.left_out + " ", template.earlier_start',
        ("serve/test_serve_begun.py",),
    ),
    "serve, stored beginnings": Fault(
        "a chat is stored without the beginning of its reply",
        "kvtool/serve/slot.py",
        'message["content"] = without_thought(begun, conversation.splitter()) + message["content"]',
        'message["content"] = message["content"] + ""',
        ("serve/test_serve_begun.py",),
    ),
    "serve, stop strings": Fault(
        "an answer has the stop string that ended it",
        "kvtool/chats/stops.py",
        "return text[:at]",
        "return text[:end]",
        ("serve/test_serve_chats.py",),
    ),
    "serve, forced calls": Fault(
        "a call that is demanded is not",
        "kvtool/serve/slot.py",
        "conversation.shown | marks, rules)",
        "conversation.shown | marks)",
        ("serve/test_serve_shapes.py",),
    ),
    "serve, pinned": Fault(
        "the system prompt is not pinned",
        "kvtool/serve/store/resumer.py",
        "self.conversation.start_over(n_pinned)",
        "self.conversation.start_over(0)",
        ("serve/test_serve_chats.py",),
    ),
    "serve, slow heads": Fault(
        "each byte of a head gives it more time",
        "kvtool/serve/http/server.py",
        "each.conn.their_state is h11.IDLE or",
        "(each.conn.their_state is h11.IDLE and not each.conn.trailing_data[0]) or",
        ("serve/test_serve_faults.py::test_read_timeout_ends_slow_requests",),
    ),
    "kernels": Fault(
        "among equal scores the older token stays",
        "kvtool/kernels/selection.py",
        "return (rank << 32) | pos",
        "return (rank << 32) | (0x7FFFFFFF - pos)",
        ("policies/test_policies.py", "policies/test_contract.py"),
    ),
    "policies": Fault(
        "the window is one token short",
        "kvtool/policy/ranked.py",
        "return first, view.next - min(max(window, view.held), n_keep - first)",
        "return first, view.next - min(max(window - 1, view.held), n_keep - first)",
        ("policies/test_policies.py",),
    ),
    "engine, eviction": Fault(
        "what signals said before positions start over is lost",
        "kvtool/engine/policy_cache.py",
        "        self.observe()\n        self.n_restart += 1\n",
        "        self.n_restart += 1\n",
        ("engine/test_exactness.py",),
    ),
    "engine, rows": Fault(
        "a cell that moves keeps the rotation of the one before it",
        "kvtool/engine/rows.py",
        "self.rot[row, cell] = self.rot[row, old] + moves[:, 3]",
        "self.rot[row, cell] = self.rot[row, cell] + moves[:, 3]",
        ("engine/test_exactness.py", "engine/test_engine.py"),
    ),
    "engine, snapshot": Fault(
        "a restored engine forgets which tokens its signals are of",
        "kvtool/engine/snapshot.py",
        'cache.signals.restore(saved, counters["signals.since"])',
        "cache.signals.restore(saved, cache.signals.since)",
        ("engine/test_session.py",),
    ),
    "chats": Fault(
        "a new archive takes the place of the old one before the session does",
        "kvtool/chats/archive_file.py",
        "return _PartFile.new(create(following, like=",
        "return _PartFile.new(create(path, like=",
        ("engine/test_segments.py",),
    ),
    "llama, constraints": Fault(
        "tokens that do not fit are barred from the wrong end of the vocabulary",
        "kvtool/llama/sampler.py",
        "np.flatnonzero(~fits)",
        "np.flatnonzero(~fits[::-1])",
        ("llama/test_constraint.py", "serve/test_serve_shapes.py"),
    ),
    "llama, grammars": Fault(
        "a dot is no line break",
        "kvtool/llama/grammar/gbnf.py",
        'return "/(?s:.)/"',
        'return "/./"',
        ("llama/test_constraint.py",),
    ),
    "llama, schemas": Fault(
        "an object is closed though a reference says more about it",
        "kvtool/llama/grammar/rewriting.py",
        "is_alone = is_alone and where not in self._known",
        "is_alone = is_alone",
        ("llama/test_schemas.py",),
    ),
    "llama, patterns": Fault(
        "a set within a set of a pattern is one",
        "kvtool/llama/grammar/patterns.py",
        'part in ("[", "&&", "--", "~~")',
        'part in ("&&", "--", "~~")',
        ("llama/test_schemas.py",),
    ),
    "chats, constraints": Fault(
        "a reply whose answer is held may end in its thought",
        "kvtool/chats/after_thought.py",
        "fits = self._vocabulary.all_but_ends\n",
        "fits = self._vocabulary.all_but_ends | self._vocabulary.mask_of(self._vocabulary.ends)\n",
        ("chats/test_after_thought.py",),
    ),
    "chats, limits of thoughts": Fault(
        "a thought has one token more than it may",
        "kvtool/chats/after_thought.py",
        "self._n_thought >= self._budget",
        "self._n_thought > self._budget",
        ("chats/test_after_thought.py",),
    ),
    "drafts": Fault(
        "what a schema forces is not guessed",
        "kvtool/drafts/drafter.py",
        "constraint.forced()[:most]",
        "constraint.forced()[:0]",
        ("engine/test_drafts.py",),
    ),
    "serve, shapes": Fault(
        "a reply under a schema cannot be a call",
        "kvtool/serve/rendering.py",
        "return call_rules.call_or(request.tools, rules), ",
        "return rules, ",
        ("serve/test_serve_shapes.py",),
    ),
    "serve, cut calls": Fault(
        "a demanded call that is cut off is text",
        "kvtool/serve/tools/calls.py",
        "if has_ended and self._rules:",
        'if has_ended and self._rules == "or":',
        ("serve/test_serve_shapes.py",),
    ),
    "serve, strict schemas": Fault(
        "a strict schema is enforced as far as it goes",
        "kvtool/serve/api/output_format.py",
        "enforced_at(self.value, self.where, strict=self.strict)",
        "enforced_at(self.value, self.where, strict=False)",
        ("serve/test_serve_shapes.py",),
    ),
    "llama": Fault(
        "logits of a step with another number of outputs are those of the one before",
        "kvtool/llama/cache/decoder.py",
        "if where != self._logits_where:",
        "if where[0] != self._logits_where[0]:",
        ("llama/test_llama.py", "engine/test_engine.py"),
    ),
    "measure": Fault(
        "a standard error is that of the population",
        "kvtool/measure/statistics.py",
        "n_block / (n_block - 1)",
        "1.0",
        ("tasks/test_statistics.py",),
    ),
    "tasks": Fault(
        "an answer that holds the reference is as good as one that is it",
        "kvtool/tasks/metrics.py",
        "return float(normalized(output) == normalized(reference))",
        "return float(normalized(reference) in normalized(output))",
        ("tasks/test_metrics.py", "tasks/test_tasks.py"),
    ),
    "build": Fault(
        "a changed patch gives the digest of the old one",
        "kvtool/build/sources.py",
        "(folder / name).read_bytes()",
        "name.encode()",
        ("tools/test_build.py", "tools/test_patches.py"),
    ),
    "patch, edit": Fault(
        "all moves of a row in host memory take the same cell",
        "patches/src/cache/edit-host.cpp",
        "src.push_back(m->src);",
        "src.push_back(first->src);",
        ("llama/test_llama.py", "engine/test_exactness.py"),
    ),
    "patch, kinds of models": Fault(
        "what turns in a key is always its beginning",
        "patches/src/cache/rope.cpp",
        "    first      = walk.first;\n",
        "    first      = 0;\n",
        ("engine/test_kinds.py",),
    ),
    "patch, ALiBi": Fault(
        "a key that moves stays where it stood",
        "patches/src/cache/edit.cpp",
        "    kvtool.places.move(layers, edit);\n",
        "",
        ("engine/test_kinds.py",),
    ),
    "patch, clusters": Fault(
        "queries turn to the first token of a far block",
        "patches/src/archive/attention.cpp",
        "block + l.n_block - 1 - base(l.n_block - 1)",
        "block - base(l.n_block - 1)",
        ("engine/test_exactness.py",),
    ),
    "patch, staging": Fault(
        "the last archived token is hidden from a chunk",
        "patches/src/hooks/staged.cpp",
        "std::fill_n(seen.begin(), n_archived, 0.0f);",
        "std::fill_n(seen.begin(), n_archived - 1, 0.0f);",
        ("engine/test_exact_reader.py",),
    ),
    "engine, staging": Fault(
        "a chunk's tokens are not evicted before the next chunk",
        "kvtool/engine/loop.py",
        "int(done == len(tokens)))\n                    self.evict_if_due(0)\n",
        "int(done == len(tokens)))\n                self.evict_if_due(0)\n",
        ("engine/test_exact_reader.py",),
    ),
    "patch, rewind": Fault(
        "a key that comes back is rotated as it was archived",
        "patches/src/archive/rewind.cpp",
        "delta = all.base_of(t) - base",
        "delta = all.base_of(t) - all.base_of(t)",
        ("engine/test_rewind.py",),
    ),
    "engine, rewind": Fault(
        "a token that comes back is taken for the one before it",
        "kvtool/engine/rewind.py",
        "np.arange(end - n_back, end, dtype=np.int32)",
        "np.arange(end - n_back - 1, end - 1, dtype=np.int32)",
        ("engine/test_rewind.py",),
    ),
    "serve, going back": Fault(
        "what a request has in common with a stored chat is read again",
        "kvtool/serve/store/resumer.py",
        "n = first + n_equal(stream[first:], tokens[:most])",
        "n = first + 0 * n_equal(stream[first:], tokens[:most])",
        ("serve/test_serve_back.py",),
    ),
    "patch, drafts": Fault(
        "the attention of draft tokens that were dropped stays in the signals",
        "patches/src/hooks/state.cpp",
        "deferred.remove(params.signals == 0 ? 0 : n);",
        "deferred.remove(0);",
        ("engine/test_draft.py",),
    ),
    "patch, ragged rows": Fault(
        "flash attention takes the masks of KV heads for masks of query heads",
        "patches/src/cache/ragged.cpp",
        "mask->ne[0], mask->ne[1], 1, mask->ne[2]);",
        "mask->ne[0], mask->ne[1], mask->ne[2], 1);",
        ("engine/test_exactness.py", "engine/test_kinds.py"),
    ),
    "patch, signals of several steps": Fault(
        "a query whose signals are computed later does not see its own token",
        "patches/src/cache/deferred.cpp",
        "limit.push<float>(n_live(head) - n + t);",
        "limit.push<float>(n_live(head) - n + t - 1);",
        ("engine/test_signals.py",),
    ),
    "patch, residents": Fault(
        "the mean of a cluster is visible although the cluster's tokens are resident",
        "patches/src/archive/residents.cpp",
        "r.mask   [i] = mask_of(0);\n",
        "r.mask   [i] = mask_of(r.sizes[i]);\n",
        ("tools/test_archive_checks.py",),
    ),
    "patch, few bits": Fault(
        "keys and values of few bits are not multiplied by Hadamard matrices",
        "patches/src/archive/hadamard.cpp",
        "    int res = n_largest;\n",
        "    int res = 1;\n",
        ("tools/test_archive_checks.py",),
    ),
    "patch, signals": Fault(
        "the last query's attention is the sum over all queries",
        "patches/src/cache/probes.cpp",
        "return sum_middle(ctx, last_queries(a, 1));",
        "return sum_middle(ctx, last_queries(a, n_tokens));",
        ("engine/test_signals.py", "engine/test_exactness.py"),
    ),
}


def main() -> int:
    parts = sys.argv[1:] or list(PLANTED)
    missed = [part for part in parts if not is_found(part, PLANTED[part])]
    print(f"{len(parts) - len(missed)} of {len(parts)} planted faults found", *missed, sep="\n  missed: ")
    return bool(missed)


def is_found(part: str, fault: Fault) -> bool:
    """Plant a fault and run its tests. Return True if one of them fails."""
    # the folder is always the same, so that compiled kernels can be reused
    copy = ROOT / "build" / "planted"
    shutil.rmtree(copy, ignore_errors=True)
    left_out = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache")
    try:
        for folder in ("kvtool", "patches", "tests", "lab", "docs"):
            shutil.copytree(ROOT / folder, copy / folder, ignore=None if folder == "kvtool" else left_out)
        for file in ("pyproject.toml", "models.txt", "README.md", "Makefile", "LICENSE"):
            shutil.copy(ROOT / file, copy / file)
        path = copy / fault.file
        text = path.read_text(encoding="utf-8")
        if text.count(fault.old) != 1:
            print(f"{part}: {fault.file} has not once: {fault.old.strip()}")
            return False
        path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        env = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        if fault.file.startswith("patches/"):
            env["PYTHONPATH"] += os.pathsep + str(built(copy, env))
        tests = [str(copy / "tests" / test) for test in fault.tests]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, check=False)
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        print(f"{part}: {fault.what}: {failed[0].split(' - ')[0] if failed else 'not found'}", flush=True)
        # status 1 of pytest means that tests were run and that some failed
        return done.returncode == 1 and bool(failed)
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def built(copy: Path, env: dict[str, str]) -> Path:
    """Build llama.cpp in the copy. Return the folder into which it is installed."""
    build = [sys.executable, "-m", "kvtool.build"]
    done = subprocess.run(build, cwd=copy, env=env, stdout=subprocess.PIPE, text=True, check=True)
    site = copy / "site"
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(site)]
    subprocess.run([*pip, done.stdout.strip()], check=True)
    return site


if __name__ == "__main__":
    sys.exit(main())
