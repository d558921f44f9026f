"""Findings made by hand: an H200 as it was measured with PyTorch 2.11, and a machine without a GPU."""

from dataclasses import replace

from batchwright.cli.doctor.records import (
    Attention,
    Findings,
    GraphRow,
    Graphs,
    Launch,
    LaunchRow,
    Machine,
    Visits,
)

GIB = 2**30

H200 = Machine(
    device="cuda",
    name="NVIDIA H200",
    num_devices=1,
    total_bytes=140 * GIB,
    free_bytes=139 * GIB,
    has_bfloat16=True,
    allocator="expandable_segments:True",
    num_cores=16,
    versions={"torch": "2.11.0", "numba": "0.60.0"},
)
LAPTOP = replace(H200, device="cpu", name="some CPU", allocator="")

# A first visit takes about 510 ms with the default, cuDNN, against 85 ms later; 140 ms against 97 ms without it.
ATTENTION = (
    Attention(backend="default", visits=Visits(0.510, 0.085), takes_mask=True, picks="cudnn"),
    Attention(backend="flash", visits=Visits(0.090, 0.080)),
    Attention(backend="efficient", visits=Visits(0.140, 0.097), takes_mask=True),
    Attention(backend="cudnn", visits=Visits(0.520, 0.085), takes_mask=True),
    Attention(backend="math", visits=Visits(0.300, 0.250), takes_mask=True),
)
# Steps of up to about 8k tokens take 85 to 93 ms, 16k tokens 149 ms.
LAUNCH = Launch(
    model="12 + 12 layers of width 1,024",
    rows=(
        LaunchRow(1024, 0.085),
        LaunchRow(2048, 0.086),
        LaunchRow(4096, 0.088),
        LaunchRow(8192, 0.093),
        LaunchRow(16384, 0.149),
        LaunchRow(32768, 0.290),
    ),
    kernel_seconds=9e-6,
)
ON_H200 = Findings(machine=H200, attention=ATTENTION, launch=LAUNCH)
# 3.5 times as fast at 4,096 tokens and 1.1 times at 16,384.
GRAPHS = Graphs(
    model="12 layers of width 1,024",
    rows=(
        GraphRow(1024, 0.040, 0.005),
        GraphRow(4096, 0.042, 0.012),
        GraphRow(16384, 0.0495, 0.045),
        GraphRow(32768, 0.091, 0.090),
    ),
    capture_seconds=1.25,
)
GRAPHED_H200 = replace(ON_H200, graphs=GRAPHS)
