"""Each public pure function works after it is copied into another project: its source alone, with torch, math, numpy and
the standard library in scope and nothing else of this project, gives the golden numbers and its own docstring's examples."""
import doctest
import inspect
import itertools
import math
import sys
import types

import numpy
import pytest
import torch

import common
import daca
import datc
import delta
import dtca
import gctca
import test_core
import test_daca
import test_datc
import test_delta
import test_dtca
import test_gctca

FUNCTIONS = {  # (module, function) -> the golden tests that use it; docstring examples are run for all
    (common, "completion_mask"): [test_core.test_completion_mask_golden],
    (common, "group_advantages"): [test_core.test_group_advantages_golden],
    (common, "clipped_kl_loss"): [test_core.test_loss_golden],
    (common, "pass_at_k"): [test_core.test_pass_at_k_golden],
    (common, "num_transfer"): [], (common, "position_ids"): [], (common, "pad_left"): [], (common, "draw_strata"): [],
    (datc, "work"): [test_datc.test_golden],
    (datc, "credit_weights"): [test_datc.test_golden],
    (delta, "token_proxies"): [],
    (delta, "credit_weights"): [test_delta.test_golden],
    (gctca, "guidance_divergence"): [test_gctca.test_golden_guidance_divergence],
    (gctca, "group_divergence"): [test_gctca.test_golden_group_divergence],
    (gctca, "credit_weights"): [test_gctca.test_golden_credit_weights],
    (daca, "denoising_progress"): [test_daca.test_golden],
    (daca, "credit_weights"): [test_daca.test_golden],
    (dtca, "pos_weights"): [test_dtca.test_golden_pos_weights],
    (dtca, "select_steps"): [test_dtca.test_golden_select_steps],
    (dtca, "entropy_change"): [test_dtca.test_golden_entropy_change],
    (dtca, "calibrate"): [test_dtca.test_golden_calibrate],
}


def copied(module, name):
    """The function, made again from its source alone, in a scope that holds nothing of this project."""
    scope = {"torch": torch, "math": math, "np": numpy}
    for key, value in vars(module).items():  # its own imports from the standard library
        home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
        if home.split(".")[0] in sys.stdlib_module_names and not key.startswith("__"):
            scope[key] = value
    exec(inspect.getsource(getattr(module, name)), scope)  # this project's own source, read from disk
    return scope[name], scope


def arguments(test):
    """Every combination of a test's parametrize marks, as keyword arguments."""
    axes = []
    for mark in getattr(test, "pytestmark", []):
        names, values = mark.args[0], mark.args[1]
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        axes.append([dict(zip(names, v if len(names) > 1 else [v])) for v in values])
    return [{k: v for part in combination for k, v in part.items()} for combination in itertools.product(*axes)]


@pytest.mark.parametrize("module, name", FUNCTIONS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_copied_function_stands_alone(module, name, monkeypatch):
    function, scope = copied(module, name)
    examples = doctest.DocTestFinder(recurse=False).find(function, name, module=False, globs=scope)
    results, calls = [doctest.DocTestRunner().run(example) for example in examples], []
    assert sum(result.failed for result in results) == 0

    def counted(*args, **kwargs):
        calls.append(name)
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)
    for test in FUNCTIONS[module, name]:
        if name in test.__globals__:
            monkeypatch.setitem(test.__globals__, name, counted)
        for case in arguments(test):
            test(**case)
    assert calls or any(result.attempted for result in results), "neither an example nor a golden number has used it"
    assert bool(calls) == bool(FUNCTIONS[module, name])


def test_a_function_that_needs_this_project_is_noticed():
    function, _ = copied(common, "token_logps")  # calls chunked_logps and others
    with pytest.raises(NameError):
        ids = torch.ones(1, 2, dtype=torch.long)
        function(types.SimpleNamespace(device=torch.device("cpu")), ids, ids, ids, ids)
