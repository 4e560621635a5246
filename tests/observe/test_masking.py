"""Secrets do not reach what is stored or sent."""

from __future__ import annotations

import sys
import time

import pytest

from relight.capture.environment import environment
from relight.observe.masking import MASK, mask_arguments, mask_text

SECRET = "hunter2-s3cr3t"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--api-key", SECRET], ["--api_key=" + SECRET], ["-password", SECRET], ["--wandb.api_key", SECRET], ["wandb.apiKey=" + SECRET],
        ["--hf-token", SECRET], ["++db.password=" + SECRET], ["+auth.token=" + SECRET], ["SECRET=" + SECRET], ["--key", SECRET],
        [f"postgresql://me:{SECRET}@host/db"], [f"--url=s3://{SECRET}@bucket/x"], [f"--header=Authorization: {SECRET}"],
        ["--aws-secret-access-key", SECRET], ["--passphrase", SECRET], ["--accessKey=" + SECRET], ["--credentials", SECRET],
        [f"--opts=lr=1,api_key={SECRET}"], [f'{{"api_key": "{SECRET}", "lr": 1}}'], ["-H", f"Authorization: Bearer {SECRET}"], ["--password", "-" + SECRET],
        ["--dbpassword", SECRET], ["--hftoken", SECRET], ["--secretkey", SECRET], ["--tokens", SECRET], ["--keys", "abc", SECRET],
        ["--private-key", f"-----BEGIN KEY----- {SECRET}"], [f"postgres://u:p/{SECRET}@host/db"], [f"postgres://u:{SECRET}?x@host/db"], [f"postgres://u:{SECRET}#x@host/db"], [f"postgres://u:{SECRET}@x@host/db"],
        ["--password=abc," + SECRET], ["--password=a&" + SECRET], ["--passwords", "one", SECRET], ["--cookie", f"session={SECRET}"], ["--pass", SECRET],
        [f"https://host/x?sig={SECRET}"],
    ],
)  # fmt: skip
def test_a_secret_argument_is_masked(arguments: list[str]) -> None:
    """The value of an option, setting or URL that names a key, token, secret or password is not in what is stored."""
    masked = mask_arguments(["train.py", *arguments, "--steps", "10"])
    assert SECRET not in " ".join(masked) and MASK in " ".join(masked)
    assert masked[0] == "train.py" and masked[-2:] == ["--steps", "10"]


@pytest.mark.parametrize(
    "arguments",
    [["--max-tokens", "4096"], ["--pad-token-id=0"], ["--tokenizer", "gpt2"], ["--lr", "1e-3"], ["--mode", "a,b"], ["model.keyframes=3"],
     ["--monkey", "x"], ["--token", "--verbose"], ["data=s3://bucket/a"], ["--eos_token", "2"], ["--save-key-values=true"]],
)  # fmt: skip
def test_an_ordinary_argument_stays(arguments: list[str]) -> None:
    """Names that only contain such a word, and plain numbers, are stored as given."""
    assert mask_arguments(arguments) == arguments


def test_a_checkpoint_stores_masked_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The captured environment has the script's arguments, without their secrets."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--api-key", SECRET, "--lr", "0.1"])
    assert environment()["argv"] == ["train.py", "--api-key", MASK, "--lr", "0.1"]


def test_a_text_is_masked() -> None:
    """Users of URLs and values after such names are replaced in texts, too."""
    assert SECRET not in mask_text(f"could not reach https://me:{SECRET}@host/x with api_key={SECRET}")


@pytest.mark.parametrize(
    "long",
    [
        "a" * 1_000_000,
        "a-" * 500_000,
        "a=" * 500_000,
        "://" * 300_000,
        "x." * 500_000,
        " " * 1_000_000,
        "token" * 200_000,
    ],
)
def test_a_long_argument_takes_no_time(long: str) -> None:
    """The time for a text grows with its length at most, and what is cut off is not stored."""
    started = time.thread_time()
    assert len(mask_arguments(["--config", long])[1]) < 20_000
    assert len(mask_text(long)) < 20_000
    assert time.thread_time() - started < 1


def test_a_secret_at_the_end_of_a_long_text_is_not_stored() -> None:
    """A text that is cut off loses its rest, so a secret in it is masked or gone."""
    assert (
        SECRET not in mask_text("x " * 5000 + f"api_key={SECRET}")
        and SECRET not in mask_arguments(["y" * 5000 + f",token={SECRET}"])[0]
    )
