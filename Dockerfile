# Trains on the processor, by lavapipe, or on a card:
#   docker build -t qlora-wgpu .
#   docker run --rm -v "$PWD:/work" -v qlora-cache:/cache qlora-wgpu train run.yaml
# AMD, Intel:  --device /dev/dri --group-add "$(stat -c %g /dev/dri/renderD128)"
# NVIDIA:      --gpus all, with NVIDIA's container toolkit on the host, which brings its driver in
FROM python:3.13-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends libvulkan1 mesa-vulkan-drivers \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN python -m pip install --no-cache-dir -c /src/constraints/3.13.txt "/src[dawn,parquet,serve]"
# Compiled shaders, checks of the driver, quantized weights and the hub's files: keep it as a volume.
ENV XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
# Without these, NVIDIA's toolkit leaves its Vulkan driver out.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,graphics,utility
WORKDIR /work
ENTRYPOINT ["qlora-wgpu"]
CMD ["doctor"]
