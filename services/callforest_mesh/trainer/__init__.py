"""The Trainer: subscribes to groups, turns rewards into advantages, steps the learner."""
