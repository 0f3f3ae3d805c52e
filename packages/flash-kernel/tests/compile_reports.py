"""Runs a script that compiles kernels, and reads the line of JSON that it prints for each."""

import json
import os
import subprocess
import sys
from pathlib import Path


def compile_reports(script, *options):
    """Return the reports of a script beside this file.

    It is a process of its own, because one in which Triton interprets cannot compile.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *options],
        capture_output=True,
        text=True,
        env=environment | {"TRITON_DEFAULT_FP_FUSION": "1"},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    lost = [report for report in reports if report.get("lost_operands")]
    assert not lost, f"products read from addresses nobody wrote, see machine_code.py: {lost}"
    expected = os.environ.get("FLASH_KERNEL_EXPECT_TRITON")
    assert expected is None or {report["triton"] for report in reports} == {expected}
    return reports
