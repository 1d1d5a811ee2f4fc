"""The Staging service: the tokens of calls, durable until they were trained."""
