"""What token credit costs: its time over the time of the base's step, on SmolLM2-135M and on the toy.

    python tests/bench_step.py [--pairs 3] [--toy-only]

One process, one rollout shape, pairs in turn: a base step (sample, score the old log-probs, loss, backward, optimiser step), then each
method's credit on that step's rollout. Printed: median seconds, median of the pairwise ratios credit / base step, and the process's
peak memory so far. DATC is measured against the same script with lam 0 and the same reward model (so its base includes the reward
model's forward pass), split into the reward model's backward pass and the projections.
"""
import argparse
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import datc
import delta
import gctca
from smollm2 import smollm2_folder


def timed(call):
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def bench(name, args, pairs):
    model, tokenizer = common.load_policy(args)
    reward_model, reward_tokenizer = datc.load_reward_model(args)
    layer, eos_ids = reward_model.get_input_embeddings(), common.end_ids(model, tokenizer)
    table = layer(torch.arange(layer.num_embeddings)).float()
    embeddings, decodable = datc.vocabulary_embeddings(tokenizer, reward_tokenizer, table, model.get_output_embeddings().weight.shape[0], eos_ids)
    problems = common.encode_prompts(tokenizer, common.story_problems(512, 0), args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    args.negative_instruction = common.WRONG_ANSWER  # gctca.py's argument, on top of datc.py's
    times, lengths = {}, []

    def judge(lam):
        args.lam = lam
        return datc.judge(reward_model, reward_tokenizer, tokenizer, rollout, batch, args, eos_ids, decodable is None)

    def update():
        for micro in torch.arange(len(mask)).split(args.micro_batch):
            logps = common.token_logps(model, *rollout.rows(micro), chunk_size=args.chunk_size).logps
            common.clipped_kl_loss(logps, old.logps[micro], None, advantages[micro, None] * mask[micro], mask[micro],
                                   denominator=mask.sum())[0].backward()
        optimizer.step()
        optimizer.zero_grad()

    for i in range(pairs + 1):
        torch.manual_seed(i)
        batch = common.draw_batch(problems, i + 1, args.prompts_per_step, 0)
        rollout, sampling = timed(lambda: common.generate(model, tokenizer, [p["prompt_ids"] for p in batch], args.group_size, args))
        mask = rollout.completion_mask
        lengths.append(mask.sum(1).mean().item())
        rewards = torch.randn(len(mask)).sign()  # any rewards: what a step costs must not depend on luck with the groups
        advantages = common.group_advantages(rewards, rollout.group_ids)
        old, scoring = timed(lambda: common.score(model, rollout, args, want=("entropy", "hidden")))
        _, updating = timed(update)
        _, forward = timed(lambda: judge(0.0))
        (_, gradients, scored), both = timed(lambda: judge(4.0))
        base, row = sampling + scoring + updating, {}
        row["delta"] = timed(lambda: delta.credit_weights(delta.token_proxies(old.hidden, old.logps), advantages, mask))[1] / base
        row["gctca group"] = timed(lambda: gctca.credit_weights(gctca.rollout_divergence(rollout, batch, advantages, old.logps), mask))[1] / base
        row["gctca prompt"] = timed(lambda: gctca.credit_weights(gctca.guidance_divergence(
            old.logps, common.score(model, gctca.negative_rollout(rollout, batch, tokenizer, args), args).logps), mask))[1] / base
        projection = timed(lambda: datc.credit_weights(datc.work_from_hidden(
            old.hidden, model.get_output_embeddings(), gradients, embeddings, rollout.completion_ids, mask, temperature=args.temperature,
            chunk_size=args.chunk_size, decodable=decodable, top_k=args.top_k), advantages, mask, scored=scored))[1]
        row["datc: reward model's backward"] = max(both - forward, 0.0) / (base + forward)
        row["datc: projections"] = projection / (base + forward)
        row["datc: together"] = (max(both - forward, 0.0) + projection) / (base + forward)
        row["base step, seconds"] = base
        if i:  # the first round warms up
            for key, value in row.items():
                times.setdefault(key, []).append(value)
    print(f"\n{name}: {len(mask)} responses, mean length {statistics.mean(lengths):.0f} tokens, {pairs} pairs, peak memory "
          f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    for key, values in times.items():
        print(f"  {key:32} {statistics.median(values):8.4f}   ({min(values):.4f} to {max(values):.4f})", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--toy-only", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--checkpoints", folder, "--warmup-steps", "100", "--reward-steps", "20"]
        bench("toy", common.parse_args(datc.Args, datc.TOY, flags), options.pairs)
        if not options.toy_only:
            source = str(smollm2_folder(folder))
            args = common.parse_args(datc.Args, datc.TOY, [
                *flags, "--model", source, "--reward-model", f"train:{source}", "--prompts-per-step", "4", "--group-size", "4",
                "--max-new-tokens", "96"])
            bench("SmolLM2-135M", args, options.pairs)
