"""The watch over secrets finds what it watches for: a test that lets one out fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = "from tests.conftest import noted_secrets, pytest_runtest_makereport\n"
TESTS = """
import base64, logging, subprocess, sys
from relight.errors import ConfigError
from relight.format.cipher import Secret
from relight.keys import Keychain, write_key_file

VALUE = bytes(range(32))

def test_silent(tmp_path):
    write_key_file(str(tmp_path / "the.key"))
    Keychain.from_specs(f"file:{tmp_path / 'the.key'}")
    Secret(VALUE)

def test_printed():
    Secret(VALUE)
    print(VALUE.hex())

def test_logged():
    Secret(VALUE)
    logging.getLogger("x").warning(base64.b64encode(VALUE).decode())

def test_told():
    Secret(VALUE)
    ConfigError(f"no such key: {VALUE!r}")

def test_given_to_a_process():
    Secret(VALUE)
    subprocess.run([sys.executable, "-c", "", VALUE.hex()], check=True)

def test_written(tmp_path):
    Secret(VALUE)
    (tmp_path / "dump").write_bytes(b"abc" + VALUE)

def test_written_into_much(tmp_path):
    Secret(VALUE)
    with open(tmp_path / "large", "wb") as file:
        file.seek(80 << 20)
        file.write(VALUE)

def test_said_by_another_process():
    Secret(VALUE)
    subprocess.run([sys.executable, "-c", f"print(bytes(range({len(VALUE)})).hex())"], check=True, capture_output=True)

def test_of_a_setting(monkeypatch):
    monkeypatch.setenv("THE_API_TOKEN", "a-token-0123456789")
    print("a-token-0123456789")

def test_of_another_processes_setting():
    run = "import os; print(os.environ['A_PASSWORD'])"
    subprocess.run([sys.executable, "-c", run], check=True, env={"A_PASSWORD": "a-password-0123456789"}, capture_output=True)

def test_of_another_process(tmp_path):
    told = f"from relight.keys import write_key_file; write_key_file({str(tmp_path / 'the.key')!r})"
    subprocess.run([sys.executable, "-c", told], check=True)
    (tmp_path / "log").write_text((tmp_path / "the.key").read_text()[10:])
"""


def test_a_test_that_prints_a_secret_fails(tmp_path: Path) -> None:
    """Printed, logged, in an error, on a command line, in a file; and a test that keeps it to itself does not."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rAE", "-p", "no:cacheprovider", "-c", str(tmp_path / "pytest.ini"), str(tmp_path)],
        cwd=ROOT, env={**os.environ, "PYTEST_ADDOPTS": ""}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    wrong = {
        line.split("::")[1].split()[0] for line in done.stdout.splitlines() if line.startswith("ERROR") and "::" in line
    }
    everyone = {name.split("(")[0] for name in TESTS.split("def ")[1:]}
    assert wrong == everyone - {"test_silent"}, done.stdout
