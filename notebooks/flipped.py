"""Run one of the scripts with noisy rewards: 5 % of the training rewards are turned over, evaluation stays verified.

    python notebooks/flipped.py grpo.py --steps 30 --seed 1     arguments after the script's name are the script's

Used by `python notebooks/experiments.py noise`. Only the name that the script itself calls in step 2 is replaced, so
common.evaluate goes on with the true one: the curve says how well the policy answers, whatever it was told.
"""
import importlib
import sys
from pathlib import Path

import torch

RATE = 0.05  # share of rewards that are wrong


def flip(reward, rate=RATE):
    """A reward function of 0 and 1 that is wrong at `rate`. "Cannot be scored" (None) stays.

    The draws come from torch's global generator, which the scripts seed in every step: a resumed run stays bit-equal.
    """
    def flipped(text, problem):
        value = reward(text, problem)
        return value if value is None or torch.rand(()).item() >= rate else 1.0 - value
    return flipped


def flip_scores(judge, rate=RATE):
    """The same for datc.py, whose reward is a score without a scale: a flipped one is reflected at the batch's mean.

    Its gradient, the direction of the credit, stays as it is: only the reward is noisy.
    """
    def flipped(*args):
        scores, gradients, scored = judge(*args)                                   # (N,), (N,T,d), (N,T)
        chosen = torch.rand(scores.shape) < rate                                   # (N,) bool
        return torch.where(chosen, 2 * scores.nanmean() - scores, scores), gradients, scored
    return flipped


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import common
    sys.argv = sys.argv[1:]
    script = importlib.import_module(Path(sys.argv[0]).stem)
    if hasattr(script, "judge"):
        script.judge = flip_scores(script.judge)
    else:
        script.reward_correct = flip(script.reward_correct)
    common.main(script.train, script.Args, script.TOY, script.__doc__)
