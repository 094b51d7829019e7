# For GPUs; from PyTorch's public image, whose torch and CUDA stay as they are. Nothing here has run on a GPU yet.
#
#     docker build --tag helixpipe .
#     docker run --gpus all --ipc host --ulimit memlock=-1 helixpipe python -m pytest -m gpu
FROM pytorch/pytorch:2.8.0-cuda12.8-cudnn9-devel

ENV CUDA_DEVICE_MAX_CONNECTIONS=1 \
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /workspace/helixpipe
COPY . .
RUN pip install megatron-core==0.16.1 safetensors==0.8.0 tensorboard==2.21.0 pytest hypothesis \
    && pip install --no-deps --editable .

CMD ["helixpipe", "--help"]
