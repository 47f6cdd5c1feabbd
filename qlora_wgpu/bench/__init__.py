"""Measuring: steps, kernels and the adapter's own ceilings. Nothing else imports it but the CLI."""
