"""The experiments behind the README's tables. Every part runs alone, resumes after an interruption, and writes a CSV file.

    python notebooks/experiments.py toy                   grpo.py as a new user runs it: warm start included, both cores
    python notebooks/experiments.py learning              each method against the same script at its neutral setting, on the toy
    python notebooks/experiments.py diffusion             the same for the masked diffusion scripts
    python notebooks/experiments.py smollm2               all autoregressive scripts on SmolLM2-135M-Instruct, a few steps
    python notebooks/experiments.py cost                  the benchmarks, their output kept as text
    python notebooks/experiments.py tables                write the README's tables from notebooks/results/*.csv

Options: --seeds 0 1 2   --only NAME ...   --jobs 2 (runs side by side, one thread each)   --steps N (shorter runs, to try it)

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "notebooks" / "results"

# name -> (script, flags, the row it is compared with). A method is compared with ITS OWN SCRIPT at the neutral setting: same
# base, same sampler, same seeds. Against plain grpo.py one would mostly compare the bases (clip range, aggregation, KL).
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

BENCHMARKS = ("bench_logps", "bench_sampling", "bench_step", "bench_diffusion")


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


def run_script(name, script, flags, seed, steps, log):
    """One training run in ROOT/runs; continues an interrupted one, and starts over one that has no checkpoint yet."""
    label = f"{name.replace(', ', '-').replace(' ', '-')}-seed{seed}"
    folder = ROOT / "runs" / label
    command = [sys.executable, script, "--name", label, "--seed", str(seed), *flags.split(), *(["--steps", str(steps)] if steps else [])]
    if not (folder / "done").exists():
        if (folder / "checkpoint").exists() or (folder / "checkpoint.old").exists():
            command.append("--resume")
        elif folder.exists():
            subprocess.run(["rm", "-r", str(folder)], check=True)
        with open(log, "a") as file:
            subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        (folder / "done").touch()
    return read_rows(folder / "metrics.csv"), " ".join(command[1:]).replace(" --resume", "")


def learning(options, table=LEARNING, file="learning.csv"):
    """Before/after accuracy, and seconds, of every row and seed -> results/learning.csv, with the evaluations along the way."""
    names = options.only or list(table)
    log = ROOT / "runs" / "experiments.log"
    log.parent.mkdir(exist_ok=True)
    jobs = [(name, seed) for seed in options.seeds for name in names]
    kept = [r for r in (read_rows(RESULTS / file) if (RESULTS / file).exists() else []) if (r["row"], int(r["seed"])) not in jobs]

    def one(job):
        name, seed = job
        script, flags, _ = table[name]
        rows, command = run_script(name, script, flags, seed, options.steps, log)
        evaluated = [r for r in rows if r.get("eval_mean")]
        first, last = evaluated[0], evaluated[-1]
        return {"row": name, "seed": seed, "steps": last["step"], "before_mean": first["eval_mean"], "after_mean": last["eval_mean"],
                "before_greedy": first["eval_greedy"], "after_greedy": last["eval_greedy"], "reward_first": rows[1]["reward"],
                "reward_last": rows[-1]["reward"], "seconds": f"{sum(float(r['seconds']) for r in rows):.1f}",
                "curve": " ".join(f"{r['step']}:{float(r['eval_mean']):.4f}" for r in evaluated), "command": command}

    with ThreadPoolExecutor(options.jobs) as pool, tqdm(total=len(jobs), desc=file) as bar:
        done = []
        for result in pool.map(one, jobs):
            done.append(result)
            order = list(table)
            write_rows(RESULTS / file, sorted(kept + done, key=lambda r: (order.index(r["row"]), int(r["seed"]))))
            bar.update()


def mean_and_spread(values):
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def learning_table(table=LEARNING, file="learning.csv"):
    """Markdown of a results file: mean ± standard deviation over seeds, and the paired difference to the neutral row."""
    rows = read_rows(RESULTS / file)
    get = lambda name, column: {r["seed"]: float(r[column]) for r in rows if r["row"] == name}
    lines = ["| script and setting | sampled before | sampled after | greedy after | after, minus neutral (same seeds) | seconds |",
             "|---|---|---|---|---|---|"]
    for name, (script, flags, neutral) in table.items():
        after = get(name, "after_mean")
        if not after:
            continue
        paired = [after[s] - get(neutral, "after_mean")[s] for s in after if s in get(neutral, "after_mean")] if neutral else []
        difference = f"{statistics.mean(paired):+.3f} ({min(paired):+.3f} to {max(paired):+.3f})" if paired else ""
        lines.append(f"| `{script} {flags}`".rstrip("` ") + f"` | {mean_and_spread(list(get(name, 'before_mean').values()))} | "
                     f"{mean_and_spread(list(after.values()))} | {mean_and_spread(list(get(name, 'after_greedy').values()))} | {difference} | "
                     f"{statistics.median(get(name, 'seconds').values()):.0f} |")
    seeds = sorted({int(r["seed"]) for r in rows})
    lines.append(f"\nSeeds {', '.join(map(str, seeds))}; mean ± standard deviation over seeds, differences as mean (smallest to largest); "
                 f"seconds: median of a run without the warm start, on one core. Reproduce: `python notebooks/experiments.py "
                 f"{file.removesuffix('.csv')} --seeds {' '.join(map(str, seeds))}`.")
    return "\n".join(lines)


def toy(options):
    """Default grpo.py for each seed, from nothing, with the seconds that it prints itself -> results/toy.csv."""
    rows = []
    for seed in options.seeds:
        label = f"toy-seed{seed}"
        subprocess.run(["rm", "-rf", str(ROOT / "runs" / label)], check=True)
        with tempfile.TemporaryDirectory() as checkpoints:
            command = [sys.executable, "grpo.py", "--name", label, "--seed", str(seed), "--checkpoints", checkpoints]
            printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        metrics = [r for r in read_rows(ROOT / "runs" / label / "metrics.csv") if r["eval_mean"]]
        rows.append({"seed": seed, "sampled before": f"{float(metrics[0]['eval_mean']):.3f}", "sampled after": f"{float(metrics[-1]['eval_mean']):.3f}",
                     "greedy before": f"{float(metrics[0]['eval_greedy']):.3f}", "greedy after": f"{float(metrics[-1]['eval_greedy']):.3f}",
                     "pass@8 before": f"{float(metrics[0]['eval_pass@8']):.3f}", "pass@8 after": f"{float(metrics[-1]['eval_pass@8']):.3f}",
                     "seconds, warm start included": re.search(r"(\d+) s after the script was started", printed)[1]})
        write_rows(RESULTS / "toy.csv", rows)


SMOLLM2 = {  # flags besides the shared ones; the first row is 20 steps of plain GRPO
    "grpo.py": "--steps 20 --beta 0 --prompts-per-step 3 --group-size 4 --eval-problems 16 --eval-samples 2", "delta.py": "--steps 5", "gctca.py": "--steps 5", "gctca.py --guidance group": "--steps 5",
    "datc.py": "--steps 5 --beta 0 --reward-steps 100"}


def smollm2(options):
    """Short additions on SmolLM2-135M-Instruct -> results/smollm2.csv; shows that every script runs on a real checkpoint."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import smollm2 as package
    folder, data, rng = package.smollm2_folder(ROOT / "checkpoints"), ROOT / "checkpoints" / "additions.jsonl", random.Random(0)
    with open(data, "w") as file:
        for _ in range(500):
            a, b = rng.randint(1, 20), rng.randint(1, 20)
            file.write(json.dumps({"question": f"What is {a} + {b}? Answer with just a number.", "answer": str(a + b)}) + "\n")
    rows = []
    for script, flags in SMOLLM2.items():
        label = "smollm2-" + re.sub(r"\W+", "-", script)
        subprocess.run(["rm", "-rf", str(ROOT / "runs" / label)], check=True)
        # The reward model's head is trained on story answers, so datc.py's task is stories.
        task = (["--reward-model", f"train:{folder}", "--max-new-tokens", "48"] if script == "datc.py" else
                ["--data", str(data), "--instruction", "", "--max-new-tokens", "16"])
        shared = ["--model", str(folder), *task, "--prompts-per-step", "4", "--learning-rate", "1e-5", "--eval-every", "10",
                  "--eval-problems", "32", "--save-every", "0", "--name", label]
        subprocess.run([sys.executable, *script.split(), *shared, *flags.split()], cwd=ROOT, check=True)
        metrics = read_rows(ROOT / "runs" / label / "metrics.csv")
        first, last = [r for r in metrics if r["eval_mean"]][0], [r for r in metrics if r["eval_mean"]][-1]
        steps = [float(r["seconds"]) for r in metrics[1:] if not r["eval_mean"]]
        mean = lambda part: statistics.mean(float(r["reward"]) for r in part)
        rows.append({"script": script, "steps": last["step"], "reward, first 5 steps": f"{mean(metrics[1:6]):.3f}",
                     "reward, last 5 steps": f"{mean(metrics[-5:]):.3f}", "held-out sampled before": f"{float(first['eval_mean']):.3f}",
                     "after": f"{float(last['eval_mean']):.3f}", "greedy before": f"{float(first['eval_greedy']):.3f}",
                     "greedy after": f"{float(last['eval_greedy']):.3f}", "seconds per step": f"{statistics.median(steps):.1f}"})
        write_rows(RESULTS / "smollm2.csv", rows)


def cost(options):
    """Run the benchmarks; their output, as printed, -> results/NAME.txt."""
    for name in options.only or BENCHMARKS:
        done = subprocess.run([sys.executable, f"tests/{name}.py"], cwd=ROOT, capture_output=True, text=True, check=True)
        (RESULTS / f"{name}.txt").write_text(done.stdout)
        print(done.stdout)


def plain_table(file):
    """A results file as it is, in Markdown."""
    rows = read_rows(RESULTS / f"{file}.csv")
    lines = [" | ".join(rows[0]), " | ".join("---" for _ in rows[0]), *(" | ".join(r.values()) for r in rows)]
    return "\n".join(f"| {line} |" for line in lines) + f"\n\nReproduce: `python notebooks/experiments.py {file}`."


def cost_text():
    texts = [(name, RESULTS / f"{name}.txt") for name in BENCHMARKS]
    return "\n".join(f"`python tests/{name}.py`\n\n```text\n{path.read_text().strip()}\n```\n" for name, path in texts if path.exists())


TABLES = {"toy": lambda: plain_table("toy"), "smollm2": lambda: plain_table("smollm2"), "learning": learning_table,
          "diffusion": lambda: learning_table(DIFFUSION, "diffusion.csv"), "cost": cost_text}


def tables(_=None):
    """Replace what stands between the README's markers <!-- table NAME --> and <!-- end -->."""
    path = ROOT / "README.md"
    text = path.read_text()
    for name, make in TABLES.items():
        marker = f"<!-- table {name} -->"
        if marker in text and (name == "cost" or (RESULTS / f"{name}.csv").exists()):
            before, rest = text.split(marker)
            text = f"{before}{marker}\n{make()}\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"
    path.write_text(text)


PARTS = {"toy": toy, "learning": learning, "diffusion": lambda options: learning(options, DIFFUSION, "diffusion.csv"), "smollm2": smollm2,
         "cost": cost, "tables": tables}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--steps", type=int)
    chosen = parser.parse_args()
    PARTS[chosen.part](chosen)
