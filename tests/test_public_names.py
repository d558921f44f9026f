"""Every public name and signature as recorded in ``tests/data/public_names.json`` by ``tools/public_names.py``."""

import importlib.util
import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TOOL = HERE.parent / "tools" / "public_names.py"

_BUDGETS = ("Budget", "MaxBytes", "MaxCost", "MaxItems", "MaxTokens")

# name: (as recorded, as it is now or None where it is gone, why). Names are "front.name" or "front.Class.member".
_OBSERVATION = "batchwright.lab.observations.Observation"
_IS_FINDING = "the class is called Finding now, and Observation is the same class under its old name"
_DYNABATCH = (
    "texts, tokenizer, batch_size, max_input_token_length=512, threshold=0.9, max_batch_range=2.0, shuffle=False, "
    "shuffle_seed=21, shuffle_keep_first_n=3, friendly_batch_size=False, keep_batch_size_even=True, num_workers=4, "
    "debug=False, dynamic_batch_mode=True, smooth_batches=True, smooth_batches_max_diff=0.2, "
    "save_input_features=False, token_lengths=None, word_lengths=None, char_lengths=None, *, rank=0, world_size=1, "
    "task={task}, max_new_tokens=None, drop_last=False, progress=True, cache=None"
)
_TASKED = {  # where task='generate' became task=None
    "DynaBatchSampler": "class(token_lengths, word_lengths, char_lengths, min_batch_size, shuffle=False, "
    "threshold=0.7, max_batch_range=2.0, shuffle_seed=21, shuffle_keep_first_n=5, keep_batch_size_even=False, "
    "friendly_batch_size=False, dynamic_batch_mode=True, smooth_batches=True, smooth_batches_max_diff=0.2, "
    "debug=False, save_input_features=False, *, rank=0, world_size=1, task={task}, max_new_tokens=None, "
    "drop_last=False), bases: Generic, Sampler",
    "build_dynabatch_dataloader": f"function({_DYNABATCH}, **tokenizer_kwargs)",
    "dynabatch_sampler": f"function({_DYNABATCH})",
}
_PLANNING = (
    "size_multiple_of=1, size_ladder=None, pad_multiple_of=1, keep_first=0, oversize='error', drop_last=False, "
    "remainder='spread', balance_over={over}, cost=None{more})"
)
_BALANCED = {  # where balance_over=64 became balance_over=None
    "BatchSampler": "class(lengths, budget, *, rank=0, world_size=1, dataset=None, "
    f"grouping=WindowSort(batches_per_window=256), shuffle=True, seed=0, {_PLANNING}, bases: none",
    "plan_batches": "function(lengths, budget, *, grouping=WindowSort(batches_per_window=256), shuffle=True, seed=0, "
    f"epoch=0, world_size=1, {_PLANNING}",
}
_PLAN = (
    "class(indices, offsets, shapes, row_offsets, world_size, num_repeated, num_dropped, num_truncated, lengths, "
    "budget, settings, epoch{more}), bases: none"
)
_REPORT = (
    "class(num_batches, padding, budget_used, largest, num_shapes, straggler_waste, recurrence, order_correlation, "
    "repeated, dropped, truncated, world_size{more}), bases: none"
)
_PAD_COLLATOR = (
    "class(*, pad_to=<factory>, axis_fields=('input_ids',), same_axis=<factory>, pad_values=<factory>, "
    "mask_field='attention_mask'"
)
_PACK_COLLATOR = "class(*, layout='positions', width=None, pad_id=0, mask_dtype=torch.bool"
_STATS = (
    "class(*, num_waiting, num_running, num_submitted, num_answered, num_failed, num_shed, num_cancelled, num_closed, "
    "num_missed, num_refused, num_batches, num_calls, num_ooms, num_items, num_tokens, num_padded_tokens, mean_items, "
    "padding, reasons, wait_ms, latency_ms, max_tokens, time_model{more}), bases: none"
)
_BATCHER = (
    "class(run, *, policy='adaptive', max_items=64, max_wait_ms=10.0, deadline_ms=None, {lengths}, "
    "max_tokens=None, max_queue=1000, num_workers=1, {more}on_error='bisect', on_oom='split', time_model=None, "
    "clock=monotonic), bases: Generic"
)
CHANGED: dict[str, tuple[str, str | None, str]] = {
    "batchwright.lab.report.ReportFiles": (
        "class(*, html, markdown, csv), bases: none",
        "class(*, html, markdown, csv, verdict=()), bases: none",
        "the verdict in words, which the command prints",
    ),
    "batchwright.step.generate": (
        "function(model, examples, *, budget=None, collate=None, lengths=None, count_output=False, pad_token_id=None, "
        "pad_multiple_of=1, memory=None, progress=False, **generate_kwargs)",
        "function(model, examples, *, budget=None, collate=None, lengths=None, count_output=False, pad_token_id=None, "
        "pad_multiple_of=1, memory=None, progress=False, graphs='auto', **generate_kwargs)",
        "decoding by graphs",
    ),
    **{
        f"batchwright.serve.BatchedFunction.{name}": (
            f"{kind}(self, item, *, deadline_ms=None, priority=0)",
            f"{kind}(self, item, *more, deadline_ms=None, priority=0)",
            "Model.method(model, item) is model.method(item)",
        )
        for name, kind in (("__call__", "async method"), ("sync", "method"))
    },
    "batchwright.serve.http.make_app": (
        "function(batcher, *, max_body_bytes=1000000, decode=decode_json, encode=encode_json, "
        "media_type='application/json', ready=None, drain_seconds=30.0, page=True)",
        "function(batcher, *, max_body_bytes=1000000, decode=None, encode=None, media_type='application/json', "
        "ready=None, drain_seconds=30.0, page=True, limits=None, allow_hosts=None, allow_origins=())",
        "limits and guards came; None reads and writes JSON as before",
    ),
    "batchwright.serve.Stats": (
        _STATS.format(more=""),
        _STATS.format(more=", num_abandoned=0, num_restarts=0, failure=None, background=<factory>"),
        "what ended a batcher by mistake is said; threads that hang and processes that ended are counted; what offline "
        "work beside requests may do, and why it waits",
    ),
    "batchwright.serve.Batcher": (
        _BATCHER.format(lengths="length_of=None", more=""),
        _BATCHER.format(
            lengths="length_of='auto', tokenizer=None",
            more="worker='thread', run_timeout_ms=None, device=None, background=None, ",
        ),
        "lengths come by themselves; workers in processes, a time-out, a shared device, background work",
    ),
    "batchwright.StreamBatcher": (
        "class(source, *, length_of, budget, grouping=WindowSort(batches_per_window=256), buffer_size=20000, seed=0, "
        "shuffle=True, size_multiple_of=1, size_ladder=None, pad_multiple_of=1, oversize='error'), bases: Generic",
        "class(source, *, length_of, budget, grouping=WindowSort(batches_per_window=256), buffer_size=20000, seed=0, "
        "shuffle=True, size_multiple_of=1, size_ladder=None, pad_multiple_of=1, oversize='error', remainder='spread', "
        "rank=0, world_size=1, sharded=False, agree=None), bases: Generic",
        "a stream is divided over ranks, or was before",
    ),
    "batchwright.TimeModel": (
        "class(terms, first_visit_seconds=0.0), bases: none",
        "class(terms, first_visit_seconds=0.0, launch_seconds=0.0), bases: none",
        "a step takes its launches, however small it is",
    ),
    "batchwright.lab.statistics.PairedDifference": (
        "class(*, num_pairs, mean, low, high, p_value), bases: none",
        "class(*, num_pairs, mean, low, high, p_value, error=None, freedom=None), bases: none",
        "the size of effect that a test could have seen follows from them",
    ),
    **{
        f"batchwright.{name}": (
            signature.format(over=64, more=""),
            signature.format(over=None, more=", groups=None"),
            "None means the world size, so that one device has a random order; a state holds the number in use. Groups "
            "of examples stay together",
        )
        for name, signature in _BALANCED.items()
    },
    "batchwright.PadTo": (
        "class(shapes=(), sizes=(), multiple_of=1), bases: none",
        "class(shapes=(), sizes=(), multiple_of=1, num_axes=None), bases: none",
        "it knows how many lengths the plan has",
    ),
    "batchwright.Plan": (
        _PLAN.format(more=""),
        _PLAN.format(more=", pad_to"),
        "the rule that the shapes of a plan follow is part of it",
    ),
    "batchwright.PlanReport": (
        _REPORT.format(more=""),
        _REPORT.format(more=", balance_over, num_groups=0, largest_group=0"),
        "a report names the number in use, and the groups that stay together",
    ),
    **{
        f"batchwright.integrations.dynabatch.{name}": (
            signature.format(task="'generate'"),
            signature.format(task=None),
            "without a task a loop plans for generation as before, and a trainer for training",
        )
        for name, signature in _TASKED.items()
    },
    **{
        f"batchwright.integrations.{name}.current_gradient_accumulation_steps": (
            "attribute",
            None,
            "an attribute of the trainer, which a function sets now; the trainer still has it",
        )
        for name in ("dynabatch.DynabatchTrainerMixin", "huggingface.AdaptiveTrainerMixin")
    },
    "batchwright.measure_lengths": (
        "function(texts, tokenizer, *, max_length=None, num_workers=0, batch_size=1000, progress=True, cache=None)",
        "function(texts, tokenizer=None, *, column=None, max_length=None, num_workers=0, batch_size=1000, "
        "progress=True, cache=None)",
        "token ids need no tokenizer, and an option came",
    ),
    "batchwright.errors.UpdateMemoryError": (
        "class, bases: BaseException, BatchwrightError, Exception, RuntimeError",
        "class(message, *, num_changed=0, can_retry=False), bases: BaseException, BatchwrightError, Exception, "
        "RuntimeError",
        "it says what is left of the step",
    ),
    "batchwright.step.StepReport": (
        "class(batch_size, num_micro_batches, weight, ooms, seconds, peak_bytes, memory_fraction, lr, _loss_sum, "
        "_metric_sums, _noise=None, _grad_norm=None), bases: none",
        "class(batch_size, num_micro_batches, weight, ooms, _seconds, peak_bytes, memory_fraction, lr, _loss_sum, "
        "_metric_sums, _noise=None, _grad_norm=None, graphed=False, recompilations=0, tokens=None, beta2=None), "
        "bases: none",
        "six fields came, and seconds are read from the device when somebody asks",
    ),
    "batchwright.step.NoiseReport": (
        "class(s, g2, num_parts, reliable, unit='examples', groups=<factory>), bases: none",
        "class(s, g2, num_parts, reliable, unit='examples', groups=<factory>, source='all'), bases: none",
        "it says what it was measured in",
    ),
    "batchwright.step.Stepper": (
        "class(model, optimizer, loss_fn, *, micro_batch='auto', lengths=None, collate=None, trim=None, "
        "weight_of=None, clip_norm=None, autocast=None, scaler=None, on_oom='split', measure_noise=False, "
        "noise_groups=None, lr_rule=None, base_size=None, memory=None), bases: none",
        "class(model, optimizer, loss_fn, *, micro_batch='auto', lengths=None, collate=None, trim=None, "
        "weight_of=None, clip_norm=None, autocast=None, scaler=None, on_oom='split', measure_noise=False, "
        "noise_groups=None, lr_rule=None, base_size=None, memory=None, existing_gradients='clear', "
        "split=None, graphs=False, shapes=None, noise_parts=None, noise_from='all', beta2_rule=None, "
        "tokens_of=None), bases: none",
        "eight options came",
    ),
    "batchwright.BatchSizeController": (
        "class(policy, *, min_size, max_size, initial=None), bases: none",
        "class(policy, *, min_size, max_size, initial=None, max_history=1000), bases: none",
        "an option came",
    ),
    "batchwright.size.Observation": (
        "class(*, epoch=None, step=None, examples=None, tokens=None, batch_size=None, loss=None, lr=None, "
        "entropy=None, noise_s=None, noise_g2=None, noise_reliable=None, noise_parts=None, seconds=None, "
        "memory_fraction=None, "
        "size=None), bases: none",
        "class(*, epoch=None, step=None, examples=None, tokens=None, batch_size=None, batch_tokens=None, loss=None, "
        "lr=None, entropy=None, noise_s=None, noise_g2=None, noise_reliable=None, noise_parts=None, seconds=None, "
        "memory_fraction=None, experiment=None, "
        "size=None, exact_size=None, ends_epoch=False, takes_over=False, begins_tokens=False, multiples=()), bases: "
        "none",
        "seven fields came",
    ),
    "batchwright.size.Decision": (
        "class(*, epoch, step, examples, old, new, wanted, reason), bases: none",
        "class(*, epoch, step, examples, old, new, wanted, reason, tokens=None), bases: none",
        "tokens are counted too",
    ),
    "batchwright.size.cooldown": (
        "function(*, examples=None, steps=None, epochs=None)",
        "function(*, examples=None, steps=None, epochs=None, tokens=None)",
        "an option came",
    ),
    "batchwright.size.goodput": (
        "function(time_model, *, length, base_size, smallest=None, largest=None, num_candidates=50, world_size=1, "
        "max_items=None, horizon=100000.0, gain=1.05)",
        "function(time_model=None, *, length=None, base_size=None, smallest=None, largest=None, num_candidates=50, "
        "world_size=1, max_items=None, horizon=None, gain=1.05, unit='examples')",
        "what was required is learned where it is left out, and calls with all of it mean what they did",
    ),
    "batchwright.size.memory_driven": (
        "function(high=0.8, low=0.48, factor=2, *, remember=True, patience=10)",
        "function(high=0.8, low=0.48, factor=2, *, remember=True, patience=10, per='step', every=None)",
        "two options came",
    ),
    "batchwright.size.noise_driven": (
        "function(target=1.0, *, estimator='unbiased', horizon=None, num_examples=None, high=None, low=None, up=None, "
        "down=None, per=None, every=None)",
        "function(target=1.0, *, estimator='unbiased', horizon=None, num_examples=None, high=None, low=None, up=None, "
        "down=None, num_parts=None, per=None, every=None)",
        "an option came",
    ),
    "batchwright.ResizableBatchSampler": (
        "class(num_examples, controller, *, lengths=None, budget=None, curriculum=None, shuffle=True, seed=0, rank=0, "
        "world_size=1), bases: none",
        "class(num_examples, controller, *, lengths=None, budget=None, grouping=None, size_unit='examples', "
        "curriculum=None, shuffle=True, seed=0, rank=0, world_size=1, groups=None), bases: none",
        "three options came; groups are refused in a sentence",
    ),
    "batchwright.regroup": (
        "function(loader, controller, *, rank=0, world_size=1, drop_last=False)",
        "function(loader, controller, *, rank=0, world_size=1, drop_last=False, length_of=None)",
        "an option came",
    ),
    "batchwright.Regrouped": (
        "class(loader, controller, *, rank=0, world_size=1, drop_last=False), bases: Generic",
        "class(loader, controller, *, rank=0, world_size=1, drop_last=False, length_of=None), bases: Generic",
        "an option came",
    ),
    "batchwright.step.PackCollator": (
        f"{_PACK_COLLATOR}), bases: none",
        f"{_PACK_COLLATOR}, causal=True, token_fields=('token_type_ids',)), bases: none",
        "encoders are packed too, and further fields of tokens",
    ),
    "batchwright.step.PadCollator": (
        f"{_PAD_COLLATOR}), bases: none",
        f"{_PAD_COLLATOR}, fill_rows=False, label_fields=('labels', 'label', 'shift_labels')), bases: none",
        "two options came",
    ),
    "batchwright.integrations.huggingface.AdaptiveTrainerMixin": (
        "class(*args, budget=None, controller=None, grouping=None, lengths=None, weighting='tokens', on_oom='split', "
        "lr_rule='none', base_size=None, measure_noise=False, memory=None, eval_budget='same', plan_options=None, "
        "**kwargs), bases: none",
        "class(*args, budget=None, controller=None, grouping=None, lengths=None, weighting='tokens', on_oom='split', "
        "micro_batch=None, lr_rule=None, base_size=None, measure_noise=False, memory=None, eval_budget='same', "
        "plan_options=None, graphs=False, curriculum=None, measure_entropy=None, history=False, beta2_rule=None, "
        "**kwargs), bases: none",
        "six options came; None as the rule is 'none', and what controller='auto' may fill in",
    ),
    "batchwright.integrations.huggingface.BatchSizeCallback": (
        "class(controller, *, batch_size=None), bases: TrainerCallback",
        "class(controller, *, batch_size=None, history=False), bases: TrainerCallback",
        "an option came",
    ),
    "batchwright.integrations.accelerate.prepare": (
        "function(accelerator, model, optimizer, loader, *, loss_fn, scheduler=None, controller=None, "
        "**stepper_options)",
        "function(accelerator, model, optimizer, loader, *, loss_fn, scheduler=None, controller=None, history=False, "
        "budget=None, **stepper_options)",
        "two options came",
    ),
    "batchwright.integrations.accelerate.AcceleratedStepper": (
        "class(stepper, optimizer, loader, scheduler, controller), bases: none",
        "class(stepper, optimizer, loader, scheduler, controller, *, announce=None, ticks=None, fallback=None, "
        "budget=None), bases: none",
        "four options came",
    ),
    "batchwright.integrations.lightning.AdaptiveBatching": (
        "class(*, controller=None, prefix='batchwright/', **stepper_options), bases: Callback",
        "class(*, controller=None, prefix='batchwright/', history=False, budget=None, **stepper_options), "
        "bases: Callback",
        "two options came",
    ),
    "batchwright.lab.datasets.Dataset": (
        "class(*, name, task, train, validation, num_classes, vocabulary_size=None), bases: none",
        "class(*, name, task, train, validation, num_classes, vocabulary_size=None, source='', "
        "num_signal_columns=None), bases: none",
        "two options came",
    ),
    "batchwright.lab.strategies.Conditions": (
        "class(*, settings, num_train, num_classes=None, difficulty=None, schedule=None), bases: none",
        "class(*, settings, num_train, num_classes=None, difficulty=None, schedule=None, seconds=None), bases: none",
        "an option came",
    ),
    "batchwright.lab.strategies.GROUPS": (
        "value ('constant', 'linear', 'exponential', 'cyclical', 'loss', 'entropy', 'noise', 'lr-coupled', "
        "'curriculum', 'memory', 'lr-decay', 'replay')",
        "value ('constant', 'linear', 'exponential', 'cyclical', 'loss', 'entropy', 'noise', 'lr-coupled', "
        "'curriculum', 'memory', 'time', 'lr-decay', 'replay')",
        "a group came: strategies that follow the time of an update",
    ),
    "batchwright.lab.strategies.Strategy": (
        "class(*, name, group, make, about='', needs_classes=False, replays=None), bases: none",
        "class(*, name, group, make, about='', needs_classes=False, replays=None, min_epochs=1), bases: none",
        "an option came",
    ),
    "batchwright.lab.strategies.Strategy.fits": (
        "method(self, num_classes)",
        "method(self, num_classes, *, num_epochs=None)",
        "an option came",
    ),
    "batchwright.lab.LabPlan": (
        "class(*, name, cells, strategies, seeds, tuning_seeds=(1000, 1001), grids=<factory>), bases: none",
        "class(*, name, cells, strategies, seeds, tuning_seeds=(1000, 1001), grids=<factory>, tuning_rounds=2, "
        "update_time=UpdateTime(fixed_ms=70, per_example_ms=0.08, about='an H200 that trains a translation model of "
        "60 million parameters, 88 tokens per example, eagerly')), bases: none",
        "two options came: every strategy is tuned, and seconds are simulated",
    ),
    _OBSERVATION: (
        "class(*, topic, sentence, evidence=(), strategies=()), bases: none",
        "is batchwright.lab.observations.Finding",
        _IS_FINDING,
    ),
    **{
        f"{_OBSERVATION}.{name}": ("attribute", None, _IS_FINDING)
        for name in ("evidence", "sentence", "strategies", "topic")
    },
    f"{_OBSERVATION}.to_dict": ("method(self)", None, _IS_FINDING),
}
# Names that came since; the members of a new class come with it.
ADDED = {
    "batchwright.BatchSampler.read_state",
    "batchwright.BatchSampler.start_of",
    *(
        f"batchwright.{name}.takes_weights"
        for name in ("Buckets", "Grouping", "InOrder", "Packed", "Sorted", "WindowSort")
    ),
    "batchwright.PadTo.num_axes",
    "batchwright.Plan.num_repeated_batches",
    "batchwright.Plan.pad_to",
    "batchwright.PlanReport.balance_over",
    "batchwright.PlanReport.largest_group",
    "batchwright.PlanReport.num_groups",
    "batchwright.TimeModel.cost",
    "batchwright.TimeModel.launch_seconds",
    "batchwright.errors.RankError",
    "batchwright.integrations.accelerate.AcceleratedStepper.found_budget",
    "batchwright.integrations.accelerate.AcceleratedStepper.graph_summary",
    "batchwright.integrations.dynabatch.DynaBatchSampler.for_training",
    "batchwright.integrations.huggingface.AdaptiveTrainerMixin.found_budget",
    "batchwright.integrations.huggingface.AdaptiveTrainerMixin.graph_summary",
    "batchwright.integrations.lightning.AdaptiveBatching.found_budget",
    "batchwright.integrations.lightning.AdaptiveBatching.graph_summary",
    "batchwright.integrations.lightning.AdaptiveBatching.resizable",
    "batchwright.step.CompileCounter",
    "batchwright.step.Encoder",
    "batchwright.step.FitToMemory.accumulating",
    "batchwright.step.FoundBudget",
    "batchwright.step.Generator",
    "batchwright.step.GraphSummary",
    "batchwright.step.MarkShapes",
    "batchwright.step.SizeBranch",
    "batchwright.step.SizeExperiment",
    "batchwright.step.StepReport.beta2",
    "batchwright.step.StepReport.graphed",
    "batchwright.step.StepReport.recompilations",
    "batchwright.step.StepReport.tokens",
    "batchwright.step.Stepper.abandon",
    "batchwright.step.Stepper.graph_summary",
    "batchwright.step.WholeBatchLoss",
    "batchwright.step.auto_batch",
    "batchwright.step.encode",
    "batchwright.step.graphed",
    "batchwright.step.measure_size",
    "batchwright.step.use_varlen",
    "batchwright.step.why_not_packed",
    "batchwright.step.why_not_varlen",
    "batchwright.step.without_filler",
    "batchwright.testing.EagerGraphs",
    "batchwright.ResizableBatchSampler.num_in_epoch",
    "batchwright.ResizableBatchSampler.pad_to",
    "batchwright.ResizableBatchSampler.shapes",
    "batchwright.ResizableBatchSampler.size_unit",
    "batchwright.errors.ResultError.num_results",
    "batchwright.errors.UpdateMemoryError.can_retry",
    "batchwright.errors.UpdateMemoryError.num_changed",
    *(
        f"batchwright.lab.datasets.Dataset.{name}"
        for name in ("describe", "dimension", "num_examples", "num_signal_columns", "source")
    ),
    *(
        f"batchwright.serve.Stats.{name}"
        for name in ("background", "failure", "is_healthy", "num_abandoned", "num_restarts")
    ),
    *(f"batchwright.errors.{name}" for name in ("RunInterrupted", "RunTimeout", "WorkerDied")),
    *(f"batchwright.serve.{name}" for name in ("RunInterrupted", "RunTimeout", "WorkerDied")),
    *(
        f"batchwright.serve.{name}"
        for name in ("Background", "BackgroundBatch", "Batcher.background", "Device", "give_way")
    ),
    "batchwright.serve.guess_length",
    *(f"batchwright.serve.http.{name}" for name in ("Limits", "limited_protocol")),
    "batchwright.lab.Lab.forecast",
    "batchwright.lab.datasets.Dataset.digest",
    "batchwright.lab.LabPlan.tuning_rounds",
    "batchwright.lab.LabPlan.update_time",
    "batchwright.lab.observations.Finding",
    "batchwright.lab.presets.Cell",
    "batchwright.lab.presets.LabPlan",
    "batchwright.lab.report.HOST",
    "batchwright.lab.report.ReportFiles.verdict",
    "batchwright.lab.runner.Forecast",
    *(f"batchwright.lab.update_time.{name}" for name in ("EAGER", "GRAPHS", "UpdateTime", "named")),
    "batchwright.lab.report.LabFolder",
    "batchwright.lab.report.make_server",
    "batchwright.lab.statistics.PairedDifference.error",
    "batchwright.lab.statistics.PairedDifference.freedom",
    "batchwright.lab.statistics.pooled_difference",
    "batchwright.lab.statistics.smallest_detectable",
    "batchwright.lab.strategies.BASELINE",
    "batchwright.lab.strategies.Conditions.seconds",
    "batchwright.lab.strategies.HANDFUL",
    "batchwright.lab.strategies.Strategy.min_epochs",
    "batchwright.lab.strategies.RunSettings",
    "batchwright.size.Decision.tokens",
    "batchwright.size.ExperimentBudget",
    "batchwright.size.Observation.begins_tokens",
    "batchwright.size.learning_rate.current_lr",
    "batchwright.size.learning_rate.get_beta2_rule",
    "batchwright.size.learning_rate.half_life",
    "batchwright.size.learning_rate.Change",
    "batchwright.size.momentum",
    "batchwright.size.learning_rate.in_step",
    "batchwright.size.learning_rate.innermost",
    "batchwright.size.learning_rate.scaled_lr",
    "batchwright.step.NoiseReport.source",
    "batchwright.step.PackCollator.causal",
    "batchwright.step.PackCollator.lengths",
    "batchwright.step.PackCollator.token_fields",
    "batchwright.step.PadCollator.fill_rows",
    "batchwright.step.PadCollator.label_fields",
    "batchwright.step.split_by_budget",
    "batchwright.step.split_by_shapes",
    *(f"batchwright.{name}.__bool__" for name in (*_BUDGETS, "StreamBatcher")),
    *(f"batchwright.{name}.to_state" for name in _BUDGETS),
    "batchwright.StreamBatcher.__len__",
    *(
        f"batchwright.StreamBatcher.{name}"
        for name in ("loader", "num_repeated", "rank", "set_epoch", "track", "world_size")
    ),
    *(f"batchwright.size.noise.{name}" for name in ("Evidence", "RecentNoise", "add_recent", "check_recent")),
    "batchwright.size.noise.NoiseRatio",
    *(
        f"batchwright.size.noise.NoiseRatio.{name}"
        for name in ("factors", "g2_square", "g2_vectors", "trust", "weight")
    ),
    "batchwright.size.noise.NoiseAverage.from_state",
    "batchwright.size.noise.NoiseAverage.g2_error",
    *(f"batchwright.BatchSizeController.{name}" for name in ("max_history", "num_changes")),
    *(
        f"batchwright.size.Observation.{name}"
        for name in (
            "batch_tokens",
            "begins_tokens",
            "ends_epoch",
            "exact",
            "exact_size",
            "experiment",
            "multiples",
            "rounded",
            "takes_over",
        )
    ),
    *(f"batchwright.size.{name}.check_state" for name in ("Policy", "Transform")),
    *(f"batchwright.size.{room}minimum" for room in ("", "combine.")),
    *(
        f"batchwright.size.{room}{name}"
        for room in ("", "signals.")
        for name in ("loss_below", "loss_settled", "measured", "speed_driven", "step_time")
    ),
}


def load_tool():
    spec = importlib.util.spec_from_file_location("public_names", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def differences(recorded, present, changed=CHANGED, added=ADDED):
    """Return one line for each name that is missing, changed or new without being listed."""
    lines = []
    for name in sorted(recorded.keys() | present.keys()):
        old, new = recorded.get(name), present.get(name)
        if old is None:
            if name not in added and name.rpartition(".")[0] not in added:
                lines.append(f"{name} is new: {new}")
        elif (old, new) not in [(old, old), changed.get(name, ())[:2]]:
            lines.append(f"{name} was {old!r} and is {new!r}" if new else f"{name} is missing: {old!r}")
    return lines


@pytest.fixture(scope="module")
def recorded():
    return json.loads((HERE / "data" / "public_names.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def present():
    for package in ("torch", "transformers", "accelerate", "lightning", "ray", "sklearn", "starlette"):
        pytest.importorskip(package)
    return load_tool().public_names()


def test_no_public_name_is_missing_changed_or_unlisted(recorded, present):
    assert differences(recorded, present) == []


def test_what_is_listed_as_changed_or_added_is_so(recorded, present):
    assert {name: (recorded.get(name), present.get(name)) for name in CHANGED} == {
        name: change[:2] for name, change in CHANGED.items()
    }
    assert present.keys() >= ADDED
    assert not recorded.keys() & ADDED
    assert all(reason for *_, reason in CHANGED.values())


def test_the_record_holds_functions_classes_members_and_aliases(recorded):
    assert recorded["batchwright.size.constant"] == "function(size)"
    assert recorded["batchwright.plan.BatchSampler"] == "is batchwright.BatchSampler"
    assert recorded["batchwright.BatchSampler.report"] == "method(self, *, world_size=None)"
    assert (
        recorded["batchwright.errors.ArgumentError"]
        == "class, bases: BaseException, BatchwrightError, Exception, ValueError"
    )
    assert "clip_norm=None" in recorded["batchwright.step.Stepper"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"front.f": None}, "front.f is missing: 'function(a, *, b=1)'"),
        ({"front.f": "function(a, b=1)"}, "front.f was 'function(a, *, b=1)' and is 'function(a, b=1)'"),
        ({"front.C.m": "attribute"}, "front.C.m was 'method(self)' and is 'attribute'"),
        ({"front.g": "function()"}, "front.g is new: function()"),
    ],
)
def test_a_difference_is_found_and_can_be_listed(change, line):
    recorded = {"front.f": "function(a, *, b=1)", "front.C": "class(), bases: none", "front.C.m": "method(self)"}
    present = {name: text for name, text in {**recorded, **change}.items() if text is not None}
    assert differences(recorded, present) == [line]
    ((name, new),) = change.items()
    if name in recorded:
        assert differences(recorded, present, changed={name: (recorded[name], new, "why")}) == []
        assert differences(recorded, present, changed={name: (recorded[name], "class", "why")}) == [line]
    else:
        assert differences(recorded, present, added={name}) == []


def test_a_renamed_option_of_a_real_class_is_found(recorded, present, monkeypatch):
    import batchwright as bw

    def __init__(self, tokens): ...

    monkeypatch.setattr(bw.MaxTokens, "__init__", __init__)
    monkeypatch.delattr(bw.ResizableBatchSampler, "state_dict")
    found = differences(recorded, load_tool().public_names())
    assert {line.split()[0] for line in found} == {
        "batchwright.MaxTokens",
        "batchwright.ResizableBatchSampler.state_dict",
    }


def test_spelling_and_places_of_types_do_not_matter():
    tool = load_tool()

    def plain(a, b=dict, *rest, c=len): ...

    def annotated(a: "int", b: type = dict, *rest: tuple[int], c: object = len) -> None: ...

    assert tool.signature_of(plain) == tool.signature_of(annotated) == "(a, b=dict, *rest, c=len)"
