"""The edge for harnesses: plain OpenAI-style HTTP in, captured calls out."""
