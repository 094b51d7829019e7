"""NVIDIA's own checkout of Megatron-LM, unmodified, on the CPU: `make test-megatron MEGATRON_LM=DIR`."""
