"""The diffusion sampler's speed, the cost of its trace and of the prefix cache, and what DACA's and DTCA's credit costs.

    python tests/bench_diffusion.py [--pairs 3] [--toy-only]        (about 20 minutes on two cores; the toy alone one)

On random weights (speed does not depend on what a model knows): the toy's sizes, and a LLaDA-type model of SmolLM2-135M's sizes. All calls of
a comparison take turns in one process; printed are medians of the pairwise ratios. The plain loop is what one would write first: a
full forward and a softmax over all positions per step, batched, without trace, per-row noise or checks.
"""
import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import daca
import dtca


def random_model(large):
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    sizes = (dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3)
             if large else dict(vocab_size=148, hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4))
    model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=512, initializer_range=0.05)).eval()
    return common.MaskedDiffusionLM(model, mask_id=2, eos_ids=[1])


@torch.no_grad()
def plain_loop(lm, prompt_ids, prompt_mask, T, steps, temperature=1.0):
    ids = torch.cat([prompt_ids, torch.full((len(prompt_ids), T), lm.mask_id)], 1)
    attention = torch.cat([prompt_mask, torch.ones(len(prompt_ids), T, dtype=torch.long)], 1)
    for count in common.num_transfer(T, steps):
        logits = lm.logits(ids, attention)
        p = logits.softmax(-1)
        x0 = (logits - temperature * torch.empty_like(logits).exponential_().log()).argmax(-1)
        confidence = p.gather(-1, x0[..., None])[..., 0].masked_fill(ids != lm.mask_id, -1)
        confidence[:, :prompt_ids.shape[1]] = -1
        write = torch.zeros_like(ids, dtype=torch.bool).scatter(1, confidence.topk(count).indices, True)
        ids = torch.where(write, x0, ids)
    return ids


def ratios(calls, pairs):
    """Median seconds of each call, and the median of its pairwise ratio to the first."""
    seconds = {name: [] for name in calls}
    for i in range(pairs + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if i:
                seconds[name].append(time.perf_counter() - start)
    first = next(iter(seconds.values()))
    return {name: (statistics.median(s), statistics.median(a / b for a, b in zip(s, first))) for name, s in seconds.items()}


def bench(name, large, pairs):
    lm, rows, P, T = random_model(large), 8 if large else 64, 24, 64
    prompt_ids, prompt_mask = torch.randint(3, 140, (rows, P)), torch.ones(rows, P, dtype=torch.long)
    options = dict(gen_length=T, block_length=T, steps=T // 4, temperature=1.0, seed=0)
    sample = lambda ids=prompt_ids, mask=prompt_mask, **more: common.sample_diffusion(lm, ids, mask, **{**options, **more})
    result = ratios({
        "ours, with trace": sample, "ours, without trace": lambda: sample(trace=False),
        "plain batched loop": lambda: plain_loop(lm, prompt_ids, prompt_mask, T, T // 4),
        "ours, one prompt at a time": lambda: [sample(prompt_ids[i:i + 1], prompt_mask[i:i + 1]) for i in range(rows)],
        "blocks of 16": lambda: sample(block_length=16), "blocks of 16, prefix cache": lambda: sample(block_length=16, prefix_cache=True)}, pairs)
    print(f"\n{name}: {rows} prompts, {T} tokens in {T // 4} steps, {pairs} pairs")
    for key, (seconds, ratio) in result.items():
        print(f"  {key:32} {seconds:8.2f} s {rows * T / seconds:9.0f} tokens/s   time / time of ours with trace {ratio:6.3f}")
    exact, fast = sample(block_length=16)[0], sample(block_length=16, prefix_cache=True)[0]
    print(f"  cost of the trace: {1 / result['ours, without trace'][1]:.3f} (with / without); prefix cache: {(exact == fast).float().mean():.3f} of the tokens equal")

    ids, trace = sample()
    mask, calls = torch.ones(rows, T), {}
    advantages = torch.randn(rows)
    model_parameters = list(lm.model.parameters())

    def step(likelihood):
        for micro in torch.arange(rows).split(4):
            loss, _ = common.clipped_kl_loss(likelihood(micro), torch.zeros(len(micro), T), None, advantages[micro, None] * mask[micro], mask[micro])
            loss.backward()
        for p in model_parameters:
            p.grad = None

    seeds = torch.arange(rows)
    one = lambda m: common.one_step_logps(lm, prompt_ids[m], prompt_mask[m], ids[m], seeds=seeds[m])
    strata = lambda m: common.stratified_logps(lm, prompt_ids[m], prompt_mask[m], ids[m], seeds=seeds[m], strata=4)
    scores = lambda: daca.credit_weights(daca.denoising_progress(trace.C, trace.commit_step, mask), mask)
    calls = {"diffu base: sample, old, update": lambda: (sample(), [one(m) for m in torch.arange(rows).split(4)], step(one)),
             "DACA: scores": scores, "4 strata: old, update": lambda: ([strata(m) for m in torch.arange(rows).split(4)], step(strata))}
    for key, (seconds, ratio) in ratios(calls, pairs).items():
        print(f"  {key:32} {seconds:8.3f} s   over the base step {ratio:7.4f}")

    rollout = common.Rollout(prompt_ids, prompt_mask, ids, mask, torch.arange(rows), torch.zeros(rows).bool(), [""] * rows, trace)
    tags = torch.rand(rows, T) * 0.4 + 0.8  # any class weights: the cost does not depend on them
    states = dtca.choose_states(rollout, tags, lm.mask_id, 0.7, 2, 32)
    pieces = torch.arange(len(states.row)).split(4)

    def update():
        for micro in pieces:
            logps, _ = dtca.state_logps(lm, states, micro, 256)
            common.clipped_kl_loss(logps, logps.detach(), None, advantages[states.row[micro], None] * states.target[micro],
                                   states.target[micro])[0].backward()
        for p in model_parameters:
            p.grad = None

    def plain():
        sample()
        with torch.no_grad():
            [dtca.state_logps(lm, states, micro, 256) for micro in pieces]
        update()

    def credit():
        dtca.choose_states(rollout, tags, lm.mask_id, 0.7, 2, 32)
        alpha = dtca.step_credit(tags[states.row], states.target)
        with torch.no_grad():
            for micro in pieces:
                target = states.target[micro]
                V = lm.model.config.vocab_size
                logits = torch.zeros(int(target.sum()), V)
                dtca.entropy_change(logits, states.y[micro][target], alpha[micro][target])
        for n in range(rows):
            mine = states.row == n
            dtca.calibrate(alpha[mine][states.target[mine]], torch.randn(int(states.target[mine].sum())))

    for key, (seconds, ratio) in ratios({"step-selected training": plain, "DTCA: choice, credit, calibration": credit}, pairs).items():
        print(f"  {key:32} {seconds:8.3f} s   over the step-selected step {ratio:7.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--toy-only", action="store_true")
    chosen = parser.parse_args()
    bench("toy sizes", False, chosen.pairs)
    if not chosen.toy_only:
        bench("LLaDA-type model of SmolLM2-135M's sizes", True, chosen.pairs)
