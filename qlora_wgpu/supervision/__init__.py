"""Commands in a child process, so that a crash of the GPU driver ends with an explanation."""
