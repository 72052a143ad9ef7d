"""Tokens per second of our sampling against a bare model.generate: the toy, and SmolLM2-135M when it is installed.

    python tests/bench_sampling.py [--pairs 5]

Same prompts, same seed, hence the same tokens; ours and the bare call take turns, and the median of the pairwise ratios is
printed (1.00: no cost; ours also decodes, masks and groups).
"""
import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import grpo
from smollm2 import smollm2_folder


def bench(name, args, prompts, group_size, pairs):
    model, tokenizer = common.load_policy(args)
    prompts = [common.chat_ids(tokenizer, p) for p in prompts]
    ids, mask = common.pad_left([p for p in prompts for _ in range(group_size)], tokenizer.pad_token_id)
    eos = common.end_ids(model, tokenizer)

    def ours():
        return common.generate(model, tokenizer, prompts, group_size, args).completion_ids

    def bare():
        with torch.no_grad():
            return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=args.max_new_tokens, do_sample=True, temperature=1.0, top_k=0,
                                  top_p=1.0, eos_token_id=eos, pad_token_id=tokenizer.pad_token_id)[:, ids.shape[1]:]

    speed = {ours: [], bare: []}
    for i in range(pairs + 1):
        for call in (ours, bare):
            torch.manual_seed(i)
            start = time.perf_counter()
            tokens = call()
            if i:  # the first pair warms up
                speed[call].append(tokens.numel() / (time.perf_counter() - start))
    ratio = statistics.median(a / b for a, b in zip(speed[ours], speed[bare]))
    print(f"{name}: ours {statistics.median(speed[ours]):.0f} tokens/s, bare generate {statistics.median(speed[bare]):.0f} tokens/s, "
          f"median ratio {ratio:.3f} ({len(ids)} rows of up to {args.max_new_tokens} tokens, {pairs} pairs)", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--toy-only", action="store_true")
    options = parser.parse_args()
    questions = [p["question"] for p in common.story_problems(64, 0, "test")]
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--checkpoints", folder, "--warmup_steps", "100"]
        bench("toy", common.parse_args(grpo.Args, grpo.TOY, flags), questions, 8, options.pairs)
        if not options.toy_only:
            args = common.parse_args(grpo.Args, grpo.TOY, ["--model", str(smollm2_folder(folder)), "--max_new_tokens", "64"])
            bench("SmolLM2-135M", args, questions[:2], 8, options.pairs)
