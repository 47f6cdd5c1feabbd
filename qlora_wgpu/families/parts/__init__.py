"""What decoders are put together from."""
