"""What only a GPU can show of functions: real captures, streams, threads, memory, and vectors served from graphs."""

import asyncio
import gc
import threading

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from batchwright.step import Encoder, encode, graphed

pytestmark = pytest.mark.needs_cuda
SHAPES = [(8, 16), (2, 32), (1, 16)]
PAD = {"input_ids": 0, "attention_mask": 0}


def make_bert(dtype=torch.float32, **options):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, vocab_size=200,
        max_position_embeddings=128, **options,
    )  # fmt: skip
    return transformers.BertModel(config).eval().to("cuda", dtype)


def make_llama(dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
        vocab_size=200, max_position_embeddings=128,
    )  # fmt: skip
    return transformers.LlamaModel(config).eval().to("cuda", dtype)


def texts(num, longest, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 200, length).tolist() for length in rng.integers(1, longest + 1, num)]


def batch(rows, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 200, (rows, length), generator=generator).cuda()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def pooled(model):
    def run(input_ids, attention_mask):
        hidden = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state.float()
        weights = attention_mask[..., None].float()
        return (hidden * weights).sum(1) / weights.sum(1)

    return run


def far(found, wanted):
    return float((found - wanted).norm(dim=-1).max() / wanted.norm(dim=-1).max())


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)])
def test_padded_replays_give_what_each_call_gives_by_itself(dtype, near):
    run = pooled(make_bert(dtype))
    function = graphed(run, SHAPES, pad=PAD, graphs=True)
    for seed, (rows, length) in enumerate([(8, 16), (5, 9), (1, 3), (2, 31), (7, 16), (1, 16)]):
        call = batch(rows, length, seed)
        with torch.no_grad():
            assert far(function(**call), run(**call)) < near
    summary = function.summary()
    assert (summary.num_replayed, summary.num_eager, len(summary.shapes)) == (6, 0, 3)
    assert summary.pool_bytes > 0


def test_autocast_inside_the_function_is_captured():
    model = make_bert()

    def run(input_ids, attention_mask):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return pooled(model)(input_ids, attention_mask)

    function = graphed(run, SHAPES, pad=PAD, graphs=True)
    with torch.no_grad():
        assert far(function(**batch(3, 9)), run(**batch(3, 9))) < 5e-2
    assert function.summary().num_replayed == 1


def test_other_autocast_around_a_call_is_captured_anew():
    run = pooled(make_bert())
    function = graphed(run, SHAPES, pad=PAD, graphs=True)
    call = batch(4, 9)
    plain = function(**call)
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
        rough, wanted = function(**call), run(**call)
    assert far(rough, wanted) < 5e-2
    assert torch.equal(function(**call), plain)
    assert function.summary().num_eager == 0


def test_results_stay_when_later_calls_are_replayed():
    function = graphed(pooled(make_bert()), SHAPES, pad=PAD, graphs=True)
    first = function(**batch(3, 9, seed=1))
    kept = first.clone()
    for seed in range(20):
        function(**batch(8, 16, seed))
    assert torch.equal(first, kept)


def test_weights_changed_in_place_count_and_others_are_captured_anew():
    model = make_bert()
    run = pooled(model)
    function = graphed(run, SHAPES, pad=PAD, graphs=True)
    call = batch(4, 9)
    before = function(**call)
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight.mul_(3)
        assert far(function(**call), run(**call)) < 1e-4
    assert function.summary().num_captures == 3
    state = {name: 0.5 * value for name, value in model.state_dict().items() if value.is_floating_point()}
    model.load_state_dict(state, strict=False, assign=True)
    gc.collect()
    torch.cuda.empty_cache()
    with torch.no_grad():
        assert far(function(**call), run(**call)) < 1e-4
    assert function.summary().num_captures == 6
    assert not torch.allclose(before, function(**call))


def test_a_module_that_moves_between_calls_is_right():
    model = make_bert()
    function = graphed(pooled(model), SHAPES, pad=PAD, graphs=True)
    call = batch(4, 9)
    wanted = function(**call)
    model.half()
    gc.collect()
    torch.cuda.empty_cache()
    assert far(function(**call), wanted) < 1e-2
    model.float()
    assert far(function(**call), wanted) < 1e-2


def test_inputs_on_the_host_are_copied_and_may_be_written_to_at_once():
    run = pooled(make_bert())
    function = graphed(run, SHAPES, pad=PAD, graphs=True)
    for is_pinned in (False, True):
        ids = torch.randint(1, 200, (8, 16))
        ids, mask = (one.pin_memory() if is_pinned else one for one in (ids, torch.ones_like(ids)))
        with torch.no_grad():
            wanted = run(ids.cuda(), mask.cuda())
        for _ in range(20):
            found = function(input_ids=ids, attention_mask=mask)
            kept = ids.clone()
            ids.fill_(1)
            assert far(found, wanted) < 1e-4
            ids.copy_(kept)


def test_threads_and_streams_share_a_function():
    run = pooled(make_bert())
    function = graphed(run, SHAPES, pad=PAD, graphs=True)
    function.warm_up(**batch(8, 16))
    calls = [batch(1 + seed % 8, 1 + seed % 16, seed) for seed in range(60)]
    with torch.no_grad():
        wanted = [run(**call) for call in calls]
    torch.cuda.synchronize()
    wrong = []

    def work(number):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(5):
                for call, want in list(zip(calls, wanted, strict=True))[number::3]:
                    if not far(function(**call), want) < 1e-4:
                        wrong.append(number)
            stream.synchronize()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert function.summary().num_eager == 0


@pytest.mark.filterwarnings("ignore:calls run eagerly")
def test_a_function_that_waits_for_the_device_runs_eagerly_and_the_device_stays_usable():
    def run(x):
        return x * (1 + 0 * x.sum().item())

    function = graphed(run, [(4, 8)], graphs=True)
    x = torch.randn(4, 8, device="cuda")
    assert torch.equal(function(x), x)
    assert "waits for the device" in " ".join(function.summary().reasons)
    assert graphed(lambda x: 2 * x, [(4, 8)], graphs=True)(x).equal(2 * x)


def test_dropout_is_drawn_anew_at_every_replay():
    drop = nn.Dropout(0.5).cuda().train()
    function = graphed(drop, [(64, 64)], graphs=True)
    x = torch.ones(64, 64, device="cuda")
    first, second = function(x), function(x)
    assert not torch.equal(first, second)
    assert 0.4 < float((first == 0).float().mean()) < 0.6
    assert function.summary().num_replayed == 2


def test_nested_outputs_of_a_model_are_returned_as_it_returns_them():
    model = make_bert(output_hidden_states=True)
    function = graphed(model, [(4, 16)], graphs=True)
    call = batch(4, 16)
    found = function(**call)
    with torch.no_grad():
        wanted = model(**call)
    assert type(found) is type(wanted)
    assert far(found.last_hidden_state.flatten(0, 1), wanted.last_hidden_state.flatten(0, 1)) < 1e-4
    assert len(found.hidden_states) == 4
    assert function.summary().num_replayed == 1


def test_the_memory_goes_back():
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    function = graphed(pooled(make_bert()), SHAPES, pad=PAD, graphs=True)
    function.warm_up(**batch(8, 16))
    del function
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() - before < 2**24


# encode and serve


@pytest.mark.parametrize("pool", ["mean", "cls", "last"])
@pytest.mark.parametrize("make", [make_bert, make_llama])
def test_encoding_over_graphs_is_encoding_one_at_a_time(make, pool):
    model, rows = make(), texts(300, 100)
    found = encode(model, None, rows, pool=pool, graphs=True)
    alone = torch.cat([encode(model, None, [row], pool=pool, graphs=False) for row in rows])
    assert far(found, alone) < 1e-4


def test_a_served_encoder_replays_every_batch_and_every_answer_is_its_own():
    model, rows = make_bert(), texts(400, 100)
    alone = encode(model, None, rows, graphs=False).numpy()
    encoder = Encoder(model, None, max_items=16, graphs=True)

    async def serve():
        async with encoder.batcher(deadline_ms=10_000) as batcher:
            return await asyncio.gather(*(batcher.submit(row) for row in rows))

    found = np.stack(asyncio.run(serve()))
    assert np.abs(found - alone).max() < 1e-4
    assert encoder.summary().num_eager == 0
    assert encoder.summary().num_captures == len(encoder.shapes)


def test_a_length_that_is_new_costs_a_served_encoder_no_capture():
    encoder = Encoder(make_bert(torch.float16), None, max_items=8, graphs=True)
    encoder.warm_up()
    captures = encoder.summary().num_captures
    for length in range(1, 129):
        encoder([[1 + length % 100] * length])
    assert encoder.summary().num_captures == captures
