"""The experiments: measures against plain counting, the hard set, and the README's tables against the CSV files."""
import dataclasses
import doctest
import itertools
import json
import math
import random
import shutil
import sys
from collections import Counter

import pytest
import torch

from conftest import ROOT, WARMUP

sys.path.insert(0, str(ROOT / "notebooks"))
import common
import experiments
import flipped
import localisation


# ---- the tables are the files ------------------------------------------------------------------------------------

def test_readme_tables_equal_the_files():
    """Every block between the README's markers is what `experiments.py tables` makes of the files."""
    text = (ROOT / "README.md").read_text()
    shown = {name for name in experiments.measured(experiments.RESULTS) if f"<!-- table {name} -->" in text}
    assert {"toy", "learning"} <= shown
    assert experiments.render(text) == text, "run: python notebooks/experiments.py tables"


def test_render_replaces_a_changed_number_and_nothing_else():
    after = "\n<!-- end -->\nafter, with <!-- end --> in it\n"
    text = f"before\n<!-- table toy -->\n| 0.999 |{after}"
    new = experiments.render(text)
    assert new.startswith("before\n<!-- table toy -->\n| seed |") and new.endswith(after)
    assert "0.999" not in new and experiments.render(new) == new


def test_learning_table_from_a_hand_made_file(tmp_path):
    """Two seeds: means, the paired difference with its t interval, and the step at which 0.8 is crossed."""
    line = lambda row, seed, after, curve: {
        "row": row, "seed": seed, "steps": 20, "before_mean": 0.4, "after_mean": after, "before_greedy": 0.9,
        "after_greedy": 1.0, "reward_first": 0, "reward_last": 1, "seconds": 40, "curve": curve, "command": ""}
    experiments.write_rows(tmp_path / "learning.csv", [
        line("delta, neutral", 0, 0.80, "0:0.4 10:0.6 20:0.8"), line("delta, neutral", 1, 0.70, "0:0.4 10:0.6 20:0.7"),
        line("delta", 0, 0.90, "0:0.4 10:0.7 20:1.0"), line("delta", 1, 0.82, "0:0.4 10:0.8 20:0.82")])
    table = experiments.learning_table(results=tmp_path).splitlines()
    neutral, method = ([cell.strip() for cell in row.split("|")[1:-1]] for row in table[2:4])
    assert neutral == ["`delta.py --low 1 --high 1`", "2", "0.400 ± 0.000", "0.750 ± 0.071", "1.000 ± 0.000",
                       "20 (1 of 2)", "40", ""]
    # differences .10 and .12: .11 +- 12.706 * .01414 / sqrt(2); 0.8 at steps 13.3 and 10, with 2 seconds a step
    assert method[5:] == ["12", "23", "+0.110 (-0.017 to +0.237)"]


def test_mean_and_interval_against_a_paired_t_test():
    """n = 5, differences 1..5: mean 3, sd 1.5811, half width 2.776 * 1.5811 / sqrt(5) = 1.963 (a table's value)."""
    assert experiments.mean_and_interval([1, 2, 3, 4, 5]) == "+3.000 (+1.037 to +4.963)"


def test_bootstrap_interval():
    """All resamples of (0, 1) are equally likely: means 0, .5, .5, 1; the 95 % interval is the whole range."""
    assert localisation.interval([0.0, 1.0]) == (0.5, 0.0, 1.0)
    mean, low, high = localisation.interval([1.0, 2.0, 3.0, 4.0])
    means = sorted(sum(draw) / 4 for draw in itertools.product([1, 2, 3, 4], repeat=4))           # all 256 resamples
    assert mean == 2.5 and low == means[int(0.025 * 256)] and high == means[int(0.975 * 256)]


@pytest.mark.parametrize("module", [experiments, localisation, flipped])
def test_examples(module):
    assert doctest.testmod(module).failed == 0


# ---- the truth -----------------------------------------------------------------------------------------------------

PROBLEM = {"name": "Ben", "thing": "pens", "start": 8, "moves": [("buys", 5), ("gives", 2)]}
OPENING = "Ben starts with 8 pens."


@pytest.mark.parametrize("text, right", [
    (f"{OPENING} then 8 + 5 = 13. then 13 - 2 = 11. Answer: 11", [True, True]),
    (f"{OPENING} then 8 + 5 = 14. then 14 - 2 = 12. Answer: 12", [False, True]),   # wrong at the first step, then right
    (f"{OPENING} then 8 + 5 = 13. then 13 - 2 = 10. Answer: 10", [True, False]),   # wrong at the second step
    (f"{OPENING} then 8 + 5 = 12. then 12 - 2 = 11. Answer: 11", [False, False]),  # two slips, a right answer
])
def test_story_results(text, right):
    found = localisation.story_results(PROBLEM, text)
    assert [r for _, _, r in found] == right
    assert all(text[start:end].isdigit() and text[start - 2:start] == "= " for start, end, _ in found)


@pytest.mark.parametrize("text", [
    "", "Ben", OPENING, f"{OPENING} then 8 + 5 = 13. then 13 - 2 = 11.",
    f"{OPENING} then 8 + 4 = 12. then 12 - 2 = 10. Answer: 10",       # an operand copied wrongly
    f"{OPENING} then 8 - 5 = 3. then 3 - 2 = 1. Answer: 1",           # the wrong sign
    f"{OPENING} then 8 + 5 = 13. then 12 - 2 = 10. Answer: 10",       # the value was not carried over
    f"{OPENING} then 8 + 5 = 13. then 13 - 2 = 11. Answer: 12",       # the answer is not the last value
    f"{OPENING} then 8 + 5 = 13. then 13 - 2 = 11. Answer: 11 apples",
    "Ben starts with 9 pens. then 9 + 5 = 14. then 14 - 2 = 12. Answer: 12",
    f"{OPENING} then 8 + 5 = . then 13 - 2 = 11. Answer: 11",
])
def test_other_faults_are_no_results(text):
    assert localisation.story_results(PROBLEM, text) is None


def rollout_of(tokenizer, texts):
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    ids, mask = common.pad_right([*map(encode, texts)], tokenizer.pad_token_id)
    zeros = torch.zeros(len(texts), dtype=torch.long)
    return common.Rollout(ids, mask, ids, mask, zeros, zeros.bool(), texts)


def test_truths_point_at_the_wrong_token():
    tokenizer = common.toy_tokenizer()
    texts = [f"{OPENING} then 8 + 5 = 14. then 14 - 2 = 12. Answer: 12",
             f"{OPENING} then 8 + 5 = 13. then 13 - 2 = 10. Answer: 10", "Ben", OPENING]
    found = localisation.truths(tokenizer, rollout_of(tokenizer, texts), [PROBLEM])
    assert found[2:] == [None, None]
    for (pieces, numbers, results), wrong in zip(found[:2], (" 14", " 10")):
        assert "".join(pieces).endswith("<eos>") and len(numbers) == 8 and len(results) == 2
        assert [pieces[t] for t, right in results if not right] == [wrong]
        assert all(pieces[t - 1] == " =" for t, _ in results)


# ---- the measures --------------------------------------------------------------------------------------------------

def test_auc_against_counting_pairs():
    rng = random.Random(0)
    for _ in range(200):
        values = [rng.randint(0, 3) for _ in range(rng.randint(2, 9))]                          # many ties
        place = rng.randrange(len(values))
        others = [t for t in range(len(values)) if t != place and rng.random() < 0.8]
        if not others:
            assert math.isnan(localisation.auc(torch.tensor(values), place, others))
            continue
        points = 0
        for other in others:
            points += 2 if values[other] < values[place] else 1 if values[other] == values[place] else 0
        assert localisation.auc(torch.tensor(values), place, others) == pytest.approx(points / 2 / len(others))


def test_measure_on_a_hand_made_rollout():
    """Five tokens a response, results at 1 and 3, numbers at 1, 3 and 4."""
    rights = (False, True), (True, False), (False, False), (True, True), (False, True)
    found = [(list("abcde"), [1, 3, 4], [(1, first), (3, second)]) for first, second in rights] + [None]
    rewards = torch.tensor([0.0, 0, 0, 1, 0, 0])
    A = torch.tensor([-1.0, -1, -1, 2, 0, -1])                                         # row 4: a silent group
    w = torch.tensor([[1.0, 2, 0, 1, 1], [1, 2, 0, 1, 1], [0, 1, 2, 2, 0], [1, 1, 0, 2, 1],
                      [9, 0, 0, 0, 0], [9, 0, 0, 0, 0]])
    row = localisation.measure(A[:, None] * w, w, rewards, found)
    assert (row["wrong"], row["right"]) == (3, 1)
    # Row 0: token 1 beats all four. Row 1: token 3 beats one, ties with two, loses to one. Row 2: two and two.
    assert row["auc"] == row["auc_score"] == pytest.approx((1 + 2 / 4 + 2 / 4) / 3)
    assert row["auc_results"] == pytest.approx((1 + 0) / 2)  # row 2 has no right result
    assert row["relative"] == pytest.approx((2 + 1 + 1) / 3)
    assert row["share_numbers"] == pytest.approx(4 / 5) and row["share_results"] == pytest.approx(3 / 5)


# ---- the hard set --------------------------------------------------------------------------------------------------

def test_hard_set_is_half_right_and_has_one_wrong_number():
    rng, wrong, counts = random.Random(0), {}, Counter()
    for problem in common.story_problems(1500, 0):
        lowest = [min(0, *itertools.accumulate(common.VERBS[v] * n for v, n in problem["moves"][k:])) for k in range(2)]
        text = localisation.hard_solution(problem, rng)
        found = localisation.story_results(problem, text)
        value = problem["start"]
        for k, ((verb, number), (start, end, right)) in enumerate(zip(problem["moves"], found)):
            move, result = common.VERBS[verb] * number, int(text[start:end])
            counts[right] += 1
            if not right:
                slip = result - value - move
                assert slip in (-2, -1, 1, 2)
                wrong.setdefault((value, move), set()).add(abs(slip))  # its sign may depend on what follows
            value = result
        assert value >= 0
    assert 0.47 < counts[True] / counts.total() < 0.53  # 3000 coins: sd .009
    assert all(len(slips) == 1 for slips in wrong.values()) and set().union(*wrong.values()) == {1, 2}


def test_hard_set_keeps_the_other_rates():
    rng, problems = random.Random(0), common.story_problems(500, 0)
    assert all(localisation.hard_solution(p, rng, error=0.0) == p["answer"] for p in problems)
    wrong = [localisation.story_results(p, localisation.hard_solution(p, rng, error=0.9)) for p in problems]
    results = [right for found in wrong for _, _, right in found]
    assert 0.06 < sum(results) / len(results) < 0.14  # 1000 draws at .1: sd .0095


# ---- flipped rewards -----------------------------------------------------------------------------------------------

def test_flip_has_its_rate_and_touches_nothing_else():
    torch.manual_seed(0)
    reward = flipped.flip(lambda text, problem: text)
    assert 0.042 < sum(reward(1.0, None) == 0.0 for _ in range(10_000)) / 10_000 < 0.058       # sd .0022
    assert 0.042 < sum(reward(0.0, None) == 1.0 for _ in range(10_000)) / 10_000 < 0.058
    assert flipped.flip(lambda *_: None, 1.0)("", None) is None
    assert flipped.flip(lambda *_: 1.0, 1.0)("", None) == 0.0 and flipped.flip(lambda *_: 1.0, 0.0)("", None) == 1.0


def test_flipped_scores_are_reflected_at_the_mean():
    scores, gradients = torch.tensor([1.0, 2.0, 6.0, float("nan")]), torch.randn(4, 2, 3)
    out = flipped.flip_scores(lambda: (scores, gradients, "scored"), 1.0)()
    assert torch.equal(out[0][:3], torch.tensor([5.0, 4.0, 0.0])) and out[0][3].isnan()
    assert out[1] is gradients and out[2] == "scored"
    assert torch.equal(flipped.flip_scores(lambda: (scores, gradients, ""), 0.0)()[0][:3], scores[:3])


# ---- parts, at a tiny scale ----------------------------------------------------------------------------------------

@pytest.fixture
def work(tmp_path, toy_checkpoints):
    """A folder for a quick run that finds the tests' warm-started policy."""
    shutil.copytree(toy_checkpoints, tmp_path / "checkpoints")
    assert f"--warmup-steps {WARMUP}" in experiments.QUICK
    return tmp_path


def test_quick_localisation(work):
    times = lambda: {p: p.stat().st_mtime for p in experiments.RESULTS.glob("localisation*")}
    before = times()
    experiments.main(["localisation", "--quick", "--seeds", "0", "--only", "toy", "--work", str(work)])
    rows = {r["method"]: r for r in experiments.read_rows(work / "results" / "localisation.csv")}
    assert tuple(rows) == localisation.METHODS["autoregressive"]
    auc = lambda method, column="auc": float(rows[method][column])
    assert int(rows["uniform"]["wrong"]) > 20 and auc("uniform") == auc("uniform", "auc_results") == 0.5
    assert auc("control: surprise") > 0.9 and 0.3 < auc("control: random") < 0.7
    assert auc("GCTCA prompt") == auc("GCTCA prompt", "auc_score")  # weights are ranks of the score
    assert auc("DATC") == auc("DATC, own reward")  # whoever calls a response bad, the order of its tokens is the same
    assert len({r["wrong"] for r in rows.values()}) == 1  # all rows see the same responses
    assert (work / "results" / "localisation.png").stat().st_size > 10_000
    assert not (work / "results" / "localisation.json").exists()  # one set of three: not the part's wall time
    assert len(before) == 3 and times() == before  # a quick run leaves them alone


def test_hard_rows(work):
    """The hard set trains its own policy on its own demonstrations, and leaves common's in place."""
    story_solution = common.story_solution
    args = localisation.toy_args(localisation.datc, {"checkpoints": str(work), "warmup_steps": 10})
    folder = localisation.checkpoint("hard", args)
    assert common.story_solution is story_solution and localisation.checkpoint("toy", args) == "toy"
    assert (folder / "config.json").is_file()
    seen, told = [], lambda *_: seen.append(common.story_solution(PROBLEM, random.Random(0), error=1.0))
    with localisation.patch.object(common, "toy_policy", told):
        localisation.checkpoint("hard", dataclasses.replace(args, warmup_steps=11))
    assert seen == [localisation.hard_solution(PROBLEM, random.Random(0), error=1.0)]
    # The rows, with the tests' policy in the place of both warm starts: the code does not care how good it is.
    made = work / "checkpoints" / f"toy-policy-2steps-{WARMUP}"
    for name in (f"hard-policy-2steps-{WARMUP}", f"toy-policy-2steps-{WARMUP // 2}"):
        shutil.copytree(made, made.with_name(name))
    sizes = {"checkpoints": str(work / "checkpoints"), "warmup_steps": WARMUP // 2, "reward_steps": 2}
    rows = localisation.localise("hard", 0, sizes, prompts=4)
    assert [r["method"] for r in rows] == list(localisation.METHODS["autoregressive"])
    assert {(r["set"], r["responses"]) for r in rows} == {("hard", 32)}


def test_diffusion_rows(tmp_path):
    sizes = {"checkpoints": str(tmp_path), "warmup_steps": 20, "table_rollouts": 4, "prompts_per_step": 4}
    rows = localisation.localise("diffusion", 0, sizes, prompts=4)
    assert [r["method"] for r in rows] == list(localisation.METHODS["diffusion"])
    assert {r["responses"] for r in rows} == {32}


def test_quick_noise_runs_resumes_and_makes_tables(work, capsys):
    """One row under flipped rewards, through flipped.py; a second call finds it done and keeps the other lines."""
    condition = "5 % of rewards flipped"
    call = lambda: experiments.main(["noise", "--quick", "--seeds", "0", "--jobs", "1", "--only", "grpo", condition,
                                     "--work", str(work)])
    call()
    rows = experiments.read_rows(work / "results" / "noise.csv")
    assert [(r["condition"], r["row"], r["seed"], r["steps"]) for r in rows] == [(condition, "grpo", "0", "2")]
    assert rows[0]["command"].startswith("notebooks/flipped.py grpo.py")
    other = {**rows[0], "condition": "as it is", "after_mean": "0.125"}
    minutes = lambda: json.loads((work / "results" / "noise.json").read_text())["minutes"]
    first = minutes()
    experiments.write_rows(work / "results" / "noise.csv", rows + [other])
    log = (work / "runs" / "experiments.log").read_text()
    call()
    assert experiments.read_rows(work / "results" / "noise.csv") == [other, rows[0]]  # in the order of CONDITIONS
    assert (work / "runs" / "experiments.log").read_text() == log                               # nothing ran again
    assert 0 < first <= minutes() < 2 * first                   # a resuming part's wall time adds up; this call did nothing
    assert json.loads((work / "results" / "noise.json").read_text())["runs"] == 1
    experiments.main(["tables", "--quick", "--work", str(work)])
    assert "| `grpo.py` | 0.125 | " in (work / "results" / "tables.md").read_text()
    assert "0.125" in capsys.readouterr().out
