"""Measuring: steps, kernels and the GPU's own ceilings. Nothing else imports it but the CLI."""
