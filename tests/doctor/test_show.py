from dataclasses import replace

from batchwright._cli.screen import Screen
from batchwright._doctor.advice import advise
from batchwright._doctor.records import Attention
from batchwright._doctor.show import advice_lines, attention_lines, findings_lines, launch_lines, machine_lines

from .made import ATTENTION, H200, LAUNCH, ON_H200

SCREEN = Screen(width=80)


def test_the_machine_is_described_with_what_is_absent():
    lines = machine_lines(replace(H200, num_devices=8, versions={"torch": "2.11.0", "cuda": None}))
    assert lines[0] == "device    8 x NVIDIA H200 (cuda), 16 cores"
    assert lines[1] == "memory    139.0 of 140.0 GiB free"
    assert lines[2:] == ["versions  torch 2.11.0", "absent    cuda"]


def test_kernels_stand_side_by_side():
    lines = attention_lines((*ATTENTION[:2], Attention(backend="math")))
    assert lines[2].split() == ["default", "(cudnn)", "510.0", "ms", "85.0", "ms", "425.0", "ms", "masked"]
    assert lines[3].split()[-1] == "none"
    assert lines[4].split() == ["math", "not", "here"]


def test_steps_have_their_throughput():
    lines = launch_lines(LAUNCH)
    # 8,192 / 0.093 = 88,086.
    assert lines[5].split() == ["8,192", "93.0", "ms", "88,086"]


def test_advice_is_numbered_and_followed_by_its_line():
    lines = advice_lines(advise(ON_H200), SCREEN)
    assert lines[0].startswith("1. The first step of a batch shape")
    assert "       torch.backends.cuda.enable_cudnn_sdp(False)" in lines
    assert any(line.startswith("2. Steps of up to 8,192 tokens") for line in lines)
    assert all(len(line) <= 80 for line in lines)


def test_everything_measured_is_shown():
    text = "\n".join(findings_lines(ON_H200, SCREEN))
    assert "NVIDIA H200" in text
    assert "new shape" in text
    assert "tokens/s" in text
