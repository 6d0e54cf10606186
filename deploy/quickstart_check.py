#!/usr/bin/env python3
"""The promises that quickstart.sh checks on a running server. Exit 1 and a message when one fails.

1. Dense: greedy tokens decoded one by one from a snapshot, the states after them and the logits
   equal those of one prefill of prompt + tokens from scratch.
2. Sparse: the events selected are exactly as many as the budget allows, in the result, in the
   retained shares and in the server's counters.
3. With --answer: the tokens decoded from the sparse snapshot of the prompt are the answer.
"""

import argparse
import re
import sys
import urllib.request

import numpy as np
from sparsegdn_client import Budget, Outputs, PrefillClient, load_snapshot

TOLERANCE = 1e-3  # fp32 states and logits of order 1; chunked and one-by-one sums differ in order


def require(condition, message):
    if not condition:
        print(f"error: {message}", file=sys.stderr)
        sys.exit(1)


def metrics(url):
    text = urllib.request.urlopen(url, timeout=10).read().decode()
    return {m[1]: float(m[2]) for m in re.finditer(r"^(\w+(?:\{[^}]*\})?) (\S+)$", text, re.M)}


def expected_events(budget, info, prompt_tokens, computed, layers):
    """DESIGN of the budgets (docs/algorithm.md): forced tokens, and rint(rho n Hk) a window."""
    total = 0
    heads, window = info.num_k_heads, info.window
    for start in range(0, computed, window):
        positions = np.arange(start, min(start + window, computed))
        forced = (positions < budget.keep_first) | (positions >= prompt_tokens - budget.keep_last)
        n = int(len(positions) - forced.sum())
        low = int(np.ceil(budget.min_retention * n)) * heads
        high = int(np.floor(budget.max_retention * n)) * heads
        total += int(forced.sum()) * heads
        total += min(max(int(np.rint(budget.retention * n * heads)), low), high)
    return total * layers


def decode_one_by_one(client, prompt, count):
    """Greedy tokens, each from a one-token call that resumes from the snapshot before it."""
    call = dict(budget=Budget(mode="dense"), snapshot_at="after_last", keep=True)
    nothing = Outputs(state=False, conv_state=False, kv=False)
    last = client.prefill(prompt, outputs=nothing, **call).result
    tokens = [last.next_token]
    for step in range(count):
        position = len(prompt) + step
        wanted = Outputs(logits_positions=[position]) if step == count - 1 else nothing
        out = client.prefill([tokens[-1]], resume_from=last.snapshot_id, outputs=wanted, **call)
        client.release(last.snapshot_id)
        last = out.result
        tokens.append(last.next_token)
    client.release(last.snapshot_id)
    return tokens, out.snapshot


def check_dense(client, prompt, count):
    tokens, resumed = decode_one_by_one(client, prompt, count)
    ids = prompt + tokens[:-1]
    scratch = client.prefill(
        ids,
        budget=Budget(mode="dense"),
        snapshot_at="after_last",
        prefix_reuse=False,  # from scratch
        outputs=Outputs(logits_positions=range(len(prompt) - 1, len(ids))),
    )
    logits = scratch.snapshot["logits"]
    require(
        logits.argmax(axis=1).tolist() == tokens,
        f"greedy tokens {tokens} from the snapshot, {logits.argmax(axis=1).tolist()} from scratch",
    )
    worst = 0.0
    for name in resumed:
        # A resumed call sends the rows it added: of keys, values and logits these are the last.
        got, want = resumed[name], scratch.snapshot[name]
        worst = max(worst, float(np.abs(got - want[-len(got):]).max()))
    require(worst <= TOLERANCE, f"states and logits differ by {worst:g}, allowed {TOLERANCE:g}")
    print(f"dense: {count} tokens decoded one by one equal recomputing {len(ids)} tokens from "
          f"scratch; states and logits within {worst:.1e}")


def check_answer(client, prompt, answer, path):
    """Greedy tokens after the snapshot in the file `path`, which ends before the prompt's last."""
    kept = client.import_snapshot(load_snapshot(path))
    step, tokens, found = kept.snapshot_id, [prompt[-1]], []
    for _ in answer:
        done = client.prefill(tokens, resume_from=step, budget=Budget(mode="dense"), keep=True,
                              outputs=Outputs(state=False, conv_state=False, kv=False),
                              snapshot_at="after_last").result
        client.release(step)
        step, tokens = done.snapshot_id, [done.next_token]
        found += tokens
    client.release(step)
    require(found == answer, f"the needle is {answer}, the snapshot says {found}")
    print(f"needle: {' '.join(map(str, found))} decoded from the sparse snapshot, as planted")


def check_budget(client, url, prompt):
    prompt = prompt[::-1]  # no prefix of it was seen before: all of it is computed
    info = client.model_info()
    before = metrics(url)
    result = client.prefill(prompt, outputs=Outputs(state=False, conv_state=False, kv=False)).result
    after = metrics(url)
    budget = result.budget
    require(budget.mode == "retention", f"the default budget is {budget.mode}, not retention")
    layers = sum(kind == "linear_attention" for kind in info.layers)
    want = expected_events(budget, info, len(prompt), len(prompt) - 1, layers)
    got = result.usage.events_selected
    require(got == want, f"events_selected = {got}, the budget allows exactly {want}")
    counted = after["sparsegdn_events_selected_total"] - before["sparsegdn_events_selected_total"]
    require(counted == want, f"events_selected_total grew by {counted:g}, wanted {want}")
    shares = np.array(list(result.retained.values()))
    total = shares.sum() * (len(prompt) - 1)
    require(abs(total - want) <= 1e-3 * want, f"retained shares add up to {total:g}, not {want}")
    print(f"budget: {got:,} of {result.usage.events_total:,} events "
          f"({got / result.usage.events_total:.4f}), as retention {budget.retention:g} plus "
          f"{budget.keep_last} kept tokens demands, in the result and in the metrics")
    for name in ("sparsegdn_prompt_tokens_total", "sparsegdn_events_total",
                 "sparsegdn_events_selected_total", "sparsegdn_selection_overhead_ratio"):
        print(f"  {name} {after[name]:g}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for flag in ("--server", "--metrics", "--prompt"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--answer", help="file of the token ids that follow the prompt")
    parser.add_argument("--sparse", help="snapshot file of the prompt, with --answer")
    args = parser.parse_args()
    with open(args.prompt, encoding="ascii") as file:
        prompt = [int(word) for word in file.read().split()]
    with PrefillClient(args.server) as client:
        if args.answer:
            with open(args.answer, encoding="ascii") as file:
                check_answer(client, prompt, [int(word) for word in file.read().split()],
                             args.sparse)
        check_dense(client, prompt, args.new_tokens)
        check_budget(client, args.metrics, prompt)


if __name__ == "__main__":
    main()
