"""Where attempts begin and calls are judged; keeps no state."""
