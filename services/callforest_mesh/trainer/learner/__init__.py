"""The learner: a Megatron-core model and its optimizer, alone in a child of the Trainer."""
