"""gctca.py: both contrasts and the ranks against golden numbers, plain counting, and every property they promise."""
import csv
import dataclasses
import doctest
import inspect
import json
import math
import sys
import warnings
import zlib

import pytest
import torch

import common
import gctca
import grpo
from conftest import WARMUP, golden

GOLDEN = golden("gctca")
PROMPT_CASES = [case for case in GOLDEN if "logp_pos" in case]
GROUP_CASES = [case for case in GOLDEN if case.get("fn") == "group_divergence"]
WORKED = GROUP_CASES[0]                                              # "What is 15 × 23?", two right, two wrong


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def close(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def slow_weights(k, top=0.4, mass=0.8):
    """The rank normaliser for one response without padding, by comparing every token with every other."""
    if max(k) == min(k) or top == mass:
        return [1.0] * len(k)
    a = math.log(1 - mass) / math.log(1 - top) - 1
    ranks = [sum(x < y for x in k) + (sum(x == y for x in k) + 1) / 2 for y in k]
    u = [(r / len(k)) ** a for r in ranks]
    return [len(k) * x / sum(u) for x in u]


def slow_group(prompt, completions, advantages, logps, order=2, tau=1.0):
    """The two n-gram models by recounting all other responses for every single token."""
    def q(side, me, context, token, n, p):
        """q_side(token | last n tokens of context), leaving response `me` out."""
        if n < 0:
            return p
        seen = hits = 0
        for i, other in enumerate(completions):
            if i == me or not advantages[i] * side > 0:
                continue
            text = [None] * order + prompt + other
            for t in range(order + len(prompt), len(text)):
                if text[t - n:t] == context[len(context) - n:]:
                    seen, hits = seen + 1, hits + (text[t] == token)
        return (hits + tau * q(side, me, context, token, n - 1, p)) / (seen + tau)

    signs = [0 if math.isnan(a) else (a > 0) - (a < 0) for a in advantages]
    out = []
    for i, completion in enumerate(completions):
        out.append([0.0] * len(completion))
        if signs[i] == 0 or not {-1, 1} <= set(signs):
            continue
        for t, token in enumerate(completion):
            context, p = [None] * order + prompt + completion[:t], math.exp(logps[i][t])
            right, wrong = (q(side, i, context, token, order, p) for side in (1, -1))
            out[-1][t] = max(0.0, signs[i] * (math.log(right) - math.log(wrong)))
    return out


def prefix_mask(lengths, T):
    return (torch.arange(T) < torch.as_tensor(lengths)[:, None]).float()


# ------------------------------------------------------------------------------------------------ prompt contrast: k

@pytest.mark.parametrize("case", PROMPT_CASES, ids=range(len(PROMPT_CASES)))
def test_golden_guidance_divergence(case):
    close(gctca.guidance_divergence(f64(case["logp_pos"]), f64(case["logp_neg"])), f64(case["divergence"]), 1e-7)
    got = gctca.guidance_divergence(f64(case["logp_pos"]).float(), f64(case["logp_neg"]).float())
    close(got, f64(case["divergence"]).float(), 1e-5)


def test_the_divergence_is_clamped_and_capped_and_never_negative():
    lp, ln = torch.tensor([[-1.0, -90.0, 0.0, -3.0, -math.inf]]), torch.tensor([[-90.0, -1.0, 0.0, -3.0, -1.0]])
    assert gctca.guidance_divergence(lp, ln).tolist() == [[10.0, 10.0, 0.0, 0.0, 10.0]]
    random = -10 ** (torch.rand(1000) * 12 - 9)
    k = gctca.guidance_divergence(random[None], random.flip(0)[None])
    assert torch.isfinite(k).all() and k.min() >= 0 and k.max() <= 10


def test_small_differences_keep_their_order_in_float32():
    d = torch.tensor([[1e-5, 2e-5, 3e-5, 4e-5]])                     # e^d - d - 1 in float32 is 0 for all four
    k = gctca.guidance_divergence(torch.zeros_like(d), d)
    assert (k.diff() > 0).all()
    torch.testing.assert_close(k, d ** 2 / 2, rtol=1e-3, atol=0)


def test_on_average_it_is_the_kl_divergence_between_the_two_prompts():
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    k = gctca.guidance_divergence(p.log()[None], q.log()[None])[0]
    assert (p * k).sum().item() == pytest.approx((p * (p.log() - q.log())).sum().item(), rel=1e-12)


def test_identical_prompts_give_exactly_one():
    lp = -torch.rand(5, 9) * 30
    mask = prefix_mask([9, 1, 4, 7, 2], 9)
    assert torch.equal(gctca.credit_weights(gctca.guidance_divergence(lp, lp.clone()), mask), mask)


# -------------------------------------------------------------------------------------------------- ranks to weights

@pytest.mark.parametrize("case", [case for case in GOLDEN if "fn" not in case])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden_credit_weights(case, dtype):
    got = gctca.credit_weights(f64(case["divergence"]).to(dtype), f64(case["mask"]))
    close(got, f64(case["want"]).to(dtype), 1e-6)


@pytest.mark.parametrize("top, mass", [(0.4, 0.8), (0.1, 0.9), (0.5, 0.51), (0.01, 0.999)])
def test_the_slow_ranks_agree_with_and_without_ties(top, mass):
    make = torch.Generator().manual_seed(0)
    for distinct in (2, 3, 6, 1000):
        k = torch.randint(distinct, (8, 11), generator=make).double() / 7
        lengths = torch.randint(1, 12, (8,), generator=make)
        got = gctca.credit_weights(k, prefix_mask(lengths, 11), top, mass)
        for row, values, n in zip(got, k.tolist(), lengths.tolist()):
            close(row[:n], f64(slow_weights(values[:n], top, mass)), 1e-9)
            assert (row[n:] == 0).all()


def test_without_ties_and_long_the_top_two_fifths_carry_four_fifths():
    w = gctca.credit_weights(torch.randperm(5000)[None].double(), torch.ones(1, 5000))[0]
    assert w.sort(descending=True).values[:2000].sum().item() / 5000 == pytest.approx(0.8, abs=1e-3)


def test_bounds_are_reached_but_not_passed():
    n = 4000
    no_ties = gctca.credit_weights(torch.arange(n)[None].double(), torch.ones(1, n))
    assert 3.148 < no_ties.max() < 3.151                             # the limit is a + 1 = 3.15066
    one_out = torch.zeros(1, n).index_fill(1, torch.tensor([7]), 1.0)
    assert 4.43 < gctca.credit_weights(one_out, torch.ones(1, n)).max() < 4.441      # the limit is 2^a = 4.4403


def test_one_token_equal_tokens_and_the_neutral_setting_give_exactly_one():
    mask = prefix_mask([1, 3, 8], 8)
    assert torch.equal(gctca.credit_weights(torch.rand(3, 8), mask)[0], mask[0])
    assert torch.equal(gctca.credit_weights(torch.full((3, 8), 0.1), mask), mask)
    for share in (0.4, 0.8, 0.123):
        assert torch.equal(gctca.credit_weights(torch.rand(3, 8), mask, top=share, mass=share), mask)


@pytest.mark.parametrize("rise", [lambda k: 3 * k + 1, lambda k: k ** 3, torch.exp, lambda k: -1 / (k + 1), torch.log])
def test_any_strictly_increasing_map_leaves_the_weights_alone(rise):
    k = torch.randint(1, 9, (6, 10)).double()                        # with ties
    mask = prefix_mask([10, 1, 2, 5, 9, 7], 10)
    assert torch.equal(gctca.credit_weights(rise(k), mask), gctca.credit_weights(k, mask))


def test_sign_mean_and_bounds_on_many_random_batches():
    make = torch.Generator().manual_seed(2)
    for trial in range(150):
        N, T = (int(x) for x in torch.randint(1, 14, (2,), generator=make))
        mask = (torch.rand(N, T, generator=make) < [0.2, 0.9, 1.0][trial % 3]).float()       # holes and empty rows too
        k = torch.rand(N, T, generator=make)
        k = [k, (k * 3).round(), 10 ** (k * 60 - 30), k * 0, (k > 0.9) * 10.0][trial % 5]
        top, mass = [(0.4, 0.8), (0.3, 0.3), (0.001, 0.999), (0.7, 0.9)][trial % 4]
        w, n = gctca.credit_weights(k, mask, top, mass), mask.sum(1)
        valid = mask.bool()
        assert torch.isfinite(w).all() and not w.requires_grad and (w[~valid] == 0).all() and (w >= 0).all()
        torch.testing.assert_close(w.sum(1), n, rtol=1e-5, atol=0)
        if (top, mass) == (0.4, 0.8):                                # so sign(A w) = sign(A) on every valid token
            assert (w[valid] > 0).all() and w.max() < 4.441


def test_rows_padding_and_garbage_do_not_touch_each_other():
    k, mask = torch.rand(5, 7), prefix_mask([7, 1, 3, 6, 2], 7)
    w = gctca.credit_weights(k, mask)
    assert torch.equal(torch.cat([gctca.credit_weights(x, m) for x, m in zip(k.split(2), mask.split(2))]), w)
    garbage = torch.where(mask.bool(), k, torch.nan)
    assert torch.equal(gctca.credit_weights(garbage, mask), w)
    wider = [torch.nn.functional.pad(x, (0, 30), value=v) for x, v in ((garbage, math.inf), (mask, 0.0))]
    close(gctca.credit_weights(*wider)[:, :7], w, 1e-6)
    order = torch.randperm(5)
    assert torch.equal(gctca.credit_weights(k[order], mask[order]), w[order])


# ------------------------------------------------------------------------------------------------------ group contrast

def divergence_of(case, dtype=torch.float64, **changes):
    case = {**case, **changes}
    return gctca.group_divergence(case["prompt_ids"], case["completions"], f64(case["advantages"]),
                                  [f64(lp).to(dtype) for lp in case["policy_logps"]], case["order"], case["tau"])


@pytest.mark.parametrize("case", GROUP_CASES, ids=range(len(GROUP_CASES)))
def test_golden_group_divergence(case):
    for got, want, w in zip(divergence_of(case), case["divergence"], case["want"]):
        close(got, f64(want), 1e-7)
        positive = [k for k in want if k > 0]
        if len(set(positive)) == len(positive):
            close(gctca.credit_weights(got[None], torch.ones(1, len(got)))[0], f64(w), 1e-6)
        # Where positive numbers tie, the golden weights follow the last bits of one program's float64; in the float32
        # of a training run the ties are ties and share their mean rank:
        single = [got.float() for got in divergence_of(case, torch.float32)]
    for got, want in zip(single, case["divergence"]):
        close(gctca.credit_weights(got[None], torch.ones(1, len(got)))[0], f64(slow_weights(want)).float(), 1e-5)


def test_worked_case_blames_and_praises_the_decisive_number():
    """Response 3 wrote 300 + 35 where response 1 wrote 300 + 45: these get more than the whole line before them."""
    w = [gctca.credit_weights(k[None], torch.ones(1, len(k)))[0] for k in divergence_of(WORKED, torch.float32)]
    line = "15 × 20 + 15 × 3 = 300".split()
    for response, number in ((2, "35"), (0, "45")):
        words = WORKED["words"][response]
        start = next(t for t in range(len(words)) if words[t:t + len(line)] == line)
        assert w[response][words.index(number)] > w[response][start:start + len(line)].max()


@pytest.mark.parametrize("seed", range(12))
def test_the_slow_count_agrees(seed):
    make = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=make))
    G, order, tau = draw(2, 7), seed % 4, [1.0, 0.3, 5.0][seed % 3]
    prompt = [draw(0, 4) for _ in range(seed % 5)]                   # shorter than the order, and empty, too
    completions = [[draw(0, 4) for _ in range(draw(1, 10))] for _ in range(G)]
    advantages = [[1.0, -0.3, 0.0, math.nan, -2.0][draw(0, 5)] for _ in range(G)]
    logps = [(-torch.rand(len(c), generator=make, dtype=torch.float64) * 4).tolist() for c in completions]
    got = gctca.group_divergence(prompt, completions, f64(advantages), [f64(lp) for lp in logps], order, tau)
    want = slow_group(prompt, completions, advantages, logps, order, tau)
    for a, b in zip(got, want):
        close(a, f64(b), 1e-9)


@pytest.mark.parametrize("advantages", [[1, 1, 1, 1], [-1, -1, 0, -2], [0, 0, 0, 0], [1, 0, 0, math.nan]])
def test_a_group_that_lacks_a_side_has_no_contrast(advantages):
    for k in divergence_of(WORKED, advantages=advantages):
        assert (k == 0).all() and (gctca.credit_weights(k[None], torch.ones(1, len(k))) == 1).all()


def test_rows_on_neither_side_get_nothing_and_change_nothing():
    k = divergence_of(WORKED)
    for neutral in (0.0, math.nan):
        extra = divergence_of(WORKED, completions=WORKED["completions"] + [[4, 24, 3, 16]],
                              advantages=WORKED["advantages"] + [neutral],
                              policy_logps=WORKED["policy_logps"] + [[-1.0] * 4])
        assert (extra[4] == 0).all() and all(torch.equal(a, b) for a, b in zip(extra, k))


def test_the_response_itself_is_left_out():
    """A wrong response with a token nobody else has: its side has no more evidence for it than the other has."""
    lp = [f64([0.5, 0.5]).log()] * 4
    k = gctca.group_divergence([9], [[7, 2], [7, 2], [7, 3], [7, 5]], f64([1, 1, -1, -1]), lp)
    alone = gctca.group_divergence([9], [[7, 2], [7, 2], [7, 3], [7, 3]], f64([1, 1, -1, -1]), lp)
    assert k[2][1] < alone[2][1]                                     # a second witness makes "3" typical of wrong ones
    assert (k[0][0] == 0) and (k[2][0] == 0)                         # nobody is blamed for opening like the right ones


def test_the_side_decides_not_the_size_of_the_advantage_nor_the_order_of_responses():
    k = divergence_of(WORKED)
    assert all(torch.equal(a, b) for a, b in zip(divergence_of(WORKED, advantages=[9.0, 0.1, -3.0, -1e-9]), k))
    order = [2, 0, 3, 1]
    shuffled = divergence_of(WORKED, **{name: [WORKED[name][i] for i in order]
                                        for name in ("completions", "advantages", "policy_logps")})
    for place, i in enumerate(order):
        close(shuffled[place], k[i], 1e-12)


def test_extreme_probabilities_and_one_token_responses_stay_finite():
    for value in (0.0, -1e-9, -50.0, -1e4, -math.inf):
        logps = [torch.full((n,), value) for n in (1, 3, 1)]
        for k in gctca.group_divergence([1, 2], [[5], [5, 5, 6], [7]], torch.tensor([0.5, -0.5, -0.5]), logps):
            assert torch.isfinite(k).all() and (k >= 0).all() and k.dtype == torch.float32
            w = gctca.credit_weights(k[None], torch.ones(1, len(k)))
            assert w.mean().item() == pytest.approx(1, rel=1e-6)


# ------------------------------------------------------------------------------------------------------------ manners

def test_arguments_are_left_alone_and_weights_carry_no_gradient():
    lp, ln = torch.randn(2, 3, 5, requires_grad=True)
    mask = prefix_mask([5, 2, 1], 5)
    before = [x.detach().clone() for x in (lp, ln, mask)]
    k = gctca.guidance_divergence(lp, ln)
    assert not k.requires_grad and not gctca.credit_weights(lp, mask).requires_grad
    assert all(torch.equal(x, y) for x, y in zip((lp, ln, mask), before))
    case = json.loads(json.dumps(WORKED))
    logps = [torch.tensor(x, requires_grad=True) for x in case["policy_logps"]]
    ks = gctca.group_divergence(case["prompt_ids"], case["completions"], f64(case["advantages"]), logps)
    assert case == WORKED and not any(k.requires_grad for k in ks)


def test_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match="differ in shape"):
        gctca.guidance_divergence(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="of one shape"):
        gctca.credit_weights(torch.zeros(2, 3), torch.zeros(2, 4))
    for top, mass in ((0.8, 0.4), (0.0, 0.5), (0.4, 1.0)):
        with pytest.raises(ValueError, match="top <= mass"):
            gctca.credit_weights(torch.zeros(2, 3), torch.ones(2, 3), top, mass)
    for change in (dict(order=-1), dict(tau=0.0), dict(advantages=[1.0, -1.0]), dict(completions=[[1]] * 4)):
        with pytest.raises(ValueError, match="need"):
            divergence_of(WORKED, **change)


@pytest.mark.parametrize("function", [gctca.guidance_divergence, gctca.group_divergence, gctca.credit_weights],
                         ids=lambda f: f.__name__)
def test_doctests_hold_for_the_function_copied_out_alone(function):
    alone = {"torch": torch, "math": math}
    exec(inspect.getsource(function), alone)
    examples = doctest.DocTestFinder().find(alone[function.__name__], function.__name__, module=False, globs=alone)
    assert examples and examples[0].examples
    assert doctest.DocTestRunner().run(examples[0]).failed == 0

# --------------------------------------------------------------------------------------------------- the whole script

@pytest.fixture
def train(toy_checkpoints, tmp_path, monkeypatch):
    """train(script module, argument=value ...) -> (CSV rows of the steps, final weights, Adam's state), a small run."""
    monkeypatch.chdir(tmp_path)

    def run(script, base=None, **settings):
        flags = ["--checkpoints", str(toy_checkpoints), "--warmup-steps", str(WARMUP), "--eval-every", "0"]
        args = common.parse_args(script.Args, script.TOY, flags)
        if base is not None:                                         # take over whatever both scripts have
            shared = {f.name for f in dataclasses.fields(script.Args)} & {f.name for f in dataclasses.fields(base.Args)}
            theirs = common.parse_args(base.Args, base.TOY, flags)
            args = dataclasses.replace(args, **{name: getattr(theirs, name) for name in shared})
        small = dict(steps=1, prompts_per_step=4, group_size=4, eval_problems=1, eval_samples=1, learning_rate=1e-3,
                     max_new_tokens=10, temperature=2.0)
        # A reward that any two texts differ in: so every group has signal, in ten tokens and without a trained policy.
        monkeypatch.setattr(script, "reward_correct", lambda text, problem: zlib.crc32(text.encode()) / 2 ** 32)
        for slow in ("picture", "plot_curve"):
            monkeypatch.setattr(script, slow, lambda *_: None)
        name = f"run{len(list(tmp_path.glob('runs/*')))}"
        script.train(dataclasses.replace(args, name=name, **{**small, **settings}))
        folder = tmp_path / "runs" / name
        rows = list(csv.DictReader((folder / "metrics.csv").open(newline="")))[1:]
        weights = common.load_policy(args, folder / "checkpoint")[0].state_dict()
        state = torch.load(folder / "checkpoint" / "optimizer.pt", weights_only=True)["state"]
        return rows, weights, {(i, key): value for i, entry in state.items() for key, value in entry.items()}
    return run


def bit_equal(one, other):
    """Same losses and gradient norms in the CSV, same weights, same moments of every gradient."""
    columns = [column for column in other[0][0] if column != "seconds"]
    same = lambda a, b: a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    return ([[row[c] for c in columns] for row in one[0]] == [[row[c] for c in columns] for row in other[0]]
            and same(one[1], other[1]) and same(one[2], other[2]))


def sampled(toy):
    """(rollout, batch, model, tokenizer, args) of four problems of unequal length, four responses each."""
    model, tokenizer, _ = toy
    args = gctca.Args(max_new_tokens=24, micro_batch=5, chunk_size=64, sample_batch=64, instruction="", device="cpu")
    problems = common.story_problems(3, 3) + common.story_problems(1, 4, steps=1)
    batch = common.encode_prompts(tokenizer, problems, args)
    torch.manual_seed(0)
    return common.generate(model, tokenizer, [p["prompt_ids"] for p in batch], 4, args), batch, model, tokenizer, args


@pytest.mark.parametrize("guidance", ["prompt", "group"])
def test_the_neutral_setting_is_grpo_bit_for_bit(train, guidance):
    base = train(grpo, base=gctca)
    assert bit_equal(train(gctca, guidance=guidance, top=0.5, mass=0.5), base)
    assert not bit_equal(train(gctca, guidance=guidance), base)
    assert all(float(row["grad_norm"]) > 0 for row in base[0])


def test_a_model_that_ignores_the_negative_prompt_is_reported(train):
    """An empty negative instruction is the strongest case: the same prompt, so weights of exactly 1, and a warning."""
    with pytest.warns(UserWarning, match="ignores it"):
        same = train(gctca, negative_instruction="")
    assert bit_equal(same, train(grpo, base=gctca)) and same[0][0]["divergence_zero"] == "1"


def test_health_metrics_count_valid_tokens_only():
    mask, k = prefix_mask([100], 130), torch.zeros(1, 130)
    k[0, :10], k[0, :2], k[0, 100:] = 0.5, 10.0, 7.0                 # the last thirty are padding
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stats = gctca.divergence_stats(k, mask, "prompt")            # 90 % of zeros: not yet
        gctca.divergence_stats(k * 0, mask, "group")                 # normal there
    assert stats == pytest.approx({"divergence": 0.24, "divergence_capped": 0.02, "divergence_zero": 0.9})


def test_the_negative_prompt_is_the_problem_plus_the_instruction_through_the_template_once(toy):
    rollout, batch, model, tokenizer, args = sampled(toy)
    args.instruction = "How many now?"
    negative = gctca.negative_rollout(rollout, batch, tokenizer, args)
    for i, g in enumerate(rollout.group_ids.tolist()):
        text = tokenizer.decode(negative.prompt_ids[i][negative.prompt_mask[i].bool()])
        assert text == f"<user>{batch[g]['question']} How many now? Give a wrong answer.<assistant>"
    assert negative.completion_ids is rollout.completion_ids and negative.completion_mask is rollout.completion_mask
    scored = common.score(model, negative, args).logps                                       # (N,T)
    for i in (0, 5, 15):                                             # alone and without padding: the same numbers
        n = int(rollout.completion_mask[i].sum())
        ids = torch.cat([negative.prompt_ids[i][negative.prompt_mask[i].bool()], rollout.completion_ids[i, :n]])[None]
        with torch.no_grad():
            logps = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[-n:, 0]
        close(scored[i, :n], logps, 1e-4)


def test_the_group_contrast_of_a_rollout_is_that_of_each_of_its_groups(toy):
    rollout, batch, *_ = sampled(toy)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))                   # interleave the groups
    fields = ("completion_ids", "completion_mask", "group_ids")
    rollout = dataclasses.replace(rollout, **{name: getattr(rollout, name)[order] for name in fields})
    A = torch.randn(16, generator=torch.Generator().manual_seed(2))
    A[3] = 0
    logps = -torch.rand(rollout.completion_mask.shape) * rollout.completion_mask
    k = gctca.rollout_divergence(rollout, batch, A, logps)
    assert (k[rollout.completion_mask == 0] == 0).all() and (k > 0).any()
    for g, problem in enumerate(batch):
        rows = [i for i in range(16) if rollout.group_ids[i] == g]
        lengths = [int(rollout.completion_mask[i].sum()) for i in rows]
        completions, old = ([x[i, :n].tolist() for i, n in zip(rows, lengths)] for x in (rollout.completion_ids, logps))
        want = slow_group(problem["prompt_ids"], completions, A[rows].tolist(), old)
        for i, n, values in zip(rows, lengths, want):
            close(k[i, :n], f64(values).float(), 1e-5)


@pytest.mark.parametrize("guidance, scoring_passes", [("prompt", 2), ("group", 1)])
def test_weights_come_once_per_batch_from_the_old_policy(train, monkeypatch, guidance, scoring_passes):
    calls, passes, used = [], [], []
    real_weights, real_score, real_loss = gctca.credit_weights, gctca.score, gctca.clipped_kl_loss

    def weigh(divergence, mask, *settings):
        if guidance == "prompt":
            assert torch.equal(divergence, gctca.guidance_divergence(passes[0].logps, passes[1].logps))
        calls.append((mask, real_weights(divergence, mask, *settings)))
        return calls[-1][1]

    def count(*args, **options):
        passes.append(real_score(*args, **options))
        return passes[-1]

    def loss(logps, old_logps, ref_logps, advantages, mask, **options):
        used.append(advantages)
        return real_loss(logps, old_logps, ref_logps, advantages, mask, **options)

    monkeypatch.setattr(gctca, "credit_weights", weigh)
    monkeypatch.setattr(gctca, "score", count)
    monkeypatch.setattr(gctca, "clipped_kl_loss", loss)
    losses = []
    for micro_batch in (3, 512):
        calls.clear(), passes.clear(), used.clear()
        rows, *_ = train(gctca, steps=1, guidance=guidance, micro_batch=micro_batch, inner_iterations=2)
        losses.append(float(rows[0]["loss"]))
        (mask, w), = calls
        assert len(passes) == scoring_passes and len(w) == 16
        torch.testing.assert_close(w.sum(1), mask.sum(1), rtol=1e-5, atol=0)
        once = torch.cat(used)[:16]
        assert once.any() and torch.equal(torch.cat(used), once.repeat(2, 1))               # frozen over the iterations
        A = once.sum(1) / mask.sum(1)                                                        # as w has mean 1
        close(once, A[:, None] * w, 1e-5)
        assert torch.equal(once.sign(), A.sign()[:, None] * mask)
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_run_as_a_user_does(run_script, tmp_path):
    done = run_script("gctca.py", "--steps", 2, "--name", "a", "--group_size", 8)
    run = tmp_path / "runs" / "a"
    for name in ("args.json", "curve.png", "credit.png", "samples.txt", "checkpoint/model.safetensors"):
        assert (run / name).stat().st_size > 0, name
    rows = list(csv.DictReader((run / "metrics.csv").open(newline="")))
    assert [row["step"] for row in rows] == ["0", "1", "2"] and "sanity" in done.stdout + done.stderr
    assert 0 < float(rows[1]["divergence"]) < 10 and 0 <= float(rows[1]["divergence_zero"]) < 1
    assert 0 <= float(rows[1]["divergence_capped"]) < 0.5


def test_help_names_the_arguments_of_the_method(capsys):
    with pytest.raises(SystemExit, match="0"):
        common.parse_args(gctca.Args, gctca.TOY, ["--help"], gctca.__doc__)
    text = capsys.readouterr().out
    assert all(word in text for word in ("GCTCA", "--guidance", "--negative_instruction", "--top", "--mass", "preset"))


@pytest.mark.parametrize("flags", [["--guidance", "both"], ["--top", "0"], ["--top", "0.9"], ["--mass", "1"]])
def test_bad_input_is_one_line_and_code_2(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gctca.py", *flags])
    with pytest.raises(SystemExit) as stop:
        common.main(gctca.train, gctca.Args, gctca.TOY, gctca.__doc__)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error == "error: needs --guidance prompt or group, and 0 < --top <= --mass < 1\n"


def test_base_settings_are_the_documented_ones():
    base = dict(scale="std", clip_low=0.2, clip_high=0.28, dual_clip=3.0, beta=0.0, aggregate="token", mini_batches=3,
                inner_iterations=1, learning_rate=1e-6, max_grad_norm=1.0, guidance="prompt", top=0.4, mass=0.8,
                negative_instruction="Give a wrong answer.")
    assert {name: getattr(gctca.Args(), name) for name in base} == base
