"""The same plan under PyTorch's CUDA allocators: batches of many shapes, near the limit of the memory.

    python benchmarks/gpu_allocators.py --lengths lengths.npy --output benchmarks/results/gpu_allocators.json

Model, loop and budget are those of gpu_training.py. Every allocator has a process of its own, since it is chosen when
CUDA starts. `retries` counts how often the allocator gave its cached blocks back to find room, which stops the device.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

SETTINGS = (
    "expandable_segments:False", "expandable_segments:True", "backend:cudaMallocAsync",
    "expandable_segments:True,roundup_power2_divisions:8", "expandable_segments:True,garbage_collection_threshold:0.8",
)  # fmt: skip
NUM_PAIRS, NUM_CALIBRATED = 40_000, 4_000


def measure(options: argparse.Namespace) -> None:
    """Calibrate, plan and train for a while under the allocator of this process; print the row as JSON."""
    import numpy as np
    from _gpu import GIB, Device
    from _pairs import Pairs, make_lengths, read_lengths
    from _training import Arm, Loop, run_arm, whole
    from gpu_training import calibrated_budget, planned

    import batchwright as bw

    with Device(options.cap_gib * GIB, smoke=False) as device:
        lengths = read_lengths(options.lengths, NUM_PAIRS) if options.lengths else make_lengths(NUM_PAIRS)
        loop = Loop(device, small=False)
        budget, _ = calibrated_budget(loop, lengths[:NUM_CALIBRATED], options.fill * device.cap_bytes)
        pairs = Pairs(lengths, loop.vocabulary)
        loop.step(loop.send(pairs.collate(np.arange(2))))
        batches = planned(lengths, budget, bw.Sorted())
        arm = Arm("calibrated, Sorted()", pairs, batches, partial(whole, loop), options.epoch_seconds)
        print(json.dumps({**run_arm(loop, arm), "about": device.describe()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, help="a .npy file of real lengths (N, 2); else drawn ones")
    parser.add_argument("--cap-gib", type=float, default=32.0)
    parser.add_argument("--fill", type=float, default=0.95, help="share of the cap to plan for (default: 0.95)")
    parser.add_argument("--epoch-seconds", type=float, default=7.0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(options)
        return
    rows = []
    for setting in SETTINGS:
        command = [sys.executable, __file__, *sys.argv[1:], "--child"]
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting}
        printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        row = json.loads(printed.splitlines()[-1])
        about = {**row.pop("about"), "allocator": "by row"}
        rows.append({"allocator": setting, **row})
        print(json.dumps(rows[-1]), flush=True)
        if options.output:
            options.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
