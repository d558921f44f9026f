"""A Ray Serve deployment through batchwright beside one through ``@serve.batch``, on a real Ray on this machine.

    python benchmarks/ray_serving.py --rates 50 150 --seconds 6 --output ray_serving.json

Requests of mixed lengths arrive by chance at a rate, through a DeploymentHandle, and are allowed 50 ms each; seconds
count from the intended arrival. The model sleeps, so the figures show waiting, Ray's own way to the replica included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
from pathlib import Path
from typing import Any

import ray
import serving_load
from serving_arms import MAX_ITEMS, WINDOW_MS
from serving_load import DEADLINE_MS, Stub, drive, poisson, summarise

from batchwright.integrations.ray import batched_deployment

# As many as ours takes by default, so that Ray's own limit of 5 requests does not cap the batch.
MAX_ONGOING = 1000 + MAX_ITEMS


def our_app() -> Any:
    return batched_deployment(Stub, length_of=int, max_items=MAX_ITEMS, deadline_ms=DEADLINE_MS).bind()


def window_app() -> Any:
    from ray import serve

    class Window:
        def __init__(self) -> None:
            self.stub = Stub()

        @serve.batch(max_batch_size=MAX_ITEMS, batch_wait_timeout_s=WINDOW_MS / 1e3)
        async def run(self, lengths: list[int]) -> list[int]:
            return await asyncio.to_thread(self.stub, lengths)

        async def __call__(self, length: int) -> int:
            return await self.run(length)

        async def stats(self) -> dict[str, float]:
            return {"mean_items": sum(self.stub.batches) / len(self.stub.batches)}

    return serve.deployment(max_ongoing_requests=MAX_ONGOING)(Window).bind()


ARMS = {"batchwright (defaults)": our_app, "Ray @serve.batch, 10 ms": window_app}


def measure(app: Any, rate: float, seconds: float, seed: int) -> dict[str, Any]:
    from ray import serve

    handle = serve.run(app, name="arm", route_prefix=None)

    async def ask(length: int) -> int:
        return await handle.remote(length)

    load = poisson(rate, seconds, seed)
    handle.remote(1).result()  # the handle finds its replicas
    answers = asyncio.run(drive(ask, load))
    mean_items = handle.stats.remote().result()["mean_items"]
    serve.delete("arm")
    return summarise(load, answers, [mean_items])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[50, 150])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    ray.cloudpickle.register_pickle_by_value(serving_load)  # replicas do not see this folder
    print(f"{'arm':26} {'rate':>5} {'p50 ms':>7} {'p99 ms':>7} {'in time/s':>9} {'missed':>7} {'batch':>6}")
    rows = []
    for rate in options.rates:
        for name, make in ARMS.items():
            row = {"arm": name, "rate": rate, **measure(make(), rate, options.seconds, options.seed)}
            rows.append(row)
            shown = [row[key] if row[key] is not None else float("nan") for key in ("p50_ms", "p99_ms", "goodput")]
            print(f"{name:26} {rate:5.0f} {shown[0]:7.1f} {shown[1]:7.1f} {shown[2]:9.1f}", end=" ")
            print(f"{row['missed']:7.1%} {row['mean_batch']:6.2f}", flush=True)
    ray.shutdown()
    if options.output:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "ray": ray.__version__}
        options.output.write_text(json.dumps({"machine": machine, "seconds": options.seconds, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
