"""Wall time and peak memory of a training step: grpo.py against TRL's GRPOTrainer, on the same model and the same rollouts.

    python tests/bench_trl.py [--pairs 4] [--toy-only]        (needs: pip install trl datasets)

The toy alone takes about a minute and a half; SmolLM2 makes it six or more (a step of one side is a third to half a minute).

Each side is a process of its own, so that its peak memory (ru_maxrss) is its own, and both are alive at once: this process lets them take
one step in turn, ours first in even pairs and TRL's first in odd ones, so that a ratio compares neighbours in time. A step is everything
between two rollouts: sample, reward, score, all inner iterations, log. The first step of each side warms up and is not counted.

Same for both: checkpoint, prompts and their order, group size, lengths, micro-batch, temperature, loss, clip range, KL weight, AdamW,
float32 (TRL: bf16=False), no gradient checkpointing (TRL's default is on), no vLLM. Both sample with `model.generate` after the same
seed, so they draw the same tokens; the last column counts the steps in which they did to the letter (later weights differ by rounding).

Two rows per model. With 2 inner iterations both sides compute old log-probs in a pass of their own: the fair row. With 1 inner iteration TRL
leaves that pass out (its old log-probs are the new ones, detached); our scripts always make it, since the credit of most methods needs
what it returns. That row names the pass, and the ratio without it.
"""
import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


class Turns:
    """A child's end of the line: report the step that has just ended, then wait until the parent allows the next one."""

    def __init__(self):
        self.line, self.started, self.step, self.row = os.fdopen(os.dup(1), "w"), None, 0, {}
        os.dup2(2, 1)  # what the trainers print does not belong on that line

    def next(self):
        import torch
        self.row["seconds"] = time.perf_counter() - self.started if self.started else None
        self.row["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20      # GiB so far
        print(json.dumps(self.row), file=self.line, flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        self.row, self.step, self.started = {}, self.step + 1, time.perf_counter()
        torch.manual_seed(self.step)  # the same noise on both sides

    def drawn(self, ids, mask):
        self.row["tokens"], self.row["text"] = int(mask.sum()), zlib.crc32(str(ids[mask.bool()].tolist()).encode())


def arguments(settings, iterations):
    import common
    import grpo
    return common.parse_args(grpo.Args, grpo.TOY, [
        *settings, "--steps", "1000", "--inner-iterations", str(iterations), "--learning-rate", "1e-6", "--device", "cpu",
        "--save-every", "0", "--eval-every", "0", "--eval-problems", "1", "--eval-samples", "1"])


def prepare(folder, flags, real):
    """The checkpoints that both sides will load, and what this is run with."""
    import torch
    try:
        import datasets  # noqa: F401
        import trl
    except ImportError:
        sys.exit("needs: pip install trl datasets")
    import common
    from smollm2 import smollm2_folder
    common.load_policy(arguments(flags, 1))
    if real:
        smollm2_folder(folder)
    print(f"TRL {trl.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)


def ours(args):
    """grpo.py's own loop, stopped at the top of each step."""
    import grpo
    turns, draw, sample, scoring = Turns(), grpo.draw_batch, grpo.generate, grpo.score

    def draw_batch(*values):
        turns.next()
        return draw(*values)

    def generate(*values):
        rollout = sample(*values)
        turns.drawn(rollout.completion_ids, rollout.completion_mask)
        return rollout

    def score(*values, **wants):
        start = time.perf_counter()
        scores = scoring(*values, **wants)
        turns.row.setdefault("old", time.perf_counter() - start)  # the first of the two is the old policy's, then the reference's
        return scores

    grpo.draw_batch, grpo.generate, grpo.score = draw_batch, generate, score
    grpo.train(args)


def trls(args):
    """TRL's trainer with the same settings, stopped at the top of each rollout."""
    import datasets
    import common
    from trl import GRPOConfig, GRPOTrainer
    model, tokenizer = common.load_policy(args)
    problems = common.encode_prompts(tokenizer, common.load_problems(args)[0], args)
    order = [p for step in range(1, 25) for p in common.draw_batch(problems, step, args.prompts_per_step, args.seed)]
    turns = Turns()

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            turns.next()
            batch = super()._generate_and_score_completions(inputs)
            turns.drawn(batch["completion_ids"], batch["completion_mask"])
            return batch

    def reward(completions, answer, **others):
        return [common.reward_correct(text, {"answer": a}) for text, a in zip(completions, answer)]

    rows = args.prompts_per_step * args.group_size
    micro = min(args.micro_batch, rows)
    Trainer(model=model, reward_funcs=reward, processing_class=tokenizer,
            train_dataset=datasets.Dataset.from_list([
                {"prompt": tokenizer.decode(p["prompt_ids"]), "answer": p["answer"]} for p in order]),
            args=GRPOConfig(
                output_dir=".", max_steps=10_000, per_device_train_batch_size=micro, gradient_accumulation_steps=rows // micro,
                num_generations=args.group_size, num_iterations=args.inner_iterations, max_completion_length=args.max_new_tokens,
                temperature=args.temperature, loss_type="grpo", epsilon=args.clip_low, epsilon_high=args.clip_high, beta=args.beta,
                use_bias_correction_kl=False, learning_rate=args.learning_rate, lr_scheduler_type="constant", weight_decay=0.0,
                max_grad_norm=args.max_grad_norm, shuffle_dataset=False, gradient_checkpointing=False, bf16=False, use_cpu=True,
                logging_steps=args.inner_iterations, save_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False)).train()


def compare(name, settings, iterations, pairs, folder):
    """One row of the table: start both sides, let them step in turn."""
    sides, steps = {}, {"ours": [], "trl": []}
    with open(Path(folder) / "errors.txt", "w+") as errors:
        def report(side):
            line = sides[side].stdout.readline()
            if not line:
                errors.seek(0)
                raise SystemExit(f"the side '{side}' ended early:\n{errors.read()[-4000:]}")
            return json.loads(line)

        for side in steps:
            sides[side] = subprocess.Popen(
                [sys.executable, __file__, "--side", side, "--iterations", str(iterations), "--settings", json.dumps(settings)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder,
                env={**os.environ, "HF_HUB_OFFLINE": "1"})
        loaded = {side: report(side)["peak"] for side in sides}
        for pair in range(pairs + 1):
            for side in list(steps)[::1 if pair % 2 == 0 else -1]:
                sides[side].stdin.write("\n")
                sides[side].stdin.flush()
                steps[side].append(report(side))
        for process in sides.values():
            process.stdin.close()
            process.wait()
    (us, them), same = ([step["seconds"] for step in steps[side][1:]] for side in steps), [
        a["text"] == b["text"] for a, b in zip(steps["ours"], steps["trl"])]
    ratios = [a / b for a, b in zip(us, them)]
    peak = {side: steps[side][-1]["peak"] for side in steps}
    tokens = statistics.mean(step["tokens"] for step in steps["ours"])
    old = [step["old"] for step in steps["ours"][1:]]
    print(f"{name:>12} {iterations:>5} {tokens:>6.0f} | {statistics.median(us):>7.2f} {statistics.median(them):>7.2f} {statistics.median(ratios):>6.2f} "
          f"({min(ratios):.2f}-{max(ratios):.2f}) | {peak['ours']:>5.2f} {peak['trl']:>5.2f} {peak['ours'] / peak['trl']:>6.2f} | "
          f"{peak['ours'] - loaded['ours']:>5.2f} {peak['trl'] - loaded['trl']:>5.2f} | {sum(same)} of {len(same)}", flush=True)
    if iterations == 1:
        without = statistics.median((a - o) / b for a, o, b in zip(us, old, them))
        print(f"{'':>26}| of which our old-log-prob pass, which TRL leaves out: {statistics.median(old):.2f} s; ratio without it {without:.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4, help="pairs of steps on the toy; SmolLM2 gets half as many")
    parser.add_argument("--toy-only", action="store_true")
    parser.add_argument("--side", choices=["ours", "trl", "prepare"], help=argparse.SUPPRESS)
    parser.add_argument("--iterations", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side == "prepare":
        prepare(*options.settings)
    elif options.side:
        {"ours": ours, "trl": trls}[options.side](arguments(options.settings, options.iterations))
    if options.side:
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--checkpoints", folder, "--warmup-steps", "100"]
        cases = [("toy", flags, options.pairs)]
        if not options.toy_only:
            cases.append(("SmolLM2-135M", [*flags, "--model", f"{folder}/smollm2", "--instruction", "Answer with just a number.",
                                           "--prompts-per-step", "2", "--group-size", "4", "--max-new-tokens", "48"], max(1, options.pairs // 2)))
        # Checkpoints are made in a process of their own: a child's ru_maxrss starts at what its parent held when it was started.
        command = [sys.executable, __file__, "--side", "prepare", "--settings", json.dumps([folder, flags, not options.toy_only])]
        if subprocess.run(command, env={**os.environ, "TQDM_DISABLE": "1"}).returncode:
            sys.exit(1)
        print(f"{'':>12} {'inner':>5} {'':>6} | {'seconds a step':>15} {'':>18} | {'peak GiB':>11} {'':>6} | {'above load':>11} |")
        print(f"{'model':>12} {'iter.':>5} {'tokens':>6} | {'grpo.py':>7} {'TRL':>7} {'ratio':>6} {'':11} | {'ours':>5} {'TRL':>5} {'ratio':>6} | {'ours':>5} "
              f"{'TRL':>5} | same text", flush=True)
        for name, settings, pairs in cases:
            for iterations in (2, 1):
                compare(name, settings, iterations, pairs, folder)
