"""One GPU: how much memory a run will need, and whether what is measured on the GPU is what the CPU says.

    python tests/gpu_check.py --plan                                   Markdown table of the usual set-ups
    python tests/gpu_check.py --plan --model LLaDA-8B --lora-rank 16 --dtype bfloat16 --gradient-checkpointing
    python tests/gpu_check.py                                          the check: under 6 minutes on one modern GPU
    python tests/gpu_check.py --device cpu --small                     all of it at small size, in seconds

The plan runs one training pass of the project's own code on tensors that have a shape and no memory, and adds up what is
alive at the same time: nothing is loaded, and no formula can drift from the code. Not in it: the CUDA context (0.3 to 0.6
GiB) and what the allocator loses to fragments. The check needs no download: random weights in the real models' shapes. It
writes gpu_check.md and exits with 1 if a bound is missed.
"""
import argparse
import contextlib
import copy
import gc
import importlib
import os
import statistics
import sys
import tempfile
import time
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common

STARTED = time.time()
GIB = 2**30

# name: (class, diffusion?, the numbers of its published config)
SHAPES = {
    "Qwen3-0.6B": ("Qwen3", False, dict(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                                        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)),
    "LLaDA-8B": ("Llama", True, dict(vocab_size=126464, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, num_attention_heads=32,
                                     num_key_value_heads=32, tie_word_embeddings=False)),
    "SmolLM2-135M": ("Llama", False, dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                                          num_key_value_heads=3, tie_word_embeddings=True)),
    "toy": ("Qwen3", False, dict(vocab_size=148, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
                                 num_key_value_heads=4, head_dim=16, tie_word_embeddings=False)),
}


# ---- the plan ---------------------------------------------------------------------------------------------

class Live(TorchDispatchMode):
    """Adds up the bytes of all tensors alive that were made inside it: .now, .peak. Each storage counts once, until it is freed."""

    def __init__(self):
        super().__init__()
        self.known, self.now, self.peak = weakref.WeakSet(), 0, 0

    def drop(self, size):
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self.known:
                self.known.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.drop, storage.nbytes())
        return result


@contextlib.contextmanager
def bfloat16_arithmetic(on=True):
    """The GPU's autocast, on CPU tensors."""
    plain = common.autocast
    if on:
        common.autocast = lambda device: torch.autocast(device.type, torch.bfloat16)
    try:
        yield
    finally:
        common.autocast = plain


def skeleton(shape, s):
    """The model without memory, ready to be trained: -> model on the meta device, its adapters added."""
    import transformers
    kind, _, numbers = shape
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, kind + "ForCausalLM")(getattr(transformers, kind + "Config")(**numbers)).to(getattr(torch, s.dtype)).eval()
        return common.make_trainable(model, SimpleNamespace(learning_rate=1e-6, seed=0, **vars(s)))[0]


def embody(model, device):
    """Give every parameter and buffer of a skeleton its own memory on `device` (or a fake one), tied ones once; random weights."""
    def fill(tensor):
        new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return new.fill_(1.0) if tensor.ndim == 1 else new.normal_(std=tensor.shape[-1] ** -0.5)

    made = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in made:
                    made[parameter] = torch.nn.Parameter(fill(parameter), parameter.requires_grad)
                module._parameters[name] = made[parameter]
        if hasattr(module, "inv_freq"):  # rotary angles are computed, not random
            with torch.device(device):
                vars(module).update(vars(type(module)(module.config)))
    return model


def log_probs(model, shape, s, device):
    """One micro-batch's log-probs with gradient, by the scorers of the scripts (diffusion: DACA's strata). Always the same ids."""
    N, P, T, generator = s.micro_batch, s.prompt, s.completion, torch.Generator().manual_seed(0)
    ids = torch.randint(2, shape[2]["vocab_size"], (N, P + T), generator=generator).to(device)
    prompt_mask = torch.ones(N, P, dtype=torch.long, device=device)
    prompt_mask[0, 0] = 0  # a batch without any padding would be spared its attention mask
    if shape[1]:
        lm = common.MaskedDiffusionLM(model, 0, [1])
        return common.stratified_logps(lm, ids[:, :P], prompt_mask, ids[:, P:], seeds=range(N), strata=s.strata, chunk_size=s.chunk_size)
    return common.token_logps(model, ids[:, :P], prompt_mask, ids[:, P:], torch.ones(N, T, device=device), chunk_size=s.chunk_size).logps


def saved_bytes(call, model):
    """call() -> its result, and the bytes that it saves for the backward pass, each storage once, without parameters."""
    own, saved = {p.untyped_storage()._cdata for p in model.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    return result, sum(saved.values())


def static_bytes(model):
    """(weights, gradients, AdamW's two moments and its step counter) in bytes, from shapes alone; tied tensors count once."""
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    return (sum(p.nbytes for p in parameters), sum(p.nbytes for p in trained), sum(2 * p.nbytes + 4 for p in trained))


def sampling_bytes(shape, s, autocast=True):
    """What sampling holds beside the weights: keys and values (autoregressive) or the logits of all masked positions."""
    numbers, rows = shape[2], s.sample_batch
    if shape[1]:  # see sample_diffusion: M positions are read, the m of one block are sampled
        M, m = rows * s.completion, rows * min(32, s.completion)
        return numbers["vocab_size"] * max(10 * M, 8 * M + 8 * m, 24 * m)
    head = numbers.get("head_dim") or numbers["hidden_size"] // numbers["num_attention_heads"]
    size = 2 if autocast or s.dtype == "bfloat16" else 4
    cache = 2 * numbers["num_hidden_layers"] * numbers["num_key_value_heads"] * head * size * rows * (s.prompt + s.completion)
    return cache + 4 * 4 * rows * numbers["vocab_size"]


def plan(shape, s, autocast=True):
    """Bytes of each kind for one training step and for sampling; the step is run on tensors without memory."""
    with bfloat16_arithmetic(autocast):
        model = skeleton(shape, s)
        weights, gradients, optimiser = static_bytes(model)
        live = Live()
        with FakeTensorMode(), live:
            embody(model, "cpu")
            for parameter in model.parameters():
                if parameter.requires_grad:  # they exist from the second micro-batch on
                    parameter.grad = torch.empty_like(parameter)
            before = live.peak = live.now
            logps, activations = saved_bytes(lambda: log_probs(model, shape, s, "cpu"), model)
            logps.sum().backward()
        transient = live.peak - before - activations
    copies = weights // 2 if autocast and s.dtype == "float32" else 0  # the bfloat16 copies that autocast keeps for the length of a forward
    reference = weights if s.beta and not s.lora_rank else 0
    rows = {"weights": weights, "reference model": reference, "gradients": gradients, "optimiser": optimiser,
            "activations": activations, "logits, casts, workspace": transient}
    rows["training, peak"] = sum(rows.values())
    rows["sampling, peak"] = weights + reference + optimiser + copies + sampling_bytes(shape, s, autocast)
    return rows


USUAL = [  # for the README: card (GB), model, settings
    (8, "SmolLM2-135M", dict(gradient_checkpointing=True)),
    (24, "Qwen3-0.6B", dict(gradient_checkpointing=True)),
    (24, "Qwen3-0.6B", dict(gradient_checkpointing=True, completion=1024, sample_batch=32)),
    (24, "Qwen3-0.6B", dict(lora_rank=16, dtype="bfloat16")),
    (24, "LLaDA-8B", dict(lora_rank=16, dtype="bfloat16", gradient_checkpointing=True, micro_batch=1, sample_batch=8)),
    (80, "LLaDA-8B", dict(lora_rank=16, dtype="bfloat16", gradient_checkpointing=True, sample_batch=32)),
    (80, "LLaDA-8B", dict(lora_rank=64, dtype="bfloat16", gradient_checkpointing=True, completion=512, sample_batch=32)),
]


def flags_of(s, defaults):
    """The scripts' flags that s stands for."""
    names = {"completion": "max_new_tokens", "prompt": "max_prompt_length"}
    changed = {names.get(k, k): v for k, v in vars(s).items() if v != getattr(defaults, k) and k != "strata"}
    return " ".join(f"--{k.replace('_', '-')}" + ("" if v is True else f" {v}") for k, v in changed.items()) or "(defaults)"


def plan_table(defaults):
    lines = ["| card | model | flags | weights + reference | gradients + optimiser | activations | logits, casts, workspace | training peak | sampling peak |",
             "|---|---|---|---|---|---|---|---|---|"]
    for card, name, values in USUAL:
        s = SimpleNamespace(**{**vars(defaults), **values})
        r = {key: value / GIB for key, value in plan(SHAPES[name], s).items()}
        lines.append(f"| {card} GB | {name} | `{flags_of(s, defaults)}` | {r['weights'] + r['reference model']:.1f} | {r['gradients'] + r['optimiser']:.1f} | "
                     f"{r['activations']:.1f} | {r['logits, casts, workspace']:.1f} | {r['training, peak']:.1f} | {r['sampling, peak']:.1f} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


# ---- the check --------------------------------------------------------------------------------------------

class Report:
    """Rows of gpu_check.md: what, value, bound, whether it holds (a row without a bound is only reported)."""

    def __init__(self, title):
        self.lines, self.failed = [title, "", "| check | value | bound | |", "|---|---|---|---|"], 0

    def add(self, what, value, bound=None, ok=None):
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        self.failed += ok is False
        self.lines.append(f"| {what} | {shown} | {bound or ''} | {'' if ok is None else 'ok' if ok else 'MISSED'} |")
        print(f"{time.time() - STARTED:4.0f} s  {what}: {shown}  {bound or ''} {'' if ok is None else 'ok' if ok else 'MISSED'}", flush=True)


def check_numbers(report, name, shape, s, device):
    """bfloat16 arithmetic on the device against float32 on the CPU: log-probs and gradients. And the ratio before any update."""
    model = embody(skeleton(shape, s), "cpu")
    twin, exact = copy.deepcopy(model).to(device), model.float()
    results = []
    for m, where in ((exact, "cpu"), (twin, device)):
        with bfloat16_arithmetic(m is twin):
            logps = log_probs(m, shape, s, where)
            logps.mean().backward()
        results.append((logps.detach().float().cpu(), torch.cat([p.grad.float().cpu().flatten() for p in m.parameters() if p.requires_grad])))
    (logps, g), (found, h) = results
    error, cosine = (found - logps).abs(), torch.nn.functional.cosine_similarity(g, h, dim=0).item()
    report.add(f"{name}: log-probs, bfloat16 on {device} against float32 on the CPU, largest difference (nats)", error.max().item(), "< 0.25", error.max().item() < 0.25)
    report.add(f"{name}: the same, mean difference", error.mean().item(), "< 0.05", error.mean().item() < 0.05)
    report.add(f"{name}: cosine of the two gradients", cosine, "> 0.98", cosine > 0.98)
    with bfloat16_arithmetic():
        with torch.no_grad():
            old = log_probs(twin, shape, s, device)
        ratio = (log_probs(twin, shape, s, device).detach() - old).exp()
    report.add(f"{name}: mean |ratio - 1| before any update", (ratio - 1).abs().mean().item(), "< 1e-5", (ratio - 1).abs().mean().item() < 1e-5)


def check_memory(report, name, shape, s, device, tolerance=0.15):
    """Peak of two micro-batches with all optimiser states in place, against the plan."""
    expected = plan(shape, s)
    cuda = device != "cpu"
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
        already = torch.cuda.memory_allocated()
    model, live = skeleton(shape, s), Live()
    with bfloat16_arithmetic(), contextlib.nullcontext() if cuda else live:
        embody(model, device)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6, fused=cuda or None)
        for update in range(2):
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            live.peak = live.now
            for _ in range(2):
                log_probs(model, shape, s, device).mean().backward()
            if update == 0:
                optimizer.step()
                optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated() - already if cuda else live.peak
    want = expected["training, peak"] - expected["reference model"]
    report.add(f"{name}: peak memory of a training step, measured / planned ({peak / GIB:.3f} / {want / GIB:.3f} GiB)", peak / want,
               f"1 +- {tolerance}", abs(peak / want - 1) < tolerance)


def check_chunked(report, vocabulary, hidden, tokens, chunk, device):
    """Chunked log-probs against plain log_softmax + gather: value, gradient, time, memory."""
    torch.manual_seed(0)
    head = torch.nn.Linear(hidden, vocabulary, bias=False, device=device)
    h, y = torch.randn(tokens, hidden, device=device, requires_grad=True), torch.randint(vocabulary, (tokens,), device=device)
    ways = {"plain": lambda: head(h).log_softmax(-1).gather(1, y[:, None])[:, 0], "chunked": lambda: common.chunked_logps(h, head, y, 1.0, chunk)[0]}
    values, seconds = {}, {way: [] for way in ways}
    for _ in range(3):
        for way, call in ways.items():
            head.weight.grad = h.grad = None
            start = clock(device)
            logps = call()
            logps.mean().backward()
            seconds[way].append(clock(device) - start)
            values[way] = logps.detach(), h.grad.clone()
    error = max((a - b).abs().max().item() for a, b in zip(*values.values()))
    report.add(f"chunked log-probs, V {vocabulary}: largest difference to plain, value and gradient", error, "< 1e-4 (float32)", error < 1e-4)
    report.add("chunked log-probs: time / plain", min(seconds["chunked"][1:]) / min(seconds["plain"][1:]))


def clock(device):
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def step_seconds(script, flags, device, **patches):
    """Median seconds of a step of script's own train(), the first one left out, and its sampled tokens per second.

    Taken away is only what costs time outside a step: loading, evaluation, saving, pictures. Rewards are random.
    """
    module, steps, found = importlib.import_module(script), 2 if device == "cpu" else 4, []
    args = common.parse_args(module.Args, {}, ["--model", "random", "--instruction", "", "--steps", str(steps), "--device", device, "--name", f"{script}{time.time()}",
                                         *(["--reward-model", "random"] if script == "datc" else []), *flags])

    def log(run, step, row):
        if step:
            clock(device)  # wait for the GPU
            found.append((time.time() - run.started, row["length"]))
    nothing = lambda *inputs: {}
    patches.update(reward_correct=lambda text, problem: float(torch.rand(()) < 0.5), plot_curve=nothing, report_classes=nothing,
                   load_problems=lambda args: (common.story_problems(64, 0), common.story_problems(1, 0, "test")))
    patches = {(module, name): value for name, value in patches.items() if hasattr(module, name)}
    patches.update({(common.Run, name): nothing for name in ("evaluate", "save", "export")})
    patches.update({(common.Run, "log"): log, (common.Run, "evaluation_due"): nothing})
    with contextlib.ExitStack() as stack:
        for (where, name), value in patches.items():
            stack.callback(setattr, where, name, getattr(where, name))
            setattr(where, name, value)
        null = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(null))
        stack.enter_context(contextlib.redirect_stderr(null))
        module.train(args)
    gc.collect()  # models hold themselves in cycles
    seconds = statistics.median(seconds for seconds, _ in found[1:])
    return seconds, args.prompts_per_step * args.group_size * found[-1][1] / seconds


def check_methods(report, device, small, layers, sizes):
    """Step time of each method over its base's: the same script, or grpo.py with the same settings, without the credit."""
    import transformers
    tokenizer = common.toy_tokenizer()
    numbers = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    if small:
        numbers["vocab_size"] = 200  # more than the tokenizer knows, as in the real shapes
    full = SimpleNamespace(lora_rank=0, gradient_checkpointing=False, dtype="float32")
    name = "toy" if small else "Qwen3-0.6B"
    kind, _, shape = SHAPES[name]
    policy = embody(skeleton((kind, False, {**shape, **numbers}), full), device)
    policy.generation_config = transformers.GenerationConfig(eos_token_id=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id)
    with torch.device("meta"):
        judge = transformers.Qwen3ForSequenceClassification(transformers.Qwen3Config(**{**shape, **numbers}, num_labels=1)).eval()
    judge = common.freeze(embody(judge, device))
    load = lambda args, name=None: (copy.deepcopy(policy), tokenizer)
    dapo = ["--clip-high", "0.28", "--beta", "0", "--aggregate", "token"]
    pairs = [("grpo", [], None, []), ("delta", [], "grpo", [*dapo, "--dual-clip", "10", "--mini-batches", "4"]),
             ("gctca", [], "grpo", [*dapo, "--dual-clip", "3", "--mini-batches", "3"]),
             ("gctca", ["--guidance", "group"], "grpo", [*dapo, "--dual-clip", "3", "--mini-batches", "3"]), ("datc", [], "datc", ["--lam", "0"])]
    bounds = {"delta": 1.02, "gctca": 1.15, "gctca --guidance group": 1.03, "datc": 1.09}
    for script, flags, base, base_flags in pairs:
        compare(report, script, flags, base, base_flags, sizes, device, bounds, name, load_policy=load, load_reward_model=lambda args: (judge, tokenizer))
    del policy, judge
    gc.collect()
    name = "toy" if small else f"LLaDA-8B, {layers} layers"
    kind, _, shape = SHAPES["toy" if small else "LLaDA-8B"]
    model = embody(skeleton((kind, True, {**shape, **numbers, "num_hidden_layers": layers}), SimpleNamespace(
        lora_rank=0, gradient_checkpointing=False, dtype="bfloat16")), device)

    def load_diffusion(args, name=None):  # the same weights again: the last run's adapters are taken off
        if hasattr(load_diffusion, "lm"):
            load_diffusion.lm.model.unload()
        load_diffusion.lm = common.MaskedDiffusionLM(model, tokenizer.mask_token_id, [tokenizer.eos_token_id])
        return load_diffusion.lm, tokenizer
    lora = ["--lora-rank", "16", "--dtype", "bfloat16", "--gradient-checkpointing", "--inner-iterations", "2", "--diffusion-steps", str(int(sizes[-1]) // 2)]
    dtca = ["--tagger", "words", "--table-rollouts", "2"]
    for script, flags, base_flags in (("daca", ["--strata", "0"], ["--strata", "0", "--progress", "none"]), ("daca", [], ["--strata", "0", "--progress", "none"]),
                                      ("dtca", dtca, [*dtca, "--pos-low", "1", "--pos-high", "1", "--no-calibration"])):
        compare(report, script, [*lora, *flags], script, [*lora, *base_flags], sizes, device, {"daca --strata 0": 1.01, "dtca": 1.10}, name,
                load_diffusion_policy=load_diffusion)


SECONDS = {}  # of the bases measured so far


def compare(report, script, flags, base, base_flags, sizes, device, bounds, name, **patches):
    """One row: seconds and tokens per second of script's step, and its time over the base's."""
    label = " ".join([script, *(f for f in flags if f in ("--guidance", "group", "--strata", "0"))])
    if device != "cpu" and time.time() - STARTED > 290:
        report.add(f"{name}: {label}", "left out, the time is up")
        return
    known = (base, *base_flags)
    if base and known not in SECONDS:
        SECONDS[known] = step_seconds(base, [*sizes, *base_flags], device, **patches)[0]
    seconds, speed = step_seconds(script, [*sizes, *flags], device, **patches)
    report.add(f"{name}: {label}, seconds of a step; sampled tokens per second of it", f"{seconds:.3f}; {speed:.0f}")
    if base:
        bound = bounds.get(label)
        report.add(f"{name}: {label}, time of a step / base's", seconds / SECONDS[known], bound and f"target {bound}",
                   None if device == "cpu" or not bound else seconds / SECONDS[known] < bound + 0.02)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="print a memory plan; alone: the table of the usual set-ups")
    parser.add_argument("--model", choices=list(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--out", default="gpu_check.md")
    sizes = parser.add_argument_group("of the plan: as the scripts' flags of these names")
    for name, default in dict(micro_batch=8, prompt=512, completion=256, chunk_size=256, sample_batch=64, lora_rank=0, strata=4).items():
        sizes.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    sizes.add_argument("--beta", type=float, default=0.04)
    sizes.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    sizes.add_argument("--gradient-checkpointing", action="store_true")
    options = vars(parser.parse_args())
    what = SimpleNamespace(**{key: options.pop(key) for key in ("plan", "model", "device", "small", "out")})
    s = SimpleNamespace(**options)
    if what.plan:
        if not what.model:
            print("\n".join(plan_table(s)))
            return 0
        for name, size in plan(SHAPES[what.model], s).items():
            print(f"{name:26} {size / GIB:9.3f} GiB")
        return 0
    if what.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device; try --device cpu --small, or --plan", file=sys.stderr)
        return 2
    return check(what, s)


def check(what, s):
    """All checks -> exit code."""
    cuda, small, device = what.device != "cpu", what.small, what.device
    card = torch.cuda.get_device_name() if cuda else "CPU"
    report = Report(f"# gpu_check on {card}, torch {torch.__version__}{', small shapes' if small else ''}")
    folder, out = tempfile.TemporaryDirectory(), Path(what.out).resolve()
    os.chdir(folder.name)  # for runs/
    kind, _, numbers = SHAPES["toy" if small else "LLaDA-8B"]
    llada = lambda layers: ("Llama", True, {**numbers, "num_hidden_layers": layers, **({"vocab_size": 200} if small else {})})
    qwen3 = SHAPES["toy" if small else "Qwen3-0.6B"]
    size = lambda **values: SimpleNamespace(**{**vars(s), **dict(micro_batch=2, prompt=16, completion=16 if small else 48), **values})
    lora = dict(lora_rank=8, dtype="bfloat16", gradient_checkpointing=True)
    check_numbers(report, "Qwen3", qwen3, size(), device)
    check_numbers(report, "LLaDA, LoRA, 1 layer", llada(1), size(**lora), device)
    larger = dict(micro_batch=4, prompt=16, completion=32) if small else dict(micro_batch=8, prompt=256, completion=256)
    check_memory(report, "Qwen3, all weights", qwen3, size(**larger), device)
    check_memory(report, "Qwen3, all weights, gradient checkpointing", qwen3, size(**larger, gradient_checkpointing=True), device)
    layers = 2
    if cuda and not small:  # weights of a block, with room for as much again
        free, block = torch.cuda.mem_get_info()[0], 2 * (4 * 4096**2 + 3 * 4096 * 12288)
        layers = max(1, min(32, int(0.6 * free / block) - 5))
    check_memory(report, f"LLaDA, LoRA, gradient checkpointing, {layers} layers", llada(layers), size(**{**larger, "micro_batch": 2}, **lora), device)
    check_chunked(report, *((500, 32, 64, 16) if small else (151936, 1024, 2048, 256)), device)
    flags = dict(prompts_per_step=1, group_size=4, max_new_tokens=8) if small else dict(prompts_per_step=4, group_size=8, max_new_tokens=64)
    check_methods(report, device, small, layers, [x for k, v in flags.items() for x in (f"--{k.replace('_', '-')}", str(v))])
    report.add("seconds in all", time.time() - STARTED, None if small else "< 360", None if small else time.time() - STARTED < 360)
    out.write_text("\n".join(report.lines) + "\n")
    print(f"written: {out}")
    os.chdir(out.parent)
    return int(report.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
