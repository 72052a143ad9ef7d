"""DACA's scores, weights and loop: golden numbers, loops over positions, and the plain base method."""
import copy
import csv
import doctest
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch

import common
import daca
from conftest import ROOT, golden
from daca import credit_weights, denoising_progress


def test_doctests():
    assert doctest.testmod(daca).attempted >= 3 and doctest.testmod(daca).failed == 0


# ---- scores and weights -----------------------------------------------------------------------------------

@pytest.mark.parametrize("case", golden("daca"), ids=lambda case: case["mode"] + case.get("note", ""))
def test_golden(case):
    C, commit_step, mask = torch.tensor(case["confidence"]), torch.tensor(case["commit_step"]), torch.tensor(case["mask"])
    progress = denoising_progress(C, commit_step, mask, case["mode"])
    assert torch.allclose(progress, torch.tensor(case["progress"]), atol=1e-6)
    weights = credit_weights(progress, mask, case["kappa"])
    assert torch.allclose(weights, torch.tensor(case["want"]), atol=1e-5)
    if "note" in case:
        assert torch.equal(weights, mask)  # flat scores: exactly 1


def random_trace(seed, S=5, N=4, T=7):
    g = torch.Generator().manual_seed(seed)
    commit_step = torch.randint(0, S, (N, T), generator=g)
    C = torch.rand(S, N, T, generator=g)
    C = C.gather(0, torch.minimum(torch.arange(S)[:, None, None], commit_step))  # frozen once written
    mask = (torch.arange(T) < torch.randint(1, T + 1, (N, 1), generator=g)).float()
    return C, commit_step, mask


@pytest.mark.parametrize("seed", range(5))
def test_progress_against_loops(seed):
    C, commit_step, mask = random_trace(seed)
    S, N, T = C.shape
    step, own = denoising_progress(C, commit_step, mask, "step"), denoising_progress(C, commit_step, mask, "own")
    for n in range(N):
        valid = [i for i in range(T) if mask[n, i]]
        for i in range(T):
            if not mask[n, i]:
                assert step[n, i] == own[n, i] == 0
                continue
            s = int(commit_step[n, i])
            gains = [max(0.0, float(C[s + 1, n, j] - C[s, n, j])) for j in valid if commit_step[n, j] > s] if s + 1 < S else []
            assert abs(float(step[n, i]) - (sum(gains) / len(gains) if gains else 0.0)) < 1e-6
            want = sum(max(0.0, float(C[s + 1, n, i] - C[s, n, i])) for s in range(int(commit_step[n, i])))
            assert abs(float(own[n, i]) - want) < 1e-6


@pytest.mark.parametrize("mode", ["step", "own"])
def test_weights_properties(mode):
    for seed in range(10):
        C, commit_step, mask = random_trace(seed)
        before = [x.clone() for x in (C, commit_step, mask)]
        progress = denoising_progress(C, commit_step, mask, mode)
        w = credit_weights(progress, mask, 0.5)
        assert torch.allclose(w.sum(1) / mask.sum(1), torch.ones(4), atol=1e-5)  # mean 1 per response
        assert (w[mask > 0] >= 0.5 - 1e-6).all() and (w <= 1.5 + 1e-6).all() and (w[mask == 0] == 0).all()
        assert torch.equal(credit_weights(progress, mask, 0.0), mask)  # kappa 0: exactly 1
        longest = (w - 1).abs().masked_fill(mask == 0, 0).amax(1)
        assert all(abs(x - 0.5) < 1e-5 or x == 0 for x in longest.tolist())  # the extreme token reaches 1 +- kappa
        order = torch.randperm(4)
        assert torch.equal(credit_weights(denoising_progress(C[:, order], commit_step[order], mask[order], mode), mask[order], 0.5), w[order])
        wide = [torch.nn.functional.pad(x, (0, 3), value=v) for x, v in ((C, 0.7), (commit_step, 1), (mask, 0))]  # more padding
        assert torch.allclose(credit_weights(denoising_progress(*wide, mode), wide[2], 0.5)[:, :7], w, atol=1e-6)
        noise = torch.where(mask > 0, C, torch.rand_like(C))  # what padding held does not matter
        assert torch.equal(denoising_progress(noise, commit_step, mask, mode), progress)
        assert all(torch.equal(a, b) for a, b in zip(before, (C, commit_step, mask)))
    assert not credit_weights(progress.requires_grad_(), mask).requires_grad
    for wrong in (dict(mask=mask[:1]), dict(kappa=5), dict(kappa=-0.1)):
        with pytest.raises(ValueError, match="kappa"):
            credit_weights(**{"progress": progress, "mask": mask, **wrong})


def test_weights_edge_cases():
    one = torch.tensor([[1.0, 0.0], [0.0, 0.0]])  # a one-token response, and one without tokens
    assert torch.equal(credit_weights(torch.tensor([[0.7, 9.0], [1.0, 2.0]]), one), one)
    assert torch.equal(denoising_progress(torch.rand(1, 2, 2), torch.zeros(2, 2, dtype=torch.long), one), torch.zeros(2, 2))  # one step
    with pytest.raises(ValueError):
        denoising_progress(torch.rand(1, 2, 2), torch.zeros(2, 2, dtype=torch.long), one, "all")


# ---- the loop ---------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The diffusion toy after a handful of steps. Its texts are noise, so tests bring their own reward."""
    folder = tmp_path_factory.mktemp("diffusion")
    with pytest.MonkeyPatch.context() as patch:
        demonstrations = common.toy_demonstrations
        patch.setattr(common, "toy_demonstrations", lambda tokenizer, count, seed, steps: demonstrations(tokenizer, 64, seed, steps))
        common.toy_diffusion(folder / "toy-diffusion-2steps-12", 12, story_steps=2)
    (folder / "stories.jsonl").write_text("\n".join(map(json.dumps, common.story_problems(14, 0))))  # 2 held out, 12 to train on
    return folder


@pytest.fixture
def run(checkpoints, tmp_path, monkeypatch):
    """run("--base", "uni", ...) trains in this process and returns the run's folder; a noise text is right half of the time."""
    monkeypatch.chdir(tmp_path)
    for plot in ("picture", "plot_denoising", "plot_curve"):  # slow; the last test looks at them
        monkeypatch.setattr(daca, plot, lambda *a, **k: None)
    monkeypatch.setattr(daca, "reward_correct", lambda text, problem: float(sum(map(ord, text)) % 2))
    count = itertools.count()

    def train(*flags):
        name = f"run{next(count)}"
        args = common.parse_args(daca.Args, daca.TOY, [
            "--checkpoints", str(checkpoints), "--warmup-steps", "12", "--prompts-per-step", "3", "--group-size", "4", "--eval-problems", "2",
            "--eval-samples", "1", "--data", str(checkpoints / "stories.jsonl"), "--steps", "1", "--max-new-tokens", "12", "--diffusion-steps", "4", "--micro-batch", "5", "--mini-batches", "1",
            "--name", name, *map(str, flags)])
        daca.train(args)
        return tmp_path / "runs" / name
    return train


def weights_of(folder):
    from safetensors.torch import load_file
    return load_file(folder / "checkpoint" / "model.safetensors")


def plain_base(checkpoints, base, iterations):
    """One step of the base method, written without anything of daca.py; micro-batches of 5 as in the runs."""
    lm = common.load_diffusion(checkpoints / "toy-diffusion-2steps-12")
    reference, tokenizer = copy.deepcopy(lm), common.toy_tokenizer()
    optimizer = torch.optim.AdamW(lm.model.parameters(), lr=daca.TOY["learning_rate"], weight_decay=0.0)
    torch.manual_seed(1)  # step 1 of seed 0
    batch = common.draw_batch(common.story_problems(14, 0)[2:], 1, 3, 0)
    prompts = [common.chat_ids(tokenizer, p["question"]) for p in batch for _ in range(4)]
    prompt_ids, prompt_mask = common.pad_left(prompts, tokenizer.pad_token_id)
    y, _ = common.sample_diffusion(lm, prompt_ids, prompt_mask, gen_length=12, block_length=12, steps=4, temperature=1.0,
                                   seed=int(torch.randint(2**31, ())))
    mask = common.completion_mask(y, lm.eos_ids)
    texts = common.decode(tokenizer, y, mask)
    rewards = torch.tensor([float(sum(map(ord, text)) % 2) for text in texts])
    settings = daca.BASES[base]
    A = common.group_advantages(rewards, torch.arange(12) // 4, settings["scale"])[:, None].expand(12, 12)
    start, draws = torch.rand(12), []
    for i in range(iterations):
        seeds, ratio = torch.randint(2**31, (12,)), start + (1 - start) * i / max(1, iterations - 1)

        def logps(model, rows, seeds=seeds, ratio=ratio):
            x = prompt_ids[rows], prompt_mask[rows], y[rows]
            if base == "uni":
                return common.uni_logps(model, *x, seeds=seeds[rows], ratio=ratio[rows])
            f = common.coupled_logps if base == "coupled" else common.one_step_logps
            return f(model, *x, seeds=seeds[rows]), torch.ones(len(rows), 12)

        with torch.no_grad():
            old, ref = ([logps(m, rows) for rows in torch.arange(12).split(5)] for m in (lm, reference))
        draws.append((logps, old, ref))
    for logps, old, ref in draws:
        valid = torch.cat([mask[rows] * o[1] for rows, o in zip(torch.arange(12).split(5), old)])
        denominator = common.loss_denominator(valid, settings["aggregate"], 12)
        for rows, o, r in zip(torch.arange(12).split(5), old, ref):
            loss, _ = common.clipped_kl_loss(logps(lm, rows)[0], o[0], r[0], A[rows], valid[rows], clip_low=settings["clip_low"],
                                             clip_high=settings["clip_high"], beta=settings["beta"], kl="k3",
                                             aggregate=settings["aggregate"], max_len=12, denominator=denominator)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return lm.model.state_dict()


@pytest.mark.parametrize("base, iterations", [("diffu", 2), ("coupled", 1), ("uni", 3)])
def test_neutral_setting_is_the_base_bit_for_bit(run, checkpoints, base, iterations):
    want = plain_base(checkpoints, base, iterations)
    for neutral in (("--progress", "none"), ("--kappa", 0)):
        got = weights_of(run("--base", base, "--strata", 0, "--inner-iterations", iterations, *neutral))
        assert got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in got)
    started = common.load_diffusion(checkpoints / "toy-diffusion-2steps-12").model.state_dict()
    assert any(not torch.equal(started[k], want[k]) for k in want)  # there was something to learn
    other = weights_of(run("--base", base, "--strata", 0, "--inner-iterations", iterations))
    assert any(not torch.equal(other[k], want[k]) for k in want)  # and credit changes it


@pytest.mark.parametrize("flags", [("--base", "diffu"), ("--base", "uni", "--strata", 0, "--progress", "own"), ("--base", "coupled", "--strata", 2),
                                   ("--base", "diffu", "--inner-iterations", 1, "--mini-batches", 2, "--prefix-cache", "--block-length", 6)])
def test_first_ratio_is_exactly_one(run, monkeypatch, flags):
    seen = []
    monkeypatch.setattr(daca, "clipped_kl_loss", lambda *a, **k: seen.append((a, k)) or common.clipped_kl_loss(*a, **k))
    folder = run(*flags)
    for (logps, old, ref, A, mask), options in seen[:2 if "--mini-batches" in flags else 3]:  # before the first update
        assert torch.equal(logps[mask > 0], old[mask > 0]) and torch.equal(logps[mask > 0], ref[mask > 0])
    if "--mini-batches" not in flags:
        assert len(seen) == 3 * (int(flags[3]) if "--inner" in flags else json.loads((folder / "args.json").read_text())["inner_iterations"])
    with open(folder / "metrics.csv") as file:
        row = list(csv.DictReader(file))[-1]
    assert float(row["grad_norm"]) > 0 and float(row["progress"]) > 0


def test_a_resumed_run_is_bit_equal(run):
    straight = run("--steps", 2, "--name", "straight", "--eval-every", 0)
    run("--steps", 1, "--name", "halves", "--eval-every", 0)
    run("--steps", 2, "--name", "halves", "--eval-every", 0, "--resume")
    a, b = (weights_of(straight.parent / name) for name in ("straight", "halves"))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_an_encoder_without_a_chat_template_trains(run, tmp_path):
    from transformers import BertConfig, BertForMaskedLM
    torch.manual_seed(0)
    tokenizer = common.toy_tokenizer()
    tokenizer.chat_template = None
    config = BertConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                        mask_token_id=tokenizer.mask_token_id, pad_token_id=tokenizer.pad_token_id)
    BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    folder = run("--model", tmp_path / "bert", "--learning-rate", 1e-3, "--inner-iterations", 1)
    assert common.load_diffusion(folder / "checkpoint").eos_ids == [tokenizer.eos_token_id]


@pytest.mark.parametrize("flags, message", [
    (("--base", "ppo"), "--base"), (("--progress", "all"), "--progress"), (("--kappa", "2"), "--kappa"), (("--strata", "-1"), "--strata"),
    (("--eval-budgets", "12"), "LENGTH:STEPS"), (("--block-length", "5"), "block length"), (("--beta", "-1"), "--beta")])
def test_bad_input_is_one_line(run, flags, message):
    with pytest.raises(common.InputError, match=message) as error:
        run(*flags)
    assert "\n" not in str(error.value)


def test_as_a_user_runs_it(tmp_path, checkpoints):
    flags = ["--checkpoints", checkpoints, "--data", checkpoints / "stories.jsonl", "--warmup-steps", 12, "--name", "a", "--steps", 1,
             "--prompts-per-step", 2, "--group-size", 4, "--eval-problems", 2, "--eval-samples", 1, "--eval-budgets", "24:24", "8:2"]
    done = subprocess.run([sys.executable, str(ROOT / "daca.py"), *map(str, flags)], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "runs" / "a" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    for file in ("credit.png", "denoising.png", "curve.png", "samples.txt", "args.json"):
        assert (tmp_path / "runs" / "a" / file).stat().st_size > 0
    assert [row["step"] for row in rows] == ["0", "1"] and all(row["eval_mean@8:2"] for row in rows)
