"""vLLM as the worker's engine: a child process that generates, and the worker's side of it."""
