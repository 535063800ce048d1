# Image of the trainer. BASE_IMAGE is a CUDA devel image (the extension is compiled here, so nvcc is wanted) with
# torch >= 2.10 in it, whose build of torch is kept; on an image without torch, requirements.txt installs it.
ARG BASE_IMAGE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel
FROM ${BASE_IMAGE}

# Not called UID and GID: in bash UID is a read-only variable, and the build argument would be lost without a word.
ARG USER_UID=1000
ARG USER_GID=1000

USER root

# A compiler and, where the python in use is the distribution's own, its headers and venv.
RUN set -eu; export DEBIAN_FRONTEND=noninteractive; \
    packages="ca-certificates g++ make"; \
    case "$(command -v python3 || echo /usr/bin/python3)" in \
        /usr/bin/*) packages="$packages python3 python3-dev python3-venv" ;; \
    esac; \
    apt-get update; \
    apt-get install -y --no-install-recommends $packages; \
    rm -rf /var/lib/apt/lists/*

# A virtual environment on top of the image's python: packages go in without touching the base (which newer
# distributions forbid), torch is seen through it, and `python` has one known place whatever the base calls it.
# The torch of the base is kept if it is new enough, and pinned so that no dependency replaces it.
COPY requirements.txt /opt/aura/
RUN set -eu; cd /opt/aura; \
    new_enough='import torch, sys; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10))'; \
    base=""; \
    for candidate in python3 python; do \
        if "$candidate" -c "$new_enough" 2>/dev/null; then base=$candidate; fi; \
    done; \
    "${base:-python3}" -m venv --system-site-packages /opt/aura/venv; \
    : > constraints.txt; \
    cp requirements.txt wanted.txt; \
    if [ -n "$base" ]; then \
        site=$(/opt/aura/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
        # When the base's python is a virtual environment itself, ours looks past it: name its folder outright.
        /opt/aura/venv/bin/python -c 'import torch' 2>/dev/null \
            || "$base" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/base.pth"; \
        /opt/aura/venv/bin/python -c 'import torch; print(f"torch=={torch.__version__}")' > constraints.txt; \
        grep -viE '^[[:space:]]*torch([^a-z0-9_-]|$)' requirements.txt > wanted.txt || true; \
    fi; \
    /opt/aura/venv/bin/python -m pip install --no-cache-dir ninja -c constraints.txt; \
    /opt/aura/venv/bin/python -m pip install --no-cache-dir -r wanted.txt -c constraints.txt; \
    # The base's torchrun would start the base's python, which lacks what was just installed.
    printf '%s\n' '#!/opt/aura/venv/bin/python' 'from torch.distributed.run import main' 'main()' \
        > /opt/aura/venv/bin/torchrun; \
    chmod 755 /opt/aura/venv/bin/torchrun

# PYTHON is what ddp_launch.sh and make take: a .venv in the mounted folder belongs to the machine outside.
# USER: programs that ask for the user's name must not fail for a uid without an account.
# AURA_BUILD_DIR lies outside /workspace, which compose covers with the folder of the machine outside.
ENV VIRTUAL_ENV=/opt/aura/venv \
    PATH=/opt/aura/venv/bin:${PATH} \
    PYTHON=/opt/aura/venv/bin/python \
    AURA_BUILD_DIR=/opt/aura/build \
    HOME=/home/aura \
    USER=aura \
    PYTHONUNBUFFERED=1

# /etc/profile sets PATH anew in login shells (`bash -lc`): put ours back. An existing owner of the uid or gid stays.
RUN set -eu; \
    printf 'export PATH="%s"\n' "$PATH" > /etc/profile.d/zz-aura.sh; \
    grep -q profile.d /etc/profile || echo '. /etc/profile.d/zz-aura.sh' >> /etc/profile; \
    getent group "$USER_GID" >/dev/null || groupadd --gid "$USER_GID" aura; \
    getent passwd "$USER_UID" >/dev/null \
        || useradd --uid "$USER_UID" --gid "$USER_GID" --home-dir "$HOME" --no-create-home --shell /bin/bash aura; \
    mkdir -p "$HOME" "$AURA_BUILD_DIR" /workspace; \
    chown "$USER_UID:$USER_GID" "$HOME" /workspace; \
    chmod 1777 "$HOME" "$AURA_BUILD_DIR" /workspace

# The extension, compiled once for whoever runs the image with any uid; a copy of the sources to run without a mount.
WORKDIR /workspace
COPY --chown=${USER_UID}:${USER_GID} . /workspace
RUN set -eu; \
    python -c 'import sys; from aura import extension; sys.exit(extension.load() is None)'; \
    chmod -R a+rwX "$AURA_BUILD_DIR" "$HOME" /workspace

USER ${USER_UID}:${USER_GID}
ENTRYPOINT []
CMD ["bash", "-l"]
