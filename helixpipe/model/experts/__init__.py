"""Mixtures of experts: routing with exact auxiliary losses, and the layer, of megatron-core's own parts."""
