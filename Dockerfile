# SageTrain on a CUDA base image, with the versions of constraints.txt. Not built by the tests: they read it.
#
#   docker build -t sagetrain .
#   docker run --gpus all --ipc host -v "$PWD:/workspace" sagetrain plan 325m
#
# torch brings its own CUDA libraries; of the image, DeepSpeed looks for nvcc, and Triton compiles with gcc.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# pdsh and ssh: the deepspeed launcher reaches other hosts with them.
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        python3 python3-dev python3-venv gcc g++ openssh-client pdsh \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/sagetrain/bin:$PATH
RUN python3 -m venv /opt/sagetrain

WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt torch
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY sagetrain sagetrain
COPY kernels kernels
COPY configs configs
COPY launch launch
RUN pip install --no-cache-dir -c constraints.txt .

WORKDIR /workspace
ENTRYPOINT ["sagetrain"]
CMD ["--help"]
