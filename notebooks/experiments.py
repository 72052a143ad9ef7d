"""The experiments behind the README's tables. Every part runs alone, resumes when stopped, and writes a CSV file.

    python notebooks/experiments.py localisation     where each method puts its credit: shared rollouts, known truth
    python notebooks/experiments.py toy              grpo.py as a new user runs it: warm start included, both cores
    python notebooks/experiments.py learning         each method against its script's neutral setting, on the toy
    python notebooks/experiments.py diffusion        the same for the masked diffusion scripts
    python notebooks/experiments.py noise            group size, length of the story, flipped rewards: one at a time
    python notebooks/experiments.py smollm2          all autoregressive scripts on SmolLM2-135M-Instruct, a few steps
    python notebooks/experiments.py cost             the benchmarks, their output kept as text
    python notebooks/experiments.py plan             the memory plan for one GPU (tests/gpu_check.py --plan)
    python notebooks/experiments.py tables           the README's tables and the pictures, from notebooks/results/
    python notebooks/experiments.py all              all of it; prints its plan first

    --quick          every part at a tiny scale, in a temporary folder: `all --quick` takes minutes and touches nothing
    --seeds 0 1 2    --only NAME ...    --jobs 2 (runs side by side, one thread each)    --steps N    --work FOLDER

Numbers in the README come from these files alone; nothing is typed by hand.
"""
import argparse
import csv
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "notebooks" / "results"
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "notebooks")]

# name -> (script, flags, the row it is compared with). A method is compared with ITS OWN SCRIPT at the neutral setting:
# same base, same sampler, same seeds. Against grpo.py one would mostly compare bases (clip range, aggregation, KL).
LEARNING = {
    "grpo": ("grpo.py", "", None),
    "delta, neutral": ("delta.py", "--low 1 --high 1", None),
    "delta": ("delta.py", "", "delta, neutral"),
    "gctca, neutral": ("gctca.py", "--top 0.4 --mass 0.4", None),
    "gctca prompt": ("gctca.py", "", "gctca, neutral"),
    "gctca group": ("gctca.py", "--guidance group", "gctca, neutral"),
    "datc, neutral": ("datc.py", "--lam 0", None),
    "datc": ("datc.py", "", "datc, neutral"),
    "datc, shuffled": ("datc.py", "--control shuffle", "datc, neutral"),
    "datc, no direction": ("datc.py", "--control no-direction", "datc, neutral"),
}

DIFFUSION = {
    "diffu base": ("daca.py", "--progress none --strata 0", None),
    "coupled base": ("daca.py", "--base coupled --progress none --strata 0", None),
    "uni base": ("daca.py", "--base uni --progress none --strata 0", None),
    "daca, progress alone": ("daca.py", "--strata 0", "diffu base"),
    "daca, strata alone": ("daca.py", "--progress none", "diffu base"),
    "daca": ("daca.py", "", "diffu base"),
    "dtca, neutral": ("dtca.py", "--pos_low 1 --pos_high 1 --no_calibration", None),
    "dtca, no credit": ("dtca.py", "--no_credit", "dtca, neutral"),
    "dtca, no calibration": ("dtca.py", "--no_calibration", "dtca, neutral"),
    "dtca": ("dtca.py", "", "dtca, neutral"),
}

# Trained at half as many denoising steps as tokens (24:12); evaluated also at as many and at a quarter, before and after.
# 24 steps, not the preset's 40, to keep the part within an hour.
DIFFUSION_FLAGS = "--steps 24 --eval-every 12 --eval-samples 4 --eval-budgets 24:24 24:6"

# One factor at a time; a step has 512 responses in each. 20 steps, not 60, to keep the full run within four hours.
NOISE_ROWS = ("grpo", "delta, neutral", "delta", "gctca, neutral", "gctca prompt", "datc, neutral", "datc")
NOISE_STEPS = "--steps 20"
CONDITIONS = {
    "as it is": "",
    "groups of 4": "--group-size 4 --prompts-per-step 128",
    "groups of 16": "--group-size 16 --prompts-per-step 32",
    "3 steps of arithmetic": "--story-steps 3",
    "5 steps of arithmetic": "--story-steps 5 --max-new-tokens 48",
    "5 % of rewards flipped": "",  # through flipped.py
}

BENCHMARKS = {"bench_logps": "--quick", "bench_sampling": "--toy-only --pairs 1", "bench_step": "--toy-only --pairs 1",
              "bench_diffusion": "--toy-only --pairs 1", "bench_trl": None}  # name -> its flags in a quick run; None: not in it

# A quick run shows that everything works and what it looks like; its numbers mean nothing.
QUICK = "--steps 2 --prompts-per-step 8 --eval-problems 16 --eval-samples 2 --eval-every 1 --warmup-steps 100"
QUICK_OF = {"datc.py": "--reward-steps 20", "dtca.py": "--table-rollouts 8"}
SEEDS = {"localisation": range(5), "toy": range(3), "learning": range(5), "diffusion": range(3), "noise": range(3)}

# Minutes of a full part on two cores: guesses, until results/PART.json holds a measured time.
MINUTES = {"localisation": 5, "toy": 8, "learning": 75, "diffusion": 60, "noise": 60, "smollm2": 15, "cost": 10,
           "plan": 1, "tables": 1}


def read_rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    temporary.rename(path)


def seeds_of(part, options):
    return options.seeds if options.seeds is not None else list(SEEDS[part])[:1 if options.quick else None]


# ---- training runs: learning, diffusion, noise ---------------------------------------------------------------------

def warm_starts(options, scripts, story_steps):
    """Make the toy's checkpoints before runs start side by side: two of them must not train the same one at once."""
    import common
    import daca
    import datc
    size = ["--checkpoints", str(options.work / "checkpoints"), "--story-steps", str(story_steps),
            *(["--warmup-steps", "100"] if options.quick else [])]
    scripts = {Path(script).name for script in scripts}
    if scripts & {"daca.py", "dtca.py"}:
        common.load_diffusion_policy(common.parse_args(daca.Args, daca.TOY, size))
    if scripts - {"daca.py", "dtca.py"}:
        args = common.parse_args(datc.Args, datc.TOY, size + (QUICK_OF["datc.py"].split() if options.quick else []))
        common.load_policy(args)
        if "datc.py" in scripts:
            datc.load_reward_model(args)


def run_folder(options, label, seed):
    return options.work / "runs" / f"{re.sub('[^a-z0-9]+', '-', label)}-seed{seed}"


def run_script(options, label, script, flags, seed):
    """One training run in runs/: continues an interrupted one, starts over one that has no checkpoint yet."""
    folder, log = run_folder(options, label, seed), options.work / "runs" / "experiments.log"
    arguments = [*script.split(), "--name", folder.name, "--seed", str(seed), *flags.split()]
    if options.quick:
        arguments += [*QUICK.split(), *QUICK_OF.get(script.split()[-1], "").split()]
    if options.steps:
        arguments += ["--steps", str(options.steps)]
    if not (folder / "done").exists():
        resume = []
        if (folder / "checkpoint").exists() or (folder / "checkpoint.old").exists():
            resume = ["--resume"]
        elif folder.exists():
            subprocess.run(["rm", "-r", str(folder)], check=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a") as file:
            subprocess.run([sys.executable, str(ROOT / arguments[0]), *arguments[1:], *resume], cwd=options.work,
                           check=True, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
        (folder / "done").touch()
    return read_rows(folder / "metrics.csv"), " ".join(arguments)


def run_all(options, path, jobs, order):
    """Train every job and keep one line for each in `path`: before and after, the evaluations along the way, seconds.

    jobs: [(key, label, script, flags, seed)], key: the columns that name the line, e.g. {"row": "delta", "seed": 1}.
    order: from a line's key to where it stands in the file. Lines of other keys stay.
    """
    options.trained = sum(not (run_folder(options, label, seed) / "done").exists() for _, label, _, _, seed in jobs)
    name = lambda r: tuple(str(r[column]) for column in jobs[0][0])
    mine = {name(job[0]) for job in jobs}
    kept = [r for r in (read_rows(path) if path.exists() else []) if name(r) not in mine]

    def one(job):
        key, label, script, flags, seed = job
        rows, command = run_script(options, label, script, flags, seed)
        evaluated = [r for r in rows if r.get("eval_mean")]
        first, last = evaluated[0], evaluated[-1]
        budgets = {f"{when}_{name}": row[name] for name in first if re.fullmatch(r"eval_mean@\d+:\d+", name)
                   for when, row in (("before", first), ("after", last))}
        return {**key, "steps": last["step"], "before_mean": first["eval_mean"], "after_mean": last["eval_mean"],
                "before_greedy": first["eval_greedy"], "after_greedy": last["eval_greedy"],
                **budgets,
                "reward_first": rows[1]["reward"], "reward_last": rows[-1]["reward"],
                "seconds": f"{sum(float(r['seconds']) for r in rows):.1f}",
                "curve": " ".join(f"{r['step']}:{float(r['eval_mean']):.4f}" for r in evaluated), "command": command}

    with ThreadPoolExecutor(options.jobs) as pool, tqdm(total=len(jobs), desc=path.name) as bar:
        done = []
        for result in pool.map(one, jobs):
            done.append(result)
            write_rows(path, sorted(kept + done, key=order))
            bar.update()


def learning(options, table=LEARNING, part="learning"):
    """Accuracy before, along the way and after, and seconds, of every row and seed -> results/learning.csv."""
    names = options.only or list(table)
    warm_starts(options, [table[name][0] for name in names], 2)
    flags = DIFFUSION_FLAGS if table is DIFFUSION else "--eval-every 10"
    jobs = [({"row": name, "seed": seed}, name, table[name][0], f"{table[name][1]} {flags}", seed)
            for seed in seeds_of(part, options) for name in names]
    run_all(options, options.results / f"{part}.csv", jobs, lambda r: (list(table).index(r["row"]), int(r["seed"])))
    learning_picture(table, part, options.results)


def diffusion(options):
    learning(options, DIFFUSION, "diffusion")


def noise(options):
    """Some rows of `learning` under one changed condition at a time -> results/noise.csv.

    --only takes names of rows, of conditions, or both.
    """
    rows = [n for n in NOISE_ROWS if not options.only or n in options.only] or NOISE_ROWS
    conditions = [c for c in CONDITIONS if not options.only or c in options.only] or CONDITIONS
    if options.quick and not options.only:
        rows = ("grpo",)
    for steps in (2, 3, 5):
        if any(f"{steps} steps" in c or (steps == 2 and "steps" not in c) for c in conditions):
            warm_starts(options, [LEARNING[n][0] for n in rows], steps)
    jobs = []
    for condition in conditions:
        for seed in seeds_of("noise", options):
            for name in rows:
                script, flags, _ = LEARNING[name]
                script = f"notebooks/flipped.py {script}" if "flipped" in condition else script
                jobs.append(({"condition": condition, "row": name, "seed": seed}, f"noise-{condition}-{name}", script,
                             f"{flags} {CONDITIONS[condition]} {NOISE_STEPS} --eval-every 0", seed))
    run_all(options, options.results / "noise.csv", jobs,
            lambda r: (list(CONDITIONS).index(r["condition"]), NOISE_ROWS.index(r["row"]), int(r["seed"])))


# ---- where the credit goes -----------------------------------------------------------------------------------------

def localisation(options):
    """Rank and size of the first wrong token's credit, every set, method and seed -> results/localisation.csv."""
    import localisation as measure
    sizes = {"checkpoints": str(options.work / "checkpoints")}
    if options.quick:
        sizes.update(warmup_steps=100, reward_steps=20, table_rollouts=8)
    names, path = options.only or measure.SETS, options.results / "localisation.csv"
    rows = [r for r in (read_rows(path) if path.exists() else []) if r["set"] not in names]
    for name in names:
        for seed in tqdm(seeds_of("localisation", options), desc=f"localisation, {name}"):
            rows += measure.localise(name, seed, sizes, prompts=16 if options.quick else 64)
            write_rows(path, sorted(rows, key=lambda r: measure.SETS.index(r["set"])))
    localisation_picture(options.results)
    measure.pictures(options.results, sizes)


# ---- the toy as a new user runs it, a real checkpoint, the benchmarks ----------------------------------------------

def toy(options):
    """Default grpo.py for each seed, from nothing, with the seconds that it prints itself -> results/toy.csv."""
    rows = []
    for seed in seeds_of("toy", options):
        label = f"toy-seed{seed}"
        subprocess.run(["rm", "-rf", str(options.work / "runs" / label)], check=True)
        with tempfile.TemporaryDirectory() as checkpoints:
            command = [sys.executable, str(ROOT / "grpo.py"), "--name", label, "--seed", str(seed),
                       "--checkpoints", checkpoints, *(QUICK.split() if options.quick else [])]
            printed = subprocess.run(command, cwd=options.work, capture_output=True, text=True, check=True).stdout
        metrics = [r for r in read_rows(options.work / "runs" / label / "metrics.csv") if r["eval_mean"]]
        first, last, best = metrics[0], metrics[-1], next(name for name in metrics[0] if name.startswith("eval_pass@"))
        row = {"seed": seed}
        for title, column in (("sampled", "eval_mean"), ("greedy", "eval_greedy"), (best.removeprefix("eval_"), best)):
            row |= {f"{title} before": f"{float(first[column]):.3f}", f"{title} after": f"{float(last[column]):.3f}"}
        row["seconds, warm start included"] = re.search(r"(\d+) s after the script was started", printed)[1]
        rows.append(row)
        write_rows(options.results / "toy.csv", rows)


SMOLLM2_FEW = "--steps 5 --prompts-per-step 2 --group-size 4 --eval-problems 16 --eval-samples 2"
SMOLLM2 = {  # flags besides the shared ones; the first row is 20 steps of plain GRPO, the others show that they run
    "grpo.py": "--steps 20 --beta 0 --prompts-per-step 3 --group-size 4 --eval-problems 16 --eval-samples 2",
    "delta.py": SMOLLM2_FEW, "gctca.py": SMOLLM2_FEW, "gctca.py --guidance group": SMOLLM2_FEW,
    "datc.py": SMOLLM2_FEW + " --beta 0 --reward-steps 60"}


def smollm2(options):
    """Short additions on SmolLM2-135M-Instruct -> results/smollm2.csv: every script runs on a real checkpoint."""
    import smollm2 as package
    if options.quick and package.smollm2_gguf() is None:
        print("smollm2: left out, the checkpoint's package is not installed (see tests/smollm2.py)")
        return
    checkpoints, rng = options.work / "checkpoints", random.Random(0)
    folder, data = package.smollm2_folder(checkpoints), checkpoints / "additions.jsonl"
    with open(data, "w") as file:
        for _ in range(500):
            a, b = rng.randint(1, 20), rng.randint(1, 20)
            question = f"What is {a} + {b}? Answer with just a number."
            file.write(json.dumps({"question": question, "answer": str(a + b)}) + "\n")
    path, order = options.results / "smollm2.csv", list(SMOLLM2)
    chosen = order[:1] if options.quick else options.only or order
    rows = [r for r in (read_rows(path) if path.exists() else []) if r["script"] not in chosen]
    for script in chosen:
        flags = SMOLLM2[script]
        label = "smollm2-" + re.sub(r"\W+", "-", script)
        subprocess.run(["rm", "-rf", str(options.work / "runs" / label)], check=True)
        # The reward model's head is trained on story answers, so datc.py's task is stories.
        task = (["--reward-model", f"train:{folder}", "--max-new-tokens", "48"] if script == "datc.py" else
                ["--data", str(data), "--instruction", "", "--max-new-tokens", "16"])
        shared = ["--model", str(folder), *task, "--prompts-per-step", "4", "--learning-rate", "1e-5",
                  "--eval-every", "10", "--eval-problems", "32", "--save-every", "0", "--name", label]
        tiny = "--steps 2 --prompts-per-step 1 --max-new-tokens 8 --eval-problems 2".split() if options.quick else []
        name, *own = script.split()
        command = [sys.executable, str(ROOT / name), *own, *shared, *flags.split(), *tiny]
        subprocess.run(command, cwd=options.work, check=True)
        first, *metrics = read_rows(options.work / "runs" / label / "metrics.csv")
        last, steps = metrics[-1], [float(r["seconds"]) for r in metrics if not r["eval_mean"]]
        mean = lambda part: statistics.mean(float(r["reward"]) for r in part)
        rows.append({
            "script": script, "steps": last["step"], "reward, first 5 steps": f"{mean(metrics[:5]):.3f}",
            "reward, last 5 steps": f"{mean(metrics[-5:]):.3f}",
            "held-out sampled before": f"{float(first['eval_mean']):.3f}", "after": f"{float(last['eval_mean']):.3f}",
            "greedy before": f"{float(first['eval_greedy']):.3f}", "greedy after": f"{float(last['eval_greedy']):.3f}",
            "seconds per step": f"{statistics.median(steps):.1f}"})
        write_rows(path, sorted(rows, key=lambda r: order.index(r["script"])))


def cost(options):
    """Run the benchmarks; their output, as printed, -> results/NAME.txt."""
    for name in options.only or BENCHMARKS:
        if options.quick and BENCHMARKS[name] is None:
            continue
        flags = BENCHMARKS[name].split() if options.quick else []
        command = [sys.executable, str(ROOT / "tests" / f"{name}.py"), *flags]
        done = subprocess.run(command, cwd=options.work, capture_output=True, text=True, check=True)
        options.results.mkdir(parents=True, exist_ok=True)
        text = re.sub(r"\S*/(?=rm-)", "", done.stdout)  # a temporary folder's name says nothing
        (options.results / f"{name}.txt").write_text(text)
        print(done.stdout)


def plan(options):
    """The memory plan for the usual set-ups, computed and not measured -> results/plan.md. It has no smaller version."""
    if options.quick:
        return
    command = [sys.executable, str(ROOT / "tests" / "gpu_check.py"), "--plan"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    (options.results / "plan.md").write_text(done.stdout)


# ---- statistics and tables -----------------------------------------------------------------------------------------

# Student's t, 97.5 %, by n - 1
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def mean_and_spread(values):
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def mean_and_interval(values):
    """Mean of paired differences and its 95 % t interval, as text; one value has no interval.

    >>> mean_and_interval([0.1, 0.2, 0.3])          # 4.303 * 0.1 / sqrt(3)
    '+0.200 (-0.048 to +0.448)'
    """
    mean = statistics.mean(values)
    if len(values) == 1:
        return f"{mean:+.3f}"
    half = STUDENT[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


def reached(curve, level=0.8):
    """Step at which a curve "step:accuracy ..." crosses `level`: a straight line between two evaluations. Or None.

    >>> reached("0:0.25 8:0.5 16:1.0", level=0.75), reached("0:0.5 10:0.7"), reached("0:0.9 10:0.7")
    (12.0, None, 0.0)
    """
    points = [tuple(map(float, point.split(":"))) for point in curve.split()]
    if points[0][1] >= level:
        return points[0][0]
    for (s0, a0), (s1, a1) in zip(points, points[1:]):
        if a1 >= level:
            return s0 + (s1 - s0) * (level - a0) / (a1 - a0)
    return None


def wall_time(part, results, runs=None):
    """One sentence about the measured wall time of a part of `runs` training runs, or nothing."""
    path = results / f"{part}.json"
    if not path.exists():
        return ""
    wall = json.loads(path.read_text())
    some = f" for {wall['runs']} of them" if wall.get("runs", runs) != runs else ""  # others came from elsewhere
    return f" Wall time{some} {wall['minutes']:.0f} min on {wall['cores']} cores, {wall['jobs']} runs side by side."


def command(part, rows):
    seeds = sorted({int(r["seed"]) for r in rows})
    return f"`python notebooks/experiments.py {part} --seeds {' '.join(map(str, seeds))}`"


def row_of(cells):
    return f"| {' | '.join(cells)} |"


def setting(name, table):
    script, flags, _ = table[name]
    return f"`{f'{script} {flags}'.strip()}`"


def runs_and_time(part, rows, results):
    minutes = sum(float(r["seconds"]) for r in rows) / 60
    return (f"{len(rows)} runs, {minutes:.0f} minutes of one core together.{wall_time(part, results, len(rows))} "
            f"Reproduce: {command(part, rows)}.")


def learning_table(table=LEARNING, part="learning", results=RESULTS):
    """Markdown of a results file: means over seeds, and the paired difference to the neutral row."""
    rows = read_rows(results / f"{part}.csv")
    get = lambda name, column: {r["seed"]: float(r[column]) for r in rows if r["row"] == name}
    heads = ["script and setting", "seeds", "sampled before", "sampled after", "greedy after", "steps to 0.8",
             "seconds to 0.8", "after, minus neutral (same seeds)"]
    lines = [row_of(heads), "|---" * len(heads) + "|"]
    for name, (_, _, neutral) in table.items():
        after, base = get(name, "after_mean"), get(neutral, "after_mean")
        if not after:
            continue
        mine = [(reached(r["curve"]), r) for r in rows if r["row"] == name]
        steps = [step for step, _ in mine if step is not None]
        seconds = [step * float(r["seconds"]) / float(r["steps"]) for step, r in mine if step is not None]
        some = f" ({len(steps)} of {len(mine)})" if 0 < len(steps) < len(mine) else ""
        paired = [after[seed] - base[seed] for seed in after if seed in base]
        columns = [list(get(name, column).values()) for column in ("before_mean", "after_mean", "after_greedy")]
        lines.append(row_of([setting(name, table), str(len(after)), *map(mean_and_spread, columns),
                             f"{statistics.mean(steps):.0f}{some}" if steps else "never",
                             f"{statistics.median(seconds):.0f}" if steps else "never",
                             mean_and_interval(paired) if paired else ""]))
    lines.append("\nMean ± standard deviation over seeds; differences with their 95 % t interval. Steps to 0.8 of "
                 "sampled accuracy by a straight line between two evaluations, mean over the seeds that reach it; "
                 "seconds: those steps times the run's mean seconds per step on one core (evaluation included, warm "
                 "start not), median. " + runs_and_time(part, rows, results))
    return "\n".join(lines)


def diffusion_table(results=RESULTS):
    """Markdown: accuracy before and after at the three budgets, and the paired differences to the neutral row."""
    rows = read_rows(results / "diffusion.csv")
    get = lambda name, column: {r["seed"]: float(r[column]) for r in rows if r["row"] == name}
    columns = {"half": "mean", "full": "eval_mean@24:24", "quarter": "eval_mean@24:6"}
    heads = ["script and setting", "seeds", *(f"{name}: before -> after" for name in columns), "greedy, half: before -> after",
             *(f"{name}: after, minus neutral" for name in columns), "seconds"]
    lines = [row_of(heads), "|---" * len(heads) + "|"]
    for name, (_, _, neutral) in DIFFUSION.items():
        if not get(name, "steps"):
            continue
        cells = []
        for column in (*columns.values(), "greedy"):
            before, after = get(name, f"before_{column}"), get(name, f"after_{column}")
            cells.append(f"{statistics.mean(before.values()):.3f} -> {mean_and_spread(list(after.values()))}")
        for column in columns.values():
            after, base = get(name, f"after_{column}"), get(neutral, f"after_{column}")
            paired = [after[seed] - base[seed] for seed in after if seed in base]
            cells.append(mean_and_interval(paired) if paired else "")
        seconds = list(get(name, "seconds").values())
        lines.append(row_of([setting(name, DIFFUSION), str(len(seconds)), *cells, f"{statistics.mean(seconds):.0f}"]))
    lines.append("\nSampled accuracy on held-out problems, trained at 12 denoising steps for 24 tokens (half), evaluated also at "
                 "24 (full) and 6 (quarter); mean, and after training mean ± standard deviation over seeds; differences with "
                 "their 95 % t interval. " + f"{rows[0]['steps']} steps of 512 responses. Seconds on one core, evaluations "
                 "included, warm start not, another run beside it. " + runs_and_time("diffusion", rows, results))
    return "\n".join(lines)


def noise_table(results=RESULTS):
    """Markdown: accuracy after training under each condition, and what a method adds to its neutral row there."""
    rows = read_rows(results / "noise.csv")
    shown = [c for c in CONDITIONS if any(r["condition"] == c for r in rows)]
    get = lambda condition, name: {r["seed"]: float(r["after_mean"]) for r in rows
                                   if (r["condition"], r["row"]) == (condition, name)}
    before = [[float(r["before_mean"]) for r in rows if r["condition"] == c] for c in shown]
    lines = [row_of(["script and setting", *shown]), "|---" * (1 + len(shown)) + "|",
             row_of(["before training", *(f"{statistics.mean(b):.3f}" for b in before)])]
    for name in NOISE_ROWS:
        after, neutral = [get(c, name) for c in shown], LEARNING[name][2]
        if any(after):
            cells = (mean_and_spread(list(a.values())) if a else "" for a in after)
            lines.append(row_of([setting(name, LEARNING), *cells]))
        bases = [get(c, neutral) for c in shown]
        paired = [[a[seed] - base[seed] for seed in a if seed in base] for a, base in zip(after, bases)]
        if any(paired):
            lines.append(row_of(["minus neutral", *(mean_and_interval(d) if d else "" for d in paired)]))
    lines.append(f"\nSampled accuracy on held-out problems after {rows[0]['steps']} steps, mean ± standard deviation "
                 "over seeds; differences with their 95 % t interval. 512 responses in a step under every condition. "
                 + runs_and_time("noise", rows, results))
    return "\n".join(lines)


SET_TITLES = {"toy": "The toy: a wrong number is also a surprising one",
              "hard": "The hard set: the wrong number is as likely as the right one",
              "diffusion": "Masked diffusion, on the toy"}


def localisation_table(results=RESULTS):
    """Markdown: one table per set, a line per method, mean and bootstrap interval over seeds."""
    from localisation import interval
    rows, lines = read_rows(results / "localisation.csv"), []
    heads = ["credit", "AUC, all tokens", "of the score behind it", "AUC, results only", "blame of that token (mean 1)",
             "right responses: credit on numbers"]
    for name, title in SET_TITLES.items():
        part = [r for r in rows if r["set"] == name]
        if not part:
            continue
        lines += [f"**{title}.**\n", row_of(heads), "|---" * len(heads) + "|"]
        for method in dict.fromkeys(r["method"] for r in part):
            values = lambda column: [float(r[column]) for r in part if r["method"] == method]
            spread = lambda column: "{:.3f} ({:.3f} to {:.3f})".format(*interval(values(column)))
            mean = lambda column, digits: f"{statistics.mean(values(column)):.{digits}f}"
            score = mean("auc_score", 3).replace("nan", "")  # not every credit is a monotone map of one score
            lines.append(row_of([method, spread("auc"), score, spread("auc_results"), mean("relative", 2),
                                 mean("share_numbers", 2)]))
        seen = {r["seed"]: r for r in part}.values()  # what follows is the same for all methods
        total = lambda column: sum(int(r[column]) for r in seen)
        mean = lambda column: statistics.mean(float(r[column]) for r in seen)
        lines.append(f"\n{len(seen)} seeds, {total('responses')} responses, {total('wrong')} of them wrong with a "
                     f"first wrong result and a mixed group, sampled accuracy {mean('accuracy'):.2f}; of the wrong "
                     f"ones {mean('other_fault'):.0%} have another first fault and are left out.\n")
    seconds = sum({(r["set"], r["seed"]): float(r["seconds"]) for r in rows}.values())
    lines.append("Mean and 95 % bootstrap interval over seeds (new problems and samples, the same warm start). "
                 f"{seconds:.0f} s in all, without the warm starts.{wall_time('localisation', results)} "
                 f"Reproduce: {command('localisation', rows)}.")
    return "\n".join(lines)


def plain_table(part, results=RESULTS):
    """A results file as it is, in Markdown."""
    rows = read_rows(results / f"{part}.csv")
    lines = [row_of(rows[0]), row_of("---" for _ in rows[0]), *(row_of(r.values()) for r in rows)]
    return "\n".join(lines) + f"\n\nReproduce: `python notebooks/experiments.py {part}`.{wall_time(part, results)}"


def cost_text(results=RESULTS):
    texts = [(name, results / f"{name}.txt") for name in BENCHMARKS]
    return "\n".join(f"`python tests/{name}.py`\n\n```text\n{path.read_text().strip()}\n```\n"
                     for name, path in texts if path.exists())


TABLES = {  # name between the README's markers -> text, made from the files in the folder `results`
    "localisation": localisation_table,
    "toy": lambda results: plain_table("toy", results),
    "smollm2": lambda results: plain_table("smollm2", results),
    "learning": lambda results: learning_table(LEARNING, "learning", results),
    "diffusion": diffusion_table,
    "noise": noise_table,
    "cost": cost_text,
    "plan": lambda results: (results / "plan.md").read_text() + "\nPlanned, not measured. The CUDA context (0.3 to 0.6 GiB) "
    "and fragmentation come on top. Reproduce: `python notebooks/experiments.py plan`."}


def measured(results):
    """The tables for which there are results."""
    return [name for name in TABLES if (results / f"{name}.csv").exists() or (results / f"{name}.md").exists() or
            (name == "cost" and cost_text(results))]


def render(text, results=RESULTS):
    """`text` with what stands between its markers <!-- table NAME --> and <!-- end --> made anew from the results."""
    for name in measured(results):
        marker = f"<!-- table {name} -->"
        if marker in text:
            before, rest = text.split(marker)
            text = f"{before}{marker}\n{TABLES[name](results)}\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"
    return text


def tables(options):
    """The README's tables and the pictures; in another folder than the repository's, results/tables.md instead."""
    learning_picture(LEARNING, "learning", options.results)
    learning_picture(DIFFUSION, "diffusion", options.results)
    localisation_picture(options.results)
    if options.results == RESULTS:
        path = ROOT / "README.md"
        path.write_text(render(path.read_text()))
    else:
        text = "\n\n".join(f"## {name}\n\n{TABLES[name](options.results)}" for name in measured(options.results))
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "tables.md").write_text(text + "\n")
        print(text)


# ---- pictures ------------------------------------------------------------------------------------------------------

def pyplot():
    import matplotlib
    if "matplotlib.pyplot" not in sys.modules:  # a notebook has its own way to show pictures
        matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def learning_picture(table=LEARNING, part="learning", results=RESULTS):
    """Curves of sampled accuracy: mean over seeds, band from the worst to the best seed; a panel for each base."""
    if not (results / f"{part}.csv").exists():
        return
    plt, rows, panels = pyplot(), read_rows(results / f"{part}.csv"), {}
    for name, (_, _, neutral) in table.items():
        panels.setdefault(neutral or name, []).append(name)
    panels = {base: names for base, names in panels.items() if any(r["row"] in names for r in rows)}
    figure, axes = plt.subplots(1, len(panels), figsize=(3.4 * len(panels), 3.4), sharey=True, squeeze=False)
    for axis, (base, names) in zip(axes[0], panels.items()):
        for name in names:
            curves = [dict(point.split(":") for point in r["curve"].split()) for r in rows if r["row"] == name]
            steps = sorted(set.intersection(*(set(map(int, c)) for c in curves))) if curves else []
            if steps:
                values = [[float(c[str(step)]) for c in curves] for step in steps]
                line, = axis.plot(steps, [*map(statistics.mean, values)], "--" if name == base else "-",
                                  label=f"{name} ({len(curves)})")
                axis.fill_between(steps, [*map(min, values)], [*map(max, values)], alpha=0.2, color=line.get_color())
        if part == "learning":  # the table's level
            axis.axhline(0.8, color="grey", linewidth=0.5)
        axis.set_xlabel("step")
        axis.legend(fontsize=7)
    axes[0, 0].set_ylabel("sampled accuracy, held out")
    figure.savefig(results / f"{part}.png", dpi=110, bbox_inches="tight")
    plt.close(figure)


def localisation_picture(results=RESULTS):
    """Both AUCs of every method, a panel per set: mean and bootstrap interval over seeds."""
    from localisation import interval
    if not (results / "localisation.csv").exists():
        return
    plt, rows = pyplot(), read_rows(results / "localisation.csv")
    names = [name for name in SET_TITLES if any(r["set"] == name for r in rows)]
    figure, axes = plt.subplots(1, len(names), figsize=(4.6 * len(names), 4.2), sharex=True, squeeze=False)
    for axis, name in zip(axes[0], names):
        part = [r for r in rows if r["set"] == name]
        methods = list(dict.fromkeys(r["method"] for r in part))
        for column, label, shift in (("auc", "among all tokens", -0.12), ("auc_results", "among results", 0.12)):
            found = [interval([float(r[column]) for r in part if r["method"] == m]) for m in methods]
            mean, low, high = map(np.array, zip(*found))
            axis.errorbar(mean, np.arange(len(methods)) + shift, xerr=[mean - low, high - mean], fmt="o", markersize=4,
                          label=label)
        axis.set_yticks(range(len(methods)), methods, fontsize=8)
        axis.invert_yaxis()
        axis.axvline(0.5, color="grey", linewidth=0.5)
        axis.set_title(SET_TITLES[name].replace(": ", ":\n"), fontsize=9)
        axis.set(xlim=(-0.03, 1.03), xlabel="AUC of the first wrong number")
    axes[0, 0].legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(results / "localisation.png", dpi=110, bbox_inches="tight")
    plt.close(figure)


# ---- the command line ----------------------------------------------------------------------------------------------

PARTS = {"localisation": localisation, "toy": toy, "learning": learning, "diffusion": diffusion, "noise": noise,
         "smollm2": smollm2, "cost": cost, "plan": plan, "tables": tables}
RESUMING = ("learning", "diffusion", "noise")  # their wall time adds up over the calls that made them


def timed(part, options):
    """Run a part and keep its wall time in results/PART.json."""
    started, path = time.time(), options.results / f"{part}.json"
    PARTS[part](options)
    minutes = (time.time() - started) / 60
    if part == "tables" or (options.only and part not in RESUMING):  # --only: not the part's whole time
        return
    wall = {"minutes": minutes, "jobs": options.jobs, "cores": os.cpu_count()}
    if part in RESUMING:
        before = json.loads(path.read_text()) if path.exists() else {"minutes": 0, "runs": 0}
        wall["minutes"] += before["minutes"]
        wall["runs"] = before["runs"] + options.trained
    options.results.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(wall | {"minutes": round(wall["minutes"], 2)}) + "\n")
    print(f"{part}: {minutes:.1f} min")


def expected_minutes(part):
    path = RESULTS / f"{part}.json"
    if not path.exists():
        return MINUTES[part]
    wall = json.loads(path.read_text())
    all_runs = len(read_rows(path.with_suffix(".csv"))) if wall.get("runs") else 1  # the time may cover some of them only
    return wall["minutes"] * all_runs / (wall.get("runs") or 1)


def everything(options):
    """All parts, in an order that gives the quickest results first."""
    if options.quick:
        print(f"a quick run of {', '.join(PARTS)}: 5 to 10 minutes on two cores; everything goes to {options.work}")
    else:
        for part in PARTS:
            seeds = f", seeds {seeds_of(part, options)}" if part in SEEDS else ""
            print(f"{part:>14}  {expected_minutes(part):4.0f} min{seeds}")
        print(f"about {sum(map(expected_minutes, PARTS)) / 60:.1f} hours on two cores; finished runs are kept: it may "
              "be stopped and started again")
    for part in PARTS:
        timed(part, options)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "all"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--work", type=Path)
    options = parser.parse_args(argv)
    if options.work is None:
        options.work = Path(tempfile.mkdtemp(prefix="experiments-quick-")) if options.quick else ROOT
    options.work = options.work.resolve()
    options.results = RESULTS if options.work == ROOT else options.work / "results"
    everything(options) if options.part == "all" else timed(options.part, options)
    if options.work != ROOT:
        print(f"results: {options.results}")


if __name__ == "__main__":
    main()
