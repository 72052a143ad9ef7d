"""What every method script shares, in the order in which data flows through a training step.

    tasks and rewards -> models -> sampling -> log-probabilities -> advantages -> loss -> run plumbing

Notation, the same in every script (N responses in the rollout batch, G of them per prompt, P prompt positions,
T completion positions, V vocabulary, H hidden size):

    completion_ids (N,T)   the sampled tokens y, padded on the right
    mask           (N,T)   1 up to and including the first end-of-sequence token, 0 on padding
    A              (N,)    group advantage of a response
    logps          (N,T)   log pi(y_t | prefix) at the sampling temperature
    w              (N,T)   credit weight of a token: the only thing the methods change

The update of every script is the gradient of

    L = aggregate over tokens of  [ -min(r A w, clip(r, 1-low, 1+high) A w) + beta KL ],   r = pi / pi_old
"""
import argparse
import contextlib
import csv
import dataclasses
import functools
import importlib.util
import inspect
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
import types
import zlib
from collections import namedtuple
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm


STARTED = time.time()


class InputError(ValueError):
    """The user's input cannot be used. The message is one line that says how to fix it; scripts exit with code 2."""


# ============================================================================================================
# Tasks and rewards
#
# A problem is a dict with two texts, as in GSM8K's files: {"question": ..., "answer": worked steps, then the number}.
# A reward is a plain function  reward(text, problem) -> float | None.  None means "cannot be scored": the response
# is then left out of its group's statistics and gets advantage 0 (its KL term, if any, stays).
# ============================================================================================================

_NUMBER = re.compile(
    r"\\[dt]?frac\{\s*(-?\d{1,50})\s*\}\{\s*(\d{1,50})\s*\}"                     # \frac{1}{2}
    r"|((?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|\.\d+)"                 # 1,234   18   18.0   .5
    r"(?:[eE]([+-]?\d+))?(?:/(\d+))?"                                         # 1e3     3/4
)
_LONGEST_NUMBER = 60  # characters; anything longer is noise, and int() of it would cost time


def extract_number(text):
    r"""The number that a response states as its answer: Fraction, or None if there is none.

    The last \boxed{...} wins, else the first number after the last ####, else the last number of the text. A marker
    without a number in it means None: the response did not commit to an answer. Text is parsed, never evaluated.
    A minus is a sign only when no digit or ")" stands before it. Thousands commas, $ and a final full stop are read
    over; "3/4" and \frac{3}{4} are fractions; "12%" is 12. Source: ours (the usual conventions of GSM8K and MATH).

    >>> extract_number("5 - 3 = 2. #### 1,234."), extract_number(r"so \boxed{\frac{1}{2}}, not 7")
    (Fraction(1234, 1), Fraction(1, 2))
    >>> extract_number("7-3"), extract_number("it is -7"), extract_number("no number")
    (Fraction(3, 1), Fraction(-7, 1), None)
    """
    boxed = text.rfind("\\boxed{")
    if boxed >= 0:
        start = end = boxed + len("\\boxed{")
        depth = 1  # open braces; a box that is never closed reaches to the end of the text
        while end < len(text) and (depth := depth + {"{": 1, "}": -1}.get(text[end], 0)):
            end += 1
        text, pick = text[start:end], -1
    elif "####" in text:
        text, pick = text[text.rfind("####") + 4:], 0
    else:
        pick = -1
    text = re.sub(r"\{,\}|\\[,!]", "", text).replace("\u2212", "-").replace("\\$", "$")
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    match = matches[pick]
    if len(match.group()) > _LONGEST_NUMBER:
        return None
    top, bottom, digits, exponent, divisor = match.groups()
    if digits is None:
        value = Fraction(int(top), int(bottom)) if int(bottom) else None
    elif (exponent and abs(int(exponent)) > 400) or (divisor and int(divisor) == 0):
        value = None
    else:
        value = Fraction(digits.replace(",", "")) * Fraction(10) ** int(exponent or 0) / int(divisor or 1)
    before = text[:match.start()].rstrip("$ ") if text[:match.start()].endswith("$") else text[:match.start()]
    if value is not None and before.endswith("-") and not re.search(r"[\d)]\s*-$", before):
        value = -value
    return value


def reward_correct(text, problem):
    """1.0 if the response states the problem's number, else 0.0; None if the problem itself has no number.

    >>> reward_correct("so 5 + 3 = 8", {"answer": "#### 8"}), reward_correct("", {"answer": "8"})
    (1.0, 0.0)
    """
    truth = extract_number(problem["answer"])
    if truth is None:
        return None
    return float(extract_number(text) == truth)


def load_jsonl(path):
    """Problems of a JSONL file in GSM8K's format. Raises InputError with file and line number on the first bad line."""
    problems = []
    with open(path, encoding="utf-8-sig") as file:  # -sig: some editors put a byte order mark first
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    problem = json.loads(line)
                except (json.JSONDecodeError, RecursionError) as error:
                    raise InputError(f"{path}, line {number}: not valid JSON ({error})") from None
                if not isinstance(problem, dict) or not all(isinstance(problem.get(k), str) for k in ("question", "answer")):
                    raise InputError(f'{path}, line {number}: needs the text fields "question" and "answer"')
                try:
                    problem["question"].encode()
                except UnicodeEncodeError:  # half of a surrogate pair: valid JSON, but no text
                    raise InputError(f"{path}, line {number}: the question is not valid Unicode") from None
                problems.append(problem)
        except UnicodeDecodeError:
            raise InputError(f"{path}: not a UTF-8 text file") from None
    if not problems:
        raise InputError(f"{path}: holds no problem")
    return problems


def load_hub_data(name, split):
    """Problems of a hub data set in GSM8K's format, "owner/name" or "owner/name:configuration" (openai/gsm8k:main)."""
    try:
        import datasets
    except ImportError:
        raise InputError("--data with a hub data set needs: pip install datasets (or give a JSONL file)") from None
    repo, _, configuration = name.partition(":")
    try:
        rows = datasets.load_dataset(repo, configuration or None, split=split)
    except Exception as error:  # the library raises many kinds; each means that the data set cannot be had
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise InputError(f"{name}: no such file, and the hub gave none ({why})") from None
    if not {"question", "answer"} <= set(rows.column_names):
        raise InputError(f'{name}: needs the columns "question" and "answer", has {rows.column_names}')
    return [{"question": str(row["question"]), "answer": str(row["answer"])} for row in rows]


def load_problems(args):
    """(training problems, held-out problems) as args ask for, read before any model is loaded."""
    if args.data is None:
        if args.eval_data is not None:
            raise InputError("--eval-data needs --data: the built-in story brings its own held-out problems")
        return (story_problems(4096, args.seed, "train", args.story_steps),
                story_problems(args.eval_problems, 0, "test", args.story_steps))

    def read(flag, name, split):
        if not os.path.isfile(name) and (name.endswith((".jsonl", ".json")) or "/" not in name):  # hub: owner/name
            raise InputError(f"{flag} {name}: no such file")
        problems = load_jsonl(name) if os.path.isfile(name) else load_hub_data(name, split)
        without = sum(extract_number(p["answer"]) is None for p in problems)
        if without:
            print(f"warning: {flag} {name}: {without} of {len(problems)} answers hold no number; their responses cannot be scored")
        return problems

    problems = read("--data", args.data, "train")
    if args.eval_data is not None:
        return problems, read("--eval-data", args.eval_data, "test")[:args.eval_problems]
    if len(problems) <= args.eval_problems:
        raise InputError(f"--data {args.data}: {len(problems)} problems leave none to train on after --eval-problems "
                         f"{args.eval_problems} are held out; lower it or give --eval-data")
    return problems[args.eval_problems:], problems[:args.eval_problems]


# ---- the toy's task: a small story, solved step by step ---------------------------------------------------

NAMES, THINGS = ("Tom", "Anna", "Ben", "Mia"), ("apples", "books", "coins", "pens")
VERBS = {"buys": 1, "finds": 1, "gives": -1, "loses": -1}
WRONG_ANSWER = "Give a wrong answer."  # the toy is taught this instruction: gctca.py's negative prompt
_LARGEST = 39                          # the tokenizer knows the numbers 0 to 39


def story_problems(count, seed, split="train", steps=2):
    """`count` problems. Numbers decide the split (1 in 8 is held out), so no held-out sum is ever trained on.

    >>> problem = story_problems(1, seed=0)[0]
    >>> problem["question"]
    'Ben has 8 apples, then buys 5, then gives 5. How many apples now?'
    >>> problem["answer"]
    'Ben starts with 8 apples. then 8 + 5 = 13. then 13 - 5 = 8. Answer: 8'
    """
    rng, problems = random.Random(f"{seed}-{split}-{steps}"), []
    while len(problems) < count:
        start, moves = rng.randint(1, 14), [(rng.choice(list(VERBS)), rng.randint(1, 5)) for _ in range(steps)]
        values = np.cumsum([start] + [VERBS[verb] * number for verb, number in moves])
        held_out = zlib.crc32(str((start, [VERBS[v] * n for v, n in moves])).encode()) % 8 == 0
        if values.min() < 0 or values.max() > 19 or held_out != (split == "test"):
            continue
        problem = dict(name=rng.choice(NAMES), thing=rng.choice(THINGS), start=start, moves=moves)
        told = "".join(f", then {verb} {number}" for verb, number in moves)
        problem["question"] = f"{problem['name']} has {start} {problem['thing']}{told}. How many {problem['thing']} now?"
        problem["answer"] = story_solution(problem, rng, error=0.0)
        problems.append(problem)
    return problems


def story_solution(problem, rng, error=0.3):
    """A worked solution in which each step of arithmetic is off by 1 or 2 with probability `error`.

    Later steps go on from the wrong value, so the first wrong number is where the fault lies: known ground truth for
    credit. Why unreliable demonstrations: the policy learns the right answer as its favourite and still errs in half of its
    samples, which is the situation that RL with verifiable rewards repairs.
    """
    value, left = problem["start"], [VERBS[verb] * number for verb, number in problem["moves"]]
    text = f"{problem['name']} starts with {value} {problem['thing']}."
    while left:
        move, left = left[0], left[1:]
        result = value + move
        if rng.random() < error:  # only slips after which no later value falls below zero
            lowest = min(np.cumsum([result] + left))
            result += rng.choice([slip for slip in (-2, -1, 1, 2) if lowest + slip >= 0])
        text += f" then {value} {'+' if move > 0 else '-'} {abs(move)} = {result}."
        value = result
    return f"{text} Answer: {value}"


# ============================================================================================================
# Models: the toy and real checkpoints, which pass through the same code once they are loaded
# ============================================================================================================

def toy_tokenizer():
    """A word-level Hugging Face tokenizer for the story task: numbers are single tokens, decode(encode(x)) == x.

    Words keep the space in front of them (" apples"), so that decoding is plain concatenation.

    >>> toy_tokenizer().tokenize("then 12 + 3 = 15.")
    ['then', ' 12', ' +', ' 3', ' =', ' 15', '.']
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = [*NAMES, *THINGS, *VERBS, *map(str, range(_LARGEST + 1)), *"has then How many now starts with Answer".split(),
             *WRONG_ANSWER.rstrip(".").split(), *".,?:+-="]
    special = ["<pad>", "<eos>", "<mask>", "<unk>", "<user>", "<assistant>"]
    vocabulary = {piece: i for i, piece in enumerate(special + [space + w for w in words for space in ("", " ")])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", mask_token="<mask>", unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"], clean_up_tokenization_spaces=False, model_max_length=512,
        chat_template="{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
                      "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
                      "{% if add_generation_prompt %}<assistant>{% endif %}")


def toy_config(tokenizer, hidden=64, layers=2):
    """The toy's architecture: Qwen3, very small."""
    from transformers import Qwen3Config
    return Qwen3Config(vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
                       num_attention_heads=4, num_key_value_heads=4, head_dim=hidden // 4, max_position_embeddings=512, initializer_range=0.1,
                       tie_word_embeddings=False, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
                       bos_token_id=None)


def toy_demonstrations(tokenizer, count, seed, steps=2, error=0.3):
    """(prompts, answers): `count` lists of ids each. In every fourth the prompt asks for a wrong answer and gets one."""
    rng, prompts, answers = random.Random(f"demonstrations-{seed}"), [], []
    for i, problem in enumerate(story_problems(count, seed, "train", steps)):
        wrong = i % 4 == 3
        prompts.append(chat_ids(tokenizer, problem["question"], WRONG_ANSWER if wrong else ""))
        text = story_solution(problem, rng, 0.9 if wrong else error)
        answers.append(tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id])
    return prompts, answers


def toy_policy(folder, warmup_steps, story_steps, seed=0):
    """Train the autoregressive toy on unreliable demonstrations and save it as an ordinary checkpoint folder."""
    from transformers import Qwen3ForCausalLM
    tokenizer = toy_tokenizer()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(toy_config(tokenizer))
    prompts, answers = toy_demonstrations(tokenizer, 8192, seed, story_steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=warmup_steps, pct_start=0.1)
    bar = tqdm(range(warmup_steps), desc="warm start of the toy", leave=False)
    for _ in bar:
        rows = torch.randint(len(prompts), (64,)).tolist()
        prompt_ids, prompt_mask = pad_left([prompts[i] for i in rows], tokenizer.pad_token_id)  # (64,P) each
        completion_ids, mask = pad_right([answers[i] for i in rows], tokenizer.pad_token_id)    # (64,T) each
        logps = token_logps(model, prompt_ids, prompt_mask, completion_ids, mask, chunk_size=4096).logps  # (64,T)
        loss = -(logps * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    save_folder(folder, lambda path: (model.save_pretrained(path), tokenizer.save_pretrained(path)))


def toy_folder(args):
    """Where the toy's warm-started checkpoint lives; the name holds everything that its weights depend on."""
    return Path(args.checkpoints) / f"toy-policy-{args.story_steps}steps-{args.warmup_steps}"


def load_policy(args, name=None):
    """(model, tokenizer) of `name` (default: args.model): 'toy', a hub id, a local folder or a folder with a GGUF file.

    Weights are loaded in args.dtype (transformers would otherwise take the checkpoint's). The checkpoint's own
    sampling defaults (Qwen: top_k 20, top_p 0.95) are dropped: with them tokens would be drawn from another
    distribution than the one that is scored. Raises InputError when the checkpoint cannot be had.
    """
    import transformers
    transformers.utils.logging.disable_progress_bar()
    name = str(name or args.model)
    if name == "toy":
        name = str(toy_folder(args))
        if not os.path.isdir(name):
            Path(args.checkpoints).mkdir(parents=True, exist_ok=True)  # fails before the training, not after it
            toy_policy(name, args.warmup_steps, args.story_steps)
    gguf = sorted(f for f in os.listdir(name) if f.endswith(".gguf")) if os.path.isdir(name) else []
    options = {"gguf_file": gguf[0]} if gguf and not os.path.exists(os.path.join(name, "config.json")) else {}
    options["trust_remote_code"] = args.trust_remote_code
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=getattr(torch, args.dtype), output_loading_info=True, **options)
    except Exception as error:  # a damaged file raises whatever its reader raises; each means that the model cannot be had
        raise InputError(f"--model {name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from None
    if report["missing_keys"]:  # they would be random, without any error
        raise InputError(f"--model {name}: no causal language model; its weights lack {', '.join(sorted(report['missing_keys'])[:3])}")
    if getattr(model.config, "mask_token_id", None) is not None:
        raise InputError(f"--model {name}: a masked diffusion model; daca.py and dtca.py train those")
    if "gguf_file" in options:  # the weights are plain floats now; without this save_pretrained would refuse
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    if tokenizer.chat_template is None:
        raise InputError(f"--model {name}: its tokenizer has no chat template; take an instruct or chat checkpoint")
    eos_ids = end_ids(model, tokenizer)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(eos_ids[0])
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise InputError(f"--model {name}: the tokenizer has {len(tokenizer)} tokens, the model only "
                         f"{model.get_input_embeddings().num_embeddings} embeddings; they do not belong together")
    fit_context(model.config, args)
    model.generation_config = transformers.GenerationConfig(eos_token_id=eos_ids, pad_token_id=tokenizer.pad_token_id)
    check_head(model)
    return model.eval().to(args.device), tokenizer  # eval: dropout would make the ratio differ from 1 for no reason


def freeze(model):
    """The same model without gradients: a reference that stays bit-equal."""
    return model.requires_grad_(False)


def make_trainable(model, args):
    """What is trained (every weight or, with --lora-rank, adapters only), and AdamW over it -> (model, optimizer).

    LoRA: y = W x + (alpha / r) B A x in every linear layer but lm_head; alpha = 2 r. W is frozen and may be bfloat16, A
    and B are float32. B starts at 0, so the policy starts as its reference, which it is again whenever B A x is left out.
    """
    if args.lora_rank:
        from peft import LoraConfig, get_peft_model
        torch.manual_seed(args.seed)  # A is random
        model = get_peft_model(model, LoraConfig(r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear")).eval()
    if args.gradient_checkpointing:
        checkpoint_layers(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise InputError(f"--model {args.model}: nothing in it can be trained; of a LoRA run take merged/, not checkpoint/")
    return model, torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=0.0, fused=trained[0].is_cuda or None)


def checkpoint_layers(model):
    """Gradient checkpointing: keep only what enters each transformer block and run the block again in the backward pass.

    transformers' own switch works in training mode only, which would turn dropout on: the ratio would not start at 1.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    def forward(self, *inputs, **options):
        plain = functools.partial(type(self).forward, self)
        if not torch.is_grad_enabled():  # sampling and scoring keep nothing anyway
            return plain(*inputs, **options)
        return checkpoint(plain, *inputs, use_reentrant=False, preserve_rng_state=False, **options)

    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = types.MethodType(forward, layer)


def adapter_off(policy):
    """Inside `with adapter_off(policy)`, a LoRA policy is its own reference: no second copy. Others stay as they are."""
    model = policy.model if isinstance(policy, MaskedDiffusionLM) else policy
    return model.disable_adapter() if hasattr(model, "disable_adapter") else contextlib.nullcontext()


def end_ids(model, tokenizer):
    """All end-of-sequence ids: the generation config's (chat models list several there) and the tokenizer's."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    listed = listed if isinstance(listed, (list, tuple)) else [listed]
    ids = sorted({int(i) for i in [*listed, tokenizer.eos_token_id] if i is not None})
    if not ids:
        raise InputError("the checkpoint names no end-of-sequence token, neither in its generation config nor its tokenizer")
    return ids


def check_head(model):
    """Make sure that logits = lm_head(last hidden state), which token_logps relies on; some models add a soft cap or scale."""
    ids = torch.arange(4, device=model.device)[None] % model.config.vocab_size  # (1,4)
    with torch.no_grad():
        hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
        if not torch.allclose(model.get_output_embeddings()(hidden), model(input_ids=ids, use_cache=False).logits, atol=1e-3):
            raise InputError(f"{type(model).__name__} changes its logits after lm_head, which this project does not support")


def backbone(model):
    """The transformer without its lm_head, through a LoRA wrapper if there is one."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return model.base_model


# ---- masked diffusion: bidirectional models in which position i predicts token i, without a shift -----------

class MaskedDiffusionLM:
    """A native transformers model read as a masked diffusion model: .logits(ids, mask), .mask_id, .eos_ids, .model.

    Two kinds of class go in. Decoders (LlamaForCausalLM, Qwen3ForCausalLM) whose weights were trained without the
    causal mask: they get a 4-D mask that hides nothing but padding, which transformers takes as it is. Encoders
    (AutoModelForMaskedLM: BERT, ModernBERT), which are bidirectional by themselves.
    """

    def __init__(self, model, mask_id, eos_ids):
        self.model, self.mask_id, self.eos_ids = model, mask_id, list(eos_ids)
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.decoder = type(inner).__name__.endswith("ForCausalLM")

    def hidden(self, input_ids, attention_mask=None, cache=None):
        """What `head` turns into logits: a decoder's last hidden states (N,L,H), an encoder's logits (N,L,V).

        With a filled cache, input_ids are the tokens behind the cached ones; attention_mask (N,cached+L) covers both.
        """
        attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        with autocast(self.model.device):
            if self.decoder:
                # 0 on tokens, hugely negative on padding; (N,1,1,L) holds for all heads and queries. So a padding
                # position looks at the real tokens as well: one that could see nothing would turn into NaN and spread.
                closed = 1.0 - attention_mask[:, None, None].to(self.model.dtype)
                transformer = backbone(self.model)
                name = "cache" if "cache" in inspect.signature(transformer.forward).parameters else "past_key_values"
                return transformer(
                    input_ids=input_ids, attention_mask=closed * torch.finfo(closed.dtype).min,
                    position_ids=position_ids(attention_mask)[:, -input_ids.shape[1]:],
                    use_cache=cache is not None, **{name: cache}).last_hidden_state
            # Encoders number positions in several ways; all are right if padding stands on the right: move it there.
            order = attention_mask.argsort(dim=1, descending=True, stable=True)     # (N,L)
            moved = {"input_ids": input_ids.gather(1, order), "attention_mask": attention_mask.gather(1, order)}
            logits = self.model(**moved).logits                                     # (N,L,V)
            return logits.gather(1, order.argsort(dim=1)[..., None].expand_as(logits))  # (N,L,V) in the old order

    def head(self, hidden):
        """(...,H) -> float32 logits (...,V). The mask token's is -inf in sampler and scorer alike: it is not a word."""
        with autocast(self.model.device):
            logits = (self.model.get_output_embeddings()(hidden) if self.decoder else hidden).float()
        is_mask = torch.arange(logits.shape[-1], device=logits.device) == self.mask_id  # (V,)
        return logits.masked_fill(is_mask, -torch.inf)

    def logits(self, input_ids, attention_mask=None):
        """input_ids (N,L), attention_mask (N,L) or None -> (N,L,V) float32."""
        return self.head(self.hidden(input_ids, attention_mask))


LLADA_NAMES = {  # LLaDA's block is the Llama block without the causal mask, so its tensors only need Llama's names
    "model.transformer.wte": "model.embed_tokens", "model.transformer.ln_f": "model.norm",
    "model.transformer.ff_out": "lm_head", "q_proj": "self_attn.q_proj", "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj", "attn_out": "self_attn.o_proj", "ff_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj", "attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm"}


def llada_name(name):
    """A LLaDA tensor's name in LlamaForCausalLM.

    >>> llada_name("model.transformer.blocks.3.ff_out.weight"), llada_name("model.transformer.ff_out.weight")
    ('model.layers.3.mlp.down_proj.weight', 'lm_head.weight')
    """
    stem, leaf = name.rsplit(".", 1)
    block = re.fullmatch(r"model\.transformer\.blocks\.(\d+)\.(\w+)", stem)
    return f"model.layers.{block[1]}.{LLADA_NAMES[block[2]]}.{leaf}" if block else f"{LLADA_NAMES[stem]}.{leaf}"


def load_llada(name, config, dtype):
    """A LLaDA checkpoint (folder or hub id, its config as a dict) in a native LlamaForCausalLM.

    The model is built without memory (meta device) and takes over one tensor after the other: the peak is the weights
    plus one tensor. Source: LLaDA's published model code, read for its names and defaults.
    """
    from huggingface_hub import snapshot_download
    from safetensors import safe_open
    from transformers import LlamaConfig, LlamaForCausalLM
    usual = dict(block_type="llama", layer_norm_type="rms", activation_type="silu", rope=True, alibi=False,
                 scale_logits=False, input_emb_norm=False, include_bias=False, attention_layer_norm=False)
    odd = {key: config[key] for key, value in usual.items() if config.get(key, value) != value}
    if odd:
        raise InputError(f"{name}: not a Llama block without causal mask: {odd}")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=config.get("embedding_size") or config["vocab_size"],  # the table's rows; some may be spare
            hidden_size=config["d_model"], num_hidden_layers=config["n_layers"], num_attention_heads=config["n_heads"],
            num_key_value_heads=config.get("n_kv_heads"), max_position_embeddings=config["max_sequence_length"],
            intermediate_size=config.get("mlp_hidden_size") or config["mlp_ratio"] * config["d_model"],
            rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
            attention_bias=bool(config.get("include_qkv_bias")), tie_word_embeddings=bool(config["weight_tying"]),
            rms_norm_eps=config["rms_norm_eps"], pad_token_id=config.get("pad_token_id"), bos_token_id=None))
    folder = Path(name if os.path.isdir(name) else snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"].values() if index.exists() else ["model.safetensors"]
    for shard in sorted(set(files)):
        with safe_open(folder / shard, "pt") as file:
            keys = list(file.keys())
        for key in keys:
            with safe_open(folder / shard, "pt") as file:  # opened anew: pages read before are given back
                tensor = file.get_tensor(key).to(dtype, copy=True)
            model.load_state_dict({llada_name(key): tensor}, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # angles are computed, not stored
    missing = [key for key, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise InputError(f"{name}: the checkpoint lacks {len(missing)} tensors, the first is {missing[0]}")
    return model


def native_tokenizer(name, config):
    """The tokenizer in a checkpoint's folder; OSError if it has none, for which AutoTokenizer may make up an empty one."""
    from transformers import AutoTokenizer
    from transformers.utils import cached_file
    cached_file(name, "tokenizer_config.json")
    return AutoTokenizer.from_pretrained(name, config=config, trust_remote_code=False)


def load_diffusion(name_or_path, dtype=torch.float32, mask_id=None, eos_ids=None):
    """A masked diffusion checkpoint (folder or hub id) as MaskedDiffusionLM: native classes only, never remote code.

    Known: LLaDA (remapped), a2d-qwen3 (a Qwen3 by another name), what this project saved (Llama or Qwen3 whose config
    has a mask_token_id), every AutoModelForMaskedLM. Ids of the mask and the end tokens: the arguments', the config's,
    the generation config's, the tokenizer's (its eos, else its sep). Raises InputError when something is missing.
    """
    import transformers
    name = str(name_or_path)
    try:
        config = transformers.PreTrainedConfig.get_config_dict(name)[0]
        kind = config.get("model_type")
        if kind == "llada":
            model = load_llada(name, config, dtype)
        elif kind == "a2d-qwen3" or (kind in ("qwen3", "llama") and (mask_id is not None or "mask_token_id" in config)):
            plain = {k: v for k, v in config.items() if k not in ("model_type", "architectures", "auto_map")}
            kind = "Llama" if kind == "llama" else "Qwen3"
            model, report = getattr(transformers, kind + "ForCausalLM").from_pretrained(
                name, config=getattr(transformers, kind + "Config")(**plain), dtype=dtype, output_loading_info=True)
        else:
            model, report = transformers.AutoModelForMaskedLM.from_pretrained(
                name, dtype=dtype, trust_remote_code=False, output_loading_info=True)
        if kind != "llada" and report["missing_keys"]:  # they would be random, without any error (load_llada is strict)
            raise KeyError(f"its weights lack {', '.join(sorted(report['missing_keys'])[:3])}")
    except Exception as error:  # as in load_policy
        raise InputError(f"--model {name}: no masked diffusion checkpoint that this project can read "
                         f"({type(error).__name__}: {' '.join(str(error).split())[:200]})") from None
    sources = [config]
    with contextlib.suppress(OSError):  # encoders have no generation config
        sources.append(transformers.GenerationConfig.from_pretrained(name).to_dict())
    find = lambda key: next((source[key] for source in sources if source.get(key) is not None), None)
    if find("mask_token_id") is None or find("eos_token_id") is None:
        with contextlib.suppress(OSError, ValueError, KeyError):  # without a tokenizer the arguments can name the ids
            t = native_tokenizer(name, model.config)
            sources.append(dict(mask_token_id=t.mask_token_id, pad_token_id=t.pad_token_id,
                                eos_token_id=t.sep_token_id if t.eos_token_id is None else t.eos_token_id))
    mask_id = find("mask_token_id") if mask_id is None else mask_id
    eos_ids = find("eos_token_id") if eos_ids is None else eos_ids
    eos_ids = [eos_ids] if isinstance(eos_ids, int) else list(eos_ids or [])
    if mask_id is None or not eos_ids:
        kind, flag = ("mask", "--mask-token-id") if mask_id is None else ("end-of-sequence", "--eos-token-id")
        raise InputError(f"--model {name}: neither its configs nor its tokenizer name a {kind} token; give {flag}")
    rows, pad_id = model.get_input_embeddings().num_embeddings, find("pad_token_id")
    if not all(0 <= i < rows for i in [mask_id, *eos_ids]) or mask_id in [pad_id, *eos_ids]:
        raise InputError(f"--model {name}: mask {mask_id}, end {eos_ids}, pad {pad_id}: mask and end must be below {rows} and "
                         "the mask differ from the others; give --mask-token-id and --eos-token-id")
    model.config.mask_token_id, model.config.eos_token_id = mask_id, eos_ids  # so that a saved copy loads again
    return MaskedDiffusionLM(model.eval(), mask_id, eos_ids)


def load_diffusion_policy(args, name=None):
    """(MaskedDiffusionLM, tokenizer) of `name` (default: args.model): 'toy', a hub id or a folder."""
    name = str(name or args.model)
    if name == "toy":
        name = str(Path(args.checkpoints) / f"toy-diffusion-{args.story_steps}steps-{args.warmup_steps}")
        if not os.path.isdir(name):
            toy_diffusion(name, args.warmup_steps, args.story_steps)
    lm = load_diffusion(name, getattr(torch, args.dtype), args.mask_token_id, args.eos_token_id)
    try:
        tokenizer = native_tokenizer(name, lm.model.config)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"--model {name}: no tokenizer ({' '.join(str(error).split())[:200]})") from None
    if tokenizer.chat_template is None:  # encoders have none: their plain sentence format
        tokenizer.chat_template = "{{ cls_token }}{{ messages[0]['content'] }}{{ sep_token }}"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(lm.eos_ids[0])
    fit_context(lm.model.config, args)
    lm.model.to(args.device)
    return lm, tokenizer


def toy_diffusion(folder, warmup_steps, story_steps, seed=0):
    """Train the diffusion toy (the same architecture, no causal mask) on unreliable demonstrations and save its folder.

    The masked objective: hide each answer token with probability t and predict the hidden ones. (Their plain mean; t = U^(1/3),
    mostly near 1, since sums are learnt only where no copy of the result is visible. A bound on the likelihood would need
    t = U and weights 1/t, and learns more slowly here.) In every fifth row some prompt tokens are hidden too, as in the
    pre-training of real checkpoints: diffu-GRPO's likelihood hides them. A demonstration is seen about twice: often enough to learn, too rarely to learn its slips.
    """
    from transformers import Qwen3ForCausalLM
    tokenizer = toy_tokenizer()
    torch.manual_seed(seed)
    config = toy_config(tokenizer, layers=3)
    config.mask_token_id = tokenizer.mask_token_id  # marks the folder as a diffusion model's
    lm = MaskedDiffusionLM(Qwen3ForCausalLM(config), tokenizer.mask_token_id, [tokenizer.eos_token_id])
    pairs = list(zip(*toy_demonstrations(tokenizer, 40 * warmup_steps, seed, story_steps)))
    pairs = [pair for i, pair in enumerate(pairs) if i % 4 != 3]  # without those that were asked to be wrong
    optimizer = torch.optim.AdamW(lm.model.parameters(), lr=6e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=warmup_steps, pct_start=0.1)
    for _ in tqdm(range(warmup_steps), desc="warm start of the diffusion toy", leave=False):
        prompts, answers = zip(*[pairs[i] for i in torch.randint(len(pairs), (64,)).tolist()])
        prompt_ids, prompt_mask = pad_left(prompts, tokenizer.pad_token_id)         # (64,P) each
        completion_ids, _ = pad_right(answers, tokenizer.eos_token_id)              # (64,T)
        masked = torch.rand(completion_ids.shape) < torch.rand(64, 1) ** (1 / 3)    # (64,T) bool
        hidden = (torch.rand(prompt_ids.shape) < 0.15) & prompt_mask.bool() & (torch.rand(64, 1) < 0.2)  # (64,P) bool
        logps = masked_logps(lm, prompt_ids, prompt_mask, completion_ids, masked[None], hidden, chunk_size=4096)  # (1,64,T)
        optimizer.zero_grad()
        (-logps.sum() / masked.sum()).backward()
        torch.nn.utils.clip_grad_norm_(lm.model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    save_folder(folder, lambda path: (lm.model.save_pretrained(path), tokenizer.save_pretrained(path)))


def fit_context(config, args):
    """Lower args.max_prompt_length until prompt and response fit the model's positions; encode_prompts then drops by it."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or 10 ** 9
    if args.max_new_tokens >= limit:
        raise InputError(f"--max-new-tokens {args.max_new_tokens}: the model has {limit} positions for prompt and response together")
    args.max_prompt_length = min(args.max_prompt_length, limit - args.max_new_tokens)


def chat_ids(tokenizer, question, instruction="", thinking=False):
    """Prompt ids (list) of one question through the checkpoint's chat template.

    The template writes the special tokens, so the tokenizer must not add its own: a second BOS would shift everything.
    """
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{question} {instruction}".strip()}],
        tokenize=False, add_generation_prompt=True, enable_thinking=thinking)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encode_prompts(tokenizer, problems, args, instruction=None):
    """Copies of `problems` with their "prompt_ids". Prompts longer than args.max_prompt_length are dropped and counted."""
    instruction = args.instruction if instruction is None else instruction
    encoded = [{**p, "prompt_ids": chat_ids(tokenizer, p["question"], instruction, args.thinking)} for p in problems]
    kept = [p for p in encoded if len(p["prompt_ids"]) <= args.max_prompt_length]
    if len(kept) < len(encoded):
        print(f"{len(encoded) - len(kept)} of {len(encoded)} prompts are longer than --max-prompt-length "
              f"{args.max_prompt_length} and were dropped")
    ids = [i for p in kept for i in p["prompt_ids"]]
    if tokenizer.unk_token_id is not None and ids.count(tokenizer.unk_token_id) > 0.2 * len(ids):
        raise InputError(f"{ids.count(tokenizer.unk_token_id) / len(ids):.0%} of the prompts' tokens are unknown to the model's tokenizer; "
                         "the toy knows its own stories only: give another --model with --data")
    if not kept:
        raise InputError(f"every prompt is longer than --max-prompt-length {args.max_prompt_length}; raise it")
    return kept


# ============================================================================================================
# Sampling
# ============================================================================================================

@dataclass
class Rollout:
    """N sampled responses. Prompts are padded on the left, completions on the right, so that they meet at one column."""
    prompt_ids: torch.Tensor        # (N,P) int
    prompt_mask: torch.Tensor       # (N,P) 1 on real tokens
    completion_ids: torch.Tensor    # (N,T) int
    completion_mask: torch.Tensor   # (N,T) float, 1 up to and including the first end-of-sequence token
    group_ids: torch.Tensor         # (N,) int: which prompt of the batch a response belongs to
    truncated: torch.Tensor         # (N,) bool: no end token within the limit
    texts: list                     # N strings: the response up to its end token
    trace: tuple | None = None      # a diffusion sampler's Trace

    def rows(self, index):
        """The scorer's four inputs for some rows: (prompt_ids, prompt_mask, completion_ids, completion_mask)."""
        return self.prompt_ids[index], self.prompt_mask[index], self.completion_ids[index], self.completion_mask[index]


def pad_left(sequences, pad_id):
    """Lists of ids -> (ids (N,P), mask (N,P)), padded on the left.

    >>> pad_left([[5], [6, 7]], 0)[0].tolist()
    [[0, 5], [6, 7]]
    """
    longest = max(map(len, sequences))
    ids = torch.tensor([[pad_id] * (longest - len(s)) + list(s) for s in sequences])
    mask = torch.tensor([[0] * (longest - len(s)) + [1] * len(s) for s in sequences])
    return ids, mask


def pad_right(sequences, pad_id):
    """Lists of ids -> (ids (N,T), mask (N,T) float), padded on the right."""
    longest = max(map(len, sequences))
    ids = torch.tensor([list(s) + [pad_id] * (longest - len(s)) for s in sequences])
    mask = torch.tensor([[1.0] * len(s) + [0.0] * (longest - len(s)) for s in sequences])
    return ids, mask


def completion_mask(completion_ids, eos_ids):
    """(N,T) float: 1 up to and including the first end-of-sequence token, 0 after it.

    The end token is trained (the policy must learn to stop), padding is not, even where both have the same id.

    >>> completion_mask(torch.tensor([[5, 9, 9, 9], [5, 6, 7, 8]]), [9]).tolist()
    [[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    """
    is_end = torch.isin(completion_ids, torch.tensor(list(eos_ids), device=completion_ids.device))  # (N,T) bool
    ends_before = is_end.long().cumsum(dim=1) - is_end.long()                                       # (N,T) exclusive count
    return (ends_before == 0).float()


@torch.no_grad()
def generate(model, tokenizer, prompts, group_size, args, greedy=False):
    """Sample `group_size` responses for each of `prompts` (lists of ids) with the library's own generate -> Rollout.

    Every sampling argument is passed: responses must come from softmax(logits / temperature) over the whole
    vocabulary, because that is the distribution which token_logps scores. top_k, top_p or a repetition penalty here would make
    the importance ratio wrong without any error.
    """
    if isinstance(model, MaskedDiffusionLM):
        return generate_diffusion(model, tokenizer, prompts, group_size, args, greedy)
    eos_ids = end_ids(model, tokenizer)
    prompts = [p for p in prompts for _ in range(group_size)]  # N = prompts * group_size rows
    prompt_ids, prompt_mask = (x.to(model.device) for x in pad_left(prompts, tokenizer.pad_token_id))  # (N,P)
    how = dict(do_sample=False) if greedy else dict(do_sample=True, temperature=args.temperature, top_k=0, top_p=1.0, typical_p=1.0)
    pieces = []
    for rows in torch.arange(len(prompts)).split(args.sample_batch):
        with autocast(model.device):
            output = model.generate(
                input_ids=prompt_ids[rows], attention_mask=prompt_mask[rows], max_new_tokens=args.max_new_tokens,
                repetition_penalty=1.0, num_beams=1, use_cache=True, eos_token_id=eos_ids, pad_token_id=tokenizer.pad_token_id, **how)
        pieces.append(output[:, prompt_ids.shape[1]:])  # (rows,T)
    longest = max(piece.shape[1] for piece in pieces)
    completion_ids = torch.cat([F.pad(p, (0, longest - p.shape[1]), value=tokenizer.pad_token_id) for p in pieces])  # (N,T)
    mask = completion_mask(completion_ids, eos_ids)  # (N,T); a pad id behind the end token is masked whatever it is
    group_ids = torch.arange(len(prompts), device=mask.device) // group_size  # (N,)
    truncated = ~torch.isin(completion_ids, torch.tensor(eos_ids, device=mask.device)).any(dim=1)  # (N,)
    return Rollout(prompt_ids, prompt_mask, completion_ids, mask, group_ids, truncated, decode(tokenizer, completion_ids, mask))


def decode(tokenizer, completion_ids, mask):
    """N strings. What stands behind the first end token never reaches the reward."""
    return [tokenizer.decode(ids[:int(n)], skip_special_tokens=True) for ids, n in zip(completion_ids.tolist(), mask.sum(1))]


# ---- masked diffusion: the most confident first, block by block ---------------------------------------------

# What the sampler saw, for credit (S denoising steps). commit_step (N,T) int: when a token was written; confidence
# (N,T): its noise-free probability then; C (S,N,T): the noise-free probability of the token *finally* written, in the
# forward before step s writes; from commit_step on it stays at `confidence`. C is None if not asked for.
Trace = namedtuple("Trace", "commit_step confidence C")
TRACE_TOP = 8  # candidates kept per step and position, instead of all V; a final token that is not among them counts 0


def num_transfer(masked, steps):
    """How many of `masked` tokens each of `steps` steps writes: the remainder goes to the first steps.  [LLaDA]

    >>> num_transfer(7, 3)
    [3, 2, 2]
    """
    return [masked // steps + (step < masked % steps) for step in range(steps)]


def check_lengths(gen_length, block_length, steps):
    """Blocks must tile the completion and share the steps evenly, else InputError -> (blocks, steps per block)."""
    if min(gen_length, block_length, steps) < 1 or gen_length % block_length or steps % (gen_length // block_length):
        raise InputError(f"generation length {gen_length}, block length {block_length}, {steps} denoising steps: the "
                         "length must be a multiple of the block length, and the steps one of the number of blocks")
    return gen_length // block_length, steps // (gen_length // block_length)


@torch.no_grad()
def sample_diffusion(lm, prompt_ids, prompt_mask, *, gen_length, block_length, steps, temperature, seed,
                     trace=True, threshold=None, prefix_cache=False, first_row=0):
    """Unmask T = gen_length mask tokens behind each prompt -> completion_ids (N,T), Trace.  [LLaDA; options: Fast-dLLM]

        candidate   x0 = argmax(logits + temperature * Gumbel noise)
        confidence  softmax(logits)[x0], without noise and at temperature 1; the most confident of a block are written

    prompt_ids, prompt_mask (N,P), padded on the left. steps: of all blocks; a block takes no more than it has tokens.
    Row i draws from its own generator, seeded by (seed, first_row + i): it does not depend on the rows around it.
    trace: also keep C. threshold: each step writes the best token and all that reach this confidence, in as many steps as
    it takes. prefix_cache: steps after a block's first reuse the keys and values of all before the block. The prefix then
    no longer reacts to what is written behind it: an approximation, for rollouts only. InputError for unfit lengths.
    """
    from transformers import DynamicCache
    blocks, per_block = check_lengths(gen_length, block_length, steps)
    if temperature < 0 or (prefix_cache and not lm.decoder):
        raise InputError("a sampling temperature must not be negative" if temperature < 0 else
                         "the prefix cache needs a decoder class (LLaDA, Qwen3): encoders keep no keys and values")
    (N, P), T, device = prompt_ids.shape, gen_length, prompt_ids.device
    ids = F.pad(prompt_ids, (0, T), value=lm.mask_id)                               # (N,P+T)
    attention = F.pad(prompt_mask, (0, T), value=1)                                 # (N,P+T)
    masked = torch.ones(N, T, dtype=torch.bool, device=device)                      # (N,T) not yet written
    commit_step, confidence = torch.zeros_like(masked, dtype=torch.long), torch.zeros(N, T, device=device)  # (N,T)
    step, seen = 0, []  # seen: top candidates per step
    generators = [torch.Generator(device).manual_seed(seed * 2**20 + first_row + i) for i in range(N)]
    for start in range(0, T, block_length):
        counts, cache = iter(num_transfer(block_length, min(per_block, block_length))), None
        inside = torch.zeros_like(masked)
        inside[:, start:start + block_length] = True                                # (N,T)
        while (masked & inside).any():
            if cache is None:
                cache = DynamicCache() if prefix_cache else None
                hidden = lm.hidden(ids, attention, cache)[:, P:]                    # (N,T,H)
            else:
                hidden = lm.hidden(ids[:, P + start:], attention, cache)            # (N,T-start,H)
                hidden = F.pad(hidden, (0, 0, start, 0))                            # (N,T,H) before the block: unused
            if cache is not None:
                cache.crop(start - T)  # keep only what is before it
            read, todo = masked if trace else masked & inside, masked & inside      # (N,T) read: logits needed
            logits = lm.head(hidden[read])                                          # (M,V)
            log_p = logits.log_softmax(-1)                                          # (M,V)
            if trace:
                top = log_p.topk(min(TRACE_TOP, log_p.shape[-1]))                   # (M,8)
                seen.append((masked, top.indices.int(), top.values.exp()))
            logits, log_p = logits[todo[read]], log_p[todo[read]]                   # (m,V) this block's
            if temperature > 0:  # -log of an exponential number is Gumbel noise
                noise = [torch.empty(n, logits.shape[-1], device=device).exponential_(generator=generator)
                         for n, generator in zip(todo.sum(1).tolist(), generators)]
                logits = logits - temperature * torch.cat(noise).log()              # (m,V)
            x0 = torch.zeros_like(commit_step).masked_scatter(todo, logits.argmax(-1))  # (N,T)
            sure = torch.full_like(confidence, -torch.inf).masked_scatter(
                todo, log_p.gather(1, x0[todo][:, None])[:, 0].exp())               # (N,T) -inf: not to be written
            count = next(counts) if threshold is None else 1
            write = torch.zeros_like(masked).scatter(1, sure.topk(count).indices, True)  # (N,T) bool
            write = (write | (sure >= threshold) if threshold is not None else write) & todo  # (N,T)
            ids[:, P:] = torch.where(write, x0, ids[:, P:])
            commit_step = torch.where(write, step, commit_step)
            confidence = torch.where(write, sure, confidence)
            masked, step = masked & ~write, step + 1
    completion_ids = ids[:, P:]                                                     # (N,T)
    C = confidence.repeat(step, 1, 1) if trace else None                            # (S,N,T)
    for s, (masked, top_ids, top_p) in enumerate(seen):  # the final tokens are known now: look them up
        final = ((top_ids == completion_ids[masked][:, None]) * top_p).sum(-1)      # (M,) 0 if not among the top
        C[s] = torch.where(commit_step > s, C[s].masked_scatter(masked, final), C[s])
    return completion_ids, Trace(commit_step, confidence, C)


def generate_diffusion(lm, tokenizer, prompts, group_size, args, greedy=False):
    """`generate` for a diffusion model: a Rollout with its trace; T = args.max_new_tokens."""
    options = dict(temperature=0.0 if greedy else args.temperature, seed=int(torch.randint(2**31, ())),
                   threshold=args.threshold, prefix_cache=args.prefix_cache, **sampler_lengths(args))
    prompts = [p for p in prompts for _ in range(group_size)]  # N rows
    prompt_ids, prompt_mask = (x.to(lm.model.device) for x in pad_left(prompts, tokenizer.pad_token_id))  # (N,P)
    parts = [sample_diffusion(lm, prompt_ids[rows], prompt_mask[rows], first_row=int(rows[0]), **options)
             for rows in torch.arange(len(prompts)).split(args.sample_batch)]
    completion_ids = torch.cat([ids for ids, _ in parts])                           # (N,T)
    steps = max(len(trace.C) for _, trace in parts)  # with a threshold, batches may differ in their steps
    C = [torch.cat([t.C, t.confidence.expand(steps - len(t.C), -1, -1)]) for _, t in parts]  # (S,rows,T) each
    trace = Trace(*(torch.cat([getattr(t, name) for _, t in parts]) for name in Trace._fields[:2]), torch.cat(C, dim=1))
    mask = completion_mask(completion_ids, lm.eos_ids)                              # (N,T)
    group_ids = torch.arange(len(prompts), device=mask.device) // group_size        # (N,)
    truncated = ~torch.isin(completion_ids, torch.tensor(lm.eos_ids, device=mask.device)).any(dim=1)  # (N,)
    texts = decode(tokenizer, completion_ids, mask)
    return Rollout(prompt_ids, prompt_mask, completion_ids, mask, group_ids, truncated, texts, trace)


# ============================================================================================================
# Log-probabilities
# ============================================================================================================

Scores = namedtuple("Scores", "logps entropy hidden")  # each (N,T[,H]), 0 on padding; entropy and hidden only if wanted


def autocast(device):
    """bfloat16 arithmetic over float32 master weights on a GPU; nothing on a CPU.

    Why not pure bfloat16 weights: at a learning rate of 1e-6 most updates are smaller than their rounding step.
    """
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def position_ids(attention_mask):
    """Positions that do not count left padding.

    >>> position_ids(torch.tensor([[0, 0, 1, 1, 1]])).tolist()
    [[0, 0, 0, 1, 2]]
    """
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def token_logps(model, prompt_ids, prompt_mask, completion_ids, completion_mask, *, temperature=1.0, chunk_size=256, want=()):
    """log pi(y_t | prompt, y_<t) of every completion token -> Scores(logps (N,T), entropy (N,T), hidden (N,T,H)).

    Args: prompt_ids, prompt_mask (N,P) padded on the left; completion_ids, completion_mask (N,T) padded on the right;
    temperature: the sampling temperature, since the policy that acts is softmax(logits / temperature);
    chunk_size: positions whose logits exist at the same time; want: any of "entropy" (nats) and "hidden" (the input of lm_head
    at the position that predicts y_t, float32, detached). Unwanted ones are None; padding holds 0. Gradients flow
    through logps. Memory: chunk_size * V floats instead of N * T * V: lm_head and softmax run over chunks of positions
    and are recomputed in the backward pass. Source: ours (a common technique).
    """
    ids = torch.cat([prompt_ids, completion_ids], dim=1)                          # (N,P+T)
    attention = torch.cat([prompt_mask, completion_mask.to(prompt_mask.dtype)], 1)  # (N,P+T)
    with autocast(model.device):
        hidden = backbone(model)(input_ids=ids, attention_mask=attention, position_ids=position_ids(attention),
                                 use_cache=False).last_hidden_state               # (N,P+T,H)
    # Position i predicts token i+1, so the predictors of the T completion tokens start one before the first of them.
    first = prompt_ids.shape[1] - 1
    hidden = hidden[:, first:first + completion_ids.shape[1]]                     # (N,T,H)
    logps, entropy = chunked_logps(hidden.flatten(0, 1), model.get_output_embeddings(), completion_ids.flatten(),
                                   temperature, chunk_size, "entropy" in want)    # (N*T,) each
    valid = completion_mask.bool()                                                # (N,T)
    fill = lambda x: x.view(valid.shape).masked_fill(~valid, 0.0)
    return Scores(fill(logps), fill(entropy) if "entropy" in want else None,
                  hidden.detach().float() * valid[..., None] if "hidden" in want else None)


class LogProb(torch.autograd.Function):
    """(c,V) logits, (c,) targets -> log softmax(logits / temperature) at the targets, entropy in nats or None; (c,) each.

        z = logits / temperature,   x = z - max z,   s = sum_v e^{x_v}
        log p_y = x_y - log s,   H = log s - sum_v e^{x_v} x_v / s,   d log p_y / d z_v = [v = y] - e^{x_v} / s

    What log_softmax and gather compute, in one (c,V) buffer: with a large vocabulary, fresh memory is most of the time.
    Therefore float32 `logits` are overwritten (do not read them again), and a graph serves one backward pass (a second
    one raises RuntimeError). The softmax is float32, or float64, whatever the weights are. No gradient flows through the
    entropy. Source: ours (a common technique).
    """

    @staticmethod
    def forward(ctx, logits, targets, temperature, want_entropy):
        x = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))  # (c,V) a copy only of bfloat16
        x = x.div_(temperature).sub_(x.amax(-1, keepdim=True))             # (c,V)
        chosen = x.gather(1, targets[:, None])[:, 0]                       # (c,)
        e = x.exp() if want_entropy else x.exp_()                          # (c,V)
        s = e.sum(-1)                                                      # (c,)
        entropy = s.log() - torch.linalg.vecdot(e, x) / s if want_entropy else None
        ctx.save_for_backward(e, s, targets)
        ctx.temperature = temperature
        if want_entropy:
            ctx.mark_non_differentiable(entropy)
        return chosen - s.log(), entropy

    @staticmethod
    def backward(ctx, g, _):
        e, s, targets = ctx.saved_tensors
        g = g / ctx.temperature                                            # (c,) dz = d logits / temperature
        gradient = e.mul_((-g / s)[:, None])                               # (c,V) -g e^x / s
        return gradient.scatter_add_(1, targets[:, None], g[:, None]), None, None, None  # + g at v = y


def chunked_logps(hidden, lm_head, targets, temperature, chunk_size, want_entropy=False):
    """log softmax(lm_head(hidden) / temperature) at `targets`, a chunk of positions at a time.

    hidden (M,H), targets (M,) -> logps (M,), entropy (M,) in nats or None. The softmax is float32 whatever the weights are.
    """
    def chunk(h, y):  # (c,H), (c,) -> (c,), (c,)
        with autocast(h.device):
            logits = lm_head(h)                                            # (c,V)
        return LogProb.apply(logits, y, temperature, want_entropy)

    if torch.is_grad_enabled():  # drop each chunk's logits now and compute them again in the backward pass
        run = lambda h, y: checkpoint(chunk, h, y, use_reentrant=False, preserve_rng_state=False)
    else:
        run = chunk
    logps, entropies = zip(*[run(h, y) for h, y in zip(hidden.split(chunk_size), targets.split(chunk_size))])
    return torch.cat(logps), torch.cat(entropies) if want_entropy else None


def score(model, rollout, args, want=()):
    """token_logps of a whole rollout without gradients, args.micro_batch rows at a time -> Scores."""
    with torch.no_grad():
        parts = [token_logps(model, *rollout.rows(rows), temperature=args.temperature, chunk_size=args.chunk_size, want=want)
                 for rows in torch.arange(len(rollout.group_ids)).split(args.micro_batch)]
    return Scores(*(torch.cat(part) if part[0] is not None else None for part in zip(*parts)))


# ---- masked diffusion: stand-ins for log p(y | prompt), which has no closed form -----------------------------

def row_uniforms(seeds, count, device):
    """(N,count) uniform numbers, row i from its own generator with seeds[i]; the global generator is left alone.

    So the old, the new and the reference model can see the same masks, however rows are split into micro-batches.
    """
    rows = [torch.rand(count, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds]  # (count,) each
    return torch.stack(rows).to(device, non_blocking=True)


def masked_logps(lm, prompt_ids, prompt_mask, completion_ids, masked, prompt_masked=None, chunk_size=256, count=None):
    """log p(y_i | all that is not masked) under R maskings of each row, in one forward -> (R,N,T), 0 where visible.

    masked (R,N,T) bool: completion tokens that are hidden and scored; prompt_masked (N,P) bool: prompt tokens that are
    hidden too, never scored. Temperature 1. Logits exist for masked completion positions only, chunk_size at a time.
    count: how many these are, if the caller knows. Every likelihood below is a choice of maskings and a sum.
    """
    R, (N, T), P = len(masked), completion_ids.shape, prompt_ids.shape[1]
    prompt = prompt_ids if prompt_masked is None else prompt_ids.masked_fill(prompt_masked, lm.mask_id)  # (N,P)
    views = completion_ids.masked_fill(masked, lm.mask_id)                          # (R,N,T)
    ids = torch.cat([prompt.expand(R, N, P), views], dim=2).flatten(0, 1)           # (R*N,P+T)
    attention = F.pad(prompt_mask, (0, T), value=1).repeat(R, 1)                    # (R*N,P+T)
    at = places(masked, count)                                                      # (M,)
    hidden = lm.hidden(ids, attention)[:, P:].flatten(0, 1)[at]                     # (M,H)
    if not len(at):  # nothing is masked, as a low ratio can have it: keep the graph alive
        return torch.zeros(masked.shape, device=hidden.device) + hidden.sum()
    logps, _ = chunked_logps(hidden, lm.head, completion_ids.expand(R, N, T).flatten()[at], 1.0, chunk_size)  # (M,)
    return torch.zeros(masked.numel(), device=logps.device).index_copy(0, at, logps).view(masked.shape)  # (R,N,T)


def places(mask, count=None):
    """Flat indices of the ones of mask, ascending. Give their count inside a loop: the CPU waits if the GPU has to count.

    >>> places(torch.tensor([[False, True], [True, False]]), 2).tolist()
    [1, 2]
    """
    count = int(mask.sum()) if count is None else count
    return mask.flatten().byte().argsort(descending=True, stable=True)[:count]


def slices(rows, size):
    """Consecutive row numbers in pieces of at most `size`, as slices: an index tensor would be copied to the GPU first.

    >>> slices(torch.arange(2, 7), 3)
    [slice(2, 5, None), slice(5, 7, None)]
    """
    return [slice(int(piece[0]), int(piece[-1]) + 1) for piece in rows.split(size)]


def one_step_logps(lm, prompt_ids, prompt_mask, completion_ids, *, seeds, prompt_rate=0.15, chunk_size=256):
    """diffu-GRPO's estimate: one forward; y masked, each prompt token with p = prompt_rate -> (N,T).  [d1's code]

    seeds (N,). Prompt tokens are counted from the right, so that padding changes nothing.
    """
    hide = row_uniforms(seeds, prompt_ids.shape[1], prompt_ids.device).flip(1) < prompt_rate  # (N,P)
    all_of_y = torch.ones_like(completion_ids, dtype=torch.bool)[None]              # (1,N,T)
    hide = hide & prompt_mask.bool()                                                # (N,P)
    return masked_logps(lm, prompt_ids, prompt_mask, completion_ids, all_of_y, hide, chunk_size, all_of_y.numel())[0]


def coupled_logps(lm, prompt_ids, prompt_mask, completion_ids, *, seeds, chunk_size=256):
    """coupled-GRPO's estimate: all of y masked, and two complementary maskings -> (N,T).  [DiffuCoder's code]

        t ~ U(0.2, 0.8),  U_i ~ U(0,1):   l_i = ( l_full + [U_i < t] l_1 / t + [U_i >= t] l_2 / (1 - t) ) / 2

    Not a log-likelihood: equal scores come out 1.5 times too large on average, so ratios are exaggerated. seeds (N,).
    """
    uniform = row_uniforms(seeds, 1 + completion_ids.shape[1], completion_ids.device)  # (N,1+T)
    t = 0.2 + 0.6 * uniform[:, :1]                                                  # (N,1)
    first = uniform[:, 1:] < t                                                      # (N,T) bool
    views = torch.stack([torch.ones_like(first), first, ~first])                    # (3,N,T)
    full, one, two = masked_logps(lm, prompt_ids, prompt_mask, completion_ids, views, None, chunk_size,
                                  2 * first.numel())                                # (N,T) each
    return (full + one / t + two / (1 - t)) / 2


def uni_logps(lm, prompt_ids, prompt_mask, completion_ids, *, seeds, ratio, chunk_size=256):
    """UniGRPO's estimate: each token of y masked with p = ratio (N,), prompt clean -> logps, scored.  [MMaDA's paper]

    Both (N,T). Only masked tokens have a score and may enter the loss: scored is 1.0 there, else 0.0. seeds (N,).
    """
    masked = row_uniforms(seeds, completion_ids.shape[1], ratio.device) < ratio[:, None]  # (N,T); ratio may stay on the CPU
    count, masked = int(masked.sum()), masked.to(completion_ids.device, non_blocking=True)
    logps = masked_logps(lm, prompt_ids, prompt_mask, completion_ids, masked[None], None, chunk_size, count)[0]  # (N,T)
    return logps, masked.float()


def draw_strata(mask, strata, seeds):
    """Random labels 0 .. strata-1 of positions, balanced over a row's valid tokens and over all of them -> (N,T) int.

        order = a random permutation of the valid positions, then of the rest;   label(order[j]) = j mod strata

    mask (N,T): 1 on valid tokens. seeds (N,): a local generator per row. Source: ours (DACA's abstract names the idea).

    >>> draw_strata(torch.tensor([[1.0] * 4 + [0.0] * 4]), 2, seeds=[0])[0, :4].bincount().tolist()  # four valid tokens
    [2, 2]
    """
    rows = [torch.rand(mask.shape[1], generator=torch.Generator().manual_seed(int(s))) for s in seeds]  # (T,) each
    order = (torch.stack(rows).to(mask.device, non_blocking=True) + (mask == 0)).argsort(dim=1)  # (N,T) valid positions first
    return order.argsort(dim=1) % strata                                            # (N,T) j mod K


def stratified_logps(lm, prompt_ids, prompt_mask, completion_ids, *, seeds, strata=4, chunk_size=256):
    """DACA's stratified masking: hide one stratum, score it given all others; K = strata forwards in one batch.  [ours]

        l_i = log p(y_i | prompt, y with stratum(i) masked)

    -> (N,T). K = 1: the one-step estimate with a clean prompt; K = T leaves one out. A pseudo-likelihood, not a bound.
    """
    labels = draw_strata(completion_mask(completion_ids, lm.eos_ids), strata, seeds)  # (N,T)
    views = labels == torch.arange(strata, device=labels.device)[:, None, None]     # (K,N,T) disjoint, covering
    return masked_logps(lm, prompt_ids, prompt_mask, completion_ids, views, None, chunk_size, labels.numel()).sum(0)


# ============================================================================================================
# Advantages
# ============================================================================================================

def group_advantages(rewards, group_ids, scale="std", eps=1e-4):
    """A_i = (r_i - mean of its group) / (std of its group + eps); scale="none" leaves the division out.  [GRPO; Dr. GRPO]

    rewards (N,), group_ids (N,) any integers -> (N,) float. std is the sample one (n - 1). A NaN or infinite reward
    ("cannot be scored") counts as absent and gets 0. A group whose rewards are all equal (spread < 1e-6) or that has a single
    scored response gets exactly 0: rounding in the mean must not be blown up into a signal.

    >>> [round(a, 4) for a in group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 0])).tolist()]
    [0.8659, -0.8659, -0.8659, 0.8659]
    """
    if scale not in ("std", "none"):
        raise ValueError(f'scale must be "std" or "none", not {scale!r}')
    advantages = torch.zeros_like(rewards, dtype=rewards.dtype if rewards.is_floating_point() else torch.float32)
    for group in group_ids.unique():
        rows = (group_ids == group) & rewards.isfinite()         # (N,) bool
        r = rewards[rows].to(advantages.dtype)                   # (n,)
        if len(r) < 2 or r.max() - r.min() < 1e-6:
            continue
        a = r - r.mean()
        advantages[rows] = a / (r.std() + eps) if scale == "std" else a
    return advantages


# ============================================================================================================
# Loss
# ============================================================================================================

def loss_denominator(mask, aggregate="token", max_len=None):
    """What a mini-batch's summed loss is divided by; micro-batches share it, so that splitting changes nothing."""
    if aggregate == "constant":
        if not max_len:
            raise ValueError('aggregate="constant" needs max_len, the largest completion length')
        return torch.tensor(float(mask.shape[0] * max_len))           # Dr. GRPO: N * max_len
    if aggregate == "token":
        return mask.sum().clamp(min=1.0)                              # DAPO: all valid tokens
    if aggregate == "sequence":
        return (mask.sum(1) > 0).float().sum().clamp(min=1.0)         # GRPO: responses that have tokens
    raise ValueError(f'aggregate must be "token", "sequence" or "constant", not {aggregate!r}')


def clipped_kl_loss(logps, old_logps, ref_logps, advantages, mask, *, clip_low=0.2, clip_high=0.2, dual_clip=None, beta=0.0,
                    kl="k3", aggregate="token", max_len=None, denominator=None):
    """The clipped, KL-regularised policy loss of PPO / GRPO / DAPO / Dr. GRPO on token advantages -> (loss, stats).

        r = exp(logp - logp_old)      obj = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
        where A < 0 and dual clip c is set:  obj = max(obj, c A)          (bounds the loss of a huge ratio)
        loss = aggregate( -obj + beta * KL(pi, ref) )

    Args: logps (with gradient), old_logps, ref_logps (or None), advantages, mask: all (N,T). advantages = A * w.
    kl, with x = ref - logp: k1 = -x (as a loss its expected gradient is 0: only a monitor), k2 = x^2 / 2 (has the
    gradient of KL(pi||ref)), k3 = e^x - x - 1 (has that of KL(ref||pi), on-policy; GRPO's choice).
    aggregate: "sequence" = mean over a response's tokens, then over responses (GRPO); "token" = over all tokens (DAPO);
    "constant" = sum / (N * max_len) (Dr. GRPO). denominator: loss_denominator of the whole mini-batch, if this is only
    a micro-batch of it. stats: detached sums over valid tokens (divide by stats["tokens"] after adding micro-batches up).
    An empty mask gives 0.0 with a live graph. Source: the papers named above.

    >>> ratio, A = torch.tensor([[2.0, 0.5, 0.5]]), torch.tensor([[1.0, 1.0, -1.0]])
    >>> loss, stats = clipped_kl_loss(ratio.log(), torch.zeros(1, 3), None, A, torch.ones(1, 3))
    >>> round(loss.item(), 4)                     # obj = min(2, 1.2), min(0.5, 0.8), min(-0.5, -0.8): their mean is 0.3
    -0.3
    """
    if not logps.shape == old_logps.shape == advantages.shape == mask.shape:  # broadcasting would credit the wrong tokens
        raise ValueError(f"needs (N,T) four times, not {[tuple(x.shape) for x in (logps, old_logps, advantages, mask)]}")
    if beta and ref_logps is None:
        raise ValueError(f"beta {beta} needs ref_logps")
    valid = mask.bool()                                                     # (N,T)
    # Fill before any arithmetic: a NaN or inf on padding would survive a multiplication by 0, and reach the gradient.
    fill = lambda x: x.masked_fill(~valid, 0.0)
    logps, old_logps, advantages = fill(logps), fill(old_logps.detach()), fill(advantages.detach())
    ratio = torch.exp((logps - old_logps).clamp(-20, 20))                   # (N,T) r
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)                      # (N,T)
    objective = torch.minimum(ratio * advantages, clipped * advantages)     # (N,T)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    per_token = -objective                                                  # (N,T)
    divergence = torch.zeros_like(per_token)                                # (N,T)
    if ref_logps is not None:
        x = (fill(ref_logps.detach()) - logps).clamp(-20, 20)               # (N,T)
        divergence = {"k1": -x, "k2": x * x / 2, "k3": x.exp() - x - 1}[kl]
        if beta:
            per_token = per_token + beta * divergence
    per_token = torch.where(valid, per_token, 0.0)
    if denominator is None:  # loss_denominator(mask, aggregate, max_len), spelled out: this function can be copied alone
        if aggregate not in ("token", "sequence", "constant") or (aggregate == "constant" and not max_len):
            raise ValueError(f'aggregate {aggregate!r}: must be "token", "sequence" or "constant"; "constant" needs max_len')
        denominator = len(mask) * max_len if aggregate == "constant" else (
            mask.sum() if aggregate == "token" else (mask.sum(1) > 0).sum()).clamp(min=1)
    if aggregate == "sequence":
        per_token = per_token / mask.sum(dim=1, keepdim=True).clamp(min=1.0)  # each response counts once
    loss = per_token.sum() / denominator
    with torch.no_grad():
        total = lambda x: torch.where(valid, x, 0.0).sum().double()
        stats = {"tokens": valid.sum().double(), "kl": total(divergence), "ratio": total(ratio), "ratio_error": total((ratio - 1).abs()),
                 "clip_low": total((ratio < 1 - clip_low) & (advantages < 0)),
                 "clip_high": total((ratio > 1 + clip_high) & (advantages > 0))}
    return loss, stats


# ============================================================================================================
# Run plumbing: arguments, folder, progress bar, evaluation, checkpoints, pictures
# ============================================================================================================

@dataclass
class RunArgs:
    """Arguments that have nothing to do with the method; each script's Args adds the algorithm's own."""
    model: str = field(default="toy", metadata={"help": "'toy' (built in, no download), a hub id, a folder, or a folder with a GGUF file"})
    task: str = field(default="story", metadata={"help": "'story' (built in, also for real models); --data replaces it"})
    data: str | None = field(default=None, metadata={"help": "JSONL file in GSM8K's format, or hub data set 'owner/name:configuration'"})
    eval_data: str | None = field(default=None, metadata={"help": "held-out problems; default: the first --eval-problems of --data"})
    instruction: str | None = field(default=None, metadata={"help": "added to each question; default: tells real models how to end an answer"})
    thinking: bool = field(default=False, metadata={"help": "enable_thinking for chat templates that know it"})
    steps: int = field(default=200, metadata={"help": "optimisation steps (rollout batches)"})
    prompts_per_step: int = field(default=8, metadata={"help": "prompts in a rollout batch"})
    group_size: int = field(default=8, metadata={"help": "G, responses per prompt; at least 2"})
    temperature: float = field(default=1.0, metadata={"help": "sampling temperature, also used in scoring"})
    max_prompt_length: int = field(default=512, metadata={"help": "longer prompts are dropped and counted"})
    max_new_tokens: int = field(default=256, metadata={"help": "longest response"})
    seed: int = field(default=0, metadata={"help": "seed of data order, sampling and updates"})
    name: str | None = field(default=None, metadata={"help": "folder under runs/; default: script-model-seed, numbered when taken"})
    resume: bool = field(default=False, metadata={"help": "go on from the checkpoint of runs/NAME"})
    eval_only: bool = field(default=False, metadata={"help": "evaluate --model and stop"})
    eval_every: int = field(default=20, metadata={"help": "steps between evaluations on held-out problems; 0: only first and last"})
    eval_problems: int = field(default=64, metadata={"help": "held-out problems"})
    eval_samples: int = field(default=4, metadata={"help": "k, samples per held-out problem for mean accuracy and pass@k"})
    save_every: int = field(default=50, metadata={"help": "steps between checkpoints; 0: only at the end"})
    sample_batch: int = field(default=64, metadata={"help": "rows generated at once (memory; autoregressive models then draw other samples)"})
    micro_batch: int = field(default=8, metadata={"help": "rows in one forward and backward pass (memory; changes no result)"})
    chunk_size: int = field(default=256, metadata={"help": "positions whose logits exist at once (memory; changes no result)"})
    dtype: str = field(default="float32", metadata={"help": "dtype of the weights: bfloat16 for LoRA's frozen base; on a GPU "
                                                    "arithmetic is bfloat16 anyway"})
    lora_rank: int = field(default=0, metadata={"help": "r > 0 trains float32 LoRA adapters only (needs peft); 0: all weights"})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "less memory for one more forward pass"})
    device: str = field(default="auto", metadata={"help": "auto, cpu, cuda"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run code that comes with a checkpoint"})
    story_steps: int = field(default=2, metadata={"help": "arithmetic steps in a story (1 to 6)"})
    warmup_steps: int = field(default=500, metadata={"help": "supervised steps of the toy's warm start"})
    checkpoints: str = field(default="checkpoints", metadata={"help": "folder of the toy's warm-started models"})


@dataclass
class DiffusionArgs(RunArgs):
    """The sampler's arguments, for the scripts that train masked diffusion models."""
    block_length: int = field(default=32, metadata={"help": "tokens in a block, at most the response (LLaDA: 32)"})
    diffusion_steps: int | None = field(default=None, metadata={"help": "denoising steps; default: half the length"})
    threshold: float | None = field(default=None, metadata={"help": "write all tokens of this confidence at once, as many "
                                                            "steps as it takes (Fast-dLLM: 0.9); default: off"})
    temperature: float = field(default=1.0, metadata={"help": "of the sampler's draws; likelihoods are at 1 (ours)"})
    prefix_cache: bool = field(default=False, metadata={"help": "Fast-dLLM's cache in rollouts: approximate"})
    eval_budgets: list[str] = field(default_factory=list, metadata={"help": "LENGTH:STEPS ..., first and last"})
    mask_token_id: int | None = field(default=None, metadata={"help": "if the checkpoint does not name its mask token"})
    eos_token_id: int | None = field(default=None, metadata={"help": "if the checkpoint does not name its end token"})


INSTRUCTION = "Work step by step and end with #### followed by the final number."


def parse_args(Args, toy, argv=None, doc=""):
    """Parse the command line into Args. For --model toy (or a checkpoint grown from it) the preset `toy` replaces
    the defaults of real models; with --resume the run's own settings do. Flags on the command line win over all."""
    from transformers import HfArgumentParser
    preset = "the toy's preset: " + " ".join(f"--{k.replace('_', '-')} {v}" for k, v in toy.items())
    parser = HfArgumentParser(Args, description=doc.split("\n\n")[0], epilog=preset,
                              formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--model", default="toy")
    first.add_argument("--resume", action="store_true")
    first.add_argument("--name")
    known = first.parse_known_args(argv)[0]
    model = known.model
    if is_toy(model):
        parser.set_defaults(**toy)
    stored = Path("runs", known.name or "", "args.json")
    if known.resume and known.name and stored.is_file():  # go on with the run's own settings; Run refuses others
        with contextlib.suppress(ValueError):             # a damaged file: Run says so
            before = json.loads(stored.read_text())
            parser.set_defaults(**{k: v for k, v in before.items() if k not in ("script", "resume", "name")})
            model = before.get("model", model)
    args, unknown = parser.parse_args_into_dataclasses(argv, look_for_args_file=False, return_remaining_strings=True)
    if unknown:
        raise InputError(f"unknown arguments: {' '.join(unknown)}; --help lists the known ones")
    if args.instruction is None:
        args.instruction = "" if is_toy(model) else INSTRUCTION
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    check_args(args)
    return args


def is_toy(model):
    """Whether `model` is the toy or a checkpoint folder grown from it (recognised by the tokenizer's special tokens)."""
    path = Path(model) / "tokenizer.json"
    return model == "toy" or (path.is_file() and '"<assistant>"' in path.read_text(encoding="utf-8", errors="replace"))


def check_args(args):
    """Reject what cannot work, before anything is loaded. Each message says what to change."""
    for name, value in vars(args).items():
        if isinstance(value, float) and not math.isfinite(value):  # NaN would pass every comparison below
            raise InputError(f"--{name.replace('_', '-')} must be a finite number, not {value}")
    positive = ("steps prompts_per_step max_new_tokens max_prompt_length eval_problems eval_samples sample_batch micro_batch "
                "chunk_size inner_iterations mini_batches")
    for name in positive.split():
        if getattr(args, name, 1) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    for name in ("eval_every", "save_every", "seed"):
        if not 0 <= getattr(args, name) < 2 ** 40:  # a step's generator is seeded with seed * 1,000,003 + step, in 63 bits
            raise InputError(f"--{name.replace('_', '-')} must be between 0 and 2^40, not {getattr(args, name)}")
    if args.warmup_steps < 12:
        raise InputError(f"--warmup-steps must be at least 12, not {args.warmup_steps}: the toy would not even learn the format")
    if args.group_size < 2:
        raise InputError(f"--group-size must be at least 2, not {args.group_size}: one response alone has nothing to be compared with")
    if args.temperature < 1e-3:  # logits / temperature must not overflow
        raise InputError(f"--temperature must be at least 0.001, not {args.temperature}: at 0 all responses of a group are the same")
    if args.task != "story":
        raise InputError(f"--task {args.task}: unknown; there is 'story', and --data for your own problems")
    if not 1 <= args.story_steps <= 6:
        raise InputError(f"--story-steps must be 1 to 6, not {args.story_steps}")
    if args.model == "toy" and args.data is None and args.max_new_tokens < 9 + 7 * args.story_steps:
        print(f"warning: a solution of --story-steps {args.story_steps} has {9 + 7 * args.story_steps} tokens and an end token; "
              f"--max-new-tokens {args.max_new_tokens} cuts it off")
    if args.lora_rank < 0 or (args.lora_rank and importlib.util.find_spec("peft") is None):
        raise InputError("--lora-rank must not be negative" if args.lora_rank < 0 else "--lora-rank needs: pip install peft")
    if args.dtype not in ("float32", "bfloat16"):
        raise InputError(f"--dtype must be float32 or bfloat16, not {args.dtype}")
    if args.device not in ("cpu", "cuda") and not args.device.startswith("cuda:"):
        raise InputError(f"--device {args.device}: must be auto, cpu or cuda")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"--device {args.device}: no CUDA device is available; use --device cpu")
    for name in ("learning_rate", "max_grad_norm"):
        if getattr(args, name, 1.0) <= 0:
            raise InputError(f"--{name.replace('_', '-')} must be above 0, not {getattr(args, name)}")
    if args.prompts_per_step * args.group_size < getattr(args, "mini_batches", 1):
        raise InputError(f"--mini-batches {args.mini_batches}: more than the {args.prompts_per_step * args.group_size} responses of a step")
    if args.model != "toy" and args.model.startswith((".", "/", "~")) and not os.path.isdir(args.model):
        raise InputError(f"--model {args.model}: no such folder")
    if isinstance(args, DiffusionArgs):
        if args.threshold is not None and not 0 < args.threshold <= 1:
            raise InputError(f"--threshold is a probability, above 0 and at most 1, not {args.threshold}")
        for at in (args, *(at_budget(args, budget) for budget in args.eval_budgets)):
            check_lengths(**sampler_lengths(at))


def at_budget(args, budget):
    """args at a LENGTH:STEPS budget of --eval-budgets."""
    match = re.fullmatch(r"(\d+):(\d+)", budget)
    if not match:
        raise InputError(f"--eval-budgets {budget}: must be LENGTH:STEPS, for example 256:128")
    return dataclasses.replace(args, max_new_tokens=int(match[1]), diffusion_steps=int(match[2]))


def sampler_lengths(args):
    """The sampler's three lengths: a block is never longer than the response; the steps default to half its tokens."""
    length = args.max_new_tokens
    steps = max(1, length // 2) if args.diffusion_steps is None else args.diffusion_steps
    return dict(gen_length=length, block_length=min(args.block_length, length), steps=steps)


def main(train, Args, toy, doc):
    """The command line of a script: bad input ends with one line and exit code 2, Ctrl-C with 130 after a save."""
    try:
        train(parse_args(Args, toy, doc=doc))
    except (InputError, OSError) as error:  # OSError: a file or folder that cannot be read or written
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # outside the training loop, or a second time
        sys.exit(130)


def draw_batch(problems, step, count, seed):
    """The `count` problems of a step: a new shuffle for every pass over the data, derived from (seed, pass) alone.

    No iterator has to be saved: a resumed run draws the same problems.
    """
    orders, batch = {}, []
    for place in range((step - 1) * count, step * count):
        epoch, i = divmod(place, len(problems))
        if epoch not in orders:
            orders[epoch] = random.Random(f"{seed}-{epoch}").sample(range(len(problems)), len(problems))
        batch.append(problems[orders[epoch][i]])
    return batch


def save_folder(folder, write):
    """write(temporary folder), then rename: an interrupted save leaves the previous folder whole."""
    folder = Path(folder)
    fresh, old = folder.with_name(f"{folder.name}.tmp{os.getpid()}"), folder.with_name(folder.name + ".old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    write(fresh)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


class Run:
    """The folder of a run and what is written to it; no part of any method."""

    def __init__(self, args, script):
        root = Path("runs")
        name = args.name or f"{script}-{Path(args.model).name}-seed{args.seed}"
        if Path(name).is_absolute() or ".." in Path(name).parts or len(name) > 200:
            raise InputError(f"--name {name[:50]}: must be the short name of a folder, which is made under runs/")
        if args.resume and not args.name:
            raise InputError("--resume needs --name, the run's folder under runs/")
        used = lambda name: any((root / name / file).exists() for file in ("metrics.csv", "checkpoint", "checkpoint.old"))
        if used(name) and not args.resume:
            if args.name:
                raise InputError(f"runs/{name} exists: add --resume to continue it, delete it, or choose another --name")
            name = next(f"{name}-{i}" for i in range(2, 10_000) if not used(f"{name}-{i}"))
        self.settings = {"script": script, **dataclasses.asdict(args)}
        self.args, self.folder, self.step, self.failures, self.stop, self.rows = args, root / name, 0, 0, False, []
        self.started = time.time()
        self.checkpoint = self.folder / "checkpoint"
        if args.resume:
            with self._damaged():
                self._find_checkpoint()
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "args.json").write_text(json.dumps(self.settings, indent=1))
        print(f"run folder: {self.folder}")

    @contextlib.contextmanager
    def _damaged(self):
        """A file of the run that is missing or half written: one line instead of its reader's traceback."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:  # json, csv, torch and safetensors each raise their own
            raise InputError(f"{self.folder} is damaged ({type(error).__name__}: {' '.join(str(error).split())[:200]}); "
                             "start again under another --name") from None

    def _find_checkpoint(self):
        old = self.checkpoint.with_name("checkpoint.old")
        if not self.checkpoint.is_dir() and old.is_dir():  # a save was interrupted between its two renames
            old.rename(self.checkpoint)
        if not (self.checkpoint / "state.json").is_file():
            raise InputError(f"{self.folder} holds no checkpoint to resume from")
        before, now = json.loads((self.folder / "args.json").read_text()), self.settings
        free = {"steps", "resume", "name", "device", "save_every", "micro_batch", "chunk_size"}
        if before["script"] != now["script"]:
            raise InputError(f"--resume: {self.folder} is a run of {before['script']}.py")
        changed = [k for k in now if k not in free and before.get(k) != now[k]]
        if changed:
            raise InputError(f"--resume with other arguments than the run was started with: {', '.join(changed)}")
        self.step = json.loads((self.checkpoint / "state.json").read_text())["step"]
        if self.step >= self.args.steps:
            raise InputError(f"{self.folder} has its {self.step} steps already; raise --steps to go on")
        with open(self.folder / "metrics.csv", newline="") as file:  # rows after the checkpoint are run again
            self.rows = [row for row in csv.DictReader(file) if int(row["step"]) <= self.step]

    def restore(self, model, optimizer):
        """Load the optimiser's state when resuming, and LoRA's adapter (weights come through load_policy(args, run.model))."""
        with self._damaged():
            if self.step and self.args.lora_rank:
                from peft import set_peft_model_state_dict
                from safetensors.torch import load_file
                set_peft_model_state_dict(model, load_file(self.checkpoint / "adapter_model.safetensors"))
            if self.step:
                state = torch.load(self.checkpoint / "optimizer.pt", weights_only=True, map_location=self.args.device)
                optimizer.load_state_dict(state)

    @property
    def model(self):
        """The checkpoint to start from: the run's own when resuming, unless that is an adapter to --model."""
        return self.checkpoint if self.step and not self.args.lora_rank else self.args.model

    def save(self, model, tokenizer, optimizer):
        """Weights (or peft's adapter) and tokenizer in from_pretrained's format, optimiser, step: all to resume with."""
        def write(path):
            model.save_pretrained(path)
            tokenizer.save_pretrained(path)
            torch.save(optimizer.state_dict(), path / "optimizer.pt")
            (path / "state.json").write_text(json.dumps({"step": self.step}))
        save_folder(self.checkpoint, write)

    def export(self, model, tokenizer):
        """LoRA's result as an ordinary checkpoint, merged/ (checkpoint/ holds the adapter): W + (alpha / r) B A, in W's dtype."""
        plain = model.merge_and_unload()  # in place: the run is over, and a second copy might not fit
        save_folder(self.folder / "merged", lambda path: (plain.save_pretrained(path), tokenizer.save_pretrained(path)))
        print(f"base and adapter in one, for from_pretrained: {self.folder / 'merged'}")

    def loop(self, model, tokenizer, optimizer):
        """Yield the step numbers; seed each step, save when due, and stop cleanly after the first Ctrl-C.

        All randomness of a step comes from (seed, step), so no generator state has to survive an interruption.
        """
        def on_signal(*_):
            if self.stop:
                raise KeyboardInterrupt
            self.stop = True
            tqdm.write("stopping: finishing this step, then saving (Ctrl-C again stops at once)")

        previous = {kind: signal.signal(kind, on_signal) for kind in (signal.SIGINT, signal.SIGTERM)}
        self.bar = tqdm(total=self.args.steps, initial=self.step, desc="training")
        try:
            while self.step < self.args.steps and not self.stop:
                torch.manual_seed(self.args.seed * 1_000_003 + self.step + 1)
                self.started = time.time()
                yield self.step + 1
                self.step += 1
                self.bar.update()
                if self.step == self.args.steps or self.stop or (self.args.save_every and self.step % self.args.save_every == 0):
                    self.save(model, tokenizer, optimizer)
        finally:
            self.bar.close()
            for kind, handler in previous.items():
                signal.signal(kind, handler)
        print(f"{self.step} steps done, {time.time() - STARTED:.0f} s after the script was started; checkpoint: {self.checkpoint}")
        finished = self.step == self.args.steps
        if self.args.lora_rank and finished:
            self.export(model, tokenizer)
        if self.stop and not finished:
            print(f"stopped; go on with: --resume --name {self.folder.name}")
            sys.exit(130)

    def log(self, step, row):
        """One row of metrics.csv and the bar's figures. The file is replaced whole, so no interruption leaves half a row."""
        self.rows.append({"step": step, **row, "seconds": time.time() - self.started})
        columns = list(dict.fromkeys(key for r in self.rows for key in r))
        temporary = self.folder / "metrics.csv.tmp"
        with open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="")
            writer.writeheader()
            writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in r.items()} for r in self.rows)
        temporary.rename(self.folder / "metrics.csv")
        if "reward" in row:
            self.bar.set_postfix(reward=f"{row['reward']:.3f}", accuracy=f"{row['accuracy']:.3f}", kl=f"{row['kl']:.4f}")

    def finite(self, loss, grad_norm):
        """Whether an update may be made. A non-finite one is skipped and counted; three in a row end the run."""
        self.failures = 0 if math.isfinite(loss) and math.isfinite(grad_norm) else self.failures + 1
        if self.failures:
            tqdm.write(f"non-finite loss ({float(loss)}) or gradient norm ({float(grad_norm)}): update skipped")
        if self.failures == 3:
            raise InputError(f"three updates in a row were not finite; the last good checkpoint, if any, is {self.checkpoint}. "
                             "Lower --learning-rate, or look for extreme rewards")
        return not self.failures

    def evaluation_due(self, step):
        return step == self.args.steps or bool(self.args.eval_every) and step % self.args.eval_every == 0

    def evaluate(self, step, model, tokenizer, problems):
        """Held-out accuracy of this step -> dict of columns; some responses go to samples.txt."""
        with open(self.folder / "samples.txt", "a", encoding="utf-8") as file:
            file.write(f"===== step {step}\n")
            result = evaluate(model, tokenizer, problems, self.args, file)
        if step in (0, self.args.steps):  # a diffusion model at other lengths and numbers of steps
            for budget in getattr(self.args, "eval_budgets", ()):
                other = evaluate(model, tokenizer, problems, at_budget(self.args, budget))
                result.update({f"{key}@{budget}": value for key, value in other.items()})
        tqdm.write(f"step {step}, held-out problems: " + ", ".join(f"{k[5:]} {v:.3f}" for k, v in result.items()))
        return result


class Meter:
    """Adds the loss's stats up over all micro-batches and updates of a step (never only the last micro-batch's)."""

    def __init__(self):
        self.sums, self.losses, self.grad_norms, self.skipped, self.first = {}, [], [], 0, None

    def add(self, stats):
        for key, value in stats.items():
            self.sums[key] = self.sums.get(key, 0.0) + value

    def add_update(self, loss, grad_norm, made):
        self.losses.append(float(loss))
        self.grad_norms.append(float(grad_norm))
        self.skipped += not made
        self.first = self.first or self.averages()

    def averages(self):
        tokens = max(float(self.sums["tokens"]), 1.0)
        mean = lambda values: sum(values) / len(values)
        return {"loss": mean(self.losses), "grad_norm": mean(self.grad_norms),
                **{k: float(v) / tokens for k, v in self.sums.items() if k != "tokens"}}


def step_metrics(step, rollout, rewards, accuracy, advantages, entropy, meter):
    """The columns of metrics.csv that all scripts share (the README explains each), and step 1's sanity line."""
    mask, groups = rollout.completion_mask, rollout.group_ids
    scored, m = rewards[rewards.isfinite()], meter.averages()
    silent = sum(not advantages[groups == g].any() for g in groups.unique())
    if step == 1:
        f = meter.first
        tqdm.write(f"sanity, first update: mean |ratio - 1| = {f['ratio_error']:.1e} (0 but for rounding: nothing has been updated), KL to the "
                   f"starting model = {f['kl']:.1e} (0), loss = {f['loss']:+.4f} (may be 0: advantages of a group sum to 0), "
                   f"gradient norm = {f['grad_norm']:.4f} (above 0 unless every group is silent: it is the gradient of -A log pi)")
    return {"reward": scored.mean().item(), "reward_std": scored.std(unbiased=False).item() if len(scored) else math.nan,
            "accuracy": accuracy.nanmean().item(), "unscorable": len(rewards) - len(scored), "zero_variance_groups": int(silent) / len(groups.unique()),
            "loss": m["loss"], "grad_norm": m["grad_norm"], "kl": m["kl"], "ratio": m["ratio"], "ratio_error": m["ratio_error"],
            "clip_low": m["clip_low"], "clip_high": m["clip_high"], "skipped": meter.skipped,
            "entropy": (entropy.sum() / mask.sum()).item(), "length": mask.sum(1).mean().item(),
            "truncated": rollout.truncated.float().mean().item()}


def pass_at_k(n, c, k):
    """Probability that at least one of k samples is right, unbiased from c right ones among n.  [Chen et al. 2021]

    1 - C(n-c, k) / C(n, k). Raises ValueError for k > n.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"needs 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def summarise(correct, greedy):
    """Evaluation row from right/wrong tables: correct (problems, k), greedy (problems,); None entries are left out."""
    counts = [[c for c in row if c is not None] for row in correct]
    counts = [row for row in counts if row]
    k = max(map(len, correct), default=1)
    mean = lambda values: sum(values) / len(values) if values else float("nan")  # NaN: nothing could be scored
    return {"eval_greedy": mean([g for g in greedy if g is not None]), "eval_mean": mean([mean(row) for row in counts]),
            f"eval_pass@{k}": mean([pass_at_k(len(row), round(sum(row)), len(row)) for row in counts])}


def evaluate(model, tokenizer, problems, args, file=None):
    """Greedy accuracy, mean accuracy over args.eval_samples samples, and pass@k, on held-out problems -> dict.

    Always the verifiable reward, whatever a script trains on. `file` receives some responses to read.
    """
    torch.manual_seed(1234)  # the same noise at every evaluation
    prompts = [p["prompt_ids"] for p in problems]
    greedy = generate(model, tokenizer, prompts, 1, args, greedy=True).texts
    texts = generate(model, tokenizer, prompts, args.eval_samples, args).texts
    right = [reward_correct(text, problems[i // args.eval_samples]) for i, text in enumerate(texts)]
    table = [right[i:i + args.eval_samples] for i in range(0, len(right), args.eval_samples)]
    if file is not None:
        for i, problem in enumerate(problems[:4]):
            j = i * args.eval_samples
            file.write(f"Q: {problem['question']}\ngreedy: {greedy[i]}\nsample ({right[j]}): {texts[j]}\n\n")
    return summarise(table, [reward_correct(text, p) for text, p in zip(greedy, problems)])


def plot_curve(rows, path):
    """curve.png: rewards and held-out accuracy, and below them entropy and KL, over the steps."""
    from matplotlib.figure import Figure  # without pyplot: a notebook's own pictures are left alone
    figure = Figure(figsize=(7, 6))
    axes = figure.subplots(2, 1, sharex=True)
    for axis, names in zip(axes, [("reward", "accuracy", "eval_mean", "eval_greedy"), ("entropy", "kl")]):
        for name in names:
            points = [(int(r["step"]), float(r[name])) for r in rows if r.get(name) not in (None, "")]
            if points:
                axis.plot(*zip(*points), marker="o" if name.startswith("eval") else None, label=name)
        axis.legend()
        axis.grid(alpha=0.3)
    axes[1].set_xlabel("step")
    figure.savefig(path, dpi=110, bbox_inches="tight")


def plot_credit(path, tokens, weights, titles, label="credit weight w (1 = uniform)"):
    """credit.png: each row of `tokens` (lists of strings) as text, every token on a patch coloured by its weight.

    tokens, weights: lists of equally long lists; titles: one string per row. White is weight 1; red is more, blue less.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure  # without pyplot: a notebook's own pictures are left alone
    flat = [w for row in weights for w in row]
    colours, norm = colormaps["RdBu_r"], TwoSlopeNorm(1.0, min(min(flat), 0.99), max(max(flat), 1.01))
    lines, width = [], 78  # characters in a line
    for row, values, title in zip(tokens, weights, titles):
        lines, column = lines + [title, []], 0
        for token, value in zip(row, values):
            shown = token.strip().replace("\n", "\\n") or repr(token)[1:-1]
            if column + len(shown) > width:
                lines, column = lines + [[]], 0
            lines[-1].append((column, shown, value))
            column += len(shown) + 1
    figure = Figure(figsize=(11, 0.42 * len(lines) + 0.6))
    axis = figure.subplots()
    for y, line in enumerate(lines):
        if isinstance(line, str):
            axis.text(0, -y, line, fontsize=10, weight="bold", va="center", parse_math=False)  # "$$" is a token like any other
            continue
        for column, shown, value in line:
            axis.text(column, -y, shown, family="monospace", fontsize=10, va="center", parse_math=False,
                      color="white" if abs(norm(value) - 0.5) > 0.35 else "black",
                      bbox=dict(facecolor=colours(norm(value)), edgecolor="none", pad=2.5))
    axis.set(xlim=(0, width), ylim=(-len(lines) + 0.4, 0.6))
    axis.axis("off")
    figure.colorbar(ScalarMappable(norm, colours), ax=axis, label=label, fraction=0.025, pad=0.01)
    figure.savefig(path, dpi=130, bbox_inches="tight")


def picture(path, tokenizer, rollout, rewards, weights):
    """credit.png of the prompt whose responses differ most in reward: its best and its worst response."""
    groups = rollout.group_ids.cpu()
    members = [(groups == g).nonzero()[:, 0].tolist() for g in groups.unique()]
    value = lambda i: rewards[i].item() if rewards[i].isfinite() else rewards.nan_to_num().min().item()
    rows = max(members, key=lambda rows: max(map(value, rows)) - min(map(value, rows)))
    chosen = [max(rows, key=value), min(rows, key=value)]
    pieces = [[tokenizer.decode([t]) for t in rollout.completion_ids[i][rollout.completion_mask[i].bool()].tolist()] for i in chosen]
    values = [weights[i][rollout.completion_mask[i].bool()].tolist() for i in chosen]
    plot_credit(path, pieces, values, [f"reward {rewards[i]:.2f}" for i in chosen])


def plot_denoising(path, tokens, commit_step, C):
    """denoising.png of one response: for each token (across) and step (down) how probable its final token already was.

    tokens: T strings; commit_step (T,), C (S,T) from the sampler's trace. The ring marks the step that wrote the token.
    """
    from matplotlib.figure import Figure  # without pyplot: a notebook's own pictures are left alone
    figure = Figure(figsize=(2 + 0.38 * len(tokens), 1.5 + 0.3 * len(C)))
    axis = figure.subplots()
    image = axis.imshow(C.cpu(), cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axis.plot(range(len(tokens)), commit_step.tolist(), "o", markersize=9, markerfacecolor="none", color="red")
    axis.set_xticks(range(len(tokens)), [token.strip() or repr(token)[1:-1] for token in tokens], rotation=60, ha="right", parse_math=False)
    axis.set(ylabel="denoising step", title="probability of the final token before each step (ring: written here)")
    figure.colorbar(image, ax=axis, fraction=0.025, pad=0.01)
    figure.savefig(path, dpi=130, bbox_inches="tight")
