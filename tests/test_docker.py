"""Dockerfile, .dockerignore and docker-compose.yml keep what the guides promise."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PASSED_ON = {"MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "GPUS_PER_NODE", "RANK", "WORLD_SIZE", "LOCAL_RANK"}


@pytest.fixture(scope="module")
def compose():
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def dockerfile():
    """The instructions as (name, rest), comments off and continuation lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
             if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in whole.splitlines() if line.strip()]


def rest_of(dockerfile, name):
    return [rest for instruction, rest in dockerfile if instruction == name]


def environment_names(service):
    return {entry.split("=")[0] for entry in service["environment"]}


def test_trainer(compose):
    trainer = compose["services"]["trainer"]
    assert ".:/workspace" in trainer["volumes"]
    assert trainer["working_dir"] == "/workspace"
    assert trainer["user"] == "${UID:-1000}:${GID:-1000}"
    assert trainer["network_mode"] == "host"
    assert "shm_size" in trainer
    assert environment_names(trainer) >= PASSED_ON
    device = trainer["deploy"]["resources"]["reservations"]["devices"][0]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]


def test_trainer_without_a_card(compose):
    assert "deploy" not in compose["services"]["trainer-cpu"]
    assert compose["services"]["trainer-cpu"]["image"] == compose["services"]["trainer"]["image"]


def test_build_arguments_exist_in_the_dockerfile(compose, dockerfile):
    declared = {rest.split("=")[0] for rest in rest_of(dockerfile, "ARG")}
    assert set(compose["services"]["trainer"]["build"]["args"]) == declared


def test_one_default_base_image(compose, dockerfile):
    default = next(rest.split("=", 1)[1] for rest in rest_of(dockerfile, "ARG") if rest.startswith("BASE_IMAGE="))
    assert default in compose["services"]["trainer"]["build"]["args"]["BASE_IMAGE"]
    assert re.fullmatch(r"pytorch/pytorch:2\.1\d\.\d+-cuda13\.\d+-cudnn9-devel", default)


def test_dockerfile(dockerfile):
    assert dockerfile[0][0] == "ARG" and dockerfile[1] == ("FROM", "${BASE_IMAGE}")
    assert rest_of(dockerfile, "USER")[-1] == "${USER_UID}:${USER_GID}"
    assert not {"UID", "GID"} & {rest.split("=")[0] for rest in rest_of(dockerfile, "ARG")}  # read-only in bash
    assert all(rest.startswith("set -eu;") for rest in rest_of(dockerfile, "RUN"))
    runs = "\n".join(rest_of(dockerfile, "RUN"))
    assert "/etc/profile.d/" in runs and "extension.load()" in runs
    build_dir = re.search(r"AURA_BUILD_DIR=(\S+)", "\n".join(rest_of(dockerfile, "ENV")))[1]
    assert not build_dir.startswith("/workspace")


@pytest.mark.parametrize("line, kept", [
    ("torch==2.13.0", False), ("torch>=2.10", False), ("torch", False), ("torch[opt]==2.13", False),
    ("Torch ==2.13", False),
    ("torchvision==0.28", True), ("torch-foo==1", True), ("sentencepiece==0.2.0", True), ("# torch", True),
])
def test_the_torch_of_the_image_is_kept(dockerfile, line, kept):
    pattern = re.search(r"grep -viE '([^']+)'", "\n".join(rest_of(dockerfile, "RUN")))[1]
    done = subprocess.run(["grep", "-viE", pattern], input=line + "\n", capture_output=True, text=True, timeout=30)
    assert (done.stdout == line + "\n") is kept


def test_what_a_run_leaves_behind_stays_out_of_the_image():
    ignored = set((ROOT / ".dockerignore").read_text(encoding="utf-8").split())
    assert {".git", ".venv", "Data", "checkpoints", "logs", "*.pth", ".env"} <= ignored
    for needed in ("requirements.txt", "aura", "csrc", "train_gpt2_spanish.py", "ddp_launch.sh"):
        assert needed not in ignored


def compose_program():
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker"):
        found = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60)
        return ["docker", "compose"] if found.returncode == 0 else None
    return None


@pytest.mark.skipif(compose_program() is None, reason="docker compose is not installed")
def test_compose_accepts_it(tmp_path):
    (tmp_path / "docker-compose.yml").write_text((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    (tmp_path / ".env").write_text("UID=4321\nGID=8765\n")
    environment = {name: value for name, value in os.environ.items() if name not in PASSED_ON | {"UID", "GID"}}
    done = subprocess.run([*compose_program(), "config"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                          env={**environment, "NNODES": "2", "MASTER_ADDR": "192.168.1.10"})
    assert done.returncode == 0, done.stderr
    assert "4321:8765" in done.stdout
    assert "192.168.1.10" in done.stdout
    assert re.search(r"NNODES: .?2", done.stdout)
