import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from batchwright.cli import main


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
    assert "bw.MaxTokens(" in out


def test_doctor_as_json_holds_the_same(capsys):
    code, out, _ = run(capsys, "doctor", "--quick", "--json")
    found = json.loads(out)
    assert code == 0
    assert found.keys() == {"machine", "attention", "launch", "advice"}
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
