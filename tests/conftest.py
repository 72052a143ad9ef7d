"""Shared by all tests: the scripts' folder on the path, golden numbers, and one toy checkpoint for the whole run."""
import json
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tiny models only lose time to a second thread

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
WARMUP = 100  # a short warm start: enough to answer in the right form, not to answer well


def golden(name):
    """Cases of tests/golden/NAME.json: inputs in the functions' argument names, outputs under "want"."""
    return json.loads((ROOT / "tests" / "golden" / f"{name}.json").read_text())


@pytest.fixture(scope="session")
def toy_checkpoints(tmp_path_factory):
    """A --checkpoints folder that holds the autoregressive toy; pass --warmup-steps WARMUP with it."""
    import common
    folder = tmp_path_factory.mktemp("checkpoints")
    common.toy_policy(folder / f"toy-policy-2steps-{WARMUP}", WARMUP, story_steps=2)
    return folder


@pytest.fixture(scope="session")
def toy(toy_checkpoints):
    """(model, tokenizer, args) of that toy. Do not train it in place: copy it."""
    import common
    import grpo
    args = common.parse_args(grpo.Args, grpo.TOY, ["--checkpoints", str(toy_checkpoints), "--warmup-steps", str(WARMUP)])
    return *common.load_policy(args), args


@pytest.fixture
def run_script(tmp_path, toy_checkpoints):
    """run_script("grpo.py", "--steps", "2", ...) -> CompletedProcess, in an empty folder, small sizes, one thread."""
    def run(script, *flags, small=True, code=0, cwd=tmp_path):
        flags = list(map(str, flags))
        if small:
            flags = ["--checkpoints", str(toy_checkpoints), "--warmup-steps", str(WARMUP), "--prompts-per-step", "4", "--group-size", "4",
                     "--eval-problems", "4", "--eval-samples", "2"] + flags
        done = subprocess.run([sys.executable, str(ROOT / script), *flags], cwd=cwd, capture_output=True, text=True,
                              timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
        assert done.returncode == code, done.stdout + done.stderr
        return done
    return run
