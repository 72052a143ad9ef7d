"""delta.py: the proxies against autograd, the weights against golden numbers, a slow version and every invariance."""
import csv
import dataclasses
import doctest
import inspect
import math
import sys
import zlib

import pytest
import torch

import common
import delta
import grpo
from conftest import WARMUP, golden

GOLDEN = golden("delta")


def slow_weights(proxies, advantages, mask, refine=1, low=0.8, high=1.2):
    """DelTA as the paper's text reads, one token at a time, in plain Python floats: distances, not dot products."""
    tokens = [(i, t) for i in range(len(mask)) for t in range(len(mask[i])) if mask[i][t]]
    A, v = advantages, proxies
    sides = {+1: [k for k in tokens if A[k[0]] > 0], -1: [k for k in tokens if A[k[0]] < 0]}
    if not sides[+1] or not sides[-1]:
        return [[float(x) for x in row] for row in mask]
    size = len(v[0][0])

    def mean_of(side, alpha):
        weight = {k: abs(A[k[0]]) * alpha[k] for k in sides[side]}
        total = max(sum(weight.values()), 1e-8)
        return [sum(weight[i, t] * v[i][t][h] for i, t in sides[side]) / total for h in range(size)]

    def margins(alpha):
        plus, minus = mean_of(+1, alpha), mean_of(-1, alpha)
        far = lambda k, mu: sum((v[k[0]][k[1]][h] - mu[h]) ** 2 for h in range(size))
        return {k: side * (far(k, minus) - far(k, plus)) for side in (+1, -1) for k in sides[side]}

    def spreads(m):
        out = {}
        for side, members in sides.items():
            mean = sum(m[k] for k in members) / len(members)
            out[side] = math.sqrt(max(sum((m[k] - mean) ** 2 for k in members) / len(members), 1e-8))
        return out

    def sigmoids(m, g):
        return {k: 1 / (1 + math.exp(-m[k] / g[side])) for side in (+1, -1) for k in sides[side]}

    m = margins({k: 1.0 for k in tokens})
    alpha = sigmoids(m, spreads(m))
    for _ in range(refine):
        g = spreads(m)
        m = margins(alpha)
        alpha = sigmoids(m, g)
    lam = {k: low + (high - low) * alpha.get(k, 0.0) for k in tokens}
    scale = len(tokens) / sum(lam.values())
    return [[lam[i, t] * scale if (i, t) in lam else 0.0 for t in range(len(mask[i]))] for i in range(len(mask))]


def batch(seed, N=6, T=7, H=5, dtype=torch.float64):
    """A random rollout batch with both signs, one row of advantage 0 and lengths from 1 to T."""
    make = torch.Generator().manual_seed(seed)
    proxies = torch.randn(N, T, H, generator=make, dtype=dtype)
    advantages = torch.randn(N, generator=make, dtype=dtype)
    advantages[:3] = torch.tensor([0.7, -1.3, 0.0])
    lengths = torch.randint(1, T + 1, (N,), generator=make)
    return proxies, advantages, (torch.arange(T) < lengths[:, None]).to(dtype)


def close(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------------------------------------------- the proxies

def test_the_proxy_is_the_gradient_of_the_tokens_own_output_row():
    torch.manual_seed(0)
    N, T, H, V, temperature = 2, 3, 4, 6, 0.7
    hidden, W = torch.randn(N, T, H, dtype=torch.float64), torch.randn(V, H, dtype=torch.float64, requires_grad=True)
    y = torch.randint(V, (N, T))
    logps = (hidden @ W.T / temperature).log_softmax(-1).gather(-1, y[..., None])[..., 0]
    v = delta.token_proxies(hidden, logps)
    for i in range(N):
        for t in range(T):
            row = torch.autograd.grad(logps[i, t], W, retain_graph=True)[0][y[i, t]]
            close(v[i, t] / temperature, row)


def test_proxies_keep_their_digits_when_the_policy_is_sure_and_are_float32_at_least():
    hidden = torch.ones(1, 3, 1)
    v = delta.token_proxies(hidden, torch.tensor([[-1e-6, 0.0, -math.inf]]))
    assert v[0, 0, 0].item() == pytest.approx(1e-6, rel=1e-5)        # 1 - exp(-1e-6) in float32 gives 9.5e-7
    assert v[0, 1:, 0].tolist() == [0.0, 1.0]
    assert delta.token_proxies(hidden.bfloat16(), torch.zeros(1, 3).bfloat16()).dtype == torch.float32
    assert not delta.token_proxies(hidden.requires_grad_(), torch.zeros(1, 3, requires_grad=True)).requires_grad


# ---------------------------------------------------------------------------------------------------------- the weights

@pytest.mark.parametrize("case", GOLDEN, ids=range(len(GOLDEN)))
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-7), (torch.float32, 3e-6)])
def test_golden(case, dtype, tolerance):
    inputs = [torch.tensor(case[name], dtype=dtype) for name in ("proxies", "advantages", "mask")]
    got = delta.credit_weights(*inputs, **{name: case[name] for name in ("refine", "low", "high")})
    close(got, torch.tensor(case["want"], dtype=dtype), tolerance)


@pytest.mark.parametrize("refine", [0, 1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_the_slow_version_agrees(seed, refine):
    proxies, advantages, mask = batch(seed)
    want = slow_weights(proxies.tolist(), advantages.tolist(), mask.tolist(), refine, 0.5, 1.4)
    close(delta.credit_weights(proxies, advantages, mask, refine, 0.5, 1.4), torch.tensor(want, dtype=torch.float64))


def invariants(w, mask, low, high):
    valid = mask.bool()
    assert torch.isfinite(w).all() and not w.requires_grad
    assert (w[~valid] == 0).all() and (w[valid] > 0).all()           # so sign(A w) = sign(A) on every valid token
    assert w.sum().item() == pytest.approx(valid.sum().item(), rel=1e-5)
    assert w[valid].min() >= low / high * (1 - 1e-5) and w[valid].max() <= high / low * (1 + 1e-5)


def test_sign_mean_and_bounds_on_many_random_batches():
    make = torch.Generator().manual_seed(1)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=make))
    for seed in range(150):
        proxies, advantages, mask = batch(seed, N=draw(3, 12), T=draw(1, 9), H=draw(1, 7), dtype=torch.float32)
        if seed % 3 == 0:                                            # holes, not only a padded end
            mask = (torch.rand(mask.shape, generator=make) < 0.4).float()
            mask[0, 0] = 1
        if seed % 5 == 0:                                            # very different lengths of v
            proxies = proxies * 10 ** torch.randint(-6, 5, mask.shape, generator=make)[..., None]
        low, high = [(0.8, 1.2), (0.1, 3.0), (1.0, 1.0), (1e-3, 1e3)][seed % 4]
        invariants(delta.credit_weights(proxies, advantages, mask, draw(0, 4), low, high), mask, low, high)


def test_extreme_values_never_give_nan():
    for seed in range(12):
        proxies, advantages, mask = batch(seed, dtype=torch.float32)
        one_token, one_left = torch.zeros_like(mask), mask.clone()
        one_token[:, 0] = 1
        one_left[1:] = 0
        sure = delta.token_proxies(proxies, torch.zeros_like(mask))                          # every probability is 1
        twin = torch.ones_like(proxies)                                                      # all tokens the same
        for v, A, m in [(sure, advantages, mask), (twin, advantages, mask), (proxies, advantages, one_token),
                        (proxies, advantages, one_left), (proxies, advantages * 0, mask),
                        (proxies, advantages * 1e-30, mask), (proxies, advantages * 1e10, mask),
                        (proxies[:2, :1], advantages[:2], mask[:2, :1]), (proxies * 1e4, advantages, mask)]:
            invariants(delta.credit_weights(v, A, m), m, 0.8, 1.2)
        assert torch.equal(delta.credit_weights(sure, advantages * 0, mask), mask)
    assert delta.credit_weights(proxies, advantages, mask * 0).abs().sum() == 0              # nothing valid at all


def test_without_contrast_every_weight_is_exactly_one():
    proxies, advantages, mask = batch(0)
    assert torch.equal(delta.credit_weights(proxies, advantages.abs(), mask), mask)          # no bad side
    assert torch.equal(delta.credit_weights(proxies, -advantages.abs(), mask), mask)         # no good side
    assert torch.equal(delta.credit_weights(proxies, advantages * 0, mask), mask)            # neither
    bad_rows_masked = mask * (advantages >= 0)[:, None]
    assert torch.equal(delta.credit_weights(proxies, advantages, bad_rows_masked), bad_rows_masked)
    for low in (0.1, 0.7, 1.0, 1.1, 3.3):
        for seed in range(10):
            proxies, advantages, mask = batch(seed, dtype=torch.float32)
            assert torch.equal(delta.credit_weights(proxies, advantages, mask, low=low, high=low), mask)


def test_the_mean_is_one_over_the_batch_but_not_per_response():
    proxies, advantages, mask = batch(3)
    w = delta.credit_weights(proxies, advantages, mask)
    assert ((w.sum(1) / mask.sum(1)) - 1).abs().max() > 0.05


def test_groups_without_advantage_move_no_centroid_but_enter_the_normaliser():
    proxies, advantages, mask = batch(4)
    advantages[2:4] = 0
    kept = advantages != 0
    w = delta.credit_weights(proxies, advantages, mask)
    alone = delta.credit_weights(proxies[kept], advantages[kept], mask[kept])
    valid = mask[kept].bool()
    ratio = w[kept][valid] / alone[valid]
    close(ratio, ratio[0].expand_as(ratio))                          # the same up to one factor ...
    assert ratio[0] > 1.01                                           # ... above 1: their lambda = low lowers the mean
    idle = w[~kept][mask[~kept].bool()]
    close(idle, idle[0].expand_as(idle))
    other = proxies.clone()
    other[~kept] = 1e3                                               # where their proxies lie does not matter
    close(delta.credit_weights(other, advantages, mask), w)


@pytest.mark.parametrize("seed", range(5))
def test_invariances(seed):
    proxies, advantages, mask = batch(seed)
    w = delta.credit_weights(proxies, advantages, mask)
    make = torch.Generator().manual_seed(seed)
    shift = torch.randn(5, generator=make, dtype=torch.float64) * 10
    rotation = torch.linalg.qr(torch.randn(5, 5, generator=make, dtype=torch.float64)).Q
    order = torch.randperm(len(advantages), generator=make)
    for changed in [(proxies + shift, advantages), (proxies @ rotation, advantages), (proxies * 0.03, advantages),
                    (proxies * 500, advantages), (proxies, advantages * 3), (proxies, -advantages)]:
        close(delta.credit_weights(*changed, mask), w, 1e-8)
    close(delta.credit_weights(proxies[order], advantages[order], mask[order]), w[order])
    # It is not blind to everything: one axis alone stretched, or one token moved, changes the weights.
    stretched = proxies * torch.tensor([9.0, 1, 1, 1, 1], dtype=torch.float64)
    assert (delta.credit_weights(stretched, advantages, mask) - w).abs().max() > 0.01


def test_padding_neither_counts_nor_leaks():
    proxies, advantages, mask = batch(5)
    w = delta.credit_weights(proxies, advantages, mask)
    garbage = torch.where(mask.bool()[..., None], proxies, torch.nan)
    assert torch.equal(delta.credit_weights(garbage, advantages, mask), w)
    longer = torch.nn.functional.pad(garbage, (0, 0, 0, 4), value=math.inf)
    w_longer = delta.credit_weights(longer, advantages, torch.nn.functional.pad(mask, (0, 4)))
    close(w_longer, torch.nn.functional.pad(w, (0, 4)))


def test_proxies_may_be_made_in_micro_batches():
    proxies, advantages, mask = batch(6)
    logps = -torch.rand(mask.shape, dtype=torch.float64)
    whole = delta.token_proxies(proxies, logps)
    parts = torch.cat([delta.token_proxies(h, lp) for h, lp in zip(proxies.split([1, 4, 1]), logps.split([1, 4, 1]))])
    assert torch.equal(delta.credit_weights(whole, advantages, mask), delta.credit_weights(parts, advantages, mask))
    halves = [delta.credit_weights(v, a, m) for v, a, m in zip(whole.split(3), advantages.split(3), mask.split(3))]
    assert (torch.cat(halves) - delta.credit_weights(whole, advantages, mask)).abs().max() > 1e-3   # never like this


def test_arguments_are_left_alone_and_weights_carry_no_gradient():
    proxies, advantages, mask = batch(7)
    proxies.requires_grad_(), advantages.requires_grad_()
    before = [x.detach().clone() for x in (proxies, advantages, mask)]
    assert not delta.credit_weights(proxies, advantages, mask).requires_grad
    assert all(torch.equal(x, y) for x, y in zip((proxies, advantages, mask), before))


@pytest.mark.parametrize("bad", [dict(refine=-1), dict(low=0.0), dict(low=1.3), dict(mask=torch.ones(6, 6)),
                                 dict(advantages=torch.ones(5))])
def test_errors_say_what_is_wrong(bad):
    proxies, advantages, mask = batch(0)
    with pytest.raises(ValueError, match="must be|need"):
        delta.credit_weights(**{**dict(proxies=proxies, advantages=advantages, mask=mask), **bad})
    with pytest.raises(ValueError, match="must be"):
        delta.token_proxies(proxies, mask[:, :3])


@pytest.mark.parametrize("function", [delta.token_proxies, delta.credit_weights], ids=lambda f: f.__name__)
def test_doctests_hold_for_the_function_copied_out_alone(function):
    alone = {"torch": torch}
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


@pytest.mark.parametrize("aggregate, beta", [("token", 0.0), ("sequence", 0.04)])
def test_the_neutral_setting_is_grpo_bit_for_bit(train, aggregate, beta):
    base = train(grpo, base=delta, aggregate=aggregate, beta=beta)
    assert bit_equal(train(delta, low=1.0, high=1.0, aggregate=aggregate, beta=beta), base)
    assert not bit_equal(train(delta, aggregate=aggregate, beta=beta), base)
    assert all(float(row["grad_norm"]) > 0 for row in base[0])       # something was learnt in between


def test_weights_come_from_the_whole_batch_once_and_from_no_extra_forward(train, monkeypatch):
    """Whatever the mini- and micro-batches: one call with all 16 responses, one scoring pass, sign of A kept."""
    calls, passes, used = [], [], []
    real_weights, real_score, real_loss = delta.credit_weights, delta.score, delta.clipped_kl_loss

    def weigh(proxies, advantages, mask, *settings):
        assert torch.equal(proxies, delta.token_proxies(passes[0].hidden, passes[0].logps))
        calls.append((advantages, mask, real_weights(proxies, advantages, mask, *settings)))
        return calls[-1][2]

    def count(*args, **options):
        passes.append(real_score(*args, **options))
        return passes[-1]

    def loss(logps, old_logps, ref_logps, advantages, mask, **options):
        used.append(advantages)
        return real_loss(logps, old_logps, ref_logps, advantages, mask, **options)

    monkeypatch.setattr(delta, "credit_weights", weigh)
    monkeypatch.setattr(delta, "score", count)
    monkeypatch.setattr(delta, "clipped_kl_loss", loss)
    losses = []
    for micro_batch in (3, 512):
        calls.clear(), passes.clear(), used.clear()
        losses.append(float(train(delta, steps=1, micro_batch=micro_batch, inner_iterations=2)[0][0]["loss"]))
        (A, mask, w), = calls
        assert len(passes) == 1 and len(w) == 16 and A.any()
        invariants(w, mask, 0.8, 1.2)
        once = torch.cat(used)[:16]
        assert torch.equal(once, A[:, None] * w) and torch.equal(torch.cat(used), once.repeat(2, 1))     # frozen
        assert torch.equal(once.sign(), A.sign()[:, None] * mask)
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_run_as_a_user_does(run_script, tmp_path):
    done = run_script("delta.py", "--steps", 2, "--name", "a", "--group_size", 8)
    run = tmp_path / "runs" / "a"
    for name in ("args.json", "curve.png", "credit.png", "samples.txt", "checkpoint/model.safetensors"):
        assert (run / name).stat().st_size > 0, name
    rows = list(csv.DictReader((run / "metrics.csv").open(newline="")))
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert 0 < float(rows[1]["weight_std"]) < 0.2 and "sanity" in done.stdout + done.stderr


def test_help_names_the_arguments_of_the_method(capsys):
    with pytest.raises(SystemExit, match="0"):
        common.parse_args(delta.Args, delta.TOY, ["--help"], delta.__doc__)
    text = capsys.readouterr().out
    assert all(word in text for word in ("DelTA", "--refine", "--low", "--high", "the toy's preset"))


@pytest.mark.parametrize("flags", [["--refine", "-1"], ["--low", "0"], ["--low", "1.5"], ["--high", "0.5"]])
def test_bad_input_is_one_line_and_code_2(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["delta.py", *flags])
    with pytest.raises(SystemExit) as stop:
        common.main(delta.train, delta.Args, delta.TOY, delta.__doc__)
    assert stop.value.code == 2 and capsys.readouterr().err == "error: needs --refine >= 0 and 0 < --low <= --high\n"


def test_base_settings_are_the_documented_ones():
    base = dict(scale="std", clip_low=0.2, clip_high=0.28, dual_clip=10.0, beta=0.0, aggregate="token", mini_batches=4,
                inner_iterations=1, learning_rate=1e-6, max_grad_norm=1.0, refine=1, low=0.8, high=1.2)
    assert {name: getattr(delta.Args(), name) for name in base} == base
