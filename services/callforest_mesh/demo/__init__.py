"""The demo: one real loop from an ordinary harness to the optimizer and back."""
