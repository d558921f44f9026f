"""Names, arguments and defaults are those of dynabatch 0.2; importing them is cheap."""

import importlib
import inspect
import subprocess
import sys
from typing import get_args

import pytest
from transformers import TrainerCallback

import batchwright
from batchwright.integrations import dynabatch
from batchwright.integrations.dynabatch.sampler import DynaBatchSampler

_SHARED = (
    "texts, tokenizer, batch_size, max_input_token_length=512, threshold=0.9, max_batch_range=2.0, shuffle=False, "
    "shuffle_seed=21, shuffle_keep_first_n=3, friendly_batch_size=False, keep_batch_size_even=True, num_workers=4, "
    "debug=False, dynamic_batch_mode=True, smooth_batches=True, smooth_batches_max_diff=0.2, "
    "save_input_features=False, token_lengths=None, word_lengths=None, char_lengths=None"
)
SIGNATURES = {
    "dynabatch_sampler": _SHARED,
    "build_dynabatch_dataloader": _SHARED + ", **tokenizer_kwargs",
    "compute_lengths": "texts, tokenizer, max_length, max_workers=4",
    "generate_with_oom_fallback": "model, batch, min_batch_size, device, pad_token_id=None, **generate_kwargs",
    "split_batch": "batch, chunk_size",
    "split_inputs_dict": "batch, chunk_size, batch_size_key='input_ids'",
    "merge_outputs": "outputs, pad_token_id",
    "clear_gpu_memory": "oom_error, **tensors",
    "set_cuda_alloc_conf": "",
    "make_dynabatch_trainer": "trainer_cls",
    "scale_lr_for_dynabatch": "args, sampler, dataset_size, baseline_batch_size=None",
    "DynabatchTrainerMixin": "*args, dynabatch_sampler, auto_scale_lr=False, batch_size_key='input_ids', "
    "oom_fallback=None, oom_min_batch_size=None, **kwargs",
    "MemoryCleanupCallback": "",
    "DynaBatchSampler": "token_lengths, word_lengths, char_lengths, min_batch_size, shuffle=False, threshold=0.7, "
    "max_batch_range=2.0, shuffle_seed=21, shuffle_keep_first_n=5, keep_batch_size_even=False, "
    "friendly_batch_size=False, dynamic_batch_mode=True, smooth_batches=True, smooth_batches_max_diff=0.2, "
    "debug=False, save_input_features=False",
}


def plain(parameter):
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
    return f"{stars}{parameter.name}{default}"


def signature_of(function):
    """Return names, order and defaults; our own options are keyword-only and left out."""
    parameters = inspect.signature(function).parameters.values()
    has_star = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    return ", ".join(plain(p) for p in parameters if has_star or p.kind is not p.KEYWORD_ONLY)


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_keep_their_names_order_and_defaults(name):
    assert signature_of(getattr(dynabatch, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_original_has_these_arguments(name):
    pytest.importorskip("dynabatch")
    home = importlib.import_module("dynabatch.sampler" if name == "DynaBatchSampler" else "dynabatch")
    assert signature_of(getattr(home, name)) == SIGNATURES[name]


def test_every_name_is_listed():
    assert set(dynabatch.__all__) == {*SIGNATURES, "OOMFallbackStrategy"}
    assert dynabatch.__all__ == sorted(dynabatch.__all__)
    assert set(dynabatch.__all__) <= set(dir(dynabatch))
    assert get_args(dynabatch.OOMFallbackStrategy) == ("split_retry", "skip", None)
    assert dynabatch.DynaBatchSampler is DynaBatchSampler
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        dynabatch.train  # noqa: B018


MODULES = {
    "main": ["TextDataset", "build_dynabatch_dataloader", "compute_lengths", "dynabatch_sampler"],
    "sampler": ["DynaBatchSampler"],
    "trainer": [
        "DynabatchTrainerMixin",
        "OOMFallbackStrategy",
        "make_dynabatch_trainer",
        "scale_lr_for_dynabatch",
    ],
    "utils": [
        "MemoryCleanupCallback",
        "clear_gpu_memory",
        "generate_with_oom_fallback",
        "get_even_batch_size",
        "get_hardware_friendly_batch_size",
        "merge_outputs",
        "split_batch",
        "split_inputs_dict",
    ],
}


@pytest.mark.parametrize("module", MODULES)
def test_modules_hold_the_names_that_they_hold_in_dynabatch(module):
    ours = importlib.import_module(f"batchwright.integrations.dynabatch.{module}")
    assert getattr(dynabatch, module) is ours
    for name in MODULES[module]:
        assert getattr(ours, name) is getattr(dynabatch, name, getattr(ours, name))
    with pytest.raises(AttributeError, match="no attribute 'train_all'"):
        ours.train_all  # noqa: B018


@pytest.mark.parametrize("module", MODULES)
def test_the_original_has_no_other_public_names_in_these_modules(module):
    pytest.importorskip("dynabatch")
    original = importlib.import_module(f"dynabatch.{module}")
    defined = {name for name, value in vars(original).items() if getattr(value, "__module__", "") == original.__name__}
    public = {name for name in defined if not name.startswith("_")} | set(getattr(original, "__all__", ()))
    assert sorted(public) == MODULES[module]


def test_the_version_is_that_of_batchwright():
    assert dynabatch.__version__ == batchwright.__version__
    assert {"__version__", *MODULES} <= set(dir(dynabatch))


def test_the_callback_is_one_of_transformers_and_cleans_up_on_any_machine():
    callback = dynabatch.MemoryCleanupCallback()
    assert isinstance(callback, TrainerCallback)
    assert callback.on_evaluate(None, None, None) is None
    assert callback.on_epoch_end(None, None, None) is None


def test_importing_it_costs_little_beyond_torch_and_loads_no_transformers():
    code = (
        "import sys, time, torch; start = time.process_time();"
        "import batchwright.integrations.dynabatch as d; d.dynabatch_sampler;"
        "print(time.process_time() - start, 'transformers' in sys.modules)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    # The best of three, since the machine may be busy with something else.
    assert min(float(run.stdout.split()[0]) for run in runs) <= 0.3
    assert {run.stdout.split()[1] for run in runs} == {"False"}
