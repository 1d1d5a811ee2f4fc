"""The forest: selection, paths, ownership of loss, padding and packing."""
