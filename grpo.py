"""GRPO: group relative policy optimisation, the baseline that every other script is read against.

The idea. Sample a group of responses to the same prompt, score each with a reward, and call a response good or bad by
comparison with its own group: no value network is needed. Every token of a response then gets the same credit, the
response's advantage. That last sentence is what the other scripts of this project replace.

    A_i = (r_i - mean of its group) / (std of its group + 1e-4)
    w   = 1                                                      credit per token: uniform
    L   = mean over responses of mean over tokens [ -min(rho A w, clip(rho, 1-eps, 1+eps) A w) + beta KL(pi, ref) ]
    rho = pi(y_t | ...) / pi_old(y_t | ...)

What differs from grpo.py: nothing, this is it. `diff grpo.py delta.py` shows a method, its settings, and nothing else.

Where it comes from. The paper's (Shao et al. 2024, DeepSeekMath): the advantage (its 1e-4 and the n - 1 in its std are TRL's),
the clipped loss with its k3 estimate of the KL, the aggregation per response. From later papers, as options: clip-higher
and token aggregation (DAPO), no division by std and a constant denominator (Dr. GRPO), dual clip (Ye et al. 2020). Ours: a
group of equal rewards and a response that cannot be scored get exactly 0, and the toy with its preset.

Run it on a CPU (a toy that is trained and improved in three minutes, no download):

    python grpo.py

and on one GPU with a real checkpoint (needs a hub):

    python grpo.py --model Qwen/Qwen3-0.6B --data openai/gsm8k:main --max-new-tokens 512
"""
from dataclasses import dataclass, field

import torch

from common import (InputError, Meter, Run, RunArgs, adapter_off, clipped_kl_loss, draw_batch, encode_prompts, evaluate, freeze,
                    generate, group_advantages, load_policy, load_problems, loss_denominator, main, make_trainable, picture,
                    plot_curve, reward_correct, score, slices, step_metrics, token_logps)


@dataclass
class Args(RunArgs):
    """GRPO's own settings; defaults for real models. The toy's are in TOY below."""
    scale: str = field(default="std", metadata={"help": "advantage divided by the group's 'std' (GRPO) or by 'none' (Dr. GRPO)"})
    clip_low: float = field(default=0.2, metadata={"help": "lower clip range (PPO, GRPO)"})
    clip_high: float = field(default=0.2, metadata={"help": "upper clip range (GRPO); DAPO's clip-higher: 0.28"})
    dual_clip: float | None = field(default=None, metadata={"help": "c > 1 bounds the loss of bad tokens with a huge ratio; off in GRPO"})
    beta: float = field(default=0.04, metadata={"help": "weight of the KL to the starting model (GRPO); 0 loads no reference model"})
    kl: str = field(default="k3", metadata={"help": "KL estimate in the loss: k3 (GRPO; gradient of KL(ref||pi)), k2 (that of "
                                            "KL(pi||ref)), k1 (expected gradient 0: only a monitor)"})
    aggregate: str = field(default="sequence", metadata={"help": "sequence (GRPO), token (DAPO) or constant (Dr. GRPO)"})
    inner_iterations: int = field(default=1, metadata={"help": "passes over a rollout batch (GRPO's mu)"})
    mini_batches: int = field(default=1, metadata={"help": "optimiser steps in a pass; groups stay whole if it divides --prompts-per-step"})
    learning_rate: float = field(default=1e-6, metadata={"help": "AdamW, constant (GRPO)"})
    max_grad_norm: float = field(default=1.0, metadata={"help": "gradient clipping (usual)"})


# The toy is tiny and starts from random weights, so it takes larger steps on more samples.
TOY = dict(steps=60, prompts_per_step=64, max_new_tokens=32, learning_rate=3e-4, micro_batch=512, sample_batch=4096,
           chunk_size=4096, eval_problems=128, eval_samples=8)


def check_options(args):
    """Arguments that only this script has."""
    for name, allowed in (("scale", ("std", "none")), ("kl", ("k1", "k2", "k3")), ("aggregate", ("sequence", "token", "constant"))):
        if getattr(args, name) not in allowed:
            raise InputError(f"--{name} must be one of {', '.join(allowed)}, not {getattr(args, name)}")
    if not 0 < args.clip_low < 1 or args.clip_high <= 0 or args.beta < 0 or (args.dual_clip is not None and args.dual_clip <= 1):
        raise InputError("needs 0 < --clip-low < 1, --clip-high > 0, --beta >= 0 and --dual-clip > 1")


def train(args):
    """The whole algorithm. The six numbered steps are the same in every script, in the README and in the notebooks."""
    check_options(args)
    problems, held_out = load_problems(args)
    if args.eval_only:
        model, tokenizer = load_policy(args)
        print(evaluate(model, tokenizer, encode_prompts(tokenizer, held_out, args), args))
        return
    run = Run(args, "grpo")
    model, tokenizer = load_policy(args, run.model)
    reference = freeze(model if args.lora_rank else load_policy(args)[0]) if args.beta else None  # where training starts
    model, optimizer = make_trainable(model, args)
    run.restore(model, optimizer)
    problems, held_out = encode_prompts(tokenizer, problems, args), encode_prompts(tokenizer, held_out, args)
    if run.step == 0:
        run.log(0, run.evaluate(0, model, tokenizer, held_out))

    for step in run.loop(model, tokenizer, optimizer):
        # 1. Sample: G responses for each prompt of the batch, N in all.
        batch = draw_batch(problems, step, args.prompts_per_step, args.seed)
        rollout = generate(model, tokenizer, [p["prompt_ids"] for p in batch], args.group_size, args)
        mask = rollout.completion_mask                                                      # (N,T)

        # 2. Reward: one number per response, from its text and its problem. NaN: cannot be scored.
        rewards = torch.tensor([float("nan") if r is None else float(r) for r in (
            reward_correct(text, batch[g]) for text, g in zip(rollout.texts, rollout.group_ids.tolist()))])  # (N,)
        accuracy = rewards                                                                  # (N,) what the run is judged by

        # 3. Group advantage: better or worse than the other responses to the same prompt?
        advantages = group_advantages(rewards, rollout.group_ids.cpu(), args.scale).to(mask.device)  # (N,)

        # 4. Token credit: how much of its response's advantage does each token get?
        # The old policy's log-probs come from one scoring pass, not from the sampler, so that the ratio starts at exactly 1.
        old = score(model, rollout, args, want=("entropy",))                                # logps, entropy (N,T)
        with adapter_off(model):
            ref_logps = score(reference, rollout, args).logps if reference else None        # (N,T)
        # ---- what this method changes ----
        weights = torch.ones_like(mask)                                                     # (N,T) w = 1
        credit_stats = {}
        # ----------------------------------
        token_advantages = advantages[:, None] * weights                                    # (N,T) A * w

        # 5. Clipped loss and update. Mini-batches are optimiser steps; micro-batches only save memory.
        meter = Meter()
        for rows in list(torch.arange(len(mask)).tensor_split(args.mini_batches)) * args.inner_iterations:
            denominator, batch_loss = loss_denominator(mask[rows], args.aggregate, args.max_new_tokens), 0.0
            for micro in slices(rows, args.micro_batch):
                logps = token_logps(model, *rollout.rows(micro), temperature=args.temperature, chunk_size=args.chunk_size).logps
                loss, stats = clipped_kl_loss(
                    logps, old.logps[micro], ref_logps[micro] if reference else None, token_advantages[micro], mask[micro],
                    clip_low=args.clip_low, clip_high=args.clip_high, dual_clip=args.dual_clip, beta=args.beta, kl=args.kl,
                    aggregate=args.aggregate, max_len=args.max_new_tokens, denominator=denominator)
                loss.backward()
                batch_loss += loss.detach()
                meter.add(stats)
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            made = run.finite(batch_loss, grad_norm)
            if made:
                optimizer.step()
            optimizer.zero_grad()
            meter.add_update(batch_loss, grad_norm, made)

        # 6. Measure.
        row = {**step_metrics(step, rollout, rewards, accuracy, advantages, old.entropy, meter), **credit_stats}
        if run.evaluation_due(step):
            row.update(run.evaluate(step, model, tokenizer, held_out))
            picture(run.folder / "credit.png", tokenizer, rollout, rewards, weights)
        run.log(step, row)
    plot_curve(run.rows, run.folder / "curve.png")


if __name__ == "__main__":
    main(train, Args, TOY, __doc__)
