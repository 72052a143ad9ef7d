"""DACA: denoising-aware credit assignment for masked diffusion models.

The idea. A diffusion model writes a response in steps, the most confident tokens first, and each step makes what is
still masked easier or not. A token gets more credit when the step that wrote it raised the model's confidence in the
tokens it had yet to write. And the likelihood that is trained hides one stratum of the response at a time, so that a
token is scored among other tokens, as it was sampled, and not alone among masks.

    C[s,i]  noise-free probability, before step s, of the token that i finally holds (seen by the sampler: no forward; 0
            while that token is not among the 8 likeliest)
    D[s,i]  = max(0, C[s+1,i] - C[s,i])  where i is valid and still masked after step s, else 0
    g_i     = mean of D[s,j] over such j, s the step that wrote i  ("step")      or     sum over s of D[s,i]  ("own")
    w_i     = 1 + kappa (g_i - mean g) / max |g - mean g|        over the response's valid tokens, kappa = 0.5
    l_i     = log p(y_i | prompt, y with stratum(i) masked),   K random strata, balanced over the valid tokens

What differs from grpo.py: the model, its sampler and its likelihood (log p of a response has no closed form, so old,
new and reference log-probs of an inner iteration use the same random masks); in step 4 these weights instead of 1.

Where it comes from. From the paper's abstract (the text could not be read): credit from denoising progress and a
stratified masking likelihood, on three base methods. Ours: every formula above, kappa, K, and the choice of bases,
which are the best known ones: diffu-GRPO (d1's code), coupled-GRPO (DiffuCoder's code), UniGRPO (MMaDA's paper).
Published, and not reproduced here: up to +5.6 points on maths, +7.4 on code, +36.3 on constraint satisfaction, +5.9
on JSON schemas.

Run it on a CPU (a toy, no download; some minutes; what came out: README, "learning on the toy"):

    python daca.py                                              both mechanisms on diffu-GRPO
    python daca.py --progress none --strata 0                   the base alone

and on one GPU with a real checkpoint (needs a hub; a 0.6B model fits in float32):

    python daca.py --model dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1 --data openai/gsm8k:main --max-new-tokens 256
"""
from collections import namedtuple
from dataclasses import dataclass, field

import torch

from common import (DiffusionArgs, InputError, Meter, Run, adapter_off, at_budget, clipped_kl_loss, coupled_logps, draw_batch,
                    draw_strata, encode_prompts, evaluate, freeze, generate, group_advantages, load_diffusion_policy,
                    load_problems, loss_denominator, main, make_trainable, one_step_logps, picture, plot_curve,
                    plot_denoising, reward_correct, slices, step_metrics, stratified_logps, uni_logps)

# What --base sets: its method's settings and, with --strata 0, its likelihood. Command line and toy preset win over it.
BASES = {
    "diffu": dict(scale="none", clip_low=0.5, clip_high=0.5, beta=0.04, aggregate="token",  # the papers' settings
                  inner_iterations=12, learning_rate=3e-6),
    "coupled": dict(scale="none", clip_low=0.5, clip_high=0.5, beta=0.01, aggregate="token",
                    inner_iterations=2, learning_rate=1e-6),
    "uni": dict(scale="std", clip_low=0.2, clip_high=0.2, beta=0.04, aggregate="sequence",  # as GRPO: ours
                inner_iterations=4, learning_rate=1e-6)}


@dataclass
class Args(DiffusionArgs):
    """DACA's own settings, and its base's (None: what --base sets)."""
    base: str = field(default="diffu", metadata={"help": "diffu (diffu-GRPO), coupled (coupled-GRPO) or uni (UniGRPO): settings; with "
                                                "--strata 0 also its likelihood"})
    progress: str = field(default="step", metadata={"help": "credit the step that caused a gain (step), the token that "
                                                    "gained (own), or nothing (none); ours"})
    kappa: float = field(default=0.5, metadata={"help": "w lies in [1 - kappa, 1 + kappa] (ours)"})
    strata: int = field(default=4, metadata={"help": "K of the stratified likelihood (ours); 0: the base's own"})
    scale: str | None = field(default=None, metadata={"help": "advantage divided by the group's 'std' or by 'none'"})
    clip_low: float | None = field(default=None, metadata={"help": "lower clip range"})
    clip_high: float | None = field(default=None, metadata={"help": "upper clip range"})
    dual_clip: float | None = field(default=None, metadata={"help": "c > 1 bounds the loss of bad tokens; all bases: off"})
    beta: float | None = field(default=None, metadata={"help": "weight of the KL to the starting model; may be 0"})
    kl: str = field(default="k3", metadata={"help": "KL estimate in the loss: k3, k2 or k1, as in grpo.py"})
    aggregate: str | None = field(default=None, metadata={"help": "sequence, token or constant, as in grpo.py"})
    inner_iterations: int | None = field(default=None, metadata={"help": "passes over a batch, each with new masks"})
    mini_batches: int = field(default=1, metadata={"help": "optimiser steps in a pass; groups stay whole if it divides --prompts-per-step"})
    learning_rate: float | None = field(default=None, metadata={"help": "AdamW, constant"})
    max_grad_norm: float = field(default=1.0, metadata={"help": "gradient clipping (usual)"})

    def __post_init__(self):
        if self.base not in BASES:
            raise InputError(f"--base must be one of {', '.join(BASES)}, not {self.base}")
        for name, value in BASES[self.base].items():
            if getattr(self, name) is None:
                setattr(self, name, value)


# The toy is tiny and starts from random weights, so it takes larger steps on more samples.
TOY = dict(warmup_steps=1000, steps=40, prompts_per_step=64, max_new_tokens=24, inner_iterations=1, mini_batches=2,
           learning_rate=5e-4, micro_batch=512, sample_batch=4096, chunk_size=4096, eval_problems=128, eval_samples=8)


def check_options(args):
    """Arguments that only this script has."""
    for name, allowed in (("scale", ("std", "none")), ("kl", ("k1", "k2", "k3")), ("aggregate", ("sequence", "token", "constant"))):
        if getattr(args, name) not in allowed:
            raise InputError(f"--{name} must be one of {', '.join(allowed)}, not {getattr(args, name)}")
    if not 0 < args.clip_low < 1 or args.clip_high <= 0 or args.beta < 0 or (args.dual_clip is not None and args.dual_clip <= 1):
        raise InputError("needs 0 < --clip-low < 1, --clip-high > 0, --beta >= 0 and --dual-clip > 1")
    if args.progress not in ("step", "own", "none"):
        raise InputError(f"--progress must be step, own or none, not {args.progress}")
    if not 0 <= args.kappa <= 1 or args.strata < 0:
        raise InputError("needs 0 <= --kappa <= 1 (else credit could change its sign) and --strata >= 0")


def denoising_progress(confidence, commit_step, mask, mode="step"):
    """How much the model's confidence in the finally written tokens grew while they were still masked -> (N,T), >= 0.

        D[s,i] = max(0, C[s+1,i] - C[s,i])  where i is valid and still masked after step s, else 0
        "step"  score of i = mean of D[s] over such positions, s = the step that wrote i: credits the cause of the gain
        "own"   score of i = sum over s of D[s,i]:                                        credits the one that gained

    Args: confidence (S,N,T): the trace's C, in probabilities; commit_step (N,T) int; mask (N,T), 1 on valid tokens.
    Padding gets 0, and so does what the last step wrote ("step"): nothing was left to gain. Raises ValueError for
    another mode. Source: ours (the abstract names "denoising progress scores").

    >>> C = torch.tensor([[[.5, .6, .2, .1, .1]], [[.9, .9, .6, .3, .9]], [[.9, .9, .9, .2, .9]]])  # (3,1,5), the last is padding
    >>> written, mask = torch.tensor([[0, 0, 1, 2, 2]]), torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]])
    >>> denoising_progress(C, written, mask), denoising_progress(C, written, mask, "own")   # .3 = mean of .4 and .2
    (tensor([[0.3000, 0.3000, 0.0000, 0.0000, 0.0000]]), tensor([[0.0000, 0.0000, 0.4000, 0.2000, 0.0000]]))
    """
    if mode not in ("step", "own"):
        raise ValueError(f'mode must be "step" or "own", not {mode!r}')
    steps = torch.arange(len(confidence), device=confidence.device)[:, None, None]        # (S,1,1)
    waiting = (mask > 0) & (commit_step > steps)                                          # (S,N,T) masked after step s
    D = torch.zeros_like(confidence)                                                      # (S,N,T) 0 in the last step
    D[:-1] = (confidence[1:] - confidence[:-1]).clamp(min=0)
    D = torch.where(waiting, D, 0.0)                                                      # (S,N,T)
    if mode == "own":
        return D.sum(0)                                                                   # (N,T)
    P = D.sum(2) / waiting.sum(2).clamp(min=1)                                            # (S,N) mean gain of a step
    return torch.where(mask > 0, P.T.gather(1, commit_step), 0.0)                         # (N,T) its own step's


def credit_weights(progress, mask, kappa=0.5):
    """w_i = 1 + kappa (g_i - mean g) / max |g - mean g| over the valid tokens of a response -> (N,T), 0 on padding.

    progress g (N,T), mask (N,T). The mean is 1 per response and w lies in [1 - kappa, 1 + kappa]; flat scores
    (max g - min g < 1e-6) and kappa = 0 give exactly 1. Raises ValueError for other shapes or kappa. Source: ours.

    >>> credit_weights(torch.tensor([[0.0, 0.0, 3.0, 9.0]]), torch.tensor([[1.0, 1.0, 1.0, 0.0]])).tolist()   # mean g = 1
    [[0.75, 0.75, 1.5, 0.0]]
    """
    if progress.shape != mask.shape or not 0 <= kappa <= 1:
        raise ValueError(f"needs progress {tuple(progress.shape)} and mask {tuple(mask.shape)} of one shape, 0 <= kappa <= 1, not {kappa}")
    valid = mask > 0                                                                      # (N,T) bool
    g = torch.where(valid, progress.detach(), 0.0)                                        # (N,T)
    deviation = torch.where(valid, g - g.sum(1, keepdim=True) / valid.sum(1, keepdim=True).clamp(min=1), 0.0)  # (N,T)
    spread = (g.masked_fill(~valid, -torch.inf).amax(1) - g.masked_fill(~valid, torch.inf).amin(1))[:, None]  # (N,1)
    largest = deviation.abs().amax(1, keepdim=True)                                       # (N,1)
    w = 1 + kappa * deviation / torch.where(spread < 1e-6, torch.inf, largest)            # (N,T) exactly 1 where flat
    return torch.where(valid, w, 0.0)


# One random masking of the rollout batch, for one inner iteration; all but the first two are (N,T).
Draw = namedtuple("Draw", "seeds ratio old ref scored")


def likelihood(lm, rollout, rows, args, seeds, ratio):
    """log-probs (n,T) of some rows under the masks that seeds (N,) stand for, and which tokens were scored (n,T).

    The strata of stratified_logps come from common.draw_strata, a new draw for every inner iteration.
    """
    inputs, common = (lm, *rollout.rows(rows)[:3]), dict(seeds=seeds[rows], chunk_size=args.chunk_size)
    if args.base == "uni" and not args.strata:
        return uni_logps(*inputs, ratio=ratio[rows], **common)
    if args.strata:
        logps = stratified_logps(*inputs, strata=args.strata, **common)
    else:
        logps = (coupled_logps if args.base == "coupled" else one_step_logps)(*inputs, **common)
    return logps, torch.ones_like(logps)


@torch.no_grad()
def draw_masks(lm, reference, rollout, args):
    """One Draw per inner iteration, with the log-probs that old policy and reference give under its masks.

    All of them before the first update: then the ratio of every iteration compares with the policy that sampled.
    """
    N, draws = len(rollout.texts), []
    start = torch.rand(N)                                                                 # (N,) UniGRPO's first ratio
    for iteration in range(args.inner_iterations):
        # UniGRPO: random in the first iteration, then evenly spaced up to 1.
        ratio = start + (1 - start) * iteration / max(1, args.inner_iterations - 1)       # (N,)
        seeds = torch.randint(2**31, (N,))                                                # (N,)
        score = lambda model: map(torch.cat, zip(*[likelihood(model, rollout, rows, args, seeds, ratio)
                                                   for rows in torch.arange(N).split(args.micro_batch)]))
        old, scored = score(lm)                                                           # (N,T) each
        with adapter_off(lm):
            ref, _ = score(reference) if reference else (None, None)                      # (N,T)
        draws.append(Draw(seeds, ratio, old, ref, scored))
    return draws


def train(args):
    """The whole algorithm. The six numbered steps are the same in every script, in the README and in the notebooks."""
    check_options(args)
    problems, held_out = load_problems(args)
    if args.eval_only:
        lm, tokenizer = load_diffusion_policy(args)
        for at in (args, *(at_budget(args, budget) for budget in args.eval_budgets)):
            print(at.max_new_tokens, "tokens:", evaluate(lm, tokenizer, encode_prompts(tokenizer, held_out, at), at))
        return
    run = Run(args, "daca")
    lm, tokenizer = load_diffusion_policy(args, run.model)
    reference = (lm if args.lora_rank else load_diffusion_policy(args)[0]) if args.beta else None  # where training starts
    if reference:
        freeze(reference.model)
    lm.model, optimizer = make_trainable(lm.model, args)
    run.restore(lm.model, optimizer)
    problems, held_out = encode_prompts(tokenizer, problems, args), encode_prompts(tokenizer, held_out, args)
    if run.step == 0:
        run.log(0, run.evaluate(0, lm, tokenizer, held_out))

    for step in run.loop(lm.model, tokenizer, optimizer):
        # 1. Sample: G responses for each prompt of the batch, N in all.
        batch = draw_batch(problems, step, args.prompts_per_step, args.seed)
        rollout = generate(lm, tokenizer, [p["prompt_ids"] for p in batch], args.group_size, args)
        mask = rollout.completion_mask                                                      # (N,T)

        # 2. Reward: one number per response, from its text and its problem. NaN: cannot be scored.
        rewards = torch.tensor([float("nan") if r is None else float(r) for r in (
            reward_correct(text, batch[g]) for text, g in zip(rollout.texts, rollout.group_ids.tolist()))])  # (N,)
        accuracy = rewards                                                                  # (N,) what the run is judged by

        # 3. Group advantage: better or worse than the other responses to the same prompt?
        advantages = group_advantages(rewards, rollout.group_ids.cpu(), args.scale).to(mask.device)  # (N,)

        # 4. Token credit: how much of its response's advantage does each token get?
        # The old policy's log-probs come from one scoring pass, not from the sampler, so that the ratio starts at exactly 1.
        draws = draw_masks(lm, reference, rollout, args)                                    # one per inner iteration
        surprise = -rollout.trace.confidence.log() * mask                                   # (N,T) a low guess at entropy
        # ---- what this method changes ----
        weights, credit_stats = torch.ones_like(mask), {}                                   # (N,T) w = 1
        if args.progress != "none":
            progress = denoising_progress(rollout.trace.C, rollout.trace.commit_step, mask, args.progress)  # (N,T)
            weights = credit_weights(progress, mask, args.kappa)                            # (N,T)
            credit_stats = {"progress": (progress.sum() / mask.sum()).item()}
        # ----------------------------------
        token_advantages = advantages[:, None] * weights                                    # (N,T) A * w

        # 5. Clipped loss and update. Mini-batches are optimiser steps; micro-batches only save memory.
        meter = Meter()
        for draw, rows in ((draw, rows) for draw in draws for rows in torch.arange(len(mask)).tensor_split(args.mini_batches)):
            valid = mask * draw.scored                                                      # (N,T) uni scores a part
            denominator, batch_loss = loss_denominator(valid[rows], args.aggregate, args.max_new_tokens), 0.0
            for micro in slices(rows, args.micro_batch):
                logps, _ = likelihood(lm, rollout, micro, args, draw.seeds, draw.ratio)     # (n,T)
                loss, stats = clipped_kl_loss(
                    logps, draw.old[micro], draw.ref[micro] if reference else None, token_advantages[micro], valid[micro],
                    clip_low=args.clip_low, clip_high=args.clip_high, dual_clip=args.dual_clip, beta=args.beta, kl=args.kl,
                    aggregate=args.aggregate, max_len=args.max_new_tokens, denominator=denominator)
                loss.backward()
                batch_loss += loss.detach()
                meter.add(stats)
            grad_norm = torch.nn.utils.clip_grad_norm_(lm.model.parameters(), args.max_grad_norm)
            made = run.finite(batch_loss, grad_norm)
            if made:
                optimizer.step()
            optimizer.zero_grad()
            meter.add_update(batch_loss, grad_norm, made)

        # 6. Measure.
        row = {**step_metrics(step, rollout, rewards, accuracy, advantages, surprise, meter), **credit_stats}
        if run.evaluation_due(step):
            row.update(run.evaluate(step, lm, tokenizer, held_out))
            picture(run.folder / "credit.png", tokenizer, rollout, rewards, weights)
            n = int(mask[0].sum())  # of the first response
            tokens = [tokenizer.decode([t]) for t in rollout.completion_ids[0, :n].tolist()]
            commit_step, C = rollout.trace.commit_step[0, :n], rollout.trace.C[:, 0, :n]     # (n,), (S,n)
            plot_denoising(run.folder / "denoising.png", tokens, commit_step, C)
        run.log(step, row)
    plot_curve(run.rows, run.folder / "curve.png")


if __name__ == "__main__":
    main(train, Args, TOY, __doc__)
