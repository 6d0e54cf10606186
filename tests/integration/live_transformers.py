"""Continues bundled checkpoints in transformers from snapshots of the running server.

    python3 tests/integration/live_transformers.py

Goal: with a dense budget, `load_into_cache` and `model.generate` go on as if transformers had run the
prompt itself: the same greedy tokens, and logits within 1e-3 in fp32. Method: the built server, a
local transformers run in fp32 (eager, torch form of the delta rule) as the reference, every step's
logits compared with the same tokens fed. Also: the conditional-generation class, every layout and
dtype of the stream, a transposed state must fail, a snapshot that does not fit is refused; the
trained models find a needle in a sparse snapshot.

Exit code 77 (skipped, with the reason) where torch or transformers cannot be imported. The log of a
run is committed as docs/results/live_transformers.log.
"""

import importlib.util
import subprocess
import sys

MISSING = [m for m in ("torch", "transformers", "grpc", "google.protobuf", "xxhash", "numpy")
           if importlib.util.find_spec(m.split(".")[0]) is None]
if MISSING:
    print(f"skipped: {sys.executable} cannot import {', '.join(MISSING)}")
    sys.exit(77)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from server_process import ROOT, ServerProcess  # noqa: E402
from sparsegdn_client import Budget, Outputs, PrefillClient, Snapshot  # noqa: E402
from sparsegdn_client.transformers import CountingCache, load_into_cache  # noqa: E402
from sparsegdn_client.types import DENSE  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402

sys.path.insert(0, str(ROOT / "tests/quality"))
from tasks import registry  # noqa: E402

NEW_TOKENS = 24
LOGITS_TOLERANCE = 1e-3  # the issue's; fp32 sums in two orders differ by about 1e-5 here
FAILED = []


def report(name, good, words):
    print(f"{'ok  ' if good else 'FAIL'} {name}: {words}")
    if not good:
        FAILED.append(name)


def refused(name, error, call):
    try:
        call()
    except error as caught:
        report(name, True, str(caught)[:110])
    else:
        report(name, False, "was accepted")


def fresh_cache(model):
    """An empty cache; the stock one cannot count the tokens of a model of linear layers alone."""
    config = model.config.get_text_config(decoder=True)
    hybrid = "full_attention" in config.layer_types
    return DynamicCache(config=config) if hybrid else CountingCache(config)


def generate(model, ids, cache):
    """Greedy tokens after `ids`, which are given in full."""
    # Without a mask, generate would take tokens equal to pad_token_id for padding.
    out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache,
                         max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0,
                         eos_token_id=None)
    return out[0, ids.shape[1] :].tolist()


def step_logits(model, tokens, cache):
    """Logits [steps, vocabulary] of feeding `tokens` one by one."""
    rows = []
    for token in tokens:
        out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        rows.append(out.logits[0, -1].float())
    return torch.stack(rows)


def compare(name, model, ids, snapshot, reference):
    """The snapshot is of ids[:-1]; `reference` holds the local run's tokens and logits."""
    tokens, logits = reference
    got = generate(model, ids, load_into_cache(model, snapshot))
    feed = [int(ids[0, -1]), *tokens[:-1]]
    difference = (step_logits(model, feed, load_into_cache(model, snapshot)) - logits).abs().max()
    report(name, got == tokens and difference <= LOGITS_TOLERANCE,
           f"{NEW_TOKENS} greedy tokens {'equal' if got == tokens else 'DIFFER'}, largest logit "
           f"difference {difference:.2e} (of {logits.abs().max():.1f})")


def local_run(model, ids):
    tokens = generate(model, ids, fresh_cache(model))
    cache = fresh_cache(model)
    if ids.shape[1] > 1:
        model(ids[:, :-1], past_key_values=cache, use_cache=True)
    return tokens, step_logits(model, [int(ids[0, -1]), *tokens[:-1]], cache)


def conditional(model):
    """The same text weights in the class with a vision tower, a tiny one with random weights."""
    from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    config = Qwen3_5Config(
        text_config=model.config.to_dict(),
        vision_config={"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
                       "out_hidden_size": model.config.hidden_size, "num_position_embeddings": 16},
        tie_word_embeddings=model.config.tie_word_embeddings,
    )
    config._attn_implementation = "eager"
    other = Qwen3_5ForConditionalGeneration(config).float().eval()
    other.model.language_model.load_state_dict(model.model.state_dict())
    other.lm_head.weight.data.copy_(model.lm_head.weight.data)
    return other


def transposed(snapshot):
    """States read in the wrong layout: Dk = Dv, so no shape check can tell."""
    arrays = [a.transpose(0, 2, 1).copy() if snapshot.infos[n].kind == "recurrent_state" else a
              for n, a in snapshot.items()]
    return Snapshot(snapshot.model_identity, snapshot.position, list(snapshot.infos.values()), arrays)


def check_model(name, client, folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                 attn_implementation="eager").eval()
    vocab = model.config.vocab_size
    for count in (1, 2, 5, 64, 130, 700):
        ids = torch.from_numpy(np.random.default_rng(count).integers(0, vocab, (1, count)))
        done = client.prefill(ids[0].numpy(), budget=DENSE, outputs=Outputs(kv_dtype="fp32"))
        compare(f"{name}, {count} tokens", model, ids, done.snapshot, local_run(model, ids))
    return model


def check_forms(client, model):
    ids = torch.from_numpy(np.random.default_rng(9).integers(0, model.config.vocab_size, (1, 200)))
    reference = local_run(model, ids)

    def snapshot(**outputs):
        return client.prefill(ids[0].numpy(), budget=DENSE, outputs=Outputs(**outputs)).snapshot

    plain = snapshot()
    compare("value-major states, three conv columns", model, ids,
            snapshot(state_layout="value_major", conv_layout="three_columns"), reference)
    compare("conditional-generation class", conditional(model), ids, plain, reference)
    base = client.prefill(ids[0, :120].numpy(), budget=DENSE, snapshot_at="after_last", keep=True)
    tail = client.prefill(ids[0, 120:].numpy(), budget=DENSE, resume_from=base.result.snapshot_id)
    compare("resumed after 120 tokens, rows joined", model, ids,
            tail.snapshot.joined(base.snapshot), reference)
    feed = [int(ids[0, -1]), *reference[0][:-1]]
    for dtype in ("bf16", "fp8_e4m3"):
        cache = load_into_cache(model, snapshot(state_dtype=dtype))
        difference = (step_logits(model, feed, cache) - reference[1]).abs().max()
        # Narrow exports are approximations: this says how far, and that they are not garbage.
        report(f"states as {dtype}", difference < 0.5, f"largest logit difference {difference:.2e}")
    wrong = step_logits(model, feed, load_into_cache(model, transposed(plain)))
    difference = (wrong - reference[1]).abs().max()
    report("a transposed state is seen", difference > 10 * LOGITS_TOLERANCE,
           f"largest logit difference {difference:.2e}")
    check_refusals(client, model, ids, plain)


def check_refusals(client, model, ids, plain):
    def part(**outputs):
        return client.prefill(ids[0].numpy(), outputs=Outputs(**outputs)).snapshot

    refused("states left out", ValueError, lambda: load_into_cache(model, part(state=False)))
    refused("KV left out", ValueError, lambda: load_into_cache(model, part(kv=False)))
    base = client.prefill(ids[0, :50].numpy(), keep=True, snapshot_at="after_last")
    tail = client.prefill(ids[0, 50:].numpy(), resume_from=base.result.snapshot_id)
    refused("KV from a later position", ValueError, lambda: load_into_cache(model, tail.snapshot))
    refused("another model's snapshot", ValueError,
            lambda: load_into_cache(model, plain, expect_model="0" * 64))
    load_into_cache(model, plain, expect_model=plain.model_identity)
    methods = DynamicCache.update_conv_state
    owner = next(c for c in DynamicCache.__mro__ if "update_conv_state" in vars(c))
    del owner.update_conv_state
    try:
        refused("older transformers", RuntimeError, lambda: load_into_cache(model, plain))
    finally:
        owner.update_conv_state = methods


def check_bf16(client, folder):
    """A bf16 model gets a cache in its own dtype; its logits are only near."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = torch.from_numpy(np.random.default_rng(3).integers(0, model.config.vocab_size, (1, 100)))
    snapshot = client.prefill(ids[0].numpy(), budget=DENSE).snapshot
    cache = load_into_cache(model, snapshot)
    dtypes = {str(cache.layers[3].keys.dtype), str(cache.layers[0].conv_states[0].dtype)}
    states = str(cache.layers[0].recurrent_states[0].dtype)
    reference = model(ids).logits[0, -1].float()
    logits = step_logits(model, [int(ids[0, -1])], cache)[0]
    difference = (logits - reference).abs().max()
    good = dtypes == {"torch.bfloat16"} and states == "torch.float32" and difference < 0.5
    report("bf16 model", good, f"KV and conv {dtypes}, states {states}, largest logit difference "
                               f"{difference:.2e} (bf16 itself moves them by 0.1)")


def check_sparse(client, model):
    ids = torch.from_numpy(np.random.default_rng(4).integers(0, model.config.vocab_size, (1, 4500)))
    done = client.prefill(ids[0].numpy(), budget=Budget(retention=0.29))
    tokens = generate(model, ids, load_into_cache(model, done.snapshot))
    usage = done.result.usage
    report("a sparse snapshot also continues", len(tokens) == NEW_TOKENS,
           f"{usage.events_selected} of {usage.events_total} updates, {len(tokens)} tokens")


def check_needle(name):
    """transformers finds, in the snapshot at 29 % of the events, what was planted in 8192 tokens."""
    with ServerProcess(name) as server, PrefillClient(server.target) as client:
        model = AutoModelForCausalLM.from_pretrained(
            server.model, dtype=torch.float32, attn_implementation="eager").eval()
        example = registry.make("needle_single", 8195, 1)
        done = client.prefill(example.prompt, budget=Budget(retention=0.29))
        ids = torch.from_numpy(example.prompt.astype(np.int64))[None]
        found = generate(model, ids, load_into_cache(model, done.snapshot))[:2]
        wanted = list(example.expected()[0])
        report(f"{name}, a needle in {ids.shape[1]} tokens", found == wanted,
               f"{found}, planted {wanted}, {done.result.usage.events_selected} of "
               f"{done.result.usage.events_total} updates")


def main():
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    commit = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
                            capture_output=True, text=True).stdout.strip() or "unknown"
    print(f"commit {commit}, torch {torch.__version__}, transformers "
          f"{transformers.__version__}, numpy {np.__version__}")
    for name in ("tiny-gdn", "tiny-hybrid"):
        with ServerProcess(name) as server, PrefillClient(server.target) as client:
            info = server.info
            print(f"{name}: identity {info.model_identity}, {info.backend} backend, computes in "
                  f"{info.compute_dtype}")
            model = check_model(name, client, server.model)
            if name == "tiny-hybrid":
                check_forms(client, model)
                check_bf16(client, server.model)
                check_sparse(client, model)
    for name in ("needle-gdn", "needle-hybrid"):
        check_needle(name)
    print(f"{len(FAILED)} failed: {', '.join(FAILED)}" if FAILED else "all passed")
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
