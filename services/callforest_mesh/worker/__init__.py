"""The worker: hosts an engine, renders, splices, generates, captures and stages."""
