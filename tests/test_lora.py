"""LoRA, gradient checkpointing and the optimiser, in all six scripts: on a Qwen3-type and a LLaDA-type tiny model."""
import copy
import csv
import dataclasses
import importlib
import importlib.util
import itertools
import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import common
import grpo
from conftest import ROOT, WARMUP

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs: pip install peft")
SETTINGS = SimpleNamespace(lora_rank=4, gradient_checkpointing=False, learning_rate=1e-2, seed=0)
AUTOREGRESSIVE, DIFFUSION = ("grpo", "delta", "gctca", "datc"), ("daca", "dtca")


def changed(**values):
    return SimpleNamespace(**{**vars(SETTINGS), **values})


def qwen3(toy):
    """(policy, its model, a function that scores a fixed batch with a policy) of the autoregressive toy."""
    model, tokenizer, args = copy.deepcopy(toy[0]), *toy[1:]
    torch.manual_seed(1)
    rollout = common.generate(model, tokenizer, [p["prompt_ids"] for p in common.encode_prompts(tokenizer, common.story_problems(3, 7), args)], 2, args)
    return model, lambda m: common.token_logps(m, *rollout.rows(slice(None)), chunk_size=7).logps  # (6,T)


def llada(_):
    """The same of the tiny LLaDA checkpoint, read as LLaDA's are; scored with four strata."""
    lm = common.load_diffusion(ROOT / "tests" / "golden" / "tiny_llada")
    prompt = torch.randint(0, 60, (3, 5), generator=torch.Generator().manual_seed(1))
    batch = prompt, torch.ones_like(prompt), prompt.repeat(1, 2)
    return lm.model, lambda m: common.stratified_logps(common.MaskedDiffusionLM(m, 62, [60]), *batch, seeds=[1, 2, 3], chunk_size=7)  # (3,10)


def train(model, logps, settings, steps=3):
    model, optimizer = common.make_trainable(model, settings)
    for _ in range(steps):
        logps(model).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("make", [qwen3, llada])
def test_the_reference_is_the_base_bit_for_bit(make, toy):
    base, logps = make(toy)
    weights, before = {k: v.clone() for k, v in base.state_dict().items()}, logps(base).detach()
    model, _ = common.make_trainable(base, SETTINGS)
    assert torch.equal(logps(model), before)                       # B = 0: the policy starts as its reference
    model, optimizer = common.make_trainable(make(toy)[0], SETTINGS)
    trained = [p for p in model.parameters() if p.requires_grad]
    for _ in range(3):
        logps(model).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = logps(model).detach()
    assert (after - before).abs().max() > 1e-3
    with torch.no_grad(), common.adapter_off(model):
        assert torch.equal(logps(model), before)
    with torch.no_grad(), common.adapter_off(common.MaskedDiffusionLM(model, 1, [2])):
        assert torch.equal(logps(model), before)
    assert torch.equal(logps(model), after)                        # and the adapter is on again, and trained on
    assert all(p.requires_grad for p in trained) and sum(p.requires_grad for p in model.parameters()) == len(trained)
    now = {k.replace("base_model.model.", "").replace(".base_layer", ""): v for k, v in model.state_dict().items() if "lora_" not in k}
    assert now.keys() == weights.keys() and all(torch.equal(now[k], weights[k]) for k in weights)
    kinds = Counter(name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad)
    layers = base.config.num_hidden_layers
    assert kinds == {k: 2 * layers for k in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")}  # no lm_head
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == [id(p) for p in trained]


def test_models_without_an_adapter_pass_through(toy):
    model, optimizer = common.make_trainable(copy.deepcopy(toy[0]), changed(lora_rank=0))
    with common.adapter_off(model):
        assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))
    assert optimizer.defaults["weight_decay"] == 0 and optimizer.defaults["lr"] == 1e-2
    common.freeze(model.model.embed_tokens)
    assert sum(len(g["params"]) for g in common.make_trainable(model, changed(lora_rank=0))[1].param_groups) == len(list(model.parameters())) - 1


@pytest.mark.parametrize("make", [qwen3, llada])
def test_adapters_are_float32_over_a_bfloat16_base(make, toy):
    base, logps = make(toy)
    before = {k: v.clone() for k, v in base.bfloat16().state_dict().items()}
    model, _ = train(base, logps, SETTINGS)
    dtypes = Counter((p.dtype, p.requires_grad) for p in model.parameters())
    assert set(dtypes) == {(torch.bfloat16, False), (torch.float32, True)}
    assert all(p.detach().abs().sum() > 0 for p in model.parameters() if p.requires_grad)
    after = {k.replace("base_model.model.", "").replace(".base_layer", ""): v for k, v in model.state_dict().items()}
    assert all(torch.equal(after[k], before[k]) for k in before)


@pytest.mark.parametrize("make", [qwen3, llada])
@pytest.mark.parametrize("rank", [0, 4])
def test_gradient_checkpointing_changes_no_number_and_keeps_less(make, rank, toy):
    results = []
    for on in (False, True):
        base, logps = make(toy)
        model, _ = common.make_trainable(base, changed(lora_rank=rank, gradient_checkpointing=on))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.constant_(p, 0.01)
        kept, mine = 0, {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor):
            nonlocal kept
            kept += 0 if tensor.untyped_storage().data_ptr() in mine else tensor.nbytes
            return tensor
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = logps(model).sum()
        loss.backward()
        results.append((loss, [p.grad for p in model.parameters() if p.requires_grad], kept))
    (a, x, much), (b, y, little) = results
    assert torch.equal(a, b) and len(x) == len(y) and all(torch.equal(g, h) for g, h in zip(x, y))
    assert little < 0.4 * much


def test_gradient_checkpointing_leaves_sampling_and_copies_alone(toy, monkeypatch):
    model, tokenizer, args = copy.deepcopy(toy[0]), *toy[1:]
    runs, plain = Counter(), type(model.model.layers[0]).forward

    def counted(self, *inputs, **options):
        runs[id(self), torch.is_grad_enabled(), options.get("use_cache")] += 1
        return plain(self, *inputs, **options)
    common.checkpoint_layers(model)
    twin = copy.deepcopy(model)
    monkeypatch.setattr(type(model.model.layers[0]), "forward", counted)
    ids = torch.arange(6, 12)[None]
    twin(input_ids=ids, use_cache=False).logits.sum().backward()
    assert runs == {(id(layer), True, False): 2 for layer in twin.model.layers}  # the copy's own layers, each run again in the backward pass
    runs.clear()
    monkeypatch.setattr(type(model.model.layers[0]), "forward", plain)
    assert torch.equal(common.generate(model, tokenizer, [[7, 8]], 2, args, greedy=True).completion_ids,
                       common.generate(toy[0], tokenizer, [[7, 8]], 2, args, greedy=True).completion_ids)


def test_peft_missing_and_a_negative_rank(monkeypatch, toy_checkpoints):
    for rank, message in ((-1, "must not be negative"), (8, "pip install peft")):
        monkeypatch.setitem(sys.modules, "peft", None)
        with pytest.raises(common.InputError, match=message):
            common.parse_args(grpo.Args, grpo.TOY, ["--lora-rank", str(rank)])


# ---- whole runs -------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def diffusion_checkpoint(tmp_path_factory):
    """A random LLaDA-type model (LlamaForCausalLM, bidirectional, a mask token) with the toy's tokenizer, as a folder."""
    from transformers import LlamaConfig, LlamaForCausalLM
    tokenizer, folder = common.toy_tokenizer(), tmp_path_factory.mktemp("llada") / "model"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                         initializer_range=0.3, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None))
    model.config.mask_token_id = tokenizer.mask_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def run(toy_checkpoints, diffusion_checkpoint, tmp_path, monkeypatch):
    """run("grpo", "--steps", 2, ...) trains in this process and returns the run's folder; half of the texts are right."""
    monkeypatch.chdir(tmp_path)
    count = itertools.count()

    def train(script, *flags, name=None):
        module = importlib.import_module(script)
        for plot in ("picture", "plot_denoising", "plot_curve", "report_classes"):
            monkeypatch.setattr(module, plot, lambda *a, **k: None, raising=False)
        monkeypatch.setattr(module, "reward_correct", lambda text, problem: float(sum(map(ord, text)) % 2))
        name = name or f"run{next(count)}"
        own = {"datc": ["--reward-steps", "3"], "dtca": ["--table-rollouts", "2"]}.get(script, [])
        if script in DIFFUSION:
            own += ["--model", str(diffusion_checkpoint), "--diffusion-steps", "4"]
        args = common.parse_args(module.Args, module.TOY, [
            "--checkpoints", str(toy_checkpoints), "--warmup-steps", str(WARMUP), "--prompts-per-step", "2", "--group-size", "4", "--eval-problems", "2",
            "--eval-samples", "1", "--eval-every", "0", "--micro-batch", "3", "--mini-batches", "2", "--lora-rank", "4", "--learning-rate", "0.01",
            "--max-new-tokens", "8", "--name", name, *own, *map(str, flags)])
        module.train(args)
        return tmp_path / "runs" / name, args
    return train


def rows(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


@pytest.mark.parametrize("script", AUTOREGRESSIVE + DIFFUSION)
def test_every_script_with_lora_in_bfloat16(script, run, capsys):
    """First update: ratio exactly 1, KL exactly 0 (reference = adapter off). Then the policy moves, and all of it is saved."""
    folder, _ = run(script, "--steps", 2, "--beta", 0.04, "--inner-iterations", 2, "--mini-batches", 1, "--micro-batch", 8,
                    "--gradient-checkpointing", "--dtype", "bfloat16")
    ratio, kl, norm = map(float, re.search(r"mean \|ratio - 1\| = (\S+) .*model = (\S+) .*gradient norm = (\S+) ", "".join(capsys.readouterr())).groups())
    assert ratio == 0 and kl == 0 and norm > 0
    assert all(float(row["kl"]) > 0 for row in rows(folder)[1:])
    assert (folder / "merged" / "model.safetensors").exists() and not (folder / "checkpoint" / "model.safetensors").exists()


@pytest.mark.parametrize("script", ["grpo", "daca"])
def test_resume_with_adapters_is_bit_equal_and_the_merged_export_is_the_policy(script, run):
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file
    flags = ["--beta", 0.04, "--inner-iterations", 2, "--save-every", 2]
    straight, _ = run(script, "--steps", 4, *flags)
    halves, _ = run(script, "--steps", 2, *flags)
    early = load_file(halves / "checkpoint" / "adapter_model.safetensors")
    halves, args = run(script, "--steps", 4, "--resume", *flags, name=halves.name)
    a, b = (load_file(folder / "checkpoint" / "adapter_model.safetensors") for folder in (straight, halves))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) and not all(torch.equal(a[k], early[k]) for k in a)
    x, y = (torch.load(folder / "checkpoint" / "optimizer.pt", weights_only=True)["state"] for folder in (straight, halves))
    assert len(x) == len(a) and all(torch.equal(x[i][k], y[i][k]) for i in x for k in x[i])
    without_evaluation = lambda folder: [{k: v for k, v in row.items() if not k.startswith("eval")} for row in rows(folder)]
    assert without_evaluation(straight) == without_evaluation(halves)
    # The export, read as any checkpoint, against base + adapter.
    ids = torch.randint(6, 60, (3, 9), generator=torch.Generator().manual_seed(2))
    logits = []
    for name in (args.model, straight / "merged"):
        policy = (common.load_diffusion_policy if script == "daca" else common.load_policy)(args, name)[0]
        model = policy.model if script == "daca" else policy
        if name == args.model:
            model, _ = common.make_trainable(model, args)
            plain = model(input_ids=ids).logits.detach()
            set_peft_model_state_dict(model, a)
        else:
            assert not any("lora" in key for key in model.state_dict())
        with torch.no_grad():
            logits.append(model(input_ids=ids).logits)
    assert (logits[0] - logits[1]).abs().max() < 1e-5 < 1e-3 < (logits[0] - plain).abs().max()
    module = importlib.import_module(script)
    module.train(dataclasses.replace(args, model=str(straight / "merged"), eval_only=True, resume=False, lora_rank=0))


# ---- the inner loop never waits for the device -------------------------------------------------------------------

# Host-side numbers: generators' seeds and counts live on the CPU, so reading them waits for nothing. transformers asks
# once per forward whether anything is padded, to pick a faster kernel (autoregressive models; we leave that to it).
ON_THE_HOST = {"row_uniforms", "draw_strata", "uni_logps", "state_logps", "slices"}


class Watch(TorchDispatchMode):
    """Collects which function of this project (or of transformers) asks for a tensor's value or a data-dependent size."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        boolean = name in ("index", "index_put", "index_put_") and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if boolean or name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim", "_unique2", "repeat_interleave"):
            frame = sys._getframe()
            while (frame.f_code.co_name == "__torch_dispatch__" or frame.f_code.co_name.startswith("<")  # a comprehension is its function's
                   or not any(part in frame.f_code.co_filename for part in (str(ROOT) + "/", "/transformers/"))):
                frame = frame.f_back
            self.found["transformers" if "/transformers/" in frame.f_code.co_filename else frame.f_code.co_name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("script, flags", [*((s, []) for s in AUTOREGRESSIVE), ("dtca", []), ("daca", ["--strata", 4]), ("daca", ["--strata", 0]),
                                           ("daca", ["--strata", 0, "--base", "coupled"]), ("daca", ["--strata", 0, "--base", "uni"])])
def test_no_synchronising_call_in_the_inner_loop(script, flags, run, monkeypatch):
    """With an index tensor, .item() or a boolean mask in the micro-batch loop the CPU would wait for the GPU there."""
    module, watch, loops = importlib.import_module(script), Watch(), 0

    def watched(rows, size):
        nonlocal loops
        pieces = common.slices(rows, size)
        assert all(isinstance(piece, slice) for piece in pieces)
        with watch:
            for piece in pieces:
                loops += 1
                yield piece
    monkeypatch.setattr(module, "slices", watched)
    for word in ("cpu", "tolist", "numpy"):
        plain = getattr(torch.Tensor, word)
        monkeypatch.setattr(torch.Tensor, word, lambda self, *a, plain=plain, word=word, **k: (
            watch.found.update([word]) if torch.utils._python_dispatch._get_current_dispatch_mode() is watch else None, plain(self, *a, **k))[1])
    run(script, "--steps", 1, "--beta", 0.04, "--inner-iterations", 2, *flags)
    assert loops >= 4
    assert set(watch.found) <= (ON_THE_HOST if script in DIFFUSION else {"transformers"}), watch.found
