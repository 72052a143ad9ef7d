"""GCTCA: guidance contrastive token credit assignment. Most credit to the tokens that a contrast singles out.

The idea. The sign of a token's credit stays its response's; its size is set by how much a contrast would change the
token's probability: a second prompt that asks for a wrong answer, or the group's right responses against its wrong
ones. Ranks of that change become weights: the top 40 % of a response's tokens carry 80 % of its credit.

    prompt: d = clamp(log p(y_t | negative prompt) - log p(y_t | prompt), -20, 20)      k_t = min(e^d - d - 1, 10)
    group:  k_t = max(0, sign(A) (log q+(y_t) - log q-(y_t)))       q+, q-: n-gram models of the two sides
    w_t = n u_t / sum u     u_t = (rank of k_t among the n tokens / n)^a     a = ln(1 - mass) / ln(1 - top) - 1

What differs from grpo.py: step 4, and DAPO's base settings. `--guidance prompt` costs one more forward without
gradient, `--guidance group` none; neither needs another model.

Where it comes from. The authors' code: the prompt contrast, the ranks, the base settings. The public summary describes
the group contrast instead; its formulas (back-off to the policy, the response itself left out, one-sided) are ours. So
the script has both. Published: GenEval 0.89 against 0.85, MathVerse 71.7 against 68.3 for DAPO (the summary's numbers);
nothing here claims to reproduce them.

Run it on a CPU (a toy that is trained and improved in three minutes, no download):

    python gctca.py

and on one GPU with a real checkpoint (needs a hub):

    python gctca.py --model Qwen/Qwen3-0.6B --data openai/gsm8k:main --max-new-tokens 512
"""
import math
import warnings
from dataclasses import dataclass, field, replace

import torch

from common import (InputError, Meter, Run, RunArgs, adapter_off, clipped_kl_loss, draw_batch, encode_prompts, evaluate, freeze,
                    generate, group_advantages, load_policy, load_problems, loss_denominator, main, make_trainable, picture,
                    plot_curve, reward_correct, score, slices, step_metrics, token_logps, WRONG_ANSWER, chat_ids, pad_left)


@dataclass
class Args(RunArgs):
    """GCTCA's own settings; defaults for real models. The toy's are in TOY below."""
    scale: str = field(default="std", metadata={"help": "advantage divided by the group's 'std' (GRPO) or by 'none' (Dr. GRPO)"})
    clip_low: float = field(default=0.2, metadata={"help": "lower clip range (PPO, GRPO)"})
    clip_high: float = field(default=0.28, metadata={"help": "upper clip range (the authors': DAPO's clip-higher)"})
    dual_clip: float | None = field(default=3.0, metadata={"help": "bounds the loss of bad tokens (the authors')"})
    beta: float = field(default=0.0, metadata={"help": "weight of the KL to the starting model (the authors': none)"})
    kl: str = field(default="k3", metadata={"help": "KL estimate in the loss: k3 (GRPO; gradient of KL(ref||pi)), k2 (that of "
                                            "KL(pi||ref)), k1 (expected gradient 0: only a monitor)"})
    aggregate: str = field(default="token", metadata={"help": "sequence (GRPO), token (DAPO) or constant (Dr. GRPO)"})
    inner_iterations: int = field(default=1, metadata={"help": "passes over a rollout batch (GRPO's mu)"})
    mini_batches: int = field(default=3, metadata={"help": "optimiser steps in a pass (the authors')"})
    learning_rate: float = field(default=1e-6, metadata={"help": "AdamW, constant (GRPO)"})
    guidance: str = field(default="prompt", metadata={"help": "contrast: prompt (the authors') or group (ours)"})
    negative_instruction: str = field(default=WRONG_ANSWER, metadata={"help": "what the negative prompt adds"})
    top: float = field(default=0.4, metadata={"help": "this share of a response's tokens ... (the authors')"})
    mass: float = field(default=0.8, metadata={"help": "... carries this share of its credit; = top is the base"})
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
    if args.guidance not in ("prompt", "group") or not 0 < args.top <= args.mass < 1:
        raise InputError("needs --guidance prompt or group, and 0 < --top <= --mass < 1")


def guidance_divergence(logp_pos, logp_neg):
    """How much the negative prompt changes the probability of each sampled token: ``k = min(e^d - d - 1, 10)``.

    logp_pos, logp_neg: (N,T) natural log-probs of the same tokens behind the normal and behind the negative prompt, at
    the same temperature; d = logp_neg - logp_pos, cut to [-20, 20]. Returns (N,T) in nats, detached, in [0, 10].
    Raises ValueError when the shapes differ. Source: the authors' code (the k3 estimate of KL(normal || negative)).

    The first token becomes twice as likely behind the negative prompt (2 - ln 2 - 1), the second does not change:

    >>> guidance_divergence(torch.tensor([[0.3, 0.7]]).log(), torch.tensor([[0.6, 0.7]]).log())
    tensor([[0.3069, 0.0000]])
    """
    if logp_pos.shape != logp_neg.shape:
        raise ValueError(f"logp_pos {tuple(logp_pos.shape)} and logp_neg {tuple(logp_neg.shape)} differ in shape")
    d = (logp_neg.detach().double() - logp_pos.detach().double()).clamp(-20, 20)          # (N,T)
    # expm1 in float64: for small d, k is d^2 / 2, which e^d - d - 1 in float32 loses below d = 3e-4. And as only ranks
    # of k are used, that rounding noise would decide them.
    return (torch.expm1(d) - d).clamp(0, 10).to(logp_pos.dtype)                           # (N,T)


def group_divergence(prompt_ids, completions, advantages, policy_logps, order=2, tau=1.0):
    """How much rather a token's own side of the group writes it than the other side does, counted, for one prompt.

    Each side, right (A > 0) and wrong (A < 0), is an n-gram model of its responses *without* the one being rated: what
    only that one wrote would otherwise always look typical of its side. c_n: the last n tokens, also of the prompt.

        q_s(v | c_n) = (count_s(c_n, v) + tau q_s(v | c_{n-1})) / (count_s(c_n) + tau)       at completion positions
        k = max(0, sign(A) (log q_+(y_t) - log q_-(y_t)))

    The outermost back-off is the policy's p(y_t), the same for both sides: no evidence, no contrast. One-sided, because
    |.| would blame a wrong response for opening as the right ones do.

    prompt_ids: list of ids. completions: G lists of ids with the end token, without padding. advantages: (G,), 0 or NaN
    on neither side. policy_logps: G tensors (T_i,), natural logs. order: longest context. tau: weight of the back-off
    in counts. Returns G tensors (T_i,) in nats, >= 0; all 0 (so w = 1) for a response on neither side or in a group
    without a side. Raises ValueError for order < 0, tau <= 0 or unequal lengths. Source: ours, after the summary.

    Two right responses (7, 2) and a wrong one (7, 3). All open with 7, which gets nothing:

    >>> half = torch.tensor([0.5, 0.5]).log()
    >>> group_divergence([9], [[7, 2], [7, 2], [7, 3]], torch.tensor([1.0, 1.0, -2.0]), [half, half, half])
    [tensor([0.0000, 3.0445]), tensor([0.0000, 3.0445]), tensor([0.0000, 3.8067])]
    """
    logps, lengths = [torch.as_tensor(lp).detach() for lp in policy_logps], [len(c) for c in completions]
    if lengths != [len(lp) for lp in logps] or len(advantages) != len(lengths) or order < 0 or tau <= 0:
        raise ValueError("need G completions of T_i tokens, G advantages, G policy_logps of T_i, order >= 0, tau > 0")
    A = torch.as_tensor(advantages).detach().cpu()                                        # (G,)
    side = torch.stack([A > 0, A < 0]).double()                                           # (2,G)  right, wrong; NaN 0
    if not side.any(dim=1).all():
        return [torch.zeros_like(lp) for lp in logps]
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))      # (M,)   whose token it is

    def counts_of_others(keys):
        """How often each of the M keys occurs on the right and on the wrong side outside its own response: (2,M)."""
        names = {}
        ids = torch.tensor([names.setdefault(key, len(names)) for key in keys])           # (M,)   one id per key
        table = torch.bincount(row * len(names) + ids, minlength=len(lengths) * len(names))   # counted once for all
        table = table.view(len(lengths), len(names)).double()                             # (G,U)
        return (side @ table)[:, ids] - side[:, row] * table[row, ids]                    # (2,M)  less its own

    # Start marks in front, so that a context longer than the text so far is a context like any other.
    texts = [(None,) * order + tuple(prompt_ids) + tuple(completion) for completion in completions]
    places = [(text, t) for text, length in zip(texts, lengths) for t in range(len(text) - length, len(text))]    # M
    q = torch.cat(logps).cpu().double().clamp(min=-700).exp()      # (M,)   the policy's p(y_t), above 0 for log's sake
    for n in range(order + 1):                                     #        q(y_t | c_0), then up to q(y_t | c_order)
        total = counts_of_others([text[t - n:t] for text, t in places])                   # (2,M)  count_s(c_n)
        count = counts_of_others([text[t - n:t + 1] for text, t in places])               # (2,M)  count_s(c_n, y_t)
        q = (count + tau * q) / (total + tau)                                             # (2,M)
    k = (side[0] - side[1])[row] * (q[0].log() - q[1].log())                              # (M,)
    # Back to the caller's float32: what ties in exact arithmetic then ties here, for the last bits of float64 are gone.
    return [part.to(lp) for part, lp in zip(k.clamp(min=0).split(lengths), logps)]


def credit_weights(divergence, mask, top=0.4, mass=0.8):
    """Weights from ranks: the `top` share of a response's tokens, by divergence, carries `mass` of its credit.

    Ranks, because divergences have a long tail: one token at the cap would take everything. Of the integral of
    ``u = x^a``, x = r / n, the part below 1 - top is ``(1 - top)^(a + 1)``; that this be 1 - mass gives a = 2.15066.

    divergence: (N,T); only its order within a response counts. mask: (N,T), 1 on valid tokens. Returns (N,T), detached:
    mean 1 over the n valid tokens of each response, 0 on padding. Tokens that tie share their mean rank; where all tie
    (n = 1 too) and for top = mass, exactly 1. Largest weight: a + 1 = 3.151 without ties, 2^a = 4.441 with them.
    Raises ValueError when the shapes differ or not 0 < top <= mass < 1. Source: the authors' code.

    >>> credit_weights(torch.tensor([[0.1, 9.0, 0.1, 0.5]]), torch.tensor([[1, 1, 1, 1]]))     # ranks 1.5, 4, 1.5, 3
    tensor([[0.2724, 2.2456, 0.2724, 1.2096]])
    """
    if divergence.shape != mask.shape or not 0 < top <= mass < 1:
        raise ValueError(f"need divergence {tuple(divergence.shape)} and mask {tuple(mask.shape)} of one shape, and "
                         f"0 < top <= mass < 1, not {top} and {mass}: else what differs least gets the most credit")
    valid = mask.bool()                                                                   # (N,T)
    a = math.log(1 - mass) / math.log(1 - top) - 1
    k = divergence.detach().double().masked_fill(~valid, torch.inf).contiguous()           # (N,T)  padding ranks last
    ordered = k.sort(dim=-1).values                                                       # (N,T)
    below = torch.searchsorted(ordered, k)                                                # (N,T)  how many are < k
    up_to = torch.searchsorted(ordered, k, right=True)                                    # (N,T)  how many are <= k
    r = (below + up_to + 1).double() / 2                                                  # (N,T)  their mean rank
    # u = (r / n)^a but for a constant that cancels. Over the *largest* rank instead of n, u is exactly 1 there: however
    # large a is, not all u vanish; and where all tokens tie, or a = 0, every u and so every weight is exactly 1.
    largest = r.masked_fill(~valid, 1).amax(-1, keepdim=True)                             # (N,1)
    u = ((r / largest) ** a).masked_fill(~valid, 0)                                       # (N,T)
    w = u * valid.sum(-1, keepdim=True) / u.sum(-1, keepdim=True).clamp(min=1)            # (N,T)  all padding: 0 / 1
    return w.to(torch.promote_types(divergence.dtype, torch.float32))                     # (N,T)


def negative_rollout(rollout, batch, tokenizer, args):
    """The same completions behind the negative prompt: the question, its usual instruction, and the negative one."""
    asked = f"{args.instruction} {args.negative_instruction}".strip()
    prompts = [chat_ids(tokenizer, problem["question"], asked, args.thinking) for problem in batch]
    ids, mask = pad_left([prompts[g] for g in rollout.group_ids.tolist()], tokenizer.pad_token_id)    # (N,P') each
    return replace(rollout, prompt_ids=ids.to(args.device), prompt_mask=mask.to(args.device))


def rollout_divergence(rollout, batch, advantages, logps):
    """group_divergence of each group in the batch, padded like the completions: (N,T)."""
    divergence, lengths = torch.zeros_like(logps), rollout.completion_mask.sum(1).long().tolist()     # (N,T)
    ids, group_ids, A, logps = (x.cpu() for x in (rollout.completion_ids, rollout.group_ids, advantages, logps))
    for g, problem in enumerate(batch):
        rows = (group_ids == g).nonzero()[:, 0].tolist()                                              # G of the N rows
        completions, old = zip(*((ids[i, :lengths[i]].tolist(), logps[i, :lengths[i]]) for i in rows))
        for i, k in zip(rows, group_divergence(problem["prompt_ids"], completions, A[rows], old)):
            divergence[i, :lengths[i]] = k.to(divergence)
    return divergence


def divergence_stats(divergence, mask, guidance):
    """Columns of metrics.csv. Warns when the negative prompt changes next to nothing: ranks would be noise."""
    k = divergence[mask.bool()]                                                                       # (M,)
    zero = (k < 1e-6).float().mean().item()
    if guidance == "prompt" and zero > 0.9:
        warnings.warn(f"the negative prompt leaves {zero:.0%} of the tokens as likely as before: the model ignores it, "
                      "the weights are noise. Change --negative-instruction or take --guidance group")
    capped = (k >= 10).float().mean().item()
    return {"divergence": k.mean().item(), "divergence_capped": capped, "divergence_zero": zero}


def train(args):
    """The whole algorithm. The six numbered steps are the same in every script, in the README and in the notebooks."""
    check_options(args)
    problems, held_out = load_problems(args)
    if args.eval_only:
        model, tokenizer = load_policy(args)
        print(evaluate(model, tokenizer, encode_prompts(tokenizer, held_out, args), args))
        return
    run = Run(args, "gctca")
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
        if args.guidance == "prompt":
            negative = score(model, negative_rollout(rollout, batch, tokenizer, args), args)
            divergence = guidance_divergence(old.logps, negative.logps)                     # (N,T) k
        else:
            divergence = rollout_divergence(rollout, batch, advantages, old.logps)          # (N,T) k
        weights = credit_weights(divergence, mask, args.top, args.mass)                     # (N,T) w
        credit_stats = divergence_stats(divergence, mask, args.guidance)
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
