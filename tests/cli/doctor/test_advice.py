from dataclasses import replace

import pytest

from batchwright.cli.doctor.advice import advise
from batchwright.cli.doctor.records import Attention, Findings, Graphs, Launch, LaunchRow, Load, Visits

from .made import ATTENTION, GIB, GRAPHED_H200, GRAPHS, H200, LAPTOP, LAUNCH, ON_H200


def topics(findings):
    return [advice.topic for advice in advise(findings)]


def about(topic, findings):
    return next(advice for advice in advise(findings) if advice.topic == topic)


def with_attention(*entries, machine=H200):
    return Findings(machine=machine, attention=entries, launch=LAUNCH)


def test_an_h200_in_good_order_hears_only_of_shapes_and_sizes():
    assert topics(ON_H200) == ["shapes", "sizes"]


def test_cudnn_attention_on_an_h200_is_to_be_turned_off():
    advice = about("shapes", ON_H200)
    assert "takes 510 ms with the default attention (cudnn), a later one 85 ms." in advice.text
    assert "With efficient attention it is 140 ms and 97 ms: turn cudnn attention off" in advice.text
    # (425 - 43) ms saved once per shape, 12 ms lost per step: 382 / 12 = 31.8.
    assert "fewer than about 32 times" in advice.text
    assert advice.code == "torch.backends.cuda.enable_cudnn_sdp(False)"


def test_a_kernel_that_takes_no_mask_is_no_way_out_for_padded_batches():
    default, flash, *_ = ATTENTION
    advice = about("shapes", with_attention(default, flash))
    assert "No other kernel is better, so plan few shapes." in advice.text
    assert "Buckets" in advice.code


def test_without_padding_such_a_kernel_will_do():
    default, flash, *_ = ATTENTION
    advice = about("shapes", with_attention(replace(default, takes_mask=False), flash))
    # flash is faster later too, so nothing speaks for the default.
    assert "With flash attention it is 90 ms and 80 ms: turn cudnn attention off, or plan few shapes" in advice.text


def test_a_kernel_that_saves_less_than_half_is_not_worth_a_change():
    default, *_ = ATTENTION
    slow = Attention(backend="efficient", visits=Visits(0.400, 0.100), takes_mask=True)  # 300 of 425 ms remain
    assert "No other kernel is better" in about("shapes", with_attention(default, slow)).text


def test_shapes_that_cost_little_may_vary():
    cheap = Attention(backend="default", visits=Visits(0.110, 0.100), takes_mask=True, picks="efficient")
    advice = about("shapes", with_attention(cheap))
    assert advice.text.startswith("A new batch shape costs little here: 110 ms, compared with 100 ms later.")
    assert advice.code == ""


def test_a_few_milliseconds_are_no_cost_whatever_the_ratio():
    quick = Attention(backend="default", visits=Visits(0.006, 0.002), takes_mask=True)
    assert "costs little here: 6.0 ms, compared with 2.0 ms" in about("shapes", with_attention(quick)).text


def test_the_default_is_believed_as_little_as_the_kernel_it_picks():
    default, *_ = ATTENTION
    same = Attention(backend="cudnn", visits=Visits(0.090, 0.085), takes_mask=True)
    # 510 ms were an accident: the same kernel, asked for by name, took 90 ms.
    assert "costs little here: 90 ms, compared with 85 ms" in about("shapes", with_attention(default, same)).text


def test_a_default_that_does_not_say_what_it_picks_gets_few_shapes():
    default, _, efficient, *_ = ATTENTION
    advice = about("shapes", with_attention(replace(default, picks=None), efficient))
    assert "turn the default off" in advice.text
    assert "Buckets(count=16)" in advice.code


@pytest.mark.parametrize("entries", [(), (Attention(backend="default"),)])
def test_attention_that_was_not_timed_is_admitted(entries):
    assert "could not be timed" in about("shapes", with_attention(*entries)).text


def test_steps_below_8k_tokens_are_launch_bound_on_an_h200():
    advice = about("sizes", ON_H200)
    assert "Steps of up to 8,192 tokens all take 85 ms" in advice.text
    assert "launching kernels (9 us each)" in advice.text
    # 16,384 / 0.149 = 110k tokens/s is over nine tenths of 32,768 / 0.290 = 113k.
    assert "reached at 16,384 tokens" in advice.text
    assert advice.code == "bw.MaxTokens(16384)"


def test_steps_that_grow_from_the_start_have_no_floor():
    launch = replace(LAUNCH, rows=(LaunchRow(64, 0.01), LaunchRow(128, 0.02), LaunchRow(256, 0.04)))
    text = about("sizes", replace(ON_H200, launch=launch)).text
    assert "The time of a step grows from 64 tokens on: no batch is too small." in text
    assert "reached at 64 tokens" in text


def test_throughput_that_still_grows_is_not_called_a_limit():
    launch = replace(LAUNCH, rows=(LaunchRow(64, 0.010), LaunchRow(128, 0.010)))
    text = about("sizes", replace(ON_H200, launch=launch)).text
    assert "Throughput still grew at 128 tokens, the largest batch that was tried." in text


def test_more_tokens_are_not_useless_if_a_round_still_grew_at_the_largest():
    # In the second round 512 tokens have over 10 % more throughput than 256.
    tokens = (64, 128, 256, 512)
    even, growing = (0.010, 0.016, 0.024, 0.0435), (0.010, 0.016, 0.024, 0.042)
    rows = tuple(map(LaunchRow, tokens, even))
    launch = Launch(model="any", rows=rows, kernel_seconds=1e-5, rounds=(even, growing, even), in_processor_time=True)
    assert launch.knee_range == (256, 512)
    text = about("sizes", replace(ON_H200, machine=LAPTOP, launch=launch)).text
    assert "90 % of the best throughput is reached at 256 to 512 tokens; the repeats do not agree whether" in text
    assert "more tokens only take memory" not in text


def test_a_machine_without_a_gpu_is_told_so_first():
    cheap = Attention(backend="default", visits=Visits(0.006, 0.005), takes_mask=True)
    found = advise(replace(ON_H200, machine=LAPTOP, attention=(cheap,)))
    assert [advice.topic for advice in found] == ["device", "shapes", "sizes"]
    assert "torch sees no GPU" in found[0].text
    assert "On a CPU, attention plans nothing for a shape (6.0 ms when new, 5.0 ms later)" in found[1].text
    assert "calling operations" in found[2].text


def test_times_that_no_cpu_needs_are_not_called_cheap():
    # 510 ms when new against 85 ms later: whatever took that long, it was not planning.
    text = about("shapes", replace(ON_H200, machine=LAPTOP)).text
    assert text.startswith("Too busy to say what a new batch shape costs: 1 of 1 shapes took notably longer when new")
    assert "lengths may vary freely" not in text


@pytest.mark.parametrize("num_costly", range(6))
def test_shapes_that_contradict_each_other_settle_nothing(num_costly):
    cheap, costly = Visits(0.090, 0.085), Visits(0.510, 0.085)
    repeats = (costly,) * num_costly + (cheap,) * (5 - num_costly)
    best = min(repeats, key=lambda visits: visits.extra_seconds)
    text = about("shapes", with_attention(Attention(backend="default", visits=best, repeats=repeats))).text
    if num_costly == 0:
        assert text.startswith("A new batch shape costs little here")
    elif num_costly == 5:
        assert text.startswith("The first step with a new batch shape takes 510 ms")
    else:
        assert text.startswith(f"Too busy to say what a new batch shape costs: {num_costly} of 5 shapes")


def test_another_kernel_must_be_better_in_every_repeat():
    default, _, efficient, *_ = ATTENTION
    steady = replace(efficient, repeats=(Visits(0.140, 0.097), Visits(0.150, 0.097)))
    assert "With efficient attention" in about("shapes", with_attention(default, steady)).text
    # Once, a new shape took 403 ms longer with it too.
    shaky = replace(efficient, repeats=(Visits(0.140, 0.097), Visits(0.500, 0.097)))
    assert "No other kernel is better" in about("shapes", with_attention(default, shaky)).text


def test_a_busy_machine_is_not_trusted():
    found = advise(replace(ON_H200, launch=replace(LAUNCH, noise=2.34)))
    assert found[0].topic == "noise"
    assert "2.3 times as long" in found[0].text


def test_a_processor_that_others_want_is_named_with_its_load():
    found = advise(replace(ON_H200, machine=LAPTOP, load=Load(wall_per_cpu=2.04, average=31.5)))
    assert found[0].topic == "noise"
    assert "a loop took 2.0 times its own time (load 31.5, 16 cores)" in found[0].text


def test_launches_that_waited_for_the_processor_give_no_sizes():
    # On a GPU the time of a short step is that of the processor which launches it.
    advice = about("sizes", replace(ON_H200, load=Load(wall_per_cpu=2.0)))
    assert advice.text.startswith("Too busy to say which batches are too small")
    assert advice.code == ""
    # Others add nothing to processor time.
    launch = replace(LAUNCH, in_processor_time=True)
    assert about("sizes", replace(ON_H200, launch=launch, load=Load(wall_per_cpu=2.0))).code == "bw.MaxTokens(16384)"


def rounds(*changes):
    """Rounds of ``LAUNCH``, each with the seconds of some rows changed."""
    seconds = [row.seconds for row in LAUNCH.rows]
    return tuple(tuple(change.get(place, value) for place, value in enumerate(seconds)) for change in changes)


def test_rounds_that_name_neighbouring_sizes_give_both():
    # In the second round 8,192 tokens take 80 ms: 102k tokens/s, nine tenths of 113k.
    launch = replace(LAUNCH, rounds=rounds({}, {3: 0.080}))
    advice = about("sizes", replace(ON_H200, launch=launch))
    assert "reached at 8,192 to 16,384 tokens" in advice.text
    assert advice.code == "bw.MaxTokens(16384)"


def test_rounds_that_agree_on_one_figure_give_that_one():
    # In the second round the two smallest steps took 60 ms, so that only they are short: 2,048 against 8,192 tokens.
    launch = replace(LAUNCH, rounds=rounds({}, {0: 0.060, 1: 0.060}))
    found = advise(replace(ON_H200, launch=launch))
    assert [advice.topic for advice in found] == ["noise", "shapes", "sizes"]
    assert found[-1].text.startswith("The repeats do not agree on which steps take as long as the shortest one.")
    assert "reached at 16,384 tokens" in found[-1].text


def test_rounds_that_contradict_each_other_give_none():
    # In the second round 2,048 tokens already reach the throughput.
    launch = replace(LAUNCH, rounds=rounds({}, {1: 0.018, 0: 0.018}))
    found = advise(replace(ON_H200, launch=launch))
    assert [advice.topic for advice in found] == ["noise", "shapes", "sizes"]
    assert found[-1].text.startswith("Too busy to say which batches are too small: the repeats of a step differ by")
    assert found[-1].code == ""


def with_graphs(**changes):
    return replace(GRAPHED_H200, graphs=replace(GRAPHS, **changes))


def test_graphs_that_pay_come_with_their_border_and_a_line():
    assert topics(GRAPHED_H200) == ["shapes", "sizes", "graphs"]
    advice = about("graphs", GRAPHED_H200)
    # 40 / 5 = 8 at 1,024 tokens; 49.5 / 45 = 1.1 at 16,384, 91 / 90 at 32,768.
    assert "of 1,024 tokens take 5.0 ms instead of 40 ms (8.0 times as fast) with 12 layers" in advice.text
    assert "pay up to about 16,384 tokens a step on this machine" in advice.text
    assert advice.code == "Stepper(model, optimizer, loss_fn, graphs=True, shapes=sampler)"


def test_graphs_that_pay_to_the_end_have_no_border():
    text = about("graphs", with_graphs(rows=GRAPHS.rows[:2])).text
    assert "pay up to about 4,096 tokens a step and more, the most that was tried" in text


def test_graphs_that_gain_nothing_are_left_off():
    advice = about("graphs", with_graphs(rows=GRAPHS.rows[-1:]))
    assert advice.text == ("CUDA graphs gain less than 10 % here, even with 32,768 tokens a step: leave graphs=False.")
    assert advice.code == ""


def test_rounds_that_name_two_borders_give_both():
    rounds = ((8.0, 3.5, 1.2, 1.15), (8.0, 3.5, 1.2, 1.0))
    assert "pay up to about 16,384 to 32,768 tokens a step" in about("graphs", with_graphs(rounds=rounds)).text


@pytest.mark.parametrize(
    "findings",
    [with_graphs(rounds=((8.0, 1.0, 1.0, 1.0),)), replace(GRAPHED_H200, load=Load(wall_per_cpu=2.0))],
    ids=["rounds", "load"],
)
def test_borders_that_others_may_have_moved_are_not_stated(findings):
    advice = about("graphs", findings)
    assert advice.text.startswith("Too busy to say for which steps CUDA graphs pay")
    assert advice.code == ""


def test_encoding_that_gains_comes_with_its_border_and_a_line():
    found = replace(GRAPHED_H200, encoding=GRAPHS)
    assert topics(found) == ["shapes", "sizes", "graphs", "encoding"]
    advice = about("encoding", found)
    assert "Encoding 1,024 tokens takes 5.0 ms as a CUDA graph instead of 40 ms (8.0 times as fast)" in advice.text
    assert "graphs pay up to about 16,384 tokens a batch" in advice.text
    assert advice.code == "encode(model, tokenizer, texts)"


def test_encoding_that_gains_nothing_has_no_line():
    advice = about("encoding", replace(GRAPHED_H200, encoding=replace(GRAPHS, rows=GRAPHS.rows[-1:])))
    assert advice.text == "Encoding 32,768 tokens gains less than 10 % by a CUDA graph here."
    assert advice.code == ""


def test_encoding_on_a_busy_machine_is_not_spoken_of():
    found = replace(GRAPHED_H200, encoding=GRAPHS, load=Load(wall_per_cpu=2.0))
    assert "encoding" not in topics(found)


def test_decoding_that_gains_comes_with_its_border_and_names_engines():
    found = replace(GRAPHED_H200, decoding=GRAPHS)
    advice = about("decoding", found)
    assert "One more token for 1,024 rows takes 5.0 ms as a CUDA graph instead of 40 ms (8.0 times" in advice.text
    assert "graphs pay up to about 16,384 rows" in advice.text
    assert "vLLM" in advice.text
    assert advice.code == "generate(model, examples, max_new_tokens=128)"
    nothing = about("decoding", replace(GRAPHED_H200, decoding=replace(GRAPHS, rows=GRAPHS.rows[-1:])))
    assert nothing.text == "Decoding 32,768 rows gains less than 10 % by graphs."
    assert "decoding" not in topics(replace(found, load=Load(wall_per_cpu=2.0)))


def test_a_failed_capture_is_told_as_it_is():
    graphs = Graphs(problem="a step of 1,024 tokens could not be captured: out of memory")
    advice = about("graphs", replace(ON_H200, graphs=graphs))
    assert advice.text == (
        "What CUDA graphs would save is unknown: a step of 1,024 tokens could not be captured: out of memory."
    )


def test_without_cuda_there_is_no_advice_on_graphs():
    assert "graphs" not in topics(replace(GRAPHED_H200, machine=LAPTOP))


def test_memory_that_others_hold_is_named():
    busy = replace(H200, free_bytes=100 * GIB)
    assert "Only 100.0 of 140.0 GiB are free" in about("memory", replace(ON_H200, machine=busy)).text


def test_an_allocator_that_fragments_gets_its_setting():
    plain = replace(H200, allocator="")
    advice = about("memory", replace(ON_H200, machine=plain))
    assert advice.code == "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def test_without_bfloat16_a_scaler_is_needed():
    old = replace(H200, name="Tesla T4", has_bfloat16=False)
    advice = about("numbers", replace(ON_H200, machine=old))
    assert advice.text.startswith("Tesla T4 does not compute in bfloat16.")
    assert "GradScaler" in advice.code


def test_a_missing_numba_is_named():
    bare = replace(H200, versions={"numba": None})
    assert about("packages", replace(ON_H200, machine=bare)).code == "pip install 'batchwright[numba]'"


def test_every_sentence_ends():
    for machine in (H200, LAPTOP, replace(H200, allocator="", has_bfloat16=False, free_bytes=0, versions={})):
        for advice in advise(replace(GRAPHED_H200, machine=machine)):
            assert advice.text.endswith((".", ":"))
            assert "  " not in advice.text


def test_a_size_that_could_not_be_captured_was_tried():
    paying = tuple(row for row in GRAPHS.rows if row.gain >= 1.1)
    problem = f"a step of {2 * paying[-1].tokens:,} tokens could not be captured: out of memory"
    graphs = replace(GRAPHS, rows=paying, rounds=(), problem=problem)
    text = next(advice.text for advice in advise(replace(GRAPHED_H200, graphs=graphs)) if advice.topic == "graphs")
    assert f"pay up to about {paying[-1].tokens:,} tokens a step, the most that could be captured: there" in text
    assert "and more" not in text
