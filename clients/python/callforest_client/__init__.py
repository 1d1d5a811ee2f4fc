"""The typed clients of the Callforest services."""
