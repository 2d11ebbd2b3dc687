"""The environment that runs on other machines get."""

from __future__ import annotations

from looplab.launch.remote import passed_on

ENVIRONMENT = {
    "PATH": "/bin", "HOME": "/home/me", "HF_TOKEN": "t", "HF_HOME": "/hf", "SLURM_CONF": "/etc/slurm.conf",
    "HOSTNAME": "login1", "TMPDIR": "/tmp/me", "SSH_CONNECTION": "x", "DISPLAY": ":0", "TERM": "xterm", "PWD": "/",
    "CUDA_VISIBLE_DEVICES": "", "SLURM_JOB_ID": "1", "RAY_ADDRESS": "auto", "LOOPLAB_RUN_ID": "outer", "_": "/bin/env",
}  # fmt: skip


def test_variables_of_the_engines_machine_stay_there() -> None:
    assert set(passed_on(ENVIRONMENT)) == {"PATH", "HOME", "HF_TOKEN", "HF_HOME", "SLURM_CONF"}


def test_a_lab_can_name_what_is_passed_on() -> None:
    assert set(passed_on(ENVIRONMENT, ["HF_*", "HOME"])) == {"HF_TOKEN", "HF_HOME", "HOME"}
    assert passed_on(ENVIRONMENT, []) == {}
