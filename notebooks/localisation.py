"""Where does each method put its credit? Measured on the toy, where the first wrong token of a response is known.

The question. A wrong response has a first wrong result: "then 8 + 5 = 14" where 13 is right; what follows from it is
right again, given the wrong value. A method that blames that token more than the other tokens finds the fault. So, for
each wrong response, the area under the curve: the share of its other tokens with less blame, ties counting one half.

    auc = mean over other tokens j of  [b_j < b_i] + [b_j = b_i] / 2      b = -A w, the blame; i: the first wrong result

1 is perfect, 0.5 is what uniform credit gets. All rows of a set see the same responses, with the same advantages.

Two sets of demonstrations. On the toy's own, slips are rare and spread over four numbers, so a wrong number is also a
*surprising* number: -log p finds it without any method. On the hard set each result is right or one fixed wrong number,
with probability one half each: the wrong number is as likely as the right one, and surprise cannot tell them apart.

`python notebooks/experiments.py localisation` runs it; the functions can be imported. Source: ours.
"""
import dataclasses
import functools
import re
import sys
import time
import zlib
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import daca
import datc
import delta
import dtca
import gctca

METHODS = {  # set -> its rows; the plain controls need no method at all
    "autoregressive": ("uniform", "DelTA", "GCTCA prompt", "GCTCA group", "DATC", "DATC, own reward", "DATC, shuffled",
                       "DATC, no direction", "control: entropy", "control: surprise", "control: random"),
    "diffusion": ("uniform", "DACA step", "DACA own", "DTCA", "DTCA, no calibration", "DTCA, neutral",
                  "control: surprise", "control: random")}
SETS = ("toy", "hard", "diffusion")


# ---- the truth: which number is the first wrong one ----------------------------------------------------------

def story_results(problem, text):
    """The results of a solution's lines of arithmetic -> [(start, end, right)], characters; None if it is no solution.

    `right`: the number is what its own line asks for, given the value that the line starts from. None when anything
    *else* is off (another form, an operand or a value copied wrongly, an answer that is not the last value): then the
    first fault is not a result, and the response is left out.

    >>> problem = {"name": "Ben", "thing": "pens", "start": 8, "moves": [("buys", 5), ("gives", 2)]}
    >>> story_results(problem, "Ben starts with 8 pens. then 8 + 5 = 14. then 14 - 2 = 12. Answer: 12")
    [(37, 39, False), (55, 57, True)]
    """
    value, place = problem["start"], 0
    opening = f"{problem['name']} starts with {value} {problem['thing']}."
    if not text.startswith(opening):
        return None
    found, place = [], len(opening)
    for verb, number in problem["moves"]:
        move = common.VERBS[verb] * number
        line = re.compile(rf" then {value} {re.escape('+' if move > 0 else '-')} {number} = (\d+)\.").match(text, place)
        if not line:
            return None
        found.append((*line.span(1), int(line[1]) == value + move))
        value, place = int(line[1]), line.end()
    return found if text[place:] == f" Answer: {value}" else None


def token_of(pieces, start):
    """Index of the token that holds character `start` of the joined pieces.

    >>> token_of(["then", " 8", " +"], 4), token_of(["then", " 8", " +"], 5)      # its space, its digit
    (1, 1)
    """
    ends = np.cumsum([len(piece) for piece in pieces])
    return int(np.searchsorted(ends, start, side="right"))


def truths(tokenizer, rollout, problems):
    """For each of the N responses: None, or (pieces, numbers, results): the token strings, the indices of the tokens
    that are numbers, and [(token index, right)] of the arithmetic's results. `problems`: one per group of the batch.
    """
    piece = {int(i): tokenizer.decode([int(i)]) for i in rollout.completion_ids.unique()}
    ends, out = set(tokenizer.all_special_ids), []
    for ids, mask, group in zip(rollout.completion_ids.tolist(), rollout.completion_mask, rollout.group_ids.tolist()):
        pieces = [piece[i] for i in ids[:int(mask.sum())]]
        text = pieces[:-1] if ids[len(pieces) - 1] in ends else pieces  # without the end token
        found = story_results(problems[group], "".join(text))
        if found is not None:  # a number's piece is " 14": the character `start` lies inside of it
            numbers = [t for t, p in enumerate(pieces) if p.strip().isdigit()]
            found = pieces, numbers, [(token_of(pieces, start), right) for start, _, right in found]
        out.append(found)
    return out


# ---- the measures -------------------------------------------------------------------------------------------------

def auc(blame, place, others):
    """Share of the tokens `others` with less blame than token `place`, ties counting one half; nan without others.

    >>> auc(torch.tensor([0.1, 0.9, 0.9, 0.3]), 1, [0, 2, 3])
    0.8333333333333334
    """
    less, ties = (blame[others] < blame[place]).sum().item(), (blame[others] == blame[place]).sum().item()
    return (less + ties / 2) / len(others) if others else float("nan")


def measure(credit, score, rewards, found):
    """Means over the responses of one rollout -> dict. credit (N,T): A w. score (N,T) or None: what w is a monotone map
    of, in the direction of blame. rewards (N,): 1 right, 0 wrong. found: from `truths`.

    auc: against all other tokens. auc_results: against the results that are right, given the value before them; the
    answer, which only repeats the last value, is not among them. relative: blame over the response's mean size of it.
    share_*: of a right response's credit. A response without advantage (its group is all right or all wrong) gets no
    credit from anybody and is left out, as is one whose first fault is not a result.
    """
    rows = {"auc": [], "auc_score": [], "auc_results": [], "relative": [], "share_numbers": [], "share_results": []}
    for n, truth in enumerate(found):
        if truth is None or not credit[n].any():
            continue
        pieces, numbers, results = truth
        T, slips = len(pieces), [t for t, right in results if not right]
        size = credit[n, :T].abs()
        if rewards[n] == 1:
            rows["share_numbers"].append((size[numbers].sum() / size.sum()).item())
            rows["share_results"].append((size[[t for t, _ in results]].sum() / size.sum()).item())
        elif slips:
            first, blame = slips[0], -credit[n, :T]
            others = [t for t in range(T) if t != first]
            rows["auc"].append(auc(blame, first, others))
            rows["auc_score"].append(auc(score[n, :T], first, others) if score is not None else float("nan"))
            rows["auc_results"].append(auc(blame, first, [t for t, right in results if right]))
            rows["relative"].append((blame[first] / size.mean()).item())
    mean = lambda values: float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")
    return {**{name: mean(values) for name, values in rows.items()},
            "wrong": len(rows["auc"]), "right": len(rows["share_numbers"])}


def interval(values, draws=10_000, seed=0):
    """Mean and 95 % bootstrap interval -> (mean, low, high): values (one per seed) are drawn again, with replacement.

    From five values such an interval is a little too narrow, and it covers new rollouts, not a new warm start.

    >>> interval([0.5, 0.5, 0.5])
    (0.5, 0.5, 0.5)
    """
    values = np.asarray(values, dtype=float)
    means = values[np.random.default_rng(seed).integers(len(values), size=(draws, len(values)))].mean(1)
    return float(values.mean()), *(float(q) for q in np.quantile(means, [0.025, 0.975]))


# ---- the hard set: the wrong number is as likely as the right one --------------------------------------------------

def fixed_slip(value, move, lowest):
    """The one error of `value + move`: -2, -1, 1 or 2, by a hash; upwards if a later value would fall below 0."""
    slip = (-2, -1, 1, 2)[zlib.crc32(f"{value} {move}".encode()) % 4]
    return slip if lowest + slip >= 0 else abs(slip)


def hard_solution(problem, rng, error=0.3):
    """common.story_solution, but for two things: a slip is always `fixed_slip`, and the usual error rate is one half.

    error 0 (the true answers) and the rate for "give a wrong answer" stay as they are.
    """
    value, left = problem["start"], [common.VERBS[verb] * number for verb, number in problem["moves"]]
    text = f"{problem['name']} starts with {value} {problem['thing']}."
    while left:
        move, left = left[0], left[1:]
        result = value + move
        if rng.random() < (0.5 if error == 0.3 else error):
            result += fixed_slip(value, move, min(np.cumsum([result] + left)))
        text += f" then {value} {'+' if move > 0 else '-'} {abs(move)} = {result}."
        value = result
    return f"{text} Answer: {value}"


def checkpoint(name, args):
    """What --model to load for a set: "toy", or the folder of the hard set's policy, trained if it is not there.

    The hard set differs in its demonstrations, so the training loop is common.py's own, with the other story_solution
    in its place; and in twice the steps, since which number is the wrong one has to be learnt by heart.
    """
    if name != "hard":
        return "toy"
    steps = 2 * args.warmup_steps
    folder = Path(args.checkpoints, f"hard-policy-{args.story_steps}steps-{steps}")
    if not folder.is_dir():
        with patch.object(common, "story_solution", hard_solution):
            common.toy_policy(folder, steps, args.story_steps)
    return folder


# ---- every method's credit on one rollout --------------------------------------------------------------------------

def toy_args(script, sizes):
    """A script's arguments for the toy, with those of `sizes` ({argument: value}) that the script has."""
    args = common.parse_args(script.Args, script.TOY, [])
    return dataclasses.replace(args, **{name: value for name, value in sizes.items() if hasattr(args, name)})


def rewarded(rollout, batch):
    """Rewards (N,), verified, and advantages (N,): the same ones for every row."""
    groups = rollout.group_ids.tolist()
    rewards = torch.tensor([common.reward_correct(text, batch[g]) for text, g in zip(rollout.texts, groups)])  # (N,)
    return rewards, common.group_advantages(rewards, rollout.group_ids)


def autoregressive(name, sizes, prompts, seed):
    """One rollout and every method's credit on it: rewards (N,), truths, {row: (credit (N,T), score (N,T) or None)},
    and what DelTA turns on: the mean of 1 - p on the right and on the wrong side, weighted as in its centroids.

    DATC gets the verified advantage like the others, so that rows differ in where the credit goes and in nothing else;
    "own reward" is what datc.py does: the reward model's score also decides which responses are bad.
    """
    args, guided = toy_args(datc, sizes), toy_args(gctca, sizes)
    model, tokenizer = common.load_policy(args, checkpoint(name, args))
    batch = common.encode_prompts(tokenizer, common.story_problems(prompts, seed, "train", args.story_steps), args)
    torch.manual_seed(seed)
    rollout = common.generate(model, tokenizer, [p["prompt_ids"] for p in batch], args.group_size, args)
    mask, (rewards, A) = rollout.completion_mask, rewarded(rollout, batch)
    old = common.score(model, rollout, args, want=("entropy", "hidden"))                   # (N,T), (N,T), (N,T,H)
    out = {"uniform": (mask, None)}

    proxies = delta.token_proxies(old.hidden, old.logps)                                   # (N,T,H)
    # Its score is alpha; in float64 no two alphas tie by rounding, and w is a monotone map of alpha on each side.
    out["DelTA"] = delta.credit_weights(proxies, A, mask), delta.credit_weights(proxies.double(), A.double(), mask)

    negative = common.score(model, gctca.negative_rollout(rollout, batch, tokenizer, guided), args)
    for row, k in (("GCTCA prompt", gctca.guidance_divergence(old.logps, negative.logps)),
                   ("GCTCA group", gctca.rollout_divergence(rollout, batch, A, old.logps))):      # (N,T)
        out[row] = gctca.credit_weights(k, mask), k

    reward_model, reward_tokenizer = datc.load_reward_model(args)
    E, eos_ids = reward_model.get_input_embeddings().weight.detach(), common.end_ids(model, tokenizer)
    scores, gradients, _ = datc.judge(reward_model, reward_tokenizer, tokenizer, rollout, batch, args, eos_ids, True)
    W = datc.work_from_hidden(old.hidden, model.get_output_embeddings(), gradients, E, rollout.completion_ids, mask,
                              temperature=args.temperature, chunk_size=args.chunk_size)   # (N,T)
    out["DATC"] = datc.credit_weights(W, A, mask), A.sign()[:, None] * W
    out["DATC, shuffled"] = datc.credit_weights(W, A, mask, control="shuffle", seed=seed), None
    out["DATC, no direction"] = datc.credit_weights(W, A, mask, control="no-direction"), W.abs()

    noise = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) * mask   # (N,T)
    for row, x in (("entropy", old.entropy), ("surprise", -old.logps), ("random", noise)):
        out[f"control: {row}"] = x, x
    out = {row: (A[:, None] * w, score) for row, (w, score) in out.items()}
    own = common.group_advantages(scores, rollout.group_ids)                               # (N,)
    own = torch.where(A == 0, 0.0, own)  # measured on the same responses as the other rows
    out["DATC, own reward"] = own[:, None] * datc.credit_weights(W, own, mask), None
    sides = side_means(1 - old.logps.exp(), A, mask)
    return rewards, truths(tokenizer, rollout, batch), {row: out[row] for row in METHODS["autoregressive"]}, sides


def side_means(x, A, mask):
    """Mean of x (N,T) on the right and on the wrong side of the batch, weighted by |A| -> dict."""
    weight = {"unsure_right": A.clamp(min=0)[:, None] * mask, "unsure_wrong": (-A).clamp(min=0)[:, None] * mask}
    return {side: f"{((w * x).sum() / w.sum().clamp(min=1e-8)).item():.4f}" for side, w in weight.items()}   # w (N,T)


@functools.cache
def class_weights(sizes):
    """DTCA's weight of each part of speech, measured once on the model that the rollouts come from."""
    args = toy_args(dtca, dict(sizes))
    lm, tokenizer = common.load_diffusion_policy(args)
    problems = common.story_problems(args.table_rollouts, 0, "train", args.story_steps)
    prompts = [p["prompt_ids"] for p in common.encode_prompts(tokenizer, problems, args)]
    _, tag = dtca.load_tagger(args.tagger)
    table = dtca.class_table(dtca.measure_classes(lm, tokenizer, tag, prompts, args))
    return dtca.pos_weights({word_class: row["contribution"] for word_class, row in table.items()})


def diffusion(sizes, prompts, seed):
    """The same for the masked diffusion scripts.

    A token's credit is A w times what it counts in the loss: in dtca.py 1/|T_t|, and nothing on steps not chosen.
    """
    args = toy_args(dtca, sizes)
    lm, tokenizer = common.load_diffusion_policy(args)
    batch = common.encode_prompts(tokenizer, common.story_problems(prompts, seed, "train", args.story_steps), args)
    w_pos, (_, tag) = class_weights(tuple(sizes.items())), dtca.load_tagger(args.tagger)
    torch.manual_seed(seed)
    rollout = common.generate(lm, tokenizer, [p["prompt_ids"] for p in batch], args.group_size, args)
    mask, (rewards, A) = rollout.completion_mask, rewarded(rollout, batch)
    out = {"uniform": (mask, None)}
    for mode in ("step", "own"):
        progress = daca.denoising_progress(rollout.trace.C, rollout.trace.commit_step, mask, mode)    # (N,T)
        out[f"DACA {mode}"] = daca.credit_weights(progress, mask), progress

    def dtca_credit(weight, calibrate):
        """(N,T) from w_pos (N,T): the lines of dtca.py's step 4, with alpha'' or alpha."""
        states = dtca.choose_states(rollout, weight, lm.mask_id, args.step_mass, args.min_steps, args.max_steps)
        alpha = dtca.step_credit(weight[states.row], states.target)                        # (B,T)
        _, change = dtca.score_states(lm, states, args, A[states.row, None] * alpha)       # (B,T)
        share = 1 / states.target.sum(1, keepdim=True).expand_as(alpha)                    # (B,T)
        w = alpha.clone()
        for n in range(len(mask) if calibrate else 0):
            own = states.target & (states.row == n)[:, None]                               # (B,T)
            w[own], _ = dtca.calibrate(alpha[own], change[own], weights=share[own])
        return torch.zeros_like(mask).index_add(0, states.row, w * share)                  # (N,T)

    tags = dtca.tag_tokens(tokenizer, rollout.completion_ids, mask, tag, lm.eos_ids)       # N lists of T classes
    pos = torch.tensor([[w_pos.get(word_class, 1.0) for word_class in row] for row in tags])          # (N,T)
    out["DTCA"] = dtca_credit(pos, True), None
    out["DTCA, no calibration"] = dtca_credit(pos, False), None
    out["DTCA, neutral"] = dtca_credit(torch.ones_like(pos), False), None
    surprise = -rollout.trace.confidence.log() * mask                                      # (N,T) when it was written
    noise = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) * mask   # (N,T)
    out["control: surprise"], out["control: random"] = (surprise, surprise), (noise, noise)
    out = {row: (A[:, None] * w, score) for row, (w, score) in out.items()}
    sides = side_means(1 - rollout.trace.confidence, A, mask)
    return rewards, truths(tokenizer, rollout, batch), {row: out[row] for row in METHODS["diffusion"]}, sides


def localise(name, seed, sizes, prompts=64):
    """All rows of one set and seed -> list of dicts, lines of results/localisation.csv. sizes: {argument: value}."""
    started = time.time()
    rewards, found, credits, sides = (diffusion(sizes, prompts, seed) if name == "diffusion" else
                                      autoregressive(name, sizes, prompts, seed))
    wrong, other = int((rewards == 0).sum()), sum(f is None for f, r in zip(found, rewards) if r == 0)
    shared = {"responses": len(rewards), "accuracy": f"{rewards.mean().item():.4f}",
              "other_fault": f"{other / max(wrong, 1):.4f}", **sides}
    rows = []
    for row, (credit, score) in credits.items():
        values = measure(credit, score, rewards, found)
        rows.append({"set": name, "method": row, "seed": seed,
                     **{k: f"{v:.4f}" if isinstance(v, float) else v for k, v in values.items()}, **shared})
    for r in rows:  # of the whole set and seed: the rows share their rollout
        r["seconds"] = f"{time.time() - started:.1f}"
    return rows


def pictures(folder, sizes, prompts=16, seed=0):
    """folder/credit_{autoregressive,diffusion}.png: a right and a wrong response of one problem, coloured by each method.

    Shown is |A w| over its mean in the response, so that 1 is uniform; the sign is the same for the whole response. The
    end token counts, but is not drawn.
    """
    for kind, make in (("autoregressive", lambda: autoregressive("toy", sizes, prompts, seed)),
                       ("diffusion", lambda: diffusion(sizes, prompts, seed))):
        rewards, found, credits, _ = make()
        group, usable = len(rewards) // prompts, [i for i, f in enumerate(found) if f is not None]
        pairs = [(i, j) for i in usable for j in usable if i // group == j // group and rewards[i] > rewards[j]]
        if not pairs:  # a policy with hardly any warm start
            print(f"{kind}: no right and wrong response of the same problem, no picture")
            continue
        right, wrong = pairs[0]
        tokens, weights, titles = [], [], []
        for row in credits:
            if row == "uniform" or row.startswith("control") or "," in row:  # ablations: notebook 04 has them
                continue
            for i, what in ((right, "right"), (wrong, "wrong")):
                w = credits[row][0][i][:len(found[i][0])].abs()                            # (T_i,)
                drawn = len(w) - (found[i][0][-1] == "<eos>")
                tokens.append(found[i][0][:drawn])
                weights.append((w / w.mean()).tolist()[:drawn])
                titles.append(f"{row}, {what} answer")
        common.plot_credit(folder / f"credit_{kind}.png", tokens, weights, titles)
