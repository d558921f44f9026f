import json
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from batchwright.cli import main
from batchwright.cli.doctor.advice import advise
from batchwright.cli.doctor.command import (
    advice_lines,
    attention_lines,
    findings_lines,
    graph_lines,
    launch_lines,
    machine_lines,
    more_graph_lines,
)
from batchwright.cli.doctor.machine import default_device
from batchwright.cli.doctor.records import Attention, Graphs
from batchwright.cli.screen import Screen

from .made import ATTENTION, GRAPHED_H200, GRAPHS, H200, LAUNCH, ON_H200

SCREEN = Screen(width=80)


def run(capsys, *arguments):
    """Return exit code, standard output and standard error of a command."""
    code = main([*arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_doctor_shows_measurements_and_advice(capsys):
    code, out, err = run(capsys, "doctor", "--quick")
    assert (code, err) == (0, "")
    for part in ("device ", "memory ", "versions ", "new shape", "seen before", "tokens/s"):
        assert part in out
    # A busy machine gets no number, and hears why.
    assert "bw.MaxTokens(" in out or "Too busy to say which batches are too small" in " ".join(out.split())


def test_doctor_as_json_holds_the_same(capsys):
    code, out, _ = run(capsys, "doctor", "--quick", "--json")
    found = json.loads(out)
    assert code == 0
    assert found.keys() == {"machine", "attention", "launch", "graphs", "load", "encoding", "decoding", "advice"}
    assert {"shapes", "sizes"} <= {advice["topic"] for advice in found["advice"]}
    assert found["launch"]["knee_tokens"] in [row["tokens"] for row in found["launch"]["rows"]]


def test_doctor_help_teaches(capsys):
    with pytest.raises(SystemExit) as ending:
        main(["doctor", "--help"])
    out = capsys.readouterr().out
    assert ending.value.code == 0
    for part in ("new batch shape costs", "--quick", "--json", "batchwright doctor --json > machine.json"):
        assert part in out


def test_the_commands_include_doctor(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "measure this machine" in capsys.readouterr().out


def test_without_torch_doctor_says_what_to_install():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from batchwright.cli import main\n"
        "sys.exit(main(['doctor', '--quick']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "batchwright: error: torch is not installed; run: pip install 'batchwright[torch]'\n"


def test_the_machine_is_described_with_what_is_absent():
    lines = machine_lines(replace(H200, num_devices=8, versions={"torch": "2.11.0", "cuda": None}))
    assert lines[0] == "device    8 x NVIDIA H200 (cuda), 16 cores"
    assert lines[1] == "memory    139.0 of 140.0 GiB free"
    assert lines[2:] == ["versions  torch 2.11.0", "missing   cuda"]


def test_kernels_stand_side_by_side():
    lines = attention_lines((*ATTENTION[:2], Attention(backend="math")))
    assert lines[2].split() == ["default", "(cudnn)", "510.0", "ms", "85.0", "ms", "425.0", "ms", "masked"]
    assert lines[3].split()[-1] == "none"
    assert lines[4].split() == ["math", "not", "here"]


def test_steps_have_their_throughput():
    lines = launch_lines(LAUNCH)
    # 8,192 / 0.093 = 88,086.
    assert lines[5].split() == ["8,192", "93.0", "ms", "88,086"]


def test_steps_stand_beside_their_graphs():
    lines = graph_lines("graphs", "tokens per step, forward and backward", GRAPHS, SCREEN)
    # 42 / 12 = 3.5.
    assert lines[3].split() == ["4,096", "42.0", "ms", "12.0", "ms", "3.5", "x"]
    assert lines[-1] == "Capturing all of these took 1.2 s."


def test_what_was_not_captured_is_said_below():
    problem = "a step of 65,536 tokens could not be captured: out of memory"
    lines = graph_lines("graphs", "tokens", replace(GRAPHS, problem=problem), SCREEN)
    assert lines[-1] == f"graphs    {problem}."
    assert graph_lines("graphs", "tokens", Graphs(problem=problem), SCREEN) == lines[-1:]


def test_other_passes_stand_below_steps_and_what_all_lack_is_said_once():
    lines = more_graph_lines("decoding", "rows", GRAPHS, GRAPHED_H200, SCREEN)
    assert lines[0].startswith("rows")
    problem = "a step of 1,024 tokens could not be captured: out of memory"
    lacking = more_graph_lines("encoding", "tokens", Graphs(problem=problem), GRAPHED_H200, SCREEN)
    assert lacking == [f"encoding  {problem}.", ""]
    assert more_graph_lines("encoding", "tokens", Graphs(), ON_H200, SCREEN) == []


def test_without_cuda_one_line_says_that_graphs_need_it(capsys):
    if default_device().type == "cuda":
        pytest.skip("needs a machine without a CUDA device")
    _, out, _ = run(capsys, "doctor", "--quick")
    assert [line for line in out.splitlines() if "graph" in line] == [
        "graphs    CUDA graphs need a CUDA device, and torch sees none."
    ]


def test_advice_is_numbered_and_followed_by_its_line():
    lines = advice_lines(advise(ON_H200), SCREEN)
    assert lines[0].startswith("1. The first step with a new batch shape")
    assert "       torch.backends.cuda.enable_cudnn_sdp(False)" in lines
    assert any(line.startswith("2. Steps of up to 8,192 tokens") for line in lines)
    assert all(len(line) <= 80 for line in lines)


def test_everything_measured_is_shown():
    text = "\n".join(findings_lines(GRAPHED_H200, SCREEN))
    assert "NVIDIA H200" in text
    assert "new shape" in text
    assert "tokens/s" in text
    assert "CUDA graph" in text
